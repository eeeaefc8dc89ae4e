"""Tiles that images have in common are encoded once, and what is made of them is what a fresh encoding gives."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.support.exported import Models
from tests.support.families.internvl import INTERNVL
from tests.support.families.llava_next import LLAVA_NEXT
from tests.support.families.llava_onevision import ONEVISION
from tests.support.families.smolvlm import SMOLVLM
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options, Settings
from vtx.runtime.scheduler.engine import AnswerRequest, Capacity, Engine
from vtx.runtime.session.encoded_images import ImageCache, nbytes
from vtx.runtime.vision.tokens import ImageTokens

TILED = {"llava_next": LLAVA_NEXT, "internvl": INTERNVL, "onevision": ONEVISION, "smolvlm": SMOLVLM}
STEPS = 6


@pytest.fixture(scope="module", params=TILED)
def model(request: pytest.FixtureRequest, models: Models) -> Model:
    return models(TILED[request.param])


def frames() -> list[Image.Image]:
    """A picture, the same with one corner changed, with another corner changed, and the first again."""
    first = np.array(random_image(3, (150, 60)))
    left, right = first.copy(), first.copy()
    left[:6, :6] ^= 128
    right[-6:, -6:] ^= 128
    return [Image.fromarray(frame) for frame in (first, left, right, first)]


def arrays(tokens: ImageTokens) -> list[NDArray[Any]]:
    patches = tokens.patches
    given = [tokens.hidden, patches.indices, patches.merged, patches.views, tokens.offsets, *patches.signals.values()]
    return [array for array in given if array is not None]


def test_only_tiles_that_changed_are_encoded_and_all_are_as_fresh_ones(model: Model) -> None:
    images = [model.loaded.images.prepare(frame) for frame in frames()]
    tiles, passes, seen = ImageCache(64 << 20), 0, set[bytes]()
    original = type(model.backend).vision

    def vision(*given: Any) -> ImageTokens:
        nonlocal passes
        passes += 1
        return original(*given)

    for image in images:
        fresh = image.encode(model.backend)
        with patch.object(type(model.backend), "vision", vision):
            reused = image.encode(model.backend, tiles=tiles)
        seen |= {view.tobytes() for view in image.views}
        assert passes == len(seen)
        for one, other in zip(arrays(fresh), arrays(reused), strict=True):
            np.testing.assert_array_equal(one, other)
    assert passes < sum(len(image.views) for image in images)


def test_a_tenant_finds_the_tiles_that_it_put_there_and_no_others(models: Models) -> None:
    model, tiles = models(LLAVA_NEXT), ImageCache(64 << 20)
    image, vision = model.loaded.images.prepare(frames()[0]), type(model.backend).vision
    for tenant in ("alice", "bob"):
        for passes in (len({view.tobytes() for view in image.views}), 0):
            with patch.object(type(model.backend), "vision", autospec=True, side_effect=vision) as run:
                image.encode(model.backend, tiles=tiles, tenant=tenant)
            assert run.call_count == passes, tenant


def test_tiles_are_kept_within_a_bound_and_not_for_images_of_one_view(models: Models) -> None:
    model = models(LLAVA_NEXT)
    images = [model.loaded.images.prepare(frame) for frame in frames()]
    size = nbytes(model.backend.vision(images[0].views[:1], {}))
    tiles = ImageCache(2 * size)
    for image in images:
        image.encode(model.backend, tiles=tiles)
        assert 0 < tiles.bytes <= 2 * size
    plain, tiles = models(Tiny(context=512), (3,)), ImageCache(64 << 20)
    plain.loaded.images.prepare(frames()[0]).encode(plain.backend, tiles=tiles)
    assert tiles.bytes == 0


def test_answers_about_frames_with_common_tiles_are_those_of_fresh_questions(model: Model) -> None:
    settings = Settings(None, Options(STEPS, ignore_eos=True))
    requests = list[AnswerRequest]()
    for frame in frames():
        images = (model.loaded.images.prepare(frame),)
        messages = Conversation(model.loaded, images).opening("red?")
        requests.append(AnswerRequest.of(model.loaded, images, messages, settings))
    wanted = [Conversation(model.loaded, r.images).stream_messages(r.messages, settings).read() for r in requests]
    with Engine("test", model, Capacity(2, 2, kept=0, image_tokens=0, tiles=64 << 20)) as engine:
        found = dict(engine.answers((number, [request]) for number, request in enumerate(requests)))
        assert engine.tiles is not None
        assert engine.tiles.hits > 0
    assert model.loaded.caches.tiles is None
    for number, answer in enumerate(wanted):
        (got,) = found[number]
        assert (got.token_ids, got.text) == (answer.token_ids, answer.text)
