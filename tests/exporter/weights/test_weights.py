"""Weights on their way into a bundle: bit-exact, finite, each once, and nothing left behind when the disk fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import vtx
from tests.support import bundles
from tests.support.checkpoints import alter
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny
from vtx.exporter.bundling import predict
from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.checkpoint.loader import canonical_name
from vtx.exporter.weights import writing
from vtx.exporter.weights.journal import ExportJournal
from vtx.exporter.weights.plan import WeightPlan
from vtx.exporter.weights.writing import write_weights
from vtx.runtime.bundle.safetensors import TensorInfo, read_header, read_tensor
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.errors import CheckpointError, ExportError, VtxError

ALL_USED = Tiny(family="qwen2_vl", text="qwen2", tokenizer="bytes")  # no graph uses CLIP's last layer


def plan(folder: Path, precision: str, ks: tuple[int, ...] = ()) -> WeightPlan:
    return plan_export(ExportOptions(str(folder), ks, precision)).weights


def written(folder: Path, target: Path, precision: str) -> dict[str, np.ndarray]:
    """The weights as a bundle's graphs will find them, by canonical name."""
    plan_ = plan(folder, precision)
    target.mkdir()
    write_weights(plan_, target, ExportJournal(target), lambda _: None)
    found = {}
    for name, stored in plan_.stored.items():
        info = TensorInfo(name, stored.dtype, tuple(stored.shape), target / stored.file, stored.offset, stored.nbytes)
        found[name] = read_tensor(info)
    return found


# ---- conversions -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_weight_arrives_as_torch_would_convert_it(
    tiny_checkpoint: Checkpoints, tmp_path: Path, dtype: Any, precision: str, shards: int
) -> None:
    from safetensors.torch import load_file

    folder = tiny_checkpoint(Tiny(dtype=dtype, shards=shards, names="new"))
    tensors = {canonical_name(n): t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    found = written(folder, tmp_path / "w", precision)
    assert len(found) > 80
    for name, value in found.items():
        want = (tensors[name].half() if precision == "fp16" else tensors[name].float()).numpy()
        assert value.dtype == want.dtype
        assert value.tobytes() == want.tobytes(), name


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_conversion_in_small_blocks_changes_nothing(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    folder = tiny_checkpoint(Tiny(dtype="bfloat16"))
    whole = written(folder, tmp_path / "a", precision)
    monkeypatch.setattr(writing, "CHUNK", 37)
    pieces = written(folder, tmp_path / "b", precision)
    assert all(whole[name].tobytes() == pieces[name].tobytes() for name in whole)


def test_subnormal_values_survive_in_fp16(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = alter(tiny_checkpoint(), tmp_path / "ck", "text.norm.weight", 6e-8)
    assert float(written(folder, tmp_path / "w", "fp16")["text.norm.weight"][32]) == 2.0**-24


@pytest.mark.parametrize("value", [65520.0, -1e6, 3e38])
def test_a_value_beyond_fp16_is_named_with_the_cure(tiny_checkpoint: Checkpoints, tmp_path: Path, value: float) -> None:
    name = "text.layers.4.mlp.up_proj.weight"
    folder = alter(tiny_checkpoint(), tmp_path / "ck", name, value)
    with pytest.raises(ExportError, match=r"text\.layers\.4\.mlp\.up_proj.*65504.*--precision fp32"):
        bundles.export(folder, tmp_path / "out", (), "fp16", dialects=bundles.ORT)
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]
    bundles.export(folder, tmp_path / "out", (), "fp32", dialects=bundles.ORT)


def test_the_largest_values_of_fp16_are_fine(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = alter(tiny_checkpoint(), tmp_path / "ck", "text.norm.weight", 65519.0)
    assert written(folder, tmp_path / "w", "fp16")["text.norm.weight"][32] == 65504


@pytest.mark.sampled(5)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["vision.embeddings.patch_embedding.weight", "head.weight"])
def test_nan_and_infinity_are_named_and_nothing_is_left(
    tiny_checkpoint: Checkpoints, tmp_path: Path, value: float, precision: str, name: str
) -> None:
    folder = alter(tiny_checkpoint(), tmp_path / "ck", name, value)
    with pytest.raises(CheckpointError, match=f"{name}.*NaN or infinity"):
        bundles.export(folder, tmp_path / "out", (), precision, dialects=bundles.ORT)
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


def test_nan_in_an_as_is_fp16_checkpoint_is_found_too(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = alter(tiny_checkpoint(Tiny(dtype="float16")), tmp_path / "ck", "head.weight", float("nan"))
    with pytest.raises(CheckpointError, match=r"head\.weight.*NaN"):
        bundles.export(folder, tmp_path / "out", (), "fp16", dialects=bundles.ORT)


# ---- each weight once ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "fp32"), ("float16", "fp16")])
def test_files_of_the_wanted_type_are_linked_not_written(
    tiny_checkpoint: Checkpoints, tmp_path: Path, dtype: Any, precision: str
) -> None:
    folder = tiny_checkpoint(replace(ALL_USED, dtype=dtype, shards=2))
    made = bundles.export(folder, tmp_path / "out", (3,), precision, dialects=bundles.ORT)
    sources = sorted(folder.glob("*.safetensors"))
    assert [p.stat().st_ino for p in sorted((made.folder / "weights").iterdir())] == [p.stat().st_ino for p in sources]
    assert plan_export(ExportOptions(str(folder), (), precision)).prediction.linked == sum(
        path.stat().st_size for path in sources
    )


def test_where_links_fail_the_file_is_copied(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def across(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", across)
    folder = tiny_checkpoint(ALL_USED)
    made = bundles.export(folder, tmp_path / "out", dialects=bundles.ORT)
    (copy,) = (made.folder / "weights").iterdir()
    assert not copy.is_symlink()
    assert copy.stat().st_ino != (folder / "model.safetensors").stat().st_ino
    assert copy.read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_linked_checkpoint_file_is_followed(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(ALL_USED), tmp_path / "ck"))
    (folder / "model.safetensors").rename(folder / "blob")
    (folder / "model.safetensors").symlink_to("blob")
    made = bundles.export(folder, tmp_path / "out", dialects=bundles.ORT)
    (file,) = (made.folder / "weights").iterdir()
    assert not file.is_symlink()
    assert file.stat().st_ino == (folder / "blob").stat().st_ino


@pytest.mark.parametrize(("precision", "saved"), [("fp32", "float32"), ("fp16", "float16"), ("fp16", "bfloat16")])
def test_tensors_that_no_graph_uses_never_reach_the_bundle(
    tiny_checkpoint: Checkpoints, tmp_path: Path, precision: str, saved: Any
) -> None:
    """E.g. position_ids of CLIP, int64, in files of transformers before 4.31, and masks."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(tiny_checkpoint(Tiny(dtype=saved)), tmp_path / "ck"))
    tensors = load_file(folder / "model.safetensors")
    tower = "vision_tower.vision_model."
    unused = {
        f"{tower}embeddings.position_ids": torch.arange(17)[None],
        "language_model.model.layers.0.self_attn.bias": torch.ones((1, 1, 8, 8), dtype=torch.bool),
        f"{tower}head.probe": torch.zeros(4, dtype=getattr(torch, saved)),
    }
    save_file({**tensors, **unused}, folder / "model.safetensors", metadata={"format": "pt"})
    made = bundles.export(folder, tmp_path / "out", precision=precision, dialects=bundles.ORT).folder
    needed, (file,) = plan(folder, precision).stored, (made / "weights").iterdir()
    assert {canonical_name(name) for name in read_header(file).tensors} == {*needed}
    vtx.load(made, device="cpu", threads=1).close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_head_is_stored_once(tiny_checkpoint: Checkpoints, tmp_path: Path, dtype: Any) -> None:
    tied = bundles.export(tiny_checkpoint(Tiny(tied=True, dtype=dtype)), tmp_path / "tied", dialects=bundles.ORT)
    free = bundles.export(tiny_checkpoint(Tiny(dtype=dtype)), tmp_path / "free", dialects=bundles.ORT)
    apart = weight_bytes(free.folder) - weight_bytes(tied.folder)
    assert abs(apart - 320 * 64 * 4) < 512 if dtype == "bfloat16" else apart > 320 * 64 * 4 - 512


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "weights").iterdir())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_four_depths_share_one_set_of_weights(tiny_checkpoint: Checkpoints, tmp_path: Path, dtype: Any) -> None:
    folder = tiny_checkpoint(Tiny(dtype=dtype))
    one = bundles.export_all(folder, tmp_path / "one", ())
    four = bundles.export_all(folder, tmp_path / "four", (2, 3, 5, 8))
    assert weight_bytes(four.folder) == weight_bytes(one.folder)
    assert {p.name: p.read_bytes() for p in (four.folder / "weights").iterdir()} == {
        p.name: p.read_bytes() for p in (one.folder / "weights").iterdir()
    }
    for dialect in DIALECTS:
        graphs = sum(path.stat().st_size for path in four.folder.glob(f"*.{dialect}.onnx"))
        assert 0 < graphs < weight_bytes(four.folder) / 10


def test_no_weight_stands_in_a_graph(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    import onnx

    made = bundles.export(tiny_checkpoint(Tiny(dtype="bfloat16")), tmp_path / "out", dialects=bundles.ORT)
    ranges: dict[tuple[str, int, int], str] = {}
    for path in made.folder.glob("*.ort.onnx"):
        for tensor in onnx.load_model(path, load_external_data=False).graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                assert int(np.prod(tensor.dims)) < 64, tensor.name
                continue
            place = {entry.key: entry.value for entry in tensor.external_data}
            key = (place["location"], int(place["offset"]), int(place["length"]))
            assert ranges.setdefault(key, path.name) == path.name, "a weight stands in two graphs"
    assert sum(length for _, _, length in ranges) > 0.9 * weight_bytes(made.folder)


# ---- disks -----------------------------------------------------------------------------------------------------------


def test_a_disk_too_small_is_told_before_anything_is_written(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(predict.shutil, "disk_usage", lambda _: usage(10, 10, 12_345))
    with pytest.raises(ExportError, match=r"12\.3 kB free"):
        bundles.export(tiny_checkpoint(), tmp_path / "out", dialects=bundles.ORT)
    assert list(tmp_path.iterdir()) == []


def test_the_predicted_disk_covers_the_bundle(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    for number, tiny in enumerate((Tiny(), Tiny(dtype="bfloat16", shards=3))):
        options = ExportOptions(str(tiny_checkpoint(tiny)), (3,), "fp16")
        forecast = plan_export(options).prediction
        made = bundles.export_with(options, tmp_path / f"{number}")
        real = sum(path.stat().st_size for path in made.folder.rglob("*") if path.is_file())
        assert real <= forecast.disk <= real + 256_000


# ---- checkpoints that are not what they say --------------------------------------------------------------------------


def test_a_shard_that_shrinks_after_the_plan_is_an_error(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(), tmp_path / "ck"))
    plan_ = plan_export(ExportOptions(str(folder), (), "fp16"))
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    with pytest.raises(VtxError):
        run_export(plan_, tmp_path / "out", force=False, report=bundles.IGNORE)
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


def test_a_huge_tensor_that_nothing_needs_is_neither_read_nor_taken(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """256 GB in a sparse file: reading them would take minutes, and a bundle of 256 GB."""
    folder = Path(shutil.copytree(tiny_checkpoint(), tmp_path / "ck"))
    path, huge = folder / "model.safetensors", 256 * 10**9
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    end = len(content) - 8 - length
    header["unused.weight"] = {"dtype": "F32", "shape": [huge // 4], "data_offsets": [end, end + huge]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + huge)
    plan_ = plan_export(ExportOptions(str(folder), (), "fp32"))
    assert plan_.weights.files[0].work < 10_000_000
    bundle = run_export(plan_, tmp_path / "out", force=False, report=bundles.IGNORE)
    assert sum(record.bytes for record in bundle.manifest.files.values()) < 20_000_000


def test_a_file_swapped_in_for_the_source_is_not_linked(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(), tmp_path / "ck"))
    plan_ = plan_export(ExportOptions(str(folder), (), "fp32"))
    (folder / "model.safetensors").rename(folder / "old")
    shutil.copyfile(folder / "old", folder / "model.safetensors")
    with pytest.raises(VtxError, match="was replaced or written to"):
        run_export(plan_, tmp_path / "out", force=False, report=bundles.IGNORE)
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


@pytest.mark.parametrize("dtype", ["I8", "U8", "F64", "F8_E4M3"])
def test_weights_of_a_type_vtx_does_not_export_are_refused(
    tiny_checkpoint: Checkpoints, tmp_path: Path, dtype: str
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(), tmp_path / "ck"))
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    entry = header["language_model.model.norm.weight"]
    bits = {"F64": 8}.get(dtype, 1)
    entry |= {"dtype": dtype, "shape": [256 // bits]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    assert "language_model.model.norm.weight" in read_header(path).tensors
    with pytest.raises(VtxError, match=dtype):
        plan(folder, "fp16")


def test_converted_chunks_come_in_order_and_few_are_ahead_of_the_writer() -> None:
    done: list[int] = []

    def convert(chunk: NDArray[Any]) -> tuple[bytes, bytes, int]:
        done.append(int(chunk[0]))
        return chunk.tobytes(), b"", int(chunk[0])

    with ThreadPoolExecutor(2) as pool:
        seen = []
        for _, _, number in writing.in_order(pool, convert, [np.array([n]) for n in range(50)]):
            seen.append(number)
            assert len(done) <= len(seen) + writing.AHEAD
    assert seen == list(range(50))
