"""What holds for every family whose layers keep a state in place of K and V: LFM2-VL, Qwen3.5 and MiniCPM-V 4.6."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.bundles import export
from tests.support.exported import DEVICES, THREADS, answer, policy, prompt
from tests.support.families.lfm2_vl import LFM2
from tests.support.families.minicpm import MINICPM
from tests.support.families.qwen import QWEN35
from tests.support.parity import QUESTIONS, assert_answers_as_reference, assert_chat_as_reference
from tests.support.parity import assert_later_equal_fresh as assert_later
from tests.support.reduced import word
from tests.support.reference import Reference
from tests.support.statement import Method, Statement
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import MAX_DRAFT
from vtx.runtime.backends.slots import RECENT, TRIED
from vtx.runtime.bundle.tensors import read_final_norm
from vtx.runtime.errors import ImageError
from vtx.runtime.policies.make import make_policy
from vtx.runtime.session.session import Session

TOLERANCE = 1e-4  # in float32 transformers' two forms of the gated delta rule differ by half of it
KS = (2, 3, 4, 5, 8)  # these leave stages without attention, and of one layer
METHODS = (Method(fastv=(2, 0.5)), Method(fastv=(5, 0.5)), Method(fastv=(2, 0.75), k=5), Method(dart=(8, 2, 2, 2)))


class Family(NamedTuple):
    """`large`: the size of a picture that has tiles or slices, if the family has them; `other` and `small`: others."""

    tiny: Tiny
    large: tuple[int, int]
    other: tuple[int, int]
    small: tuple[int, int]


FAMILIES = (
    Family(LFM2, (150, 60), (40, 90), (40, 40)),
    Family(QWEN35, (300, 160), (150, 60), (64, 64)),
    Family(MINICPM, (150, 61), (70, 190), (40, 40)),
)
QUICK = {("lfm2_vl", "cpu"), ("minicpmv4_6", "cpu"), ("qwen3_5", "openvino")}  # what `make test` runs


def case(family: Family, device: str) -> Any:
    name = family.tiny.family
    marks = [] if (name, device) in QUICK else [pytest.mark.slow]
    return pytest.param((family, device), id=f"{name}-{device}", marks=marks)


DRAWN = [case(family, device) for family in FAMILIES for device in DEVICES]


@pytest.fixture(scope="module", params=DRAWN)
def drawn(request: pytest.FixtureRequest) -> tuple[Family, str]:
    found: tuple[Family, str] = request.param
    return found


@pytest.fixture(scope="module")
def family(drawn: tuple[Family, str]) -> Family:
    return drawn[0]


@pytest.fixture(scope="module")
def model(
    drawn: tuple[Family, str], tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    place = tmp_path_factory.mktemp(drawn[0].tiny.family) / "bundle"
    made = export(tiny_checkpoint(drawn[0].tiny), place, KS, "fp32").folder
    with load(made, device=drawn[1], threads=THREADS) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def reduced(
    drawn: tuple[Family, str], tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    words = tuple(dict.fromkeys(word(replace(method, k=None)) for method in METHODS))
    place = tmp_path_factory.mktemp("reduced") / "bundle"
    made = export(tiny_checkpoint(drawn[0].tiny), place, (5,), "fp32", reductions=words).folder
    with load(made, device=drawn[1], threads=THREADS) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def judge(family: Family, reference: Callable[..., Reference]) -> Reference:
    return reference(family.tiny)


@pytest.mark.parametrize("count", [1, 2])
def test_a_bundle_answers_as_transformers_and_at_k_as_layers_that_are_fed_the_text_alone(
    model: Model, judge: Reference, family: Family, count: int
) -> None:
    images = [random_image(0, family.large), random_image(1, family.small)][:count]
    assert_answers_as_reference(model, judge, prompt_messages(QUESTIONS[1], count), images, TOLERANCE)


@pytest.mark.parametrize("k", [None, *KS])
def test_at_every_k_the_answer_is_that_of_the_plain_statement(
    model: Model, judge: Reference, family: Family, k: int | None
) -> None:
    """The statement computes one token after the other, without transformers' code of these layers."""
    messages, images = prompt_messages(QUESTIONS[2]), [random_image(3, family.large)]
    wanted = Statement(judge).answer(judge.inputs(messages, images), Method(k=k), 4)
    found = answer(Session(model.backend, model.manifest), prompt(model, messages, images), policy(k), 4)
    assert found.argmax(-1).tolist() == wanted.ids
    np.testing.assert_allclose(found, wanted.logits.numpy(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("k", [None, *KS])
def test_later_questions_and_turns_go_back_to_the_state_after_the_image(
    model: Model, judge: Reference, family: Family, k: int | None
) -> None:
    images = [random_image(0, family.other), random_image(1, family.small)]
    assert_later(model, images, k, tolerance=TOLERANCE)
    assert_chat_as_reference(model, judge, images, k, TOLERANCE)


@pytest.mark.covering(2)
@pytest.mark.parametrize("right", [0, 2, MAX_DRAFT])
@pytest.mark.parametrize("k", [None, 3])
def test_rejected_tokens_of_a_draft_leave_the_states_as_they_were(
    model: Model, family: Family, k: int | None, right: int
) -> None:
    asked = prompt(model, prompt_messages("red?"), [random_image(0, family.large)])
    wanted = answer(Session(model.backend, model.manifest), asked, policy(k), MAX_DRAFT + 4)
    ids, session = wanted.argmax(-1).tolist(), Session(model.backend, model.manifest)
    session.prefill(asked, policy(k))
    assert session.draft_room == MAX_DRAFT
    wrong = [(id + 1) % model.manifest.model.vocab for id in ids[1 + right : 1 + MAX_DRAFT]]
    found = [session.decode(ids[0], [*ids[1 : 1 + right], *wrong])]
    while (logits := session.accept(ids[len(found)])) is not None:
        found.append(logits)
    assert len(found) == 1 + right
    session.try_tokens([5, 6, 7] * MAX_DRAFT)
    found += [session.decode(ids[number]) for number in range(len(found), len(found) + 2)]
    np.testing.assert_allclose(found, wanted[1 : 1 + len(found)], atol=TOLERANCE, rtol=0)


def test_every_token_of_a_draft_may_be_the_last_one() -> None:
    assert TRIED == MAX_DRAFT + 1


@pytest.mark.parametrize("back", [1, RECENT, 3 * RECENT])
def test_a_turn_that_changes_an_earlier_one_goes_back_to_a_state_that_is_held(model: Model, back: int) -> None:
    """The suffix's ids agree up to `back` tokens before the end of a long answer: recent, and forgotten since."""
    session, asked = Session(model.backend, model.manifest), prompt(model, prompt_messages("red?"), [random_image(0)])
    done = session.prefill(asked, policy(3))
    ids, rows = list[int](), [done.logits]
    for _ in range(4 * RECENT):
        ids.append(int(rows[-1].argmax()))
        rows.append(session.decode(ids[-1]))
    changed = [*ids[:-back], 7, 8, 9]
    longer = replace(
        asked, ids=np.concatenate([asked.ids, changed]), is_vision=np.pad(asked.is_vision, (0, len(changed)))
    )
    found = session.prefill(longer, policy(3), after=done.selection)
    alone = Session(model.backend, model.manifest).prefill(longer, policy(3))
    np.testing.assert_allclose(found.logits, alone.logits, atol=TOLERANCE, rtol=0)
    assert (found.reused_tokens > len(asked.ids)) == (back <= RECENT)


@pytest.mark.parametrize("method", METHODS, ids=word)
def test_reductions_after_a_layer_with_attention_are_those_of_the_statement(
    reduced: Model, judge: Reference, family: Family, method: Method
) -> None:
    images, messages = [random_image(0, family.large)], prompt_messages(QUESTIONS[1])
    wanted = Statement(judge).answer(judge.inputs(messages, images), method, 6)
    how = make_policy(
        method.k, reduced.manifest, reduced.backend.gate, reduce=word(method), dialect=reduced.backend.dialect,
        final_norm=lambda: read_final_norm(reduced.bundle),
    )  # fmt: skip
    session, asked = Session(reduced.backend, reduced.manifest), prompt(reduced, messages, images)
    for _ in range(2):  # also with caches that hold another question's
        found = answer(session, asked, how, 6)
        assert found.argmax(-1).tolist() == wanted.ids
        np.testing.assert_allclose(found, wanted.logits.numpy(), atol=TOLERANCE, rtol=0)
        answer(session, prompt(reduced, prompt_messages("red?"), images), policy(None), 3)


@pytest.mark.parametrize("shape", [(1, 1), (160, 10), (10, 160), (64, 64), (65, 64), (1, 150), (199, 201)], ids=str)
def test_images_of_extreme_shapes_are_answered_as_by_transformers(
    model: Model, judge: Reference, shape: tuple[int, int]
) -> None:
    messages, images = prompt_messages(QUESTIONS[0]), [random_image(0, shape)]
    inputs, asked = judge.inputs(messages, images), prompt(model, messages, images)
    assert asked.ids.tolist() == inputs["input_ids"][0].tolist()
    wanted = judge.greedy(inputs, None, 2)
    found = answer(Session(model.backend, model.manifest), asked, policy(None), 2)
    np.testing.assert_allclose(found, wanted.logits.numpy(), atol=TOLERANCE, rtol=0)


def test_text_alone_is_answered_and_a_strip_of_300_to_1_is_refused(model: Model, judge: Reference) -> None:
    messages = prompt_messages(QUESTIONS[2], 0)
    wanted = judge.greedy(judge.inputs(messages, []), 5, 4)
    found = answer(Session(model.backend, model.manifest), prompt(model, messages, []), policy(5), 4)
    np.testing.assert_allclose(found, wanted.logits.numpy(), atol=TOLERANCE, rtol=0)
    with pytest.raises(ImageError, match="its sides may differ at most 200-fold"):
        model.open([random_image(0, (600, 2))])
