"""Prompts of data whose images give different numbers of tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.families.llava_onevision import ONEVISION
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny, random_image
from vtx.exporter.bundling.options import QUESTION_TOKENS, ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.reference.golden import golden_ids
from vtx.exporter.reference.model import Reference
from vtx.exporter.reference.prompts import Source, prepare, prompt_ids
from vtx.runtime.report.golden import golden_image
from vtx.tools.data.items import Data, Item


@pytest.fixture
def source(tiny_checkpoint: Checkpoints) -> Source:
    return plan_export(ExportOptions(str(tiny_checkpoint(Tiny(family="llava_next"))))).source()


def test_each_image_takes_as_many_tokens_as_the_layout_gives_its_size(source: Source, tmp_path: Path) -> None:
    tall = tmp_path / "tall.png"
    Image.new("RGB", (30, 90)).save(tall)
    item = Item((Image.new("RGB", (200, 10)), tall), "which?", "red")
    prepared, skipped = prepare(source, Data("two sizes", (item,)), 0)
    assert not skipped
    ids = prepared[0].ids
    runs = np.split(ids, np.flatnonzero(np.diff(ids == source.config.image_token_id)) + 1)
    wide, high = source.config.layout.count(200, 10), source.config.layout.count(30, 90)
    assert wide != high
    assert [len(run) for run in runs if run[0] == source.config.image_token_id] in ([wide, high], [wide + high])
    assert prepared[0].answer_ids is not None
    np.testing.assert_array_equal(ids, prompt_ids(source, replace(item, answer=None)))


def test_images_take_the_tokens_that_they_have_beside_others(tiny_checkpoint: Checkpoints) -> None:
    """LLaVA-OneVision sees one image in tiles, and each of several in one tile."""
    source = plan_export(ExportOptions(str(tiny_checkpoint(ONEVISION)))).source()
    wide, high = random_image(0, (150, 60)), random_image(1, (40, 90))
    counts = list[int]()
    for images in ((wide,), (high,), (wide, high)):
        counts.append(int((prompt_ids(source, Item(images, "?")) == source.config.image_token_id).sum()))
        assert counts[-1] == len(Reference(source.checkpoint, source.config).encode(images, source.image).hidden)
    assert counts[2] == 2 * 17 < counts[0] + counts[1]
    measured = ExportOptions("", precision="int4", aware=Data("two", (Item((wide, high), "?"),)))
    assert measured.measured_tokens(source.config) == (counts[2] + QUESTION_TOKENS,)


def test_golden_prompt_and_forecasts_ask_the_layout(source: Source) -> None:
    ids = golden_ids(source.text, source.config.layout)
    layout = source.config.layout
    assert (ids == source.config.image_token_id).sum() == layout.count(*golden_image().size)
    items = tuple(Item((Image.new("RGB", (width, 10)),), "?") for width in (40, 170))
    options = ExportOptions("", precision="int4", aware=Data("two sizes", items))
    assert options.measured_tokens(source.config) == tuple(
        layout.count(width, 10) + QUESTION_TOKENS for width in (40, 170)
    )
