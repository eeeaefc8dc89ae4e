"""Images of a conversation that are replaced in libvtx: its answers and what it reuses are Python's."""

from __future__ import annotations

import ctypes as c
import json
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.cabi import BUSY, OK, ON_TOKEN, REQUEST, Frames, Loaded, images_of, options_of
from tests.support.cpp import DEVICES, needs_abi, needs_cpp, output
from tests.support.exported import Models
from tests.support.families.internvl import INTERNVL
from tests.support.families.paligemma import PALIGEMMA
from tests.support.families.smolvlm import SMOLVLM
from tests.support.tiny import Tiny, marked, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model

pytestmark = [
    needs_cpp,
    needs_abi,
    pytest.mark.dialects("ort", "plain"),
]
QUESTION, SYSTEM = "How many?", "Be brief, please."
FAMILIES = {"llava": Tiny(context=512), "internvl": INTERNVL, "smolvlm": SMOLVLM}


@contextmanager
def libvtx(model: Model, device: str = "cpu") -> Iterator[Loaded]:
    with closing(Loaded(model.bundle.folder, device)) as loaded:
        yield loaded


def facts(answer: dict[str, Any]) -> dict[str, Any]:
    answer = json.loads(json.dumps(answer))  # tuples are lists
    keys = ("token_ids", "k", "kv_slots", "vision_tokens_kept", "reused_tokens", "not_reused")
    return {key: answer[key] for key in keys}


def compared(
    model: Model, first: list[Image.Image], asked: list[tuple[list[Image.Image], Any, str]], device: str = "cpu"
) -> list[tuple[int, int]]:
    """Replace images and ask, in both runtimes; the tokens that each answer reused, and those of its prompt."""
    reused, fields = [], {"max_new_tokens": 4, "ignore_eos": True}
    with libvtx(model, device) as loaded, model.open(first, system=SYSTEM) as held:
        arrays = [np.asarray(image) for image in first]
        with closing(Frames(loaded, arrays, SYSTEM)) as frames:
            for shown, k, reduce in asked:
                arrays = [np.asarray(image) for image in shown]
                if frames.replace(arrays):
                    held.replace(list(shown))
                options = {"k": str(k or "none").encode(), "reduce": reduce.encode(), "max_new_tokens": 4}
                found = frames.ask(QUESTION, **options, ignore_eos=1)
                want = held.ask(QUESTION, k, reduce=reduce, **fields).to_dict()
                assert facts(found) == facts(want), (k, reduce)
                with closing(Frames(loaded, arrays, SYSTEM)) as fresh:
                    assert fresh.ask(QUESTION, **options, ignore_eos=1)["token_ids"] == found["token_ids"]
                reused.append((found["reused_tokens"], found["prompt_tokens"]))
    return reused


@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("family", ["internvl", "smolvlm"])
def test_tiles_before_the_first_changed_one_are_not_run_again(models: Models, family: str, k: int | None) -> None:
    model, wide = models(FAMILIES[family], (3,)), random_image(4, (150, 60))
    frames = [wide, marked(wide, 0.95), marked(wide, 0.01), marked(wide, 0.01)]
    [_, (late, prompt), (early, _), (again, _)] = compared(model, [wide], [([f], k, "none") for f in frames])
    assert 0 < early < late < again < prompt


@pytest.mark.parametrize("k", [None, 3])
def test_images_and_text_before_the_one_that_changes_are_not_run_again(models: Models, k: int | None) -> None:
    model, empty = models(FAMILIES["llava"], (3,)), random_image(1)
    asked = [([empty, random_image(seed)], k, "none") for seed in (2, 3, 4)]
    for reused, prompt in compared(model, [empty, random_image(2)], asked)[1:]:
        assert prompt / 2 - 10 < reused < prompt


@pytest.mark.sampled
@DEVICES
@pytest.mark.parametrize("family", FAMILIES)
def test_any_sequence_of_frames_is_answered_as_by_python(models: Models, family: str, device: str) -> None:
    """Other K, methods that rank all tokens or shrink caches, frames that are equal, and images that come and go."""
    reductions = ("fastv:k=3", "mustdrop:gamma=0.05,alpha=1,tau=off,key=0,layers=2/4/6", "random:keep=0.5")
    reductions = reductions if family != "smolvlm" else reductions[:2]  # there is text among its tokens
    made = models(FAMILIES[family], (3, 5), reductions=reductions)
    with load(made.bundle.folder, device=device, threads=1) as model:
        rng, size = random.Random(7), (150, 60) if family != "llava" else (60, 60)
        wide = random_image(4, size)
        pool = [wide, random_image(5, size), *(marked(wide, rng.random()) for _ in range(4))]
        asked = list[tuple[list[Image.Image], Any, str]]()
        for _ in range(24):
            reduce = rng.choice(("none", "none", *reductions))
            count = 2 if family == "llava" and rng.random() < 0.5 else 1
            asked.append((rng.choices(pool, k=count), rng.choice((None, 3, 5)) if reduce == "none" else None, reduce))
        assert any(reused for reused, _ in compared(model, [wide], asked, device))


def test_a_prompt_that_sees_itself_both_ways_is_run_as_a_whole(models: Models) -> None:
    model, first = models(PALIGEMMA, (3,)), random_image(1)
    with libvtx(model) as loaded, closing(Frames(loaded, [np.asarray(first), np.asarray(first)])) as frames:
        frames.ask(QUESTION)
        other = np.asarray(random_image(3))
        assert frames.replace([np.asarray(first), other])
        assert frames.ask(QUESTION)["reused_tokens"] == 0


def test_tiles_that_are_equal_are_not_encoded_again() -> None:
    images = [[1, 2, 3], [1, 2, 4], [4, 2, 1], [4, 2, 1], [9], [4, 2, 1]]
    lines = output("probe", "tiles", stdin="\n".join(map(json.dumps, images)).encode()).decode().split()
    assert [int(line) for line in lines] == [3, 1, 0, 0, 1, 3]


def test_equal_and_near_frames_replace_nothing(models: Models) -> None:
    model, shown = models(FAMILIES["llava"], (3,)), np.asarray(random_image(1)) // 2
    with libvtx(model) as loaded, closing(Frames(loaded, [shown])) as frames:
        first = frames.ask(QUESTION)
        assert not frames.replace([shown.copy()])
        again = frames.ask(QUESTION)
        assert again["token_ids"] == first["token_ids"]
        assert again["reused_image"]
        assert not frames.replace([shown + 5], near=0.03)
        assert frames.replace([shown + 10], near=0.03)
        assert not frames.replace([shown + 15], near=0.03)
        assert frames.replace([shown + 20], near=0.03), "a slow change adds up"
        assert frames.replace([shown + 20, shown], near=1)
        one_off = shown.copy()
        one_off[0, 0, 0] += 1
        assert frames.replace([one_off]), "one number of one pixel is another picture"


def test_a_chat_begins_anew_and_a_busy_conversation_is_told(models: Models) -> None:
    model, shown, other = models(FAMILIES["llava"], (3,)), np.asarray(random_image(1)), np.asarray(random_image(2))
    with libvtx(model) as loaded, closing(Frames(loaded, [shown])) as frames:
        library, statuses = loaded.library, list[int]()
        images = images_of(library, [other])

        def on_token(*_: object) -> int:
            statuses.append(library.vtx_conversation_replace(frames.handle, images, 1, c.c_double(0), None))
            return 0

        take = ON_TOKEN(on_token)
        chat = loaded.answer(library.vtx_chat, frames.handle, QUESTION, options_of(library, on_token=take))
        assert set(statuses) == {BUSY}
        assert not frames.replace([shown])
        second = loaded.answer(library.vtx_chat, frames.handle, QUESTION, options_of(library))
        assert second["prompt_tokens"] > chat["prompt_tokens"], "nothing was replaced, so the chat goes on"
        assert frames.replace([other])
        anew = loaded.answer(library.vtx_chat, frames.handle, QUESTION, options_of(library))
        assert anew["prompt_tokens"] == chat["prompt_tokens"]
        assert anew["token_ids"] == list(model.open(Image.fromarray(other)).ask(QUESTION, max_new_tokens=8).token_ids)
        for near in (-0.1, 1.5, float("nan")):
            status = library.vtx_conversation_replace(frames.handle, images, 1, c.c_double(near), None)
            assert status == REQUEST
            assert b"near is" in library.vtx_last_error()
        assert library.vtx_conversation_replace(frames.handle, None, 1, c.c_double(0), None) == REQUEST
        assert library.vtx_conversation_replace(None, images, 1, c.c_double(0), None) == REQUEST
        assert library.vtx_conversation_replace(frames.handle, None, 0, c.c_double(0), None) == OK, "no images"
        assert frames.ask(QUESTION)["vision_tokens"] == 0
