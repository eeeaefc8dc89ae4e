"""SmolVLM and Idefics3 in libvtx: tiles with text among them, in pixels, prompts, answers and refusals as in Python."""

from __future__ import annotations

import ctypes as c
import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.cabi import OK, Loaded, opened, options_of
from tests.support.cpp import (
    ask,
    assert_asked_equal,
    expected,
    failure,
    needs_cpp,
)
from tests.support.exported import Models
from tests.support.families.smolvlm import SMOLVLM
from tests.support.tiny import random_image
from vtx.runtime.api.load import load
from vtx.runtime.errors import ContextError, RequestError

pytestmark = needs_cpp

SIZES = ((60, 60), (150, 60), (40, 90), (301, 97), (17, 200), (640, 33), (1, 1), (5, 400), (223, 225), (448, 112))
SIZES += ((56, 56), (90, 91))
QUESTIONS = ("red?", "What is <global-img> <row_1_col_1> really,\nin the picture?", "red?")


@pytest.mark.slow
def test_turns_of_a_chat_and_fewer_tiles_are_as_in_python(models: Models, pictures: list[Path]) -> None:
    folder = models(SMOLVLM, (3, 5)).bundle.folder
    options = ("--k", "5", "--max-tiles", "4", "--max-new-tokens", "6")
    found = ask(folder, pictures[1], *QUESTIONS, "--chat", *options)
    with load(folder, device="cpu", threads=1, max_tiles=4) as model, model.open(pictures[1]) as conversation:
        chat = conversation.chat(5)
        for question, answer in zip(QUESTIONS, found, strict=True):
            assert expected(answer) == expected(chat.ask(question, max_new_tokens=6).to_dict()), question


def test_a_prompt_in_ids_gets_the_text_among_the_tiles(models: Models) -> None:
    model, image, answer = models(SMOLVLM, (3, 5)), random_image(1, (150, 60)), c.c_void_p()
    with model.open(image) as conversation:
        want = conversation.ask("red?", max_new_tokens=8)
        plain = model.loaded.text.prompt(conversation.opening("red?"), 1).tolist()
    loaded = Loaded(model.bundle.folder, "cpu")
    library = loaded.library
    conversation = opened(library, loaded.handle, np.asarray(image))
    ids, options = (c.c_int64 * len(plain))(*plain), options_of(library)
    assert library.vtx_ask_ids(conversation, ids, len(ids), c.byref(options), c.byref(answer)) == OK
    found = json.loads(library.vtx_answer_json(answer))
    assert (found["token_ids"], found["prompt_tokens"]) == (list(want.token_ids), want.stats.prompt_tokens)
    library.vtx_answer_free(answer)
    library.vtx_conversation_free(conversation)
    loaded.close()


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["fastv", "dart:keep=0.5,k=3,pivots=2,text_pivots=1"])
def test_reductions_are_those_of_python(models: Models, pictures: list[Path], spec: str) -> None:
    model = models(SMOLVLM, (), "fp32", (spec,))
    assert_asked_equal(model, pictures[1:2], QUESTIONS, max_new_tokens=6)


def test_what_cannot_be_asked_is_refused_in_the_words_of_python(models: Models, pictures: list[Path]) -> None:
    model = models(SMOLVLM, (3, 5))
    with pytest.raises(ContextError) as room, model.open([pictures[8]] * 16) as conversation:
        conversation.ask("red?")
    assert "--max-tiles" in str(room.value)
    with pytest.raises(RequestError, match="drops tokens before the decoder") as entry:
        model.loaded.policy(None, reduce="cdpruner:keep=0.5")
    many = [word for _ in range(15) for word in ("--image", pictures[8])]
    for arguments, message in (
        (many, str(room.value)),
        (["--reduce", "cdpruner:keep=0.5"], str(entry.value)),
        (["--fit", "pad"], "fit 'pad' has no effect here: this model sees images of any shape in tiles"),
        (["--max-tiles", "-1"], "max_tiles is -1; it must be at least 1"),
    ):
        assert message in failure("run", "--bundle", model.bundle.folder, pictures[8], "red?", *arguments)
