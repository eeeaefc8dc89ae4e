"""A picture that many requests send is decoded once, and the answers are those of pictures that are decoded anew."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.support.exported import Models
from tests.support.families.llava_onevision import ONEVISION
from tests.support.serving import data_url
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api.model import Model
from vtx.runtime.errors import ImageError
from vtx.runtime.scheduler.engine import Capacity, Engine
from vtx.runtime.session.encoded_images import PictureCache, PreparedImage
from vtx.runtime.vision.image import load_image

READ = "vtx.runtime.api.images.load_image"


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models(Tiny())


@pytest.fixture
def cache(model: Model) -> Iterator[PictureCache]:
    with patch.object(model.loaded.caches, "pictures", PictureCache(1 << 30)) as cache:
        yield cache


def png(seed: int) -> bytes:
    out = io.BytesIO()
    random_image(seed, (40, 30)).save(out, "PNG")
    return out.getvalue()


def same(one: PreparedImage, other: PreparedImage) -> None:
    assert (one.key, one.size, one.in_prompt) == (other.key, other.size, other.in_prompt)
    for view, again in zip(one.views, other.views, strict=True):
        np.testing.assert_array_equal(view, again)


def test_threads_that_need_one_picture_read_it_once(model: Model, cache: PictureCache) -> None:
    """The first reads until the others have asked, too."""
    source, asked, read, prepared = png(1), threading.Semaphore(0), list[bytes](), cache.prepared

    def asking(*given: Any) -> PreparedImage:
        asked.release()
        return prepared(*given)

    def slowly(given: Any, *more: Any) -> Any:
        read.append(given.content)
        assert all(asked.acquire(timeout=60) for _ in range(4))
        return load_image(given, *more)

    with patch(READ, slowly), patch.object(cache, "prepared", asking), ThreadPoolExecutor(4) as pool:
        images = list(pool.map(model.loaded.images.prepare, [source] * 4))
    assert read == [source]
    with patch.object(model.loaded.caches, "pictures", None):
        fresh = model.loaded.images.prepare(source)
    for image in images:
        same(image, fresh)


@pytest.mark.parametrize(("tiny", "more"), [(Tiny(), {"fit": "squash"}), (ONEVISION, {"of_images": 2})])
def test_other_bytes_another_fit_and_more_pictures_in_a_prompt_are_other_pictures(
    models: Models, tiny: Tiny, more: dict[str, Any]
) -> None:
    model = models(tiny)
    sources = [png(1), png(2), data_url(random_image(1, (40, 30)))]
    settings = dict[str, Any](), more
    fresh = [model.loaded.images.prepare(source, **each) for source in sources for each in settings]
    with patch.object(model.loaded.caches, "pictures", PictureCache(1 << 30)):
        for _ in range(2):
            found = [model.loaded.images.prepare(source, **each) for source in sources for each in settings]
            for one, other in zip(found, fresh, strict=True):
                same(one, other)
        with patch(READ, side_effect=AssertionError("read again")):
            assert not np.array_equal(*(model.loaded.images.prepare(sources[2], **each).views[0] for each in settings))


def decoded(model: Model, *sources: Any) -> list[bool]:
    """Prepare these in turn; for each whether it was decoded, and with that whether it was checked."""
    found = list[bool]()
    for source in sources:
        checked = list[Any]()
        with patch(READ, wraps=load_image) as read:
            model.loaded.images.prepare(source, check=checked.append)
        assert len(checked) == read.call_count
        found.append(bool(checked))
    return found


def test_the_least_recently_used_leave_and_what_is_too_large_is_not_kept(model: Model) -> None:
    size = model.loaded.images.prepare(png(1)).nbytes
    with patch.object(model.loaded.caches, "pictures", PictureCache(2 * size)) as cache:
        assert decoded(model, *map(png, (1, 2, 1, 3))) == [True, True, False, True]
        assert cache.bytes == 2 * size
        assert decoded(model, *map(png, (3, 1, 2))) == [False, False, True]
    with patch.object(model.loaded.caches, "pictures", PictureCache(size - 1)) as cache:
        assert decoded(model, png(1), png(1)) == [True, True]
        assert cache.bytes == 0


def test_a_tenant_finds_no_picture_of_another(model: Model, cache: PictureCache) -> None:
    for tenant in ("alice", "bob"):
        for calls in (1, 0):
            with patch(READ, wraps=load_image) as read:
                model.loaded.images.prepare(png(1), tenant=tenant)
            assert read.call_count == calls, tenant


def test_a_picture_that_cannot_be_read_is_told_to_each_and_tried_again(model: Model, cache: PictureCache) -> None:
    for _ in range(2):
        with pytest.raises(ImageError, match="not an image"):
            model.loaded.images.prepare(b"no picture at all")
    with patch(READ, side_effect=MemoryError), pytest.raises(MemoryError):
        model.loaded.images.prepare(png(1))
    assert cache.bytes == 0
    assert model.loaded.images.prepare(png(1)).size == (40, 30)


def test_a_file_is_known_by_its_content_wherever_it_comes_from(
    model: Model, cache: PictureCache, tmp_path: Path
) -> None:
    path, other = tmp_path / "picture.png", tmp_path / "other.png"
    path.write_bytes(png(1))
    other.write_bytes(png(1))
    url = f"data:image/png;base64,{base64.b64encode(png(1)).decode()}"
    assert decoded(model, path, str(path), other, png(1), bytearray(png(1)), url) == [True, *[False] * 5]
    path.write_bytes(png(2))
    assert decoded(model, path, other) == [True, False]
    same(model.loaded.images.prepare(path), model.loaded.images.prepare(random_image(2, (40, 30))))
    other.write_bytes(b"no picture at all")
    with pytest.raises(ImageError, match=r"other\.png' is not an image"):
        model.loaded.images.prepare(other)


def test_what_is_no_file_is_read_each_time(model: Model, cache: PictureCache) -> None:
    image = random_image(1, (40, 30))
    assert decoded(model, *2 * [image, np.asarray(image)]) == [True] * 4
    assert decoded(model, *(io.BytesIO(png(1)) for _ in range(2))) == [True] * 2
    assert cache.bytes == 0


def test_an_engine_keeps_pictures_until_it_is_closed(model: Model) -> None:
    with Engine("test", model, Capacity()):
        assert decoded(model, png(1), png(1)) == [True, False]
    assert decoded(model, png(1)) == [True]
