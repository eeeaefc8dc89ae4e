"""Images at native resolution: libvtx answers for Qwen2-VL, Qwen2.5-VL and Qwen3-VL as Python does."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tests.support.bundles import export, write_gate
from tests.support.cabi import Frames, Loaded
from tests.support.cpp import (
    BUILD,
    ask,
    assert_answers_equal,
    assert_asked_equal,
    assert_prepared_equal,
    expected,
    failure,
    needs_abi,
    needs_cpp,
    needs_openvino,
    output,
    run,
    write_pictures,
)
from tests.support.exported import Models
from tests.support.families.qwen import QWEN2, QWEN3, QWEN25
from tests.support.old_pillow import needs_pillow_13
from tests.support.tiny import Tiny, random_image
from tests.support.traces import meets
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.errors import ContextError, ImageError, RequestError

pytestmark = [needs_cpp, pytest.mark.dialects("ort", "plain")]

FAMILIES = pytest.mark.parametrize("tiny", [QWEN2, QWEN25, QWEN3], ids=lambda tiny: tiny.family)
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("openvino", marks=needs_openvino)])
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


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_pictures(tmp_path_factory.mktemp("pictures"), SIZES)


@needs_pillow_13
@FAMILIES
def test_pixels_and_tokens_are_those_of_python(models: Models, pictures: list[Path], tiny: Tiny) -> None:
    model = models(tiny, (3, 5))
    assert_prepared_equal(model, pictures)


@needs_pillow_13
def test_any_size_has_the_tokens_that_python_gives_it(models: Models, tmp_path: Path) -> None:
    rng = random.Random(5)
    sizes = {(rng.randint(1, 300), rng.randint(1, 300)) for _ in range(60)} | {(70, n) for n in range(20, 220, 7)}
    for tiny in (QWEN2, QWEN3):
        model = models(tiny, (3, 5))
        shown = write_pictures(tmp_path, sorted(size for size in sizes if max(size) <= 200 * min(size)))
        lines = output("probe", "layout", model.bundle.folder, *shown).decode().splitlines()
        found = [f"{want.tokens} {want.key.split()[0]}" for want in map(model.loaded.prepare, shown)]
        assert lines == found


@FAMILIES
@DEVICES
def test_traces_are_met(tiny_checkpoint: Callable[..., Path], tmp_path: Path, tiny: Tiny, device: str) -> None:
    reductions, gates = REDUCTIONS[::3], write_gate(tmp_path, 168)
    checkpoint = tiny_checkpoint(replace(tiny, context=512))
    asked = meets(checkpoint, tmp_path, "fp32", device=device, reductions=reductions, gates=gates, limit=SAME)
    assert asked > 120


@pytest.mark.slow
@FAMILIES
@DEVICES
def test_traces_of_every_reduction_are_met(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, tiny: Tiny, device: str
) -> None:
    checkpoint = tiny_checkpoint(replace(tiny, context=512))
    assert meets(checkpoint, tmp_path, "fp32", device=device, reductions=REDUCTIONS, limit=SAME) > 200


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.parametrize("tiny", [QWEN25, QWEN3], ids=lambda tiny: tiny.family)
@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8", "int4"])
@DEVICES
def test_traces_are_met_at_every_precision(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, tiny: Tiny, precision: str, device: str
) -> None:
    kv = "int8" if precision == "int8" else None
    checkpoint = tiny_checkpoint(replace(tiny, tied=True))
    assert meets(checkpoint, tmp_path, precision, kv=kv, device=device, reductions=REDUCTIONS[:1]) > 30


@FAMILIES
def test_answers_are_those_of_python(models: Models, pictures: list[Path], tiny: Tiny) -> None:
    assert_answers_equal(models(tiny, (3, 5)), pictures, QUESTIONS, ("none", 5, 3))


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


def random_tiny(rng: random.Random) -> Tiny:
    """A random model: family, sizes, shared heads, maps and ties."""
    family, layers, tower = rng.choice((QWEN2, QWEN25, QWEN3)), rng.randint(5, 8), rng.randint(3, 5)
    heads, kv_heads = rng.choice(((4, 4), (4, 2), (4, 1), (6, 3), (6, 2)))
    size = rng.choice((16, 32))
    maps = tuple(sorted(rng.sample(range(tower), rng.randint(0, 3)))) if family is QWEN3 else family.maps
    return replace(
        family, layers=layers, heads=heads, kv_heads=kv_heads, hidden=heads * size, ffn=rng.choice((80, 96)),
        head_dim=rng.choice((16, 24, 32)) if family is QWEN3 else None, theta=rng.choice((1e4, 1e6)),
        tied=rng.random() < 0.5, vision_layers=tower, vision_hidden=rng.choice((32, 48)), maps=maps, context=512,
    )  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(9))
def test_random_models_meet_their_traces(tiny_checkpoint: Callable[..., Path], tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    tiny = random_tiny(rng)
    ks = tuple(sorted(rng.sample(range(2, tiny.layers + 1), 3)))
    reductions = tuple(rng.sample([spec for spec in REDUCTIONS if "k=4" not in spec], 2))
    device = rng.choice(("cpu", "openvino")) if (BUILD / "libvtx_openvino.so").exists() else "cpu"
    checkpoint = tiny_checkpoint(tiny, seed)
    asked = meets(checkpoint, tmp_path, "fp32", ks=ks, device=device, reductions=reductions, limit=SAME)
    assert asked > 60


def marked(image: Image.Image, part: float) -> Image.Image:
    """The image with a mark at this part of its width."""
    changed, at = image.copy(), int(part * image.width)
    ImageDraw.Draw(changed).rectangle((at, image.height - 30, at + 20, image.height - 4), fill=(255, 0, 0))
    return changed


@needs_abi
@needs_pillow_13
@DEVICES
@FAMILIES
def test_replaced_images_are_answered_as_by_python(models: Models, tiny: Tiny, device: str) -> None:
    """Equal frames, other ones, other shapes, two of them, with K and methods, and as a conversation of their own."""
    reductions = "fastv:k=3", "dart:keep=8,k=0,pivots=2,text_pivots=2"
    made, rng, system = models(replace(tiny, context=512), (3, 5), reductions=reductions), random.Random(3), "Be brief."
    wide, fields = random_image(4, (150, 90)), {"max_new_tokens": 4, "ignore_eos": True}
    pool = [wide, random_image(5, (90, 150)), random_image(6, (150, 90)), marked(wide, 0.8), marked(wide, 0.8)]
    reused = 0
    with (
        load(made.bundle.folder, device=device, threads=1) as model,
        closing(Loaded(made.bundle.folder, device)) as loaded,
        model.open([wide], system=system) as held,
        closing(Frames(loaded, [np.asarray(wide)], system)) as frames,
    ):
        for _ in range(14):
            shown, reduce = rng.choices(pool, k=rng.choice((1, 1, 2))), rng.choice(("none", "none", *reductions))
            k: Any = rng.choice((None, 3, 5)) if reduce == "none" else None
            if frames.replace([np.asarray(image) for image in shown]):
                held.replace(list(shown))
            options = {"k": str(k or "none").encode(), "reduce": reduce.encode(), "max_new_tokens": 4, "ignore_eos": 1}
            found, want = (
                frames.ask("How many?", **options),
                held.ask("How many?", k, reduce=reduce, **fields).to_dict(),
            )
            for key in ("token_ids", "k", "kv_slots", "vision_tokens_kept", "reused_tokens"):
                assert list(np.ravel(found[key])) == list(np.ravel(want[key])), (key, k, reduce)
            with closing(Frames(loaded, [np.asarray(image) for image in shown], system)) as fresh:
                assert fresh.ask("How many?", **options)["token_ids"] == found["token_ids"]
            reused += found["reused_tokens"]
    assert reused > 0


def test_fewer_pixels_and_what_does_not_fit_are_as_in_python(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
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


@pytest.mark.parametrize(
    ("altered", "named"),
    [
        (
            {"model": {"rope": {"sections": [1, 2, 3, 2]}}},
            "rope.sections [1, 2, 3, 2] do not divide 8 frequencies in 3",
        ),
        ({"model": {"rope": {"sections": [1, 1, 1]}}}, "rope.sections [1, 1, 1] do not divide 8 frequencies in 3"),
        ({"layout": {"min_tokens": 5}}, "layout.min_tokens 5 is not that of 'native'"),
        ({"model": {"tower": {"flags": []}}}, "the image layout has tokens of 2 x 2 patches of 14 pixels, the tower"),
        ({"image": {"crop": [56, 56]}}, "image setting crop is not null"),
        ({"layout": {"name": "single"}}, "image setting crop is null"),
    ],
    ids=["four", "few", "fewest", "tower", "size", "layout"],
)
def test_altered_bundles_are_refused(models: Model, tmp_path: Path, altered: dict[str, Any], named: str) -> None:
    def changed(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        both = {key: changed(old[key], value) for key, value in new.items() if isinstance(value, dict)}
        return old | new | both

    manifest = json.loads((models(QWEN2, (3, 5)).bundle.folder / "vtx.json").read_text(encoding="utf-8"))
    (tmp_path / "vtx.json").write_text(json.dumps(changed(manifest, altered)), encoding="utf-8")
    assert named in failure("probe", "parse", "manifest", tmp_path / "vtx.json")
