"""Methods that choose from the frames of a video: each keeps the tokens of its plain statement."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.clips import BUDGETS, CASES, drawn, evs, vidcom2, video_of
from tests.support.selection import selected
from vtx.runtime.errors import RequestError
from vtx.runtime.policies import parse
from vtx.runtime.policies.clip import Clip
from vtx.runtime.vision.tokens import ImageTokens

STATEMENTS = {"evs": evs, "vidcom2": vidcom2}


@pytest.mark.sampled
@pytest.mark.parametrize("name", STATEMENTS)
@pytest.mark.parametrize("number", CASES)
def test_a_clip_keeps_the_tokens_of_the_released_code(number: int, name: str) -> None:
    clip, newline = drawn(number)
    statement: Callable[[Tensor, float], list[int]] = STATEMENTS[name]
    for keep in (*BUDGETS, 1):
        wanted = statement(torch.tensor(clip), keep)
        last = [clip.shape[0] * clip.shape[1]] * newline  # the newline stays, beyond the budget
        assert selected(f"{name}:keep={keep}", video_of(clip, newline)) == [*wanted, *last]


@pytest.mark.parametrize("number", CASES)
def test_evs_in_windows_of_any_sizes_keeps_what_it_keeps_of_the_whole_clip(number: int) -> None:
    clip, _ = drawn(number)
    cuts = sorted(np.random.default_rng(number).integers(0, len(clip) + 1, 3).tolist())
    windows = [window for window in np.split(clip, cuts) if len(window)]
    for keep in BUDGETS:
        [method] = parse(f"evs:keep={keep}")
        assert isinstance(method, Clip)
        choose = method.begin(len(clip))
        kept = [choose(window).tolist() for window in windows]
        assert kept[-1] == evs(torch.tensor(clip), keep)
        assert max(map(len, kept)) <= max(clip.shape[1], keep * clip[..., 0].size), "never more than the budget"


@pytest.mark.sampled
@pytest.mark.parametrize("number", CASES)
def test_vidcom2_in_windows_keeps_of_each_what_the_released_code_keeps_of_a_clip(number: int) -> None:
    clip, newline = drawn(number)
    window, each = 1 + number % 5, clip.shape[1]
    for keep in BUDGETS:
        wanted = list[int]()
        for first in range(0, len(clip), window):
            wanted += [first * each + token for token in vidcom2(torch.tensor(clip[first : first + window]), keep)]
        wanted += [len(clip) * each] * newline
        assert selected(f"vidcom2:keep={keep},window={window}", video_of(clip, newline)) == wanted


def test_evs_keeps_the_first_frame_and_what_changed_most_in_any_other() -> None:
    clip = np.tile(np.eye(4, dtype=np.float32), (4, 1, 1))
    clip[1, 2] = clip[2, 2] = [1, 0, 0.5, 0]  # turned a little less than halfway, and stays
    clip[3, 1] = [0, -1, 0, 0]  # turned round
    video = video_of(clip, False)
    assert selected("evs:keep=5", video) == [0, 1, 2, 3, 13]
    assert selected("evs:keep=6", video) == [0, 1, 2, 3, 6, 13]
    assert selected("evs:keep=7", video) == [0, 1, 2, 3, 6, 13, 14]  # 14 turned back
    assert selected("evs:keep=8", video) == [0, 1, 2, 3, 4, 6, 13, 14]  # of those that did not change the first
    assert selected("evs:keep=2", video) == [0, 1, 2, 3]
    assert selected("evs:keep=0.3", video_of(clip[:1], True)) == [0, 1, 2, 3, 4]


def test_shares_of_a_clip_are_rounded_down_free_of_the_error_of_binary_fractions() -> None:
    clip = np.random.default_rng(0).standard_normal((10, 10, 8)).astype(np.float32)
    for keep, count in ((0.29, 29), (0.57, 57), (0.289, 28), (0.1, 10), (0.01, 10)):
        assert len(selected(f"evs:keep={keep}", video_of(clip, False))) == count


def test_vidcom2_gives_an_unusual_frame_more_and_each_at_least_one() -> None:
    clip = np.random.default_rng(1).standard_normal((1, 20, 16)).astype(np.float32).repeat(8, 0) * 0.1 + 1
    clip[5] = -clip[5]
    for keep, usual in ((0.01, 1), (0.3, 5)):
        kept = np.array(selected(f"vidcom2:keep={keep}", video_of(clip, False))) // 20
        counts = np.bincount(kept, minlength=8)
        assert counts[5] > usual or keep == 0.01
        assert set(counts[[0, 1, 2, 3, 4, 6, 7]]) == {usual}


@pytest.mark.parametrize("name", STATEMENTS)
def test_images_enter_whole(name: str) -> None:
    [method] = parse(name)
    image = ImageTokens.one_per_patch(np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32))
    assert method.entry().select(image) is None  # type: ignore[union-attr]


@pytest.mark.parametrize("spec", ["random+evs", "evs+vidcom2", "divprune+vidcom2+fastv"])
def test_frames_that_are_no_longer_whole_are_refused(spec: str) -> None:
    with pytest.raises(RequestError, match="chooses from whole frames of videos; write it before"):
        parse(spec)
    parse("evs+random+fastv")
