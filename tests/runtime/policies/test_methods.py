"""Which image tokens each reduction keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.boundaries import attention, boundary
from tests.support.json_files import read_json
from tests.support.towers import tower_spec
from vtx.runtime.bundle.spec.names import FEATURES
from vtx.runtime.policies import Boundary, PromptText
from vtx.runtime.policies.methods.cdpruner import COSINES, CDPruner, cosines_of, greedy, scaled
from vtx.runtime.policies.methods.cls import Cls
from vtx.runtime.policies.methods.dart import Dart, set_order
from vtx.runtime.policies.methods.fastv import FastV
from vtx.runtime.policies.methods.gate import Gate
from vtx.runtime.policies.methods.lsm import Lsm
from vtx.runtime.policies.methods.mustdrop import MustDrop
from vtx.runtime.vision.tokens import ImageTokens, Patches, highest, keys, share

SET_ORDERS = Path(__file__).parent / "set_orders.json"


@pytest.mark.parametrize(
    ("ratio", "count", "leave"),
    [
        (0.29, 100, 29),
        (0.57, 100, 57),
        (0.58, 50, 29),
        (0.07, 100, 7),
        (1.1e-9, 100, 0),
        (0.289999, 100, 28),
        (0.0, 10, 0),
        (0.99, 10, 9),
        (1.0, 10, 10),
    ],
)  # fmt: skip
def test_fastv_rounds_what_leaves_down_but_not_for_the_error_of_binary_fractions(
    ratio: float, count: int, leave: int
) -> None:
    kept = FastV(2, ratio).keep_mask(boundary(list(range(count))))
    assert (count if kept is None else int(kept.sum())) == count - leave


@pytest.mark.parametrize("threshold", [0.0, 0.25, 0.5, 1.0])
def test_a_gate_fires_above_its_threshold_and_not_at_it(threshold: float) -> None:
    for probability, fires in ((threshold, False), (np.nextafter(threshold, 2), True), (threshold - 0.01, False)):
        gate = Gate(lambda *_, p=probability: np.array([1 - p, p]), (3,), threshold)  # type: ignore[misc]
        kept = gate.keep_mask(boundary([1, 2, 3]))
        assert (kept is not None) == fires
        assert kept is None or not kept.any()


def test_fastv_asks_for_the_last_row_only() -> None:
    asked: list[bool] = []
    scores = np.ones(4, np.float32), np.ones(4, np.float32)
    here = Boundary(3, np.zeros((1, 4)), (), np.ones(4, bool), lambda last: (asked.append(last), scores)[1])
    FastV().keep_mask(here)
    MustDrop(key=0).keep_mask(here)
    assert asked == [True, False]


def test_key_rows_are_chosen_image_by_image() -> None:
    images = [Patches(np.arange(3), np.zeros(3, bool), attention(a)) for a in ([1, 2, 3], [30, 20, 10], [5, 5, 5])]
    assert keys(images, 0.3).tolist() == [False, False, True, True, False, False, True, False, False]
    assert keys([], 0.3).tolist() == []


@given(st.floats(0, 1), st.integers(0, 1000))
def test_a_share_is_rounded_up_but_for_the_error_of_binary_fractions(part: float, count: int) -> None:
    found = share(part, count)
    assert 0 <= found <= count
    assert -1e-6 <= found - part * count < 1
    assert share(0.07, 100) == 7
    assert math.ceil(0.07 * 100) == 8


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(0, 40))
def test_the_highest_are_as_sorting_says(values: list[int], count: int) -> None:
    wanted = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert np.flatnonzero(highest(np.array(values, np.float32), count)).tolist() == sorted(wanted)


def test_cls_keeps_the_share_rounded_up_in_the_order_there() -> None:
    image = ImageTokens(np.zeros((5, 2), np.float32), boundary([0] * 5, keys=[1, 5, 4, 2, 3]).images[0])
    entered = Cls(0.5).select(image)
    assert entered is not None
    assert entered.tolist() == [1, 2, 4]


def test_merged_first_moves_the_most_alike_windows_to_the_front_behind_the_class_token() -> None:
    places, merged = np.array([-1, 0, 3, 4, 9, 12]), np.array([False, False, True, False, True, True])
    patches = Patches(places, merged, {"similarity": np.array([0, 0, 0.8, 0, 0.9, 0.8], np.float32)})
    image = ImageTokens(np.zeros((6, 2), np.float32), patches)
    order = Lsm(order="merged-first").select(image)
    assert order is not None
    assert image.take(order).patches.indices.tolist() == [-1, 9, 3, 12, 0, 4]
    assert Lsm().select(image) is None


@pytest.mark.parametrize(("tokens", "class_token", "first"), [(16, True, 0), (17, True, -1), (17, False, 0)])
def test_the_tower_says_if_the_first_token_is_its_class_token(tokens: int, class_token: bool, first: int) -> None:
    tower = replace(tower_spec(56, 14, tokens), class_token=class_token, states=16 + class_token)
    image = ImageTokens.of({FEATURES: np.zeros((tokens, 2), np.float32)}, tower)
    assert image.patches.indices.tolist() == list(range(first, first + tokens))


def test_cdpruner_takes_the_earlier_of_equal_gains_and_never_a_row_twice() -> None:
    assert greedy(np.eye(5, dtype=np.float32), np.ones(5), 3).tolist() == [0, 1, 2]
    assert greedy(np.ones((5, 5), np.float32), np.ones(5), 3).tolist() == [0, 1, 2]
    assert scaled(np.full(4, 0.5)).tolist() == [1, 1, 1, 1]


def test_cdpruner_takes_gains_that_differ_by_rounding_as_equal() -> None:
    close = np.array([0.3, 1, 1 + 1e-14, 0.2])
    assert greedy(np.eye(4, dtype=np.float32), close, 1).tolist() == [1]
    assert scaled(0.5 + np.array([0, 1e-15, -1e-15])).tolist() == [1, 1, 1]


def test_cdpruner_works_out_an_images_cosines_once_for_all_questions() -> None:
    """With others in their place, in which no two tokens are alike, relevance alone would decide."""
    random = np.random.default_rng(5)
    image = ImageTokens.one_per_patch(random.standard_normal((36, 24)).astype(np.float32))
    question = PromptText(np.zeros(1, np.int64), random.standard_normal((1, 24), np.float32), np.ones(1, bool))
    before = CDPruner(12).select(image, question)
    image.derived[COSINES] = np.eye(36, dtype=np.float32)
    found = CDPruner(12).select(image, question)
    assert found is not None
    assert before is not None
    relevance = image.hidden @ question.hidden[0] / np.linalg.norm(image.hidden, axis=1)
    assert found.tolist() == sorted(np.argsort(-relevance)[:12].tolist())
    assert found.tolist() != before.tolist()


def test_cdpruner_makes_the_determinant_largest_nearly_up_to_the_rank_of_its_tokens() -> None:
    kernel = cosines_of(np.random.default_rng(0).standard_normal((81, 64)).astype(np.float32))
    exact, chosen = kernel.astype(np.float64), list[int]()
    while len(chosen) < 60:
        rest = [i for i in range(81) if i not in chosen]
        gains = [np.linalg.slogdet(exact[np.ix_([*chosen, i], [*chosen, i])])[1] for i in rest]
        chosen.append(rest[int(np.argmax(gains))])
    assert greedy(kernel, np.ones(81), 60).tolist() == sorted(chosen)


def pivoting(rows: list[list[float]], text: list[list[float]], sizes: list[float], text_sizes: list[float]) -> Boundary:
    """A boundary with these hidden states, and keys of one component."""
    hidden, keys = np.array(rows, np.float32), tuple(np.array([s], np.float32).T for s in (sizes, text_sizes))
    image = Patches(np.arange(len(rows)), np.zeros(len(rows), bool))
    return Boundary(
        3, np.array(text, np.float32), (image,), np.ones(len(rows), bool), image_hidden=lambda: hidden,
        keys=lambda: (keys[0], keys[1]), final_norm=np.ones(hidden.shape[1], np.float32),
    )  # fmt: skip


def test_dart_leaves_an_image_alone_that_is_no_longer_than_what_it_keeps() -> None:
    here = pivoting([[1, 0]] * 5, [[0, 1]], [1] * 5, [1])
    assert Dart(4, 2, 1, 1).keep_mask(here) is None
    assert Dart(0.5, 0, 4, 0).select(ImageTokens.one_per_patch(np.ones((9, 2), np.float32))) is None


def test_dart_before_layer_1_looks_at_text_before_the_image_too() -> None:
    rows = np.random.default_rng(0).standard_normal((16, 8), dtype=np.float32)
    text = np.random.default_rng(1).standard_normal((3, 8), dtype=np.float32)
    text[0] *= 9
    chosen = []
    for sign in (1, -1):
        hidden = text * np.array([[sign], [1], [1]], np.float32)
        question = PromptText(np.arange(3), hidden, np.array([False, True, True]))
        selected = Dart(6, 0, 1, 1).select(ImageTokens.one_per_patch(rows), question)
        assert selected is not None
        chosen.append(selected.tolist())
    assert len(chosen[0]) == len(chosen[1]) == 6
    assert chosen[0] != chosen[1]


def test_tokens_that_keep_their_positions_go_on_keeping_them() -> None:
    image = ImageTokens.one_per_patch(np.zeros((16, 2), np.float32))
    assert image.take(np.array([3, 5])).positions == 2
    gaps = image.take(np.array([3, 5, 9]), keep_positions=True)
    assert (gaps.offsets is not None, gaps.positions) == (True, 16)
    later = gaps.take(np.array([0, 2]))
    assert later.offsets is not None
    assert (later.offsets.tolist(), later.positions) == ([3, 9], 16)


def test_pivots_in_the_order_of_darts_code_follow_the_recorded_cases() -> None:
    """Those that tests/runtime/cpp/test_selection.py holds libvtx to; CPython's own sets gave them."""
    cases = read_json(SET_ORDERS)
    assert len(cases) > 50
    for numbers, order in cases:
        assert set_order(numbers) == order
        assert list(set(numbers)) == order, "this Python walks through sets in another order than DART's authors saw"
