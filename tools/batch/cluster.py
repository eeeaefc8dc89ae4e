"""A batch on a Ray cluster: chunks of lines go to workers that each hold the model, and come back as they are done.

Ray Data hands a worker two chunks at a time and starts no more than it can hold. It repeats the chunks of a worker that
died elsewhere. The answers come back to this process, which alone writes them: workers need the bundle and the images
under the same paths, and no directory to write to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtx.runtime.backends.engines import ENGINES
from vtx.runtime.bundle.bundle import sha256
from vtx.runtime.errors import BundleError, DeviceError, VtxError
from vtx.tools.batch.run import How, Line, Result, answer_lines
from vtx.tools.common.cluster import connected, cores

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vtx.runtime.api.model import Model

CHUNK = 16  # lines at most that a worker answers before it hands them over
IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class WorkerEngine:
    """What each worker loads, and how; `threads` are all of its cores when not given."""

    bundle: Path
    device: str
    compute: str | None
    threads: int | None
    fit: str | None = None
    require_signature: Path | None = None


def answer_on_cluster(
    address: str, engine: WorkerEngine, lines: Sequence[Line], how: How
) -> Iterator[tuple[Line, Result]]:
    """The lines with their results, as they come: one worker for each machine of the cluster, on all its cores.

    Raises:
        DeviceError: Ray is missing, the cluster cannot be reached, or it fails; or a worker cannot answer.

    """
    if engine.device in ENGINES and ENGINES[engine.device].gpu:
        raise DeviceError(f"a Ray cluster is not used with --device {engine.device} yet; take cpu, openvino or auto")
    if not lines:
        return
    with connected(address) as ray:
        ray.data.DataContext.get_current().enable_progress_bars = False
        machines = cores(ray)
        if not machines:
            raise DeviceError(f"the cluster at {address} has no machine with a CPU core; start one with ray start")
        size = max(1, min(CHUNK, len(lines) // (4 * len(machines))))
        chunks = [tuple(lines[start : start + size]) for start in range(0, len(lines), size)]
        given = {"engine": engine, "digest": sha256(engine.bundle / "vtx.json"), "how": how, "chunks": ray.put(chunks)}
        rows = ray.data.from_items([{"chunk": n} for n in range(len(chunks))], override_num_blocks=len(chunks))
        done = rows.map_batches(
            ChunkWorker,
            batch_size=1,
            num_cpus=min(machines),
            compute=ray.data.ActorPoolStrategy(size=len(machines), max_tasks_in_flight_per_actor=IN_FLIGHT),
            fn_constructor_kwargs={**given, "cores": min(machines)},
        )
        for output in done.iter_rows():
            if output["error"]:
                raise DeviceError(f"a worker of the cluster at {address} cannot answer: {output['error']}")
            yield from zip(chunks[int(output["chunk"])], json.loads(output["results"]), strict=True)


class ChunkWorker:
    """Answers chunks on a worker, with a model that it loads once."""

    def __init__(self, engine: WorkerEngine, digest: str, how: How, chunks: Any, cores: int) -> None:
        self._engine, self._digest, self._how, self._cores = engine, digest, how, cores
        self._chunks = chunks
        self._model: Model | None = None

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, Any]:
        """The results of one chunk, or the error of a worker that cannot answer at all."""
        import ray

        number = int(batch["chunk"][0])
        try:
            results = list(answer_lines(self._loaded(), ray.get(self._chunks)[number], self._how))
        except VtxError as e:
            return {"chunk": [number], "results": ["[]"], "error": [str(e)]}
        return {"chunk": [number], "results": [json.dumps(results)], "error": [""]}

    def _loaded(self) -> Model:
        if self._model is None:
            from vtx.runtime.api.load import load

            engine = self._engine
            if sha256(engine.bundle / "vtx.json") != self._digest:
                raise BundleError(
                    f"{engine.bundle} is another bundle on this machine; give every worker the same one under this path"
                )
            model = load(
                engine.bundle, device=engine.device, compute=engine.compute, threads=engine.threads or self._cores,
                fit=engine.fit, require_signature=engine.require_signature,
            )  # fmt: skip
            model.policy(self._how.k, self._how.options, self._how.reduce)
            self._model = model
        return self._model
