"""Frames of videos in pairs: grids and samples as transformers' processors have them, whatever the shape."""

from __future__ import annotations

import ast
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.video_files import RATE, write_video
from vtx.runtime.bundle.spec.manifest import LayoutSpec
from vtx.runtime.errors import BundleError, ImageError
from vtx.runtime.strict import json_value
from vtx.runtime.vision.frame_sampling import SampledFrames
from vtx.runtime.vision.layouts import read_frames, spec_of
from vtx.runtime.vision.layouts.pairs import Pairs
from vtx.runtime.vision.video import Video, load_frames

QWEN2 = Pairs(14, 2, 128 * 784, 768 * 784, 64, 2.0, 4)
QWEN25 = Pairs(14, 2, 4 * 784, 12 * 784, 64, 2.0, 4, ticks=2.0)
QWEN3 = Pairs(16, 2, 4096, 25_165_824, 64, 2.0, 4, of_clip=True, times=True)
SMALL3 = Pairs(16, 2, 128 * 1024, 768 * 1024, 64, 2.0, 4, of_clip=True, times=True)


@cache
def smart_resize(model: str) -> Callable[..., tuple[int, int]]:
    """Transformers' rule for the size of frames; its module needs torchvision."""
    (folder,) = find_spec(f"transformers.models.{model}").submodule_search_locations  # type: ignore[union-attr]
    file = Path(folder, f"video_processing_{model}.py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "smart_resize"]
    functions: dict[str, Any] = {"math": math}
    exec(compile(ast.Module(found, []), file.name, "exec"), functions)
    resize: Callable[..., tuple[int, int]] = functions["smart_resize"]
    return resize


def clip_of(frames: int, rate: float = 24.0, count: int | None = None) -> SampledFrames:
    return QWEN3.sampled(SampledFrames((), count or frames, rate), frames)


@pytest.mark.parametrize("layout", [QWEN2, QWEN25, QWEN3, SMALL3], ids=["qwen2", "small", "qwen3", "default"])
def test_grids_are_those_of_transformers(layout: Pairs) -> None:
    rng = random.Random(0)
    model = "qwen3_vl" if layout.of_clip else "qwen2_vl"
    limits = {"factor": layout.unit, "min_pixels": layout.min_pixels, "max_pixels": layout.max_pixels}
    for _ in range(400):
        frames, high = rng.randint(2, 64), rng.choice((1, rng.randint(1, 60), rng.randint(30, 2200)))
        wide = max(1, min(4000, int(high * 16 ** rng.uniform(-1, 1))))
        given = {"num_frames": frames, **limits} if layout.of_clip else limits
        rows, columns = smart_resize(model)(height=high, width=wide, **given)
        form = layout.prompt_image(clip_of(frames), wide, high)
        assert sum(form.spans) == -(-frames // 2) * rows * columns // layout.unit**2
        assert len(form.spans) == (-(-frames // 2) if layout.times else 1)


def test_a_cap_is_a_share_of_the_tokens_of_all_frames() -> None:
    """`cap_pixels_per_frame`, as its sentence says: at least 1.05 times the smallest frame."""
    for frames in (4, 16, 64):
        of_clip = max(min(768 * 1024, 25_165_824 // frames), int(4096 * 1.05)) * frames
        rows, columns = smart_resize("qwen3_vl")(frames, 1080, 1920, factor=32, min_pixels=4096, max_pixels=of_clip)
        form = replace(QWEN3, capped=768).prompt_image(clip_of(frames), 1920, 1080)
        assert form.tokens == frames // 2 * rows * columns // 1024
        own = max(min(768 * 784, int(10_000 * 784 * 0.9) * 2 // frames), int(128 * 784 * 1.05))
        rows, columns = smart_resize("qwen2_vl")(1080, 1920, factor=28, min_pixels=128 * 784, max_pixels=own)
        form = replace(QWEN2, capped=10_000).prompt_image(clip_of(frames), 1920, 1080)
        assert form.tokens == frames // 2 * rows * columns // 784


def test_max_pixels_bounds_each_frame() -> None:
    for layout in (QWEN2, QWEN3):
        for limit in (1, 4, 50):
            form = layout.within(limit * layout.unit**2).prompt_image(clip_of(8), 1920, 1080)
            assert 0 < form.tokens <= 4 * limit
    wider = QWEN2.within(10**9).prompt_image(clip_of(8), 1920, 1080)
    assert wider.tokens == QWEN2.prompt_image(clip_of(8), 1920, 1080).tokens


def test_places_in_time_are_whole_numbers_rounded_down() -> None:
    # 2 of 3 frames a second: a pair every 2/3 s, at 2 places a second
    form = QWEN25.prompt_image(clip_of(10, 30.0, 100), 28, 28)
    assert form.span == 1 + int(4 * 2 * 2 / 3)


@pytest.mark.parametrize("layout", [QWEN2, QWEN25, QWEN3, SMALL3])
def test_a_declared_layout_is_read_again(layout: Pairs) -> None:
    spec = spec_of(layout)
    assert spec.name == "pairs"
    assert read_frames(spec) == layout
    assert layout.prompt_image(clip_of(layout.frames), 1920, 1080).tokens <= spec.max_tokens


@pytest.mark.parametrize(
    "wrong",
    [
        {"frames": 65}, {"frames": 0}, {"fewest": 65}, {"a_second": 0}, {"max_pixels": 900}, {"min_pixels": 0},
        {"ticks": 2.0}, {"max_pixels": 1 << 40}, {"frame_pixels": 10}, {"patch": 0},
    ],
    ids=str,
)  # fmt: skip
def test_a_layout_with_wrong_numbers_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BundleError, match=r"layout 'pairs' has"):
        read_frames(LayoutSpec("pairs", 10, {**json_value(QWEN3), **wrong}))


def test_frames_that_would_be_too_large_are_refused() -> None:
    huge = Pairs(16, 2, 30 << 20, 1 << 30, 64, 2.0, 1, of_clip=True, times=True)
    with pytest.raises(ImageError, match="the limit is 33,554,432 pixels; use more frames, or max_pixels"):
        huge.prompt_image(clip_of(2), 60_000, 4_000)


def test_a_file_is_sampled_by_its_rate_and_its_times_are_told(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="needs vtx-edge[video]")
    path, seen = write_video(tmp_path / "clip.mp4", frames=3 * RATE), list[SampledFrames]()
    for most, rate, wanted in ((64, 2.0, 6), (64, 1.0, 4), (5, 9.0, 5)):
        sampling = replace(QWEN3, frames=most, a_second=rate).sampling
        levels = load_frames(Video(path), sampling, lambda frame: float(np.asarray(frame).mean()), begun=seen.append)
        clip = seen[-1]
        assert (len(levels), len(clip.numbers), clip.count) == (wanted, wanted, 3 * RATE)
        assert clip.rate == pytest.approx(RATE)
        assert clip.numbers == tuple(np.linspace(0, 3 * RATE - 1, wanted).round().astype(int).tolist())
        assert levels == sorted(levels)
