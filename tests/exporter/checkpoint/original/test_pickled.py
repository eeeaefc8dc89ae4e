"""Pickled weights: never opened unasked, and then only tables of tensors are read, in a confined child."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.fixtures import Checkpoints
from tests.support.json_files import write_json
from tests.support.tiny import Tiny
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.hub import checkpoint_files
from vtx.exporter.checkpoint.original import pickled, saved_child
from vtx.exporter.checkpoint.original.pickled import PICKLE, check_torch, pickled_tensors
from vtx.exporter.checkpoint.original.saved_child import table
from vtx.runtime.bundle.safetensors import read_bits
from vtx.runtime.errors import CheckpointError

PICKLED = Tiny(family="llava_llama", aspect="pad", pickled=True, shards=2, context=1024)


class Command:
    """What a hostile pickle calls when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder),)


def saved(folder: Path, value: object, **options: Any) -> dict[str, Any]:
    """What vtx finds in a file of torch.save that holds `value`."""
    torch.save(value, folder / PICKLE, **options)
    return found(folder)


def found(folder: Path) -> dict[str, Any]:
    return pickled_tensors(checkpoint_files(folder), [PICKLE])[PICKLE]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child takes seconds to import torch: what it runs is run here."""
    monkeypatch.setattr(pickled, "confine", lambda task, _, *, data: table(data, task.request))


def altered(folder: Path, old: bytes, new: bytes, value: object = None, **options: Any) -> dict[str, Any]:
    """What vtx finds where bytes of a sound file were replaced by as many others, once."""
    torch.save(value or {"weight": torch.ones(2, 3), "height": torch.ones(7)}, folder / PICKLE, **options)
    (folder / PICKLE).rename(folder / "sound")
    with zipfile.ZipFile(folder / "sound") as sound, zipfile.ZipFile(folder / PICKLE, "w") as archive:
        contents = {entry: sound.read(entry) for entry in sound.namelist() if not entry.endswith(".format_version")}
        assert any(old in content for content in contents.values())
        for entry, content in contents.items():
            archive.writestr(entry, content.replace(old, new, 1))
    return found(folder)


def test_pickles_are_not_opened_unasked(tiny_checkpoint: Checkpoints) -> None:
    with pytest.raises(CheckpointError, match=r"pytorch_model-00001-of-00002.bin.* is not opened; .*--allow-pickle"):
        open_checkpoint(str(tiny_checkpoint(PICKLED)))


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("protocol", [2, 3])
def test_every_tensor_is_read_from_where_it_lies(tmp_path: Path, protocol: int) -> None:
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "whole": whole, "rows of it": whole[1:3], "half": whole.half() / 3, "bits": (whole / 7).bfloat16(),
        "ids": torch.arange(5), "none": torch.empty(0, 3), "one": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(whole[3:]), "column": whole[:1].T.contiguous(), "flags": whole > 3,
    }  # fmt: skip
    state = OrderedDict(tensors)
    vars(state)["_metadata"] = {"": {"version": 1}}  # as state_dict() has it
    read = saved(tmp_path, state, pickle_protocol=protocol)
    assert {name: info.shape for name, info in read.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    for name, tensor in tensors.items():
        bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        np.testing.assert_array_equal(read_bits(read[name]), bits.detach().numpy())


def test_a_pickle_that_calls_something_is_refused_and_nothing_is_called(tmp_path: Path) -> None:
    target = tmp_path / "called"
    value = {"weight": torch.zeros(2), "more": Command(target)}
    with pytest.raises(CheckpointError, match=r"^pytorch_model\.bin .* holds more than tensors, none of which was run"):
        saved(tmp_path, value)
    assert not target.exists()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    "value",
    [
        [torch.zeros(2)],
        {1: torch.zeros(2)},
        {"weight": torch.zeros(4, 6).T},
        {"weight": torch.zeros(2).to_sparse()},
        {"weight": torch.zeros(2, dtype=torch.complex64).conj()},
        {"weight": torch.zeros(2, dtype=torch.float8_e4m3fn)},
        {"weight": "text"},
        {"state_dict": {"weight": torch.zeros(2)}},
    ],
    ids=["list", "number as name", "transposed", "sparse", "conjugated", "8 bits", "text", "nested"],
)
def test_what_is_no_table_of_plain_tensors_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match="is not a plain table of tensors"):
        saved(tmp_path, value)


# Of {"weight": 2 x 3, "height": 7} in float32: K is the opcode of a small number, t that of a tuple.
PICKLES = {
    "more values than the archive has": (b"cpuq\x06K\x06t", b"cpuq\x06K\x07t", "are not those in the archive"),
    "narrower values": (b"FloatStorage", b"ShortStorage", "are not those in the archive"),
    "a shape beyond the storage": (b"K\x00K\x02K\x03\x86", b"K\x00K\x09K\x03\x86", "is damaged|is not a plain table"),
    "an offset beyond the storage": (b"K\x00K\x02K\x03\x86", b"K\x01K\x02K\x03\x86", "is damaged|is not a plain"),
    "rows that overlap": (b"K\x03K\x01\x86", b"K\x01K\x01\x86", "is not a contiguous tensor"),
    "an object of another kind": (b"torch\nFloatStorage", b"posix\nFloatSystem_", "holds more than tensors"),
    "a name twice": (b"height", b"weight", "are not those in the archive"),
    "no table": (b"}q\x00", b"Nq\x00", "is not a plain table|is damaged"),
    "a negative number": (b"K\x00K\x02", b"NNK\x02", "is not a plain table|is damaged"),
}


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("case", PICKLES)
def test_what_a_pickle_says_is_held_against_the_file(tmp_path: Path, case: str) -> None:
    old, new, message = PICKLES[case]
    with pytest.raises(CheckpointError, match=message):
        altered(tmp_path, old, new)


def test_a_file_of_an_older_torch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a file of torch\.save \(since PyTorch 1\.6\)"):
        saved(tmp_path, {"weight": torch.ones(6)}, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("installed", ["2.10.1", "2.6.0+cpu", "1.13"])
def test_pickles_need_a_torch_without_known_holes(installed: str) -> None:
    with pytest.raises(CheckpointError, match=r"pickled weights need 2\.11 or newer"):
        check_torch(installed)
    check_torch("2.11.0+cpu")


@pytest.mark.usefixtures("in_process")
def test_an_archive_with_bytes_too_few_or_before_it_is_refused(tmp_path: Path) -> None:
    value = {"weight": torch.ones(4), "other": torch.ones(4)}
    saved(tmp_path, value)
    content = (tmp_path / PICKLE).read_bytes()
    (tmp_path / PICKLE).write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="is damaged"):
        found(tmp_path)
    (tmp_path / PICKLE).write_bytes(b"x" + content)
    with pytest.raises(CheckpointError, match=r"is not a file of torch\.save"):
        found(tmp_path)


@pytest.mark.usefixtures("in_process")
def test_files_of_an_archive_do_not_overlap(tmp_path: Path) -> None:
    """Two entries of the directory that lead to the same bytes: tensors of more bytes than the file has."""
    saved(tmp_path, {"weight": torch.ones(4), "other": torch.ones(4)})
    with zipfile.ZipFile(tmp_path / PICKLE) as archive:
        first, second = (archive.getinfo(f"pytorch_model/data/{n}").header_offset for n in (0, 1))
    content = (tmp_path / PICKLE).read_bytes()
    directory = content.index(b"PK\x01\x02")
    moved = content[directory:].replace(second.to_bytes(4, "little"), first.to_bytes(4, "little"), 1)
    (tmp_path / PICKLE).write_bytes(content[:directory] + moved)
    with pytest.raises(CheckpointError, match="are not those in the archive"):
        found(tmp_path)


@pytest.mark.usefixtures("in_process")
def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, {"weight": torch.ones(400)})
    (tmp_path / PICKLE).rename(tmp_path / "sound")
    with (
        zipfile.ZipFile(tmp_path / "sound") as sound,
        zipfile.ZipFile(tmp_path / PICKLE, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in sound.namelist():
            packed.writestr(entry, sound.read(entry))
    with pytest.raises(CheckpointError, match="compressed files"):
        found(tmp_path)


@pytest.mark.usefixtures("in_process")
def test_pickles_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(saved(tmp_path, {"weight": torch.ones(4)})) == 1
    monkeypatch.setattr(saved_child, "MAX_PICKLE", 50)
    with pytest.raises(CheckpointError, match="not hold one pickle of at most 50 bytes"):
        found(tmp_path)


@pytest.mark.usefixtures("in_process")
def test_a_file_of_another_byte_order_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="stored the highest byte first"):
        altered(tmp_path, b"little", b"big")


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("swap", ["another file", "written to"])
def test_a_file_that_changes_after_it_was_opened_is_not_read(tmp_path: Path, swap: str) -> None:
    info = saved(tmp_path, {"weight": torch.ones(4)})["weight"]
    if swap == "another file":
        shutil.copy2(tmp_path / PICKLE, tmp_path / "other")
        (tmp_path / "other").rename(tmp_path / PICKLE)
    else:
        os.utime(tmp_path / PICKLE, ns=(0, 0))
    with pytest.raises(CheckpointError, match="was replaced or written to since its header was read"):
        read_bits(info)


@pytest.mark.usefixtures("in_process")
def test_a_damaged_archive_and_a_missing_shard_are_named(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(PICKLED), tmp_path / "damaged"))
    shard = folder / "pytorch_model-00002-of-00002.bin"
    shard.write_bytes(shard.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=r"00002-of-00002.bin is damaged"):
        open_checkpoint(str(folder), allow_pickle=True)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002.bin is missing"):
        open_checkpoint(str(folder), allow_pickle=True)
    index = folder / "pytorch_model.bin.index.json"
    write_json(index, {"weight_map": {"a": "../evil.bin"}})
    with pytest.raises(CheckpointError, match="not a file name inside it"):
        open_checkpoint(str(folder), allow_pickle=True)
