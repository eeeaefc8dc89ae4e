"""The model for lmms-eval: the suite's own tasks over local sets give the scores that we count of the same answers."""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.bundles import export
from tests.support.gated import WAIT
from tests.support.json_files import read_json
from tests.support.lmms_prompts import CASES
from tests.support.local_sets import LocalQuestion, answers_of, figures, local_sets
from vtx.exporter.bundling.options import DEMO
from vtx.runtime.api.load import load
from vtx.tools.evaluation.metrics import CONTRACTIONS, judge_choice, judge_mme, normalize, normalize_text
from vtx.tools.evaluation.questions import TaskQuestion

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "plugins" / "lmms-eval"
REDUCE = "fastv:k=2,ratio=0.75"
pytestmark = [
    pytest.mark.suites,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("lmms_eval") is None, reason="lmms-eval is not installed; make test-suites does it"
    ),
]
# The suite's file of each task, the split it reads, and which of its scores is which of ours, by what factor.
TASKS: dict[str, tuple[str, str, dict[str, tuple[str, float]]]] = {
    "pope": ("pope/pope.yaml", "test", {
        "pope_accuracy": ("accuracy", 1), "pope_precision": ("precision", 1), "pope_recall": ("recall", 1),
        "pope_f1_score": ("f1", 1),
    }),
    "mme": ("mme/mme.yaml", "test", {
        "mme_perception_score": ("perception", 1), "mme_cognition_score": ("cognition", 1),
    }),
    "scienceqa": ("scienceqa/scienceqa.yaml", "test", {"exact_match": ("accuracy", 1)}),
    "vqav2": ("vqav2/vqav2_val.yaml", "validation", {"exact_match": ("accuracy", 1)}),
    "textvqa": ("textvqa/textvqa_val.yaml", "validation", {"exact_match": ("accuracy", 1)}),
}  # fmt: skip


def record(question: LocalQuestion, number: int) -> dict[str, Any]:
    """A row of the suite's data set."""
    row: dict[str, Any] = {"question_id": str(number), "image": question.picture, "question": question.text}
    if question.task in ("pope", "mme"):
        return {**row, "question_id": question.image, "answer": question.answers[0], "category": question.group}
    if question.task == "scienceqa":
        return {**row, "question": "Which?", "choices": list(question.choices), "answer": 1, "hint": ""}
    people = [{"answer": answer, "answer_id": n} for n, answer in enumerate(question.answers)]
    return {**row, "answers": people if question.task == "vqav2" else list(question.answers)}


def write_tasks(folder: Path, sets: dict[str, list[LocalQuestion]]) -> None:
    """The suite's own definitions; the data beside them, and no instruction after the questions."""
    from datasets import Dataset
    from lmms_eval import tasks

    suite = Path(tasks.__file__).parent
    for task, (file, split, _) in TASKS.items():
        data = folder / "data" / task
        data.mkdir(parents=True)
        rows = [record(question, number) for number, question in enumerate(sets[task])]
        Dataset.from_list(rows).to_parquet(data / f"{split}.parquet")
        text = (suite / file).read_text()
        for included in re.findall(r"^include: (\S+)$", text, re.MULTILINE):
            text = (suite / file).with_name(included).read_text() + "\n" + text.replace(f"include: {included}", "")
        text = re.sub(r"^dataset_path: .*$", f"dataset_path: {data}", text, flags=re.MULTILINE)
        text = re.sub(r"^dataset_name: .*$|^dataset_kwargs:\n  token: True$", "", text, flags=re.MULTILINE)
        text = re.sub(r"!function utils\.", f"!function lmms_eval.tasks.{Path(file).parent}.utils.", text)
        text = re.sub(r"post_prompt: .*$", 'post_prompt: ""', text, flags=re.MULTILINE)
        text = re.sub(r"^task: .*$", f"task: local_{task}", text, flags=re.MULTILINE)
        (folder / f"local_{task}.yaml").write_text(text)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lmms") / "demo"
    return export(Path(DEMO), folder, (4,), "fp16", reductions=("none", REDUCE)).folder


@pytest.mark.parametrize(
    ("arguments", "k", "reduce"),
    [("k=4", 4, "none"), ("k=none,reduce=fastv:k=2;ratio=0.75,device=cpu,threads=1", None, REDUCE)],
)
def test_scores_of_the_suite_are_those_of_our_count(
    tmp_path: Path, bundle: Path, arguments: str, k: int | None, reduce: str
) -> None:
    sets = local_sets()
    write_tasks(tmp_path, sets)
    paths = [str(ROOT / "src"), str(ROOT), *([] if installed() else [announced(tmp_path)])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "lmms_eval", "--model", "vtx", "--model_args", f"bundle={bundle},{arguments}",
         "--tasks", ",".join(f"local_{task}" for task in TASKS), "--include_path", tmp_path, "--batch_size", "1",
         "--output_path", tmp_path / "out"],
        env=environment, capture_output=True, text=True, timeout=WAIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    [file] = (tmp_path / "out").rglob("*results.json")
    results = read_json(file)["results"]
    scores = []
    with load(bundle, device="cpu", threads=1) as model:
        for task, (_, _, names) in TASKS.items():
            ours = figures(task, sets[task], answers_of(model, sets[task], k, reduce))
            for theirs, (name, factor) in names.items():
                assert results[f"local_{task}"][f"{theirs},none"] == pytest.approx(factor * ours[name]), (task, name)
                scores.append(ours[name])
    assert len(set(scores)) > 3, "scores that differ show that they are not all 0 or all 1"


@pytest.mark.parametrize("task", CASES)
def test_prompts_that_we_expect_of_the_suite_are_its_own(task: str) -> None:
    import yaml
    from lmms_eval import tasks

    case = CASES[task]
    text = (Path(tasks.__file__).parent / case.definition).read_text()
    settings = yaml.safe_load(re.sub(r"!function \S+", "", text)).get("lmms_eval_specific_kwargs", {}).get("default")
    module, _, name = case.function.rpartition(".")
    function = getattr(importlib.import_module(f"lmms_eval.tasks.{module}"), name)
    assert function(dict(case.doc), *([settings] if settings else [])) == case.prompt


def installed() -> bool:
    from importlib.metadata import entry_points

    return any(point.name == "vtx" for point in entry_points(group="lmms_eval.models"))


def announced(folder: Path) -> str:
    """The plug-in as if it were installed: its module, and metadata with its entry point."""
    place = folder / "site"
    metadata = place / "vtx_lmms_eval-0.dist-info"
    metadata.mkdir(parents=True)
    (place / "vtx_lmms_eval.py").symlink_to(PLUGIN / "vtx_lmms_eval.py")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vtx-lmms-eval\nVersion: 0\n")
    project = (PLUGIN / "pyproject.toml").read_text()
    points = re.search(r'^\[project\.entry-points\."(.*)"\]\n(\w+) = "(.*)"$', project, re.MULTILINE)
    assert points
    (metadata / "entry_points.txt").write_text(f"[{points[1]}]\n{points[2]} = {points[3]}\n")
    return str(place)


def test_answers_are_normalised_as_the_suite_does() -> None:
    from lmms_eval.tasks._task_utils.vqa_eval_metric import EvalAIAnswerProcessor

    rng, processor = random.Random(0), EvalAIAnswerProcessor()
    marks = "a|an|the|two|ten|none|Yes.|1,000|2.5|black/white|it's|-|?|!|(a)|x-ray|,|3:30"
    words = [*CONTRACTIONS, *marks.split("|")]
    for _ in range(4000):
        text = " ".join(rng.choice(words) for _ in range(rng.randint(1, 5)))
        plain = processor.process_digit_article(processor.process_punctuation(text))
        assert (normalize(text), normalize_text(text)) == (plain, processor(text)), text


@pytest.mark.parametrize("text", ["yes", "Yes.", "no", "N", "y", "No, it is not", "it is", "", "Not at all", "nope"])
def test_mme_s_answers_are_understood_as_the_suite_does(text: str) -> None:
    from lmms_eval.tasks.mme.utils import parse_pred_ans

    assert judge_mme(TaskQuestion((), "?", ("yes",), "a"), text)[0] == parse_pred_ans(text)


@pytest.mark.parametrize("text", ["B", "b", "B.", "B. two", "A", "A. one", "two", "", "C"])
def test_choices_are_scored_as_the_suite_does(text: str) -> None:
    from lmms_eval.tasks.scienceqa.utils import sqa_process_results

    theirs = sqa_process_results({"choices": ["one", "two"], "answer": 1}, [text])["exact_match"]
    assert judge_choice(TaskQuestion((), "?", ("B",), "a", "", 2), text)[1] == theirs
