"""Checksums and signatures of `vtx.json` and `engines.json`, which hold the checksums of all other files.

    vtx.json          any bytes
    vtx.json.sha256   SHA-256 of these bytes, as `sha256sum` writes and checks it
    vtx.json.sig      the Ed25519 signature of these bytes, 64 bytes, if the export was given a key

The checksum shows damage. The signature shows who made the bundle; openssl can check it as well.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vtx.runtime.bundle.files import Folder, read_named, replacing
from vtx.runtime.errors import DeviceError, RequestError
from vtx.runtime.installing import install

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

CHECKSUM = ".sha256"
SIGNATURE = ".sig"
MAX_CHECKSUM = 1 << 10
SIGNATURE_BYTES = 64
MAX_KEY = 1 << 16
_MAKE = "openssl genpkey -algorithm ed25519 -out key.pem; openssl pkey -in key.pem -pubout -out public.pem"


@dataclass(frozen=True, slots=True)
class PublicKey:
    """The key that signatures are checked with; `name` is its file's, for messages."""

    name: str
    key: Ed25519PublicKey

    @classmethod
    def load(cls, path: Path) -> PublicKey:
        """Read a PEM file. Raises `RequestError`, or `DeviceError` without the cryptography package."""
        return cls(path.name, _read_key(path, "public"))

    @property
    def fingerprint(self) -> str:
        """The first 128 bits of the SHA-256 of the key itself, in hex."""
        return hashlib.sha256(self.key.public_bytes_raw()).hexdigest()[:32]

    def signed(self, content: bytes, signature: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            self.key.verify(signature, content)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class SigningKey:
    name: str
    key: Ed25519PrivateKey

    @classmethod
    def load(cls, path: Path) -> SigningKey:
        """Read a PEM file. Raises `RequestError`, or `DeviceError` without the cryptography package."""
        return cls(path.name, _read_key(path, "private"))

    @property
    def public(self) -> PublicKey:
        return PublicKey(self.name, self.key.public_key())


def write_sealed(path: Path, content: bytes, key: SigningKey | None = None) -> None:
    """Write `content` behind its checksum, and with a key its signature; an older signature is removed first."""
    unseal(path)
    write_durably(path.with_name(path.name + CHECKSUM), _checksum(content, path.name))
    if key is not None:
        write_durably(path.with_name(path.name + SIGNATURE), key.key.sign(content))
    write_durably(path, content)


def unseal(path: Path) -> None:
    for suffix in (CHECKSUM, SIGNATURE):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def read_sealed(folder: Folder, name: str, limit: int, key: PublicKey | None = None) -> bytes:
    """The content of a sealed file, whose signature is checked first if there is a key, and then its checksum.

    Raises `folder.error` if it is missing, altered, not signed, or signed by somebody else.
    """
    content = folder.read(name, limit, links=False)
    if key is not None:
        if not folder.exists(name + SIGNATURE):
            raise folder.error(
                f"{name} of {folder.path} is not signed, and a signature by {key.name} is required; use a signed "
                "bundle, or make one with --sign KEY"
            )
        if not key.signed(content, folder.read(name + SIGNATURE, SIGNATURE_BYTES, links=False)):
            raise folder.error(
                f"the signature of {name} does not fit it and {key.name}: it was altered, or signed with another key; "
                f"do not use this {folder.kind}"
            )
    if not folder.exists(name + CHECKSUM):
        raise folder.error(f"{name}{CHECKSUM} is missing from the {folder.kind} {folder.path}; {folder.cure}")
    if folder.read(name + CHECKSUM, MAX_CHECKSUM, links=False) != _checksum(content, name.rpartition("/")[2]):
        raise folder.error(f"{name} was altered (its SHA-256 is not the one in {name}{CHECKSUM}); {folder.cure}")
    return content


def _checksum(content: bytes, name: str) -> bytes:
    return f"{hashlib.sha256(content).hexdigest()}  {name}\n".encode()


def write_durably(path: Path, content: bytes) -> None:
    with replacing(path) as partial:
        partial.write_bytes(content)


def _read_key(path: Path, kind: Literal["public", "private"]) -> Any:
    content = read_named(path, MAX_KEY, error=RequestError)
    try:
        import cryptography.exceptions  # noqa: F401 - `PublicKey.signed` needs it
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as cause:
        raise DeviceError(f"signatures need the cryptography package; {install('sign')}") from cause
    try:
        load_private = partial(serialization.load_pem_private_key, password=None)
        key: Any = (serialization.load_pem_public_key if kind == "public" else load_private)(content)
    except TypeError as cause:  # raised by the library without a password
        raise RequestError(f"{path} is encrypted; decrypt it: openssl pkey -in {path} -out plain.pem") from cause
    except Exception as cause:  # ValueError and errors of OpenSSL
        raise RequestError(f"{path} holds no {kind} key in PEM form; make one: {_MAKE}") from cause
    if not isinstance(key, (ed25519.Ed25519PublicKey, ed25519.Ed25519PrivateKey)):
        raise RequestError(f"{path} is not an Ed25519 key; make one: {_MAKE}")
    return key
