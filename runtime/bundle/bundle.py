"""A bundle on disk: its manifest, its files, and whether they are what they were at export."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vtx.runtime.bundle.manifest import MAX_BYTES, Manifest
from vtx.runtime.errors import BundleError

MANIFEST = "vtx.json"
BLOCK = 1 << 22
QUICK_BYTES = 64 << 20  # files up to this size are hashed whole at every load


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle. `folder` is absolute; nothing outside it is read."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, check: bool = True) -> Bundle:
        """Read the manifest and check every file's presence and size, and the checksums of small files.

        `check=False` leaves the files alone, for a caller that verifies them itself. Large files are
        hashed by `verify` only.

        Raises:
            BundleError: no bundle, a damaged or hostile one, or one from another version.

        """
        try:
            path = Path(folder).expanduser().absolute()
            bundle = cls(path, _read_manifest(path))
        except (OSError, RuntimeError) as e:
            raise BundleError(f"{folder} cannot be read ({_reason(e)}); check its name and permissions") from e
        if check:
            for name in bundle.manifest.files:
                bundle._check(name, whole=False)
        return bundle

    def path(self, name: str) -> Path:
        return self.folder / name

    def verify(self, progress: Callable[[int], None] = lambda _: None) -> Iterator[tuple[str, str | None]]:
        """Hash every file: (name, None) where it is as exported, else (name, what is wrong)."""
        for name in self.manifest.files:
            try:
                self._check(name, whole=True, progress=progress)
            except BundleError as e:
                yield name, str(e)
            else:
                yield name, None

    def _check(self, name: str, *, whole: bool, progress: Callable[[int], None] = lambda _: None) -> None:
        try:
            self._compare(name, self.folder / name, whole, progress)
        except (OSError, RuntimeError) as e:
            raise BundleError(f"{name} cannot be read ({_reason(e)}); check its permissions") from e

    def _compare(self, name: str, path: Path, whole: bool, progress: Callable[[int], None]) -> None:
        record, cure = self.manifest.files[name], "copy the bundle again, or export it again"
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise BundleError(f"{name} is a link that leaves the bundle; do not use this bundle")
        if not path.is_file():
            raise BundleError(f"{name} is missing from the bundle {self.folder}; {cure}")
        size = path.stat().st_size
        if size != record.bytes:
            raise BundleError(f"{name} holds {size:,} bytes, the manifest says {record.bytes:,}; {cure}")
        if (whole or size <= QUICK_BYTES) and sha256(path, progress) != record.sha256:
            raise BundleError(f"{name} was altered after the export (its SHA-256 differs); {cure}")


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not folder.is_dir():
        raise BundleError(f"{folder} is no directory; make a bundle with vtx-export --out {folder.name}")
    if not path.is_file():
        raise BundleError(f"{folder} holds no {MANIFEST}, so it is no bundle; make one with vtx-export")
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise BundleError(f"{MANIFEST} holds {size:,} bytes, the limit is {MAX_BYTES:,}; export again")
    return Manifest.from_json(path.read_bytes())


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def sha256(path: Path, progress: Callable[[int], None] = lambda _: None) -> str:
    """Hex SHA-256 of a file, read in blocks; `progress` gets the bytes of each."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
                progress(len(block))
    except OSError as e:
        raise BundleError(f"{path} cannot be read ({e.strerror}); check its permissions") from e
    return digest.hexdigest()
