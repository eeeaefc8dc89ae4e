"""Measuring on a Ray cluster: the same shards as on one machine, each a task of Ray Data.

Tasks hold no state but the opened model, so Ray runs the tasks of a worker that died again elsewhere. The shards come
back to this process, which alone writes them: workers need the model and the images under the same paths, and no
folder to write to.
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
from vtx.exporter.gates.workdir import MeasureOptions, Work
from vtx.runtime.errors import DeviceError, VtxError

if TYPE_CHECKING:
    from numpy.typing import NDArray

TIMEOUT_S = 5


def measure_on_cluster(
    address: str, model: str, fingerprint: str, options: MeasureOptions, work: Work, report: Report
) -> None:
    """Measure what is missing on the cluster at `address`: host:port of its head, or auto.

    `report` gets the items as they are done. A machine of the cluster measures one shard at a time, on all its cores.

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
        rows = ray.data.from_items([{"shard": key} for key in missing], override_num_blocks=len(missing))
        ask = functools.partial(_measure, shards=shards, model=model, fingerprint=fingerprint, options=options)
        done = rows.map_batches(ask, batch_size=1, num_cpus=cores)
        for row in done.iter_rows():
            shard = missing[int(row["shard"])]
            if row["error"]:
                raise DeviceError(f"a worker of the cluster at {address} cannot measure: {row['error']}")
            work.write(shard, _tensors(row["tensors"]), json.loads(row["skipped"]))
            report(len(shard.items))


def _measure(
    batch: dict[str, NDArray[Any]], *, shards: Any, model: str, fingerprint: str, options: MeasureOptions
) -> dict[str, Any]:
    """One shard, on a worker: its tensors as the bytes of a safetensors file, or why there are none."""
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
    """Ray, connected for as long as this lasts; its errors as ours."""
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
        raise DeviceError(f"the cluster at {address} failed ({_first_line(e)}); run again to go on") from e
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raise OSError or ValueError soon where nobody listens: Ray itself would try for minutes."""
    if address != "auto":
        place = urlsplit(f"//{address}")
        socket.create_connection((place.hostname or "", place.port or 0), TIMEOUT_S).close()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
