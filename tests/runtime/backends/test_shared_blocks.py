"""K and V of a common prefix on OpenVINO: in memory once, and nobody's own writes are seen by others."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.bundles import export_with
from tests.support.exported import THREADS
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.backends.openvino.blocks import BlockPool
from vtx.runtime.backends.openvino.paged import BLOCK
from vtx.runtime.vision.tokens import TokenStates

OPTIONS = Options(6, ignore_eos=True)
CONVERSATIONS, HIDDEN = 8, Tiny().hidden


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    pytest.importorskip("openvino", reason="needs vtx-edge[openvino]")
    options = ExportOptions(str(tiny_checkpoint(Tiny(layers=4, image=126, context=512))), (3,), "fp32", 256)
    folder = export_with(options, tmp_path_factory.mktemp("shared") / "bundle").folder
    with load(folder, device="openvino", threads=THREADS) as model:
        model.backend.share_caches(CONVERSATIONS)  # type: ignore[attr-defined]
        yield model


@pytest.fixture(scope="module")
def apart(model: Model) -> Iterator[Model]:
    """The same model, whose caches have memory of their own."""
    with load(model.bundle.folder, device="openvino", threads=THREADS) as other:
        yield other


def pool_of(model: Model) -> BlockPool:
    cache: Any = model.backend.stage(0, 1)
    pool: BlockPool = cache.pool
    return pool


@pytest.mark.sampled(2)
@pytest.mark.parametrize("k", [None, 3])
def test_the_blocks_of_an_image_are_in_memory_once_for_all_who_ask_about_it(model: Model, k: int | None) -> None:
    gc.collect()
    pool, images = pool_of(model), (model.loaded.images.prepare(random_image(4, (126, 126))),)
    before, words = pool.taken, ["red?", *(f"how many of {n} are there, and where?" for n in range(3))]
    first = Conversation(model.loaded, images)
    alone = [Conversation(model.loaded, images).ask(each, k, OPTIONS) for each in words]
    first.ask(words[0], k, OPTIONS)
    gc.collect()
    one, size = pool.taken - before, first.cache_bytes
    image = (
        model.loaded.images.layout.max_tokens // BLOCK
    )  # whole blocks that hold nothing but the image and what is before
    sharing = [Conversation(model.loaded, images) for _ in words[1:]]
    for conversation in sharing:
        conversation.share_prefix(first)
    answers = [conversation.ask(each, k, OPTIONS) for conversation, each in zip(sharing, words[1:], strict=True)]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone[1:]]
    assert pool.taken - before <= one + len(sharing) * (one - image + 1)
    assert first.cache_bytes < size, "each has its part of what they share"
    assert first.ask(words[0], k, OPTIONS).token_ids == alone[0].token_ids
    del sharing, conversation
    gc.collect()
    assert (pool.taken - before, first.cache_bytes) == (one, size)
    first.close()
    gc.collect()
    assert pool.taken == before


def test_another_image_in_one_conversation_changes_nothing_for_those_that_share_its_blocks(model: Model) -> None:
    """Whose first tokens are the same: what comes behind them is written where others read."""
    frames = [random_image(number, (126, 126)) for number in (4, 5)]
    wanted = [model.open(frame).ask("red?", None, OPTIONS).token_ids for frame in frames]
    first, second = model.open(frames[0]), model.open(frames[0])
    first.ask("how many?", None, OPTIONS)
    second.share_prefix(first)
    first.replace(frames[1])
    assert first.ask("red?", None, OPTIONS).token_ids == wanted[1]
    assert second.ask("red?", None, OPTIONS).token_ids == wanted[0]
    second.replace(frames[1])
    assert second.ask("red?", None, OPTIONS).token_ids == wanted[1]
    assert first.ask("red?", None, OPTIONS).token_ids == wanted[1]


def test_any_caches_that_share_copy_and_go_back_hold_what_each_wrote(model: Model, apart: Model) -> None:
    """Random steps beside caches in memory of their own: append, go back, copy, move slots, end."""
    backend: Any = model.backend
    pool, rng = pool_of(model), np.random.default_rng(3)
    gc.collect()
    before = pool.taken
    pairs = list[tuple[Any, Any]]()
    for _ in range(150):
        step = rng.integers(6) if pairs else 0
        one, other = pairs[rng.integers(len(pairs))] if pairs else (None, None)
        if step == 0 and len(pairs) < CONVERSATIONS:
            pairs.append((backend.stage(0, 256), apart.backend.stage(0, 256)))
        elif step == 1 and len(pairs) < CONVERSATIONS:
            length = int(rng.integers(one.length + 1))
            pairs.append((backend.stage(0, 256), apart.backend.stage(0, 256)))
            pairs[-1][0].copy(one, length)
            pairs[-1][1].copy(other, length)
        elif step == 2 and len(pairs) > 1:
            pairs.pop(rng.integers(len(pairs)))
            one = other = None
            gc.collect()
        elif step == 3:
            length = int(rng.integers(one.length + 1))
            one.keep(length)
            other.keep(length)
        elif step == 4 and one.length > 1:
            slots = np.sort(rng.choice(one.length, rng.integers(1, one.length), replace=False))
            for cache in (one, other):
                cache.write(np.arange(len(slots)), cache.read(slots), length=len(slots))
        elif one.length < 200:
            rows = rng.standard_normal((rng.integers(1, 56), HIDDEN)).astype(np.float32)
            positions = one.length + np.arange(len(rows))
            made = [cache.append(TokenStates(rows), positions).copy() for cache in (one, other)]
            np.testing.assert_array_equal(*made)
        for mine, theirs in pairs:
            assert mine.length == theirs.length
            np.testing.assert_array_equal(mine.keys(), theirs.keys())
        assert pool.taken - before == len({n for mine, _ in pairs for n in mine.table.numbers[: mine.table.held]})
    one = other = mine = theirs = cache = None
    pairs.clear()
    gc.collect()
    assert pool.taken == before
