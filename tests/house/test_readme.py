"""What the README shows is what comes out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.bundles import export
from tests.support.exported import THREADS
from vtx.exporter.bundling.options import DEMO
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| \[(scene-\d)\]\((examples/scene-\d\.jpg)\) \| (.+?) \| (.+?) \|$", re.MULTILINE)


def shown() -> list[tuple[str, str, str, str]]:
    return ROW.findall((ROOT / "README.md").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    bundle = export(Path(DEMO), tmp_path_factory.mktemp("readme") / "demo", (16,), "fp16")
    return load(bundle.folder, threads=THREADS)


def test_the_readme_shows_ten_questions() -> None:
    assert len(shown()) == 10


@pytest.mark.parametrize(("picture", "path", "question", "answer"), shown())
def test_an_answer_in_the_readme_is_the_model_s(
    model: Model, picture: str, path: str, question: str, answer: str
) -> None:
    assert picture in path
    with model.open(ROOT / path) as image:
        assert image.ask(question).text == answer
