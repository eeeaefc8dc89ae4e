"""The parity certificate passes for what was exported and fails for anything else, checksums or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vtx
from tests.support import bundles
from tests.support.fixtures import Checkpoints
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.bundle.safetensors import read_header, read_tensor, write_safetensors
from vtx.runtime.errors import BundleError, VtxError
from vtx.runtime.report.golden import Check, check_golden, golden_image

GOLDEN = "golden.safetensors"


def checks(folder: Path) -> dict[str, Check]:
    return {check.name: check for check in check_golden(vtx.load(folder, threads=1))}


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return {name: read_tensor(info) for name, info in read_header(folder / GOLDEN).tensors.items()}


def forge(folder: Path, values: dict[str, np.ndarray]) -> None:
    write_safetensors(folder / GOLDEN, values)
    bundles.reseal(folder, GOLDEN)


def test_a_sound_bundle_passes_every_check(whole: Path) -> None:
    found = checks(whole)
    assert list(found) == [
        "token ids",
        "image preprocessing",
        "vision features",
        "logits at K = none",
        "logits at K = 3",
        "logits at K = 5",
    ]
    assert all(check.passed for check in found.values())
    assert found["logits at K = 3"].note == "same top token"
    assert 0 < found["logits at K = none"].difference < 1e-5


def test_the_logits_of_the_depths_differ_so_that_a_wrong_cut_is_seen(whole: Path) -> None:
    stored = tensors(whole)
    for k in ("3", "5"):
        apart = np.abs(stored[f"logits.{k}"] - stored["logits.none"]).max()
        assert apart > 1e-3 * np.abs(stored["logits.none"]).max()


@pytest.mark.parametrize("vector", ["ids", "pixels", "features", "logits.none", "logits.5"])
@pytest.mark.parametrize("change", [lambda a: a[:0], lambda a: a[..., 1:, None], lambda a: a.astype(np.int8), None])
def test_a_vector_of_another_kind_is_refused_by_name(folder: Path, vector: str, change: Any) -> None:
    values = tensors(folder)
    values = {**values, vector: change(values[vector])} if change else {n: v for n, v in values.items() if n != vector}
    forge(folder, values)
    with pytest.raises(BundleError, match=rf"golden\.safetensors.*{vector}.*; export the bundle"):
        checks(folder)


@pytest.mark.parametrize(
    ("vector", "check"),
    [
        ("ids", "token ids"),
        ("pixels", "image preprocessing"),
        ("features", "vision features"),
        ("logits.none", "logits at K = none"),
        ("logits.5", "logits at K = 5"),
    ],
)
def test_an_altered_vector_fails_its_check_alone(folder: Path, vector: str, check: str) -> None:
    values = tensors(folder)
    flat = values[vector].reshape(-1)
    flat[len(flat) // 2] += 1
    forge(folder, values)
    found = checks(folder)
    assert [name for name, result in found.items() if not result.passed] == [check]


def test_a_vector_that_is_no_number_fails(folder: Path) -> None:
    values = tensors(folder)
    forge(folder, {**values, "logits.3": np.full_like(values["logits.3"], np.nan)})
    assert not checks(folder)["logits at K = 3"].passed


def test_altered_weights_fail_even_with_checksums_to_match(folder: Path) -> None:
    shard = "weights/00001-of-00001.safetensors"
    name = "text.layers.6.mlp.down_proj.weight"
    info = read_header(folder / shard).tensors[name]
    content = bytearray((folder / shard).read_bytes())
    values = np.frombuffer(content, np.float32, info.nbytes // 4, info.offset)
    values[:] = values * 1.5  # type: ignore[misc]
    (folder / shard).write_bytes(content)
    bundles.reseal(folder, shard)
    found = checks(folder)
    assert found["vision features"].passed
    assert not any(found[f"logits at K = {k}"].passed for k in ("none", 3, 5))


def test_a_swapped_template_fails_the_token_ids(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("ASSISTANT:", "ASSISTANT: the"))
    bundles.reseal(folder, template.name)
    assert not checks(folder)["token ids"].passed


def test_a_missing_vector_is_named(folder: Path) -> None:
    values = tensors(folder)
    del values["logits.5"]
    forge(folder, values)
    with pytest.raises(BundleError, match=r"logits\.5"):
        checks(folder)


@pytest.mark.parametrize("content", [b"", b"garbage" * 10, b"\xff" * 64])
def test_a_golden_file_that_is_none_is_a_bundle_error(folder: Path, content: bytes) -> None:
    (folder / GOLDEN).write_bytes(content)
    bundles.reseal(folder, GOLDEN)
    with pytest.raises(VtxError) as caught:
        checks(folder)
    assert isinstance(caught.value, BundleError)


def test_the_golden_picture_is_always_the_same() -> None:
    assert golden_image().tobytes() == golden_image().tobytes()
    assert golden_image().size == (200, 150)


def test_an_fp32_bundle_with_fp16_k_and_v_has_their_limit(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    options = ExportOptions(str(tiny_checkpoint()), (), "fp32", kv_precision="fp16", dialects=("ort",))
    by_name = checks(bundles.export_with(options, tmp_path / "bundle").folder)
    assert by_name["vision features"].limit == 1e-4
    logits = by_name["logits at K = none"]
    assert (logits.limit, logits.passed) == (5e-3, True)
