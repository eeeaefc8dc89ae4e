"""An evaluation on a Ray cluster: workers answer the questions about an image, and count what each answer costs."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import RequestError
from vtx.runtime.strict import json_value
from vtx.tools.bench.methods import Method
from vtx.tools.common.cluster import Cluster, Work, on_cluster
from vtx.tools.common.loading import Loading
from vtx.tools.evaluation.ask import BAD, CostedAnswer, Evaluated, SideBySide, check_methods
from vtx.tools.evaluation.questions import TaskQuestion

Item: TypeAlias = tuple[int, TaskQuestion, tuple[Method, ...]]  # the question's number in the data first


def on_workers(cluster: Cluster, folder: Path, loading: Loading, parallel: int) -> Evaluated:
    """A bundle that the workers of a cluster load; they measure no times.

    The device and the arithmetic are those that were asked for; where they are left to it, a worker chooses its own.
    """
    bundle = Bundle.open(folder, key=loading.key)

    def many(options: Options) -> Any:
        def answers(
            questions: Sequence[TaskQuestion], wanted: Mapping[int, Collection[Method]]
        ) -> Generator[tuple[int, Method, CostedAnswer | Exception]]:
            items: list[Item] = [(n, questions[n], tuple(methods)) for n, methods in wanted.items() if methods]
            beginning = partial(begin, options, parallel)
            for (n, _, methods), result in on_cluster(cluster, folder.resolve(), loading, beginning, items, _images):
                for method, (answer, error) in zip(methods, result, strict=True):
                    yield n, method, CostedAnswer(**answer) if answer else RequestError(error)

        return answers

    return Evaluated(bundle, f"{loading.device} (Ray)", loading.compute or "default", loading.fit, many)


def begin(options: Options, parallel: int, model: Model) -> Work:
    """The work of a worker that has loaded `model`: of each question its answers by method, or what is wrong."""
    side_by_side = SideBySide(model, options, parallel)

    def answer(items: Sequence[Item]) -> list[list[tuple[Any, str]]]:
        check_methods(model, [method for _, _, methods in items for method in methods])
        answers = dict[tuple[int, Method], tuple[Any, str]]()
        methods_of = {number: methods for number, (_, _, methods) in enumerate(items)}
        for number, method, reply in side_by_side.answers([question for _, question, _ in items], methods_of):
            if isinstance(reply, Exception) and not isinstance(reply, BAD):
                raise reply
            answers[number, method] = (None, str(reply)) if isinstance(reply, Exception) else (json_value(reply), "")
        return [[answers[number, method] for method in methods] for number, methods in methods_of.items()]

    return answer


def _images(item: Item) -> Any:
    return item[1].images, item[1].videos
