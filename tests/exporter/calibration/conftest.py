"""The tests of calibration compute in one thread each."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.support.exported import THREADS
from vtx.exporter.calibration import source as sources
from vtx.runtime.api.load import load


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(sources, "load", functools.partial(load, threads=THREADS))
