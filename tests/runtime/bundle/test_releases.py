"""BundleRelease numbers: a device that has answered with a newer signed bundle refuses an older one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric import ed25519

import vtx
from tests.support import bundles
from tests.support.fixtures import Checkpoints
from tests.support.keys import export_signed, write_keys
from vtx import cli
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.bundle.bundle import Bundle, seal_manifest
from vtx.runtime.bundle.seal import SigningKey
from vtx.runtime.bundle.spec.manifest import BundleRelease
from vtx.runtime.errors import BundleError, DeviceError


@pytest.fixture(scope="module")
def exported(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory, keys: tuple[Path, Path]) -> Path:
    options = ExportOptions(
        str(tiny_checkpoint()), (3,), "fp32", dialects=("ort",), release=BundleRelease("kitchen", 7)
    )
    out = tmp_path_factory.mktemp("bundle") / "released"
    return export_signed(options, out, keys[0])


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VTX_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def released(exported: Path, tmp_path: Path, keys: tuple[Path, Path]) -> Callable[..., Path]:
    """The bundle as another release, or without one."""

    def made(release: BundleRelease | None, key: Path = keys[0]) -> Path:
        folder = bundles.copy(exported, tmp_path / f"bundle-{len(list(tmp_path.iterdir()))}")
        seal_manifest(folder, replace(Bundle.open(folder).manifest, release=release), SigningKey.load(key))
        return folder

    return made


def answers(folder: Path, key: Path) -> None:
    with vtx.load(folder, device="cpu", threads=1, require_signature=key) as model:
        assert model.open().ask("red?", max_new_tokens=2, ignore_eos=True).token_ids


@pytest.mark.slow
def test_an_older_release_is_refused_once_a_newer_one_has_answered(
    exported: Path, released: Callable[..., Path], keys: tuple[Path, Path], state: Path
) -> None:
    assert Bundle.open(exported).manifest.release == BundleRelease("kitchen", 7)
    older, newer, other = (
        released(BundleRelease("kitchen", 6)),
        released(BundleRelease("kitchen", 10)),
        released(BundleRelease("hall", 1)),
    )
    for folder in (older, exported, newer, newer, other):
        answers(folder, keys[1])
    for folder in (older, exported):
        with pytest.raises(BundleError, match=r"of kitchen, and this device has answered with release 10; use a newer"):
            answers(folder, keys[1])
    for folder in (newer, other):
        answers(folder, keys[1])
    with vtx.load(older, device="cpu", threads=1):
        pass  # nobody asks for a signature
    assert [file.name for file in state.glob("releases/*/*/*")] in (["10", "1"], ["1", "10"])


@pytest.mark.slow
def test_a_bundle_without_a_number_is_refused_once_its_key_has_numbered_ones(
    released: Callable[..., Path], keys: tuple[Path, Path], tmp_path: Path
) -> None:
    none, numbered = released(None), released(BundleRelease("kitchen", 1))
    answers(none, keys[1])
    answers(numbered, keys[1])
    with pytest.raises(BundleError, match="has no release number, and this device has answered with bundles of ours"):
        answers(none, keys[1])
    private, public = write_keys(tmp_path / "keys", "theirs", ed25519.Ed25519PrivateKey.generate())
    answers(released(None, private), public)


def test_a_release_that_was_only_looked_at_or_does_not_load_is_not_noted(
    released: Callable[..., Path], keys: tuple[Path, Path], state: Path
) -> None:
    newer = released(BundleRelease("kitchen", 9))
    Bundle.open(newer, key=SigningKey.load(keys[0]).public)
    with vtx.load(newer, device="cpu", threads=1, require_signature=keys[1]):
        pass
    assert not state.exists()
    answers(released(BundleRelease("kitchen", 8)), keys[1])


def test_a_device_that_cannot_note_a_release_says_so(
    released: Callable[..., Path], keys: tuple[Path, Path], state: Path
) -> None:
    state.write_text("a file")
    with pytest.raises(DeviceError, match="set VTX_STATE"):
        answers(released(BundleRelease("kitchen", 8)), keys[1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--release", "kitchen"], "must be a name and a number, e.g. kitchen=7"),
        (["--release", "kitchen=0", "--sign", "KEY"], "must be a name and a number"),
        (["--release", "kitchen=7"], "--release has no effect without --sign"),
        (["--until", "2027-06-30"], "--until is the end of a release; add --release NAME=N"),
        (["--release", "kitchen=7", "--sign", "KEY", "--until", "soon"], "must be a day, e.g. 2027-06-30"),
    ],
)
def test_a_release_is_a_name_and_a_number_of_a_signed_bundle(
    keys: tuple[Path, Path], words: list[str], message: str
) -> None:
    given = [str(keys[0]) if word == "KEY" else word for word in words]
    done = CliRunner().invoke(cli.export, ["--model", "demo", *given])
    assert done.exit_code != 0
    assert message in done.stderr


def test_a_release_is_refused_after_its_last_day(released: Callable[..., Path], keys: tuple[Path, Path]) -> None:
    today = datetime.now(timezone.utc).date()
    for days in (1, 400):
        answers(released(BundleRelease("kitchen", 8, (today + timedelta(days)).isoformat())), keys[1])
    ended = released(BundleRelease("kitchen", 9, (today - timedelta(1)).isoformat()))
    with pytest.raises(BundleError, match=r"may be used until .*, and this device's clock says .*; use a newer bundle"):
        answers(ended, keys[1])
    with vtx.load(ended, device="cpu", threads=1):
        pass  # nobody asks for a signature


def test_a_manifest_with_an_unsound_release_is_refused(released: Callable[..., Path]) -> None:
    folder = released(BundleRelease("kitchen", 8))
    for wrong in (
        {"name": "", "number": 1},
        {"name": "a", "number": 0},
        {"name": "a"},
        {"name": "x" * 101, "number": 1},
    ):
        bundles.write_manifest(folder, {**bundles.manifest(folder), "release": wrong})
        with pytest.raises(BundleError, match="release"):
            Bundle.open(folder)
