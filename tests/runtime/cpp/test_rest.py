"""K with a rest in libvtx: Python's answers, which equal the plain statement, and Python's refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import bundles
from tests.support.cabi import Frames, Loaded
from tests.support.cards import card_of
from tests.support.cpp import DEVICES, ask, failure, needs_abi, needs_cpp
from tests.support.exported import Models
from tests.support.families.qwen import QWEN35
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.card import write_card
from vtx.runtime.errors import RequestError

pytestmark = [needs_cpp, pytest.mark.dialects("ort", "plain")]
KS = (2, 5, 8)
STEPS = 6
QUESTIONS = ("red?", "How many circle shapes are there?", "What is the colour of the square in the picture?", "left?")
SAME = ("token_ids", "k", "rest", "kv_slots", "vision_tokens_kept", "reused_layers", "kept", "vision_tokens_mean")
CASES: dict[str, Sequence[tuple[int | str, str | None]]] = {
    "shares": [(5, "10%"), (5, "40%"), (8, "10%"), (2, "12.5%"), (5, None), (8, "40%")],
    "numbers": [(5, "1"), (5, "100"), (8, "3"), ("none", None), (8, "0"), (5, "16")],
}


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    random_image(4).save(tmp_path / "a.png")
    return tmp_path / "a.png"


@pytest.mark.sampled
@needs_abi
@DEVICES
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("turns", [(), range(6)], ids=["questions", "chat"])
def test_answers_are_pythons(models: Models, picture: Path, device: str, case: str, turns: Sequence[int]) -> None:
    folder = models(Tiny(context=512), KS).bundle.folder
    with (
        load(folder, device=device, threads=1) as model,
        model.open(picture) as image,
        closing(Loaded(folder, device)) as loaded,
    ):
        asked = [(QUESTIONS[n % len(QUESTIONS)], k, rest) for n, (k, rest) in enumerate(CASES[case])]
        if turns:
            asked = [(question, 5, rest) for question, _, rest in asked]
        chat = image.chat(5)
        with closing(Frames(loaded, [np.asarray(random_image(4))])) as frames:
            for question, k, rest in asked:
                options = Options(max_new_tokens=STEPS, ignore_eos=True, rest=rest)
                wanted = (chat.ask(question, options) if turns else image.ask(question, k, options)).to_dict()
                more = {} if rest is None else {"rest": rest.encode()}
                found = frames.ask(
                    question, turn=bool(turns), k=str(k).encode(), max_new_tokens=STEPS, ignore_eos=1, **more
                )
                for name in SAME:
                    assert found.get(name) == _listed(wanted.get(name)), (question, k, rest, name)


def _listed(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, dict):
        return {name: _listed(each) for name, each in value.items()}
    return [_listed(each) for each in value] if isinstance(value, tuple | list) else value


@pytest.mark.parametrize("rest", ["", "-1", "-5%", "101%", "ten", "10%%", "%", "1.5", " 5", "1e2%", "12345678901"])
def test_what_is_no_rest_is_refused_in_pythons_words(models: Models, picture: Path, rest: str) -> None:
    with pytest.raises(RequestError) as refused:
        Options(rest=rest)
    folder = models(Tiny(), KS).bundle.folder
    assert str(refused.value) in failure("run", "--bundle", folder, picture, "red?", "--k", "5", "--rest", rest)


@pytest.mark.parametrize("k", ["none", "auto"])
def test_a_rest_without_a_prebuilt_k_is_refused_in_pythons_words(models: Models, picture: Path, k: str) -> None:
    model = models(Tiny(), KS)
    with model.open(picture) as image, pytest.raises(RequestError) as refused:
        image.ask("red?", k, rest="10%")
    told = failure("run", "--bundle", model.bundle.folder, picture, "red?", "--k", k, "--rest", "10%")
    assert str(refused.value) in told


def test_a_picture_with_no_text_behind_it_is_refused_in_pythons_words(models: Models, picture: Path) -> None:
    model = models(Tiny(), KS)
    with model.open(picture) as image, pytest.raises(RequestError) as refused:
        image.ask("", 5, rest="10%")
    told = failure("run", "--bundle", model.bundle.folder, picture, "", "--k", "5", "--rest", "10%")
    assert str(refused.value) in told


def test_a_k_behind_a_layer_with_a_state_keeps_no_rest(
    tiny_checkpoint: Checkpoints, tmp_path: Path, picture: Path
) -> None:
    bundle = bundles.export(tiny_checkpoint(QWEN35), tmp_path / "bundle", tuple(range(2, QWEN35.layers + 1)), "fp32")
    convolved = bundle.manifest.model.conv_layers
    stateful = next(k for k in bundle.manifest.variants if k - 1 in convolved)
    with load(bundle.folder, threads=1) as model, model.open(picture) as image:
        with pytest.raises(RequestError, match="keeps a state in place of attention; use another K") as refused:
            image.ask("red?", stateful, rest="10%")
        told = failure("run", "--bundle", bundle.folder, picture, "red?", "--k", str(stateful), "--rest", "10%")
        assert str(refused.value) in told


def test_the_cards_rest_goes_with_its_k(models: Models, picture: Path, tmp_path: Path) -> None:
    folder = bundles.copy(models(Tiny(), KS).bundle.folder, tmp_path / "bundle")
    card = card_of(Bundle.open(folder), 5, "none")
    how = dataclasses.replace(card.chosen.configuration, rest="40%")
    write_card(folder, dataclasses.replace(card, chosen=dataclasses.replace(card.chosen, configuration=how)))
    with load(folder, threads=1) as model, model.open(picture) as image:
        for options, k, rest in (((), "default", 7), (("--k", "5"), 5, 0), (("--rest", "3"), "default", 3)):
            more = {"rest": "3"} if "--rest" in options else {}
            wanted = image.ask("red?", k, max_new_tokens=4, **more)
            [found] = ask(folder, picture, "red?", "--max-new-tokens", "4", *options)
            assert found["rest"] == wanted.stats.rest == rest
            assert found["token_ids"] == list(wanted.token_ids)
