"""libvtx passes inputs per token, which stages read in addition to hidden states, on by name as Python does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cpp import DEVICES, assert_answers_equal, needs_cpp, run, write_pictures
from tests.support.exported import THREADS
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json, write_json
from tests.support.token_inputs import export_with_token_inputs
from tests.support.traces import compared
from vtx.runtime.api.load import load

pytestmark = needs_cpp


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("inputs") / "bundle"
    export_with_token_inputs(tiny_checkpoint(), made)
    return made


@pytest.mark.sampled(2)
@DEVICES
def test_traces_meet_those_of_python(folder: Path, tmp_path: Path, device: str) -> None:
    assert compared(folder, tmp_path, device) > 20


def test_answers_equal_those_of_python(folder: Path, tmp_path: Path) -> None:
    pictures = write_pictures(tmp_path, [(60, 60), (31, 80), (77, 20)])
    with load(folder, device="cpu", threads=THREADS) as model:
        assert_answers_equal(model, pictures, ("red?", "What is it?", "What is there?"), ("none", 5, 8))


def test_a_stage_that_reads_what_is_not_declared_is_refused(folder: Path, tmp_path: Path) -> None:
    manifest = read_json(folder / "vtx.json")
    del manifest["token_inputs"]
    assert "stage 1..2 reads token inputs ['bias'], the bundle declares []" in refused(manifest, tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"width": 0}, "a width of 0 must be in 1..16777215 and come from the embedding, the tower or both"),
        ({"of_images": False}, "a width of 64 must be in 1..16777215"),
        ({"name": "bias"}, "token_inputs ['bias', 'bias'] hold a name twice"),
        ({"width": 32}, "interface is"),
        ({"other": 1}, "unknown key 'other'"),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(
    folder: Path, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    manifest = read_json(folder / "vtx.json")
    manifest["token_inputs"][0] |= change
    assert named in refused(manifest, tmp_path)


def refused(manifest: dict[str, Any], folder: Path) -> str:
    write_json(folder / "vtx.json", manifest)
    done = run("probe", "parse", "manifest", folder / "vtx.json")
    assert done.returncode == 1
    return done.stderr.decode()
