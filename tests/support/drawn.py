"""Random configurations of families, for tests that compare many of them."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.support.families.glm_ocr import GLM_OCR
from tests.support.families.lfm3_vl import LFM3
from tests.support.families.minicpm import MINICPM
from tests.support.families.paddleocr_vl import PADDLE
from tests.support.families.paligemma import PALIGEMMA
from tests.support.families.pixtral import LIGHTON, MISTRAL3, PIXTRAL
from tests.support.families.qwen import QWEN2, QWEN3, QWEN3_EXPERTS, QWEN25, QWEN35, QWEN35_EXPERTS
from tests.support.families.smolvlm import SMOLVLM
from tests.support.tiny import Tiny


def any_text(draw: random.Random, tiny: Tiny) -> Tiny:
    """The family's checkpoint with another decoder."""
    heads = draw.choice([2, 4])
    return replace(
        tiny, layers=draw.randint(5, 8), hidden=draw.choice([48, 64, 96]), heads=heads, ffn=draw.choice([64, 96, 160]),
        kv_heads=draw.choice([n for n in (1, 2, 4) if n <= heads]), head_dim=draw.choice([8, 16, 24]),
        tied=draw.random() < 0.5, rope=draw.choice(["default", "linear", "llama3"]), shards=draw.randint(1, 3),
        theta=draw.choice([1e4, 1e6]), names=draw.choice(["hub", "saved", "new"]),
        projector_bias=draw.random() < 0.7,
    )  # fmt: skip


def qwen3_5(draw: random.Random, family: Tiny = QWEN35) -> Tiny:
    tiny, key_heads = any_text(draw, family), draw.choice([1, 2, 4])
    attending, width = draw.sample(range(tiny.layers), draw.randint(1, tiny.layers - 1)), draw.choice([16, 32])
    return replace(
        tiny, rope="default", head_dim=width, attending=tuple(sorted(attending)), taps=draw.randint(2, 5),
        delta=(key_heads, key_heads * draw.choice([1, 2, 3]), draw.choice([16, 32]), draw.choice([16, 24, 32])),
        partial=draw.choice([0.5, 1.0] if width == 16 else [0.25, 0.5, 1.0]), attention_bias=draw.random() < 0.4,
        names=draw.choice(["hub", "saved"]), vision_layers=draw.randint(1, 4), vision_hidden=draw.choice([32, 48]),
    )  # fmt: skip


def experts(draw: random.Random) -> tuple[int, int, int]:
    count = draw.randint(2, 12)
    return count, draw.randint(1, min(4, count)), draw.choice([16, 24, 48])


def qwen3_5_moe(draw: random.Random) -> Tiny:
    return replace(qwen3_5(draw, QWEN35_EXPERTS), experts=experts(draw))


def qwen3_vl_moe(draw: random.Random) -> Tiny:
    tiny = any_text(draw, QWEN3_EXPERTS)
    dense = draw.sample(range(tiny.layers), draw.choice([0, 0, 1, 3]))
    return replace(
        tiny, rope="default", context=512, experts=experts(draw), dense=tuple(sorted(dense)),
        names=draw.choice(["hub", "saved"]),
    )  # fmt: skip


def minicpm(draw: random.Random) -> Tiny:
    tiny, patch = qwen3_5(draw, MINICPM), draw.choice([8, 16])
    return replace(
        tiny, patch=patch, image=patch * draw.randint(1, 9), insert=draw.randrange(tiny.vision_layers),
        downsample=draw.choice(["4x", "16x"]), slices=draw.choice([1, 2, 4, 9]), numbered=draw.random() < 0.5,
        vision_act=draw.choice([None, "gelu"]),
    )  # fmt: skip


def glm_ocr(draw: random.Random) -> Tiny:
    tiny = any_text(draw, GLM_OCR)
    return replace(
        tiny, rope="default", head_dim=draw.choice([16, 24, 32]), partial=draw.choice([0.5, 1.0]),
        vision_layers=draw.randint(1, 4), vision_hidden=draw.choice([32, 48]), attention_bias=draw.random() < 0.5,
        vision_ffn=draw.choice([48, 80]), names=draw.choice(["hub", "saved"]),
    )  # fmt: skip


def lfm3_vl(draw: random.Random) -> Tiny:
    tiny = any_text(draw, LFM3)
    attending = draw.sample(range(tiny.layers), draw.randint(2, tiny.layers - 1))
    return replace(
        tiny, rope="default", attending=tuple(sorted(attending)),
        taps=draw.randint(2, 7), sliding_window=draw.choice([5, 24, 80, 400]), head_dim=draw.choice([16, 32]),
        post_norms=draw.random() < 0.7, gates=draw.random() < 0.7, attention_bias=draw.random() < 0.4,
        mlp_bias=draw.random() < 0.4, vision_layers=draw.randint(1, 4), vision_hidden=draw.choice([32, 48]),
        names=draw.choice(["hub", "saved"]), partial=draw.choice([0.5, 1.0]),
    )  # fmt: skip


def paddleocr_vl(draw: random.Random) -> Tiny:
    return replace(
        any_text(draw, PADDLE), rope="default", head_dim=draw.choice([16, 32]), vision_layers=draw.randint(1, 4),
        vision_hidden=draw.choice([32, 48]), attention_bias=draw.random() < 0.5, image=14 * draw.randint(2, 6),
        names=draw.choice(["hub", "saved"]),
    )  # fmt: skip


def smolvlm(draw: random.Random) -> Tiny:
    patch = draw.choice([8, 14])
    return replace(
        any_text(draw, SMOLVLM), context=2048, patch=patch, image=2 * patch * draw.choice([1, 2, 4]),
        vision_layers=draw.randint(1, 4), vision_hidden=draw.choice([32, 48]),
    )  # fmt: skip


def qwen_vl(draw: random.Random) -> Tiny:
    """Sizes, heads, maps, ties and names of Qwen2-VL, Qwen2.5-VL or Qwen3-VL."""
    family, tower = draw.choice((QWEN2, QWEN25, QWEN3)), draw.randint(3, 6)
    heads, kv_heads = draw.choice(((4, 4), (4, 2), (4, 1), (6, 3), (6, 2), (2, 2)))
    tiny = replace(
        family, layers=draw.randint(5, 9), heads=heads, kv_heads=kv_heads, hidden=heads * draw.choice((16, 32)),
        ffn=draw.choice((80, 96, 160)), tied=draw.random() < 0.5, theta=draw.choice((1e4, 1e6, 5e6)),
        names=draw.choice(("hub", "saved", "new")), vision_layers=tower, vision_hidden=draw.choice((32, 48)),
        vision_heads=2, shards=draw.choice((1, 2)),
    )  # fmt: skip
    if family is not QWEN3:
        return tiny
    maps = tuple(sorted(draw.sample(range(tower), draw.randint(0, min(4, tower)))))
    return replace(tiny, maps=maps, head_dim=draw.choice((16, 24, 32)), attention_bias=draw.random() < 0.2)


def paligemma(draw: random.Random) -> Tiny:
    tiny, patch = any_text(draw, PALIGEMMA), draw.choice([8, 14, 16])
    return replace(
        tiny, rope="default", heads=draw.choice([2, 4, 6]), kv_heads=draw.choice([1, 2]), shards=1, patch=patch,
        image=patch * draw.randint(2, 5), vision_hidden=draw.choice([16, 32]), vision_layers=draw.randint(1, 4),
        projector_bias=PALIGEMMA.projector_bias, tokenizer=draw.choice(["bytes", "metaspace"]),
    )  # fmt: skip


def pixtral(draw: random.Random, family: Tiny = PIXTRAL) -> Tiny:
    tiny, layers, patch = any_text(draw, family), draw.randint(1, 4), draw.choice([7, 8, 14])
    layer = draw.choice([-1, -2, tuple(draw.randint(-layers - 1, layers) for _ in range(draw.randint(1, 3)))])
    return replace(
        tiny, context=1024, patch=patch, image=draw.randint(2 * patch, 12 * patch), vision_layers=layers,
        vision_hidden=draw.choice([32, 48]), vision_heads=draw.choice([2, 4]), feature_layer=layer,
        vision_act=draw.choice([None, "silu"]), projector_act=draw.choice(["gelu", "silu"]),
        text=draw.choice(["mistral", "mistral", "llama", "qwen2"]),
    )  # fmt: skip


def mistral3(draw: random.Random) -> Tiny:
    tiny = pixtral(draw, MISTRAL3)
    tiny = replace(tiny, feature_layer=draw.choice([-1, -2, 1]), text="mistral")
    if draw.random() < 0.5:
        return tiny
    return replace(tiny, text="ministral3", rope="yarn", names=draw.choice(["saved", "new"]))


def lighton_ocr(draw: random.Random) -> Tiny:
    tiny = pixtral(draw, LIGHTON)
    return replace(tiny, feature_layer=-1, text="qwen3", image=draw.randint(150, 250), projector_act="gelu")
