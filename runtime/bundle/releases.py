"""Releases that this device has answered with, so that an older signed bundle does not take the place of a newer one;
and the end of a release.

    STATE/releases/KEY/NAME/NUMBER    an empty file for each release; KEY and NAME are hashes

STATE is $VTX_STATE, or vtx in $XDG_STATE_HOME or ~/.local/state. A number is noted by a file of its own, so that
processes at the same time never lower it.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from vtx.runtime.bundle.seal import PublicKey, write_durably
from vtx.runtime.bundle.spec.manifest import BundleRelease
from vtx.runtime.errors import BundleError, DeviceError
from vtx.runtime.process import home

STATE = "VTX_STATE"


def check_release(release: BundleRelease | None, key: PublicKey, subject: str) -> None:
    """Raise BundleError for a release below one that was noted, or for none where this key's bundles have releases.

    And for one whose last day has passed by this device's clock.
    """
    today = datetime.now(timezone.utc).date().isoformat()
    if release is not None and release.until is not None and today > release.until:
        raise BundleError(
            f"{subject} may be used until {release.until}, and this device's clock says {today} (UTC); use a newer "
            "bundle, or set the clock"
        )
    of_key = _folder() / key.fingerprint
    try:
        if release is None:
            if any(of_key.iterdir()):
                raise BundleError(
                    f"{subject} has no release number, and this device has answered with bundles of {key.name} that "
                    f"have one; export it with --release, or remove {of_key}"
                )
            return
        newest = _newest(of_key / _hash(release.name.encode()))
    except FileNotFoundError:
        return
    except OSError as e:
        raise DeviceError(f"the releases in {of_key} cannot be read ({e.strerror}); set {STATE}") from e
    if release.number < newest:
        raise BundleError(
            f"{subject} is release {release.number} of {release.name}, and this device has answered with release "
            f"{newest}; use a newer bundle, or remove {of_key / _hash(release.name.encode())} to go back"
        )


def note_release(release: BundleRelease, key: PublicKey) -> None:
    """Note a release that answers are computed with. Raises DeviceError if that is not possible."""
    folder = _folder() / key.fingerprint / _hash(release.name.encode())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (before := _newest(folder)) < release.number:
            write_durably(folder / str(release.number), b"")
            with suppress(OSError):
                (folder / str(before)).unlink(missing_ok=True)
    except OSError as e:
        raise DeviceError(
            f"release {release.number} of {release.name} cannot be noted in {folder} ({e.strerror}); set {STATE} to a "
            "directory that this user may write to"
        ) from e


def _folder() -> Path:
    folder = os.environ.get(STATE)
    return (Path(folder) if folder else home("XDG_STATE_HOME", ".local/state") / "vtx") / "releases"


def _newest(folder: Path) -> int:
    return max((int(file.name) for file in folder.iterdir() if file.name.isdecimal()), default=0)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
