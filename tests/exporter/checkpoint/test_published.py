"""Small checkpoints of published files answer as transformers does on the same files, as published and saved again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.bundles import export_anew
from tests.support.published.build import build, reason_absent
from tests.support.published.compare import Row, compare
from tests.support.published.places import models, published, read
from tests.support.published.resaved import resave
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.errors import VtxError

PUBLISHED, RESAVED = "published", "saved by transformers 5"
AUTHORS = ("internvl2-8b", "llava-v1.5-7b", "openvla-7b", "vila1.5-3b")  # whose layout transformers does not read
REFUSED = {  # and the words of the reason
    "paligemma2-3b": "gemma2",
    "pixtral-12b": "pixtral",
}
NAMES = [name for name in models() if name not in (*AUTHORS, *REFUSED)] or ["none"]


@pytest.fixture(autouse=True)
def published_files() -> None:
    if not models():
        pytest.skip(f"no published files in {published()}; name a folder of them in PUBLISHED")


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def checkpoint_of(name: str, files: str, folder: Path) -> Path:
    """The small checkpoint of a model; a skip where a file for it is absent."""
    source = models()[name]
    if reason := reason_absent(source):
        pytest.skip(f"{name}: {reason}")
    if files == PUBLISHED:
        return build(source, folder / "published")
    return resave(build(source, folder / "published", plain=is_quantised(name)), folder / "saved")


def is_quantised(name: str) -> bool:
    return "quantization_config" in read(models()[name] / "config.json")


@pytest.mark.sampled(13)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("files", [PUBLISHED, RESAVED])
def test_a_published_model_answers_as_transformers_does(
    name: str, files: str, tmp_path: Path, closing: ExitStack
) -> None:
    from tests.support.published.judge import Judge

    row = Row(name, files)
    checkpoint = checkpoint_of(name, files, tmp_path)
    bundle = exported(row, checkpoint, tmp_path / "bundle")
    model = closing.enter_context(load(bundle, device="cpu", threads=1))
    try:
        plain = files == PUBLISHED and is_quantised(name)
        judge = Judge(build(models()[name], tmp_path / "plain", plain=True) if plain else checkpoint)
        compare(row, model, judge)
    finally:
        row.record()
    assert not row.faults


def exported(row: Row, checkpoint: Path, folder: Path) -> Path:
    """The bundle of a checkpoint; a refusal is kept in the row."""
    try:
        return export_anew(ExportOptions(str(checkpoint), (), "fp32", dialects=("ort",)), folder).folder
    except VtxError as reason:
        row.export = f"refused: {reason}"
        row.record()
        raise


@pytest.mark.parametrize("name", [name for name in REFUSED if name in models()] or ["none"])
def test_a_published_model_of_another_kind_is_refused_by_name(name: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(name, PUBLISHED, tmp_path)
    with pytest.raises(VtxError, match=REFUSED[name]):
        exported(Row(name, PUBLISHED), checkpoint, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
