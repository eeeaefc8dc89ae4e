"""Accepted or unsure: Python, vtx-serve and libvtx decide alike, for every threshold and for that of the card."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import bundles
from tests.support.cabi import Frames, Loaded
from tests.support.cards import card_of
from tests.support.cpp import needs_abi, needs_cpp
from tests.support.exported import Models
from tests.support.serving import serving, user
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api.load import load
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.card import Acceptance, write_card
from vtx.runtime.errors import RequestError

llguidance = pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
pytestmark = [needs_cpp, needs_abi, pytest.mark.dialects("ort", "plain")]
QUESTION = "red?"
CHOICES = (("yes", "no"), ("red", "red circle", "", "Größe"), ("a square",), tuple("123456789"))
THRESHOLDS: tuple[float | str, ...] = (0, 1e-12, 1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 0.5, 1, "0.002", "card")
WRONG: tuple[tuple[Any, str], ...] = (
    ("often", "it must be a probability from 0 to 1, or card"), (1.5, "it must be a probability"),
    (-0.1, "it must be a probability"), ("nan", "it must be a probability"),
)  # fmt: skip
CARD = Acceptance(1e-5, 0.99, 0.95, 0.6, 100, "questions.jsonl", "K = 2")


@pytest.fixture(scope="module")
def folder(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = models(Tiny(context=512), (2, 5)).bundle.folder
    folder = bundles.copy(source, tmp_path_factory.mktemp("accept") / "bundle")
    write_card(folder, dataclasses.replace(card_of(Bundle.open(folder), 2, "none"), accept=CARD))
    return folder


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VTX_LLGUIDANCE", str(Path(llguidance.__file__).parent / "_lib.abi3.so"))


def of_choices(choices: tuple[str, ...]) -> dict[str, bytes]:
    return {"guide_kind": b"choices", "guide": json.dumps(list(choices)).encode()}


@pytest.mark.slow
def test_every_runtime_decides_alike(folder: Path) -> None:
    decisions = set[bool]()
    with (
        load(folder, threads=1) as model,
        model.open(random_image(4)) as image,
        closing(Loaded(folder, "cpu")) as loaded,
        closing(Frames(loaded, [np.asarray(random_image(4))])) as frames,
        serving({"m": folder}) as served,
    ):
        for choices in CHOICES:
            plain = image.ask(QUESTION, choices=choices)
            assert (plain.unsure, plain.judged, "unsure" in plain.to_dict()) == (None, False, False)
            for accept in THRESHOLDS:
                wanted = image.ask(QUESTION, choices=choices, accept=accept)
                assert wanted.choices is not None
                assert wanted.choices_mass is not None
                limit = CARD.threshold if accept == "card" else float(accept)
                sure = wanted.choices[wanted.text] * wanted.choices_mass >= limit
                assert (wanted.unsure is None) is sure
                decisions.add(sure)
                in_c = frames.ask(QUESTION, accept=str(accept).encode(), max_new_tokens=32, **of_choices(choices))
                body = {"model": "m", "messages": [user(QUESTION, random_image(4))], "guided_choice": list(choices)}
                reply = served.chat({**body, "accept": accept}).json
                for facts in (in_c, reply["usage"]["vtx"], wanted.to_dict()):
                    assert [*facts["token_ids"]] == [*wanted.token_ids]
                    assert (facts["unsure"] is None) is sure, (choices, accept)
                    assert facts["choices_mass"] == pytest.approx(wanted.choices_mass, rel=1e-3)
                    if not sure:
                        assert f"; at least {limit:.3g} is accepted" in facts["unsure"]
    assert decisions == {True, False}


def test_wrong_thresholds_are_refused_alike(folder: Path, models: Models) -> None:
    without = models(Tiny(context=512), (2, 5)).bundle.folder
    for bundle, accept, message in [
        *((folder, *wrong) for wrong in WRONG),
        (without, "card", "accept is card, and no card is in use; run vtx-eval --coverage"),
    ]:
        with (
            load(bundle, threads=1) as model,
            model.open(random_image(4)) as image,
            closing(Loaded(bundle, "cpu")) as loaded,
            closing(Frames(loaded, [np.asarray(random_image(4))])) as frames,
        ):
            with pytest.raises(RequestError, match=message):
                image.ask(QUESTION, choices=["a"], accept=accept)
            with pytest.raises(AssertionError, match=message):
                frames.ask(QUESTION, accept=str(accept).encode(), **of_choices(("a",)))
            for form in ({}, {"guide_kind": b"regex", "guide": b"a"}):
                with pytest.raises(AssertionError, match="accept judges the probability of a choice, and 0 choices"):
                    frames.ask(QUESTION, accept=b"0.5", **form)
            with pytest.raises(RequestError, match="accept judges the probability of a choice, and 0 choices"):
                image.ask(QUESTION, regex="a", accept=0.5)
            with pytest.raises(RequestError, match="and 65 choices are given; give 1 to 64"):
                image.ask(QUESTION, choices=[str(n) for n in range(65)], accept=0.5)


def test_an_answer_that_was_cut_is_unsure(folder: Path) -> None:
    with load(folder, threads=1) as model, model.open(random_image(4)) as image:
        cut = image.ask(QUESTION, choices=["a square and a circle"], accept=0, max_new_tokens=2)
    assert (cut.stopped, cut.incomplete) == ("length", True)
    assert cut.unsure is not None
    assert "cut before it was one of the choices" in cut.unsure
