"""LLaVA-NeXT's tiles: pixels and token counts as transformers' processor has them, whatever the picture's shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny import Tiny, make, random_image
from tests.support.towers import tower_spec
from vtx.exporter.checkpoint.families.llava_onevision import FAMILY as LLAVA_ONEVISION
from vtx.exporter.checkpoint.families.registry import find_family, read_config
from vtx.exporter.checkpoint.processor import image_settings, read_image_processor
from vtx.exporter.checkpoint.settings import read_settings
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.vision.layout import Layout, limited_layout
from vtx.runtime.vision.layouts import read_layout, spec_of
from vtx.runtime.vision.layouts.anyres import Anyres
from vtx.runtime.vision.layouts.marked import MarkedTiles
from vtx.runtime.vision.layouts.single import Single
from vtx.runtime.vision.layouts.tiles import Tiles
from vtx.runtime.vision.tokens import ImageTokens

POINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))  # in the order of the published files
HF = Anyres(336, 24, tuple((width, height) for height, width in POINTS), rounded=True)  # which reads (height, width)
ORIGINAL = Anyres(336, 24, POINTS, rounded=False)
# Pictures whose tokens are known: width, height, in transformers' layout, in the original one.
KNOWN = [
    (336, 336, 1176, 1176), (350, 350, 2928, 2928), (672, 672, 2928, 2928), (640, 480, 2340, 2340),
    (480, 640, 2352, 2352), (1000, 100, 1160, 1160), (100, 1000, 1224, 1224), (33, 777, 936, 936),
    (1023, 341, 2328, 2328), (901, 675, 2340, 2340), (500, 300, 1560, 1560), (240, 560, 1584, 1584),
    (90, 70, 1320, 1026), (17, 19, 1128, 1226), (220, 1056, 1800, 1656), (352, 748, 1876, 1826), (861, 328, 2136, 2088),
]  # fmt: skip
SHAPES = [
    (80, 60), (60, 80), (56, 56), (40, 40), (17, 19), (300, 30), (30, 300), (9, 200), (113, 57), (131, 257), (256, 255),
    (500, 1),
]  # fmt: skip


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint, and transformers' processor of it."""
    from transformers import AutoProcessor

    folder = make(tmp_path_factory.mktemp("next"), Tiny(family="llava_next"))
    return folder, AutoProcessor.from_pretrained(folder, backend="pil", local_files_only=True)


@pytest.mark.parametrize(("width", "height", "hf", "original"), KNOWN)
def test_counts_are_those_of_the_published_code(width: int, height: int, hf: int, original: int) -> None:
    assert (HF.count(width, height), ORIGINAL.count(width, height)) == (hf, original)
    assert HF.max_tokens == ORIGINAL.max_tokens == 2928
    assert HF.max_views == 5


@pytest.mark.parametrize("shape", SHAPES)
def test_pixels_and_counts_equal_transformers(theirs: tuple[Path, Any], shape: tuple[int, int]) -> None:
    folder, processor = theirs
    config = read_settings(folder, "config.json")
    settings = image_settings(read_image_processor(folder), find_family(config).processors)
    layout, image = read_config(config).layout, random_image(3, shape)
    found = processor(images=image, text="<image>", return_tensors="pt")
    views = layout.views(image, settings)
    np.testing.assert_array_equal(views, found["pixel_values"][0].numpy())
    assert layout.count(*shape) == int((found["input_ids"] == processor.image_token_id).sum())


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_stand_where_transformers_puts_them(theirs: tuple[Path, Any], shape: tuple[int, int]) -> None:
    from transformers import AutoConfig, LlavaNextModel

    folder, _ = theirs
    config = read_settings(folder, "config.json")
    layout = read_config(config).layout
    with torch.device("meta"):
        model = LlavaNextModel(AutoConfig.from_pretrained(folder))
    image = random_image(0, shape)
    count = 1 + len(
        layout.views(image, image_settings(read_image_processor(folder), find_family(config).processors))[1:]
    )
    rows = torch.arange(float(16 * count)).view(count, 16, 1)
    wanted, _ = model.pack_image_features([rows], torch.tensor([shape[::-1]]), "default", torch.tensor([-1.0]))
    views = [ImageTokens.one_per_patch(view.numpy()) for view in rows]
    found = layout.arrange(views, *shape, np.array([[-1.0]], np.float32))
    np.testing.assert_array_equal(found.hidden, wanted[0].numpy())
    assert len(found) == layout.count(*shape)
    places = np.where(found.hidden[:, 0] < 0, -2, found.hidden[:, 0])
    np.testing.assert_array_equal(found.patches.indices, places)
    assert found.patches.views is not None
    np.testing.assert_array_equal(found.patches.views, np.where(places < 0, -1, places // 16))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_released_layout_is_that_of_cdpruners_code(theirs: tuple[Path, Any], shape: tuple[int, int]) -> None:
    """Always two tiles by two, padded; the base first, then the grid in raster order: every token and no newline."""
    folder, processor = theirs
    config, image = read_settings(folder, "config.json"), random_image(3, shape)
    settings, own = (
        image_settings(read_image_processor(folder), find_family(config).processors),
        read_config(config).layout,
    )
    assert isinstance(own, Anyres)
    layout, side = own.released(), 2 * own.tile
    pixels = processor.image_processor(image, image_grid_pinpoints=[[side, side]], return_tensors="pt")["pixel_values"]
    np.testing.assert_array_equal(layout.views(image, settings), pixels[0].numpy())
    numbers = torch.arange(80.0).view(5, 16)
    views = [ImageTokens.one_per_patch(view[:, None].numpy()) for view in numbers]
    grid = numbers[1:].view(2, 2, 4, 4).permute(0, 2, 1, 3).flatten()
    found = layout.arrange(views, *shape, np.array([[-1.0]], np.float32))
    np.testing.assert_array_equal(found.hidden[:, 0], torch.cat([numbers[0], grid]).numpy())
    assert len(found) == layout.count(*shape) == 80
    assert np.bincount(found.patches.views if found.patches.views is not None else []).tolist() == [16] * 5
    with pytest.raises(RequestError, match="fit 'released' takes 5 tiles and an image has at most 1 here"):
        own.limited(1).released()


ONEVISION = Tiny(
    family="llava_onevision", vision="siglip", text="qwen2", tokenizer="bytes", feature_layer=-1, select="full",
    vision_head=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def onevision(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Anyres, Any]:
    """A checkpoint, its layout, and transformers' processor of its images."""
    from transformers import LlavaOnevisionImageProcessorPil

    folder = make(tmp_path_factory.mktemp("onevision"), ONEVISION)
    layout = read_config(read_settings(folder, "config.json")).layout
    assert isinstance(layout, Anyres)
    return folder, layout, LlavaOnevisionImageProcessorPil.from_pretrained(folder, local_files_only=True)


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES)
def test_onevisions_pixels_and_tokens_equal_transformers(
    onevision: tuple[Path, Anyres, Any], shape: tuple[int, int]
) -> None:
    from transformers import AutoConfig, LlavaOnevisionModel

    folder, layout, processor = onevision
    image, settings = random_image(3, shape), image_settings(read_image_processor(folder), LLAVA_ONEVISION.processors)
    views = layout.views(image, settings)
    np.testing.assert_array_equal(views, processor(images=image, return_tensors="np")["pixel_values"][0])
    several = processor(images=[[image, image]], return_tensors="np")["pixel_values"]
    np.testing.assert_array_equal(layout.for_images(2).views(image, settings), several[0])
    with torch.device("meta"):
        model = LlavaOnevisionModel(AutoConfig.from_pretrained(folder))
    rows = torch.arange(float(16 * len(views))).view(len(views), 16, 1) ** 2
    wanted, _ = model.pack_image_features([rows], torch.tensor([shape[::-1]]), torch.tensor([-1.0]), "anyres_max_1")
    views = [ImageTokens.one_per_patch(view.numpy()) for view in rows]
    found = layout.arrange(views, *shape, np.array([[-1.0]], np.float32))
    np.testing.assert_allclose(found.hidden, wanted[0].numpy(), rtol=1e-5)
    assert len(found) == layout.count(*shape) <= layout.max_tokens
    assert layout.for_images(2).count(*shape) == 17


@pytest.mark.parametrize("rescale", [1 / 255, 1 / 127.5, 0.002, 1.0])
@pytest.mark.parametrize("mean", [(0.5, 0.5, 0.5), (0.9, 0.2, 1.0), (0.0, 0.0, 0.0)], ids=str)
def test_onevisions_bars_among_several_images_equal_transformers(
    onevision: tuple[Path, Anyres, Any], rescale: float, mean: tuple[float, ...]
) -> None:
    folder, layout, processor = onevision
    changed = {"rescale_factor": rescale, "image_mean": list(mean), "image_std": [0.5, 0.25, 1.5]}
    settings = image_settings(read_settings(folder, "preprocessor_config.json") | changed, LLAVA_ONEVISION.processors)
    theirs = type(processor)(**{**processor.to_dict(), **changed})
    images = [random_image(3, (80, 60)), random_image(4, (40, 90)), random_image(5, (56, 56))]
    wanted = theirs(images=[images], return_tensors="np")["pixel_values"]
    for image, view in zip(images, wanted, strict=True):
        np.testing.assert_array_equal(layout.for_images(3).views(image, settings), view)


@pytest.mark.parametrize(
    "changed",
    [{"image_mean": [123.0, 117.0, 104.0], "rescale_factor": 1.0}, {"do_normalize": False}, {"image_mean": -0.5}],
    ids=["beyond a byte", "unknown", "below 0"],
)
def test_bars_without_a_colour_are_refused_and_square_images_have_none(
    onevision: tuple[Path, Anyres, Any], changed: dict[str, Any]
) -> None:
    folder, layout, _ = onevision
    settings = image_settings(read_settings(folder, "preprocessor_config.json") | changed, LLAVA_ONEVISION.processors)
    with pytest.raises(RequestError, match="bars of the image processor's mean colour"):
        layout.for_images(2).views(random_image(3, (80, 60)), settings)
    assert len(layout.for_images(2).views(random_image(3, (80, 80)), settings)) == 1
    assert len(layout.views(random_image(3, (80, 60)), settings)) > 1


def test_onevisions_published_counts() -> None:
    points = tuple((384 * a, 384 * b) for b in range(1, 7) for a in range(1, 7))
    layout = Anyres(384, 27, points, rounded=True, shrink=9)
    assert layout.count(384, 384) == 729 + 27 * 28
    assert layout.count(2304, 2304) == 729 + 81 * 82
    counts = [layout.count(width, height) for width in range(30, 3000, 61) for height in range(30, 3000, 67)]
    assert 8000 < max(counts) <= layout.max_tokens == 8829


def test_fewer_tiles_leave_the_smaller_resolutions() -> None:
    assert HF.limited(5) == HF
    assert HF.limited(4).resolutions == ((672, 336), (336, 672), (336, 1008), (1008, 336))
    assert HF.limited(3).resolutions == ((672, 336), (336, 672))
    alone = HF.limited(1)
    assert (alone.resolutions, alone.count(640, 480), alone.max_views) == ((), 577, 1)
    with pytest.raises(RequestError, match="at least 1"):
        limited_layout(HF, 0, None)


@pytest.mark.parametrize("resolution", [(335, 336), (336, 0), (336 * 65, 336), (-336, -336)])
def test_resolutions_that_are_no_tiles_are_refused(resolution: tuple[int, int]) -> None:
    with pytest.raises(BundleError, match="multiple of the tile"):
        Anyres(336, 24, (resolution,), rounded=True)


def test_a_tower_of_other_tiles_is_refused() -> None:
    tower = tower_spec(336, 14, 577)
    with pytest.raises(BundleError, match="336 pixels and 576 tokens, the tower takes 336 pixels and gives 577"):
        HF.check(tower)


@pytest.mark.parametrize(
    ("layout", "tower"),
    [
        (Single(576), (336, 14, 576)),
        (HF, (336, 14, 576)),
        (Tiles(448, 256, 1, 12), (448, 14, 256, 2)),
        (MarkedTiles(512, 64, 4, 17), (512, 16, 64, 4)),
    ],
    ids=["single", "anyres", "tiles", "marked"],
)
def test_a_declared_layout_is_read_as_strictly_as_the_manifest(layout: Layout, tower: tuple[int, ...]) -> None:
    seen_by = tower_spec(*tower)
    spec = spec_of(layout)
    assert read_layout(spec, seen_by) == layout
    for name, value in spec.parameters.items():
        for wrong in (None, "1", 1.5, {}, [1], 1 if isinstance(value, bool) else True):
            with pytest.raises(BundleError):
                read_layout(replace(spec, parameters={**spec.parameters, name: wrong}), seen_by)
        with pytest.raises(BundleError):
            read_layout(replace(spec, parameters={k: v for k, v in spec.parameters.items() if k != name}), seen_by)
    with pytest.raises(BundleError, match="unknown to this vtx"):
        read_layout(replace(spec, name="spiral"), seen_by)
