"""Whatever a file of torch.save holds, its tensors lie inside it, or it is refused with one line that names it."""

from __future__ import annotations

import contextlib
from io import BytesIO
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fuzzing import cases, damaged, fuzz, one_line
from vtx.exporter.checkpoint.original import opcodes
from vtx.exporter.checkpoint.original.opcodes import read_value
from vtx.exporter.checkpoint.original.pickled import tensors_of
from vtx.runtime.bundle.safetensors import read_bits
from vtx.runtime.errors import CheckpointError, VtxError


def _saved(*, archive: bool) -> bytes:
    file, whole = BytesIO(), torch.arange(6.0).reshape(2, 3)
    tensors = {"a": whole, "b": whole[1:].half(), "c": torch.nn.Parameter(whole[:1])}
    torch.save(tensors, file, _use_new_zipfile_serialization=archive)
    return file.getvalue()


ARCHIVE, OLD = _saved(archive=True), _saved(archive=False)
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


def attack(content: bytes, path: Path) -> None:
    """Read every tensor of a file, which lies inside it; nothing but a VtxError of one line is raised."""
    path.write_bytes(content)
    try:
        with path.open("rb") as file:
            tensors = tensors_of(file, path)
    except VtxError as error:
        one_line(error)
        return
    for info in tensors.values():
        assert 0 <= info.offset <= info.offset + info.nbytes <= len(content)
        assert read_bits(info).shape == info.shape


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "pytorch_model.bin"


@pytest.mark.parametrize("case", cases("pickled"), ids=lambda case: case.name)
def test_what_was_found_before(case: Path, path: Path) -> None:
    attack(case.read_bytes(), path)


def test_the_sound_files_are_read(path: Path) -> None:
    for content in (ARCHIVE, OLD):
        path.write_bytes(content)
        with path.open("rb") as file:
            assert set(tensors_of(file, path)) == {"a", "b", "c"}


@fuzz
@given(content=damaged(ARCHIVE))
def test_a_damaged_archive(content: bytes, path: Path) -> None:
    attack(content, path)


@fuzz
@given(content=damaged(OLD))
def test_a_damaged_file_of_an_older_torch(content: bytes, path: Path) -> None:
    attack(content, path)


@fuzz
@given(changed=damaged(PICKLE))
def test_a_damaged_pickle_in_a_sound_archive(changed: bytes, path: Path) -> None:
    attack(ARCHIVE.replace(PICKLE, changed[: len(PICKLE)].ljust(len(PICKLE), b".")), path)


@fuzz
@given(parts=st.lists(PARTS, max_size=40))
def test_any_opcodes(parts: list[bytes]) -> None:
    """A value of our own kinds, or a ValueError."""
    with contextlib.suppress(ValueError):
        assert type(read_value(BytesIO(b"".join(parts) + b"."))).__module__ in ("builtins", opcodes.__name__)


@pytest.mark.parametrize(
    "deep",
    [b"(" * 10**6, b"N" + b"\x85" * 10**6, b"]" * 10**6 + b"a" * (10**6 - 1), b"})" + b"\x85" * 10**6 + b"Ns"],
    ids=["marks", "tuples", "lists", "a tuple as a name"],
)
def test_deep_pickles_end_in_one_line(deep: bytes, path: Path) -> None:
    pickle = b"\x80\x02" + deep + b"."
    path.write_bytes(OLD[: OLD.index(b"ccollections") - 2] + pickle)
    with path.open("rb") as file, pytest.raises(CheckpointError, match="use a checkpoint in safetensors"):
        tensors_of(file, path)
