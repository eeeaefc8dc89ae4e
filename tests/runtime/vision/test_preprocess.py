"""Pictures of another shape than the model takes: cropped, padded or squashed, as asked, and not without a word."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from vtx.exporter.checkpoint.processor import image_settings
from vtx.runtime.errors import RequestError
from vtx.runtime.vision import preprocess as module
from vtx.runtime.vision.preprocess import FITS, discarded, fitted, note_discarded, preprocess, trained_fit

CLIP = CLIPImageProcessorPil(size=56, crop_size=56)
PADDED = LlavaImageProcessorPil(do_pad=True, size=56, crop_size=56)
SQUASHED = SiglipImageProcessorPil(
    size={"height": 56, "width": 56}, image_mean=CLIP.image_mean, image_std=CLIP.image_std, resample=CLIP.resample
)
BY_FIT = {"crop": CLIP, "pad": PADDED, "squash": SQUASHED}


@pytest.fixture(autouse=True)
def nothing_noted_yet() -> Iterator[None]:
    module.noted.clear()
    yield
    module.noted.set()


def picture(width: int = 90, height: int = 40) -> Image.Image:
    return Image.fromarray(np.random.default_rng(2).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("trained", FITS)
@pytest.mark.parametrize("asked", FITS)
@pytest.mark.parametrize("size", [(90, 40), (40, 90), (56, 56), (300, 299)], ids=str)
def test_each_fit_gives_the_numbers_of_the_hf_processor_that_works_so(trained, asked, size):
    settings = fitted(image_settings(BY_FIT[trained].to_dict()), asked)
    wanted = BY_FIT[asked](picture(*size), return_tensors="np", input_data_format=None)["pixel_values"][0]
    np.testing.assert_array_equal(preprocess(picture(*size), settings), wanted)
    assert trained_fit(settings) == asked


@pytest.mark.parametrize("trained", FITS)
def test_without_a_choice_the_checkpoints_own_settings_stay(trained):
    settings = image_settings(BY_FIT[trained].to_dict())
    assert trained_fit(settings) == trained
    assert fitted(settings, None) is settings
    assert fitted(settings, trained) is settings


def test_an_unknown_fit_and_padding_to_another_shape_than_a_square_are_refused():
    settings = image_settings(CLIP.to_dict())
    with pytest.raises(RequestError, match="fit is 'stretch'; it must be one of crop, pad, squash, or left out"):
        fitted(settings, "stretch")
    wide = image_settings(SiglipImageProcessorPil(size={"height": 28, "width": 42}).to_dict())
    with pytest.raises(RequestError, match="'pad' makes squares, this model takes 42x28; use crop or squash"):
        fitted(wide, "pad")
    assert fitted(wide, "crop").crop == (28, 42)


def test_what_a_crop_discards_is_measured_beside_a_picture_of_the_right_shape():
    settings = image_settings(CLIP.to_dict())
    assert discarded(100, 50, settings) == (0.5, 0.0)
    assert discarded(50, 200, settings) == (0.0, 0.75)
    assert discarded(77, 77, image_settings({"size": 256, "crop_size": 224})) == (0.0, 0.0)
    for fit in ("pad", "squash"):
        assert discarded(100, 50, fitted(settings, fit)) == (0.0, 0.0)


def test_a_crop_that_discards_much_is_noted_once(caplog):
    settings = image_settings(CLIP.to_dict())
    with caplog.at_level(logging.WARNING, "vtx"):
        for size in [(100, 97), (1920, 1080), (1080, 1920)]:
            note_discarded(*size, settings)
    (record,) = caplog.records
    message = record.getMessage()
    assert "leaves out 43% of a 1920x1080 picture, at its left and right" in message
    assert "--fit pad (fit='pad')" in message


@pytest.mark.parametrize("fit", ["pad", "squash"])
def test_nothing_is_noted_where_nothing_is_cut(fit, caplog):
    note_discarded(1920, 1080, fitted(image_settings(CLIP.to_dict()), fit))
    assert caplog.records == []
