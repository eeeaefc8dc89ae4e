"""Real decoders, which `make real-weights` makes: ids and logits of ten chats are transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bundles import export_anew
from tests.support.exported import greedy, prompt
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


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, Judge]]:
    """A bundle of the checkpoint in float32, and transformers' model."""
    if request.param == "none":
        pytest.skip(f"no decoders in {FOLDER}; make real-weights downloads them")
    checkpoint: Path = FOLDER / request.param
    options = ExportOptions(str(checkpoint), (), "fp32", dialects=("ort",))
    bundle = export_anew(options, tmp_path_factory.mktemp("real") / "bundle")
    with load(bundle.folder, device="cpu", threads=1) as model:
        yield model, Judge(checkpoint)


@pytest.mark.parametrize("name", CHATS)
def test_ids_and_logits_of_a_chat_are_those_of_transformers(pair: tuple[Model, Judge], name: str) -> None:
    model, judge = pair
    messages: list[dict[str, Any]] = CHATS[name][0]
    inputs, asked = judge.inputs(messages, CHATS[name][1]), prompt(model, messages, CHATS[name][1])
    assert asked.ids.tolist() == inputs["input_ids"][0].tolist()
    ids, logits = judge.generate_hf(inputs, STEPS)
    answer = greedy(model, asked, None, STEPS, forced=ids)
    most = float(logits.abs().max())
    np.testing.assert_allclose(answer.logits, logits.numpy(), atol=CLOSE * most, rtol=0)
    assert answer.ids == ids
