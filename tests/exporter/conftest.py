"""Exports made anew, for the tests of exports; a Ray cluster on this machine, for the tests of all that runs on one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import bundles


@pytest.fixture(autouse=True)
def exports_made_anew(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an export is what is tested, no test gets a copy of one made before."""
    if request.path.parent.name in ("bundling", "weights"):
        monkeypatch.setattr(bundles, "SHARED", None)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A head that computes nothing, and two workers of one core."""
    for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_health_check_period_ms", "500")):
        monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.workers = [made.add_node(num_cpus=1) for _ in range(2)]
    made.wait_for_nodes()
    yield made
    made.shutdown()
