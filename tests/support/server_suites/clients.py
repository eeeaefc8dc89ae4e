"""Programs that others wrote for other servers, each against vtx-serve: `make test-clients`.

The model writes noise, so what is asked is that a client gets an answer of the form and the length that it asked for.
"""

from __future__ import annotations

import base64
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import litellm
import ollama
import openai
import pytest
import requests
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from vtx_serve import start, stop

FILE = Path(os.environ["VTX_PICTURE"])
PICTURE = base64.b64encode(FILE.read_bytes()).decode()
DATA_URL = f"data:image/jpeg;base64,{PICTURE}"
SCHEMA = {"type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"]}
DRAW = {"name": "draw", "description": "draws a shape", "parameters": SCHEMA}
FUNCTION = {"type": "function", "function": DRAW}
ASKED = [
    {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": DATA_URL}}, {"type": "text", "text": "what is it?"}],
    }
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = start(["m"], "127.0.0.1", port, "--max-tokens", "400")
    yield f"http://127.0.0.1:{port}"
    stop(process)


# ---- anthropic -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def claude(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


SOURCE = {"type": "base64", "media_type": "image/jpeg", "data": PICTURE}
BLOCKS = [{"type": "image", "source": SOURCE}, {"type": "text", "text": "what is it?"}]
TURN: Any = [{"role": "user", "content": BLOCKS}]
TOOL: Any = {"name": "draw", "description": "draws a shape", "input_schema": SCHEMA}


def test_anthropic_messages_streams_and_counts(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(model="m", max_tokens=8, system="be brief", messages=TURN)
    assert message.content[0].type == "text"
    assert message.usage.output_tokens <= 8
    with claude.messages.stream(model="m", max_tokens=8, system="be brief", messages=TURN) as stream:
        text = "".join(stream.text_stream)
        assert text == message.content[0].text
        assert stream.get_final_message().usage.output_tokens == message.usage.output_tokens
    counted = claude.messages.count_tokens(model="m", system="be brief", messages=TURN)
    assert counted.input_tokens == message.usage.input_tokens


def test_anthropic_tools_and_errors(claude: anthropic.Anthropic) -> None:
    call = claude.messages.create(
        model="m", max_tokens=200, messages=TURN, tools=[TOOL], tool_choice={"type": "tool", "name": "draw"}
    ).content[-1]
    assert call.type == "tool_use"
    assert isinstance(call.input["red"], bool)
    result: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "done"}]
    turns = [*TURN, {"role": "assistant", "content": [call]}, {"role": "user", "content": result}]
    assert claude.messages.create(model="m", max_tokens=4, messages=turns, tools=[TOOL]).role == "assistant"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=4, messages=TURN)


# ---- ollama --------------------------------------------------------------------------------------


def test_ollama_chat_generate_and_lists(url: str) -> None:
    client = ollama.Client(host=url)
    turn = [{"role": "user", "content": "what is it?", "images": [PICTURE]}]
    options = {"num_predict": 8, "temperature": 0, "num_ctx": 4096}
    answer = client.chat(model="m:latest", messages=turn, options=options)
    assert 0 < answer.eval_count <= 8
    pieces = [*client.chat(model="m", messages=turn, options=options, stream=True)]
    assert "".join(piece.message.content or "" for piece in pieces) == answer.message.content
    assert pieces[-1].done
    long = {"num_predict": 200}
    form = client.generate(model="m", prompt="is it red?", images=[PICTURE], format=SCHEMA, options=long)
    assert isinstance(json.loads(form.response)["red"], bool)
    assert [model.model for model in client.list().models] == ["m"]
    assert "vision" in (client.show("m").capabilities or ())
    assert [model.model for model in client.ps().models] == ["m"]
    with pytest.raises(ollama.ResponseError, match="there is no model"):
        client.chat(model="other", messages=turn)


# ---- libraries that ask others -------------------------------------------------------------------


def test_litellm_by_each_of_its_forms(url: str) -> None:
    common: dict[str, Any] = {"messages": ASKED, "max_tokens": 8, "temperature": 0}
    whole = litellm.completion(model="openai/m", api_base=f"{url}/v1", api_key="none", **common)
    assert 0 < whole.usage.completion_tokens <= 8
    chunks = litellm.completion(model="openai/m", api_base=f"{url}/v1", api_key="none", stream=True, **common)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    for model, base in (("anthropic/m", url), ("ollama_chat/m", url)):
        other = litellm.completion(model=model, api_base=base, api_key="none", **common)
        assert other.choices[0].message.content == whole.choices[0].message.content
    call = litellm.completion(
        model="openai/m", api_base=f"{url}/v1", api_key="none", **{**common, "max_tokens": 200}, tools=[FUNCTION],
        tool_choice="required",
    )  # fmt: skip
    assert call.choices[0].message.tool_calls[0].function.name == "draw"


def test_langchain_invokes_streams_and_holds_a_schema(url: str) -> None:
    model = ChatOpenAI(model="m", base_url=f"{url}/v1", api_key="none", max_tokens=200, temperature=0, max_retries=0)
    question = [HumanMessage(content=ASKED[0]["content"])]
    whole = model.invoke(question)
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in model.stream(question)) == whole.content
    form = {"title": "answer", **SCHEMA}
    assert isinstance(model.with_structured_output(form, method="json_schema").invoke(question)["red"], bool)
    call = model.bind_tools([FUNCTION], tool_choice="required").invoke(question)
    assert call.tool_calls[0]["name"] == "draw"


def test_llama_index_by_each_of_its_forms(url: str) -> None:
    blocks = [ImageBlock(path=FILE, image_mimetype="image/jpeg"), TextBlock(text="what is it?")]
    question = [ChatMessage(role="user", blocks=blocks)]
    like = OpenAILike(
        model="m", api_base=f"{url}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True,
        max_tokens=8, temperature=0, max_retries=0,
    )  # fmt: skip
    whole = like.chat(question).message.content
    assert whole
    *_, last = like.stream_chat(question)
    assert last.message.content == whole
    options = {"num_predict": 8}
    of_ollama = Ollama(model="m", base_url=url, temperature=0, additional_kwargs=options, context_window=2048)
    assert of_ollama.chat(question).message.content == whole


def test_openai_s_client(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    whole = client.chat.completions.create(model="m", messages=ASKED, max_tokens=8)  # type: ignore[arg-type]
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 8
    assert client.responses.create(model="m", input="what is red?", max_output_tokens=8).output
    assert [model.id for model in client.models.list()] == ["m"]


# ---- Open WebUI's requests -----------------------------------------------------------------------

# The parameters of a model that its settings offer, but those that these servers refuse: mirostat, repeat_last_n.
OPENAI_PARAMETERS: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.9,
    "min_p": 0.0,
    "max_tokens": 8,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "seed": 4,
    "stop": ["###"],
    "logit_bias": {"5": 5},
    "response_format": {"type": "text"},
}
OLLAMA_OPTIONS: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.0,
    "seed": 4,
    "stop": ["###"],
    "num_predict": 8,
    "repeat_penalty": 1.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "num_ctx": 2048,
    "num_batch": 512,
    "num_keep": 24,
    "num_gpu": 1,
    "num_thread": 2,
    "use_mmap": True,
    "use_mlock": False,
}


def test_open_webui_s_parameters(url: str) -> None:
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"model": "m", "messages": ASKED, **stream, **OPENAI_PARAMETERS}
    reply = requests.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.text.rstrip().endswith("data: [DONE]")
    title = {"model": "m", "messages": [{"role": "user", "content": "a title?"}], "stream": False}
    title["max_completion_tokens"] = 8
    assert requests.post(f"{url}/v1/chat/completions", json=title, timeout=60).status_code == 200
    turn = {"role": "user", "content": "what is it?", "images": [PICTURE]}
    body = {"model": "m:latest", "messages": [turn], "stream": True, "keep_alive": "5m", "options": OLLAMA_OPTIONS}
    reply = requests.post(f"{url}/api/chat", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert json.loads(reply.text.splitlines()[-1])["done"]
    for path in ("/v1/models", "/api/tags", "/api/version", "/api/ps"):
        assert requests.get(url + path, timeout=60).status_code == 200
