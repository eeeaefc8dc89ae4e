"""A batch on a Ray cluster: the same answers as on one machine, also where a worker is killed."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.exported import Models
from tests.support.tiny import random_image

from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.errors import DeviceError
from vtx.tools.batch.cluster import answer_on_cluster
from vtx.tools.batch.run import Asking, on_this_machine, run_batch
from vtx.tools.batch.tasks import read_tasks
from vtx.tools.common.loading import Loading

ASKING = Asking(3, "none", Options(max_new_tokens=4, ignore_eos=True), most_bad=3, loading=Loading("cpu", threads=1))
LINES = 60
BAD = 17  # the line that is no JSON
needs_ray = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason='ray is not installed; pip install "vtx-edge[ray]"'
    ),
]


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models()


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    for number in range(3):
        random_image(number).save(tmp_path / f"{number}.png")
    lines = [json.dumps({"id": n, "image": f"{n % 3}.png", "question": f"red {n}?"}) for n in range(1, LINES + 1)]
    lines[BAD - 1] = "{"
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(lines))
    return file


def run(
    model: Model, questions: Path, out: Path, address: str | None, count: Callable[[int], None] = lambda _: None
) -> list[dict[str, Any]]:
    """The answers without their times."""
    tasks = read_tasks(questions, None)
    answer = on_this_machine(model, ASKING)
    if address:
        answer = lambda lines: answer_on_cluster(address, model.bundle.folder, ASKING, lines)  # noqa: E731
    report = lambda _phase, done, _total: count(done)  # noqa: E731
    run_batch(answer, model.bundle.folder, tasks, out, ASKING, report=report, warn=lambda _: None)
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    kept = ("line", "id", "text", "token_ids", "kv_slots", "error")
    return [{name: answer[name] for name in kept if name in answer} for answer in answers]


def test_without_ray_the_extra_is_named(model: Model, questions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DeviceError, match=r'pip install "vtx-edge\[ray\]"'):
        run(model, questions, questions.with_name("out.jsonl"), "auto")


class TestCluster:
    pytestmark = needs_ray

    def test_a_batch_that_loses_a_worker_midway_is_whole_and_in_order(
        self, model: Model, questions: Path, cluster: Any
    ) -> None:
        alone = run(model, questions, questions.with_name("alone.jsonl"), None)
        counted: list[int] = []

        def lose(done: int) -> None:
            counted.append(done)
            if done == LINES // 3:
                cluster.remove_node(cluster.workers[0], allow_graceful=False)

        shared = run(model, questions, questions.with_name("shared.jsonl"), cluster.address, lose)
        assert [answer["line"] for answer in shared] == list(range(1, LINES + 1))
        assert shared == alone
        assert counted == list(range(LINES + 1)), "every line came once"

    def test_a_worker_that_cannot_answer_ends_the_batch_with_its_reason(
        self, model: Model, questions: Path, cluster: Any
    ) -> None:
        asking = replace(ASKING, k=4)
        tasks = read_tasks(questions, None)
        with pytest.raises(DeviceError, match=r"cannot answer: K = 4 was not prebuilt"):
            list(answer_on_cluster(cluster.address, model.bundle.folder, asking, tasks.lines))
