"""What every family keeps, as data: a record a family, of which the contracts of both runtimes make their cases.

To add a family, add its record. What it alone does stays in a test file of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.support.exported import DEVICES
from tests.support.families.fast_vlm import FAST_VLM
from tests.support.families.gemma import GEMMA3, GEMMA4
from tests.support.families.glm_ocr import GLM_OCR
from tests.support.families.internvl import INTERNVL
from tests.support.families.lfm2_vl import LFM2
from tests.support.families.lfm3_vl import LFM3
from tests.support.families.llava_next import GRANITE, LLAVA_NEXT
from tests.support.families.llava_onevision import ONEVISION
from tests.support.families.minicpm import MINICPM
from tests.support.families.paddleocr_vl import PADDLE
from tests.support.families.paligemma import PALIGEMMA, PALIGEMMA2
from tests.support.families.pixtral import LIGHTON, MINISTRAL3, MISTRAL3, PIXTRAL
from tests.support.families.qwen import QWEN2, QWEN3, QWEN3_EXPERTS, QWEN25, QWEN35, QWEN35_EXPERTS
from tests.support.families.smolvlm import IDEFICS, SMOLVLM
from tests.support.families.videos import NEXT_VIDEO, VIDEO_LLAVA
from tests.support.reduced import word
from tests.support.statement_records import Method
from tests.support.tiny import Tiny

Size = tuple[int, int]
EXACT = 2e-5  # of logits in float32
NEAR = 1e-4  # where transformers' own forms of a layer differ by half of it
# Of few numbers a row nothing but golden vectors hold; precisions do not depend on what else differs in families.
GOLDEN, GOLDEN_OF_OTHERS = dict.fromkeys(("fp16", "int4")), dict.fromkeys(("bf16", "int8"))
EXTREME = ((160, 10), (10, 160), (64, 64), (65, 64), (199, 201), (1, 150), (1, 1))
OF_PATCHES = "each token of this model covers 2 x 2 patches"
RENUMBERED = "positions of three parts, which cannot be renumbered"
AMONG_TILES = "this model has text between its tiles"


@dataclass(frozen=True)
class Family:
    """`sizes`: of a picture in tiles, if the family has them, of another, and of a small one. `extreme`: sizes that
    transformers takes, too. `alike`: between some of the `ks` no layer has attention.

    `methods`: those that have a plain statement, asked about `pictures` of them; `refused`: specs of reductions, and
    why. `rounded`: precisions, and how far logits of a checkpoint with the changes of `rounding` may be from
    transformers', None where golden vectors alone are compared. `variants`: more checkpoints. `single`: one question
    is asked about an image, without chats. `stated`: `tests.support.statement` says what its decoder computes.
    `dialects`: graphs that no other family has. `traced`: the reductions of traces that libvtx meets, none if empty.
    """

    tiny: Tiny
    ks: tuple[int, ...] = (3, 5)
    tolerance: float = EXACT
    methods: tuple[Method, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    rounded: Mapping[str, float | None] = field(default_factory=dict)
    rounding: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[Tiny, ...] = ()
    pictures: int = 1
    sizes: tuple[Size, Size, Size] = ((150, 60), (40, 90), (40, 40))
    extreme: tuple[Size, ...] = EXTREME
    alike: bool = False
    single: bool = False
    stated: bool = True
    dialects: bool = False
    traced: tuple[str, ...] = ()


# Those that choose within the decoder; beside one family that has all, others have every second one.
WITHIN = (
    Method(fastv=(2, 0.5)), Method(fastv=(2, 0.5), k=5), Method(dart=(8, 2, 2, 2)),
    Method(dart=(8, 2, 2, 2), dart_order="code", k=5), Method(dart=(6, 0, 2, 2)), Method(cdpruner=(5, "embedding")),
    Method(pyramiddrop=(0.6, (1, 3)), k=5),
)  # fmt: skip
MUSTDROP = Method(key=0.2, layers=(2, 4), gamma=0.06, alpha=0.05)
OF_TOWERS = (
    Method(cls_keep=0.5, k=3), MUSTDROP,
    replace(MUSTDROP, positions="renumber", order="merged-first", keys="last-block"),
)  # fmt: skip
OF_TILES = (
    Method(fastv=(2, 0.5)), Method(cls_keep=0.5), replace(MUSTDROP, gamma=0.015, alpha=0.01),
    Method(cdpruner=(7, "embedding")), Method(cdpruner=(5, "none")), Method(divprune=20), Method(visionzip=(4, 2)),
    Method(hiprune=(8, 0.7, 1)), Method(dart=(24, 2, 2, 2)), Method(dart=(24, 0, 2, 2)),
)  # fmt: skip
OF_QWEN = (
    Method(fastv=(2, 0.5)), Method(cdpruner=(6, "embedding")), Method(dart=(8, 2, 2, 2)),
    Method(dart=(8, 2, 2, 2), dart_order="code"), Method(dart=(8, 0, 2, 2)),
)  # fmt: skip
OF_STATES = (
    Method(fastv=(2, 0.5)), Method(fastv=(5, 0.5)), Method(fastv=(2, 0.75), k=5), Method(dart=(8, 2, 2, 2)),
)  # fmt: skip
OF_TWO_BY_TWO = dict.fromkeys(("cls", "mustdrop:tau=off,layers=2/4", "lsm"), OF_PATCHES)
OF_MARKED = dict.fromkeys(("cdpruner", "dart:k=0", "divprune", "random"), AMONG_TILES)
STATE = "layers with {} keep a state, from which none can be taken"
STATELESS = {
    "mustdrop:gamma=0.1,alpha=1,layers=2/5,tau=off,key=0": STATE,
    "visionzip:64": "merges patches by the attention of the tower's class token",
}
RULE = {spec: reason.format("the gated delta rule") for spec, reason in STATELESS.items()}
RULE |= {"fastv:k=3": "reads the attention of layer 3, which has the gated delta rule in this model; .*: 2, 5, 7"}
DART = "dart:keep=8,k={},pivots=2,text_pivots=2"
TRACES_OF_QWEN = (
    "fastv:k=2,ratio=0.5", "cdpruner:keep=0.4,text=none+fastv:k=4,ratio=0.3", DART.format(0),
    f"{DART.format(2)},order=code", "divprune:keep=0.3",
)  # fmt: skip
TRACES_OF_STATES = ("fastv:k=2,ratio=0.5", DART.format(2))  # the first of their layers that has attention
LLAVAS = (
    Tiny(kv_heads=4, projector_act="relu", theta=5e5),
    Tiny(kv_heads=1, feature_layer=-1, projector_act="silu"),
    Tiny(vision="siglip", select="full", attention_bias=True, mlp_bias=True, names="saved"),
    Tiny(head_dim=24, rope="llama3", feature_layer=(-2, -1), names="new"),
    Tiny(head_dim=8, shards=3, tied=True, projector_act="quick_gelu"),
    Tiny(rope="linear", feature_layer=2, projector_act="gelu_pytorch_tanh"),
    Tiny(tokenizer="bytes", template_place="chat_template.json", select="full"),
    Tiny(text="mistral", rope="linear", feature_layer=-1, names="new", tokenizer="bytes"),
    Tiny(text="mistral", vision="siglip", select="full", head_dim=24, tied=True, kv_heads=4),
    Tiny(text="mistral", sliding_window=192, shards=2, projector_bias=False),
    Tiny(text="qwen2", select="full", projector_bias=False, tokenizer="bytes", theta=1e6, names="saved"),
    Tiny(text="qwen2", vision="siglip", select="full", tied=True, kv_heads=4, shards=2),
    Tiny(text="qwen2", vision="siglip", feature_layer=(1, 2, -1), vision_act="gelu", rope="dynamic"),
)  # fmt: skip
FAMILIES = {
    "llava": Family(Tiny(), (2, 3, 5, 8), NEAR, variants=LLAVAS),
    "llava, qwen3": Family(
        Tiny(text="qwen3", attention_bias=True, head_dim=24, rope="yarn"), (3, 5), NEAR, WITHIN + OF_TOWERS
    ),
    "llava, qwen2": Family(Tiny(text="qwen2", select="full"), (3, 5), NEAR, WITHIN[::2] + OF_TOWERS[1:2]),
    "llava, mistral": Family(
        Tiny(text="mistral", head_dim=24, tied=True, rope="longrope"), (3, 5), NEAR, WITHIN[1::2] + OF_TOWERS[::2]
    ),
    "llava, pixtral": Family(
        PIXTRAL, (3, 5), NEAR, WITHIN[:2], {**OF_MARKED, "lsm": "images at native resolution", "cls": "no class token"},
        GOLDEN, {"tied": True}, pictures=2, extreme=(*EXTREME[:5], EXTREME[-1]), dialects=True, traced=("fastv:k=4",),
        variants=(replace(PIXTRAL, names="saved", feature_layer=(1, -2), projector_bias=False, vision_act="silu"),),
    ),
    "mistral3": Family(
        MISTRAL3, (3, 5), NEAR, WITHIN[:1], OF_MARKED | OF_TWO_BY_TWO, GOLDEN_OF_OTHERS, {"tied": True}, pictures=2,
        extreme=EXTREME[:5], dialects=True, traced=("fastv:k=4",),
        variants=(MINISTRAL3, replace(MISTRAL3, names="new", projector_bias=True, kv_heads=1, shards=2)),
    ),
    "lighton_ocr": Family(
        LIGHTON, (3, 5), NEAR, WITHIN[:2], OF_TWO_BY_TWO, GOLDEN, {"tied": False}, pictures=2,
        extreme=((64, 64), (65, 64), (199, 201), (17, 30)), dialects=True,
        variants=(replace(LIGHTON, names="saved", patch=7, image=99, tied=False),),
    ),
    "vipllava": Family(
        Tiny(family="vipllava", feature_layer=(-2, -1, 1)), (3, 5), NEAR, WITHIN[1::3] + OF_TOWERS,
        variants=(
            Tiny(family="vipllava", feature_layer=(-2, -1, 1), names="saved"),
            Tiny(family="vipllava", feature_layer=(-1, 2), kv_heads=4),
        ),
    ),
    "video_llava": Family(VIDEO_LLAVA, (3, 5), NEAR, WITHIN[1::2], extreme=EXTREME[:5]),
    "llava_next_video": Family(NEXT_VIDEO, (3, 5), NEAR, WITHIN[::2]),
    "fast_vlm": Family(
        FAST_VLM, (3, 5), EXACT, WITHIN[::2], extreme=(*EXTREME[:5], EXTREME[-1]),
        refused=dict.fromkeys(
            ("cls", "lsm", "hiprune", "visionzip", "mustdrop:layers=2/4,tau=off", "mustdrop:layers=2/4,key=0"),
            "no class token|tower is convolutional",
        ),
        rounded={"fp16": 0.02, "bf16": 0.02, "int8": 0.8, "int4": 6.0}, rounding={"dtype": "bfloat16"}, dialects=True,
        variants=(replace(FAST_VLM, text="llama", tied=True, names="saved", image=128, kv_heads=4),),
    ),
    "llava_next": Family(
        LLAVA_NEXT, (3, 5), EXACT, OF_TILES, {"lsm": "joins its tiles into one grid; disable merging"}, pictures=2,
        variants=(
            Tiny(family="llava_next", context=512, kv_heads=4, names="saved", text="mistral"),
            Tiny(family="llava_next", context=512, names="new", shards=3),
        ),
    ),
    "granite vision": Family(
        GRANITE, (3, 5), EXACT, tuple(OF_TILES[number] for number in (0, 3, 8, 9)),
        # multipliers are in weights, rounded once multiplied; logits reach 4.2; a third of the limits is the most seen
        rounded={"fp16": 2e-3, "bf16": 1e-2, "int8": 0.06, "int4": 0.4}, rounding={"dtype": "bfloat16"}, pictures=2,
        variants=(
            replace(
                GRANITE, kv_heads=4, attention_bias=True, mlp_bias=True, tied=False, names="saved",
                feature_layer=(1, -1),
            ),
        ),
    ),
    "llava_onevision": Family(
        ONEVISION, (3, 5), EXACT, (OF_TILES[0], OF_TILES[8]), pictures=2,
        variants=(replace(ONEVISION, kv_heads=4, names="saved", tied=True),),
    ),
    "internvl": Family(
        INTERNVL, (3, 5), EXACT, tuple(OF_TILES[number] for number in (0, 3, 5, 8, 9)), OF_TWO_BY_TWO,
        pictures=2, extreme=EXTREME[:-1],  # of one pixel it is 2.5e-5 from transformers
        variants=(replace(INTERNVL, kv_heads=4, attention_bias=True, text="llama", shards=2),),
    ),
    "internvl, qwen3": Family(replace(INTERNVL, text="qwen3"), (3, 5), NEAR, WITHIN[:1]),
    "smolvlm": Family(
        SMOLVLM, (3, 5), EXACT, WITHIN[:1], OF_MARKED, variants=(IDEFICS,), pictures=2, dialects=True,
        traced=("fastv:k=4",),
    ),
    "qwen2_vl": Family(
        QWEN2, (3, 5), EXACT, OF_QWEN,
        OF_TWO_BY_TWO | {"mustdrop:key=0,tau=off,layers=2/4,positions=renumber": f"{OF_PATCHES}|{RENUMBERED}"},
        variants=(replace(QWEN2, tied=True, names="saved", kv_heads=1),), pictures=2, traced=TRACES_OF_QWEN,
        sizes=((150, 120), (40, 90), (40, 40)),
    ),
    "qwen2_5_vl": Family(  # one answer is 2.5e-5 from transformers, as one about a video is from the model in float64
        QWEN25, (3, 5), 2 * EXACT, rounded=GOLDEN, rounding={"tied": True}, dialects=True, traced=TRACES_OF_QWEN,
        variants=(replace(QWEN25, names="new", shards=3, theta=1e6),),
    ),
    "qwen3_vl": Family(
        QWEN3, (2, 3, 4, 5), EXACT, OF_QWEN, rounded=GOLDEN_OF_OTHERS, rounding={"tied": True}, pictures=2,
        dialects=True, traced=TRACES_OF_QWEN, sizes=((150, 120), (40, 90), (40, 40)),
        variants=(
            replace(QWEN3, maps=(2,), tied=True, names="saved", head_dim=24, attention_bias=True, theta=5e6),
        ),
    ),
    "qwen3_vl_moe": Family(  # precisions are those of tests/exporter/graphs/test_mixture.py: rounding changes choices
        QWEN3_EXPERTS, (2, 3, 5), EXACT, OF_QWEN[:2], pictures=2, traced=TRACES_OF_QWEN[:1],
        sizes=((150, 120), (40, 90), (40, 40)),
        variants=(replace(QWEN3_EXPERTS, dense=(1, 2), experts=(3, 3, 16), names="saved", shards=2),),
    ),
    "qwen3_5_moe": Family(
        QWEN35_EXPERTS, (2, 3, 5), NEAR, OF_STATES[:1], sizes=((300, 160), (150, 60), (64, 64)),
        traced=TRACES_OF_STATES[:1],
    ),
    "qwen3_5": Family(
        QWEN35, (2, 3, 4, 5, 8), NEAR,
        (*OF_STATES, Method(cdpruner=(8, "embedding")), Method(divprune=8, k=5)),
        RULE | {"dart:keep=8,k=4": "reads the attention of layer 4, which has the gated delta rule"},
        GOLDEN, sizes=((300, 160), (150, 60), (64, 64)), traced=TRACES_OF_STATES,
    ),
    "lfm2_vl": Family(
        LFM2, (2, 3, 4, 5, 8), NEAR, OF_STATES,
        {
            **{spec: reason.format("a convolution") for spec, reason in STATELESS.items()},
            "fastv:k=3": "reads the attention of layer 3, which is a convolution in this model; use .*: 2, 5, 7",
            "dart:keep=8,k=4": "reads the attention of layer 4, which is a convolution",
            "cdpruner:64": AMONG_TILES, "lsm": "works on single patches",
        },
        GOLDEN_OF_OTHERS, traced=TRACES_OF_STATES, alike=True,
    ),
    "lfm3_vl": Family(
        LFM3, (2, 4, 5, 7), NEAR, (),
        {
            "fastv:k=2": "layer 2, which has a sliding window of 24 .* full attention: 4, 7",
            "fastv:k=3": "layer 3, which is a convolution in this model; use a layer with attention: 4, 7",
            "mustdrop:gamma=0.1,alpha=1,layers=4/7,tau=off,key=0": STATE.format("a convolution"), "lsm": OF_PATCHES,
        },
        GOLDEN | GOLDEN_OF_OTHERS, stated=False, sizes=((150, 120), (40, 90), (40, 40)),
        traced=("fastv:k=4,ratio=0.5", DART.format(4)),
        variants=(
            replace(LFM3, tied=False, names="saved", post_norms=False, gates=False, attention_bias=True, mlp_bias=True),
        ),
    ),
    "minicpmv4_6": Family(
        MINICPM, (2, 3, 4, 5, 8), NEAR, OF_STATES,
        RULE | {"cdpruner:64": AMONG_TILES, "divprune:keep=64": AMONG_TILES, "lsm": "works on single patches"},
        GOLDEN, sizes=((150, 61), (70, 190), (40, 40)), traced=TRACES_OF_STATES,
        variants=(replace(MINICPM, tied=True),),
    ),
    "minicpmv4_6, 4x": Family(
        replace(MINICPM, downsample="4x", numbered=False), (3, 5), NEAR,
        sizes=((150, 61), (70, 190), (40, 40)), traced=TRACES_OF_STATES,
    ),
    "gemma3": Family(
        GEMMA3, (2, 4, 6), NEAR, rounded={"fp16": 0.05, "bf16": 0.05, "int8": 1.2, "int4": None},
        rounding={"dtype": "bfloat16", "head_dim": 32}, stated=False,
        traced=("fastv:k=3,ratio=0.5", "divprune:keep=6", DART.format(6)),
    ),
    "gemma4": Family(
        GEMMA4, (2, 4, 5), NEAR, stated=False, traced=("divprune:keep=0.5",), sizes=((90, 70), (140, 70), (40, 40)),
        variants=(replace(GEMMA4, clipped=True),),
    ),
    "glm_ocr": Family(
        GLM_OCR, (3, 5), NEAR, OF_QWEN[:3], OF_TWO_BY_TWO, GOLDEN | GOLDEN_OF_OTHERS, pictures=2,
        sizes=((150, 120), (40, 90), (40, 40)), dialects=True, traced=TRACES_OF_QWEN,
        variants=(replace(GLM_OCR, tied=True, names="saved", partial=1.0, attention_bias=True, shards=2),),
    ),
    "paddleocr_vl": Family(
        PADDLE, (3, 5), NEAR, OF_QWEN[:2], OF_TWO_BY_TWO, GOLDEN | GOLDEN_OF_OTHERS, pictures=2,
        sizes=((150, 120), (40, 90), (40, 40)), dialects=True, traced=TRACES_OF_QWEN,
        variants=(replace(PADDLE, tied=True, names="saved", attention_bias=True, shards=2),),
    ),
    "paligemma": Family(
        PALIGEMMA, (3, 5, 8), NEAR, (), {"fastv:k=3": "fastv ranks tokens by the question's attention"},
        {"fp16": 0.1, "bf16": 0.3, "int8": 0.8}, {"dtype": "bfloat16"}, single=True, stated=False, dialects=True,
    ),
    "paligemma2": Family(
        PALIGEMMA2, (3, 5, 8), NEAR, (), {"fastv:k=3": "fastv ranks tokens by the question's attention"},
        {"fp16": 0.1, "bf16": 0.3, "int8": 0.8}, {"dtype": "bfloat16"}, single=True, stated=False, dialects=True,
    ),
}  # fmt: skip
# Of one image, of tiles, of any resolution and with states: what `make test` asks.
REPRESENTATIVES = {
    "llava": "openvino",
    "qwen3_vl": "cpu",
    "qwen3_5": "cpu",
}


def engine(name: str) -> str:
    """The engine on which a family's whole contract is asked: a representative's, or in turn."""
    named = REPRESENTATIVES.get(name)
    return named if named in DEVICES else DEVICES[list(FAMILIES).index(name) % len(DEVICES)]


def on_one_device() -> list[Any]:
    """Each family on its engine; slow but for the representatives."""
    cases = []
    for name, family in FAMILIES.items():
        marks = pytest.mark.representative if name in REPRESENTATIVES else pytest.mark.slow
        cases.append(pytest.param((family, engine(name)), id=f"{name}-{engine(name)}", marks=marks))
    return cases


def on_other_devices() -> list[Any]:
    """Each family on every other engine."""
    pairs = [(name, device) for name in FAMILIES for device in DEVICES if device != engine(name)]
    return [pytest.param(FAMILIES[name], device, id=f"{name}-{device}") for name, device in pairs]


def with_rows(rows: str, every: int = 1) -> list[Any]:
    """Each family with each item of a field of its record; slow but for each n-th of the representatives."""
    cases = []
    for name, family in FAMILIES.items():
        for number, row in enumerate(getattr(family, rows)):
            marks = pytest.mark.slow if number % every or name not in REPRESENTATIVES else pytest.mark.representative
            told = f"{word(row)}, K = {row.k}" if isinstance(row, Method) else str(row)
            cases.append(pytest.param(family, row, id=f"{name}, {told}", marks=marks))
    return cases


def on_engines_in_turn(rows: str) -> list[Any]:
    """Each family with each item of a field of its record, on the engines in turn."""
    cases = []
    for place, (name, family) in enumerate(FAMILIES.items()):
        for number, row in enumerate(getattr(family, rows)):
            device = DEVICES[(place + number) % len(DEVICES)]
            cases.append(pytest.param(family, row, device, id=f"{name}, {row}, {device}"))
    return cases
