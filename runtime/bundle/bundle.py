"""A bundle on disk: its manifest and its files, which must be as they were at export."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from numpy.typing import NDArray

from vtx.runtime.bundle.files import Folder, Identity, digest, open_named, read_all, reason
from vtx.runtime.bundle.safetensors import Header, header_of, unpack
from vtx.runtime.bundle.seal import CHECKSUM, PublicKey, SigningKey, read_sealed, write_sealed
from vtx.runtime.bundle.spec.manifest import MAX_BYTES, Manifest
from vtx.runtime.bundle.vtx_json import parse_manifest, write_manifest
from vtx.runtime.errors import BundleError

MANIFEST = "vtx.json"  # the second by vtx-fit
CARD = "card.json"
QUICK_BYTES = 64 << 20  # files up to this size are hashed whole at every load
CURE = "copy the bundle again, or export it again"


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle. `folder` is absolute; nothing outside it is read. `key` is the one that must have signed it."""

    folder: Path
    manifest: Manifest
    key: PublicKey | None = field(default=None, compare=False)
    _checked: dict[str, Identity] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        m = self.manifest
        depths = ", ".join(map(str, m.variants)) or "none"
        return f"<vtx bundle {self.folder}: {m.model.name}, {m.precision} weights, K {depths}>"

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, check: bool = True, key: PublicKey | None = None) -> Bundle:
        """Read the manifest and check every file's presence and size, and the checksums of small files.

        `check=False` skips the files, for a caller that verifies them itself. Large files are hashed by `verify` only.
        With a `key` the manifest's signature is verified before anything else is read or parsed, and every file is
        hashed, large ones too.

        Raises BundleError: no bundle, a damaged or hostile one, one from another version, not signed by `key`, or of an
        older release than this device has answered with.
        """
        try:
            path = Path(folder).expanduser().absolute()
            if path.is_file():
                raise BundleError(
                    f"{path} is a file; name the bundle's directory, unpack an archive first, or make a bundle with "
                    "vtx-export"
                )
            if not path.is_dir():
                raise BundleError(f"{path} is not a directory; make a bundle with vtx-export --out {path.name}")
            files = Folder(path, "bundle", BundleError, CURE)
            if not files.exists(MANIFEST):
                raise BundleError(f"{path} holds no {MANIFEST}, so it is not a bundle; make one with vtx-export")
            if key is None and not files.exists(MANIFEST + CHECKSUM):  # then it may have an older format
                parse_manifest(files.read(MANIFEST, MAX_BYTES, links=False), os.fspath(path))
            manifest = parse_manifest(read_sealed(files, MANIFEST, MAX_BYTES, key), os.fspath(path))
        except (OSError, RuntimeError, ValueError) as e:
            raise BundleError(f"{folder} cannot be read ({reason(e)}); check its name and permissions") from e
        bundle = cls(path, manifest, key)
        if key is not None:
            from vtx.runtime.bundle.releases import check_release

            check_release(manifest.release, key, f"the bundle {path}")
        if check:
            for name in bundle.manifest.files:
                bundle.check_file(name, whole=key is not None)
        return bundle

    def note_release(self) -> None:
        """Note that answers are computed with it, if it is signed and has a release number."""
        if self.key is not None and self.manifest.release is not None:
            from vtx.runtime.bundle.releases import note_release

            note_release(self.manifest.release, self.key)

    @property
    def files(self) -> Folder:
        return Folder(self.folder, "bundle", BundleError, CURE)

    def path(self, name: str) -> Path:
        """The path of a file, for messages and for writing; `read`, `header` and `graph_path` are for reading."""
        return self.folder / name

    def read(self, name: str, limit: int) -> bytes:
        """A file of at most `limit` bytes, whole; the manifest's checksum was compared with these very bytes.

        Raises BundleError: the file is missing, larger, altered, or no regular file of the bundle.
        """
        with self._open(name, limit) as file:
            content = read_all(file, name, BundleError)
            if hashlib.sha256(content).hexdigest() != self.manifest.files[name].sha256:
                raise BundleError(_altered(name))
        return content

    def arrays(self, name: str, limit: int) -> dict[str, NDArray[Any]]:
        """The tensors of a small safetensors file by name, read as `read` does."""
        return unpack(self.read(name, limit), name, error=BundleError)

    def header(self, name: str) -> Header:
        """The header of a safetensors file of any size; its data is refused if the file is replaced later."""
        with self._open(name, same=True) as file:
            return header_of(file, self.folder / name, error=BundleError)

    @contextmanager
    def graph_path(self, name: str) -> Iterator[Path]:
        """The path of a graph for a library that opens it, and the weights it names, by itself.

        Before and after, all files must be the ones that were checked: the same inodes, sizes and times of change. A
        change that is undone within the block is not noticed.

        Raises BundleError: a file is missing, or was replaced or written to since it was checked.
        """
        files = [file for file in self.manifest.files if file == name or not file.endswith(".onnx")]
        for yielded in (False, True):
            for file in files:
                if file not in self._checked:
                    self.check_file(file, whole=self.key is not None)
                if not self._is_checked(file):  # says what is wrong
                    self._open(file, same=True).close()
            if not yielded:
                yield self.folder / name

    def verify(self, progress: Callable[[int], None] = lambda _: None) -> Iterator[tuple[str, str | None]]:
        """Hash every file: (name, None) if it is as exported, else (name, problem)."""
        for name in self.manifest.files:
            try:
                self.check_file(name, whole=True, progress=progress)
            except BundleError as e:
                yield name, str(e)
            else:
                yield name, None

    def _open(self, name: str, limit: int | None = None, *, same: bool = False) -> BinaryIO:
        """Open a file, which must have the size that the manifest says, and with `same` be the one that was checked."""
        record = self.manifest.files[name]
        file = self.files.open(name, limit)
        now = Identity.of(os.fstat(file.fileno()))
        problem = None
        if now.size != record.bytes:
            problem = f"{name} holds {now.size:,} bytes, the manifest says {record.bytes:,}; {CURE}"
        elif same and self._checked.setdefault(name, now) != now:
            problem = f"{name} was replaced or written to after it was checked; load the bundle again"
        if problem:
            file.close()
            raise BundleError(problem)
        return file

    def _is_checked(self, name: str) -> bool:
        """True if the name leads to the very file that was checked, and no link to it; found without opening it."""
        path = self.folder / name
        try:
            same = Identity.of(os.lstat(path)) == self._checked[name]
        except OSError:
            return False
        return same and not any((self.folder / part).is_symlink() for part in Path(name).parents[:-1])

    def check_file(self, name: str, *, whole: bool, progress: Callable[[int], None] = lambda _: None) -> None:
        record = self.manifest.files[name]
        with self._open(name) as file:
            small = whole or record.bytes <= QUICK_BYTES
            if small and digest(file, name, BundleError, progress) != record.sha256:
                raise BundleError(_altered(name))
            self._checked[name] = Identity.of(os.fstat(file.fileno()))


def sha256(path: Path, progress: Callable[[int], None] = lambda _: None) -> str:
    """Hex SHA-256 of a file, read in blocks; `progress` gets the bytes of each."""
    with open_named(path, error=BundleError) as file:
        return digest(file, path.name, BundleError, progress)


def seal_manifest(folder: Path, manifest: Manifest, key: SigningKey | None = None) -> None:
    """Write `vtx.json` with its checksum, and its signature if there is a key. Raises `OSError`."""
    write_sealed(folder / MANIFEST, write_manifest(manifest).encode("utf-8", "surrogatepass"), key)


def _altered(name: str) -> str:
    return f"{name} was altered after the export (its SHA-256 differs); {CURE}"
