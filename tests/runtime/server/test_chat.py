"""/v1/chat/completions over HTTP: the ids of a fresh run, whatever was asked before and however it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.serving import Served, asking, serving, user
from tests.support.tiny import random_image
from vtx.runtime.api.answer import Answer
from vtx.runtime.api.model import Model

IMAGE, OTHER = random_image(1), random_image(2, (40, 90))
NONE = {"k": "none", "reduce": "none"}


@pytest.fixture(scope="module")
def served(tiny_bundle: Path) -> Iterator[Served]:
    with serving({"tiny": tiny_bundle}) as served:
        yield served


def expected(model: Model, *messages: dict[str, Any], **fields: Any) -> Answer:
    """A fresh run of the same messages."""
    fields = {"max_new_tokens": 8, "ignore_eos": True, "reduce": "none", "k": None, **fields}
    return model.generate(messages, **fields)


def facts(completion: dict[str, Any]) -> dict[str, Any]:
    answered: dict[str, Any] = completion["usage"]["vtx"]
    return answered


@pytest.mark.parametrize("k", ["none", 3, 5])
def test_an_answer_has_the_ids_of_a_fresh_run(served: Served, local: Model, k: Any) -> None:
    response = served.chat(asking(user("red?", IMAGE), k=k, reduce="none"))
    answer = expected(local, user("red?", IMAGE), k=k)
    assert response.status == 200
    completion = response.json
    assert completion["object"] == "chat.completion"
    assert completion["choices"][0]["message"] == {"role": "assistant", "content": answer.text, "refusal": None}
    assert completion["choices"][0]["finish_reason"] == "length"
    assert facts(completion)["token_ids"] == list(answer.token_ids)
    assert facts(completion)["kv_slots"] == list(answer.stats.kv_slots)
    usage = completion["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (answer.stats.prompt_tokens, 8)
    assert usage["total_tokens"] == answer.stats.prompt_tokens + 8


def test_a_picture_that_is_sent_again_is_not_read_again(served: Served, local: Model) -> None:
    """In a later question, and in a chat's next turn."""
    image = random_image(77)
    first = served.chat(asking(user("red?", image))).json["choices"][0]["message"]["content"]
    turns = user("red?", image), {"role": "assistant", "content": first}, user("blue?")
    asked = [(user("how many?", image),), turns]
    wanted = [list(expected(local, *messages).token_ids) for messages in asked]
    reading = [f"vtx.runtime.{name}" for name in ("api.images.load_image", "server.endpoints.image_size")]
    with patch(reading[0], side_effect=AssertionError), patch(reading[1], side_effect=AssertionError):
        found = [served.chat(asking(*messages, **NONE)).json for messages in asked]
    assert [facts(completion)["token_ids"] for completion in found] == wanted


def test_a_stream_gives_the_same_text_and_ends_as_openais_do(served: Served, local: Model) -> None:
    body = asking(user("red?", IMAGE), **NONE, stream=True, stream_options={"include_usage": True})
    response = served.chat(body)
    answer = expected(local, user("red?", IMAGE))
    assert response.headers["content-type"].startswith("text/event-stream")
    first, *middle, last, usage = response.events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {event["object"] for event in response.events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in response.events}) == 1
    assert response.text == answer.text
    assert len(middle) > 1
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert facts(usage)["token_ids"] == list(answer.token_ids)


def test_a_stream_has_usage_only_where_it_is_asked_for(served: Served) -> None:
    assert all("usage" not in event for event in served.chat(asking(user("red?"), **NONE, stream=True)).events)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("seed", "k", "reduce"), [(7, "none", "none"), (8, 3, "none"), (9, "none", "fastv:k=3,ratio=0.5")]
)
def test_turns_that_are_sent_whole_are_exact_and_reuse_what_agrees(
    served: Served, local: Model, seed: int, k: Any, reduce: str
) -> None:
    messages, reused = [user("describe the picture", random_image(seed))], []
    for question in ("how many circle shapes?", "what is the colour?", ""):
        completion = served.chat(asking(*messages, k=k, reduce=reduce)).json
        assert facts(completion)["token_ids"] == list(expected(local, *messages, k=k, reduce=reduce).token_ids)
        reused.append(completion["usage"]["prompt_tokens_details"]["cached_tokens"])
        prompt = completion["usage"]["prompt_tokens"]
        messages += [{"role": "assistant", "content": completion["choices"][0]["message"]["content"]}, user(question)]
    assert reused[0] == 0
    if reduce == "none":
        assert reused[2] > prompt // 2, "earlier turns are not run again"


@pytest.mark.parametrize("rest", ["40%", 2, 0.3])
def test_every_turn_chooses_its_rest(served: Served, local: Model, rest: Any) -> None:
    messages = [user("describe the picture", random_image(7))]
    for question in ("how many circle shapes?", "what is the colour?"):
        completion = served.chat(asking(*messages, k=3, reduce="none", rest=rest)).json
        wanted = expected(local, *messages, k=3, rest=rest)
        assert facts(completion)["token_ids"] == list(wanted.token_ids)
        assert facts(completion)["rest"] == wanted.stats.rest > 0
        messages += [{"role": "assistant", "content": completion["choices"][0]["message"]["content"]}, user(question)]


def test_image_tokens_are_chosen_by_the_text_of_a_field(served: Served, local: Model) -> None:
    fields = {"k": "none", "reduce": "cdpruner:keep=4"}
    by_question, by_field = (
        facts(served.chat(asking(user(text, IMAGE), **fields, **more)).json)["kept"][0]["patches"]
        for text, more in (("the dog", {}), ("What is the colour of the square?", {"about": "the dog"}))
    )
    assert by_field == by_question
    assert (
        by_field != facts(served.chat(asking(user("What is the colour?", IMAGE), **fields)).json)["kept"][0]["patches"]
    )
    refused = served.chat(asking(user("red?", IMAGE), **{**fields, "reduce": "none"}, about="the dog"))
    assert refused.status == 400
    assert "reduce=none chooses none by a text" in refused.json["error"]["message"]


def test_a_system_prompt_comes_first_under_either_name(served: Served, local: Model) -> None:
    question = user("red?", IMAGE)
    ids = list(expected(local, {"role": "system", "content": "the image is red"}, question).token_ids)
    for role in ("system", "developer"):
        completion = served.chat(asking({"role": role, "content": "the image is red"}, question, **NONE)).json
        assert facts(completion)["token_ids"] == ids


def test_sampling_follows_its_seed(served: Served, local: Model) -> None:
    drawn = {"temperature": 1.0, "top_p": 0.9, "seed": 5}
    completion = served.chat(asking(user("red?", IMAGE), **NONE, **drawn)).json
    assert facts(completion)["token_ids"] == list(expected(local, user("red?", IMAGE), **drawn).token_ids)
    greedy = served.chat(asking(user("red?", IMAGE), **NONE)).json
    assert facts(greedy)["token_ids"] != facts(completion)["token_ids"]


@pytest.mark.sampled
@pytest.mark.parametrize("stream", [False, True])
def test_why_an_answer_ended_is_told(served: Served, stream: bool) -> None:
    """A full context and a limit of tokens are both a length to OpenAI's clients, and not the same."""
    extra: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    seen = []
    whole = served.chat(asking(user("red?"), **NONE)).json["choices"][0]["message"]["content"]
    for fields in ({"max_tokens": 1000}, {"max_tokens": 8}, {"max_tokens": 1}, {"stop": [whole[2:4]]}):
        response = served.chat(asking(user("red?"), **{**NONE, **extra, **fields}))
        last = response.events[-1] if stream else response.json
        reason = response.events[-2] if stream else last
        seen.append((facts(last)["stopped"], reason["choices"][0]["finish_reason"], len(facts(last)["token_ids"])))
    assert seen[0][:2] == ("context", "length")
    assert 8 < seen[0][2] < 1000
    assert seen[1:3] == [("length", "length", 8), ("length", "length", 1)]
    assert seen[3][:2] == ("stop", "stop")


def test_an_end_token_ends_an_answer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = facts(served.chat(asking(user("red?"), **NONE)).json)["token_ids"]
    text = served.engines.loaded[0].model.manifest.text
    monkeypatch.setattr(type(text), "end_ids", (ids[3],), raising=False)
    completion = served.chat(asking(user("red?"), **{**NONE, "ignore_eos": False})).json
    assert facts(completion)["token_ids"] == ids[: ids.index(ids[3]) + 1]
    assert (facts(completion)["stopped"], completion["choices"][0]["finish_reason"]) == ("end", "stop")


def test_a_stop_string_ends_the_text_before_it(served: Served, local: Model) -> None:
    whole = expected(local, user("red?", IMAGE)).text
    stop = whole[3:5]
    completion = served.chat(asking(user("red?", IMAGE), **NONE, stop=[stop])).json
    assert completion["choices"][0]["message"]["content"] == whole[: whole.index(stop)]
    assert completion["choices"][0]["finish_reason"] == "stop"


def written(local: Model, id: int) -> str:
    """A token within a text."""
    return local.loaded.text.bytes_of(id).decode("utf-8", "replace")


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_come_for_each_token(served: Served, local: Model, stream: bool) -> None:
    response = served.chat(asking(user("red?", IMAGE), **NONE, logprobs=True, stream=stream))
    answer = expected(local, user("red?", IMAGE), logprobs=True)
    choices = [c for event in response.events for c in event["choices"]] if stream else response.json["choices"]
    content = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    assert [token["logprob"] for token in content] == pytest.approx(answer.logprobs, abs=1e-4)
    assert [token["token"] for token in content] == [written(local, id) for id in answer.token_ids]


@pytest.mark.parametrize("stream", [False, True])
def test_the_most_likely_tokens_come_with_their_log_probabilities(served: Served, local: Model, stream: bool) -> None:
    fields = {"logprobs": True, "temperature": 3.0, "seed": 5}
    response = served.chat(asking(user("red?", IMAGE), **NONE, **fields, top_logprobs=4, stream=stream))
    answer = expected(local, user("red?", IMAGE), **fields, top_logprobs=4)
    choices = [c for event in response.events for c in event["choices"]] if stream else response.json["choices"]
    content = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    assert answer.top_logprobs is not None
    for token, likely in zip(content, answer.top_logprobs, strict=True):
        given = token["top_logprobs"]
        assert [one["token"] for one in given] == [written(local, id) for id, _ in likely]
        values = [one["logprob"] for one in given]
        assert values == pytest.approx([value for _, value in likely], abs=1e-4)
        assert values == sorted(values, reverse=True)
        assert token["logprob"] <= values[0] + 1e-9
    assert any(token["logprob"] < token["top_logprobs"][0]["logprob"] - 1e-6 for token in content), "drawn, not greedy"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_either_name_limits_the_tokens(served: Served, name: str) -> None:
    body = {"model": "tiny", "messages": [user("red?")], "ignore_eos": True, name: 3}
    assert served.chat(body).json["usage"]["completion_tokens"] == 3


def test_what_a_reduction_did_comes_back(served: Served) -> None:
    done = facts(served.chat(asking(user("red?", IMAGE), k="none", reduce="fastv:k=3,ratio=0.5")).json)
    assert done["reduce"] == "fastv:k=3,ratio=0.5"
    assert [kept["layer"] for kept in done["kept"]] == [1, 4]
    assert done["vision_tokens_kept"] == [16] * 3 + [8] * 5


def test_the_bundle_and_its_depths_are_listed(served: Served) -> None:
    listed = served.request("GET", "/v1/models").json
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert listed["data"][0]["object"] == "model"
    assert listed["data"][0]["vtx"]["ks"] == [3, 5]
    assert listed["data"][0]["vtx"]["image"]["grid"] ** 2 == 16


def test_the_metrics_count_what_was_done(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}) as served:
        for _ in range(2):
            served.chat(asking(user("red?", IMAGE), k=3, reduce="none"))
        served.chat(asking(user("which?", IMAGE, OTHER), **NONE))
        served.chat({"model": "other", "messages": [user("red?")]})
        served.until_active(0, "all have ended")
        figures = served.metrics()
    assert figures['vtx_requests_total{status="200"}'] == 3
    assert figures['vtx_requests_total{status="404"}'] == 1
    assert figures["vtx_completion_tokens_total"] == 24
    assert figures["vtx_withdrawn_tokens_total"] == 32
    assert figures["vtx_first_token_seconds_count"] == 3
    assert figures['vtx_first_token_seconds_bucket{le="+Inf"}'] == 3
    assert figures["vtx_conversation_hits_total"] == 1
    assert figures["vtx_conversation_misses_total"] == 2
    assert figures["vtx_image_cache_hits_total"] == 1, "the first image of two had been encoded before"
    assert figures["vtx_kv_kept_bytes"] > 0


def test_without_reuse_an_answer_is_computed_from_scratch(tiny_bundle: Path, local: Model) -> None:
    with serving({"tiny": tiny_bundle}) as served:
        asked = [served.chat(asking(user("red?", IMAGE), **NONE, reuse=reuse)).json for reuse in (True, False, True)]
        figures = served.metrics()
    assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for one in asked] == [False, False, True]
    assert [facts(one)["timings_ms"]["vision"] > 0 for one in asked] == [True, True, False]
    assert [facts(one)["token_ids"] for one in asked] == 3 * [list(expected(local, user("red?", IMAGE)).token_ids)]
    assert (figures["vtx_image_cache_hits_total"], figures["vtx_image_cache_misses_total"]) == (0, 1)
