"""Sampling keeps the tokens that transformers' warpers keep, and the same seed draws the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.session.sampling import Sampler, Sampling, log_probability

VOCAB = 64
Logits = NDArray[np.float32]


class Recorder:
    """In a generator's place: remembers the odds it is given."""

    def __init__(self) -> None:
        self.odds: NDArray[np.float64] = np.zeros(0)

    def choice(self, odds: NDArray[np.float64]) -> int:
        self.odds = odds
        return int(odds.argmax())


def odds_of(logits: Logits, **values: Any) -> NDArray[np.float64]:
    """What a sampler draws from."""
    sampler, recorder = Sampler(Sampling(**values)), Recorder()
    sampler.generator = recorder  # type: ignore[assignment]
    sampler(logits)
    return recorder.odds


def warped(logits: Logits, temperature: float, top_p: float, top_k: int) -> NDArray[np.float64]:
    """The same of transformers' warpers, in the order in which `generate` has them."""
    import torch
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    ids, scores = torch.zeros((1, 1), dtype=torch.long), torch.from_numpy(logits.astype(np.float64))[None]
    scores = TemperatureLogitsWarper(temperature)(ids, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    return np.asarray(scores.softmax(-1)[0].numpy())


def random_logits(seed: int, vocab: int = VOCAB) -> Logits:
    return np.random.default_rng(seed).normal(0, 3, vocab).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    temperature=st.floats(0.1, 5),
    top_p=st.just(1.0) | st.floats(0.01, 0.999),
    top_k=st.integers(0, VOCAB + 5),
)
def test_the_odds_are_those_of_transformers_warpers(seed: int, temperature: float, top_p: float, top_k: int) -> None:
    logits = random_logits(seed)
    want = warped(logits, temperature, top_p, top_k)
    got = odds_of(logits, temperature=temperature, top_p=top_p, top_k=top_k)
    assert np.array_equal(got > 0, want > 0)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def penalised(logits: Logits, used: list[int], penalty: float) -> Any:
    """The same of transformers' processor, as a tensor [1, vocab]."""
    import torch
    from transformers import RepetitionPenaltyLogitsProcessor

    return RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([used]), torch.from_numpy(logits.copy())[None])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    penalty=st.floats(0.1, 10),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
)
def test_the_repetition_penalty_is_transformers_processor(seed: int, penalty: float, prompt: list[int]) -> None:
    """Over prompt and answer, token by token, alike for greedy and for drawn tokens."""
    sampler = Sampler(Sampling(repetition_penalty=penalty), [*prompt, VOCAB + 5])
    used = list(prompt)
    for step in range(5):
        logits = random_logits(seed + step)
        wanted = penalised(logits, used, penalty)
        assert sampler(logits) == int(wanted.argmax())
        drawing, recorder = Sampler(Sampling(temperature=0.7, repetition_penalty=penalty), used), Recorder()
        drawing.generator = recorder  # type: ignore[assignment]
        drawing(logits)
        np.testing.assert_allclose(recorder.odds, warped(np.asarray(wanted[0]), 0.7, 1.0, 0), rtol=1e-6, atol=1e-9)
        used.append(int(wanted.argmax()))


def test_a_penalty_leaves_the_logits_it_is_given_alone() -> None:
    logits = random_logits(1)
    before = logits.copy()
    Sampler(Sampling(repetition_penalty=2.0), range(VOCAB))(logits)
    assert np.array_equal(logits, before)


def test_log_probabilities_are_those_of_torch() -> None:
    import torch

    for seed in range(5):
        logits = random_logits(seed)
        wanted = torch.from_numpy(logits).double().log_softmax(-1)
        np.testing.assert_allclose([log_probability(logits, t) for t in range(VOCAB)], wanted.numpy(), rtol=1e-12)


def test_equal_logits_at_the_edge_of_top_k_all_stay_as_in_transformers() -> None:
    logits = np.array([3, 1, 2, 2, 2, 0], np.float32)
    want = warped(logits, 1.0, 1.0, 2)
    assert (want > 0).sum() == 4
    np.testing.assert_allclose(odds_of(logits, temperature=1.0, top_k=2), want)


@pytest.mark.parametrize("values", [{}, {"temperature": 0.0, "top_p": 0.1, "top_k": 3, "seed": 1}])
def test_temperature_zero_takes_the_most_likely_token(values: dict[str, Any]) -> None:
    for seed in range(5):
        logits = random_logits(seed)
        assert Sampler(Sampling(**values))(logits) == logits.argmax()


def test_of_equal_logits_greedy_takes_the_first() -> None:
    assert Sampler(Sampling())(np.array([1, 5, 5, 5], np.float32)) == 1


@pytest.mark.parametrize("values", [{"top_k": 1}, {"top_p": 1e-9}])
def test_the_narrowest_choice_is_the_most_likely_token(values: dict[str, Any]) -> None:
    sampler = Sampler(Sampling(temperature=2.0, **values))
    for seed in range(20):
        logits = random_logits(seed)
        assert sampler(logits) == logits.argmax()


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    def draw(seed: int) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.5, seed=seed))
        return [sampler(random_logits(step)) for step in range(40)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_without_a_seed_two_samplers_differ() -> None:
    flat = np.zeros(VOCAB, np.float32)
    first, second = Sampler(Sampling(temperature=1.0)), Sampler(Sampling(temperature=1.0))
    assert [first(flat) for _ in range(40)] != [second(flat) for _ in range(40)]


def test_draws_follow_the_odds() -> None:
    logits = np.log(np.array([0.6, 0.3, 0.1, 1e-30], np.float32))
    sampler = Sampler(Sampling(temperature=1.0, seed=3))
    counts = np.bincount([sampler(logits) for _ in range(4000)], minlength=4) / 4000
    np.testing.assert_allclose(counts, [0.6, 0.3, 0.1, 0], atol=0.03)


@pytest.mark.parametrize(
    "temperature",
    [1e-3, 1e-30, 1e-308, 5e-324, 1e308],
)
def test_any_positive_temperature_gives_a_token(temperature: float) -> None:
    logits = random_logits(0)
    token = Sampler(Sampling(temperature=temperature, top_p=0.9, top_k=5, seed=0))(logits)
    assert 0 <= token < VOCAB
    if temperature < 1:
        assert token == logits.argmax()


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([-3e38, 0, 3e38], np.float32)
    assert Sampler(Sampling(temperature=0.1, seed=0))(logits) == 2


@pytest.mark.parametrize("temperature", [-0.1, -1e-320, float("nan"), float("inf"), float("-inf")])
def test_a_temperature_that_is_none_is_refused(temperature: float) -> None:
    with pytest.raises(RequestError, match="temperature"):
        Sampling(temperature=temperature)


@pytest.mark.parametrize("top_p", [0.0, -0.5, 1.0001, 2.0, float("nan"), float("inf")])
def test_a_top_p_outside_its_range_is_refused(top_p: float) -> None:
    with pytest.raises(RequestError, match="top-p"):
        Sampling(top_p=top_p)


def test_a_negative_top_k_or_seed_is_refused() -> None:
    with pytest.raises(RequestError, match="top-k"):
        Sampling(top_k=-1)
    with pytest.raises(RequestError, match="seed"):
        Sampling(seed=-1)


@pytest.mark.parametrize("values", [{}, {"temperature": 0.7}, {"repetition_penalty": 1.2}])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_refused(wrong: float, values: dict[str, Any]) -> None:
    logits = random_logits(0)
    logits[5] = wrong
    for call in (Sampler(Sampling(**values)), lambda row: log_probability(row, 3)):
        with pytest.raises(BundleError, match="not finite numbers; export with --precision bf16 or fp32"):
            call(logits)
    with pytest.raises(BundleError, match="not finite"):
        Sampler(Sampling(**values))(np.full(VOCAB, -np.inf, np.float32))


def test_logits_of_tokens_that_a_guide_leaves_out_may_be_minus_infinity() -> None:
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[3, 7]] = 1, 2
    assert Sampler(Sampling())(logits) == 7
    assert log_probability(logits, 3) == pytest.approx(-1.3133, abs=1e-4)
