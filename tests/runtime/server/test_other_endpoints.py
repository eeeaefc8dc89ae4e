"""Completions of a raw prompt and embeddings of images, by OpenAI's own client, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.serving import Response, Served, asking, data_url, serving, user
from tests.support.tiny import random_image
from vtx.runtime.api.model import Model

openai = pytest.importorskip("openai", reason="needs the openai package, of the extra dev")
PROMPT = "USER: red? ASSISTANT:"  # as the template renders it
URLS = [data_url(random_image(seed)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def served(tiny_bundle: Path) -> Iterator[Served]:
    with serving({"tiny": tiny_bundle}) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def post(served: Served, path: str, body: Any) -> Response:
    return served.request("POST", path, json.dumps(body).encode(), content_type="application/json")


def test_a_completion_of_the_rendered_prompt_is_the_chat_s_answer(client: Any, served: Served, local: Model) -> None:
    fields = {"max_tokens": 8, "logprobs": 2, "extra_body": {"ignore_eos": True, "k": "none", "reduce": "none"}}
    whole = client.completions.create(model="tiny", prompt=PROMPT, **fields)
    chat = served.chat(asking(user("red?"), k="none", reduce="none")).json
    assert whole.usage.vtx["token_ids"] == chat["usage"]["vtx"]["token_ids"]
    assert whole.choices[0].text.lstrip() == chat["choices"][0]["message"]["content"]
    assert len(whole.choices[0].logprobs.tokens) == len(whole.choices[0].logprobs.token_logprobs) == 8
    assert [len(top) for top in whole.choices[0].logprobs.top_logprobs] == [2] * 8
    chunks = list(client.completions.create(model="tiny", prompt=[PROMPT], stream=True, **fields))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert client.completions.create(model="tiny", prompt=PROMPT).usage.completion_tokens <= 16


def test_control_tokens_of_a_raw_prompt_are_read_as_such(served: Served, local: Model) -> None:
    settings = local.manifest.text
    stream = local.open()
    ids = local.loaded.prompts.ids([{"role": "prompt", "content": "a</s>b"}])
    assert settings.end_ids[0] in ids
    assert settings.end_ids[0] not in local.loaded.prompts.ids([{"role": "user", "content": "a</s>b"}])[:-3]
    stream.close()


def test_embeddings_are_means_of_image_tokens_of_length_1(client: Any, local: Model) -> None:
    floats = client.embeddings.create(model="tiny", input=URLS, encoding_format="float")
    coded = client.embeddings.create(model="tiny", input=URLS)  # the client asks for base64
    for index, seed in enumerate((1, 2)):
        prepared = local.loaded.images.prepare(random_image(seed))
        mean = prepared.encode(local.backend).hidden.mean(axis=0)
        np.testing.assert_allclose(floats.data[index].embedding, mean / np.linalg.norm(mean), atol=1e-6)
        np.testing.assert_allclose(coded.data[index].embedding, floats.data[index].embedding, atol=1e-6)
    assert floats.usage.prompt_tokens == 2 * local.loaded.images.layout.max_tokens


@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        ("/v1/completions", {}, "prompt", "must be a string or a list"),
        ("/v1/completions", {"prompt": []}, "prompt", "must be 1 to 32"),
        ("/v1/completions", {"prompt": ["a"] * 33}, "prompt", "must be 1 to 32"),
        ("/v1/completions", {"prompt": ["a", 5]}, "prompt", "must be a string or a list"),
        ("/v1/completions", {"prompt": [5, "a"]}, "prompt", "must be a whole number"),
        ("/v1/completions", {"prompt": [[5, True]]}, "prompt", "must be a whole number"),
        ("/v1/completions", {"prompt": [[[5]]]}, "prompt", "must be a whole number"),
        ("/v1/completions", {"prompt": ["a", []]}, None, "has no tokens"),
        ("/v1/completions", {"prompt": [5, -1]}, None, "numbered from 0"),
        ("/v1/completions", {"prompt": [10**40]}, None, "numbered from 0"),
        ("/v1/completions", {"prompt": "a", "reasoning_effort": "low"}, "reasoning_effort", "no field"),
        ("/v1/completions", {"prompt": "a", "echo": 1}, "echo", "true or false"),
        ("/detokenize", {}, "tokens", "add it"),
        ("/detokenize", {"tokens": [5, 10**9]}, None, "numbered from 0"),
        ("/detokenize", {"tokens": [5], "k": 3}, "k", "no field"),
        ("/v1/completions", {"prompt": " "}, None, "question is empty"),
        ("/v1/completions", {"prompt": "a <image>"}, None, "ask about images by messages"),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo", "log probabilities"),
        ("/v1/completions", {"prompt": "a", "messages": []}, "messages", "no field"),
        ("/v1/completions", {"prompt": "a", "logprobs": "x"}, "logprobs", "whole number"),
        ("/v1/completions", {"prompt": "x" * 3_000_000}, None, "limit is 2,097,152"),
        ("/v1/embeddings", {}, "input", "add it"),
        ("/v1/embeddings", {"input": "a kitchen"}, "input", "data URL"),
        ("/v1/embeddings", {"input": [URLS[0]] * 9}, "input", "the limit of this server is 8"),
        ("/v1/embeddings", {"input": "data:image/png;base64,AAAA"}, "input", ""),
        ("/v1/embeddings", {"input": URLS, "dimensions": 5}, "dimensions", "no field"),
        ("/v1/embeddings", {"input": URLS, "encoding_format": "int8"}, "encoding_format", "float or base64"),
    ],
)
def test_what_cannot_be_completed_or_embedded_is_refused(
    served: Served, path: str, fields: dict[str, Any], param: str | None, said: str
) -> None:
    reply = post(served, path, {"model": "tiny", **fields})
    assert reply.status in (400, 413)
    assert reply.json["error"]["param"] == param
    assert said in reply.json["error"]["message"]
