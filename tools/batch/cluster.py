"""A batch on a Ray cluster.

The answers come back to this process, which alone writes them: workers need the bundle and the images under the same
paths, and no directory to write to.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path

from vtx.runtime.api.model import Model
from vtx.runtime.scheduler.engine import Engine
from vtx.tools.batch.run import Asking, Line, Result, answer_lines, pictures_of
from vtx.tools.common.cluster import Cluster, Work, on_cluster


def answer_on_cluster(
    cluster: Cluster, bundle: Path, asking: Asking, lines: Sequence[Line]
) -> Generator[tuple[Line, Result]]:
    """The lines with their results, as they come. Raises as `on_cluster` does."""
    yield from on_cluster(cluster, bundle, asking.loading, partial(begin, asking), lines, pictures_of)


def begin(asking: Asking, model: Model) -> Work:
    """The work of a worker that has loaded `model`. Raises RequestError for a K or a reduction that it lacks."""
    model.loaded.policy(asking.k, asking.options, asking.reduce)
    engine = Engine("worker", model, asking.capacity)

    def answer(lines: Sequence[Line]) -> list[Result]:
        results = {line.number: result for line, result in answer_lines(engine, lines, asking)}
        return [results[line.number] for line in lines]

    return answer
