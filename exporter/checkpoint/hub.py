"""Checkpoints of the hub: fetching them, the files of one and the cache that they lie in."""

from __future__ import annotations

import errno
import os
import re
from fnmatch import fnmatch
from pathlib import Path

from vtx.runtime.bundle.files import Folder, digest
from vtx.runtime.errors import CheckpointError, DeviceError
from vtx.runtime.installing import install

_MODELS = "models--"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def checkpoint_files(folder: Path) -> Folder:
    """The files of the checkpoint in `folder`; links may lead into the hub cache that it belongs to.

    In the cache, files of models--org--name/snapshots/<commit> are links into its blobs/, which may in turn be links to
    the store that all models share. A model's part of the cache may be moved elsewhere and renamed.
    """
    root = folder if in_cache(folder) else folder.parent  # the parent of a part's folder
    repo = root.parent.parent
    stores = [repo / "blobs"] if in_cache(root) else []
    if stores and repo.name.startswith(_MODELS):
        stores.append(repo.parent / "blobs")
    return Folder(folder, "checkpoint", CheckpointError, "download it again, or put the file itself there", (*stores,))


def in_cache(folder: Path) -> bool:
    repo = folder.parent.parent
    return folder.parent.name == "snapshots" and (repo.name.startswith(_MODELS) or (repo / "blobs").is_dir())


def revision_of(folder: Path) -> str | None:
    return folder.name if in_cache(folder) and _COMMIT.fullmatch(folder.name) else None


def check_blob(file: Path, model: str) -> None:
    """Raise CheckpointError if a file of the hub's cache differs from its sha256, by which the cache names large files.

    It is then removed from the cache. huggingface_hub compares sizes only, if it does not fetch by Xet.
    """
    blob = Path(os.path.normpath(file.parent / os.readlink(file))) if file.is_symlink() else file
    if not re.fullmatch("[0-9a-f]{64}", blob.name) or blob.is_symlink():  # small, or in the store that Xet has checked
        return
    files = checkpoint_files(file.parent)
    with files.open(file.name) as content:
        checksum = digest(content, file.name, CheckpointError)
    if checksum != blob.name:
        file.unlink()
        blob.unlink()
        raise CheckpointError(
            f"{file.name} of {model} was not fetched intact: its sha256 is {checksum[:12]}..., the hub's "
            f"{blob.name[:12]}...; it was removed, and the same command fetches it again"
        )


def snapshot(model: str, revision: str | None, patterns: list[str], *, nested: bool = False) -> Path:
    try:
        import huggingface_hub
    except ImportError as cause:
        raise DeviceError(
            f"{model} is not a directory, and fetching it from the hub needs huggingface_hub; run: {install('export')}"
        ) from cause
    try:
        try:
            info = huggingface_hub.HfApi().model_info(model, revision=revision)
            names = [file.rfilename for file in info.siblings or ()]
        except Exception:  # snapshot_download finds all in the cache, or says why not
            names = []
        # A file at a time in this thread: snapshot_download's threads fetch theirs to the end after an interrupt.
        for name in names:
            if (nested or "/" not in name) and any(fnmatch(name, pattern) for pattern in patterns):
                huggingface_hub.hf_hub_download(model, name, revision=info.sha)
        folder = huggingface_hub.snapshot_download(
            model, revision=revision, allow_patterns=patterns, ignore_patterns=None if nested else ["*/*"]
        )
    except Exception as cause:  # also errors of its HTTP library and of the disk
        raise CheckpointError(_problem(cause, model, revision)) from cause
    return Path(folder).resolve()


def _problem(cause: Exception, model: str, revision: str | None) -> str:
    """The message for a model that could not be fetched from the hub, with the fix."""
    from huggingface_hub import constants, errors

    access = "ask for access on its page on the hub, then run: hf auth login"
    if isinstance(cause, errors.GatedRepoError):
        return f"{model} is gated; {access}"
    if isinstance(cause, errors.RepositoryNotFoundError):
        return f"{model} is neither a directory here nor a model on the hub; if it is private, run: hf auth login"
    if isinstance(cause, errors.RevisionNotFoundError):
        return f"{model} has no revision {revision} on the hub; name a branch, a tag or a commit"
    unreachable = errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError
    if isinstance(cause, unreachable):
        answers = (getattr(error, "response", None) for error in (cause, cause.__cause__))
        status = next((answer.status_code for answer in answers if answer is not None), None)
        if status is None:
            return f"{model} is not in the local cache and the hub is unreachable; go online, or name a local directory"
        fix = access if status in (401, 403) else "try again later"
        return f"the hub answers {status} to a request for {model}; {fix}"
    if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
        fix = "free some there, or set HF_HOME to a directory on another disk"
        return f"the disk has no space for {model} in {constants.HF_HUB_CACHE}; {fix}"
    first = (str(cause).strip().splitlines() or [""])[0]
    return f"{model} could not be fetched from the hub: {type(cause).__name__}: {first[:300]}"
