"""Pickled weights: never opened unasked, and then their tensors are read and nothing is unpickled."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny import Tiny
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.hub import checkpoint_files
from vtx.exporter.checkpoint.original import opcodes, pickled
from vtx.exporter.checkpoint.original.pickled import PICKLE, pickled_tensors
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


def altered(folder: Path, old: bytes, new: bytes, value: object = None, **options: Any) -> dict[str, Any]:
    """What vtx finds where bytes of a sound file were replaced by as many others, once."""
    torch.save(value or {"weight": torch.ones(2, 3), "height": torch.ones(7)}, folder / PICKLE, **options)
    content = (folder / PICKLE).read_bytes()
    assert old in content
    (folder / PICKLE).write_bytes(content.replace(old, new, 1))
    return found(folder)


def test_pickles_are_not_opened_unasked(tiny_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"pytorch_model-00001-of-00002.bin.* is not opened; .*--allow-pickle"):
        open_checkpoint(str(tiny_checkpoint(PICKLED)))


@pytest.mark.parametrize(("archive", "protocol"), [(True, 2), (True, 4), (True, 5), (False, 2)])
def test_every_tensor_is_read_from_where_it_lies(tmp_path: Path, archive: bool, protocol: int) -> None:
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "whole": whole, "rows of it": whole[1:3], "half": whole.half() / 3, "bits": (whole / 7).bfloat16(),
        "ids": torch.arange(5), "none": torch.empty(0, 3), "one": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(whole[3:]), "column": whole[:1].T.contiguous(), "flags": whole > 3,
    }  # fmt: skip
    table = OrderedDict(tensors)
    vars(table)["_metadata"] = {"": {"version": 1}}  # as state_dict() has it
    read = saved(tmp_path, table, _use_new_zipfile_serialization=archive, pickle_protocol=protocol)
    assert {name: info.shape for name, info in read.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    for name, tensor in tensors.items():
        bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        np.testing.assert_array_equal(read_bits(read[name]), bits.detach().numpy())


def test_nothing_unpickles_and_no_process_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError

    torch.save({"weight": torch.ones(2)}, tmp_path / PICKLE)
    for module, name in ((torch, "load"), (pickle, "Unpickler"), (pickle, "loads"), (subprocess, "Popen")):
        monkeypatch.setattr(module, name, refuse)
    assert list(found(tmp_path)) == ["weight"]


@pytest.mark.parametrize("archive", [True, False])
def test_a_pickle_that_calls_something_is_refused_and_nothing_is_called(tmp_path: Path, archive: bool) -> None:
    target = tmp_path / "called"
    value = {"weight": torch.zeros(2), "more": Command(target)}
    with pytest.raises(CheckpointError, match="holds more than tensors, none of which was run: it names '"):
        saved(tmp_path, value, _use_new_zipfile_serialization=archive)
    assert not target.exists()


@pytest.mark.parametrize("archive", [True, False])
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
def test_what_is_no_table_of_plain_tensors_is_refused(tmp_path: Path, value: object, archive: bool) -> None:
    with pytest.raises(CheckpointError, match="use a checkpoint in safetensors"):
        saved(tmp_path, value, _use_new_zipfile_serialization=archive)


# Of {"weight": 2 x 3, "height": 7} in float32: K is the opcode of a small number, t that of a tuple.
PICKLES = {
    "more values than the archive has": (
        b"cpuq\x06K\x06t",
        b"cpuq\x06K\x07t",
        "has a storage '0' of 7 F32 in its pickle",
    ),
    "narrower values": (b"FloatStorage", b"ShortStorage", "has a storage '0' of 6 I16 in its pickle, and 24 bytes"),
    "a shape beyond the storage": (b"K\x00K\x02K\x03\x86", b"K\x00K\x09K\x03\x86", "is larger than its storage"),
    "an offset beyond the storage": (b"K\x00K\x02K\x03\x86", b"K\x01K\x02K\x03\x86", "is larger than its storage"),
    "rows that overlap": (b"K\x03K\x01\x86", b"K\x01K\x01\x86", "is not contiguous"),
    "an object of another kind": (b"torch\nFloatStorage", b"posix\nFloatSystem_", "it names 'posix FloatSystem_'"),
    "a name twice": (b"height", b"weight", "holds 'weight' twice in one table"),
    "an opcode of no tensor": (b"}q\x00", b"Nq\x00", "is not a table|damaged"),
    "a negative number": (b"K\x00K\x02", b"NNK\x02", "is damaged|holds"),
}


@pytest.mark.parametrize("case", PICKLES)
def test_what_a_pickle_says_is_held_against_the_file(tmp_path: Path, case: str) -> None:
    old, new, message = PICKLES[case]
    with pytest.raises(CheckpointError, match=message):
        altered(tmp_path, old, new)


def test_a_file_in_the_older_form_ends_with_its_storages(tmp_path: Path) -> None:
    old = {"_use_new_zipfile_serialization": False}
    with pytest.raises(CheckpointError, match="has another size of storage"):
        altered(tmp_path, b"\x06" + bytes(7), b"\x05" + bytes(7), **old)
    saved(tmp_path, {"weight": torch.ones(6)}, **old)
    content = (tmp_path / PICKLE).read_bytes()
    for changed in (content + b"x", content[:-1]):
        (tmp_path / PICKLE).write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"its storages end at|cut off"):
            found(tmp_path)


def test_an_archive_accounts_for_every_byte(tmp_path: Path) -> None:
    value = {"weight": torch.ones(4), "other": torch.ones(4)}
    saved(tmp_path, value)
    content = (tmp_path / PICKLE).read_bytes()
    (tmp_path / PICKLE).write_bytes(content + b"x")
    with pytest.raises(CheckpointError, match="cut off, or holds bytes after the end of its archive"):
        found(tmp_path)
    (tmp_path / PICKLE).write_bytes(b"x" + content)
    with pytest.raises(CheckpointError, match=r"is not a file of torch\.save"):
        found(tmp_path)


def test_files_of_an_archive_do_not_overlap(tmp_path: Path) -> None:
    """Two entries of the directory that lead to the same bytes: tensors of more bytes than the file has."""
    saved(tmp_path, {"weight": torch.ones(4), "other": torch.ones(4)})
    with zipfile.ZipFile(tmp_path / PICKLE) as archive:
        first, second = (archive.getinfo(f"pytorch_model/data/{n}").header_offset for n in (0, 1))
    content = (tmp_path / PICKLE).read_bytes()
    directory = content.index(b"PK\x01\x02")
    moved = content[directory:].replace(second.to_bytes(4, "little"), first.to_bytes(4, "little"), 1)
    (tmp_path / PICKLE).write_bytes(content[:directory] + moved)
    with pytest.raises(CheckpointError, match="files overlap or leave gaps"):
        found(tmp_path)


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, {"weight": torch.ones(400)})
    (tmp_path / PICKLE).rename(tmp_path / "sound")
    with (
        zipfile.ZipFile(tmp_path / "sound") as sound,
        zipfile.ZipFile(tmp_path / PICKLE, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in sound.namelist():
            packed.writestr(entry, sound.read(entry))
    with pytest.raises(CheckpointError, match="compressed or encrypted files"):
        found(tmp_path)


def test_many_tensors_of_one_storage_are_bounded(tmp_path: Path) -> None:
    one = torch.ones(4000)
    assert len(saved(tmp_path, {f"weight {n}": one for n in range(3)})) == 3
    with pytest.raises(CheckpointError, match="more than 4 times as many"):
        saved(tmp_path, {f"weight {n}": one for n in range(6)})


def test_pickles_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opcodes, "MAX_OPCODES", 20)
    with pytest.raises(CheckpointError, match="more than 20 opcodes, the limit"):
        saved(tmp_path, {"weight": torch.ones(4)})
    monkeypatch.setattr(pickled, "MAX_PICKLE", 50)
    with pytest.raises(CheckpointError, match="the limit is 50"):
        found(tmp_path)


def test_a_file_of_another_byte_order_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="stores the highest byte first"):
        altered(tmp_path, b"little", b"bigbig")


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


def test_a_damaged_archive_and_a_missing_shard_are_named(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(PICKLED), tmp_path / "damaged"))
    shard = folder / "pytorch_model-00002-of-00002.bin"
    shard.write_bytes(shard.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=r"00002-of-00002.bin is cut off"):
        open_checkpoint(str(folder), allow_pickle=True)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002.bin is missing"):
        open_checkpoint(str(folder), allow_pickle=True)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../evil.bin"}}))
    with pytest.raises(CheckpointError, match="not a file name inside it"):
        open_checkpoint(str(folder), allow_pickle=True)
