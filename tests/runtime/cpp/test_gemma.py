"""Gemma 3 and 4 in libvtx: windows, images that see themselves both ways, shared K and V; as Python answers."""

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

from tests.support.bundles import ORT, export_anew, write_gate
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
from tests.support.families.gemma import GEMMA3, GEMMA4
from tests.support.old_pillow import needs_pillow_13
from tests.support.tiny import Tiny, random_image
from tests.support.traces import meets
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.bundle.spec.model_spec import ByLayer
from vtx.runtime.bundle.vtx_json import parse_manifest
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.vision.layouts import read_layout

pytestmark = [needs_cpp, pytest.mark.dialects("ort", "plain")]

CROPS = replace(GEMMA3, crops=3, context=512)
FAMILIES = pytest.mark.parametrize("tiny", [GEMMA3, GEMMA4], ids=lambda tiny: tiny.family)
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("openvino", marks=needs_openvino)])
REDUCTIONS = "fastv:k=3,ratio=0.5", "divprune:keep=6", "dart:keep=8,k=6,pivots=2,text_pivots=2"
QUESTIONS = ("red?", "How many circle shapes are there?", "red?")
SAME = 1e-4  # of logits, as a share of their largest magnitude


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    sizes = (60, 60), (150, 60), (40, 90), (1, 1), (100, 1), (300, 200), (64, 64), (90, 91), (640, 33), (48, 48)
    return write_pictures(tmp_path_factory.mktemp("pictures"), sizes)


@needs_pillow_13
@pytest.mark.parametrize("tiny", [GEMMA3, CROPS, GEMMA4], ids=["gemma3", "crops", "gemma4"])
def test_pixels_and_tokens_are_those_of_python(models: Models, pictures: list[Path], tiny: Tiny) -> None:
    model = models(tiny, (3, 5))
    assert_prepared_equal(model, pictures)


@pytest.mark.parametrize(
    ("tiny", "reductions", "ks"),
    [
        (GEMMA3, REDUCTIONS, (3, 5)),
        (replace(GEMMA3, context=120), REDUCTIONS, (3,)),  # two images do not fit
        (CROPS, REDUCTIONS[:1], (3,)),
        (GEMMA4, ("divprune:keep=0.5",), (3, 5)),
    ],
    ids=["gemma3", "one image", "crops", "gemma4"],
)
@DEVICES
def test_traces_are_met(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, tiny: Tiny, reductions: tuple[str, ...],
    ks: tuple[int, ...], device: str,
) -> None:  # fmt: skip
    """First, second and third questions, chats, two images, replaced ones, K and gates: ids, logits and caches."""
    if device == "openvino" and tiny in (GEMMA3, CROPS):
        reductions = ()  # windows of a second image would have gaps: refused
    checkpoint, gates = tiny_checkpoint(tiny), write_gate(tmp_path, 168)
    asked = meets(
        checkpoint, tmp_path, "fp32", ks=ks, device=device, reductions=reductions, gates=gates, limit=SAME
    )  # fmt: skip
    assert asked > 20


def test_a_k_that_layers_behind_do_not_follow_is_refused_in_bundles_that_have_it(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, pictures: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ByLayer, "first_source", None)
        options = ExportOptions(str(tiny_checkpoint(GEMMA4)), (5, 6), "fp32", dialects=ORT)
        folder = export_anew(options, tmp_path / "bundle").folder
    told = "K = 6: layers that read the keys and values of layer 5 would still see the image there"
    with load(folder, device="cpu", threads=1) as model, model.open(pictures[0]) as conversation:
        assert conversation.ask("red?", 5, max_new_tokens=1).stats.k == 5
        with pytest.raises(RequestError, match=told):
            conversation.ask("red?", 6)
    done = run("run", "--bundle", folder, "--device", "cpu", "--k", "6", pictures[0], "red?")
    assert done.returncode != 0
    assert told in done.stderr.decode()


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.parametrize("tiny", [replace(GEMMA3, head_dim=32), GEMMA4], ids=lambda tiny: tiny.family)
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


@needs_pillow_13
def test_fewer_crops_are_those_of_python(models: Models, pictures: list[Path]) -> None:
    folder = models(CROPS, (3, 5)).bundle.folder
    for tiles in (1, 2, 3):
        with load(folder, device="cpu", threads=1, max_tiles=tiles) as model, model.open(pictures[1]) as conversation:
            words = "--max-tiles", str(tiles), "--k", "none", "--max-new-tokens", "3"
            [found] = ask(folder, pictures[1], "red?", *words)
            assert expected(found) == expected(conversation.ask("red?", None, max_new_tokens=3).to_dict())


@needs_pillow_13
def test_a_smaller_budget_is_that_of_python(models: Models, pictures: list[Path]) -> None:
    folder, seen = models(replace(GEMMA4, budget=140), (3, 5)).bundle.folder, list[int]()
    for budget in (140, 70):
        pixels = budget * 48**2
        with load(folder, device="cpu", threads=1, max_pixels=pixels) as model, model.open(pictures[1]) as conversation:
            words = "--max-pixels", str(pixels), "--k", "none", "--max-new-tokens", "3"
            [found] = ask(folder, pictures[1], "red?", *words)
            assert expected(found) == expected(conversation.ask("red?", None, max_new_tokens=3).to_dict())
            seen.append(found["vision_tokens"])
    assert seen[0] > seen[1]
    done = run("run", "--bundle", folder, pictures[1], "red?", "--max-pixels", "161279")
    with pytest.raises(RequestError) as refused:
        load(folder, device="cpu", threads=1, max_pixels=161279)
    assert done.stderr.decode() == f"Error: {refused.value}\n"


@needs_pillow_13
def test_any_size_has_the_tokens_that_python_gives_it(models: Models, tmp_path: Path) -> None:
    rng = random.Random(5)
    shown = write_pictures(tmp_path, sorted({(rng.randint(1, 300), rng.randint(1, 300)) for _ in range(40)}))
    for tiny in (CROPS, GEMMA4):
        model = models(tiny, (3, 5))
        assert_prepared_equal(model, shown)


@needs_abi
@needs_pillow_13
@DEVICES
@FAMILIES
def test_chats_and_replaced_images_are_answered_as_by_python(models: Models, tiny: Tiny, device: str) -> None:
    """Other K in turn, images that begin alike, and turns that go on."""
    made, rng, system = models(replace(tiny, context=512), (3, 5)), random.Random(3), "Be brief."
    pool = [random_image(4, (60, 60)), random_image(5, (90, 50)), random_image(6, (60, 60))]
    reused = 0
    with (
        load(made.bundle.folder, device=device, threads=1) as model,
        closing(Loaded(made.bundle.folder, device)) as loaded,
        model.open([pool[0]], system=system) as held,
        closing(Frames(loaded, [np.asarray(pool[0])], system)) as frames,
    ):
        for _ in range(12):
            if rng.random() < 0.5:
                shown = rng.choices(pool, k=rng.choice((1, 2)))
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


@needs_abi
@FAMILIES
@DEVICES
def test_a_fork_answers_as_the_conversation_that_it_was_made_of(models: Models, tiny: Tiny, device: str) -> None:
    made, picture = models(tiny, (3,)), np.asarray(random_image(1))
    with closing(Loaded(made.bundle.folder, device)) as loaded, closing(Frames(loaded, [picture])) as one:
        wanted = [one.ask(question, k=k)["token_ids"] for question in QUESTIONS for k in (b"none", b"3")]
        with closing(one.fork()) as fork:
            assert [fork.ask(question, k=k)["token_ids"] for question in QUESTIONS for k in (b"none", b"3")] == wanted


@needs_abi
def test_a_long_prompt_runs_in_parts_none_of_which_ends_within_an_image(models: Models) -> None:
    """Of over 512 tokens, which onnxruntime does not run at once: 40 images, and a question as long."""
    made = models(replace(GEMMA3, context=2048), (3,))
    shown, question = [random_image(n) for n in range(40)], "red? " * 120
    with (
        closing(Loaded(made.bundle.folder, "cpu")) as loaded,
        closing(Frames(loaded, list(map(np.asarray, shown)))) as frames,
        made.open(shown) as conversation,
    ):
        for k in (None, 3):
            found = frames.ask(question, k=str(k or "none").encode(), max_new_tokens=4, logprobs=1)
            want = conversation.ask(question, k, max_new_tokens=4, logprobs=True)
            assert min(found["vision_tokens"], found["prompt_tokens"] - found["vision_tokens"]) > 512
            assert found["token_ids"] == list(want.token_ids)
            np.testing.assert_allclose(found["logprobs"], want.logprobs or (), atol=SAME, rtol=0)


@needs_openvino
@needs_abi
def test_windows_over_gaps_within_an_image_are_refused_on_openvino_in_pythons_words(models: Models) -> None:
    made = models(GEMMA3, (6,), "fp32", ("fastv:k=3,ratio=0.5",))
    images = [random_image(0), random_image(1)]
    folder, spec = made.bundle.folder, "fastv:k=3,ratio=0.5"
    with (
        load(folder, device="openvino", threads=1) as model,
        model.open(images) as conversation,
        pytest.raises(RequestError) as refused,
    ):
        conversation.ask("red?", reduce=spec)
    with (
        closing(Loaded(folder, "openvino")) as loaded,
        closing(Frames(loaded, list(map(np.asarray, images)))) as frames,
    ):
        with pytest.raises(AssertionError, match=str(refused.value)[:40]):
            frames.ask("red?", reduce=spec.encode())
        assert frames.ask("red?", reduce=b"none")["token_ids"], "it goes on"


@pytest.mark.parametrize(
    ("tiny", "altered", "named"),
    [
        (GEMMA3, {"model": {"sliding": {"layers": []}}}, "model.sliding names layers [] of 8"),
        (GEMMA3, {"model": {"sliding": {"layers": [9]}}}, "model.sliding names layers [9] of 8"),
        (GEMMA3, {"model": {"sliding": {"window": 0}}}, "window is 0, outside 1..2147483647"),
        (GEMMA3, {"model": {"sliding": {"head_dim": 22}}}, "12 rotary frequencies do not fit heads of 22"),
        (GEMMA3, {"model": {"sliding": {"other": 1}}}, "unknown key 'other'"),
        (GEMMA3, {"model": {"two_way": "all"}}, "'all', unknown to this vtx, which has prompt, images"),
        (GEMMA3, {"model": {"two_way": None}}, "interface is"),
        (GEMMA3, {"model": {"tower": {"pool": 4}}}, "interface is"),
        (CROPS, {"layout": {"parameters": {"most": 65}}}, "at most 64 crops"),
        (CROPS, {"layout": {"parameters": {"ratio": 0.5}}}, "a ratio of at least 1"),
        (GEMMA4, {"model": {"shared": 1}}, "model.shared is 1, and each layer from it to the last, 9, needs one"),
        (GEMMA4, {"model": {"shared": 2}}, "model.shared is 2, and each layer from it to the last, 9, needs one"),
        (GEMMA4, {"model": {"shared": 8}}, "do not cut 9 layers|declares caches"),
        (GEMMA4, {"model": {"softcap": 0}}, "softcap is 0"),
        (GEMMA4, {"layout": {"parameters": {"tokens": 71}}}, "it needs one of 70, 140, 280, 560, 1120"),
        (GEMMA4, {"layout": {"parameters": {"pool": 2}}}, "the image layout has tokens of 2 x 2 patches"),
        (GEMMA4, {"model": {"tower": {"axis_positions": None}}}, "the image layout has tokens of 3 x 3 patches"),
    ],
)  # fmt: skip
def test_altered_bundles_are_refused_by_both_runtimes(
    models: Models, tmp_path: Path, tiny: Tiny, altered: dict[str, Any], named: str
) -> None:
    def changed(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        both = {key: changed(old[key], value) for key, value in new.items() if isinstance(value, dict)}
        return old | new | both

    held: dict[str, Any] = json.loads((models(tiny, (3, 5)).bundle.folder / "vtx.json").read_text(encoding="utf-8"))
    wrong = changed(held, altered)
    (tmp_path / "vtx.json").write_text(json.dumps(wrong), encoding="utf-8")
    done = run("probe", "parse", "manifest", tmp_path / "vtx.json")
    assert done.returncode == 1
    assert any(part in done.stderr.decode() for part in named.split("|")), done.stderr.decode()
    with pytest.raises(BundleError):
        read_in_python(wrong)


def read_in_python(altered: dict[str, Any]) -> None:
    parsed = parse_manifest(json.dumps(altered))
    read_layout(parsed.layout, parsed.model.tower)
