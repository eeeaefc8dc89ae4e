"""Thoughts in libvtx: prompts, token ids, thoughts and texts of Python under the same switch and limit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.calling import CHANNEL, SWITCHED, THINKING, calling_bundle, switched_template
from tests.support.cpp import needs_cpp, output
from tests.support.exported import Models
from tests.support.fixtures import Libraries
from tests.support.text import make_settings, make_tokenizer
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.prompt.messages import Message, with_tools
from vtx.runtime.prompt.template import ShapingTemplate
from vtx.runtime.session.sampling import Sampling
from vtx.runtime.strict import json_value

pytestmark = needs_cpp
SAME = ("text", "token_ids", "thought", "thought_tokens", "prompt_tokens")


@pytest.fixture(scope="module", params=[THINKING, CHANNEL], ids=["opened", "begun"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = calling_bundle(tmp_path_factory.mktemp("thinking"), request.param)
    with load(folder, device="cpu", threads=1) as model:
        yield model


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a.png"
    random_image(1).save(path)
    return path


@pytest.mark.parametrize("name", SWITCHED)
def test_prompts_with_and_without_thoughts_are_python_s(name: str) -> None:
    source, token = switched_template(name)
    settings = make_settings(make_tokenizer("first"), image_token=token)
    turn: Message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is this"}]}
    template = ShapingTemplate(source, settings)
    prompts = set()
    for thinking in (True, False):
        request = {"template": source, "text": json_value(settings), "chats": [[turn]], "thinking": thinking}
        [line] = output("probe", "render", stdin=json.dumps(request).encode()).splitlines()
        want = template.render(with_tools([turn], [], thinking), add_generation_prompt=True)
        assert json.loads(line) == {"text": want}
        prompts.add(want)
    assert len(prompts) == 2


@pytest.mark.sampled
@pytest.mark.parametrize("limit", [1, 7, 0])
def test_thoughts_and_answers_are_python_s(model: Model, opened: Libraries, picture: Path, limit: int) -> None:
    cpp = opened(model.bundle.folder)
    with model.open(picture) as image:
        for thinking, code in ((True, 1), (False, -1), (None, 0)):
            sampling = Sampling(temperature=1.2, seed=5)
            fields: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "thinking": thinking}
            want = image.ask("red?", options=None, sampling=sampling, max_thinking_tokens=limit or None, **fields)
            [facts] = cpp.ask([picture], ["red?"], temperature=1.2, has_seed=1, seed=5, max_new_tokens=24,
                              ignore_eos=1, thinking=code, max_thinking_tokens=limit)  # fmt: skip
            python = json.loads(json.dumps(want.to_dict()))
            assert {name: facts.get(name) for name in SAME} == {name: python.get(name) for name in SAME}
            if thinking and limit and model.loaded.text.thought_form.begin == "<think>":  # type: ignore[union-attr]
                assert facts["thought_tokens"] > limit  # with the mark
                assert "</think>" not in facts["thought"] + facts["text"]


def test_a_chat_goes_on_without_the_thoughts_of_its_turns(model: Model, opened: Libraries, picture: Path) -> None:
    fields: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "max_thinking_tokens": 3}
    with model.open(picture) as image:
        chat = image.chat()
        want = [chat.ask(question, thinking=True, **fields).to_dict() for question in ("red?", "sure?")]
    got = opened(model.bundle.folder).ask([picture], ["red?", "sure?"], turns={0, 1}, thinking=1, **fields)
    for facts, python in zip(got, json.loads(json.dumps(want)), strict=True):
        assert {name: facts.get(name) for name in SAME} == {name: python.get(name) for name in SAME}


def test_thoughts_are_refused_where_there_are_none(models: Models, opened: Libraries, picture: Path) -> None:
    cpp = opened(models(Tiny()).bundle.folder)
    for fields, words in (
        ({"thinking": 1}, "no switch for thoughts"),
        ({"max_thinking_tokens": 4}, "no marks of thoughts"),
        ({"max_thinking_tokens": -1}, "max_thinking_tokens"),
    ):
        with pytest.raises(AssertionError, match=words):
            cpp.ask([picture], ["red?"], **fields)
    assert "thought" not in cpp.ask([picture], ["red?"], thinking=-1, max_new_tokens=2)[0]
