"""Whatever bytes a safetensors file holds, it is read, or refused with one line that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fuzzing import cases, damaged, fuzz, one_line
from vtx.runtime.bundle.safetensors import DTYPES, layout, read_bits, read_header, unpack
from vtx.runtime.errors import BundleError, VtxError

SOUND = b"".join(
    [layout(Path("m"), [("a", "F32", (2, 3)), ("b", "BF16", (4,)), ("c", "I8", (0, 2))], {"k": "v"})[0], bytes(32)]
)
NUMBERS = st.integers(-2, 1 << 65) | st.sampled_from([0, 1, 8, 16, 24, 2**31, 2**53, 2**63 - 1, 2**64])
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "f32", ""]) | st.integers(),
        "shape": st.lists(NUMBERS, max_size=4) | st.none(),
        "data_offsets": st.lists(NUMBERS, max_size=3) | st.text(max_size=3),
    }
)


def attack(content: bytes, path: Path) -> None:
    """Read `content` in both ways; they agree, and nothing but a VtxError of one line is raised."""
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


def _read(path: Path) -> dict[str, Any]:
    return {name: read_bits(info) for name, info in read_header(path, error=BundleError).tensors.items()}


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


@fuzz
@given(header=st.dictionaries(st.text(max_size=8), ENTRIES, max_size=4), size=st.integers(0, 64))
def test_any_header(header: dict[str, Any], size: int, path: Path) -> None:
    text = json.dumps(header).encode()
    attack(len(text).to_bytes(8, "little") + text + bytes(size), path)


@fuzz
@given(content=st.binary(max_size=200), length=st.integers(0, 2**64 - 1))
def test_any_bytes(content: bytes, length: int, path: Path) -> None:
    attack(length.to_bytes(8, "little") + content, path)
    attack(len(content).to_bytes(8, "little") + content, path)
