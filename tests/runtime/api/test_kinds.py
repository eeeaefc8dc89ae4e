"""K = card: the card's K and rest for the kind of answer that a request's form asks for, else in full."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import bundles
from tests.support.exported import Models
from tests.support.families.qwen import QWEN35
from tests.support.kinds import FORMS, depth, write_kinds
from tests.support.serving import asking, serving, user
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api.kinds import card_depth, kinds_of
from vtx.runtime.api.load import load
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.card import CHOICE, NUMBER, TEXT, YES_NO, KindDepth, read_card
from vtx.runtime.bundle.spec.model_spec import unscored
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.prompt.guiding import Guide

KS = (2, 5, 8)
DEPTHS = (depth(YES_NO, 2), depth(CHOICE, 5, 0.1), depth(NUMBER, 8), depth(TEXT, 8, 0.4))
BOTH = {"properties": {"a": {"enum": ["x", "y"]}, "n": {"type": "integer"}}}


@pytest.fixture
def folder(models: Models, tmp_path: Path) -> Path:
    return bundles.copy(models(Tiny(context=512), KS).bundle.folder, tmp_path / "bundle")


@pytest.mark.parametrize(("form", "kinds"), FORMS, ids=[str(form)[:60] for form, _ in FORMS])
def test_the_form_of_a_request_says_the_kinds_of_its_answer(form: dict[str, Any], kinds: set[str]) -> None:
    assert kinds_of(Guide(**form) if form else None) == kinds


@pytest.mark.parametrize(
    ("depths", "form", "expected"),
    [
        (DEPTHS, {"choices": ["yes", "no"]}, (2, None)),
        (DEPTHS, {"choices": ["a", "b"]}, (5, 0.1)),
        (DEPTHS, {"schema": BOTH}, (8, 0.1)),
        (DEPTHS, {}, (8, 0.4)),
        (DEPTHS[:3], {}, (None, None)),
        (DEPTHS[1:], {"choices": ["yes", "no"]}, (None, None)),
        ((*DEPTHS[:3], depth(TEXT, None)), {}, (None, None)),
        ((depth(NUMBER, None), DEPTHS[3]), {}, (None, None)),
        ((depth(TEXT, 5),), {"regex": "a+"}, (5, None)),
    ],
)
def test_the_largest_k_and_rest_of_its_kinds_are_taken_and_what_was_not_measured_runs_in_full(
    models: Models, depths: Sequence[KindDepth], form: dict[str, Any], expected: object
) -> None:
    model = models(Tiny(context=512), KS).manifest.model
    assert card_depth(depths, Guide(**form) if form else None, model) == expected


@pytest.mark.slow
def test_a_k_at_which_no_rest_can_be_chosen_is_not_joined_with_one(models: Models) -> None:
    model = models(QWEN35, tuple(range(2, QWEN35.layers + 1))).manifest.model
    blind = max(k for k in range(2, QWEN35.layers + 1) if unscored(model, k - 1))
    scored = next(k for k in range(2, blind) if not unscored(model, k - 1))
    depths = (depth(CHOICE, scored, 0.1), depth(NUMBER, blind))
    assert card_depth(depths, Guide(choices=["a", "b"]), model) == (scored, 0.1)
    assert card_depth(depths, Guide(schema={"type": "number"}), model) == (blind, None)
    assert card_depth(depths, Guide(schema=BOTH), model) == (None, None)


def test_questions_and_turns_have_the_k_and_rest_of_their_form(folder: Path) -> None:
    write_kinds(folder, DEPTHS)
    with load(folder, threads=1) as model, model.open(random_image(0)) as image:
        asked: list[dict[str, Any]] = [{}, {"choices": ["yes", "no"]}, {"schema": BOTH}]
        named: list[dict[str, Any]] = [{"k": 8, "rest": 0.4}, {"k": 2}, {"k": 8, "rest": "10%"}]
        chat = image.chat("card")
        for form, depth_named in zip(asked, named, strict=True):
            found = image.ask("red?", "card", max_new_tokens=8, **form)
            wanted = image.ask("red?", max_new_tokens=8, **form, **depth_named)
            assert (found.stats.k, found.stats.rest) == (wanted.stats.k, wanted.stats.rest)
            assert found.token_ids == wanted.token_ids
            assert chat.ask("red?", max_new_tokens=8, **form).stats.k == wanted.stats.k
        assert image.ask("red?", max_new_tokens=1).stats.k == 2, "the card's own choice is the default"


def test_a_kind_that_was_not_measured_runs_in_full(folder: Path) -> None:
    write_kinds(folder, DEPTHS[:1])
    with load(folder, threads=1) as model, model.open(random_image(0)) as image:
        found, full = (image.ask("red?", k, max_new_tokens=4) for k in ("card", None))
        assert (found.token_ids, found.stats.k, found.stats.kv_slots) == (full.token_ids, None, full.stats.kv_slots)


def test_without_kinds_k_card_is_refused(models: Models, folder: Path) -> None:
    with (
        models(Tiny(context=512), KS).open(random_image(0)) as image,
        pytest.raises(RequestError, match="K is card, and no card is in use; run vtx-fit, or give K as a number"),
    ):
        image.ask("red?", "card")
    write_kinds(folder, ())
    with (
        load(folder, threads=1) as model,
        pytest.raises(RequestError, match="K is card, and the card has no K by kind of answer; run vtx-fit"),
    ):
        model.ask("red?", "card")


def test_a_rest_beside_k_card_is_refused(folder: Path) -> None:
    write_kinds(folder, DEPTHS)
    with (
        load(folder, threads=1) as model,
        pytest.raises(RequestError, match=r"and K is card; give K as a number, or leave the rest out"),
    ):
        model.ask("red?", "card", rest="10%")


def test_the_server_has_it_by_the_same_word(folder: Path) -> None:
    write_kinds(folder, DEPTHS)
    with serving({"tiny": folder}) as served:
        for form, k, rest in (({}, 8, 7), ({"guided_choice": ["a", "b"]}, 5, 2)):
            body = asking(user("red?", random_image(0)), k="card", ignore_eos=False, **form)
            stats = served.chat(body).json["usage"]["vtx"]
            assert (stats["k"], stats["rest"]) == (k, rest)


def test_a_kind_that_vtx_does_not_know_is_refused_where_the_card_is_read(folder: Path) -> None:
    write_kinds(folder, [depth("colour", 5)])
    with pytest.raises(BundleError, match=r"kinds: kind is 'colour', not .*run vtx-fit again, or remove card\.json"):
        read_card(Bundle.open(folder))


def test_cards_without_kinds_are_those_of_earlier_versions(folder: Path) -> None:
    write_kinds(folder, ())
    assert "kinds" not in (folder / "card.json").read_text()
    write_kinds(folder, DEPTHS)
    card = read_card(Bundle.open(folder))
    assert card is not None
    assert card.kinds == DEPTHS
