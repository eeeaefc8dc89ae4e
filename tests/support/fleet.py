"""vtx-serve's addresses on Ray Serve, on a cluster of this machine alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import psutil

from tests.support.serving import Served

PORT = 8631
# Seconds for a replica to tell its load: on a busy machine 0.1, the usual, send a question elsewhere.
PATIENT = {
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "20",
    "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "30",
}


@contextmanager
def deployed(arguments: Mapping[str, Any]) -> Iterator[Served]:
    """The application with these arguments, until the end of the block."""
    import ray
    from ray import serve

    from vtx.tools.fleet.application import app

    with patch.dict(os.environ, PATIENT):
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"port": PORT})
        serve.run(app(dict(arguments)), name="vtx")
        yield Served(PORT, None)  # type: ignore[arg-type]
        serve.shutdown()
    finally:
        ray.shutdown()


def replicas() -> list[psutil.Process]:
    """The processes of its replicas."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "ServeReplica:vtx:replica" in " ".join(process.info["cmdline"] or ())
    ]
