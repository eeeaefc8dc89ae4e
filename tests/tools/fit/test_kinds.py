"""K by the kind of answer on made-up answers: the fastest pair that keeps a kind, and none where nothing shows it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.exported import Models
from tests.support.families.qwen import QWEN35
from tests.support.tiny import Tiny

from vtx.runtime.bundle.card import NUMBER, TEXT, WORD, YES_NO, KindDepth
from vtx.runtime.bundle.spec.model_spec import unscored
from vtx.tools.fit.asking import TimedAnswer
from vtx.tools.fit.kinds import fit_kinds
from vtx.tools.fit.search import Budget
from vtx.tools.fit.settings import RESTS, Setting, engines_of, pairs_of, settings_of

KS = (3, 5)
WORDS = {YES_NO: "yes", NUMBER: "7", WORD: "red", TEXT: "a red circle"}
# The questions of each kind, and the least (K, rest in percent) at which their answers stay the same, in this order.
COUNTS = {YES_NO: 160, NUMBER: 160, WORD: 12, TEXT: 160}
PAIRS = [(3, 0), (3, 5), (3, 10), (3, 20), (5, 0), (5, 5), (5, 10), (5, 20)]
LEAST = {YES_NO: (3, 0), NUMBER: (3, 10), WORD: (3, 0), TEXT: (5, 20)}


class Made:
    """Answers to numbered questions of known kinds; a pair that costs more takes longer."""

    def __init__(self, kinds: Sequence[str], *, answered: bool, least: dict[str, Any]) -> None:
        items = tuple(SimpleNamespace(answer=WORDS[kind] if answered else None) for kind in kinds)
        images = tuple(f"image {n}" for n in range(len(kinds)))
        self.questions: Any = SimpleNamespace(data=SimpleNamespace(items=items), images=images)
        self.kinds, self.least, self.asked = kinds, least, set[tuple[Setting, int]]()

    def ask(self, settings: Sequence[Setting], numbers: Sequence[int], phase: str, turn: int = 0) -> None:
        self.asked |= {(setting, n) for setting in settings for n in numbers}

    def usable(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def reply(self, setting: Setting, number: int, turn: int = 0) -> TimedAnswer:
        ms = 50.0 if setting.k is None else 10.0 + PAIRS.index(pair_of(setting))
        return TimedAnswer(WORDS[self.kinds[number]], ms, None, ms)

    def changed(self, setting: Setting, reference: Setting, number: int) -> float:
        least = self.least[self.kinds[number]]
        return float(setting.k is not None and (least is None or PAIRS.index(pair_of(setting)) < PAIRS.index(least)))


def pair_of(setting: Setting) -> tuple[Any, int]:
    return setting.k, int((setting.rest or "0%").removesuffix("%"))


@pytest.fixture
def base(models: Models) -> Setting:
    [on, *_] = engines_of(models(Tiny(context=512), KS).bundle, "cpu")
    return Setting(on, None, "none")


def fitted(base: Setting, made: Made, keep: float = 0.95) -> tuple[KindDepth, ...]:
    outcome: Any = SimpleNamespace(chosen=base, reference=base, budget=Budget(keep))
    answers: Any = made
    return fit_kinds(outcome, answers, 0)


def kinds_of_all() -> list[str]:
    return [kind for kind, count in COUNTS.items() for _ in range(count)]


@pytest.mark.parametrize("answered", [True, False], ids=["the data's answers", "the full model's"])
def test_each_kind_has_the_fastest_pair_that_is_shown_to_keep_its_answers(base: Setting, *, answered: bool) -> None:
    depths = {depth.kind: depth for depth in fitted(base, Made(kinds_of_all(), answered=answered, least=LEAST))}
    assert {kind: (depth.k, depth.rest) for kind, depth in depths.items()} == {
        YES_NO: (3, 0.0), NUMBER: (3, 0.1), WORD: (None, 0.0), TEXT: (5, 0.2)
    }  # fmt: skip
    assert all(depth.low > 0.95 for kind, depth in depths.items() if kind != WORD)
    assert sum(depth.questions for depth in depths.values()) == len(kinds_of_all()) // 2


def test_a_kind_that_no_pair_keeps_or_with_too_few_questions_runs_in_full(base: Setting) -> None:
    made = Made(kinds_of_all(), answered=True, least={**LEAST, TEXT: None})
    depths = {depth.kind: depth for depth in fitted(base, made)}
    assert (depths[TEXT].k, depths[TEXT].kept) == (None, 1.0)
    few = [n for n, kind in enumerate(made.kinds) if kind == WORD]
    assert not {n for _, n in made.asked} & {*few}, "too few show nothing, so they are not asked"


def test_every_k_has_every_rest_that_can_stay_there(base: Setting, models: Models) -> None:
    assert [pair_of(setting) for setting in pairs_of(base)] == PAIRS
    searched = {(setting.k, setting.rest) for setting in settings_of(base.on)}
    assert searched >= {(k, rest) for k in KS for rest in (None, *RESTS)}
    ks = tuple(range(2, QWEN35.layers + 1))
    [on, *_] = engines_of(models(QWEN35, ks).bundle, "cpu")
    blind = {k for k in ks if unscored(on.bundle.manifest.model, k - 1)}
    assert blind
    rested = {setting.k for setting in settings_of(on) if setting.rest is not None}
    assert rested == {*ks} - blind


def test_a_rest_is_part_of_a_settings_key_and_name(base: Setting) -> None:
    pairs = pairs_of(base)
    assert len({setting.key for setting in pairs}) == len(pairs)
    assert "K = 3 with a rest of 5%" in pairs[1].name
