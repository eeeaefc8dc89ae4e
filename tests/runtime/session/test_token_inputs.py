"""What stages read of a token beside its hidden state, and layers that keep no K and V: passed on by name.

The bundle is of `tests/support/token_inputs.py`.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.exported import THREADS, answer, greedy, mixed_prompts, policy
from tests.support.fixtures import Checkpoints
from tests.support.near import assert_near
from tests.support.token_inputs import BIAS, KS, MAP, export_with_token_inputs
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.bundle import Bundle, seal_manifest
from vtx.runtime.bundle.spec.manifest import Manifest, StageSpec, TokenInput
from vtx.runtime.bundle.vtx_json import parse_manifest, write_manifest
from vtx.runtime.errors import BundleError
from vtx.runtime.policies.make import PolicySettings, make_policy
from vtx.runtime.session.generate import run_ahead
from vtx.runtime.session.session import Prompt, Session
from vtx.runtime.vision.tokens import HiddenStates, TokenStates

DEVICES = ("cpu", "openvino")


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("inputs") / "bundle"
    export_with_token_inputs(tiny_checkpoint(), made)
    return made


@pytest.fixture(params=DEVICES)
def model(request: pytest.FixtureRequest, folder: Path) -> Model:
    return load(folder, device=request.param, threads=THREADS)


def stated(model: Model, asked: Prompt, k: int | None) -> NDArray[np.float32]:
    """The logits after a prompt, each stage once over all tokens, the inputs worked out here."""
    backend = model.backend
    images = [encode() for _, encode in asked.encoders]
    hidden: HiddenStates = backend.embed(asked.ids).hidden
    bias, seen = 0.5 * hidden, np.zeros_like(hidden)
    if images:
        hidden[asked.is_vision] = np.concatenate([image.hidden for image in images])
        seen[asked.is_vision] = -2.0 * hidden[asked.is_vision]
    positions, here = np.arange(len(hidden)), np.ones(len(hidden), bool)
    for number, stage in enumerate(model.manifest.stages):
        if stage.first == k:
            hidden, here = hidden[~asked.is_vision], ~asked.is_vision
        tokens = TokenStates(hidden, {MAP: seen[here], BIAS: bias[here]})
        hidden = backend.stage(number, 200).append(tokens, positions[here]).copy()
    return backend.head(hidden[-1:])[0]


@pytest.mark.parametrize("k", [None, *KS])
def test_inputs_follow_their_tokens_through_first_and_later_questions(model: Model, k: int | None) -> None:
    session = Session(model.backend, model.manifest)
    for asked in mixed_prompts(model):
        wanted = stated(model, asked, k)
        assert_near(session.prefill(asked, policy(k)).logits, wanted, 1e-4)


def test_inputs_matter(model: Model) -> None:
    asked = mixed_prompts(model)[0]
    wanted = stated(model, asked, None)
    blind = replace(asked, encoders=tuple((key, lambda e=e: without_signals(e())) for key, e in asked.encoders))
    assert np.abs(Session(model.backend, model.manifest).prefill(blind, policy(None)).logits - wanted).max() > 0.01


def without_signals(image: object) -> object:
    signals = {name: np.zeros_like(x) for name, x in image.patches.signals.items()}  # type: ignore[attr-defined]
    return replace(image, patches=replace(image.patches, signals=signals))  # type: ignore[attr-defined,type-var]


def test_decoding_equals_prefilling_the_longer_prompt(model: Model) -> None:
    for k in (None, 5):
        for asked in mixed_prompts(model)[::3]:
            found = greedy(model, asked, k, 4)
            for count in (1, 3):
                ids = np.concatenate([asked.ids, found.ids[:count]])
                longer = replace(asked, ids=ids, is_vision=np.append(asked.is_vision, np.zeros(count, bool)))
                assert_near(found.logits[count], stated(model, longer, k), 1e-4)


def test_a_reduction_leaves_out_the_inputs_of_the_tokens_that_it_leaves_out(model: Model) -> None:
    """FastV's choice is taken from the session, what follows from it is stated here."""
    how = make_policy(None, model.manifest, model.backend.gate, PolicySettings(reduce="fastv:k=2,ratio=0.5"))
    session = Session(model.backend, model.manifest)
    for asked in mixed_prompts(model)[:3]:
        done = session.prefill(asked, how)
        kept = np.ones(len(asked.ids), bool)
        kept[asked.is_vision] = done.cuts[0].kept
        hidden = model.backend.embed(asked.ids).hidden
        bias, seen = 0.5 * hidden, np.zeros_like(hidden)
        hidden[asked.is_vision] = np.concatenate([encode().hidden for _, encode in asked.encoders])
        seen[asked.is_vision] = -2.0 * hidden[asked.is_vision]
        here = np.ones(len(hidden), bool)
        for number, stage in enumerate(model.manifest.stages):
            if stage.first == 3:
                hidden, here = hidden[kept], kept
            tokens = TokenStates(hidden, {MAP: seen[here], BIAS: bias[here]})
            hidden = model.backend.stage(number, 200).append(tokens, np.arange(len(asked.ids))[here]).copy()
        assert_near(done.logits, model.backend.head(hidden[-1:])[0], 1e-4)


def test_conversations_that_decode_together_have_their_own_inputs(model: Model) -> None:
    asked, how = mixed_prompts(model)[:4], policy(5)
    alone = [answer(Session(model.backend, model.manifest), one, how, 3) for one in asked]
    model.backend.share_caches(len(asked))  # type: ignore[attr-defined]
    together = [Session(model.backend, model.manifest) for _ in asked]
    rows = [[session.prefill(one, how).logits] for session, one in zip(together, asked, strict=True)]
    for _ in range(2):
        for session, own in zip(together, rows, strict=True):
            session.next_token = int(own[-1].argmax())
        run_ahead(model.backend, together)  # type: ignore[arg-type]
        for session, own in zip(together, rows, strict=True):
            own.append(session.decode(int(own[-1].argmax())))
    for own, wanted in zip(rows, alone, strict=True):
        assert_near(np.stack(own), wanted, 1e-4)


# --- what the manifest declares -------------------------------------------------------------------


def manifest_of(folder: Path) -> Manifest:
    return Bundle.open(folder).manifest


def test_the_manifest_keeps_what_it_declares(folder: Path) -> None:
    manifest = manifest_of(folder)
    assert parse_manifest(write_manifest(manifest)) == manifest
    assert [stage.inputs for stage in manifest.stages] == [(BIAS,), (MAP,), (MAP, BIAS), ()]


def test_what_does_not_fit_is_refused_by_name(folder: Path) -> None:
    manifest = manifest_of(folder)
    first, *others = manifest.stages

    def refused(stage: StageSpec, match: str) -> None:
        with pytest.raises(BundleError, match=match):
            replace(manifest, stages=(stage, *others))

    refused(replace(first, inputs=("other",)), r"reads token inputs \['other'\], the bundle declares \['map', 'bias'\]")
    refused(replace(first, caches=("window",) * first.layers), "'window' are unknown to this vtx")
    refused(replace(first, caches=("slots",) * (first.layers + 1)), "it needs one kind a layer")
    refused(replace(first, caches=("none",) * first.layers), "slots or a state in at least one")
    with pytest.raises(BundleError, match="hold a name twice"):
        replace(manifest, token_inputs=(*manifest.token_inputs, manifest.token_inputs[0]))
    with pytest.raises(BundleError, match="must be in 1"):
        TokenInput("x", 0, of_text=True, of_images=False)


def test_a_layer_without_a_cache_has_none_bound(folder: Path, tmp_path: Path) -> None:
    stage = replace(manifest_of(folder).stages[1], caches=("none", "slots"))
    assert stage.cached == (stage.last,)
    copied = tmp_path / "bundle"
    shutil.copytree(folder, copied)
    manifest = manifest_of(folder)
    wrong = replace(manifest, stages=(manifest.stages[0], stage, *manifest.stages[2:]))
    seal_manifest(copied, wrong)
    with pytest.raises(BundleError, match=r"is not the graph that vtx\.json says"):
        load(copied, device="cpu", threads=THREADS)
