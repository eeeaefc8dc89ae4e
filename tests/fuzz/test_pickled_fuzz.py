"""Whatever a file of torch.save holds, its tensors lie inside it, or it is refused with one line that names it."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fuzzing import damaged, fuzz, one_line
from vtx.exporter.checkpoint.original.pickled import located
from vtx.exporter.checkpoint.original.saved_child import table
from vtx.runtime.bundle.safetensors import TensorInfo, read_bits
from vtx.runtime.errors import CheckpointError, VtxError


def _saved() -> bytes:
    file, matrix = BytesIO(), torch.arange(6.0).reshape(2, 3)
    torch.save({"a": matrix, "b": matrix[1:].half(), "c": torch.nn.Parameter(matrix[:1])}, file)
    return file.getvalue()


ARCHIVE = _saved()
PICKLE = ARCHIVE[ARCHIVE.index(b"\x80\x02") : ARCHIVE.index(b"PK\x07\x08")]
OPCODES = [
    bytes([code])
    for code in b"(.0125FGIJKLMNPQRSTUVX]abcdeghijlopqrstu}\x80\x81\x82\x85\x86\x87\x88\x89\x8a\x8b\x8c\x93\x94"
]
NAMES = [
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch\nFloatStorage\n",
    b"ccollections\nOrderedDict\n",
    b"cos\nsystem\n",
]
PARTS = st.sampled_from([*OPCODES, *NAMES, b"K\x03", b"h\x00", b"q\x00", b"X\x07\x00\x00\x00storage", b")", b"}"])


def tensors(path: Path) -> dict[str, TensorInfo]:
    with path.open("rb") as file:
        return located(table(file, path.name), path, os.fstat(file.fileno()))


def attack(content: bytes, path: Path) -> None:
    """Read every tensor of a file, which lies inside it; nothing but a VtxError of one line is raised."""
    path.write_bytes(content)
    try:
        infos = tensors(path)
    except VtxError as error:
        one_line(error)
        return
    for info in infos.values():
        assert 0 <= info.offset <= info.offset + info.nbytes <= len(content)
        assert read_bits(info).shape == info.shape


def with_pickle(pickle: bytes) -> bytes:
    """The sound archive with these bytes instead of the first of its pickle."""
    return ARCHIVE.replace(PICKLE, pickle[: len(PICKLE)].ljust(len(PICKLE), b"."))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "pytorch_model.bin"


def test_the_sound_file_is_read(path: Path) -> None:
    path.write_bytes(ARCHIVE)
    assert set(tensors(path)) == {"a", "b", "c"}


@fuzz
@given(content=damaged(ARCHIVE))
def test_a_damaged_archive(content: bytes, path: Path) -> None:
    attack(content, path)


@fuzz
@given(changed=damaged(PICKLE))
def test_a_damaged_pickle_in_a_sound_archive(changed: bytes, path: Path) -> None:
    attack(with_pickle(changed), path)


@fuzz
@given(parts=st.lists(PARTS, max_size=40))
def test_any_opcodes(parts: list[bytes], path: Path) -> None:
    attack(with_pickle(b"\x80\x02" + b"".join(parts)), path)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "deep",
    [b"(" * 10**5, b"N" + b"\x85" * 10**5, b"]" * 10**5 + b"a" * (10**5 - 1), b"})" + b"\x85" * 10**5 + b"Ns"],
    ids=["marks", "tuples", "lists", "a tuple as a name"],
)
def test_deep_pickles_end_in_one_line(deep: bytes, path: Path) -> None:
    file = BytesIO()
    torch.save({"text": "x" * (len(deep) + 200)}, file)
    content = file.getvalue()
    start = content.index(b"\x80\x02")
    pickle = b"\x80\x02" + deep + b"."
    path.write_bytes(content[:start] + pickle + content[start + len(pickle) :])
    with pytest.raises(CheckpointError, match="use a checkpoint in safetensors"):
        tensors(path)
