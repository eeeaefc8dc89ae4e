"""Any sequence of questions, chats and abandoned answers over several images gives what fresh ones give.

`VTX_SEQUENCES=2000` sets how many random sequences each engine is put through.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.bundles import export_with
from tests.support.exported import THREADS
from tests.support.sequences import OPTIONS, QUESTIONS, End, Sequences, Setting, Step, steps
from tests.support.tiny import Tiny, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.bundle.safetensors import write_safetensors

EXAMPLES = int(os.environ.get("VTX_SEQUENCES", "20"))
TINY = Tiny(image=126, context=512)
KS = (3, 5)
GATES = {3: 59, 5: 37}  # seeds of gates that withdraw the image for some of the questions
DUAL = "mustdrop:gamma=0.011,alpha=1,layers=2/4/6"
SETTINGS: tuple[Setting, ...] = (
    (None, "none"),
    (3, "none"),
    (None, "fastv:k=3"),
    (5, "fastv:k=3"),
    (None, DUAL),
    (None, "lsm:tau=0.1+fastv:k=3"),
    (5, f"{DUAL},positions=renumber"),
    (None, "cdpruner:keep=20"),
    (5, "dart:keep=24"),
    (None, "dart:keep=20,k=0"),
    ("auto", "none"),
    ("auto", "fastv:k=3"),
)
IMAGES = ([random_image(4)], [random_image(5)], [random_image(4), random_image(6, (40, 90))])
TOLERANCES = {"cpu": 2e-5, "openvino": 1e-4}


def gate_file(path: Path) -> Path:
    """Random gates, which withdraw the image for some questions and not for others."""
    weights = {}
    for k, seed in GATES.items():
        rng = np.random.default_rng(seed)
        weights[f"gate.{k - 2}.fc1.weight"] = (rng.standard_normal((24, 128)) / 128**0.5).astype(np.float32)
        weights[f"gate.{k - 2}.fc2.weight"] = rng.standard_normal((2, 24)).astype(np.float32)
    write_safetensors(path, weights, None)
    return path


@pytest.fixture(scope="module", params=["cpu", "openvino"])
def sequences(request: pytest.FixtureRequest, tiny_checkpoint: Any, tmp_path_factory: Any) -> Sequences:
    folder = tmp_path_factory.mktemp("sequences")
    gates = gate_file(folder / "gates.safetensors")
    options = ExportOptions(str(tiny_checkpoint(TINY)), KS, "fp32", reductions=(DUAL, "fastv:k=3", "dart"), gates=gates)
    bundle = export_with(options, folder / "bundle")
    model = load(bundle.folder, device=request.param, threads=THREADS)
    return Sequences(model, IMAGES, SETTINGS, TOLERANCES[request.param])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("setting", range(2, len(SETTINGS)))
def test_a_chat_after_an_independent_question_selects_its_own_tokens(sequences: Sequences, setting: int) -> None:
    sequences.check([Step(1, setting), Step(2, setting, chat=0), Step(0, setting, chat=0)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("setting", range(2, len(SETTINGS)))
def test_two_interleaved_chats_keep_their_own_tokens(sequences: Sequences, setting: int) -> None:
    turns = [Step(question, setting, chat=chat) for question, chat in ((1, 0), (2, 1), (0, 0), (3, 1), (2, 0))]
    sequences.check(turns)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["interrupt", "cancel", "timeout", "leave"])
def test_a_first_turn_that_was_abandoned_selects_nothing(sequences: Sequences, how: Any) -> None:
    for setting in range(len(SETTINGS)):
        for at in (1, 4):
            turns = [Step(1, setting, chat=0, end=End(how, at)), Step(2, setting, chat=0), Step(0, setting, chat=0)]
            sequences.check(turns)


@pytest.mark.sampled(2)
def test_the_gates_of_these_tests_decide_either_way(sequences: Sequences) -> None:
    conversations = [sequences.model.open(list(images)) for images in IMAGES]
    ks = {conversation.ask(question, "auto").stats.k for conversation in conversations for question in QUESTIONS}
    assert ks == {None, *KS}


@pytest.mark.sampled(2)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_sequence_equals_fresh_answers(sequences: Sequences, data: st.DataObject) -> None:
    assert OPTIONS.ignore_eos  # so that every answer has as many logits
    sequences.check(data.draw(steps(len(SETTINGS), len(IMAGES))))
    if sequences.counts["sequences"] % 100 == 0:
        print(dict(sequences.counts))  # with -s, how far a long run has come
