"""Prefix files that were damaged or belong to another bundle, and what is said of each."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vtx.runtime.bundle.safetensors import read_header, read_tensor, write_safetensors


def changed(change: Callable[[dict[str, Any], dict[str, str]], object]) -> Callable[[Path], object]:
    """The file with other tensors and metadata."""

    def write(file: Path) -> None:
        header = read_header(file)
        tensors = {name: read_tensor(info) for name, info in header.tensors.items()}
        metadata = dict(header.metadata)
        change(tensors, metadata)
        write_safetensors(file, tensors, metadata)

    return write


def resealed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """The file with other tensors and a checksum that fits them."""
    from vtx.runtime.session.prefix_file import _checksum

    def both(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        change(tensors)
        metadata["sha256"] = _checksum(tensors)

    return changed(both)


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the program openssl is not installed")
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda file: file.write_bytes(b""), "shelf"),
    (lambda file: file.write_bytes(file.read_bytes()[:-7]), "shelf"),
    (lambda file: file.write_bytes(b"\xff" * 400), "shelf"),
    (lambda file: (file.unlink(), file.mkdir()), "shelf"),
    (lambda file: os.truncate(file, 1 << 34), "bytes, of this bundle at most"),
    (changed(lambda tensors, _: tensors["kv 1"].__setitem__(..., 3)), "SHA-256"),
    (changed(lambda _, about: about.update(bundle="0" * 64)), "written for another bundle"),
    (changed(lambda _, about: about.update(engine="gpu")), "written for another engine"),
    (changed(lambda _, about: about.clear()), "written for another"),
    (resealed(lambda tensors: tensors.pop("positions")), "does not hold a prompt"),
    (resealed(lambda tensors: tensors.update({"kv 1": tensors["kv 1"][..., :-1]})), "does not hold a prompt"),
    (resealed(lambda tensors: tensors.update({"kv 1": tensors["kv 1"].astype(np.float64)})), "does not hold"),
    (resealed(lambda tensors: tensors.update(hidden=tensors["hidden"][:-1])), "does not hold a prompt"),
    (resealed(lambda tensors: tensors.update(hidden=np.zeros((3, 2), np.float32))), "does not hold a prompt"),
    (resealed(lambda tensors: tensors.update({"kv 9": tensors["kv 1"]})), "does not hold a prompt"),
    (resealed(lambda tensors: tensors.update(is_vision=tensors["is_vision"][:, None])), "does not hold a prompt"),
    (resealed(lambda tensors: tensors.update(is_vision=np.array(True))), "shelf"),
    (resealed(lambda tensors: tensors.update({"text 0": tensors["text 0"] * np.float64(1)})), "does not hold a prompt"),
    (resealed(lambda tensors: tensors.update({"input bias": tensors["hidden"]})), "does not hold a prompt"),
]


def sign(file: Path, key: Path) -> None:
    """Write the signature of a file next to it, as the message about a missing one says."""
    command = ["openssl", "pkeyutl", "-sign", "-rawin", "-inkey", key, "-in", file, "-out", f"{file}.sig"]
    subprocess.run([*map(str, command)], check=True)
