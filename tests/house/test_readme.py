"""What the README shows is what comes out."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.bundles import export
from tests.support.exported import THREADS
from vtx.exporter.bundling.options import DEMO
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
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


def blocks(language: str) -> list[str]:
    return [block for found, block in BLOCK.findall((ROOT / "README.md").read_text("utf-8")) if found == language]


@pytest.mark.slow
def test_the_readme_s_commands_and_its_program_run_as_they_stand(tmp_path: Path) -> None:
    """Those that need only the demo, in an empty directory with the example pictures, in the order of the page."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    home = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    folder = os.path.dirname(sys.executable)
    environment = {**os.environ, **home, "PATH": os.pathsep.join([folder, os.environ["PATH"]])}
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    ours = [
        line for line in lines if line.startswith(("vtx-export --k", "vtx-run examples", "vtx-run --bundle pruned"))
    ]
    assert len(ours) == 4
    program = f"{shlex.quote(sys.executable)} -W error -c {shlex.quote(blocks('python')[0])}"
    said = []
    for command in [*ours, program]:
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        said.append(done.stdout.decode())
    assert [text.strip() for text in said[:4]] == ["", "5", "", "purple"]
    assert (tmp_path / "kept.png").stat().st_size > 1000
    assert said[4].startswith("5top right ")
