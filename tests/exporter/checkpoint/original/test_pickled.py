"""Pickled weights: never opened unasked, and then in a confined process that takes tensors and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny import Tiny
from vtx.exporter.checkpoint.assembly.checkpoint import open_checkpoint
from vtx.exporter.checkpoint.loader import checkpoint_files
from vtx.exporter.checkpoint.original.pickled import PICKLE, pickled_tensors
from vtx.exporter.checkpoint.original.pickled_child import tensors_of
from vtx.runtime.bundle.safetensors import read_bits
from vtx.runtime.errors import CheckpointError

PICKLED = Tiny(family="llava_llama", aspect="pad", pickled=True, shards=2, context=1024)


class Command:
    """What a hostile pickle calls when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder),)


def saved(folder: Path, value: object) -> dict[str, Any]:
    """What vtx finds in a pickle of `value`."""
    torch.save(value, folder / PICKLE)
    return pickled_tensors(checkpoint_files(folder), [PICKLE])[PICKLE]


def test_pickles_are_not_opened_unasked(tiny_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"pytorch_model-00001-of-00002.bin.* is not opened; .*--allow-pickle"):
        open_checkpoint(str(tiny_checkpoint(PICKLED)))


def test_every_tensor_is_read_from_where_it_lies(tmp_path: Path) -> None:
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "whole": whole, "rows of it": whole[1:3], "half": whole.half() / 3, "bits": (whole / 7).bfloat16(),
        "ids": torch.arange(5), "none": torch.empty(0, 3), "one": torch.tensor(2.5),
    }  # fmt: skip
    found = saved(tmp_path, tensors)
    assert {name: info.shape for name, info in found.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    for name, tensor in tensors.items():
        bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        np.testing.assert_array_equal(read_bits(found[name]), bits.numpy())


def test_a_pickle_that_calls_something_is_refused_and_nothing_is_called(tmp_path: Path) -> None:
    target = tmp_path / "called"
    with pytest.raises(CheckpointError, match="holds more than tensors, and what more there is was not run"):
        saved(tmp_path, {"weight": torch.zeros(2), "more": Command(target)})
    assert not target.exists()


@pytest.mark.parametrize(
    ("value", "options"),
    [
        ([torch.zeros(2)], {}),
        ({1: torch.zeros(2)}, {}),
        ({"weight": torch.zeros(4, 6).T}, {}),
        ({"weight": torch.zeros(2).to_sparse()}, {}),
        ({"weight": "text"}, {}),
        ({"weight": torch.zeros(2)}, {"_use_new_zipfile_serialization": False}),
    ],
    ids=["list", "number as name", "transposed", "sparse", "text", "no archive"],
)
def test_what_is_no_table_of_plain_tensors_is_refused(tmp_path: Path, value: object, options: dict[str, Any]) -> None:
    torch.save(value, tmp_path / PICKLE, **options)
    with pytest.raises(CheckpointError, match="take a checkpoint in safetensors"):
        tensors_of([str(tmp_path / PICKLE)])


@pytest.mark.slow
def test_a_damaged_archive_and_a_missing_shard_are_named(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(PICKLED), tmp_path / "damaged"))
    shard = folder / "pytorch_model-00002-of-00002.bin"
    shard.write_bytes(shard.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=r"00002-of-00002.bin is damaged"):
        open_checkpoint(str(folder), allow_pickle=True)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002.bin is missing"):
        open_checkpoint(str(folder), allow_pickle=True)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../evil.bin"}}))
    with pytest.raises(CheckpointError, match="not a file name inside it"):
        open_checkpoint(str(folder), allow_pickle=True)
