"""Exports made anew, for the tests of exports."""

from __future__ import annotations

import pytest

from tests.support import bundles


@pytest.fixture(autouse=True)
def exports_made_anew(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an export is what is tested, no test gets a copy of one made before."""
    if request.path.parent.name in ("bundling", "weights"):
        monkeypatch.setattr(bundles, "SHARED", None)
