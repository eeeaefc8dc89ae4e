"""Images at native resolution: libvtx answers for Qwen2-VL, Qwen2.5-VL and Qwen3-VL as Python does."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.bundles import export
from tests.support.cpp import (
    BUILD,
    ask,
    assert_asked_equal,
    expected,
    failure,
    needs_cpp,
    needs_openvino,
    run,
    write_pictures,
)
from tests.support.drawn import qwen_vl
from tests.support.exported import Models
from tests.support.families.qwen import QWEN2, QWEN3, QWEN25
from tests.support.fixtures import Checkpoints
from tests.support.traces import meets
from vtx.runtime.api.load import load
from vtx.runtime.api.options import Options
from vtx.runtime.errors import ContextError, ImageError, RequestError

pytestmark = [needs_cpp, pytest.mark.dialects("ort", "plain")]

SIZES = (
    (60, 60), (150, 60), (40, 90), (1, 1), (1, 200), (200, 1), (14, 1400), (41, 43), (42, 70), (223, 225), (640, 33),
    (5, 400), (1900, 1080),
)  # fmt: skip
QUESTIONS = ("red?", "How many circle shapes are there?", "red?")
REDUCTIONS = (
    "fastv:k=2,ratio=0.5", "cdpruner:keep=6", "cdpruner:keep=0.4,text=none+fastv:k=4,ratio=0.3", "divprune:keep=0.3",
    "dart:keep=8,k=3,pivots=2,text_pivots=2", "dart:keep=8,k=2,pivots=2,text_pivots=2,order=code",
    "dart:keep=8,k=0,pivots=2,text_pivots=2", "random:keep=0.4+fastv:k=4",
)  # fmt: skip
SAME = 1e-4  # of logits, as a share of their largest magnitude


@needs_openvino
def test_many_tokens_of_int4_go_in_runs_of_their_own(models: Models, tmp_path: Path) -> None:
    """Of 256 on OpenVINO, each with its part of the tokens' rotary tables."""
    model = models(replace(QWEN25, context=512), (3,), "int4")
    pictures = write_pictures(tmp_path, [(200 + n, 140) for n in range(8)])
    on = ("--device", "openvino", "--compute", "f32")
    with load(model.bundle.folder, device="openvino", compute="f32", threads=1) as other:
        for k in ("none", 3):
            answers = assert_asked_equal(other, pictures, QUESTIONS, *on, k=k, max_new_tokens=6)
            assert all(answer.stats.vision_tokens > 256 for answer in answers)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(5))
def test_random_models_meet_their_traces(tiny_checkpoint: Checkpoints, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    tiny = replace(qwen_vl(rng), context=512)
    ks = tuple(sorted(rng.sample(range(2, tiny.layers + 1), 3)))
    reductions = tuple(rng.sample([spec for spec in REDUCTIONS if "k=4" not in spec], 2))
    device = rng.choice(("cpu", "openvino")) if (BUILD / "libvtx_openvino.so").exists() else "cpu"
    checkpoint = tiny_checkpoint(tiny, seed)
    asked = meets(checkpoint, tmp_path, "fp32", ks=ks, device=device, reductions=reductions, limit=SAME)
    assert asked > 60


@pytest.mark.slow
def test_fewer_pixels_and_what_does_not_fit_are_as_in_python(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = export(tiny_checkpoint(QWEN2), tmp_path / "bundle", (), max_context=80).folder
    pictures = write_pictures(tmp_path, [(160, 150), (150, 160)])
    more = ("--image", pictures[1])
    with load(folder, device="cpu", threads=1) as model, model.open(pictures) as conversation:
        with pytest.raises(ContextError, match="--max-pixels 22736") as room:
            conversation.ask("red?")
        with pytest.raises(RequestError) as squared:
            model.open(pictures, fit="pad")
    with pytest.raises(RequestError) as tiled:
        load(folder, device="cpu", max_tiles=2)
    with pytest.raises(RequestError) as few:
        load(folder, device="cpu", max_pixels=700)
    for options, refused in (
        ((), room), (("--fit", "pad"), squared), (("--max-tiles", "2"), tiled), (("--max-pixels", "700"), few),
    ):  # fmt: skip
        assert failure("run", "--bundle", folder, pictures[0], "red?", *more, *options) == f"Error: {refused.value}\n"
    [found] = ask(folder, pictures[0], "red?", *more, "--max-pixels", "22736", "--max-new-tokens", "4")
    with load(folder, device="cpu", threads=1, max_pixels=22736) as model, model.open(pictures) as conversation:
        assert expected(found) == expected(conversation.ask("red?", None, Options(4)).to_dict())


def test_no_pixels_are_asked_for_where_images_have_one_size(models: Models, pictures: list[Path]) -> None:
    folder = models().bundle.folder
    with pytest.raises(RequestError) as refused:
        load(folder, device="cpu", max_pixels=1000)
    done = run("run", "--bundle", folder, pictures[0], "red?", "--max-pixels", "1000")
    assert done.stderr.decode() == f"Error: {refused.value}\n"


def test_an_image_too_long_for_its_width_is_refused_as_in_python(models: Models, tmp_path: Path) -> None:
    model, [picture] = models(QWEN25, (3, 5)), write_pictures(tmp_path, [(201, 1)])
    with pytest.raises(ImageError) as refused:
        model.open(picture)
    done = run("run", "--bundle", model.bundle.folder, picture, "red?")
    assert done.stderr.decode() == f"Error: {refused.value}\n"


@pytest.mark.parametrize("spec", ["mustdrop:key=0,tau=off,layers=2/4,positions=renumber", "cls", "lsm"])
def test_what_these_models_do_not_give_is_refused_as_in_python(models: Models, pictures: list[Path], spec: str) -> None:
    model = models(QWEN3, (3, 5))
    with model.open(pictures[0]) as conversation, pytest.raises(RequestError) as refused:
        conversation.ask("red?", reduce=spec)
    done = run("run", "--bundle", model.bundle.folder, pictures[0], "red?", "--reduce", spec)
    assert done.stderr.decode() == f"Error: {refused.value}\n"


def test_a_bundle_without_engines_is_refused_by_name(models: Models, pictures: list[Path]) -> None:
    folder = models(QWEN3, (3, 5)).bundle.folder
    done = run("run", "--bundle", folder, pictures[0], "red?", "--device", "tensorrt")
    assert "holds no engines; build them with: vtx-build" in done.stderr.decode()
