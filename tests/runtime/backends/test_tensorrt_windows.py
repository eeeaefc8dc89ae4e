"""Gemma 3 and 4 and PaliGemma on the stand-in of TensorRT: windows, shared keys and values, prompts seen both ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bundles import export_all
from tests.support.engines import JETPACK_6, ORIN, open_model, read_together, shorten
from tests.support.exported import QUESTIONS, THREADS, greedy, policy, prompt
from tests.support.families.gemma import GEMMA3, GEMMA4
from tests.support.families.paligemma import PALIGEMMA
from tests.support.fixtures import Checkpoints
from tests.support.gpu_standin import Gpu, build_all
from tests.support.tiny import prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.options import Options
from vtx.runtime.api.stream import AnswerStream
from vtx.runtime.backends.slots import part_ends
from vtx.runtime.backends.tensorrt import backend as tensorrt
from vtx.runtime.backends.tensorrt.backend import TensorrtBackend
from vtx.runtime.backends.tensorrt.cache import TensorrtStageCache
from vtx.runtime.bundle.spec import names
from vtx.runtime.errors import ContextError
from vtx.runtime.session.session import Session
from vtx.runtime.vision.tokens import TokenStates

STEPS, TOLERANCE = 8, 1e-4
# K and V of 1 head of 16 and 32 numbers are not written in place; those of 64 and 128 in float32 are.
WIDE4 = replace(GEMMA4, head_dim=64)
FAMILIES = {
    "gemma3": (GEMMA3, (2, 4, 6)), "gemma4": (GEMMA4, (2, 4, 5)), "gemma4-aligned": (WIDE4, (4,)),
    "paligemma": (PALIGEMMA, (3, 5)),
}  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The bundle of a family with engines of both dialects."""
    folder = tmp_path_factory.mktemp("engines")

    def get(name: str) -> Path:
        if not (folder / name).exists():
            tiny, ks = FAMILIES[name]
            export_all(tiny_checkpoint(tiny), folder / name, ks)
            build_all(folder / name)
            build_all(folder / name, "jetson-orin", JETPACK_6, "trt10")
        return folder / name

    return get


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dialect", ["trt", "trt10"])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_onnxruntime(
    family: str, dialect: str, bundle: Callable[[str], Path], device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one picture and of two, at every K; prompts and answers are longer than the window."""
    if dialect == "trt10":
        monkeypatch.setattr(tensorrt, "find_gpu", lambda *_: ORIN)
    ours, reference = open_model(bundle(family)), load(bundle(family), device="cpu", threads=THREADS)
    assert ours.backend.dialect == dialect
    for k in (None, *FAMILIES[family][1]):
        for count in (1, 2):
            images = [random_image(number, (90 + 50 * number, 70)) for number in range(count)]
            messages = prompt_messages(QUESTIONS[1], count)
            want, got = (greedy(m, prompt(m, messages, images), k, STEPS) for m in (reference, ours))
            assert got.ids == want.ids
            np.testing.assert_allclose(got.logits, want.logits, atol=TOLERANCE)
            assert got.done.slots == want.done.slots


@pytest.mark.parametrize("family", FAMILIES)
def test_further_questions_and_chats_are_answered_as_on_onnxruntime(
    family: str, bundle: Callable[[str], Path], device: Gpu
) -> None:
    """The last one is answered by launches of what was recorded; the caches grow over 32 slots meanwhile."""
    ours, reference = open_model(bundle(family)), load(bundle(family), device="cpu", threads=THREADS)
    options, k = Options(40, ignore_eos=True, logprobs=True), FAMILIES[family][1][-1]
    with ours.open([random_image(3)]) as mine, reference.open([random_image(3)]) as theirs:
        for question, depth in ((QUESTIONS[1], None), (QUESTIONS[0], k), ("red?", None), (QUESTIONS[1], k)):
            got, want = (talk.ask(question, depth, options) for talk in (mine, theirs))
            assert got.token_ids == want.token_ids
            np.testing.assert_allclose(got.logprobs or (), want.logprobs or (1,), atol=TOLERANCE)
            assert got.stats.kv_slots == want.stats.kv_slots
        if family != "paligemma":
            chats = [talk.chat(k) for talk in (mine, theirs)]
            for question in ("red?", QUESTIONS[0]):
                assert chats[0].ask(question, options).token_ids == chats[1].ask(question, options).token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_image_allocates_and_records_nothing(family: str, bundle: Callable[[str], Path], device: Gpu) -> None:
    model, options, seen = open_model(bundle(family)), Options(6, ignore_eos=True), []
    for number in range(4):
        before = device.calls.copy()
        with model.open([random_image(number)]) as conversation:
            conversation.ask(QUESTIONS[1], FAMILIES[family][1][-1], options)
        seen.append(device.calls - before)
    for name in ("cuMemAlloc_v2", "cuMemHostAlloc", "createExecutionContext", "cuStreamBeginCapture_v2"):
        assert seen[-1][name] == 0, name
    assert seen[0]["createExecutionContext"] > 0


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_a_token_is_awaited_once_and_layers_that_share_are_launched_after_the_others(
    family: str, bundle: Callable[[str], Path], device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt, "find_gpu", lambda *_: ORIN)  # TensorRT proper, which vtx records itself
    model = open_model(bundle(family))
    session = Session(model.backend, model.manifest)
    session.prefill(prompt(model, prompt_messages("red?"), [random_image(0)]), policy(None))
    for _ in range(3):
        session.decode(5)
    before = device.calls.copy()
    session.decode(5)
    made = device.calls - before
    assert made["cuStreamSynchronize"] == 1
    assert made["cuGraphLaunch"] == (2 if family == "gemma4" else 1)


@pytest.mark.parametrize("dialect", ["trt", "trt10"])
@pytest.mark.parametrize("family", ["gemma3", "gemma4", "gemma4-aligned"])
def test_conversations_that_decode_together_read_their_own_slots(
    family: str, dialect: str, bundle: Callable[[str], Path], device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one has left its lane of a layer that is read, and has another one since."""
    if dialect == "trt10":
        monkeypatch.setattr(tensorrt, "find_gpu", lambda *_: ORIN)
    model = open_model(bundle(family))
    ks = (None, *FAMILIES[family][1])

    def streams() -> list[AnswerStream]:
        options = Options(2 * STEPS, ignore_eos=True)
        images = [model.open([random_image(n)]) for n in range(3)]
        return [image.stream(QUESTIONS[n % 2], ks[n % len(ks)], options) for n, image in enumerate(images)]

    alone = [stream.read().token_ids for stream in streams()]
    real, caches = TensorrtBackend.append_each, list[TensorrtStageCache]()

    def leaving(self: Any, index: int, several: Any, *rest: Any) -> Any:
        done = real(self, index, several, *rest)
        if not index:
            caches.append(several[len(caches) % len(several)])
            caches[-1].leave_lane()
        return done

    monkeypatch.setattr(TensorrtBackend, "append_each", leaving)
    assert read_together(model, streams()) == alone


def test_a_prompt_in_parts_cuts_no_image_in_two(bundle: Callable[[str], Path], device: Gpu) -> None:
    folder = bundle("gemma3")
    reference = load(folder, device="cpu", threads=THREADS)
    shorten(folder, "sm89", 20)
    try:
        ours = open_model(folder)
        messages, images = prompt_messages(QUESTIONS[1], 2), [random_image(0), random_image(1)]
        for k in (None, 4):
            want, got = (greedy(m, prompt(m, messages, images), k, STEPS) for m in (reference, ours))
            assert got.ids == want.ids
            np.testing.assert_allclose(got.logits, want.logits, atol=TOLERANCE)
        shorten(folder, "sm89", 15)
        with (
            open_model(folder).open([random_image(0)]) as image,
            pytest.raises(ContextError, match="16 tokens at once"),
        ):
            image.ask("red?", "none")
    finally:
        build_all(folder)


@pytest.mark.parametrize(
    ("groups", "most", "ends"),
    [
        ([-1] * 7, 3, [3, 6, 7]),
        ([-1, 0, 0, 0, -1, 1, 1], 3, [1, 4, 7]),
        ([0, 0, 0, 0, -1], 3, [4, 5]),
        ([-1, -1, 0, 0, 0, 0, 0, 1], 4, [2, 7, 8]),
        ([0] * 5, 2, [5]),
    ],
)
def test_parts_are_as_long_as_the_engine_takes_but_for_one_group(groups: list[int], most: int, ends: list[int]) -> None:
    given = {names.GROUP: np.array(groups, np.float32)[:, None]}
    tokens = TokenStates(np.zeros((len(groups), 4), np.float32), given)
    assert part_ends(tokens, most) == ends
    assert part_ends(TokenStates(tokens.hidden), most) == [*range(most, len(groups), most), len(groups)]
