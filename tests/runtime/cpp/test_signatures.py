"""Signatures in C++: what Python accepts is accepted, and what it refuses is refused in the same words."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

import vtx
from tests.support import bundles
from tests.support.cpp import BUILD, ask, needs_cpp, run
from tests.support.fixtures import Checkpoints
from tests.support.keys import export_signed, write_keys
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.bundle.bundle import QUICK_BYTES, Bundle, seal_manifest
from vtx.runtime.bundle.fingerprint import EngineSet, read_engines
from vtx.runtime.bundle.seal import SIGNATURE, PublicKey, SigningKey, write_sealed
from vtx.runtime.bundle.spec.manifest import BundleRelease
from vtx.runtime.errors import BundleError, VtxError

pytestmark = needs_cpp


@pytest.fixture(scope="module")
def signed(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory, keys: tuple[Path, Path]) -> Path:
    return export_signed(
        ExportOptions(str(tiny_checkpoint()), (3,), "fp32", dialects=("ort", "trt")),
        tmp_path_factory.mktemp("bundle") / "signed",
        keys[0],
    )


@pytest.fixture
def folder(signed: Path, tmp_path: Path) -> Path:
    return bundles.copy(signed, tmp_path / "bundle")


def refusal(folder: Path, key: Path, *more: str, **variables: str) -> str:
    """The one line with which vtx-cpp-run ends."""
    command = [BUILD / "vtx-cpp-run", "--bundle", folder, "--text-only", "Who?", "--require-signature", key, *more]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env={**os.environ, **variables})
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    return line.removeprefix("Error: ")


def check_same_refusal(folder: Path, key: Path, message: str) -> None:
    """Both runtimes must refuse the bundle in the same words, `message` among them."""
    with pytest.raises(VtxError) as python:
        vtx.load(folder, device="cpu", threads=1, require_signature=key)
    assert message in str(python.value)
    assert refusal(folder, key) == str(python.value)


def test_a_signed_bundle_answers_with_and_without_asking_for_its_signature(
    signed: Path, keys: tuple[Path, Path]
) -> None:
    question = ("--text-only", "Who are you?", "--max-new-tokens", "4")
    required, free = ask(signed, *question, "--require-signature", keys[1]), ask(signed, *question)
    assert required[0]["token_ids"] == free[0]["token_ids"]
    assert required[0]["token_ids"]


def test_a_forger_who_renews_the_checksum_is_refused_before_the_manifest_is_parsed(
    folder: Path, keys: tuple[Path, Path]
) -> None:
    signature = (folder / "vtx.json.sig").read_bytes()
    write_sealed(folder / "vtx.json", b"this is not even JSON")
    (folder / "vtx.json.sig").write_bytes(signature)
    assert b"is not sound JSON" in run("run", "--bundle", folder, "--text-only", "Who?").stderr
    check_same_refusal(folder, keys[1], "the signature of vtx.json does not fit it and ours.pub.pem")


def test_the_signature_of_somebody_else_is_refused(folder: Path, tmp_path: Path) -> None:
    _, other = write_keys(tmp_path / "keys", "other", ed25519.Ed25519PrivateKey.generate())
    check_same_refusal(folder, other, "it was altered, or signed with another key; do not use this bundle")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not signed, and a signature by ours.pub.pem is required; use a signed bundle"),
        (b"", "does not fit it"),
        (b"x" * 63, "does not fit it"),
        (b"\0" * 64, "does not fit it"),
        (b"x" * 65, "vtx.json.sig holds 65 bytes, the limit for such a file is 64"),
    ],
)
def test_a_missing_or_damaged_signature_is_refused(
    folder: Path, keys: tuple[Path, Path], content: bytes | None, message: str
) -> None:
    path = folder / f"vtx.json{SIGNATURE}"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    check_same_refusal(folder, keys[1], message)


def test_a_file_that_was_altered_after_signing_is_refused(folder: Path, keys: tuple[Path, Path]) -> None:
    bundles.flip(folder / "tokenizer.json")
    check_same_refusal(folder, keys[1], "tokenizer.json was altered after the export")


def test_a_required_signature_covers_large_files(folder: Path, keys: tuple[Path, Path]) -> None:
    [weights] = folder.glob("weights/*")
    with weights.open("r+b") as file:
        file.truncate(QUICK_BYTES + 1)
    bundles.reseal(folder, str(weights.relative_to(folder)))
    write_sealed(folder / "vtx.json", (folder / "vtx.json").read_bytes(), SigningKey.load(keys[0]))
    with weights.open("r+b") as file:
        file.seek(QUICK_BYTES)
        file.write(b"x")
    assert ask(folder, "--text-only", "Who?", "--max-new-tokens", "1")
    assert f"{weights.relative_to(folder)} was altered after the export" in refusal(folder, keys[1])


def test_engines_need_a_signature_of_their_own(folder: Path, keys: tuple[Path, Path]) -> None:
    record = folder / "engines/sm89/engines.json"
    record.parent.mkdir(parents=True)
    engines = EngineSet(1, "sm89", "tensorrt_rtx", "1.7.1", (8, 9), "trt", "fp32", None, {}).to_json().encode()
    write_sealed(record, engines)
    with pytest.raises(BundleError, match="is not signed") as python:
        read_engines(Bundle.open(folder, key=PublicKey.load(keys[1])), "sm89")
    assert refusal(folder, keys[1], "--device", "tensorrt") == str(python.value)
    write_sealed(record, engines, SigningKey.load(keys[0]))
    assert "sign" not in refusal(folder, keys[1], "--device", "tensorrt")  # it goes on, and misses something else
    record.write_bytes(engines.replace(b"1.7.1", b"1.7.2"))
    assert "does not fit it and ours.pub.pem" in refusal(folder, keys[1], "--device", "tensorrt")


@pytest.mark.parametrize("kind", ["garbage", "rsa", "private", "missing", "directory", "large"])
def test_a_key_that_cannot_verify_is_refused(signed: Path, tmp_path: Path, kind: str) -> None:
    key: Any = rsa.generate_private_key(65537, 1024) if kind == "rsa" else ed25519.Ed25519PrivateKey.generate()
    private, public = write_keys(tmp_path / "keys", "k", key)
    if kind == "garbage":
        public.write_bytes(b"\0garbage")
    elif kind == "private":
        public = private
    elif kind == "missing":
        public.unlink()
    elif kind == "directory":
        public = tmp_path
    elif kind == "large":
        public.write_bytes(b"x" * 70_000)
    check_same_refusal(signed, public, str(public))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to make another library with")
def test_without_libcrypto_it_is_named_with_where_it_was_looked_for(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "other.c").write_text("int nothing;")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "other.so", tmp_path / "other.c"], check=True)
    for name, reason in (("missing.so", "missing.so"), ("other.so", "is too old or another library")):
        line = refusal(signed, keys[1], VTX_LIBCRYPTO=str(tmp_path / name))
        assert line.startswith("signatures need OpenSSL's libcrypto, 1.1.1 or newer, which was not found (")
        assert reason in line
        assert "name its library in VTX_LIBCRYPTO" in line


def test_releases_are_noted_and_refused_as_in_python(
    folder: Path, keys: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either runtime refuses what is older than a release that the other one has answered with."""
    monkeypatch.setenv("VTX_STATE", str(tmp_path / "state"))
    made = Bundle.open(folder).manifest

    def release(number: int | None, name: str = "kitchen") -> None:
        numbered = None if number is None else BundleRelease(name, number)
        seal_manifest(folder, replace(made, release=numbered), SigningKey.load(keys[0]))

    question = ("--text-only", "Who are you?", "--max-new-tokens", "2", "--require-signature", keys[1])
    release(5)
    ask(folder, *question)
    release(4)
    check_same_refusal(folder, keys[1], "is release 4 of kitchen, and this device has answered with release 5")
    release(None)
    check_same_refusal(folder, keys[1], "has no release number, and this device has answered with bundles of ours")
    release(6)
    with vtx.load(folder, device="cpu", threads=1, require_signature=keys[1]) as model:
        model.open().ask("red?", max_new_tokens=2)
    release(5)
    check_same_refusal(folder, keys[1], "is release 5 of kitchen, and this device has answered with release 6")
    release(1, "hall")
    ask(folder, *question)
    seal_manifest(folder, replace(made, release=BundleRelease("hall", 2, "2999-02-28")), SigningKey.load(keys[0]))
    ask(folder, *question)
    seal_manifest(folder, replace(made, release=BundleRelease("hall", 3, "2020-02-29")), SigningKey.load(keys[0]))
    check_same_refusal(folder, keys[1], "may be used until 2020-02-29, and this device's clock says")
    for wrong in ("2020-02-30", "2021-02-29", "2020-13-01", "2020-1-01", "20200101", "tomorrow", "2020-01-01 ", ""):
        manifest = {**bundles.manifest(folder), "release": {"name": "hall", "number": 3, "until": wrong}}
        bundles.write_manifest(folder, manifest)
        with pytest.raises(BundleError, match="it must be a day"):
            Bundle.open(folder)
        assert b"it must be a day" in run("run", "--bundle", folder, *question[:4]).stderr, wrong
    (tmp_path / "file").write_text("")
    release(7)
    monkeypatch.setenv("VTX_STATE", str(tmp_path / "file"))
    assert b"set VTX_STATE" in run("run", "--bundle", folder, *question).stderr
