"""vtx-serve's addresses on Ray Serve, on a cluster of this machine alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil

from tests.support.serving import Served

PORT = 8631


@contextmanager
def deployed(arguments: Mapping[str, Any]) -> Iterator[Served]:
    """The application with these arguments, until the end of the block."""
    import ray
    from ray import serve

    from vtx.tools.fleet.application import app

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
