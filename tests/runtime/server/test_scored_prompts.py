"""Log probabilities of prompts in OpenAI's form (`echo`) and vLLM's (`prompt_logprobs`), and `min_tokens`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import Response, Served, asking, serving, user
from tests.support.tiny import random_image
from vtx.runtime.api.model import Model

PROMPT = "USER: is it red or blue? ASSISTANT:"
PLAIN = {"k": "none", "reduce": "none", "ignore_eos": True}
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 4, **PLAIN}


@pytest.fixture(scope="module")
def served(tiny_bundle: Path) -> Iterator[Served]:
    with serving({"tiny": tiny_bundle}) as served:
        yield served


def post(served: Served, path: str, **body: Any) -> Response:
    return served.request("POST", path, json.dumps({**BODY, **body}).encode(), content_type="application/json")


def completion(served: Served, **body: Any) -> Any:
    reply = post(served, "/v1/completions", **body)
    assert reply.status == 200, reply.body
    return reply.json


@pytest.mark.slow
def test_echoed_tokens_have_the_log_probabilities_of_the_same_tokens_as_answers(served: Served, local: Model) -> None:
    """Each token of the prompt is asked for as the next one after those before it."""
    ids = post(served, "/tokenize", prompt=PROMPT).json["tokens"]
    [choice] = completion(served, prompt=PROMPT, echo=True, logprobs=2)["choices"]
    known = choice["logprobs"]
    assert {len(known[name]) for name in known} == {len(ids) + 4}
    assert (known["token_logprobs"][0], known["top_logprobs"][0]) == (None, None)
    for number in range(1, len(ids)):
        asked = {"prompt": ids[:number], "max_tokens": 1, "logprobs": 2, "logit_bias": {str(ids[number]): 100}}
        [alone] = completion(served, **asked)["choices"]
        [value] = alone["logprobs"]["token_logprobs"]
        assert known["token_logprobs"][number] == pytest.approx(value, abs=1e-4)
        assert sorted(known["top_logprobs"][number].values()) == pytest.approx(
            sorted(alone["logprobs"]["top_logprobs"][0].values()), abs=1e-4
        )
    [answer] = completion(served, prompt=PROMPT, logprobs=2)["choices"]
    assert known["tokens"][len(ids) :] == answer["logprobs"]["tokens"]
    assert known["token_logprobs"][len(ids) :] == pytest.approx(answer["logprobs"]["token_logprobs"], abs=1e-4)
    assert choice["text"] == PROMPT + answer["text"]


def test_offsets_of_echoed_tokens_are_those_of_the_text(served: Served) -> None:
    [choice] = completion(served, prompt=PROMPT, echo=True, logprobs=0)["choices"]
    known = choice["logprobs"]
    offsets = known["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert known["tokens"][:2] == ["", " "], "which the text does not show"
    for token, offset in list(zip(known["tokens"], offsets, strict=True))[2:]:
        assert "\ufffd" in token or choice["text"][offset:].startswith(token), (token, offset)


def test_prompts_of_a_list_are_scored_each(served: Served) -> None:
    prompts = ["USER: red?", "USER: is it blue and round?"]
    alone = [completion(served, prompt=prompt, echo=True, logprobs=1)["choices"][0]["logprobs"] for prompt in prompts]
    together = completion(served, prompt=prompts, echo=True, logprobs=1, n=2)["choices"]
    assert [choice["logprobs"]["tokens"] for choice in together] == [one["tokens"] for one in alone for _ in range(2)]
    for choice, one in zip(together[::2], alone, strict=True):
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(one["token_logprobs"][1:], abs=1e-4)


def test_prompt_logprobs_have_vllm_s_form(served: Served, local: Model) -> None:
    """Of completions each choice's, of a chat one; a picture's tokens and those before it have none."""
    ids = post(served, "/tokenize", prompt=PROMPT).json["tokens"]
    [choice] = completion(served, prompt=ids, prompt_logprobs=2)["choices"]
    known = choice["prompt_logprobs"]
    assert (len(known), known[0]) == (len(ids), None)
    for id, scores in zip(ids[1:], known[1:], strict=True):
        assert 2 <= len(scores) <= 3
        own = scores[str(id)]
        assert own["rank"] == 1 + sum(score["logprob"] > own["logprob"] for score in scores.values()) or own["rank"] > 2
        assert {1, 2} <= {score["rank"] for score in scores.values()}
        assert own["decoded_token"] == local.loaded.text.bytes_of(id).decode("utf-8", "replace")
    reply = served.chat(asking(user("red?", random_image(1)), **PLAIN, prompt_logprobs=0)).json
    scored = [scores for scores in reply["prompt_logprobs"] if scores is not None]
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    with local.open(random_image(1)) as conversation:
        wanted = conversation.ask("red?", None, reduce=None, prompt_logprobs=0).prompt_logprobs
    values = [score.logprob for score in wanted or () if score is not None]
    assert [next(iter(scores.values()))["logprob"] for scores in scored] == pytest.approx(values, abs=1e-4)
    assert "prompt_logprobs" not in served.chat(asking(user("red?"), **PLAIN)).json
    assert "prompt_logprobs" not in reply["usage"]["vtx"]


def test_a_scored_prompt_does_not_begin_in_the_caches_and_its_answer_is_the_same(served: Served) -> None:
    body = asking(user("what is red?", random_image(5)), **PLAIN)
    first = served.chat(body).json
    scored = served.chat({**body, "prompt_logprobs": 1}).json
    assert scored["usage"]["vtx"]["token_ids"] == first["usage"]["vtx"]["token_ids"]
    assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert all(math.isfinite(score["logprob"]) for scores in scored["prompt_logprobs"] if scores
               for score in scores.values())  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "red?", "echo": True, "logprobs": 1, "stream": True}, "echo"),
        ("/v1/completions", {"prompt": "red?", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "red?", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "red?", "prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "red?", "prompt_logprobs": True}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "red?", "min_tokens": 5}, "min_tokens"),
        ("/v1/completions", {"prompt": "red?", "min_tokens": -1}, "min_tokens"),
        ("/v1/completions", {"prompt": "red?", "min_tokens": "2"}, "min_tokens"),
        ("/v1/responses", {"input": "red?", "max_tokens": None, "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/messages", {"messages": [user("red?")], "prompt_logprobs": 1}, None),
        ("/api/chat", {"messages": [{"role": "user", "content": "red?"}], "prompt_logprobs": 1}, None),
    ],
)
def test_what_has_no_log_probabilities_or_no_such_length_is_refused(
    served: Served, path: str, body: dict[str, Any], param: str | None
) -> None:
    refused = post(served, path, **body)
    assert refused.status == 400, refused.body
    if param is not None:
        assert refused.json["error"]["param"] == param


def test_an_answer_has_at_least_min_tokens(served: Served, local: Model) -> None:
    [end, *_] = local.manifest.text.end_ids
    body = asking(user("red?"), logit_bias={str(end): 100}, max_tokens=8, **{**PLAIN, "ignore_eos": False})
    assert served.chat({**body, "ignore_eos": False}).json["usage"]["completion_tokens"] == 1
    least = served.chat({**body, "ignore_eos": False, "min_tokens": 5}).json
    assert least["usage"]["completion_tokens"] == 6
    assert least["choices"][0]["finish_reason"] == "stop"
