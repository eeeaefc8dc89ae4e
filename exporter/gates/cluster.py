"""Measuring on a Ray cluster: the same shards as on one machine, each a task of Ray Data.

Tasks hold no state but the opened model, so Ray can repeat the tasks of a dead worker elsewhere. The shards come
back to this process, which alone writes them: workers need the model and the images under the same paths, and no
directory to write to.
"""

from __future__ import annotations

import functools
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from vtx.exporter.gates.measure import Measurer, Report
from vtx.exporter.gates.workdir import MeasureOptions, WorkDirectory
from vtx.runtime.errors import DeviceError, VtxError

if TYPE_CHECKING:
    from numpy.typing import NDArray

TIMEOUT_S = 5


def measure_on_cluster(
    address: str, model: str, fingerprint: str, options: MeasureOptions, work: WorkDirectory, report: Report
) -> None:
    """Measure what is missing on the cluster at `address`: host:port of its head, or auto.

    `report` gets the number of items done. A machine of the cluster measures one shard at a time, on all its cores.

    Raises:
        DeviceError: Ray is not installed, the cluster cannot be reached, or it fails; or a worker cannot measure.
        RequestError: too many items cannot be measured.

    """
    missing = {shard.number + (1 << 32) * shard.held_out: shard for shard in work.missing()}
    if not missing:
        return
    with _connected(address) as ray:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        shards = ray.put(missing)
        cores = min(int(n["Resources"]["CPU"]) for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) >= 1)
        tasks = ray.data.from_items([{"shard": key} for key in missing], override_num_blocks=len(missing))
        task = functools.partial(_measure, shards=shards, model=model, fingerprint=fingerprint, options=options)
        done = tasks.map_batches(task, batch_size=1, num_cpus=cores)
        for output in done.iter_rows():
            shard = missing[int(output["shard"])]
            if output["error"]:
                raise DeviceError(f"a worker of the cluster at {address} cannot measure: {output['error']}")
            work.write(shard, _tensors(output["tensors"]), json.loads(output["skipped"]))
            report(len(shard.items))


def _measure(
    batch: dict[str, NDArray[Any]], *, shards: Any, model: str, fingerprint: str, options: MeasureOptions
) -> dict[str, Any]:
    """One shard, on a worker: its tensors as the bytes of a safetensors file, or the error."""
    import ray
    from safetensors.numpy import save

    key = int(batch["shard"][0])
    try:
        tensors, skipped = _opened(model, fingerprint, options)(ray.get(shards)[key])
    except VtxError as e:
        return {"shard": [key], "tensors": [b""], "skipped": ["[]"], "error": [str(e)]}
    raw = save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})
    return {"shard": [key], "tensors": [raw], "skipped": [json.dumps(skipped)], "error": [""]}


@functools.cache
def _opened(model: str, fingerprint: str, options: MeasureOptions) -> Measurer:
    """The model, opened once in each process of a worker."""
    return Measurer.open(model, fingerprint, options)


def _tensors(raw: bytes) -> dict[str, NDArray[Any]]:
    from safetensors.numpy import load

    return dict(load(raw))


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Ray, connected inside the context; its errors become DeviceError."""
    try:
        import ray
        import ray.data
    except ImportError as e:
        raise DeviceError(f'--ray-address needs {e.name}; pip install "vtx-edge[ray]"') from e
    try:
        _reach(address)
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


def _reach(address: str) -> None:
    """Raise OSError or ValueError at once where nothing listens: Ray itself would retry for minutes."""
    if address != "auto":
        head = urlsplit(f"//{address}")
        socket.create_connection((head.hostname or "", head.port or 0), TIMEOUT_S).close()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
