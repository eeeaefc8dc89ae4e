"""Images within a budget of tokens: sizes and pixels of transformers' own processor, for every budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from tests.support.near import assert_near
from tests.support.tiny import random_image
from vtx.exporter.checkpoint.families.gemma.gemma4 import PROCESSOR
from vtx.exporter.checkpoint.processor import image_settings
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.vision.layouts.budget import BUDGETS, TokenBudget

GEMMA = TokenBudget(16, 3, 280)
SIZES = ((1, 1), (16, 1), (1, 16), (640, 40), (40, 640), (640, 480), (1920, 1080), (333, 777), (2000, 30), (48, 48))


@pytest.mark.parametrize("tokens", BUDGETS)
@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_those_of_transformers(size: tuple[int, int], tokens: int) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    width, height = size
    wanted = get_aspect_ratio_preserving_size(
        height, width, patch_size=16, max_patches=9 * tokens, pooling_kernel_size=3
    )
    found = replace(GEMMA, tokens=tokens)
    assert found.count(width, height) == wanted[0] * wanted[1] // 48**2 <= tokens
    assert found.passes(width, height) == 1


@pytest.mark.parametrize("tokens", [70, 140])
@pytest.mark.parametrize("size", [(1, 1), (320, 20), (90, 130)])
def test_pixels_are_those_of_transformers(size: tuple[int, int], tokens: int) -> None:
    from transformers import Gemma4ImageProcessorPil

    image = random_image(3, size)
    given = Gemma4ImageProcessorPil(max_soft_tokens=tokens)([image], return_tensors="np")  # type: ignore[no-untyped-call]
    views = replace(GEMMA, tokens=tokens).views(image, image_settings({}, [PROCESSOR]))
    assert isinstance(views, np.ndarray)
    _, _, height, width = views.shape
    patches = views.reshape(3, height // 16, 16, width // 16, 16).transpose(1, 3, 2, 4, 0).reshape(-1, 768)
    assert_near(patches, given["pixel_values"][0][: len(patches)], 1e-6)
    assert given["num_soft_tokens_per_image"] == [len(patches) // 9]


def test_fewer_pixels_are_the_next_smaller_budget_and_never_a_larger_one() -> None:
    pixels = {280: 280 * 2304, 279 * 2304 // 2304: 279 * 2304, 140: 140 * 2304, 70: 70 * 2304}
    assert [GEMMA.within(most).tokens for most in pixels.values()] == [280, 140, 140, 70]
    assert GEMMA.within(10**9) == GEMMA
    with pytest.raises(RequestError, match="the smallest budget of this model, 70 tokens of 48 x 48, takes 161280"):
        GEMMA.within(161_279)


@pytest.mark.parametrize("tokens", [0, 71, 10_000, True])
def test_a_budget_that_the_model_was_not_trained_for_is_refused(tokens: int) -> None:
    with pytest.raises(BundleError, match="it needs one of 70, 140, 280, 560, 1120"):
        TokenBudget(16, 3, tokens)


def test_an_image_that_fits_is_not_resized() -> None:
    image = Image.new("RGB", (48 * 14, 48 * 20), (10, 20, 30))
    assert GEMMA.count(*image.size) == 280
    views = GEMMA.views(image, image_settings({}, [PROCESSOR]))
    np.testing.assert_allclose(views[0][:, 5, 5], np.array([10, 20, 30]) / 255, atol=1e-6)
