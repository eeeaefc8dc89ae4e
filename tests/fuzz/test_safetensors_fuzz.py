"""Whatever bytes a safetensors file holds, it is read as by its library, or refused with one line that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fuzzing import cases, damaged, fuzz, one_line
from vtx.runtime.bundle.safetensors import DTYPES, layout, read_bits, read_header, unpack
from vtx.runtime.errors import BundleError, VtxError

SOUND = b"".join(
    [layout(Path("m"), [("a", "F32", (2, 3)), ("b", "BF16", (4,)), ("c", "I8", (0, 2))], {"k": "v"})[0], bytes(32)]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
SIZES = st.integers(0, 24) | st.sampled_from([-1, 2**31, 2**53, 2**62, 2**63 - 1, 2**64, 1.0, True, None, "1"])
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "f32", "F128", ""]) | st.integers(),
        "shape": st.lists(SIZES, max_size=4) | st.just([1] * 40) | st.none(),
        "data_offsets": st.lists(SIZES, max_size=3) | st.text(max_size=3),
    },
    optional={"more": VALUES},
)


STRICTER = ("is duplicated", "not described", "at most 32", "more bytes than any", "nested")  # as its docstring says


def attack(content: bytes, path: Path) -> None:
    """Read `content` in both ways; they and the library agree, and nothing but a VtxError of one line is raised."""
    path.write_bytes(content)
    outcomes: list[Any] = []
    for read in (lambda: unpack(content, "m", error=BundleError), lambda: _read(path)):
        try:
            outcomes.append(read())
        except VtxError as error:
            one_line(error)
            outcomes.append(None)
    one, other = outcomes
    assert (one is None) == (other is None)
    for name, array in (one or {}).items():
        assert array.dtype == other[name].dtype
        assert array.tobytes() == other[name].tobytes()
    _compare(content, path)


def _read(path: Path) -> dict[str, Any]:
    return {name: read_bits(info) for name, info in read_header(path, error=BundleError).tensors.items()}


def _of_library(content: bytes) -> dict[str, Any] | None:
    try:
        found = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        return None
    tensors = {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in found}
    return tensors if len(tensors) == len(found) else None


def _compare(content: bytes, path: Path) -> None:
    """The library's word for what is sound; ours may be stricter."""
    expected = _of_library(content)
    try:
        tensors = read_header(path).tensors.values()
    except VtxError as error:
        sound = None
        excused = any(word in str(error) for word in STRICTER)
    else:
        sound = {i.name: (i.dtype, list(i.shape), content[i.offset :][: i.nbytes]) for i in tensors}
        excused = b"-0" in content  # an integer to Python's json, a float to the library
    assert sound == expected or (excused and None in (sound, expected))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "m.safetensors"


@pytest.mark.parametrize("case", cases("safetensors"), ids=lambda case: case.name)
def test_what_was_found_before(case: Path, path: Path) -> None:
    attack(case.read_bytes(), path)


@fuzz
@given(content=damaged(SOUND))
def test_a_damaged_file(content: bytes, path: Path) -> None:
    attack(content, path)


def of_header(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.slow
@fuzz
@given(
    header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]) | st.text(max_size=8), ENTRIES | VALUES),
    data=st.binary(max_size=64),
)
def test_any_header(header: dict[str, Any], data: bytes, path: Path) -> None:
    attack(of_header(header, data), path)


@st.composite
def sound_files(draw: st.DrawFn) -> bytes:
    """Headers whose offsets fit, so that fuzzing gets past the first check; one in a while is shifted by one."""
    header: dict[str, object] = {}
    offset = 0
    for name in draw(st.lists(st.text(max_size=4), unique=True, max_size=5)):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        size = int(np.prod(shape, dtype=int)) * DTYPES[dtype][0] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size + draw(st.sampled_from([0] * 20 + [-1, 1]))
    return of_header(header, b"\1" * max(0, offset + draw(st.sampled_from([0] * 10 + [-1, 1]))))


@fuzz
@given(content=sound_files())
def test_nearly_sound_files(content: bytes, path: Path) -> None:
    attack(content, path)


@fuzz
@given(content=st.binary(max_size=200), length=st.integers(0, 2**64 - 1))
def test_any_bytes(content: bytes, length: int, path: Path) -> None:
    attack(length.to_bytes(8, "little") + content, path)
    attack(len(content).to_bytes(8, "little") + content, path)
