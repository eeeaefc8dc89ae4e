"""Measuring on a Ray cluster: the same shards as on one machine, each a task of Ray Data.

Tasks hold no state but the opened model, so Ray can repeat the tasks of a dead worker elsewhere. The shards come
back to this process, which alone writes them: workers need the model and the images under the same paths, and no
directory to write to.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from vtx.exporter.gates.measure import Measurer, Origin
from vtx.exporter.gates.workdir import MeasureOptions, WorkDirectory
from vtx.runtime.errors import DeviceError, VtxError
from vtx.tools.common.cluster import connected, cores

if TYPE_CHECKING:
    from numpy.typing import NDArray


def measure_on_cluster(
    address: str,
    origin: Origin,
    options: MeasureOptions,
    work: WorkDirectory,
    report: Callable[[int], None],
) -> None:
    """Measure what is missing on the cluster at `address`: host:port of its head, or auto.

    `report` gets the number of items done. A machine of the cluster measures one shard at a time, on all its cores.
    Raises DeviceError if Ray is not installed, the cluster cannot be reached, or it fails, or a worker cannot measure;
    RequestError if too many items cannot be measured.
    """
    from safetensors.numpy import load

    missing = {shard.number + (1 << 32) * shard.held_out: shard for shard in work.missing()}
    if not missing:
        return
    with connected(address) as ray:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        shards = ray.put(missing)
        tasks = ray.data.from_items([{"shard": key} for key in missing], override_num_blocks=len(missing))
        task = functools.partial(_measure, shards=shards, origin=origin, options=options)
        done = tasks.map_batches(task, batch_size=1, num_cpus=min(cores(ray)))
        for output in done.iter_rows():
            shard = missing[int(output["shard"])]
            if output["error"]:
                raise DeviceError(f"a worker of the cluster at {address} cannot measure: {output['error']}")
            work.write(shard, load(output["tensors"]), json.loads(output["skipped"]))
            report(len(shard.items))


_opened = functools.cache(Measurer.open)  # once in each process of a worker


def _measure(batch: dict[str, NDArray[Any]], *, shards: Any, origin: Origin, options: MeasureOptions) -> dict[str, Any]:
    """One shard, on a worker: its tensors as the bytes of a safetensors file, or the error."""
    import ray
    from safetensors.numpy import save

    key = int(batch["shard"][0])
    try:
        tensors, skipped = _opened(origin, options)(ray.get(shards)[key])
    except VtxError as e:
        return {"shard": [key], "tensors": [b""], "skipped": ["[]"], "error": [str(e)]}
    raw = save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})
    return {"shard": [key], "tensors": [raw], "skipped": [json.dumps(skipped)], "error": [""]}
