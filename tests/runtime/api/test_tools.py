"""Tools: every call of an answer parses and has arguments that the schema allows; templates print what was called."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken

from tests.support.calling import HERMES, LLAMA, PARAMETERS, STRANGE, TOOLS, calling_bundle, tool
from tests.support.exported import Models
from tests.support.text import make_settings, make_tokenizer
from tests.support.tiny import random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.messages import split_images
from vtx.runtime.api.model import Model
from vtx.runtime.errors import RequestError
from vtx.runtime.prompt.guiding import Grammars, Guide
from vtx.runtime.prompt.messages import with_tools
from vtx.runtime.prompt.text import Text
from vtx.runtime.prompt.tools import MAX_TOOLS, Tools, read_calls

pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
QUESTION = {"role": "user", "content": [{"type": "image", "image": random_image(1)}, {"type": "text", "text": "red?"}]}
WILD: dict[str, Any] = {"max_new_tokens": 200, "temperature": 1.5, "reduce": "none"}


@pytest.fixture(scope="module", params=[HERMES, LLAMA], ids=["hermes", "llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = calling_bundle(tmp_path_factory.mktemp("calling"), request.param)
    with load(folder, device="cpu", threads=1) as model:
        yield model


@pytest.mark.sampled
def test_every_call_has_a_known_name_and_arguments_that_the_schema_allows(model: Model) -> None:
    complete, many = 0, 0
    for seed in range(12):
        choice = ("required", "erase")[seed % 2]
        answer = model.generate([QUESTION], None, tools=Tools(TOOLS, choice), seed=seed, **WILD)
        calls = answer.tool_calls
        assert calls is not None
        for call in calls:
            assert call.name in (("draw", "erase") if choice == "required" else ("erase",))
            jsonschema.validate(json.loads(call.arguments), PARAMETERS)
        if answer.stopped == "end":
            assert answer.text == "\n".join(map(model.loaded.text.call_form.text, calls))
        complete, many = complete + (answer.stopped == "end"), many + (len(calls) > 1)
    assert complete
    assert bool(many) == (model.loaded.text.call_form.between is not None)
    one = model.generate([QUESTION], None, tools=Tools(TOOLS, "required", parallel=False), seed=2, **WILD)
    assert len(one.tool_calls or ()) == 1


def test_the_prompt_has_the_tools_the_calls_and_their_results(model: Model) -> None:
    answer = model.generate([QUESTION], None, tools=Tools(TOOLS, "draw"), seed=1, **WILD)
    [call, *_] = answer.tool_calls or ()
    called = {"id": "a", "function": dataclasses.asdict(call)}
    turns = [
        QUESTION, {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "drawn <image>"}]},
    ]  # fmt: skip
    spoken = [tool("draw", {"type": "object", "description": "<image></s>"})]
    answer = model.generate(turns, None, tools=spoken, max_new_tokens=1, reduce="none")
    images, messages = split_images(turns)
    ids = model.loaded.prompts.ids(with_tools(messages, spoken), model.loaded.images.prepare_all(images))
    assert len(ids) == answer.stats.prompt_tokens
    prompt = model.loaded.text.decode(ids)
    assert model.loaded.text.call_form.text(call) in prompt
    assert "drawn <image>" in prompt
    assert '"description": "<image></s>"' in prompt, "special tokens in tools and results are text"


@pytest.mark.slow
def test_templates_without_a_known_form_refuse_tools_by_name(tmp_path: Path, models: Models) -> None:
    tiny_model = models()
    with pytest.raises(RequestError, match="knows no tools"):
        tiny_model.generate([QUESTION], tools=TOOLS)
    with pytest.raises(RequestError, match="knows no tools"):
        tiny_model.generate([QUESTION, {"role": "tool", "content": "5"}])
    with (
        load(calling_bundle(tmp_path, STRANGE), device="cpu", threads=1) as strange,
        pytest.raises(RequestError, match="a form that vtx does not know"),
    ):
        strange.generate([QUESTION], tools=TOOLS)
    with tiny_model.open(random_image(1)) as image, pytest.raises(RequestError, match="no place for the results"):
        image.chat().ask("red?", tools=TOOLS)


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([], "list of 1 to"),
        ([tool(f"f{n}") for n in range(MAX_TOOLS + 1)], "list of 1 to"),
        ("draw", "list of 1 to"),
        ([{"type": "function"}], "is not"),
        ([tool("a b")], "letters, digits"),
        ([tool("a"), tool("a")], "same name"),
        ([tool("a", 5)], "JSON schema"),
        ([tool("a", {"x": float("nan")})], "not JSON"),
        ([tool("a", {"description": "x" * 70_000})], "limit is 65,536"),
    ],
)
def test_what_is_not_a_list_of_tools_is_refused(tools: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Guide(tools=tools)


def test_tools_that_would_be_compiled_for_long_are_refused_together(model: Model) -> None:
    multiples = [tool(f"f{n}", {"properties": {"a": {"type": "integer", "multipleOf": 9973 - n}}}) for n in range(100)]
    with pytest.raises(RequestError, match="tools asks for multiples of 19,945, the limit is 10,000"):
        model.loaded.prompts.guided(Guide(tools=multiples))


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/missing"},
        {"type": "object", "uniqueItems": True, "not": {}},
        {"properties": {"a": {"enum": []}}, "required": ["a"]},
        {"properties": {"a": {"type": "integer", "multipleOf": 1_000_003}}},
        {
            "properties": {
                "a": {"allOf": [{"type": "string", "pattern": f"((a|b)*a(a|b){{{n}}}c)*"} for n in range(24)]}
            }
        },
        {"properties": {"a": {"type": "string", "pattern": "(" * 200 + "a" + "{1,900}){1,900}" * 200}}},
    ],
)
def test_hostile_schemas_of_tools_are_refused(model: Model, parameters: Any) -> None:
    with pytest.raises(RequestError, match="tools"):
        model.generate([QUESTION], tools=Tools([tool("a", parameters)], "required"), max_new_tokens=5, reduce="none")


@pytest.mark.sampled
@pytest.mark.parametrize("added", [True, False], ids=["markers are tokens", "markers are text"])
def test_an_answer_is_text_then_calls_however_the_tokenizer_splits_the_markers(added: bool) -> None:
    tokenizer = make_tokenizer("bytes")
    if added:
        tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    text = Text(tokenizer, HERMES, make_settings(tokenizer))
    grammars, random = Grammars(text, tokenizer.get_vocab_size()), np.random.default_rng(1)
    marks = {tokenizer.token_to_id(mark) for mark in ("<tool_call>", "</s>")} - {None}
    found = 0
    for number in range(30):
        guided, output, ids = grammars.start(Guide(tools=TOOLS)), text.stream(), list[int]()
        written = text.tokenizer.encode("let me see\n<tool_call>" if number % 2 else "no", add_special_tokens=False).ids
        pieces = ""
        while not guided.complete and len(ids) < 900:
            allowed = np.flatnonzero(np.isfinite(guided.mask(np.zeros(tokenizer.get_vocab_size(), np.float32))))
            likely = [*written[len(ids) : len(ids) + 1], *(marks & set(allowed.tolist()) if len(ids) > 12 else ())]
            token = likely[0] if likely and likely[0] in allowed else int(random.choice(allowed))
            ids.append(token)
            pieces += output.push(token)
            guided.push(token)
            if token == tokenizer.token_to_id("</s>"):
                break
        if not guided.complete and ids[-1] != tokenizer.token_to_id("</s>"):
            continue
        content, calls = text.call_form.split(pieces, complete=True)
        assert "<tool_call>" not in content
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), PARAMETERS)
        for cut in range(len(pieces)):
            before, some = text.call_form.split(pieces[:cut], complete=False)
            assert content.startswith(before)
            assert [c.arguments.startswith(s.arguments) for c, s in zip(calls, some, strict=False)] == [True] * len(
                some
            )
        found += bool(calls)
    assert found > 5


WHOLE = '{"city": "Par, \\"is", "days": [1, {"a": 2}], "unit": "C", "then": {"x": null}}'


@pytest.mark.parametrize("end", range(1, len(WHOLE) + 1))
def test_a_call_that_was_cut_anywhere_comes_back_with_its_whole_members(end: int) -> None:
    (call,) = read_calls([{"id": "1", "function": {"name": "f", "arguments": WHOLE[:end]}}])
    everything = list(json.loads(WHOLE).items())
    commas = [WHOLE.index(f', "{name}"') for name, _ in everything[1:]]
    whole = 4 if end == len(WHOLE) else sum(comma < end for comma in commas)
    assert list(call["function"]["arguments"].items()) == everything[:whole]


@pytest.mark.parametrize(
    "text", ["{]", "[1", '{"a" 1, "b', "{} x", '{"a": 1}}', "{a: 1", "nothing", '"{', '{"a": x, "b": 1']
)
def test_arguments_that_are_no_beginning_of_an_object_are_refused(text: str) -> None:
    with pytest.raises(RequestError):
        read_calls([{"id": "1", "function": {"name": "f", "arguments": text}}])
