"""The choice of K from a curve, and the intervals that it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace

import numpy as np
import pytest

from vtx.runtime.bundle.card import TEXT, WORD
from vtx.runtime.errors import RequestError
from vtx.tools.calibration.choosing import (
    Choosing,
    Point,
    choose,
    choose_by_accuracy,
    choose_by_eta,
    choose_by_kept,
)
from vtx.tools.calibration.report import ItemResult, Measurement, kind_curves, make_curve
from vtx.tools.data.choice import RecordedChoice, changed_answers
from vtx.tools.data.intervals import MeanInterval, ShareInterval, mean_intervals, wilson


def share_interval(hits: int, count: int) -> ShareInterval:
    return ShareInterval(hits / count, *wilson(hits / count, count), count)


def curve(
    kls: Sequence[float], right: Sequence[float] | None = None, count: int = 100, kept: Sequence[int] | None = None
) -> list[Point]:
    """Points at K = none, 5, 6, ... with intervals of a tenth of the mean; `right` has a share for none as well.

    `kept` are the unchanged answers of `count` at 5, 6, ...
    """
    points = []
    for i, value in enumerate([0.0, *kls]):
        share = None if right is None else ShareInterval(right[i], 0.0, 1.0, count)
        interval = MeanInterval(value, 0.9 * value, 1.1 * value)
        k = i + 4 if i else None
        agree = None if kept is None else share_interval([count, *kept][i], count)
        points.append(Point(k, k and k - 1, interval, interval, None, agree, share))
    return points


def test_answers_kept_choose_k_however_small_the_kl() -> None:
    points = curve([1e-4, 1e-4, 1e-4], count=20, kept=[7, 20, 20])
    assert choose_by_eta(points, 0.003, 20).k == 5
    decided = choose(points, Choosing(min_kept=80), 20)[-1]
    assert decided.k == 6
    assert decided.rule == "at least 80% of the answers kept"
    assert not decided.notes
    by_accuracy = choose(curve([1e-4], [1, 1], 20, kept=[7]), Choosing(max_drop=1), 20)
    assert [choice.k for choice in by_accuracy] == [5, None, 5], "the drop that was asked for decides"


@pytest.mark.parametrize(("kept", "count", "k"), [(95, 100, None), (96, 100, 5), (34, 34, None), (35, 35, 5)])
def test_the_lower_end_of_the_interval_decides(kept: int, count: int, k: int | None) -> None:
    choice = choose_by_kept(curve([1e-4], count=count, kept=[kept]), 90, 0.003)
    assert choice.k == k
    assert any("takes at least 35 answers" in note for note in choice.notes) == (count < 35)
    if k is None:
        assert f"the most are kept at K = 5, {kept / count:.1%} of {count}" in choice.notes[0]


def test_kl_is_a_second_opinion() -> None:
    choice = choose_by_kept(curve([0.2, 0.1, 1e-4], count=100, kept=[50, 100, 90]), 90, 0.003)
    assert choice.k == 6
    assert choice.notes == (
        "second opinion: the mean KL at K = 6 is 0.1, not below 0.003",
        "not monotone: after K = 6 fewer are kept again at K = 7",
    )
    assert [choice.k for choice in choose(curve([0.2, 1e-4]), Choosing(), 20)] == [6], "nothing else was measured"


def test_a_k_with_too_few_unchanged_answers_needs_consent() -> None:
    few = RecordedChoice(2, "rule", "data", 20, share_interval(7, 20))
    with pytest.raises(RequestError, match=r"K = 2, 35\.0% of 20 .* 18\.1% .* limit is 90%.*--allow-changed-answers"):
        few.check(allowed=False)
    few.check(allowed=True)
    with pytest.raises(RequestError, match=r"without comparing answers.*--allow-changed-answers"):
        RecordedChoice(2, "rule", "data", 20, None).check(allowed=False)
    RecordedChoice(2, "rule", "data", 20, share_interval(96, 100)).check(allowed=False)
    assert changed_answers(2, ShareInterval(0.99, float("nan"), 1.0, 100)), "what is not a number is no proof"


@pytest.mark.parametrize(
    ("kls", "k"),
    [([0.1, 0.01, 0.002, 0.001], 7), ([0.001, 0.0005], 5), ([0.003, 0.0029], 6), ([0.2, 0.1, 0.05, 0.0], 8)],
)
def test_the_first_k_below_eta_is_chosen(kls: list[float], k: int) -> None:
    assert choose_by_eta(curve(kls), 0.003, 20).k == k


def test_a_curve_that_rises_again_is_chosen_at_its_first_k_and_said() -> None:
    choice = choose_by_eta(curve([0.1, 0.001, 0.02, 0.002, 0.004, 0.001]), 0.003, 20)
    assert choice.k == 6
    assert len(choice.notes) == 1
    assert "not monotone" in choice.notes[0]
    assert "at K = 7, 9" in choice.notes[0]
    assert not choose_by_eta(curve([0.1, 0.001, 0.002, 0.0005]), 0.003, 20).notes


def test_an_interval_that_includes_eta_is_said() -> None:
    choice = choose_by_eta(curve([0.1, 0.0029]), 0.003, 20)
    assert choice.k == 6
    assert "with 20 samples" in choice.notes[0]
    assert "between 0.0026 and 0.0032" in choice.notes[0]


def test_an_eta_out_of_reach_says_the_smallest_kl_and_where() -> None:
    choice = choose_by_eta(curve([0.3, 0.01, 0.02]), 0.003, 20)
    assert choice.k is None
    assert "0.01, at K = 6" in choice.notes[0]


@pytest.mark.parametrize(
    ("right", "drop", "k", "again"),
    [
        ([0.90, 0.50, 0.88, 0.90], 2, 6, ""),
        ([0.90, 0.50, 0.88, 0.90], 1, 7, ""),
        ([0.90, 0.95, 0.88, 0.90], 0, 5, "at K = 6"),
        ([0.90, 0.50, 0.89, 0.80], 1, 6, "at K = 7"),
        ([0.90, 0.50, 0.60, 0.80], 5, None, ""),
    ],
)
def test_the_smallest_k_within_the_accuracy_drop_is_chosen(
    right: list[float], drop: float, k: int | None, again: str
) -> None:
    choice = choose_by_accuracy(curve([1, 1, 1], right, 1000), drop)
    assert choice.k == k
    assert [again] == [note[-8:] if "not monotone" in note else "" for note in [*choice.notes[:1], ""][:1]]
    if k is None:
        assert "10.0 points, at K = 7" in choice.notes[0]


def test_few_answers_are_said_to_be_coarse_and_none_is_an_error() -> None:
    assert "one answer of these 20 is 5 points" in choose_by_accuracy(curve([1], [1, 1], 20), 1).notes[0]
    with pytest.raises(RequestError, match="--max-new-tokens"):
        choose_by_accuracy(curve([1, 1]), 1)


@pytest.mark.parametrize(
    "wrong",
    [{"eta": 0}, {"eta": float("nan")}, {"max_drop": -1}, {"max_drop": 101}, {"min_kept": 0}, {"min_kept": 100}],
)
def test_rules_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RequestError, match="must be"):
        Choosing(**wrong)


def test_intervals_are_those_of_the_textbooks() -> None:
    assert astuple(share_interval(8, 10)) == pytest.approx((0.8, 0.4902, 0.9433, 10), abs=1e-4)
    assert share_interval(10, 10).high == pytest.approx(1)
    values = np.random.default_rng(1).normal(5, 2, (400, 1))
    found = mean_intervals(np.hstack([values, np.ones((400, 1))]))
    assert found[1] == MeanInterval(1, 1, 1)
    half = 1.96 * values.std() / 20
    assert found[0].low == pytest.approx(values.mean() - half, abs=half / 10)
    assert found[0].high == pytest.approx(values.mean() + half, abs=half / 10)
    assert mean_intervals(values) == mean_intervals(values)


def asked(images: int, questions: int, changed: Sequence[int]) -> Measurement:
    """Results at K = 5 of some questions an image; every answer about the images `changed` changes."""
    results = [
        ItemResult("red", (float(image in changed),), (0.0,), (image not in changed,), (True, image not in changed),
                   (True, image not in changed), image=image)
        for image in range(images) for _ in range(questions)
    ]  # fmt: skip
    return Measurement((5,), tuple(results), ())


def test_ten_questions_about_an_image_are_not_ten_images() -> None:
    """Two of twenty images change all their answers: of 200 questions the intervals are those of the 20 images."""
    together, few = (make_curve(asked(20, questions, [3, 7]))[1] for questions in (10, 1))
    assert together.agree is not None
    assert few.agree is not None
    assert (together.agree.share, together.agree.count) == (0.9, 200)
    alone = share_interval(180, 200)
    assert together.agree.high - together.agree.low > 2.5 * (alone.high - alone.low)
    assert (together.agree.low, together.agree.high) == pytest.approx((few.agree.low, few.agree.high), abs=0.01)
    assert together.kl == few.kl
    assert together.lost == few.lost
    unchanged = make_curve(asked(20, 10, []))[1].agree
    assert unchanged is not None
    assert unchanged.low == pytest.approx(share_interval(20, 20).low)


def test_a_drop_is_judged_by_its_paired_interval() -> None:
    """One of 150 images changes: 0.7 points at K = 5, and up to 2 of them by chance."""
    curve = make_curve(asked(150, 1, [3]))
    assert curve[1].lost is not None
    assert (curve[0].lost, curve[1].lost.mean) == (None, pytest.approx(1 / 150))
    choice = choose_by_accuracy(curve, 1)
    assert choice.k == 5
    assert "question by question the drop at K = 5 is between 0.0 and 2.0 points" in choice.notes[0]
    assert not any("question by question" in note for note in choose_by_accuracy(curve, 2.1).notes)


def test_a_curve_counts_only_the_items_that_have_an_answer() -> None:
    rows = [
        ItemResult(None, kl=(0.2, 0.1), kl_reverse=(0.4, 0.2), top1=(False, True), agree=None, right=right)
        for right in ((True, False, True), None, (True, False, False), None)
    ]
    none, first, second = make_curve(Measurement((5, 6), tuple(rows), ()))
    assert (none.k, first.k, second.full_layers) == (None, 5, 5)
    assert none.kl.mean == 0
    assert first.kl_reverse.mean == pytest.approx(0.4)
    assert [p.right.share for p in (none, first, second)] == [1, 0, 0.5]
    assert none.right.count == 2
    assert none.top1.share == 1
    assert first.agree is None


def test_each_kind_of_answer_has_its_curve_and_its_choice() -> None:
    """Words stay from K = 2 on, quoted text from 3: each as a calibration of its items alone."""
    kinds = [WORD, TEXT] * 50

    def result(number: int) -> ItemResult:
        kept = (True, kinds[number] == WORD, True)
        return ItemResult("a", (1.0, 0.0), (1.0, 0.0), (True, True), kept, None, image=number, kind=kinds[number])

    results = tuple(map(result, range(100)))
    rule = Choosing(min_kept=90)
    words, texts = kind_curves(Measurement((2, 3), results, ()), rule)
    assert [(of.kind, of.items, of.k) for of in (words, texts)] == [(WORD, 50, 2), (TEXT, 50, 3)]
    assert choose(make_curve(Measurement((2, 3), results, ())), rule, 100)[-1].k == 3
    assert words.curve == make_curve(Measurement((2, 3), results[::2], ()))
    unknown = replace(results[0], kind=None)
    assert kind_curves(Measurement((2, 3), (unknown,), ()), rule) == ()
