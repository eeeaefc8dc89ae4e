"""The wheel: what it holds, and that it answers where nothing else of vtx is."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.distribution import ROOT, build_wheel, run
from vtx.tools.data.scenes import Scene, Thing, draw

NOWHERE = "http://127.0.0.1:9"  # the discard port: whatever reaches for the network fails at once


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment: vtx from the wheel, all other packages from the one that runs the tests."""
    folder = tmp_path_factory.mktemp("installed") / "env"
    venv.create(folder)
    python = folder / "bin" / "python"
    pip_install = ("-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    run(sys.executable, *pip_install, wheel, cwd=folder)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # Such a path is searched after the environment's own, and .pth files in it, an editable vtx, are not read.
    outer = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "outer.pth").write_text("\n".join(outer))
    return python.parent


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_linked_folders_and_nothing_else(wheel: Path) -> None:
    expected = {"vtx/__init__.py", "vtx/cli.py", "vtx/py.typed", "vtx/start.py"}
    for name in ("commands", "exporter", "profiles", "runtime", "tools"):
        for path in (ROOT / name).rglob("*"):
            if (
                path.suffix in (".py", ".toml")
                or path.parent.name in ("demo_model", "page")
                or path.name in ("models.json", "rthooks.dat")
            ):
                expected.add(f"vtx/{path.relative_to(ROOT).as_posix()}")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        links = [i.filename for i in archive.infolist() if stat.S_ISLNK(i.external_attr >> 16)]
    assert held == expected
    assert {"vtx/exporter/demo_model/config.json", "vtx/exporter/demo_model/model.safetensors"} <= held
    assert not links


def test_workflows_name_every_action_by_its_hash() -> None:
    used = [line.strip() for file in (ROOT / ".github/workflows").glob("*.yml")
            for line in file.read_text(encoding="utf-8").splitlines() if "uses:" in line]  # fmt: skip
    assert len(used) > 10
    assert [line for line in used if not re.fullmatch(r"- uses: [\w./-]+@[0-9a-f]{40} # v[\d.]+", line)] == []


def test_the_metadata_names_each_python_that_is_tested_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    tested = re.search(r"python: (\[.*\])", (ROOT / ".github/workflows/checks.yml").read_text(encoding="utf-8"))
    assert tested
    assert re.findall(r"^Classifier: Programming Language :: Python :: (3\.\d+)$", text, re.M) == json.loads(tested[1])
    for field in ("Author: The vtx authors", "License-Expression: Apache-2.0", "License-File: LICENSE",
                  "Description-Content-Type: text/markdown", "Requires-Python: >=3.10"):  # fmt: skip
        assert f"\n{field}\n" in text


def test_the_audit_looks_at_pytorch_which_the_lock_leaves_out() -> None:
    assert "\ntorch==" not in (ROOT / "ci.lock").read_text()
    commands = run("make", "--dry-run", "audit", "TORCH=torch==9.8.7 --index-url x", cwd=ROOT)
    assert 'echo "torch==9.8.7" > build/torch.txt' in commands
    assert "--requirement build/torch.txt" in commands


@pytest.mark.slow
def test_an_extra_that_a_message_names_installs_without_an_index_of_vtx(installed: Path, tmp_path: Path) -> None:
    """Messages say `pip install "vtx-edge[...]"`: to pip, the vtx that is installed already is that vtx."""
    pip = (sys.executable, "-m", "pip", "--python", installed / "python")
    said = run(*pip, "install", "--dry-run", "--no-index", "vtx-edge[cpu,export,serve]", cwd=tmp_path)
    assert "Requirement already satisfied: vtx-edge[cpu,export,serve]" in said


def test_the_wheel_asks_for_no_exporting_package_unless_the_extra_does(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        lines = archive.read(metadata).decode().splitlines()
    needs = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Requires-Dist:")]
    plain = {need.split(">")[0] for need in needs if "extra ==" not in need}
    assert plain - {"tomli"} == {"click", "jinja2", "numpy", "pillow", "rich", "tokenizers"}


@pytest.mark.slow
def test_the_installed_wheel_exports_the_demo_and_answers_without_home_or_network(
    installed: Path, tmp_path: Path
) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    env = {"HOME": str(home), "PATH": os.pathsep.join((str(installed), os.defpath))}
    env |= dict.fromkeys(("http_proxy", "https_proxy"), NOWHERE)
    where = run(installed / "python", "-c", "import vtx; print(vtx.__file__)", cwd=work, env=env)
    assert Path(where).is_relative_to(installed.parent)

    circle = Scene((Thing("red", "circle", 4, 0.5, 0.5, 0.13),), (240, 240, 240))
    draw(circle, 224).save(work / "image.jpg")
    run("vtx-export", "--k", "16", "--precision", "fp16", cwd=work, env=env)
    answer = json.loads(run("vtx-run", "image.jpg", "What color is the circle?", "--json", cwd=work, env=env))

    assert answer["text"] == "red"
    assert answer["k"] == 16
    assert answer["precision"] == "fp16"
    assert {path.name for path in work.iterdir()} == {"image.jpg", "vtx-demo-k16-fp16"}
