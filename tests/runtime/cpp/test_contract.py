"""What every family keeps in libvtx: records of `tests.support.contract`, and answers that are those of Python."""

from __future__ import annotations

import random
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tests.support.bundles import ORT, export, write_gate
from tests.support.cabi import Frames, Loaded
from tests.support.contract import FAMILIES, REPRESENTATIVES, Family
from tests.support.cpp import (
    DEVICES,
    ask,
    assert_answers_equal,
    assert_prepared_equal,
    expected,
    failure,
    needs_abi,
    needs_cpp,
    needs_openvino,
    write_pictures,
)
from tests.support.exported import Models
from tests.support.families.gemma import GEMMA3, GEMMA4
from tests.support.families.internvl_chat import INTERNLM
from tests.support.families.internvl_chat_1 import INTERNVL_CHAT_1, with_internvit
from tests.support.families.lerobot import POLICIES
from tests.support.families.lfm2_vl import LFM2
from tests.support.families.llava_next import LLAVA_NEXT
from tests.support.families.minicpm import MINICPM
from tests.support.families.original import ANYRES, PAD
from tests.support.families.pixtral import MISTRAL3
from tests.support.families.smolvlm import IDEFICS
from tests.support.families.vila import VILA
from tests.support.fixtures import Checkpoints
from tests.support.old_pillow import needs_pillow_13
from tests.support.tiny import Tiny, random_image
from tests.support.traces import meets
from vtx.exporter.checkpoint.families.registry import FAMILIES as REGISTERED
from vtx.runtime.api.load import load
from vtx.runtime.errors import RequestError

pytestmark = [needs_cpp, pytest.mark.dialects("ort", "plain")]

SAME = 1e-4  # of logits, as a share of their largest magnitude
QUESTIONS = ("red?", "How many circle shapes are there?", "red?")
SIZES = (
    (60, 60), (150, 60), (40, 90), (1, 1), (100, 1), (1, 200), (200, 1), (300, 200), (64, 64), (90, 91), (640, 33),
    (14, 1400), (41, 43), (42, 70), (223, 225), (5, 400), (448, 112), (301, 97), (17, 200), (960, 60), (60, 960),
    (1900, 1080),
)  # fmt: skip
LONG = ("1x200", "200x1")  # too long for the resize of some
CROPS = replace(GEMMA3, crops=3, context=512)
OF_OTHERS = {
    "vila": VILA,
    "llava_llama": PAD,
    "llava_mistral": ANYRES,
    "internvl_chat": INTERNLM,
    "gemma3, crops": CROPS,
    "idefics3": IDEFICS,
}
TRACED = [name for name, family in FAMILIES.items() if family.traced]
OF_ALL_CACHES = ("qwen3_vl", "qwen3_5", "lfm2_vl", "gemma3", "gemma4")  # plain, states, windows, shared K and V
ROUNDED = [
    ("fp16", "cpu", "gemma3"), ("bf16", "cpu", "gemma4"), ("int8", "cpu", "qwen2_5_vl"), ("int4", "cpu", "qwen3_vl"),
    *(
        pytest.param(precision, "openvino", name, marks=needs_openvino)
        for precision, name in (
            ("fp16", "qwen3_5"), ("bf16", "lfm2_vl"), ("int8", "minicpmv4_6"), ("int4", "minicpmv4_6, 4x"),
        )
    ),
]  # fmt: skip
LIMITS = [
    (CROPS, "--max-tiles", (1, 2, 3), -1),
    (LFM2, "--max-tiles", (1, 2, 3, 4), -1),
    (LLAVA_NEXT, "--max-tiles", (1, 3), -1),
    (MINICPM, "--max-tiles", (1, 2, 3, 4), -1),
    (replace(GEMMA4, budget=140), "--max-pixels", (140 * 48**2, 70 * 48**2), 70 * 48**2 - 1),
    (MISTRAL3, "--max-pixels", (96**2, 64**2, 40**2), 16**2 - 1),
]


def named(names: list[str]) -> Any:
    """Cases by name; slow but for the representatives, and Gemma 4, whose layers read K and V of others."""
    quick = {*REPRESENTATIVES, "gemma4"}
    marks = {name: pytest.mark.representative if name in quick else pytest.mark.slow for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in names])


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    rng = random.Random(5)
    drawn = {(rng.randint(1, 300), rng.randint(1, 300)) for _ in range(8)} | {(70, n) for n in range(20, 220, 21)}
    sizes = sorted(size for size in drawn if max(size) <= 200 * min(size))
    return write_pictures(tmp_path_factory.mktemp("pictures"), [*SIZES, *sizes])


def test_every_family_is_compared() -> None:
    compared = {family.tiny.family for family in FAMILIES.values()} | {tiny.family for tiny in OF_OTHERS.values()}
    compared |= {"pi0", "openvla", "lisa", "eagle_llama"}  # test_acting, test_token_acting, test_segments, test_joined
    compared |= {f"lerobot.{policy}" for policy in POLICIES}  # test_lerobot
    assert {family.model_type for family in REGISTERED} == compared


@needs_pillow_13
@named([*FAMILIES, *OF_OTHERS])
def test_pixels_and_answers_are_those_of_python(models: Models, pictures: list[Path], name: str) -> None:
    family = Family(OF_OTHERS[name]) if name in OF_OTHERS else FAMILIES[name]
    model, ks = models(family.tiny, family.ks), family.ks
    refused = () if (1, 150) in family.extreme else LONG
    assert_prepared_equal(model, [picture for picture in pictures if picture.stem not in refused])
    assert_answers_equal(model, pictures, QUESTIONS, ("none", ks[-1], ks[0]))


@pytest.mark.slow
def test_an_internvit_beside_a_llava_is_that_of_python(
    tiny_checkpoint: Checkpoints, pictures: list[Path], tmp_path: Path
) -> None:
    checkpoint = Path(shutil.copytree(tiny_checkpoint(INTERNVL_CHAT_1), tmp_path / "checkpoint"))
    with_internvit(checkpoint)
    with load(export(checkpoint, tmp_path / "bundle", (3,), dialects=ORT).folder, device="cpu", threads=1) as model:
        assert_prepared_equal(model, pictures)
        assert_answers_equal(model, pictures, QUESTIONS, ("none", 3, 3))


def traced_on_devices() -> list[Any]:
    """Every traced family on onnxruntime, one with states and one with windows on OpenVINO, too; slow but for one.

    `test_traces_are_met_at_every_precision` and `test_chats_...` have others on OpenVINO.
    """
    quick = {name: pytest.mark.representative if name == "lfm2_vl" else pytest.mark.slow for name in TRACED}
    cases = [pytest.param(name, "cpu", marks=quick[name]) for name in TRACED]
    on_openvino = [pytest.mark.slow, needs_openvino]
    return cases + [pytest.param(name, "openvino", marks=on_openvino) for name in ("minicpmv4_6", "gemma3")]


def traced(family: Family, device: str) -> tuple[str, ...]:
    """Reductions of a family on a device: on OpenVINO the first, for what they choose does not depend on engines.

    On OpenVINO windows over gaps within a second image are refused.
    """
    if device == "cpu":
        return family.traced
    return () if family.tiny.family == "gemma3" else family.traced[:1]


@pytest.mark.parametrize(("name", "device"), traced_on_devices())
def test_traces_are_met(tiny_checkpoint: Checkpoints, tmp_path: Path, name: str, device: str) -> None:
    """First, second and third questions, chats, images, K and gates: ids, logits and the lengths of caches."""
    family, gates = FAMILIES[name], write_gate(tmp_path, 168)
    checkpoint = tiny_checkpoint(replace(family.tiny, context=512))
    reductions = traced(family, device)
    asked = meets(checkpoint, tmp_path, "fp32", device=device, reductions=reductions, gates=gates, limit=SAME)
    assert asked > 20 * (1 + len(reductions))


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "device", "name"), ROUNDED)
def test_traces_are_met_at_every_precision(
    tiny_checkpoint: Checkpoints, tmp_path: Path, precision: str, device: str, name: str
) -> None:
    """That a family has several of them, the contract in Python shows."""
    family, kv = FAMILIES[name], "int8" if precision == "int8" else None
    checkpoint, reductions = tiny_checkpoint(replace(family.tiny, **family.rounding)), traced(family, device)[:1]
    assert meets(checkpoint, tmp_path, precision, kv=kv, device=device, reductions=reductions) > 20


def marked(image: Image.Image) -> Image.Image:
    """The image with a mark near its end."""
    changed, at = image.copy(), int(0.8 * image.width)
    ImageDraw.Draw(changed).rectangle((at, image.height - 30, at + 20, image.height - 4), fill=(255, 0, 0))
    return changed


@needs_abi
@needs_pillow_13
@pytest.mark.slow
@DEVICES
@pytest.mark.parametrize("name", TRACED)
def test_chats_and_replaced_images_are_answered_as_by_python(models: Models, name: str, device: str) -> None:
    """Other K and methods in turn, images that begin alike, turns that go on, and conversations of their own."""
    family, rng, system = FAMILIES[name], random.Random(3), "Be brief."
    kinds = [spec for spec in traced(family, device) if spec.startswith(("fastv", "dart:keep=8,k=0"))]
    made = models(replace(family.tiny, context=512), (3, 5), "fp32", tuple(kinds))
    pool = [random_image(4, shape) for shape in ((60, 60), *family.sizes)]
    pool += [random_image(4, (60, 60)), random_image(5, (60, 60)), marked(pool[1]), marked(pool[1])]
    reused = 0
    with (
        load(made.bundle.folder, device=device, threads=1) as model,
        closing(Loaded(made.bundle.folder, device)) as loaded,
        model.open([pool[0]], system=system) as held,
        closing(Frames(loaded, [np.asarray(pool[0])], system)) as frames,
    ):
        shown = [pool[0]]
        for _ in range(14):
            if rng.random() < 0.5:
                shown = rng.choices(pool, k=rng.choice((1, 1, 2)))
                if frames.replace([np.asarray(image) for image in shown]):
                    held.replace(list(shown))
            reduce = rng.choice(("none", "none", *kinds))
            k: Any = rng.choice((None, 3, 5)) if reduce == "none" else None
            question = rng.choice(("red?", "How many?", "red? no, blue?"))
            options = {"k": str(k or "none").encode(), "reduce": reduce.encode(), "max_new_tokens": 5, "ignore_eos": 1}
            found = frames.ask(question, **options)
            want = held.ask(question, k, reduce=reduce, max_new_tokens=5, ignore_eos=True).to_dict()
            for key in ("token_ids", "k", "kv_slots", "vision_tokens_kept", "reused_tokens", "reused_layers"):
                assert list(np.ravel(found[key])) == list(np.ravel(want[key])), (key, k, reduce, question)
            with closing(Frames(loaded, [np.asarray(image) for image in shown], system)) as fresh:
                assert fresh.ask(question, **options)["token_ids"] == found["token_ids"]
            reused += found["reused_tokens"]
    assert reused > 0


@needs_abi
@pytest.mark.slow
@DEVICES
@pytest.mark.parametrize("name", OF_ALL_CACHES)
def test_a_fork_answers_as_the_conversation_that_it_was_made_of(models: Models, name: str, device: str) -> None:
    made, picture = models(replace(FAMILIES[name].tiny, context=512), (3, 5)), np.asarray(random_image(1))
    asked = [(question, k) for question in QUESTIONS for k in (b"none", b"3")]
    with closing(Loaded(made.bundle.folder, device)) as loaded, closing(Frames(loaded, [picture])) as one:
        wanted = [one.ask(question, k=k)["token_ids"] for question, k in asked]
        with closing(one.fork()) as fork:
            assert [fork.ask(question, k=k)["token_ids"] for question, k in asked] == wanted


@needs_pillow_13
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiny", "option", "limits", "too_few"),
    LIMITS,
    ids=["gemma3", "lfm2_vl", "llava_next", "minicpm", "gemma4", "mistral3"],
)
def test_less_of_a_picture_is_that_of_python(
    models: Models, pictures: list[Path], tiny: Tiny, option: str, limits: tuple[int, ...], too_few: int
) -> None:
    folder, seen, name = models(tiny, (3, 5)).bundle.folder, list[int](), option.removeprefix("--").replace("-", "_")
    for limit in limits:
        with load(folder, device="cpu", threads=1, **{name: limit}) as model:  # type: ignore[arg-type]
            for picture in (pictures[1], pictures[7]):
                words = option, str(limit), "--k", "none", "--max-new-tokens", "3"
                [found] = ask(folder, picture, "red?", *words)
                with model.open(picture) as conversation:
                    assert expected(found) == expected(conversation.ask("red?", None, max_new_tokens=3).to_dict())
                seen.append(found["vision_tokens"])
    assert len({*seen}) > 1
    with pytest.raises(RequestError) as refused:
        load(folder, device="cpu", threads=1, **{name: too_few})  # type: ignore[arg-type]
    assert failure("run", "--bundle", folder, pictures[1], "red?", option, str(too_few)) == f"Error: {refused.value}\n"
