"""Keys that bundles are signed with, as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization

PEM, PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8


def write_keys(folder: Path, name: str, key: Any) -> tuple[Path, Path]:
    """A private and a public key as PEM files."""
    folder.mkdir(exist_ok=True)
    private, public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    private.write_bytes(key.private_bytes(PEM, PKCS8, serialization.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public
