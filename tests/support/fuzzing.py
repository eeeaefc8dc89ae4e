"""What fuzz targets share: how many examples they run, the cases that were found before, and damaged bytes."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from vtx.runtime.errors import VtxError

CASES = Path(__file__).parents[1] / "fuzz" / "cases"
EXAMPLES = os.environ.get("VTX_FUZZ_EXAMPLES")

# Bounded and the same each time in the tests; `make fuzz` runs more, and others each time.
fuzz = settings(
    max_examples=int(EXAMPLES or 50), derandomize=not EXAMPLES, print_blob=bool(EXAMPLES), deadline=None,
    database=None, suppress_health_check=list(HealthCheck),
)  # fmt: skip


def cases(kind: str) -> list[Path]:
    """The files that a target of that name failed on once."""
    return sorted(path for path in (CASES / kind).iterdir() if path.is_file())


def one_line(error: VtxError) -> None:
    """An error that a command prints as one line, without commands to the terminal."""
    assert str(error).isprintable(), error


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` with some of it flipped, removed, repeated, or replaced."""
    result = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(result) - 1)))
        count = draw(st.integers(0, 12))
        match draw(st.integers(0, 3)):
            case 0 if result:
                result[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                del result[at : at + count]
            case 2:
                result[at:at] = result[at : at + count]
            case _:
                result[at : at + count] = draw(st.binary(max_size=12))
    return bytes(result)
