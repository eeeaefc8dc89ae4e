"""Tokenizers and templates resolved in the process of the tests."""

from __future__ import annotations

import pytest

from vtx.exporter.checkpoint.resolving import resolve


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolve here, where a test is about what is resolved and has many cases; a child takes two seconds."""
    monkeypatch.setattr("vtx.exporter.checkpoint.text.confine", lambda task, _: resolve(task.request))
    monkeypatch.setattr("vtx.exporter.checkpoint.text.RESOLVED", {})  # others get what a child made
