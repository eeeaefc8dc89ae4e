"""A batch on a Ray cluster: the same answers as on one machine, also where a worker is killed."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.exported import Models
from tests.support.ray_standin import standin
from tests.support.tiny import random_image

from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.errors import DeviceError
from vtx.tools.batch.cluster import answer_on_cluster
from vtx.tools.batch.run import Asking, Batch, on_this_machine, run_batch
from vtx.tools.batch.tasks import read_tasks
from vtx.tools.common.cluster import CHUNK, Cluster, chunked
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
    model: Model, questions: Path, out: Path, cluster: Cluster | None, count: Callable[[int], None] = lambda _: None
) -> list[dict[str, Any]]:
    """The answers without their times."""
    tasks = read_tasks(questions, None)
    answer = on_this_machine(model, ASKING)
    if cluster:
        answer = lambda lines: answer_on_cluster(cluster, model.bundle.folder, ASKING, lines)  # noqa: E731
    report = lambda _phase, done, _total: count(done)  # noqa: E731
    run_batch(answer, Batch(model.bundle.folder, tasks, out, ASKING), report=report, warn=lambda _: None)
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    kept = ("line", "id", "text", "token_ids", "kv_slots", "error")
    return [{name: answer[name] for name in kept if name in answer} for answer in answers]


def test_without_ray_the_extra_is_named(model: Model, questions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DeviceError, match=r'pip install "vtx-edge\[ray\]"'):
        run(model, questions, questions.with_name("out.jsonl"), Cluster("auto"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "workers", "cores"),
    [(None, 2, 4), (1.0, 3, 2), (0.5, 6, 1), (2.0, 1, 4)],
)
def test_each_worker_has_its_share_of_gpus_and_answers_as_one_machine(
    gpus: float | None, workers: int, cores: int, model: Model, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines of 4 cores with 2 GPUs, and of 8 with one; a stand-in for Ray, whose workers are on the CPU."""
    seen = standin(monkeypatch, (4, 2), (8, 1), (2, 0) if gpus else (0, 0))
    shared = run(model, questions, questions.with_name("shared.jsonl"), Cluster("auto", gpus))
    assert shared == run(model, questions, questions.with_name("alone.jsonl"), None)
    assert (seen.asked["compute"], seen.asked["num_cpus"], seen.asked["num_gpus"]) == (workers, cores, gpus)
    assert all(seen.rows), "each has chunks"


def test_workers_of_a_gpu_have_one_unless_told_otherwise(
    model: Model, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(device: str, gpus: float | None, *machines: tuple[float, float]) -> Any:
        seen, asking = standin(monkeypatch, *machines), replace(ASKING, loading=Loading(device))
        with pytest.raises(DeviceError) as refused:
            list(answer_on_cluster(Cluster("auto", gpus), model.bundle.folder, asking, lines))
        return seen.asked.get("num_gpus", str(refused.value))

    lines = read_tasks(questions, None).lines
    assert [asked(device, None, (4, 2)) for device in ("cuda", "tensorrt")] == [1, 1]
    assert asked("cuda", 0.25, (4, 2)) == 0.25
    assert "no machine with a CPU core and 1 GPUs" in asked("cuda", None, (4, 0))
    assert "no machine with a CPU core and 3 GPUs" in asked("tensorrt", 3.0, (4, 2))
    assert "use --device cuda" in asked("cuda:1", None, (4, 2))


def test_chunks_keep_together_what_is_alike_up_to_twice_their_size() -> None:
    items = [(n % 3, n) for n in range(90)] + [(3, n) for n in range(2 * CHUNK + 2)]
    chunks = chunked(items, lambda item: item[0], 1)
    assert sorted(item for chunk in chunks for item in chunk) == sorted(items)
    assert max(map(len, chunks)) == 2 * CHUNK
    assert [{kind for kind, _ in chunk} for chunk in chunks] == [{0}, {1}, {2}, {3}, {3}]
    assert [len(chunk) for chunk in chunked(items, lambda item: item, 40)] == [1] * len(items)


class TestCluster:
    pytestmark = needs_ray

    @pytest.mark.parametrize(
        "address", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}", "nowhere", "127.0.0.1:99999999", "auto"]
    )
    def test_an_address_where_nobody_answers_is_refused_before_ray_waits_for_it(
        self, model: Model, questions: Path, monkeypatch: pytest.MonkeyPatch, address: str
    ) -> None:
        if address != "auto":  # which asks Ray, and at once
            monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray itself goes on trying for minutes"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = address.format(port=free.getsockname()[1])
        with pytest.raises(DeviceError, match="cannot join a Ray cluster at"):
            run(model, questions, questions.with_name("out.jsonl"), Cluster(address))

    def test_a_batch_that_loses_a_worker_midway_is_whole_and_in_order(
        self, model: Model, questions: Path, cluster: Any
    ) -> None:
        alone = run(model, questions, questions.with_name("alone.jsonl"), None)
        counted: list[int] = []

        def lose(done: int) -> None:
            counted.append(done)
            if done == LINES // 3:
                cluster.remove_node(cluster.workers[0], allow_graceful=False)

        shared = run(model, questions, questions.with_name("shared.jsonl"), Cluster(cluster.address), lose)
        assert [answer["line"] for answer in shared] == list(range(1, LINES + 1))
        assert shared == alone
        assert counted == list(range(LINES + 1)), "every line came once"

    def test_a_batch_whose_worker_is_killed_loses_and_repeats_nothing(
        self, model: Model, questions: Path, cluster: Any
    ) -> None:
        """By SIGKILL, in the process that holds the model; Ray starts another one and gives it the chunk again."""
        alone = run(model, questions, questions.with_name("alone.jsonl"), None)
        counted, killed = list[int](), list[int]()

        def kill(done: int) -> None:
            counted.append(done)
            if done == LINES // 3:
                for process in psutil.process_iter(["cmdline"]):
                    if "ChunkWorker" in " ".join(process.info["cmdline"] or ()) and not killed:
                        killed.append(process.pid)
                        process.kill()

        shared = run(model, questions, questions.with_name("shared.jsonl"), Cluster(cluster.address), kill)
        assert killed
        assert shared == alone
        assert counted == list(range(LINES + 1)), "every line came once"

    def test_a_worker_that_cannot_answer_ends_the_batch_with_its_reason(
        self, model: Model, questions: Path, cluster: Any
    ) -> None:
        asking = replace(ASKING, k=4)
        tasks = read_tasks(questions, None)
        with pytest.raises(DeviceError, match=r"cannot answer: K = 4 was not prebuilt"):
            list(answer_on_cluster(Cluster(cluster.address), model.bundle.folder, asking, tasks.lines))
