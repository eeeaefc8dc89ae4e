"""What every family keeps in Python: a record of `tests.support.contract` each, against transformers and statements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.contract import (
    FAMILIES,
    NEAR,
    Family,
    on_one_device,
    on_other_devices,
    with_rows,
)
from tests.support.exported import DEVICES, greedy, prompt
from tests.support.fixtures import Checkpoints, References
from tests.support.near import assert_near
from tests.support.parity import (
    STEPS,
    assert_chat_as_reference,
    assert_every_k,
    assert_later_equal_fresh,
)
from tests.support.reduced import QUESTIONS, Talk, word
from tests.support.reference import Reference
from tests.support.statement import Method, Statement
from tests.support.tiny import prompt_messages, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.errors import RequestError, TemplateError, UnsupportedModelError
from vtx.runtime.report.golden import check_golden

pytestmark = pytest.mark.dialects("ort", "plain")


@pytest.fixture(scope="module", params=on_one_device())
def drawn(request: pytest.FixtureRequest) -> tuple[Family, str]:
    drawn: tuple[Family, str] = request.param
    return drawn


@pytest.fixture(scope="module")
def family(drawn: tuple[Family, str]) -> Family:
    return drawn[0]


@pytest.fixture(scope="module")
def tolerance(drawn: tuple[Family, str]) -> float:
    return drawn[0].tolerance if drawn[1] == "cpu" else NEAR


@pytest.fixture(scope="module")
def model(drawn: tuple[Family, str], loaded: Callable[..., Model]) -> Model:
    return loaded(drawn[1], drawn[0].tiny, drawn[0].ks)


@pytest.fixture(scope="module")
def judge(family: Family, reference: References) -> Reference:
    return reference(family.tiny)


@pytest.mark.parametrize("shown", [(0,), (1, 0), (2,)], ids=["one", "two", "small"])
def test_answers_are_those_of_transformers_and_at_k_of_the_statement(
    model: Model, judge: Reference, family: Family, tolerance: float, shown: tuple[int, ...]
) -> None:
    images = [random_image(seed, family.sizes[number]) for seed, number in enumerate(shown)]
    messages = prompt_messages(QUESTIONS[0], len(images))
    assert_every_k(model, judge, messages, images, family.ks, tolerance, family.alike)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "device"), on_other_devices())
def test_the_other_engine_answers_as_transformers_and_at_k_as_the_statement_too(
    loaded: Callable[..., Model], reference: References, family: Family, device: str
) -> None:
    images, messages = [random_image(0, family.sizes[1])], prompt_messages(QUESTIONS[0])
    model, tolerance = loaded(device, family.tiny, family.ks), family.tolerance if device == "cpu" else NEAR
    assert_every_k(model, reference(family.tiny), messages, images, family.ks[:1], tolerance, family.alike)


def test_images_of_extreme_shapes_and_text_alone_are_answered_as_by_transformers(
    model: Model, judge: Reference, family: Family, tolerance: float
) -> None:
    asked = [(prompt_messages("red?"), [random_image(0, shape)]) for shape in family.extreme]
    asked += [] if family.single else [(prompt_messages(QUESTIONS[0], 0), [])]
    for messages, images in asked:
        inputs, given = judge.inputs(messages, images), prompt(model, messages, images)
        assert given.ids.tolist() == inputs["input_ids"][0].tolist()
        for k in (None, family.ks[-1]):
            wanted = judge.greedy(inputs, k, 2)
            found = greedy(model, given, k, 2, forced=wanted.ids)
            assert_near(found.logits, wanted.logits, tolerance)


def test_images_with_text_between_them_all_leave_at_k(
    model: Model, judge: Reference, family: Family, tolerance: float
) -> None:
    if family.single:
        return
    images = [random_image(1, family.sizes[1]), random_image(2, family.sizes[2])]
    said = {"role": "assistant", "content": [{"type": "text", "text": "a circle"}]}
    messages = [*prompt_messages("what shape is there?"), said, *prompt_messages("and in the other image?")]
    assert_every_k(model, judge, messages, images, family.ks, tolerance, family.alike)


def test_the_golden_vectors_hold(model: Model, family: Family) -> None:
    checks = list(check_golden(model))
    assert len(checks) == 4 + len(family.ks)
    assert all(check.passed for check in checks), checks


def test_later_questions_and_chats_are_answered_as_alone(
    model: Model, judge: Reference, family: Family, tolerance: float
) -> None:
    images = [random_image(0, family.sizes[1]), random_image(1, family.sizes[2])]
    if family.single:
        with model.open(images) as conversation:
            chat = conversation.chat(None)
            chat.ask("red?", Options(1))
            with pytest.raises((RequestError, TemplateError), match="one question"):
                chat.ask("red?", Options(1))
        return
    for k in (None, family.ks[-1]):
        assert_later_equal_fresh(model, images, k, tolerance=tolerance)
        assert_chat_as_reference(model, judge, images, k, tolerance)


def test_a_replaced_image_is_answered_as_in_a_fresh_conversation(
    model: Model, family: Family, tolerance: float
) -> None:
    images, options = [random_image(n, size) for n, size in enumerate(family.sizes)], Options(4, ignore_eos=True)
    options = replace(options, logprobs=True)
    for k in (None, family.ks[-1]):
        with model.open(images[:1]) as held, model.open(images[1:2]) as fresh:
            held.ask("red?", k, options)
            held.replace(images[1:2])
            found, wanted = held.ask("red?", k, options), fresh.ask("red?", k, options)
        assert found.token_ids == wanted.token_ids
        assert_near(found.logprobs or (), wanted.logprobs or (), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.stated])
def test_the_statement_is_transformers_and_at_k_the_withdrawal(reference: References, name: str) -> None:
    family, judge = FAMILIES[name], reference(FAMILIES[name].tiny)
    inputs = judge.inputs(prompt_messages(QUESTIONS[0]), [random_image(4, family.sizes[0])])
    for k in (None, *family.ks):
        found, wanted = Statement(judge).answer(inputs, Method(k=k), STEPS), judge.greedy(inputs, k, STEPS)
        assert found.ids == wanted.ids
        assert_near(found.logits, wanted.logits, NEAR)


@pytest.mark.parametrize(("family", "method"), with_rows("methods", 8))
def test_reductions_are_those_of_the_statement(
    loaded: Callable[..., Model], reference: References, family: Family, method: Method
) -> None:
    specs = tuple(dict.fromkeys(word(replace(each, k=None)) for each in family.methods))
    ks = tuple(sorted({each.k for each in family.methods if each.k}))
    judge, images = reference(family.tiny), [random_image(4, family.sizes[0]), random_image(1, family.sizes[1])]
    images = images[: family.pictures]
    for question in QUESTIONS:
        messages = prompt_messages(question, len(images))
        inputs = judge.inputs(messages, images)
        wanted = Statement(judge).answer(inputs, method, STEPS)
        if wanted.margin > 2 * NEAR:
            break
    assert min(wanted.vision) < int((inputs["input_ids"] == judge.image_token).sum()), "nothing left"
    slots = [count * (whole > 0) for count, whole in zip(wanted.slots, judge.kv_slots(inputs, None), strict=True)]
    for device in DEVICES:
        talk = Talk(loaded(device, family.tiny, ks, "fp32", specs))
        for _ in range(2):  # also with caches that hold another question's
            found = talk.ask(messages, images, method, STEPS)
            assert found.ids == wanted.ids
            assert_near(found.logits, wanted.logits, NEAR)
            assert list(found.done.slots) == slots
            last = list(range(sum(len(image.rows) for image in wanted.images)))
            for layer, kept in sorted(wanted.kept.items()):
                assert found.kept.get(layer, last) == kept
                last = kept
            assert {layer for layer, kept in found.kept.items() if kept} <= {*wanted.kept}
            talk.ask(prompt_messages("red?", len(images)), images, Method(), 3)


@pytest.mark.parametrize(("family", "spec"), with_rows("refused"))
def test_reductions_without_a_meaning_are_refused_by_name(
    tiny_checkpoint: Checkpoints, family: Family, spec: str
) -> None:
    options = ExportOptions(
        str(tiny_checkpoint(family.tiny)), (3,), "fp32", reductions=(spec,), allow_changed_answers=True
    )
    with pytest.raises((UnsupportedModelError, RequestError), match=family.refused[spec]):
        plan_export(options)
