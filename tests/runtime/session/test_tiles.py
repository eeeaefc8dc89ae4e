"""Images in tiles and at native resolution: what of them fits, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.bundles import ORT, export
from tests.support.exported import Models
from tests.support.families.llava_next import LLAVA_NEXT
from tests.support.families.llava_onevision import ONEVISION, onevision_of_another_scale
from tests.support.families.qwen import QWEN2
from tests.support.families.smolvlm import SMOLVLM
from tests.support.fixtures import Checkpoints
from tests.support.parity import (
    assert_answers_as_reference,
)
from tests.support.reference import Reference
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.options import Options
from vtx.runtime.errors import ContextError, DeviceError, RequestError

pytestmark = pytest.mark.dialects("ort", "trt")
WIDE, HIGH = (150, 60), (40, 90)
QUESTION = "What is the colour of the square in the picture?"


def test_several_images_of_onevision_answer_as_transformers_at_another_scale_of_pixel_values(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = onevision_of_another_scale(tiny_checkpoint(ONEVISION), tmp_path / "checkpoint")
    folder = export(checkpoint, tmp_path / "bundle", (3, 5), dialects=ORT).folder
    images = [random_image(0, WIDE), random_image(1, HIGH)]
    with load(folder, device="cpu", threads=1) as model:
        assert_answers_as_reference(model, Reference(checkpoint), prompt_messages(QUESTION, 2), images)


@pytest.mark.parametrize("spec", ["cdpruner", "dart:k=0", "divprune", "random"])
def test_what_leaves_out_tokens_before_the_decoder_is_refused_where_text_stands_among_them(
    models: Models, spec: str
) -> None:
    with pytest.raises(RequestError, match="this model has text between its tiles"):
        models(SMOLVLM, (3, 5)).loaded.policy(None, reduce=spec)


@pytest.mark.parametrize(
    ("tiny", "size", "context", "message", "limits", "tokens"),
    [
        (SMOLVLM, (112, 112), 90, "40 of them for images, and 89 fit .* --max-tiles 4 .*fits", {"max_tiles": 4}, 4),
        (
            LLAVA_NEXT, (112, 112), 120, "176 of them for images, and 119 fit .* --max-tiles 4 .*fits",
            {"max_tiles": 4}, 16 + 4 * 5,
        ),
        (
            QWEN2, (160, 150), 80, "60 of them for images, and 79 fit .* --max-pixels 22736 .*fits",
            {"max_pixels": 22736}, 5 * 5,
        ),
    ],
    ids=["smolvlm", "llava_next", "qwen2_vl"],
)  # fmt: skip
def test_a_prompt_that_does_not_fit_says_which_number_of_tiles_or_pixels_would(
    tiny_checkpoint: Checkpoints, tmp_path: Path, tiny: Tiny, size: tuple[int, int], context: int, message: str,
    limits: dict[str, int], tokens: int,
) -> None:  # fmt: skip
    folder = export(tiny_checkpoint(tiny), tmp_path / "bundle", (), max_context=context, dialects=ORT).folder
    images, refused = [random_image(0, size)] * 2, pytest.raises(ContextError, match=message)
    with load(folder, device="cpu", threads=1) as model, model.open(images) as conversation, refused:
        conversation.ask("red?")
    with load(folder, device="cpu", threads=1, **limits) as model, model.open(images) as conversation:  # type: ignore[arg-type]
        assert conversation.ask("red?", None, Options(2)).stats.vision_tokens == 2 * tokens


@pytest.mark.parametrize("option", [{"max_tiles": 2}, {"fit": "pad"}, {"max_pixels": 700}], ids=str)
def test_limits_of_other_families_are_refused_at_native_resolution(models: Models, option: dict[str, Any]) -> None:
    wanted = r"at native resolution|in one piece; use max_pixels|one token takes 28 x 28"
    with pytest.raises(RequestError, match=wanted):
        load(models(QWEN2, (3, 5)).bundle.folder, device="cpu", **option)


def test_tiles_are_refused_where_images_have_none(models: Models) -> None:
    with pytest.raises(RequestError, match="sees each image in one piece"):
        load(models(Tiny(), (3, 5)).bundle.folder, device="cpu", max_tiles=2)


def test_a_fit_is_refused_where_images_come_in_tiles(models: Models) -> None:
    with pytest.raises(RequestError, match="in tiles"):
        models(LLAVA_NEXT, (3, 5)).open(random_image(0), fit="pad")


def test_images_of_equal_bytes_and_other_shapes_are_not_taken_for_each_other(models: Models) -> None:
    model = models(QWEN2, (3, 5))
    grey = random_image(0, (56, 56)).convert("L").point(lambda _: 9)
    wide, high = (model.loaded.images.prepare(grey.resize(size)) for size in ((112, 56), (56, 112)))
    assert wide.views.tobytes() == high.views.tobytes()
    assert wide.key != high.key


def test_tensorrt_asks_for_engines(models: Models) -> None:
    with pytest.raises(DeviceError, match="holds no engines; build them with: vtx-build"):
        load(models(QWEN2, (3, 5)).bundle.folder, device="tensorrt")
