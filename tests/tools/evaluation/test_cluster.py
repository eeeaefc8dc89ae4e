"""An evaluation on a Ray cluster counts what one on this machine does, and encodes each image once."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.support.exported import Models
from tests.support.json_files import read_json
from tests.support.ray_standin import standin
from tests.support.tiny import random_image

from vtx.cli import evaluate
from vtx.runtime.api.model import Model
from vtx.runtime.errors import DeviceError
from vtx.tools.common.cluster import Cluster
from vtx.tools.common.loading import Loading
from vtx.tools.evaluation.ask import Asked, Evaluated, Inquiry, ask_all, make_methods
from vtx.tools.evaluation.cluster import on_workers
from vtx.tools.evaluation.questions import QuestionSet, TaskQuestion

LOADING = Loading("cpu", threads=1)
FASTV = "fastv:k=3"


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models(reductions=(FASTV,))


@pytest.fixture
def questions(tmp_path: Path) -> QuestionSet:
    """Six about each of two pictures in turn, one about no picture that can be read, and one twice."""
    for number in range(2):
        random_image(number).save(tmp_path / f"{number}.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    asked = [TaskQuestion((tmp_path / f"{n % 2}.png",), f"red {n}?", ("yes",), str(n % 2)) for n in range(12)]
    broken = TaskQuestion((tmp_path / "broken.png",), "red?", ("yes",), "broken")
    return QuestionSet("questions", (*asked[:7], broken, *asked[7:], asked[0]))


def asked(by: Evaluated, questions: QuestionSet, methods: Any, journal: Path) -> Asked:
    inquiry = Inquiry(questions, methods, 4, timed=0)
    return ask_all(by, inquiry, journal, report=lambda *_: None, predict=lambda _: None)


def test_workers_count_what_this_machine_counts_and_encode_each_image_once(
    model: Model, questions: QuestionSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = make_methods((None, 3), ("none", FASTV))
    here = asked(Evaluated.of(model, methods), questions, methods, tmp_path / "here")
    encoded, original = list[Any](), type(model.backend).vision

    def vision(self: Any, *given: Any) -> Any:
        encoded.append(given)
        return original(self, *given)

    monkeypatch.setattr(type(model.backend), "vision", vision)
    standin(monkeypatch, (1, 0))
    by = on_workers(Cluster("auto"), model.bundle.folder, LOADING, 4)
    there = asked(by, questions, methods, tmp_path / "there")
    assert there == here
    assert len(there.questions) == 13
    assert "broken.png" in there.skipped[0]
    assert len(encoded) == 2
    encoded.clear()
    assert asked(by, questions, methods, tmp_path / "there") == here
    assert not encoded, "what is in the journal is not asked again"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason='ray is not installed; pip install "vtx-edge[ray]"')
def test_two_workers_count_what_this_machine_counts(
    model: Model, questions: QuestionSet, tmp_path: Path, cluster: Any
) -> None:
    methods = make_methods((None, 3), ("none", FASTV))
    here = asked(Evaluated.of(model, methods), questions, methods, tmp_path / "here")
    by = on_workers(Cluster(cluster.address), model.bundle.folder, LOADING, 4)
    assert asked(by, questions, methods, tmp_path / "there") == here


def test_a_method_that_the_bundle_lacks_ends_the_evaluation(
    model: Model, questions: QuestionSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin(monkeypatch, (1, 0))
    by = on_workers(Cluster("auto"), model.bundle.folder, LOADING, 4)
    with pytest.raises(DeviceError, match="cannot answer: K = 4 was not prebuilt"):
        asked(by, questions, make_methods((4,), ("none",)), tmp_path / "answers")
    assert by == replace(by, alone=None), "it measures no times"


def test_the_command_evaluates_on_a_cluster_without_times(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = standin(monkeypatch, (2, 2))
    random_image(1).save(tmp_path / "1.png")
    lines = [{"image": "1.png", "question": f"red {n}?", "answer": "yes"} for n in range(3)]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = ["exact", str(tmp_path / "lines.jsonl"), "--bundle", str(model.bundle.folder), "--k", "none,3"]
    command += ["--device", "cpu", "--threads", "1", "--max-new-tokens", "4", "--out", str(tmp_path / "out")]
    run: Callable[..., Any] = lambda *more: CliRunner().invoke(evaluate, [*command, *more])  # noqa: E731
    told = run("--ray-address", "auto", "--ray-gpus", "0.5")
    assert told.exit_code == 0, told.output
    assert (seen.asked["compute"], seen.asked["num_gpus"]) == (2, 0.5)
    report = read_json(tmp_path / "out/report.json")
    assert report["model"]["device"] == "cpu (Ray)"
    assert all(method["first_token_ms"] is None for method in report["methods"])
    assert "times are not measured on a cluster" in told.output
    assert "give its --ray-address" in run("--ray-gpus", "1").output
