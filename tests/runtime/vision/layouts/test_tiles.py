"""InternVL's tiles: pixels and counts as transformers' processor has them, whatever the picture's shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny import Tiny, make, random_image
from vtx.exporter.checkpoint.families.internvl.internvl import FAMILY as INTERNVL
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.exporter.checkpoint.processor import image_settings, read_image_processor
from vtx.exporter.checkpoint.settings import read_settings
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.errors import BundleError, CheckpointError, RequestError, UnsupportedModelError
from vtx.runtime.vision.layout import limited_layout
from vtx.runtime.vision.layouts.tiles import Tiles

TINY = Tiny(family="internvl", vision="internvl", text="qwen2", tokenizer="bytes", names="saved", feature_layer=-1)
PUBLISHED = Tiles(tile=448, tokens=256, fewest=1, most=12)
SHAPES = [
    (80, 60), (60, 80), (56, 56), (40, 40), (17, 19), (300, 30), (30, 300), (9, 200), (113, 57), (131, 257), (256, 255),
    (500, 1),
]  # fmt: skip


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tiles, ImageSettings, Any]:
    """The layout and the settings that vtx reads of a checkpoint, and transformers' processor of it."""
    from transformers import GotOcr2ImageProcessorPil

    folder = make(tmp_path_factory.mktemp("internvl"), TINY)
    layout = adjusted(folder).layout
    assert isinstance(layout, Tiles)
    processor = GotOcr2ImageProcessorPil.from_pretrained(folder, local_files_only=True)
    return layout, image_settings(read_image_processor(folder), INTERNVL.processors), processor


def adjusted(folder: Path, **changes: Any) -> Any:
    assert INTERNVL.adjust is not None
    return INTERNVL.adjust(
        read_config(read_settings(folder, "config.json")), {**read_image_processor(folder), **changes}
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_pixels_and_counts_equal_transformers(theirs: tuple[Tiles, ImageSettings, Any], shape: tuple[int, int]) -> None:
    layout, settings, processor = theirs
    image = random_image(3, shape)
    found = processor(images=image, crop_to_patches=True, return_tensors="np")
    np.testing.assert_array_equal(layout.views(image, settings), found["pixel_values"])
    width, height = shape
    patches = processor.get_number_of_image_patches(height, width, {"crop_to_patches": True})
    assert layout.count(width, height) == layout.tokens * patches == layout.tokens * len(found["pixel_values"])


def test_the_published_counts() -> None:
    counts = {PUBLISHED.count(width, height) for width in range(20, 4000, 97) for height in range(20, 4000, 89)}
    assert (min(counts), max(counts), PUBLISHED.max_tokens, PUBLISHED.max_views) == (256, 3328, 3328, 13)
    assert PUBLISHED.limited(13) == PUBLISHED
    assert PUBLISHED.limited(5).max_views == 5
    assert PUBLISHED.limited(2).max_views == PUBLISHED.limited(1).max_views == 1
    with pytest.raises(RequestError, match="at least 1"):
        limited_layout(PUBLISHED, 0, None)


@pytest.mark.parametrize("values", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 2, 1), (1, 1, 1, 65)])
def test_tiles_that_are_none_are_refused(values: tuple[int, int, int, int]) -> None:
    with pytest.raises(BundleError, match="layout 'tiles'"):
        Tiles(*values)


@pytest.mark.sampled
@pytest.mark.parametrize("value", ["6", 0, 65, True, None])
def test_a_number_of_tiles_that_is_none_is_refused(tmp_path: Path, value: Any) -> None:
    folder = make(tmp_path / "checkpoint", TINY)
    with pytest.raises(CheckpointError, match="max_patches"):
        adjusted(folder, max_patches=value)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ((), "downsample_ratio", 0.25),
        ((), "vision_feature_select_strategy", "full"),
        (("vision_config",), "use_qk_norm", True),
        (("vision_config",), "norm_type", "rms_norm"),
        (("vision_config",), "use_mean_pooling", False),
        (("vision_config",), "image_size", [56, 28]),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path: Path, part: tuple[str, ...], name: str, value: Any) -> None:
    config = dict(read_settings(make(tmp_path / "checkpoint", TINY), "config.json"))
    target = config
    for key in part:
        target = target[key]
    target[name] = value
    with pytest.raises(UnsupportedModelError, match=name):
        read_config(config)
