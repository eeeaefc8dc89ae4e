"""No way into a session lets a graph see an id outside the vocabulary: a graph takes -1 for the last token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.bundles import export
from tests.support.exported import DEVICES, THREADS, policy
from tests.support.fixtures import Checkpoints
from tests.support.tiny import random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.errors import BundleError
from vtx.runtime.prompt.text import Text
from vtx.runtime.report.golden import check_golden
from vtx.runtime.session.session import Prompt, Session

OPTIONS = Options(max_new_tokens=3, ignore_eos=True)
QUESTION, IMAGE = "red?", random_image(1)
CHAT: list[Any] = [{"role": "user", "content": [{"type": "image", "image": IMAGE}, {"type": "text", "text": QUESTION}]}]
WAYS_IN: dict[str, Callable[[Model], object]] = {
    "a question": lambda model: model.open(IMAGE).ask(QUESTION, options=OPTIONS),
    "a question without an image": lambda model: model.ask(QUESTION, options=OPTIONS),
    "a chat": lambda model: model.open(IMAGE).chat().ask(QUESTION, OPTIONS),
    "messages": lambda model: model.generate(CHAT, options=OPTIONS),
    "a batch": lambda model: list(model.batch([(IMAGE, QUESTION)], options=OPTIONS)),
    "a selection by the question": lambda model: model.open(IMAGE).ask(QUESTION, reduce="cdpruner:keep=4"),
    "golden vectors": lambda model: list(check_golden(model)),
}


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny_checkpoint(), tmp_path_factory.mktemp("ids") / "bundle", (3,)).folder


@pytest.fixture(scope="module", params=DEVICES)
def model(request: pytest.FixtureRequest, folder: Path) -> Model:
    return load(folder, device=request.param, threads=THREADS)


def wrong_ids(model: Model) -> list[int]:
    return [-1, model.manifest.model.vocab, 1 << 40]


@pytest.mark.sampled
def test_a_backend_embeds_the_vocabulary_and_nothing_else(model: Model) -> None:
    vocab = model.manifest.model.vocab
    assert len(model.backend.embed(np.array([0, vocab - 1]))) == 2
    assert len(model.backend.embed(np.zeros(0, np.int64))) == 0
    for wrong in wrong_ids(model):
        with pytest.raises(BundleError, match=f"token {wrong} does not exist, the model has {vocab:,} .*; export"):
            model.backend.embed(np.array([1, wrong, 2]))


@pytest.mark.parametrize("way", WAYS_IN)
def test_ids_that_the_tokenizer_s_own_check_lets_through_are_refused(
    model: Model, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Text.prompt

    def prompt(*args: Any, **more: Any) -> NDArray[np.int64]:
        return np.concatenate([real(*args, **more), [wrong]])

    monkeypatch.setattr(Text, "prompt", prompt)
    for wrong in wrong_ids(model):
        with pytest.raises(BundleError, match=f"token {wrong} does not exist"):
            WAYS_IN[way](model)


def test_a_session_that_refused_ids_is_as_it_was(model: Model) -> None:
    session, fresh = (Session(model.backend, model.manifest) for _ in range(2))
    good = Prompt(np.array([1, 5, 6, 7]), np.zeros(4, bool))
    session.prefill(good, policy(None))
    for wrong in wrong_ids(model):
        with pytest.raises(BundleError, match=f"token {wrong} does not exist"):
            session.decode(wrong)
        with pytest.raises(BundleError, match=f"token {wrong} does not exist"):
            session.prefill(Prompt(np.array([1, 5, wrong]), np.zeros(3, bool)), policy(3))
    fresh.prefill(good, policy(None))
    session.prefill(good, policy(None))
    np.testing.assert_array_equal(session.decode(9), fresh.decode(9))
