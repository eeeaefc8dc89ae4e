"""SmolVLM's tiles: pixels, counts and text as transformers' processors have them, whatever the picture's shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny import Tiny, make, random_image
from vtx.exporter.checkpoint.families.registry import find_family, read_config
from vtx.exporter.checkpoint.processor import image_settings, read_image_processor
from vtx.exporter.checkpoint.settings import read_settings
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.errors import BundleError, RequestError, UnsupportedModelError
from vtx.runtime.vision.layout import limited_layout
from vtx.runtime.vision.layouts.marked import MarkedTiles

FAMILIES = ("smolvlm", "idefics3")
PUBLISHED = MarkedTiles(tile=512, tokens=64, side=4, most=17)
SHAPES = [
    (80, 60), (60, 80), (56, 56), (112, 112), (17, 19), (300, 30), (30, 300), (9, 200), (113, 57), (131, 257),
    (256, 255), (500, 1),
]  # fmt: skip


def tiny(family: Any) -> Tiny:
    return Tiny(family=family, vision="siglip", tokenizer="bytes")


def adjusted(folder: Path, **changes: Any) -> Any:
    config = read_settings(folder, "config.json")
    adjust = find_family(config).adjust
    assert adjust is not None
    return adjust(read_config(config), {**read_image_processor(folder), **changes})


@pytest.fixture(scope="module", params=FAMILIES)
def theirs(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[MarkedTiles, ImageSettings, Any]:
    """The layout and the settings that vtx reads of a checkpoint, and transformers' processor of it."""
    import transformers

    folder = make(tmp_path_factory.mktemp(request.param), tiny(request.param))
    name = {"smolvlm": "SmolVLMImageProcessorPil", "idefics3": "Idefics3ImageProcessorPil"}[request.param]
    processor = getattr(transformers, name).from_pretrained(folder, local_files_only=True)
    settings = image_settings(
        read_image_processor(folder), find_family(read_settings(folder, "config.json")).processors
    )
    return adjusted(folder).layout, settings, processor


@pytest.mark.parametrize("shape", SHAPES)
def test_pixels_counts_and_text_equal_transformers(
    theirs: tuple[MarkedTiles, ImageSettings, Any], shape: tuple[int, int]
) -> None:
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    layout, settings, processor = theirs
    image = random_image(3, shape)
    for side, chosen in ((layout.side, layout), (1, layout.limited(1))):
        size = {"longest_edge": side * layout.tile}
        found = processor(images=image, size=size, return_row_col_info=True, return_tensors="np")
        np.testing.assert_array_equal(chosen.views(image, settings), found["pixel_values"][0])
        assert chosen.count(*shape) == layout.tokens * len(found["pixel_values"][0])
        names = {"fake_token_around_image": "<fake_token_around_image>", "global_image_token": "<global-img>"}
        text = get_image_prompt_string(found["rows"][0][0], found["cols"][0][0], 1, image_token="<image>", **names)
        assert chosen.prompt_image(*shape).text("<image>") == text


def test_text_stands_among_the_tokens() -> None:
    wide, small = PUBLISHED.prompt_image(2048, 700), PUBLISHED.limited(1).prompt_image(2048, 700)
    assert wide.spans == (64,) * 9
    assert wide.text("*").split("<fake_token_around_image>") == [
        "", "<row_1_col_1>*", "<row_1_col_2>*", "<row_1_col_3>*", "<row_1_col_4>*\n",
        "<row_2_col_1>*", "<row_2_col_2>*", "<row_2_col_3>*", "<row_2_col_4>*\n\n", "<global-img>*", "",
    ]  # fmt: skip
    assert small.text("*") == "<fake_token_around_image><global-img>*<fake_token_around_image>"


@pytest.mark.slow
def test_the_published_counts() -> None:
    sizes = [(width, height) for width in range(20, 4000, 97) for height in range(20, 4000, 89)]
    counts = {PUBLISHED.count(*size) for size in sizes}
    assert (min(counts), max(counts), PUBLISHED.max_tokens, PUBLISHED.max_views) == (5 * 64, 1088, 1088, 17)
    for most in range(1, 18):
        fewer = PUBLISHED.limited(most)
        assert max(fewer.count(*size) for size in sizes) <= fewer.max_tokens <= 64 * most
    with pytest.raises(RequestError, match="at least 1"):
        limited_layout(PUBLISHED, 0, None)


@pytest.mark.parametrize("values", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 9, 1), (1, 1, 2, 0)])
def test_tiles_that_are_none_are_refused(values: tuple[int, int, int, int]) -> None:
    with pytest.raises(BundleError, match="layout 'marked'"):
        MarkedTiles(*values)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("size", {"longest_edge": 57}),
        ("size", {"longest_edge": 56 * 9}),
        ("size", {"height": 56, "width": 56}),
        ("do_image_splitting", False),
        ("do_resize", False),
    ],
)
def test_what_the_processor_does_otherwise_is_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    folder = make(tmp_path / "checkpoint", tiny("smolvlm"))
    with pytest.raises(UnsupportedModelError, match=f"the image processor's {name}"):
        adjusted(folder, **{name: value})


def test_a_grid_whose_positions_transformers_rounds_is_refused(tmp_path: Path) -> None:
    config = dict(read_settings(make(tmp_path / "checkpoint", tiny("smolvlm")), "config.json"))
    with pytest.raises(UnsupportedModelError, match="25 x 25 patches is not supported"):
        read_config({**config, "scale_factor": 5, "vision_config": {**config["vision_config"], "image_size": 25 * 14}})
