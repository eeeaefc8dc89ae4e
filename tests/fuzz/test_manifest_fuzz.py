"""Whatever stands in a `vtx.json`, even with a checksum to match, it is read, or refused with one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import bundles
from tests.support.fixtures import Checkpoints
from tests.support.fuzzing import cases, damaged, fuzz, one_line
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.seal import write_sealed
from vtx.runtime.errors import VtxError

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.floats(), st.text(max_size=12),
    st.sampled_from(["../x", "/etc/passwd", "\x1b[31m", "a\0b", 0, 1, 2**31, 2**63, [], {}, [[]], "ort"]),
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = bundles.export(tiny_checkpoint(), tmp_path_factory.mktemp("fuzz") / "bundle", (3,)).folder
    shutil.copyfile(bundle / "vtx.json", bundle / "sound.json")
    return bundle


@pytest.fixture(scope="module")
def sound(folder: Path) -> bytes:
    return (folder / "sound.json").read_bytes()


def attack(content: bytes, folder: Path) -> None:
    """Open the bundle with `content` as its manifest; nothing but a VtxError of one line is raised."""
    write_sealed(folder / "vtx.json", content)
    try:
        opened = Bundle.open(folder)
    except VtxError as error:
        one_line(error)
    else:
        assert all(not Path(name).is_absolute() and ".." not in name.split("/") for name in opened.manifest.files)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, item in items for deeper in paths(item, (*path, key)))]


@pytest.mark.parametrize("case", cases("manifest"), ids=lambda case: case.name)
def test_what_was_found_before(case: Path, folder: Path) -> None:
    attack(case.read_bytes(), folder)


@fuzz
@given(data=st.data())
def test_damaged_text(data: st.DataObject, folder: Path, sound: bytes) -> None:
    attack(data.draw(damaged(sound)), folder)


@pytest.mark.slow
@fuzz
@given(data=st.data(), removed=st.booleans(), value=VALUES)
def test_a_value_replaced_or_removed(
    data: st.DataObject, removed: bool, value: Any, folder: Path, sound: bytes
) -> None:
    manifest = json.loads(sound)
    *outer, last = data.draw(st.sampled_from(paths(manifest)[1:]))
    target = manifest
    for key in outer:
        target = target[key]
    if removed:
        del target[last]
    else:
        target[last] = value
    attack(json.dumps(manifest).encode(), folder)
