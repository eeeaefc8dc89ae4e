"""A server with a small random model, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bundles import export
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model


@pytest.fixture(scope="session")
def packages() -> None:
    """What a server needs beside the runtime."""
    for package in ("starlette", "uvicorn"):
        pytest.importorskip(package, reason="needs vtx-edge[serve]", exc_type=ModuleNotFoundError)


@pytest.fixture(scope="session")
def tiny_bundle(packages: None, lasting: Path, tiny_checkpoint: Checkpoints) -> Path:
    """A bundle with K of 3 and 5, and FastV."""
    return export(tiny_checkpoint(Tiny()), lasting / "tiny", (3, 5), "fp32", reductions=("fastv:k=3,ratio=0.5",)).folder


@pytest.fixture(scope="module")
def local(tiny_bundle: Path) -> Iterator[Model]:
    """The same bundle in this process: what `vtx-run` computes."""
    with load(tiny_bundle, device="cpu", threads=1) as model:
        yield model
