"""Conversations of libvtx about the images of another one: what it has of them is not computed again."""

from __future__ import annotations

import ctypes as c
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest

from tests.support.cabi import BUSY, OK, ON_TOKEN, REQUEST, Frames, Loaded
from tests.support.cpp import ENGINES, needs_abi, needs_cpp
from tests.support.exported import Models
from tests.support.families.internvl import INTERNVL
from tests.support.families.paligemma import PALIGEMMA
from tests.support.tiny import Tiny, random_image

pytestmark = [
    needs_cpp,
    needs_abi,
    pytest.mark.dialects("ort", "plain"),
]
FASTV, DUAL = "fastv:k=3", "mustdrop:gamma=0.05,alpha=1,tau=off,key=0,layers=2/4/6"
RANDOM = "random:keep=0.5"
SETTINGS = [("none", "none"), ("3", "none"), ("5", "none"), ("none", FASTV), ("none", DUAL), ("none", RANDOM)]
FAMILIES = {"llava": Tiny(context=512), "internvl": INTERNVL}
PICTURES = [np.asarray(random_image(seed, (150, 60))) for seed in (4, 5)]
QUESTIONS = ("How many?", "red?", "What is the shape of it?")


@pytest.fixture(scope="module", params=ENGINES)
def device(request: pytest.FixtureRequest) -> str:
    device: str = request.param
    return device


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, models: Models, device: str) -> Iterator[Loaded]:
    made = models(FAMILIES[request.param], (3, 5), reductions=(FASTV, DUAL, RANDOM))
    with closing(Loaded(made.bundle.folder, device)) as loaded:
        yield loaded


def ask(frames: Frames, question: str, setting: tuple[str, str]) -> dict[str, Any]:
    k, reduce = setting
    return frames.ask(question, k=k.encode(), reduce=reduce.encode(), max_new_tokens=4, ignore_eos=1)


@pytest.mark.sampled
@pytest.mark.covering(2)
@pytest.mark.parametrize("first", SETTINGS)
@pytest.mark.parametrize("second", SETTINGS[:4])
def test_a_fork_answers_as_a_conversation_of_its_own_and_so_does_the_one_before(
    loaded: Loaded, first: tuple[str, str], second: tuple[str, str]
) -> None:
    with ExitStack() as held:
        one, fresh = (held.enter_context(closing(Frames(loaded, PICTURES[:1], "Be brief."))) for _ in range(2))
        ask(one, QUESTIONS[0], first)
        fork = held.enter_context(closing(one.fork()))
        again = held.enter_context(closing(fork.fork()))
        wanted = [ask(fresh, question, second) for question in QUESTIONS]
        for each in (fork, again, one):
            found = [ask(each, question, second) for question in QUESTIONS]
            assert [f["token_ids"] for f in found] == [w["token_ids"] for w in wanted]
            assert [f["kv_slots"] for f in found] == [w["kv_slots"] for w in wanted]
        if first == second and first[1] in ("none", FASTV):
            other = held.enter_context(closing(one.fork()))
            assert ask(other, QUESTIONS[0], second)["reused_image"]


def test_an_image_that_is_replaced_in_one_stays_in_the_other(loaded: Loaded) -> None:
    with ExitStack() as held:
        one = held.enter_context(closing(Frames(loaded, PICTURES[:1])))
        alone = [held.enter_context(closing(Frames(loaded, [picture]))) for picture in PICTURES]
        wanted = [ask(each, QUESTIONS[0], SETTINGS[1]) for each in alone]
        ask(one, QUESTIONS[1], SETTINGS[0])
        fork = held.enter_context(closing(one.fork()))
        assert one.replace(PICTURES[1:])
        late = held.enter_context(closing(one.fork()))  # whose image has not run yet
        for each, number in ((one, 1), (fork, 0), (late, 1)):
            assert ask(each, QUESTIONS[0], SETTINGS[1])["token_ids"] == wanted[number]["token_ids"]
        assert fork.replace(PICTURES[1:])
        assert ask(fork, QUESTIONS[0], SETTINGS[1])["token_ids"] == wanted[1]["token_ids"]


def test_a_fork_outlives_the_conversation_before_and_one_without_images_is_empty(loaded: Loaded) -> None:
    one = Frames(loaded, PICTURES[:1])
    wanted = ask(one, QUESTIONS[0], SETTINGS[1])["token_ids"]
    fork = one.fork()
    one.close()
    with closing(fork):
        assert ask(fork, QUESTIONS[0], SETTINGS[1])["token_ids"] == wanted
    with closing(Frames(loaded, [])) as text:
        said = ask(text, QUESTIONS[0], SETTINGS[0])["token_ids"]
        with closing(text.fork()) as fork:
            assert ask(fork, QUESTIONS[0], SETTINGS[0])["token_ids"] == said


def test_a_prompt_that_sees_itself_both_ways_is_answered_by_a_fork(models: Models, device: str) -> None:
    made = models(PALIGEMMA, (3,))
    with closing(Loaded(made.bundle.folder, device)) as loaded, closing(Frames(loaded, PICTURES[:1])) as one:
        wanted = [one.ask(question)["token_ids"] for question in QUESTIONS]
        with closing(one.fork()) as fork:
            assert [fork.ask(question)["token_ids"] for question in QUESTIONS] == wanted


def test_a_conversation_that_answers_is_not_forked(loaded: Loaded) -> None:
    statuses, library = list[int](), loaded.library
    with closing(Frames(loaded, PICTURES[:1])) as one:

        def during(*_: Any) -> int:
            forked = c.c_void_p()
            thread = threading.Thread(
                target=lambda: statuses.append(library.vtx_conversation_fork(one.handle, c.byref(forked)))
            )
            thread.start()
            thread.join()
            assert not forked.value
            return 0

        on_token = ON_TOKEN(during)
        one.ask(QUESTIONS[0], on_token=on_token, max_new_tokens=2, ignore_eos=1)
        assert set(statuses) == {BUSY}
        assert library.vtx_conversation_fork(one.handle, None) == REQUEST
        forked = c.c_void_p()
        assert library.vtx_conversation_fork(None, c.byref(forked)) == REQUEST
        assert library.vtx_conversation_fork(one.handle, c.byref(forked)) == OK
        library.vtx_conversation_free(forked)
