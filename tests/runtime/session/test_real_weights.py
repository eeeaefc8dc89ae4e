"""Real decoders, which `make real-weights` makes: ids and logits of ten chats are transformers'."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.bundles import export_anew
from tests.support.exported import greedy, prompt
from tests.support.near import assert_near
from tests.support.published.chats import TYPED, chats, turn
from tests.support.published.judge import Judge
from tests.support.published.places import ROOT
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model

FOLDER = ROOT / "build" / "real-weights"
NAMES = sorted(path.parent.name for path in FOLDER.glob("[!.]*/config.json")) or ["none"]
STEPS = 8
CLOSE = 1e-4  # of the largest logit, to float32
CHATS = {
    **{name: chat for name, chat in chats().items() if name != TYPED},
    "code": ([turn("user", "Write a Python function that reverses a list in place.")], []),
    "prose": ([turn("user", "It was a dark and stormy night; go on for a paragraph.")], []),
    "numbers": ([turn("user", "<picture>", "12345 * 67,890 = ?")], chats()["one picture"][1]),
}

pytestmark = pytest.mark.slow


class Answer(NamedTuple):
    """Of transformers: the ids of a prompt and those of an answer, and the logits that chose them."""

    prompt: list[int]
    ids: list[int]
    logits: NDArray[np.float32]


def answers_of(checkpoint: Path) -> dict[str, Answer]:
    """Transformers' answer to each chat; its model is freed before vtx loads one of the same gigabytes."""
    judge, answers = Judge(checkpoint), dict[str, Answer]()
    for name, (messages, images) in CHATS.items():
        inputs = judge.inputs(messages, images)
        ids, logits = judge.generate_hf(inputs, STEPS)
        answers[name] = Answer(inputs["input_ids"][0].tolist(), ids, logits.numpy())
    return answers


@pytest.fixture(scope="module", params=NAMES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Model, dict[str, Answer]]]:
    """A bundle of the checkpoint in float32, and transformers' answers."""
    if request.param == "none":
        pytest.skip(f"no decoders in {FOLDER}; make real-weights downloads them")
    checkpoint: Path = FOLDER / request.param
    answers = answers_of(checkpoint)
    gc.collect()
    options = ExportOptions(str(checkpoint), (), "fp32", dialects=("ort",))
    bundle = export_anew(options, tmp_path_factory.mktemp("real") / "bundle")
    with load(bundle.folder, device="cpu", threads=1) as model:
        yield model, answers
    shutil.rmtree(bundle.folder)


@pytest.mark.parametrize("name", CHATS)
def test_ids_and_logits_of_a_chat_are_those_of_transformers(pair: tuple[Model, dict[str, Answer]], name: str) -> None:
    model, theirs = pair[0], pair[1][name]
    asked = prompt(model, *CHATS[name])
    assert asked.ids.tolist() == theirs.prompt
    answer = greedy(model, asked, None, STEPS, forced=theirs.ids)
    most = float(np.abs(theirs.logits).max())
    assert_near(answer.logits, theirs.logits, CLOSE * most)
    assert answer.ids == theirs.ids
