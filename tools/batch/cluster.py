"""A batch on a Ray cluster: chunks of lines go to workers that each hold the model, and come back as they are done.

Ray Data hands a worker two chunks at a time and starts no more than it can hold. It repeats the chunks of a worker that
died elsewhere. The answers come back to this process, which alone writes them: workers need the bundle and the images
under the same paths, and no directory to write to.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtx.runtime.backends.engines import ENGINES
from vtx.runtime.bundle.bundle import sha256
from vtx.runtime.errors import BundleError, DeviceError, VtxError
from vtx.runtime.scheduler.engine import Engine
from vtx.tools.batch.run import Asking, Line, Result, answer_lines
from vtx.tools.common.cluster import connected, cores

if TYPE_CHECKING:
    from numpy.typing import NDArray


CHUNK = 16  # lines at most that a worker answers before it hands them over
IN_FLIGHT = 2


def answer_on_cluster(
    address: str, bundle: Path, asking: Asking, lines: Sequence[Line]
) -> Generator[tuple[Line, Result]]:
    """The lines with their results, as they come: one worker for each machine of the cluster, on all its cores.

    Raises DeviceError if Ray is missing, the cluster cannot be reached, or it fails; or a worker cannot answer.
    """
    device = asking.loading.device
    if device in ENGINES and ENGINES[device].gpu:
        raise DeviceError(f"a Ray cluster cannot use --device {device} yet; use cpu, openvino or auto")
    if not lines:
        return
    with connected(address) as ray:
        ray.data.DataContext.get_current().enable_progress_bars = False
        machines = cores(ray)
        if not machines:
            raise DeviceError(f"the cluster at {address} has no machine with a CPU core; start one with ray start")
        size = max(1, min(CHUNK, len(lines) // (4 * len(machines))))
        chunks = [tuple(lines[start : start + size]) for start in range(0, len(lines), size)]
        key = asking.loading.require_signature
        asking = replace(asking, loading=replace(asking.loading, require_signature=key and key.resolve()))
        given = {"bundle": bundle, "digest": sha256(bundle / "vtx.json"), "asking": asking, "chunks": ray.put(chunks)}
        rows = ray.data.from_items([{"chunk": n} for n in range(len(chunks))], override_num_blocks=len(chunks))
        done = rows.map_batches(
            ChunkWorker, batch_size=1, num_cpus=min(machines),
            compute=ray.data.ActorPoolStrategy(size=len(machines), max_tasks_in_flight_per_actor=IN_FLIGHT),
            fn_constructor_kwargs={**given, "cores": min(machines)},
        )  # fmt: skip
        for output in done.iter_rows():
            if output["error"]:
                raise DeviceError(f"a worker of the cluster at {address} cannot answer: {output['error']}")
            yield from zip(chunks[int(output["chunk"])], json.loads(output["results"]), strict=True)


class ChunkWorker:
    """Answers chunks on a worker, with a model that it loads once."""

    def __init__(self, bundle: Path, digest: str, asking: Asking, chunks: Any, cores: int) -> None:
        self._bundle, self._digest, self._asking, self._cores = bundle, digest, asking, cores
        self._chunks = chunks
        self._engine: Engine | None = None

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, Any]:
        """The results of one chunk, or the error of a worker that cannot answer at all."""
        import ray

        number, asking = int(batch["chunk"][0]), self._asking
        try:
            if self._engine is None:
                if sha256(self._bundle / "vtx.json") != self._digest:
                    raise BundleError(
                        f"{self._bundle} is another bundle on this machine; give every worker the same one under this "
                        "path"
                    )
                loading = replace(asking.loading, threads=asking.loading.threads or self._cores)
                model = loading.load(self._bundle)
                model.loaded.policy(asking.k, asking.options, asking.reduce)
                self._engine = Engine("worker", model, asking.capacity)
            lines = ray.get(self._chunks)[number]
            found = {line.number: result for line, result in answer_lines(self._engine, lines, asking)}
            results = [found[line.number] for line in lines]
        except VtxError as e:
            return {"chunk": [number], "results": ["[]"], "error": [str(e)]}
        return {"chunk": [number], "results": [json.dumps(results)], "error": [""]}
