"""The model for VLMEvalKit: its own data sets over local files give the scores that we count of the same answers."""

from __future__ import annotations

import base64
import csv
import importlib.util
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.bundles import export
from tests.support.gated import WAIT
from tests.support.json_files import write_json
from tests.support.local_sets import LocalQuestion, answers_of, figures, local_sets
from vtx.exporter.bundling.options import DEMO
from vtx.runtime.api.load import load

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "plugins" / "vlmevalkit"
REDUCE = "fastv:k=2,ratio=0.75"
pytestmark = [
    pytest.mark.suites,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("vlmeval") is None, reason="VLMEvalKit is not installed; make test-suites does it"
    ),
]
SETS = {
    "pope": ("POPE", "ImageYORNDataset"), "mme": ("MME", "ImageYORNDataset"),
    "textvqa": ("TextVQA_VAL", "ImageVQADataset"),
}  # fmt: skip
SHORT = "\nAnswer the question using a single word or phrase."  # which the suite adds in VQA sets
# Its sets know the checksum of the real files, for which these small ones stand in.
RUN = """
import vtx_vlmevalkit
from vlmeval.dataset import ImageVQADataset, ImageYORNDataset
ImageVQADataset.DATASET_MD5 = ImageYORNDataset.DATASET_MD5 = {}
vtx_vlmevalkit.main()
"""


def write(folder: Path, name: str, questions: list[LocalQuestion]) -> None:
    """A file of VLMEvalKit: tab-separated lines, pictures in base64."""
    with (folder / f"{name}.tsv").open("w", newline="") as file:
        lines = csv.writer(file, delimiter="\t")
        lines.writerow(["index", "image", "image_path", "question", "answer", "category"])
        for number, question in enumerate(questions):
            buffer = io.BytesIO()
            question.picture.save(buffer, "PNG")
            picture, label = base64.b64encode(buffer.getvalue()).decode(), question.answers[0].capitalize()
            label = str(list(question.answers)) if len(question.answers) > 1 else label
            lines.writerow([number, picture, question.image, question.text, label, question.group or "random"])


def test_scores_of_the_suite_are_those_of_our_count(tmp_path: Path) -> None:
    bundle = export(Path(DEMO), tmp_path / "demo", (4,), "fp16", reductions=("none", REDUCE)).folder
    sets, data = local_sets(), tmp_path / "data"
    asked = {**sets, "textvqa": [replace(question, text=question.text + SHORT) for question in sets["textvqa"]]}
    data.mkdir()
    for task, (name, _) in SETS.items():
        write(data, name, sets[task])
    common = {"class": "Vtx", "bundle": str(bundle), "device": "cpu", "threads": 1, "max_new_tokens": 16}
    models = {"withdrawn": {**common, "k": 4}, "pruned": {**common, "k": "none", "reduce": REDUCE}}
    named = {name: {"class": kind, "dataset": name} for name, kind in SETS.values()}
    write_json(tmp_path / "run.json", {"model": models, "data": named})
    (tmp_path / "run.py").write_text(RUN)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{PLUGIN}", "LMUData": str(data)}
    done = subprocess.run(
        [sys.executable, tmp_path / "run.py", "--config", tmp_path / "run.json", "--work-dir", tmp_path / "out",
         "--judge", "exact_matching"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    with load(bundle, device="cpu", threads=1) as model:
        for label, k, reduce in (("withdrawn", 4, "none"), ("pruned", None, REDUCE)):
            pope, mme, text = (figures(task, sets[task], answers_of(model, asked[task], k, reduce)) for task in SETS)
            theirs = scores(tmp_path / "out", label, "POPE")
            shares = {
                "Overall": pope["f1"],
                "acc": pope["accuracy"],
                "precision": pope["precision"],
                "recall": pope["recall"],
            }
            assert {name: float(theirs[name]) for name in shares} == pytest.approx(
                {name: 100 * share for name, share in shares.items()}
            )
            points = scores(tmp_path / "out", label, "MME")
            assert float(points["perception"]) == pytest.approx(mme["perception"])
            assert float(points["reasoning"]) == pytest.approx(mme["cognition"])
            overall = scores(tmp_path / "out", label, "TextVQA_VAL")["Overall"]
            assert float(overall) == pytest.approx(100 * text["accuracy"])


def scores(folder: Path, model: str, name: str) -> dict[str, str]:
    """The first row of the suite's table of scores."""
    file = next(path for path in sorted(folder.rglob(f"{model}_{name}*.csv")) if path.stem.endswith(("_score", "_acc")))
    with file.open(newline="") as lines:
        return next(csv.DictReader(lines))
