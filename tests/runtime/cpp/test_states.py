"""Layers that keep a state: libvtx answers for LFM2-VL, Qwen3.5 and MiniCPM-V 4.6 as Python does."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bundles import write_gate
from tests.support.cabi import Frames, Loaded
from tests.support.cpp import (
    ask,
    assert_answers_equal,
    assert_prepared_equal,
    expected,
    needs_abi,
    needs_cpp,
    needs_openvino,
    run,
    write_pictures,
)
from tests.support.exported import Models
from tests.support.families.lfm2_vl import LFM2
from tests.support.families.minicpm import MINICPM
from tests.support.families.qwen import QWEN35
from tests.support.old_pillow import needs_pillow_13
from tests.support.tiny import Tiny, random_image
from tests.support.traces import meets
from vtx.runtime.api.load import load
from vtx.runtime.bundle.vtx_json import parse_manifest
from vtx.runtime.errors import BundleError
from vtx.runtime.vision.layouts import read_layout

pytestmark = [needs_cpp, pytest.mark.dialects("ort", "plain")]

FINE = replace(MINICPM, downsample="4x", numbered=False)
MADE = {"lfm2_vl": LFM2, "qwen3_5": QWEN35, "minicpmv4_6": MINICPM, "minicpmv4_6, 4x": FINE}
FAMILIES = pytest.mark.parametrize("tiny", MADE.values(), ids=MADE)
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("openvino", marks=needs_openvino)])
QUESTIONS = ("red?", "How many circle shapes are there?", "red?")
SAME = 1e-4  # of logits, as a share of their largest magnitude


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    sizes = (60, 60), (150, 60), (40, 90), (1, 1), (100, 1), (300, 200), (64, 64), (90, 91), (640, 33), (1900, 1080)
    return write_pictures(tmp_path_factory.mktemp("pictures"), sizes)


@needs_pillow_13
@FAMILIES
def test_pixels_and_tokens_are_those_of_python(models: Models, pictures: list[Path], tiny: Tiny) -> None:
    model = models(tiny, (3, 5))
    assert_prepared_equal(model, pictures)


@needs_pillow_13
@pytest.mark.parametrize("tiles", [1, 2, 3, 4])
def test_fewer_tiles_are_those_of_python(models: Models, pictures: list[Path], tiles: int) -> None:
    folder = models(LFM2, (3, 5)).bundle.folder
    with load(folder, device="cpu", threads=1, max_tiles=tiles) as model:
        for picture in pictures[1:8:2]:
            [found] = ask(folder, picture, "red?", "--max-tiles", str(tiles), "--k", "none", "--max-new-tokens", "3")
            with model.open(picture) as conversation:
                assert expected(found) == expected(conversation.ask("red?", None, max_new_tokens=3).to_dict())


@needs_pillow_13
def test_any_size_has_the_tokens_that_python_gives_it(models: Models, tmp_path: Path) -> None:
    rng, model = random.Random(5), models(LFM2, (3, 5))
    shown = write_pictures(tmp_path, sorted({(rng.randint(1, 300), rng.randint(1, 300)) for _ in range(60)}))
    assert_prepared_equal(model, shown)


@pytest.mark.sampled(7)
@FAMILIES
@DEVICES
def test_traces_are_met(tiny_checkpoint: Callable[..., Path], tmp_path: Path, tiny: Tiny, device: str) -> None:
    """First, second and third questions, chats, several images, K and gates: ids, logits and caches' lengths."""
    checkpoint = tiny_checkpoint(replace(tiny, context=512))
    layer = tiny.attending[0] + 1
    reductions = f"fastv:k={layer},ratio=0.5", f"dart:keep=8,k={layer},pivots=2,text_pivots=2"
    gates = write_gate(tmp_path, 168)
    assert meets(checkpoint, tmp_path, "fp32", device=device, reductions=reductions, gates=gates, limit=SAME) > 60


@pytest.mark.slow
@pytest.mark.covering(2)
@FAMILIES
@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8", "int4"])
@DEVICES
def test_traces_are_met_at_every_precision(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, tiny: Tiny, precision: str, device: str
) -> None:
    kv = "int8" if precision == "int8" else None
    assert meets(tiny_checkpoint(tiny), tmp_path, precision, kv=kv, device=device, reductions=()) > 20


@FAMILIES
def test_answers_are_those_of_python(models: Models, pictures: list[Path], tiny: Tiny) -> None:
    assert_answers_equal(models(tiny, (3, 5)), pictures, QUESTIONS, ("none", 5, 3))


@pytest.mark.sampled(5)
@needs_abi
@DEVICES
@FAMILIES
@pytest.mark.parametrize("ks", [(2,), (4, 5)], ids=str)
def test_stages_of_one_layer_answer_as_fresh_ones_on_onnxruntime(
    models: Models, pictures: list[Path], tiny: Tiny, device: str, ks: tuple[int, ...]
) -> None:
    """The first run of prompts of each length, and later ones."""
    folder = models(tiny, ks).bundle.folder
    with closing(Loaded(folder, device)) as loaded, load(folder, device="cpu", threads=1) as fresh:
        for picture, k in itertools.product(pictures[:2], (None, *ks)):
            found = loaded.ask([picture], QUESTIONS, [str(k or "none")] * len(QUESTIONS), max_new_tokens=6)
            for question, answer in zip(QUESTIONS, found, strict=True):
                with fresh.open(picture) as conversation:
                    want = conversation.ask(question, k, max_new_tokens=6)
                assert tuple(answer["token_ids"]) == want.token_ids, (picture.name, k, question)


@needs_abi
@needs_pillow_13
@DEVICES
@FAMILIES
def test_chats_go_back_to_states_as_python_does(models: Models, tiny: Tiny, device: str) -> None:
    """Turns that repeat, change and lengthen the turns before; images that are replaced by others."""
    made, rng, system = models(replace(tiny, context=512), (3, 5)), random.Random(3), "Be brief."
    pool = [random_image(4, (60, 60)), random_image(5, (90, 50)), random_image(4, (60, 60))]
    reused = 0
    with (
        load(made.bundle.folder, device=device, threads=1) as model,
        closing(Loaded(made.bundle.folder, device)) as loaded,
        model.open([pool[0]], system=system) as held,
        closing(Frames(loaded, [np.asarray(pool[0])], system)) as frames,
    ):
        for _ in range(12):
            if rng.random() < 0.3:
                shown = rng.choices(pool, k=rng.choice((1, 1, 2)))
                if frames.replace([np.asarray(image) for image in shown]):
                    held.replace(list(shown))
            k: Any = rng.choice((None, 3, 5))
            question = rng.choice(("red?", "How many?", "red? no, blue?"))
            options = {"k": str(k or "none").encode(), "max_new_tokens": 5, "ignore_eos": 1}
            found = frames.ask(question, **options)
            want = held.ask(question, k, max_new_tokens=5, ignore_eos=True).to_dict()
            for key in ("token_ids", "k", "kv_slots", "vision_tokens_kept", "reused_tokens", "reused_layers"):
                assert list(np.ravel(found[key])) == list(np.ravel(want[key])), (key, k, question)
            reused += found["reused_tokens"]
    assert reused > 0


@pytest.mark.parametrize(
    ("tiny", "altered", "named"),
    [
        (LFM2, {"model": {"conv_taps": 17}}, "convolutions of 17 taps in the layers"),
        (LFM2, {"model": {"conv_taps": 1}}, "they have 2 to 16 taps"),
        (LFM2, {"model": {"conv_layers": [2, 1]}}, "in the layers [2, 1] do not fit"),
        (LFM2, {"model": {"conv_layers": [99]}}, "conv_layers is '[99]', not a list of numbers in range"),
        (LFM2, {"model": {"conv_layers": []}}, "keeps states in layers"),
        (LFM2, {"model": {"conv_taps": 4}}, "interface is"),
        (LFM2, {"layout": {"parameters": {"tile": 56}}}, "do not fit|tiles of 56"),
        (LFM2, {"layout": {"parameters": {"most": 65}}}, "it needs 2 to 64 tiles"),
        (LFM2, {"layout": {"parameters": {"tolerance": 0.5}}}, "and 1 times or more"),
        (LFM2, {"model": {"tower": {"flags": []}}}, "has tokens of 2 x 2 patches of 8 pixels and tiles"),
        (QWEN35, {"model": {"delta": {"value_heads": 3}}}, "3 value heads cannot share"),
        (QWEN35, {"model": {"delta": {"key_dim": 1 << 30, "value_dim": 1 << 30}}}, "more than 2147483647 numbers"),
        (QWEN35, {"model": {"delta": {"key_dim": 0}}}, "key_dim is 0, outside 1..2147483647"),
        (QWEN35, {"model": {"delta": {"other": 1}}}, "unknown key 'other'"),
        (MINICPM, {"model": {"tower": {"merged_after": 9}}}, "model.tower: patches merge after layer 9 of 4"),
        (MINICPM, {"model": {"tower": {"merged_after": None}}}, "4 x 4 patches of 8 pixels, the tower of 2 x 2 of 8"),
        (MINICPM, {"model": {"tower": {"flags": []}}}, "has tokens of 4 x 4 patches of 8 pixels, the tower"),
        (MINICPM, {"layout": {"parameters": {"most": 65}}}, "has up to 65 slices of 64 x 64 pixels"),
        (MINICPM, {"layout": {"parameters": {"side": 31}}}, "it needs 1 to 64 slices of at least one token"),
        (MINICPM, {"layout": {"parameters": {"side": 1 << 30}}}, "and at most 33,554,432 pixels in all"),
        (MINICPM, {"layout": {"parameters": {"merge": 2}}}, "gives at most|tokens of 2 x 2 patches"),
        (MINICPM, {"layout": {"parameters": {"numbered": 1}}}, "numbered is '1', not bool"),
        (MINICPM, {"layout": {"max_tokens": 5}}, "layout.max_tokens is 5"),
        (MINICPM, {"image": {"crop": [64, 64]}}, "null, as pad and resize, where the layout resizes"),
    ],
)  # fmt: skip
def test_altered_bundles_are_refused_by_both_runtimes(
    models: Models, tmp_path: Path, tiny: Tiny, altered: dict[str, Any], named: str
) -> None:
    def changed(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        both = {key: changed(old[key], value) for key, value in new.items() if isinstance(value, dict)}
        return old | new | both

    wrong = changed(manifest(models, tiny), altered)
    assert any(part in refused(wrong, tmp_path) for part in named.split("|"))
    with pytest.raises(BundleError):
        read_in_python(wrong)


@pytest.mark.parametrize(
    ("caches", "named"),
    [
        (["slots"], "declares caches ['slots']; it needs one kind a layer"),
        (["slots", "ring"], "layers with a cache of the kind 'ring' are unknown to this vtx"),
        (["none", "none"], "declares caches ['none', 'none']; it needs one kind a layer"),
        (["slots", "slots"], "keeps states in layers []"),
    ],
)
def test_caches_that_do_not_fit_are_refused(models: Models, tmp_path: Path, caches: list[str], named: str) -> None:
    altered = manifest(models, LFM2)
    altered["stages"][0]["caches"] = caches
    assert named in refused(altered, tmp_path)


def manifest(models: Models, tiny: Tiny) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((models(tiny, (3, 5)).bundle.folder / "vtx.json").read_text(encoding="utf-8"))
    return found


def read_in_python(altered: dict[str, Any]) -> None:
    parsed = parse_manifest(json.dumps(altered))
    read_layout(parsed.layout, parsed.model.tower)


def refused(altered: dict[str, Any], folder: Path) -> str:
    (folder / "vtx.json").write_text(json.dumps(altered), encoding="utf-8")
    done = run("probe", "parse", "manifest", folder / "vtx.json")
    assert done.returncode == 1
    return done.stderr.decode()
