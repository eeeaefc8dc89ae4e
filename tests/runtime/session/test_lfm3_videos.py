"""Videos of LFM3-VL: pairs of frames with their times, and positions of one part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.clips import evs
from tests.support.exported import Models, greedy
from tests.support.families.lfm3_vl import LFM3
from tests.support.fixtures import References
from tests.support.near import assert_near
from tests.support.parity import STEPS, assert_later_equal_fresh, assert_same_on_openvino, video_prompts
from tests.support.reference import Reference
from tests.support.tiny import random_image, random_video
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.errors import BundleError
from vtx.runtime.vision.layouts.pairs import Pairs
from vtx.runtime.vision.video import video

pytestmark = pytest.mark.dialects("ort", "plain")
QUESTION = "What is the colour of the square in the picture?"
KS = (2, 4, 5, 7)
CLIP = video(random_video(0, 30, (130, 50)), frames=5, fps=20)
SMALL = video(random_video(1, 20, (90, 60)), frames=6, fps=30)


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models(LFM3, KS)


def as_given(model: Model, clip: Any) -> tuple[torch.Tensor, Any]:
    """A prepared video as the reference takes it: its pairs of frames, and which frames they are."""
    prepared = model.loaded.images.prepare_video(clip)
    return torch.from_numpy(np.stack([*prepared.views])), prepared.arrange.keywords["clip"]  # type: ignore[attr-defined]


@pytest.mark.sampled
@pytest.mark.parametrize("pictures", [[CLIP], [random_image(1, (90, 70)), SMALL]], ids=["video", "image and video"])
def test_videos_are_answered_as_by_transformers_and_at_k_by_the_withdrawal(
    model: Model, reference: References, pictures: list[Any]
) -> None:
    judge = reference(LFM3)
    inputs, asked = video_prompts(model, judge, pictures, QUESTION, lambda clip: as_given(model, clip))
    for k in (None, *KS):
        wanted = judge.greedy(inputs, k, STEPS)
        answer = greedy(model, asked, k, STEPS, forced=wanted.ids)
        assert_near(answer.logits, wanted.logits, 1e-4)
    ids, logits = judge.generate_hf(inputs, STEPS)
    wanted = judge.greedy(inputs, None, STEPS)
    assert ids == wanted.ids
    assert_near(logits, wanted.logits, 1e-4)


def test_later_questions_about_a_video_are_answered_as_alone(model: Model) -> None:
    assert_later_equal_fresh(model, [CLIP], 5)


def test_tokens_of_a_pair_that_leave_before_the_decoder_leave_gaps_in_its_positions(model: Model) -> None:
    tokens = model.loaded.images.prepare_video(CLIP).encode(model.backend)
    count = len(tokens) // 3
    assert tokens.offsets is not None
    assert tokens.offsets.tolist() == [*range(count)] * 3
    assert (tokens.span, tokens.runs) == (count, (count,) * 3)
    part = tokens.take(np.array([1, count + 2]))
    assert part.offsets is not None
    assert (part.offsets.tolist(), part.span, part.runs) == ([1, 2], count, (1, 1, 0))


def test_openvino_answers_about_videos_alike(model: Model) -> None:
    assert_same_on_openvino(model, [CLIP], QUESTION)


def places(judge: Reference, inputs: Any, kept: list[int], count: int) -> torch.Tensor:
    """The positions [1, n] of the text and of the `kept` tokens of pairs of `count`, stated without transformers."""
    at, number, out = 0, 0, list[int]()
    ids = inputs["input_ids"][0].tolist()
    token = 0
    while token < len(ids):
        if ids[token] != judge.video_token:
            out.append(at)
            token, at = token + 1, at + 1
            continue
        own = [at + n - number for n in range(number, number + count) if n in kept]
        out += own
        at += count if own else 0
        token, number = token + count, number + count
    return torch.tensor(out)[None]


@pytest.mark.parametrize("k", [None, 5])
def test_a_method_of_clips_leaves_out_the_tokens_of_its_statement(
    models: Models, reference: References, k: int | None
) -> None:
    model, judge = models(LFM3, KS, "fp32", ("evs:keep=0.5",)), reference(LFM3)
    inputs, _ = video_prompts(model, judge, [CLIP], QUESTION, lambda clip: as_given(model, clip))
    hidden = torch.from_numpy(model.loaded.images.prepare_video(CLIP).encode(model.backend).hidden)
    kept = evs(hidden.view(3, -1, hidden.shape[-1]), 0.5)
    rows, vision = judge.prompt(inputs)
    stays = torch.ones(len(vision), dtype=torch.bool)
    stays[vision] = torch.isin(torch.arange(len(hidden)), torch.tensor(kept))
    start = places(judge, inputs, kept, len(hidden) // 3)
    wanted = judge.answer(rows[:, stays], vision[stays], start, [], k, STEPS)
    chosen = [float(row[id]) for row, id in zip(wanted.logits.log_softmax(-1), wanted.ids, strict=True)]
    with model.open(CLIP) as conversation:
        answer = conversation.ask(QUESTION, k, Options(STEPS, ignore_eos=True, logprobs=True), reduce="evs:keep=0.5")
    assert list(answer.token_ids) == wanted.ids
    assert_near(answer.logprobs or (), chosen, 2e-4)


def test_single_positions_of_pairs_that_follow_each_other_are_refused() -> None:
    with pytest.raises(BundleError, match="layout 'pairs' has"):
        Pairs(16, 2, 8192, 98304, 16, 2.0, 4, flat=True)
