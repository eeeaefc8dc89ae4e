"""Log probabilities of a prompt's text are those of transformers' model, at every K; and answers of a least length."""

from __future__ import annotations

import pytest
import torch

from tests.support.contract import FAMILIES
from tests.support.exported import Models
from tests.support.families.paligemma import PALIGEMMA
from tests.support.fixtures import References
from tests.support.near import assert_near
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.answer import Answer
from vtx.runtime.api.options import Options
from vtx.runtime.api.writing import TextOutput
from vtx.runtime.errors import RequestError

QUESTION = "What is the colour of the square in the picture?"
SCORED = Options(max_new_tokens=4, ignore_eos=True, prompt_logprobs=3)
TOLERANCE = 1e-4


def check(answer: Answer, ids: torch.Tensor, logits: torch.Tensor) -> None:
    """The log probabilities of an answer's prompt are those of `logits` after its last tokens but one."""
    assert answer.prompt_logprobs is not None
    assert len(answer.prompt_logprobs) == answer.stats.prompt_tokens == len(ids)
    count = len(logits) - 1
    assert all(score is None for score in answer.prompt_logprobs[: len(ids) - count])
    known = torch.log_softmax(logits[:-1].double(), -1)
    for score, row, id in zip(answer.prompt_logprobs[-count:], known, ids[-count:].tolist(), strict=True):
        assert score is not None
        assert score.logprob == pytest.approx(float(row[id]), abs=TOLERANCE)
        order = row.argsort(descending=True)
        close = (row - row[id]).abs() < TOLERANCE
        assert int(order.tolist().index(id)) + 1 == pytest.approx(score.rank, abs=int(close.sum()) - 1)
        assert_near([value for _, value in score.likely], row[order[:3]], TOLERANCE)


@pytest.mark.parametrize("k", [None, 3, 8])
def test_the_text_behind_an_image_is_scored_at_every_k(models: Models, reference: References, k: int | None) -> None:
    image = random_image(3)
    judge = reference(Tiny())
    inputs = judge.inputs(prompt_messages(QUESTION), [image])
    rows, vision = judge.prompt(inputs)
    text = len(vision) - 1 - int(vision.nonzero()[-1])
    with torch.inference_mode():
        logits = judge.next_logits(rows, vision, k, judge.positions(inputs), last=text)
    with models().open(image) as conversation:
        plain = conversation.ask(QUESTION, k, SCORED, prompt_logprobs=None)
        answer = conversation.ask(QUESTION, k, SCORED)
        assert conversation.ask(QUESTION, k, SCORED, prompt_logprobs=0).prompt_logprobs is not None
    assert plain.prompt_logprobs is None
    assert answer.token_ids == plain.token_ids
    check(answer, inputs["input_ids"][0], logits)


def test_a_text_alone_is_scored_from_its_second_token_on(models: Models, reference: References) -> None:
    judge = reference(Tiny())
    long = " ".join([QUESTION] * 3)  # more tokens than go in a pass
    inputs = judge.inputs(prompt_messages(long, 0), [])
    rows, vision = judge.prompt(inputs)
    with torch.inference_mode():
        logits = judge.next_logits(rows, vision, None, judge.positions(inputs), last=len(vision))
    check(models().generate([{"role": "user", "content": long}], None, SCORED), inputs["input_ids"][0], logits)


def test_a_chat_s_later_turns_are_scored_where_the_question_does_not_choose_image_tokens(models: Models) -> None:
    model = models()
    with model.open(random_image(1)) as conversation:
        chat = conversation.chat(3)
        chat.ask("red?", max_new_tokens=2, ignore_eos=True)
        later = chat.ask("blue?", max_new_tokens=2, ignore_eos=True, prompt_logprobs=0)
    assert later.prompt_logprobs is not None
    assert sum(score is not None for score in later.prompt_logprobs) > 10


@pytest.mark.sampled
@pytest.mark.parametrize("tiny", [PALIGEMMA, FAMILIES["gemma4"].variants[0]])
def test_models_whose_prompts_have_no_log_probabilities_are_refused(models: Models, tiny: Tiny) -> None:
    with models(tiny, (3,)).open(random_image(1)) as conversation:
        with pytest.raises(RequestError, match=r"prompt_logprobs: .* leave prompt_logprobs out"):
            conversation.ask("red?", None, SCORED)
        assert conversation.ask("red?", None, SCORED, prompt_logprobs=None).token_ids


@pytest.mark.parametrize("count", [-1, 21, 1.5])
def test_numbers_of_likely_tokens_are_checked(count: int) -> None:
    with pytest.raises(RequestError, match="prompt_logprobs"):
        Options(prompt_logprobs=count)


def test_an_answer_does_not_end_before_its_least_tokens(models: Models) -> None:
    model = models()
    (end, *_) = ends = model.manifest.text.end_ids
    likely = ((end, 100.0),)
    with model.open(random_image(1)) as conversation:
        assert conversation.ask("red?", logit_bias=likely).token_ids == (end,)
        answer = conversation.ask("red?", logit_bias=likely, min_new_tokens=5)
        assert len(answer.token_ids) == 6
        assert not set(answer.token_ids[:5]) & set(ends)
        assert (answer.token_ids[5], answer.stopped) == (end, "end")
        plain = conversation.ask("red?", ignore_eos=True, max_new_tokens=8)
        least = conversation.ask("red?", min_new_tokens=8, max_new_tokens=8, logprobs=True)
        assert len(least.token_ids) == 8
        stop = plain.text[:1]
        assert conversation.ask("red?", stop=stop, ignore_eos=True, max_new_tokens=8).text == ""
        assert conversation.ask("red?", stop=stop, min_new_tokens=8, max_new_tokens=8).text == least.text


class Letters:
    """Tokens are characters."""

    def push(self, token: int) -> str:
        return chr(token)

    def finish(self) -> str:
        return ""


@pytest.mark.parametrize(("least", "text"), [(0, ""), (1, ""), (2, "ab"), (3, "ab"), (4, "abab"), (9, "ababab")])
def test_a_stop_string_counts_once_it_is_complete_behind_the_least_tokens(least: int, text: str) -> None:
    output = TextOutput(Letters(), ("ab",), least=least)  # type: ignore[arg-type]
    for letter in b"ababab":
        output.push(letter)
        if output.stopped:
            break
    output.push(None)
    assert output.text == text


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "it must be at most 8"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"min_new_tokens": 2, "choices": ["a", "b"]}, "leave min_new_tokens out"),
    ],
)
def test_least_tokens_that_cannot_be_are_one_line(models: Models, keywords: dict[str, object], message: str) -> None:
    with models().open(random_image(1)) as conversation, pytest.raises(RequestError, match=message):
        conversation.ask("red?", **keywords)  # type: ignore[arg-type]
