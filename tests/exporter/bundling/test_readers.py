"""Readers of documents keep their image tokens unless the user accepts other answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.checkpoint.families import llava, registry
from vtx.runtime.errors import RequestError


@pytest.fixture
def reader(tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(registry, "FAMILIES", (replace(llava.FAMILY, reader=True),))
    return str(tiny_checkpoint(Tiny()))


@pytest.mark.parametrize("dropped", [{"ks": (3,)}, {"reductions": ("fastv",)}])
def test_a_reader_drops_image_tokens_with_the_users_word_alone(reader: str, dropped: dict[str, tuple[int]]) -> None:
    with pytest.raises(RequestError, match=r"reads documents.*leave them out, or add --allow-changed-answers"):
        plan_export(ExportOptions(reader, **dropped))
    assert plan_export(ExportOptions(reader, **dropped, allow_changed_answers=True)).config.text.layers == 8


def test_a_reader_is_exported_without_k_and_reductions(reader: str) -> None:
    assert plan_export(ExportOptions(reader)).ks == ()
