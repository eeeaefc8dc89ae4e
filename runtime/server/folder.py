"""The bundles of a directory: new ones are served, changed ones replace old ones, and others are served no more."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vtx.runtime.bundle.bundle import MANIFEST
from vtx.runtime.errors import RequestError, VtxError
from vtx.runtime.server.engines import Engines

LOOK_SECONDS = 2.0  # between two looks
State = tuple[tuple[str, int, int, int], ...]  # of each file below a folder: path, inode, size, time of change


class BundleFolder:
    """Serves the bundle in each folder of `folder`, under the name of its folder, as `look` finds them.

    A bundle is read once its files stayed as they are between two looks, and all are hashed, so none is served that is
    written only in part. Names that `engines` has already are left alone. `tell` gets a line about each change. Raises
    RequestError for a folder that cannot be read.
    """

    def __init__(self, engines: Engines, folder: Path, tell: Callable[[str], None]) -> None:
        self._engines = engines
        self._folder = folder
        self._tell = tell
        self._others = set(engines.names)
        self._states = dict[str, State]()  # at the last look
        self._read = dict[str, State]()  # when its bundle was last read
        try:
            self._look(self._folders(), begin=True)
        except OSError as e:
            raise RequestError(f"{folder} cannot be read ({e.strerror or e}); name the directory of the bundles") from e

    def look(self) -> None:
        """Serve what has come or changed since the last look, and no more what has gone."""
        try:
            folders = self._folders()
        except OSError as e:  # maybe for a moment, as on a network: what is served stays
            self._tell(f"{self._folder} cannot be read: {e.strerror or e}")
            return
        self._look(folders)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Look again and again, in a thread of its own, until the end of the block."""
        ended = threading.Event()

        def follow() -> None:
            while not ended.wait(LOOK_SECONDS):
                self.look()

        thread = threading.Thread(target=follow, name="vtx-serve bundles", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()

    def _folders(self) -> dict[str, Path]:
        """The folders that have a manifest, by name; those of hidden names may be on their way."""
        with os.scandir(self._folder) as entries:
            paths = {entry.name: Path(entry.path) for entry in entries if not entry.name.startswith(".")}
        bundles = {name: path for name, path in sorted(paths.items()) if (path / MANIFEST).is_file()}
        return {name: path for name, path in bundles.items() if name not in self._others}

    def _look(self, folders: dict[str, Path], *, begin: bool = False) -> None:
        for name in self._states.keys() - folders.keys():
            del self._states[name]
            if name in self._engines.names:
                self._engines.remove(name)
                self._tell(f"{name} is served no more")
            self._read.pop(name, None)
        for name, path in folders.items():
            state = state_of(path)
            settled = begin or self._states.get(name) == state
            self._states[name] = state
            if settled and self._read.get(name) != state:
                self._read[name] = state
                self._serve(name, path)
        self._engines.retire(wait=False)

    def _serve(self, name: str, path: Path) -> None:
        known = name in self._engines.names
        try:
            if self._engines.replace(name, path, whole=True):
                self._tell(f"{name} was replaced" if known else f"{name} is served")
        except (VtxError, OSError, MemoryError) as e:
            self._tell(f"{name} was not replaced: {e}" if known else f"{name} is not served: {e}")


def state_of(folder: Path) -> State:
    """The state of the files below a folder; it differs once any of them was changed, replaced or added."""
    files = list[tuple[str, int, int, int]]()
    for path in sorted(folder.rglob("*")):
        with suppress(OSError):  # gone again, or a link to nothing
            status = path.stat()
            files.append((str(path), status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(files)
