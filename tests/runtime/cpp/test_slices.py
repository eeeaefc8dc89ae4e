"""MiniCPM-V 4.6 in libvtx: slices, their text and numbers, limits and refusals as in Python; answers: test_states."""

from __future__ import annotations

import ctypes as c
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bundles import ORT, export
from tests.support.cabi import Frames, Loaded, options_of
from tests.support.cpp import assert_prepared_equal, needs_abi, needs_cpp, run, write_pictures
from tests.support.exported import Models
from tests.support.families.minicpm import MINICPM
from tests.support.fixtures import Checkpoints
from tests.support.old_pillow import needs_pillow_13
from tests.support.tiny import edited, random_image
from vtx.runtime.api.load import load
from vtx.runtime.errors import ContextError, ImageError, RequestError

pytestmark = needs_cpp

FINE = replace(MINICPM, downsample="4x", numbered=False)
SIZES = ((150, 61), (70, 190), (40, 40), (1, 1), (65, 64), (960, 60), (60, 960), (1, 200), (3000, 15), (300, 300))
QUESTIONS = ("red?", "What is <slice> <image_id>7</image_id> really?", "red?")


@pytest.mark.slow
@needs_pillow_13
def test_published_sizes_have_the_pixels_and_tokens_that_python_gives_them(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Nine slices of 448 x 448 in patches of 14."""
    changes = {"scale_resolution": 448, "max_slice_nums": 9}
    checkpoint = tiny_checkpoint(replace(MINICPM, patch=14, image=84, context=2048))
    large = edited(checkpoint, tmp_path / "large", "preprocessor_config.json", changes)
    folder = export(large, tmp_path / "bundle", (3,), dialects=ORT).folder
    sizes = [(1400, 1400)]
    sizes += [(640, 480), (448, 448), (449, 448), (1920, 1080), (3000, 15), (15, 3000), (3, 3), (1, 199)]
    rng = np.random.default_rng(9)
    sizes += [(int(width), int(width * 2 ** rng.uniform(-3, 2)) or 1) for width in rng.integers(1, 1000, 8)]
    with load(folder, device="cpu", threads=1) as model:
        assert max(model.loaded.images.layout.passes(*size) for size in sizes) == 1 + 9
        assert_prepared_equal(model, write_pictures(tmp_path, sizes))


@needs_abi
@needs_pillow_13
@pytest.mark.parametrize("numbered", [True, False])
def test_eleven_images_have_their_numbers_in_a_prompt_of_text_and_of_ids(models: Models, numbered: bool) -> None:
    model = models(MINICPM if numbered else FINE, (3, 5))
    sizes = [(20, 20), (70, 60), *[(20, 20)] * 9]
    images = [random_image(number, size) for number, size in enumerate(sizes)]
    with model.open(images) as conversation:
        want = conversation.ask("red?", 5, max_new_tokens=6)
        plain = model.loaded.text.prompt(conversation.opening("red?"), 1).tolist()
    options: dict[str, Any] = {"k": b"5", "max_new_tokens": 6}
    with (
        closing(Loaded(model.bundle.folder, "cpu")) as loaded,
        closing(Frames(loaded, [np.asarray(image) for image in images])) as frames,
    ):
        answer, asked = c.c_void_p(), options_of(loaded.library, **options)
        ids = (c.c_int64 * len(plain))(*plain)
        loaded.check(loaded.library.vtx_ask_ids(frames.handle, ids, len(ids), c.byref(asked), c.byref(answer)))
        found = [json.loads(loaded.library.vtx_answer_json(answer)), frames.ask("red?", **options)]
        loaded.library.vtx_answer_free(answer)
    for one in found:
        assert (one["token_ids"], one["prompt_tokens"]) == (list(want.token_ids), want.stats.prompt_tokens)
    assert found[1]["reused_tokens"] > 0, "the prompts differ"


def test_what_cannot_be_asked_is_refused_in_the_words_of_python(
    models: Models, pictures: list[Path], tmp_path: Path
) -> None:
    model = models(MINICPM, (3, 5))
    folder, [strip] = model.bundle.folder, write_pictures(tmp_path, [(201, 1)])
    with pytest.raises(ContextError) as room, model.open([pictures[9]] * 20) as conversation:
        conversation.ask("red?")
    assert "--max-tiles" in str(room.value)
    with pytest.raises(RequestError, match="drops tokens before the decoder") as entry:
        model.loaded.policy(None, reduce="divprune:keep=9")
    with pytest.raises(RequestError, match="sees large images in slices") as pixels:
        load(folder, device="cpu", max_pixels=4096)
    with pytest.raises(ImageError, match="may differ at most 200-fold") as ratio:
        model.open(strip)
    many = [word for _ in range(19) for word in ("--image", pictures[9])]
    for picture, arguments, message in (
        (pictures[9], many, str(room.value)),
        (pictures[0], ["--reduce", "divprune:keep=9"], str(entry.value)),
        (pictures[0], ["--max-pixels", "4096"], str(pixels.value)),
        (strip, [], str(ratio.value)),
        (pictures[0], ["--fit", "pad"], "fit 'pad' has no effect here: this model sees images of any shape at native"),
        (pictures[0], ["--max-tiles", "-1"], "max_tiles is -1; it must be at least 1"),
        (pictures[0], ["--video", pictures[0].parent], "videos in the layout 'sliced_frames' are not built in"),
    ):
        done = run("run", "--bundle", folder, picture, "red?", *arguments)
        assert done.returncode in (1, 2)
        assert message in done.stderr.decode(), arguments[:2]
