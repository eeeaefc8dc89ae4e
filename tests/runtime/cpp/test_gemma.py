"""Gemma 3 and 4 in libvtx: what is left out, refused or run in parts for windows and shared K and V; as in Python."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.bundles import ORT, export_anew, write_gate
from tests.support.cabi import Frames, Loaded
from tests.support.cpp import DEVICES, ask, needs_abi, needs_cpp, needs_openvino, run
from tests.support.exported import Models
from tests.support.families.gemma import GEMMA3, GEMMA4
from tests.support.fixtures import Checkpoints
from tests.support.near import assert_near
from tests.support.tiny import Tiny, random_image
from tests.support.traces import meets
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.bundle.spec.model_spec import ByLayer
from vtx.runtime.errors import RequestError

pytestmark = [needs_cpp, pytest.mark.dialects("ort", "plain")]

CROPS = replace(GEMMA3, crops=3, context=512)
REDUCTIONS = "fastv:k=3,ratio=0.5", "divprune:keep=6", "dart:keep=8,k=6,pivots=2,text_pivots=2"
SIZES = ((60, 60),)
QUESTIONS = ("red?", "How many circle shapes are there?", "red?")
SAME = 1e-4  # of logits, as a share of their largest magnitude


@pytest.mark.parametrize(
    ("tiny", "reductions"),
    [(replace(GEMMA3, context=120), REDUCTIONS), (CROPS, REDUCTIONS[:1])],
    ids=["two images do not fit", "crops"],
)
@DEVICES
def test_traces_are_met(
    tiny_checkpoint: Checkpoints, tmp_path: Path, tiny: Tiny, reductions: tuple[str, ...], device: str
) -> None:
    """First, second and third questions, chats, two images, replaced ones, K and gates: ids, logits and caches."""
    told = reductions if device == "cpu" else ()  # windows of a second image would have gaps: refused
    checkpoint, gates = tiny_checkpoint(tiny), write_gate(tmp_path, 168)
    assert meets(checkpoint, tmp_path, "fp32", ks=(3,), device=device, reductions=told, gates=gates, limit=SAME) > 20


def test_a_k_that_layers_behind_do_not_follow_is_refused_in_bundles_that_have_it(
    tiny_checkpoint: Checkpoints, tmp_path: Path, pictures: list[Path], monkeypatch: pytest.MonkeyPatch
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


def test_tokens_one_more_than_a_square_are_all_of_patches(models: Models, tmp_path: Path) -> None:
    """65 tokens, 13 columns of 5, of a tower without a class token."""
    random_image(3, (130, 50)).save(tmp_path / "wide.png")
    spec = "divprune:keep=65"
    made = models(GEMMA4, (), "fp32", (spec,))
    (found,) = ask(made.bundle.folder, tmp_path / "wide.png", "red?", "--reduce", spec, "--max-new-tokens", "1")
    with made.open(tmp_path / "wide.png") as conversation:
        kept = conversation.ask("red?", reduce=spec, max_new_tokens=1).to_dict()["kept"]
    assert [*kept[0]["patches"][0]] == [*range(65)]
    assert found["kept"][0]["patches"][0] == [*range(65)]


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
            assert_near(found["logprobs"], want.logprobs or (), SAME)


@needs_openvino
@needs_abi
@pytest.mark.slow
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
