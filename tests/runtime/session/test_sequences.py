"""Any sequence of questions, chats and abandoned answers over several images gives what fresh ones give.

`VTX_SEQUENCES=500` sets how many random sequences of each kind every engine is put through, others each time and over
more bundles.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.bundles import export_with
from tests.support.exported import THREADS
from tests.support.families.internvl import INTERNVL
from tests.support.families.qwen import QWEN3, QWEN25
from tests.support.families.smolvlm import SMOLVLM
from tests.support.pool_sequences import PoolSequences, requests
from tests.support.sequences import OPTIONS, QUESTIONS, End, Sequences, Setting, Step, steps
from tests.support.tiny import Tiny, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.bundle.safetensors import write_safetensors

GIVEN = os.environ.get("VTX_SEQUENCES")
EXAMPLES = int(GIVEN or 12)
any_sequence = settings(
    max_examples=EXAMPLES, derandomize=not GIVEN, print_blob=bool(GIVEN), deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
TINY = Tiny(image=126, context=512)
KS = (3, 5)
GATES = {3: 59, 5: 37}  # seeds of gates that withdraw the image for some of the questions
DUAL = "mustdrop:gamma=0.011,alpha=1,layers=2/4/6"
SETTINGS: tuple[Setting, ...] = (
    (None, "none"),
    (3, "none"),
    (None, "fastv:k=3"),
    (5, "fastv:k=3"),
    (None, DUAL),
    (None, "lsm:tau=0.1+fastv:k=3"),
    (5, f"{DUAL},positions=renumber"),
    (None, "cdpruner:keep=20"),
    (5, "dart:keep=24"),
    (None, "dart:keep=20,k=0"),
    (None, "pyramiddrop:layers=2/4"),
    (5, "pyramiddrop:layers=2/4,ratio=0.3,positions=renumber"),
    ("auto", "none"),
    ("auto", "fastv:k=3"),
    (3, "none", "10%"),
    (5, "none", "40%"),
    (5, "fastv:k=3", "7"),
    (5, "cdpruner:keep=20", "1"),
)
IMAGES = ([random_image(4)], [random_image(5)], [random_image(4), random_image(6, (40, 90))])
SHAPES = ([random_image(4, (150, 60))], [random_image(5, (40, 90))], [random_image(6), random_image(7, (90, 50))], [])
ENGINES = ("cpu", "openvino")
TOLERANCES = {"cpu": 2e-5, "openvino": 1e-4}
KEPT = 8  # image tokens, of each of two methods that leave out the others before the decoder
FAMILIES = (Tiny(context=512), Tiny(family="llava_next", context=512), QWEN25, SMOLVLM, INTERNVL, QWEN3)


@dataclass(frozen=True)
class Case:
    """A bundle and what is asked of it."""

    tiny: Tiny
    ks: tuple[int, ...]
    reductions: tuple[str, ...]
    settings: tuple[Setting, ...]
    images: Any
    seed: int = 0
    gates: bool = False


def numbers() -> st.SearchStrategy[int]:
    """The numbers of cases, half of them the first, which has most settings."""
    return st.just(0) | st.integers(0, len(CASES) - 1)


def random_case(seed: int) -> Case:
    """A random model of some family, cut at random layers, with every setting that it has."""
    rng = random.Random(seed)
    layers, family = rng.randint(5, 9), FAMILIES[seed % len(FAMILIES)]
    tiny = replace(family, layers=layers, kv_heads=rng.choice((1, 2, 4)) if family.heads == 4 else family.kv_heads)
    ks = tuple(sorted(rng.sample(range(2, layers + 1), rng.randint(1, 3))))
    cut, ratio = rng.randint(1, layers - 1), rng.choice((0.2, 0.5, 0.8))
    reductions = (f"fastv:k={cut},ratio={ratio}", f"dart:keep={rng.choice((0.3, 0.6))},k={rng.randint(1, layers - 1)}")
    reductions += (f"pyramiddrop:layers={'/'.join(map(str, sorted(rng.sample(range(1, layers - 1), 2))))}",)
    if family is not SMOLVLM:  # whose tiles have text among them, so that no token leaves before the decoder
        reductions += tuple(f"{spec}:keep={KEPT}{more}" for spec, more in (("cdpruner", ""), ("dart", ",k=0")))
    asked: tuple[Setting, ...] = tuple((k, spec) for k in (None, *ks) for spec in ("none", *reductions))
    asked += tuple((k, "none", rest) for k in ks for rest in ("10%", "40%", "1"))
    return Case(tiny, ks, reductions, asked, SHAPES, seed)


CASES = (
    Case(TINY, KS, (DUAL, "fastv:k=3", "dart", "pyramiddrop:layers=2/4"), SETTINGS, IMAGES, gates=True),
    *map(random_case, range(1, 13 if GIVEN else 2)),
)


def gate_file(path: Path) -> Path:
    """Random gates, which withdraw the image for some questions and not for others."""
    weights = {}
    for k, seed in GATES.items():
        rng = np.random.default_rng(seed)
        weights[f"gate.{k - 2}.fc1.weight"] = (rng.standard_normal((24, 128)) / 128**0.5).astype(np.float32)
        weights[f"gate.{k - 2}.fc2.weight"] = rng.standard_normal((2, 24)).astype(np.float32)
    write_safetensors(path, weights, None)
    return path


class Checks(NamedTuple):
    """What puts sequences to the bundle of a case."""

    direct: Sequences
    pool: PoolSequences


@pytest.fixture(scope="module")
def bundle_of(tiny_checkpoint: Any, tmp_path_factory: Any) -> Callable[[int], Path]:
    """The bundle of a case by its number, made once."""

    @cache
    def made(number: int) -> Path:
        folder, case = tmp_path_factory.mktemp("sequences"), CASES[number]
        options = ExportOptions(
            str(tiny_checkpoint(case.tiny, case.seed)), case.ks, "fp32", reductions=case.reductions,
            gates=gate_file(folder / "gates.safetensors") if case.gates else None,
        )  # fmt: skip
        return export_with(options, folder / "bundle").folder

    return made


@pytest.fixture(scope="module", params=ENGINES)
def checks(request: pytest.FixtureRequest, bundle_of: Callable[[int], Path]) -> Iterator[Callable[[int], Checks]]:
    """The checks of a case by its number, on one engine."""
    if request.param == "openvino":
        pytest.importorskip("openvino", reason="needs vtx-edge[openvino]")
    with ExitStack() as opened:

        @cache
        def made(number: int) -> Checks:
            case, tolerance = CASES[number], TOLERANCES[request.param]
            alone, shared = (
                opened.enter_context(load(bundle_of(number), device=request.param, threads=THREADS)) for _ in range(2)
            )
            direct = Sequences(alone, case.images, case.settings, tolerance)
            return Checks(direct, PoolSequences(shared, alone, case.images, case.settings, tolerance))

        yield made


@pytest.fixture
def sequences(checks: Callable[[int], Checks]) -> Sequences:
    return checks(0).direct


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", range(2, len(SETTINGS)))
def test_a_chat_after_an_independent_question_selects_its_own_tokens(sequences: Sequences, setting: int) -> None:
    sequences.check([Step(1, setting), Step(2, setting, chat=0), Step(0, setting, chat=0)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", range(2, len(SETTINGS)))
def test_two_interleaved_chats_keep_their_own_tokens(sequences: Sequences, setting: int) -> None:
    turns = [Step(question, setting, chat=chat) for question, chat in ((1, 0), (2, 1), (0, 0), (3, 1), (2, 0))]
    sequences.check(turns)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["interrupt", "cancel", "timeout", "leave"])
def test_a_first_turn_that_was_abandoned_selects_nothing(sequences: Sequences, how: Any) -> None:
    for setting in range(len(SETTINGS)):
        for at in (1, 4):
            turns = [Step(1, setting, chat=0, end=End(how, at)), Step(2, setting, chat=0), Step(0, setting, chat=0)]
            sequences.check(turns)


@pytest.mark.sampled(2)
def test_methods_that_leave_as_many_tokens_are_not_taken_for_each_other(sequences: Sequences) -> None:
    same = [
        n for n, setting in enumerate(SETTINGS) if setting in ((None, "cdpruner:keep=20"), (None, "dart:keep=20,k=0"))
    ]
    sequences.check([Step(1, setting) for setting in (*same, *same)])


@pytest.mark.sampled(2)
def test_the_gates_of_these_tests_decide_either_way(sequences: Sequences) -> None:
    conversations = [sequences.model.open(list(images)) for images in IMAGES]
    ks = {conversation.ask(question, "auto").stats.k for conversation in conversations for question in QUESTIONS}
    assert ks == {None, *KS}


@pytest.mark.sampled(2)
@any_sequence
@given(data=st.data())
def test_any_sequence_equals_fresh_answers(checks: Callable[[int], Checks], data: st.DataObject) -> None:
    assert OPTIONS.ignore_eos  # so that every answer has as many logits
    number = data.draw(numbers(), "bundle")
    sequences, case = checks(number).direct, CASES[number]
    sequences.check(data.draw(steps(len(case.settings), len(case.images))))
    if sequences.counts["sequences"] % 100 == 0:
        print(number, dict(sequences.counts))  # with -s, how far a long run has come


@pytest.mark.sampled(2)
@any_sequence
@given(data=st.data())
def test_any_requests_to_kept_conversations_equal_fresh_answers(
    checks: Callable[[int], Checks], data: st.DataObject
) -> None:
    number = data.draw(numbers(), "bundle")
    pool, case = checks(number).pool, CASES[number]
    pool.check(data.draw(requests(len(case.settings), len(case.images))))
    if pool.counts["sequences"] % 100 == 0:
        print(number, dict(pool.counts))
