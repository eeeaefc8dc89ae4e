"""Work on a Ray cluster: chunks of items go to workers that each hold the model, and come back as they are done.

Ray is loaded here, late, and nowhere else but in its workers. Ray Data hands a worker two chunks at a time and starts
no more than it can hold. It repeats the chunks of a worker that died elsewhere.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

from vtx.runtime.backends.engines import GPUS, split_device
from vtx.runtime.bundle.bundle import sha256
from vtx.runtime.errors import BundleError, DeviceError, VtxError
from vtx.runtime.installing import install
from vtx.tools.common.loading import Loading

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vtx.runtime.api.model import Model

TIMEOUT_S = 5
CHUNK = 16  # items at which a chunk ends where it can
IN_FLIGHT = 2
T = TypeVar("T")
Work: TypeAlias = "Callable[[Sequence[Any]], list[Any]]"  # from the items of a chunk to a JSON value of each


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster by its `address`, and the GPUs of each worker; None: one if the device is a GPU, else none."""

    address: str
    gpus: float | None = None

    def gpus_of(self, device: str) -> float:
        """The GPUs of each worker for a device of `load`. Raises DeviceError for a GPU by its number."""
        name, number = split_device(device)
        if number:
            raise DeviceError(f"--device {device} names a GPU of one machine; on a cluster use --device {name}")
        return float(name in GPUS) if self.gpus is None else self.gpus


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, connected inside the context to the cluster at host:port of its head, or auto. Raises DeviceError."""
    try:
        import ray
        import ray.data
    except ImportError as e:
        raise DeviceError(f"--ray-address needs {e.name}; {install('ray')}") from e
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


def cores(ray: Any, gpus: float = 0.0) -> list[int]:
    """The cores of each worker: one on each machine, or as many as have this share of its GPUs."""
    numbers = list[int]()
    for node in ray.nodes():
        having = node["Resources"].get("CPU", 0) if node["Alive"] else 0
        count = int(node["Resources"].get("GPU", 0) / gpus) if gpus else 1
        count = min(count, int(having))
        numbers += count * [int(having) // max(1, count)]
    return numbers


def on_cluster(
    cluster: Cluster,
    bundle: Path,
    loading: Loading,
    begin: Callable[[Model], Work],
    items: Sequence[T],
    alike: Callable[[T], Hashable],
) -> Generator[tuple[T, Any]]:
    """The items with their results, as they come; those that are `alike` go to one worker as far as a chunk reaches.

    `begin` is called with the model of each worker. Raises DeviceError if Ray is missing, the cluster cannot be
    reached, or it fails; or a worker cannot do its work.
    """
    gpus = cluster.gpus_of(loading.device)
    if not items:
        return
    with connected(cluster.address) as ray:
        ray.data.DataContext.get_current().enable_progress_bars = False
        workers = cores(ray, gpus)
        if not workers:
            lacks = f"a CPU core and {gpus:g} GPUs" if gpus else "a CPU core"
            raise DeviceError(
                f"the cluster at {cluster.address} has no machine with {lacks}; start one with ray start"
                + ", or use --device cpu or a smaller --ray-gpus" * bool(gpus)
            )
        chunks = chunked(items, alike, len(workers))
        key = loading.require_signature
        settings = {
            "bundle": bundle,
            "digest": sha256(bundle / "vtx.json"),
            "begin": begin,
            "chunks": ray.put(chunks),
            "loading": replace(loading, require_signature=key and key.resolve()),
            "cores": min(workers),
        }
        rows = ray.data.from_items([{"chunk": n} for n in range(len(chunks))], override_num_blocks=len(chunks))
        done = rows.map_batches(
            ChunkWorker,
            batch_size=1,
            num_cpus=min(workers),
            num_gpus=gpus or None,
            compute=ray.data.ActorPoolStrategy(size=len(workers), max_tasks_in_flight_per_actor=IN_FLIGHT),
            fn_constructor_kwargs=settings,
        )
        for output in done.iter_rows():
            if output["error"]:
                raise DeviceError(f"a worker of the cluster at {cluster.address} cannot answer: {output['error']}")
            yield from zip(chunks[int(output["chunk"])], json.loads(output["results"]), strict=True)


def chunked(items: Sequence[T], alike: Callable[[T], Hashable], workers: int) -> list[tuple[T, ...]]:
    """Chunks of items for this number of workers; those that are `alike` follow one another, up to twice the size."""
    firsts: dict[Hashable, int] = {}
    kinds = [firsts.setdefault(alike(item), number) for number, item in enumerate(items)]
    size = max(1, min(CHUNK, len(items) // (4 * workers)))
    chunks = list[list[T]]([[]])
    before = -1
    for number in sorted(range(len(items)), key=lambda number: (kinds[number], number)):
        if len(chunks[-1]) >= (size if kinds[number] != before else 2 * size):
            chunks.append([])
        chunks[-1].append(items[number])
        before = kinds[number]
    return [tuple(chunk) for chunk in chunks]


class ChunkWorker:
    """Does the work of chunks, with a model that it loads once."""

    def __init__(
        self, bundle: Path, digest: str, loading: Loading, begin: Callable[[Model], Work], chunks: Any, cores: int
    ) -> None:
        self._bundle = bundle
        self._digest = digest
        self._begin = begin
        self._chunks = chunks
        self._loading = replace(loading, threads=loading.threads or cores)
        self._work: Work | None = None

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, Any]:
        """The results of one chunk, or the error of a worker that cannot answer at all."""
        import ray

        number = int(batch["chunk"][0])
        try:
            if self._work is None:
                if sha256(self._bundle / "vtx.json") != self._digest:
                    raise BundleError(
                        f"{self._bundle} is another bundle on this machine; give every worker the same one under this "
                        "path"
                    )
                self._work = self._begin(self._loading.load(self._bundle))
            results = self._work(ray.get(self._chunks)[number])
        except VtxError as e:
            return {"chunk": [number], "results": ["[]"], "error": [str(e)]}
        return {"chunk": [number], "results": [json.dumps(results)], "error": [""]}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
