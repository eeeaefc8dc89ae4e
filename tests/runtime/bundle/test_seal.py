"""`vtx.json` is vouched for: any edit is refused, and where a signature is required nothing unsigned is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

import vtx
from tests.support import bundles
from tests.support.fixtures import Checkpoints
from tests.support.json_files import write_json
from tests.support.keys import PEM, PKCS8, export_signed, write_keys
from tests.support.tiny import random_image
from vtx import cli
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.bundle import bundle as bundle_module
from vtx.runtime.bundle import seal
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.fingerprint import EngineSet, read_engines
from vtx.runtime.bundle.seal import PublicKey, SigningKey
from vtx.runtime.errors import BundleError, DeviceError, RequestError


@pytest.fixture(scope="module")
def whole(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory, keys: tuple[Path, Path]) -> Path:
    return export_signed(
        ExportOptions(str(tiny_checkpoint()), (3,), "fp32", dialects=("ort",)),
        tmp_path_factory.mktemp("bundle") / "signed",
        keys[0],
    )


def edits(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every value of a JSON text, each changed a little."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from edits(item, (*path, key))
    elif isinstance(value, list):
        for key, item in enumerate(value):
            yield from edits(item, (*path, key))
    elif isinstance(value, bool) or value is None:
        yield path, not value
    elif isinstance(value, int | float):
        yield path, value + 1
    else:
        yield path, value[:-1] + chr(ord(value[-1:] or "a") ^ 1)


def changed(value: Any, path: tuple[str | int, ...], item: Any) -> Any:
    copy = json.loads(json.dumps(value))
    target = copy
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = item
    return copy


@pytest.mark.slow
def test_an_edit_of_a_single_value_of_the_manifest_is_refused_wherever_it_is(folder: Path) -> None:
    value = bundles.manifest(folder)
    trials = list(edits(value))
    assert len(trials) > 90
    for path, item in trials[:: len(trials) // 90]:
        (folder / "vtx.json").write_text(json.dumps(changed(value, path, item), indent=1))
        with pytest.raises(BundleError, match=r"vtx\.json was altered"):
            Bundle.open(folder)


def test_the_checksum_is_what_sha256sum_checks(folder: Path) -> None:
    done = subprocess.run(["sha256sum", "-c", "vtx.json.sha256"], cwd=folder, capture_output=True, text=True)
    assert done.stdout == "vtx.json: OK\n"


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"0" * 64 + b"  vtx.json\n", b"x" * 5000])
def test_a_damaged_checksum_is_refused(folder: Path, content: bytes) -> None:
    (folder / "vtx.json.sha256").write_bytes(content)
    with pytest.raises(BundleError, match=r"vtx\.json"):
        Bundle.open(folder)


def test_a_checksum_with_anything_else_in_it_is_refused(folder: Path) -> None:
    path = folder / "vtx.json.sha256"
    for content in (path.read_bytes() + b"\0", path.read_bytes().replace(b"json", b"jsom")):
        path.write_bytes(content)
        with pytest.raises(BundleError, match=r"vtx\.json was altered"):
            Bundle.open(folder)


def test_a_missing_checksum_is_named(folder: Path) -> None:
    (folder / "vtx.json.sha256").unlink()
    with pytest.raises(BundleError, match=r"vtx\.json\.sha256 is missing"):
        Bundle.open(folder)


def test_a_bundle_of_an_older_format_says_so_rather_than_that_its_checksum_is_missing(folder: Path) -> None:
    (folder / "vtx.json.sha256").unlink()
    write_json(folder / "vtx.json", {**bundles.manifest(folder), "format": 1})
    with pytest.raises(BundleError, match="older than this vtx reads"):
        Bundle.open(folder)


# ---- signatures ------------------------------------------------------------------------------------------------------


def test_a_signed_bundle_answers_with_and_without_asking_for_its_signature(
    folder: Path, keys: tuple[Path, Path]
) -> None:
    for required in (None, keys[1]):
        model = vtx.load(folder, threads=1, device="cpu", require_signature=required)
        assert model.ask("what is it?", options=vtx.Options(max_new_tokens=1)).token_ids


@pytest.mark.parametrize(
    "words", [("run", "none.png", "red?"), ("chat",), ("batch", "q.jsonl", "a.jsonl"), ("serve", "--port", "0")]
)
def test_commands_that_answer_require_a_signature(
    folder: Path, keys: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    if words[0] == "serve":
        pytest.importorskip("uvicorn", reason="needs vtx-edge[serve]")
    monkeypatch.chdir(tmp_path)
    random_image(0).save("none.png")
    Path("q.jsonl").write_text('{"question": "red?"}\n')
    (folder / "vtx.json.sig").unlink()
    done = CliRunner().invoke(
        cli.main, [*words, "--bundle", str(folder), "--device", "cpu", "--require-signature", str(keys[1])]
    )
    assert done.exit_code == 1
    assert "is not signed, and a signature by" in done.stderr


def test_a_forger_who_renews_the_checksum_is_refused_before_the_manifest_is_parsed(
    folder: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = (folder / "vtx.json.sig").read_bytes()
    bundles.write_manifest(folder, {**bundles.manifest(folder), "max_context": 40})
    (folder / "vtx.json.sig").write_bytes(signature)
    monkeypatch.setattr(bundle_module, "parse_manifest", lambda *_: pytest.fail("the manifest was parsed"))
    with pytest.raises(BundleError, match="altered, or signed with another key"):
        vtx.load(folder, threads=1, require_signature=keys[1])


def test_another_s_signature_is_refused(folder: Path, tmp_path: Path) -> None:
    _, other = write_keys(tmp_path / "keys", "other", ed25519.Ed25519PrivateKey.generate())
    with pytest.raises(BundleError, match=r"does not fit it and other\.pub\.pem"):
        vtx.load(folder, threads=1, require_signature=other)


@pytest.mark.parametrize("content", [None, b"", b"x" * 63, b"x" * 64, b"x" * 65])
def test_a_missing_or_damaged_signature_is_refused(
    folder: Path, keys: tuple[Path, Path], content: bytes | None
) -> None:
    if content is None:
        (folder / "vtx.json.sig").unlink()
    else:
        (folder / "vtx.json.sig").write_bytes(content)
    with pytest.raises(BundleError, match=r"vtx\.json"):
        vtx.load(folder, threads=1, require_signature=keys[1])


def test_a_required_signature_covers_large_files(
    folder: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_module, "QUICK_BYTES", 1000)
    name = next(name for name in bundles.manifest(folder)["files"] if name.startswith("weights/"))
    bundles.flip(folder / name)
    Bundle.open(folder)
    with pytest.raises(BundleError, match=f"{name} was altered"):
        Bundle.open(folder, key=PublicKey.load(keys[1]))


def test_a_new_manifest_leaves_no_stale_signature(folder: Path) -> None:
    bundles.write_manifest(folder, bundles.manifest(folder))
    assert not (folder / "vtx.json.sig").exists()


def test_openssl_checks_the_signature(folder: Path, keys: tuple[Path, Path]) -> None:
    words = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(keys[1]), "-rawin", "-in", "vtx.json"]
    try:
        done = subprocess.run([*words, "-sigfile", "vtx.json.sig"], cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no openssl here")
    assert done.returncode == 0, done.stderr


def test_engines_need_a_signature_of_their_own_where_one_is_required(folder: Path, keys: tuple[Path, Path]) -> None:
    engines = EngineSet(1, "sm89", "tensorrt_rtx", "1.7.1", (8, 9), "trt", "fp32", None, {})
    record = folder / "engines/sm89/engines.json"
    record.parent.mkdir(parents=True)
    signed = Bundle.open(folder, key=PublicKey.load(keys[1]))
    seal.write_sealed(record, engines.to_json().encode())
    assert read_engines(Bundle.open(folder), "sm89") == engines
    with pytest.raises(BundleError, match="is not signed"):
        read_engines(signed, "sm89")
    seal.write_sealed(record, engines.to_json().encode(), SigningKey.load(keys[0]))
    assert read_engines(signed, "sm89") == engines
    record.write_text(engines.to_json().replace("1.7.1", "1.7.2"))
    for bundle in (signed, Bundle.open(folder)):
        with pytest.raises(BundleError, match="altered"):
            read_engines(bundle, "sm89")


@pytest.mark.parametrize("kind", ["garbage", "rsa", "encrypted", "public", "missing", "directory"])
def test_a_key_that_cannot_sign_is_one_line(tmp_path: Path, kind: str) -> None:
    key: Any = ed25519.Ed25519PrivateKey.generate()
    private, public = write_keys(tmp_path, "k", key)
    if kind == "garbage":
        private.write_bytes(b"\x00garbage")
    elif kind == "rsa":
        private, public = write_keys(tmp_path, "k", rsa.generate_private_key(65537, 1024))
    elif kind == "encrypted":
        private.write_bytes(key.private_bytes(PEM, PKCS8, serialization.BestAvailableEncryption(b"word")))
    elif kind == "public":
        private = public
    elif kind == "missing":
        private.unlink()
    else:
        private = tmp_path
    with pytest.raises(RequestError, match=r"Ed25519|PEM|encrypted|No such file|directory") as caught:
        SigningKey.load(private)
    assert "\n" not in str(caught.value)
    if kind == "rsa":
        with pytest.raises(RequestError, match="not an Ed25519 key"):
            PublicKey.load(public)


def test_without_the_library_the_extra_is_named(keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(DeviceError, match=r'pip install "vtx-edge\[sign\]"'):
        PublicKey.load(keys[1])


def test_sealing_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seal.write_sealed(tmp_path / "a.json", b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        seal.write_sealed(tmp_path / "a.json", b"new")
    assert {path.name for path in tmp_path.iterdir()} == {"a.json"}  # without its checksum it is not accepted
