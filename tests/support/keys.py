"""Keys as files, and bundles that are signed with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization

from tests.support.bundles import IGNORE
from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.bundle.seal import SigningKey

PEM, PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8


def write_keys(folder: Path, name: str, key: Any) -> tuple[Path, Path]:
    """A private and a public key as PEM files."""
    folder.mkdir(exist_ok=True)
    private, public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    private.write_bytes(key.private_bytes(PEM, PKCS8, serialization.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def export_signed(options: ExportOptions, out: Path, key: Path) -> Path:
    """Export to `out`, signed with that private key."""
    return run_export(plan_export(options), out, force=False, report=IGNORE, sign=SigningKey.load(key)).folder
