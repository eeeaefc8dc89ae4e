"""Joining a Ray cluster. Ray is loaded here, late, and nowhere else but in its workers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from vtx.runtime.errors import DeviceError, VtxError

TIMEOUT_S = 5


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, connected inside the context to the cluster at host:port of its head, or auto. Raises DeviceError."""
    try:
        import ray
        import ray.data
    except ImportError as e:
        raise DeviceError(f'--ray-address needs {e.name}; pip install "vtx-edge[ray]"') from e
    try:
        if address != "auto":  # fails at once if nothing listens: Ray would retry for minutes
            head = urlsplit(f"//{address}")
            socket.create_connection((head.hostname or "", head.port or 0), TIMEOUT_S).close()
        ray.init(address=address, log_to_driver=False)
    except Exception as e:
        raise DeviceError(
            f"cannot join a Ray cluster at {address} ({_first_line(e)}); give host:port of one started with "
            "ray start --head, or auto on one of its machines"
        ) from e
    try:
        yield ray
    except VtxError:
        raise
    except Exception as e:
        raise DeviceError(f"the cluster at {address} failed ({_first_line(e)}); run again to resume") from e
    finally:
        ray.shutdown()


def cores(ray: Any) -> list[int]:
    return [int(n["Resources"]["CPU"]) for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) >= 1]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
