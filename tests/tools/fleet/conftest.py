"""The bundle of the replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.bundles import export
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny


@pytest.fixture(scope="session")
def bundle(lasting: Path, tiny_checkpoint: Checkpoints) -> Path:
    return export(tiny_checkpoint(Tiny()), lasting / "fleet", (3, 5), "fp32").folder
