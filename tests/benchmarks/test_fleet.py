"""The simulation of several servers: computed by hand where it can be, else by what must hold."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import pytest
from benchmarks.fleet import Question, Server, Times, cameras, measured, simulate, zipf

from tests.support.bundles import export
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny

TIMES = Times(miss=4.0, hit=1.0, token=0.5, tokens=3, marginal=0.5, parallel=2, kept=2)


def answered(times: Times, *asked: tuple[str, float]) -> list[Question]:
    server, questions = Server(times), [Question(*one) for one in asked]
    for question in questions:
        server.advance(question.arrived)
        server.waiting.append(question)
    server.advance(math.inf)
    return questions


def test_a_picture_costs_once_and_prompts_wait_for_each_other() -> None:
    first, second, other = answered(TIMES, ("a", 0.0), ("a", 1.0), ("b", 20.0))
    assert (first.hit, second.hit, other.hit) == (False, True, False)
    assert first.first == pytest.approx(4.0)
    # Two tokens of the first, 1 s of work, take half of the server beside the second's prompt, 1 s of work, too.
    assert second.first == pytest.approx(6.0)
    assert other.first == pytest.approx(24.0)


def test_no_more_answers_run_than_a_server_has_places_for() -> None:
    times = Times(miss=1.0, hit=1.0, token=100.0, tokens=2, marginal=0.0, parallel=2, kept=9)
    questions = answered(times, ("a", 0.0), ("b", 0.0), ("c", 0.0))
    # The second's prompt shares the time with the first's token, which ends at 102 s; the third's with the second's.
    assert [question.first for question in questions] == pytest.approx([1.0, 3.0, 104.0])


def test_a_server_keeps_the_pictures_that_it_computed_last() -> None:
    questions = answered(TIMES, *((picture, 50.0 * n) for n, picture in enumerate("abacab")))
    assert [question.hit for question in questions] == [False, False, True, False, True, False]


def test_every_question_is_answered_though_a_server_dies_and_its_own_wait_longer() -> None:
    asked = [Question("a", 0.0), Question("b", 0.0), Question("c", 0.1), Question("d", 0.2)]
    figures = simulate(asked, 2, TIMES, random.Random(0), affinity=False, dies=True)
    assert all(not math.isnan(question.first) for question in asked)
    assert figures["p99_s"] > TIMES.miss


@pytest.mark.parametrize("dies", [False, True])
def test_routing_by_picture_finds_the_frames_of_cameras_and_chance_loses_them(dies: bool) -> None:
    rate = 0.5 * 8 * TIMES.capacity
    hits = dict[bool, float]()
    for affinity in (True, False):
        questions = cameras(rate, 800, TIMES.miss, random.Random(1))
        hits[affinity] = simulate(questions, 8, TIMES, random.Random(1), affinity=affinity, dies=dies)["hit_rate"]
    assert hits[True] > 0.6  # at most 3 of the 4 questions of a frame
    assert hits[False] < 0.4


def test_one_server_is_the_same_however_questions_are_sent() -> None:
    figures = [
        simulate([*zipf(0.1, 300, 50, random.Random(2))], 1, TIMES, random.Random(2), affinity=affinity, dies=False)
        for affinity in (True, False)
    ]
    assert figures[0] == figures[1]


def test_traffic_has_its_rate_and_its_popularity() -> None:
    questions = [*zipf(2.0, 8000, 10, random.Random(3))]
    assert questions[-1].arrived == pytest.approx(4000, rel=0.1)
    counts = Counter(question.picture for question in questions)
    assert counts["picture 0"] / counts["picture 4"] == pytest.approx(5, rel=0.25)
    filmed = cameras(0.5, 1000, 4.0, random.Random(3))
    assert len(filmed) / (filmed[-1].arrived - filmed[0].arrived) == pytest.approx(0.5, rel=0.15)
    assert set(Counter(question.picture for question in filmed).values()) == {4}


@pytest.mark.slow
def test_times_are_measured_on_a_bundle(tmp_path: Path, tiny_checkpoint: Checkpoints) -> None:
    times = measured(export(tiny_checkpoint(Tiny()), tmp_path / "tiny", (), "fp32").folder, 4)
    assert min(times.miss, times.hit, times.token) > 0
    assert times.tokens == 4
