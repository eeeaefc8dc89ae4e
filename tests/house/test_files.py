"""Files of checkpoints and bundles are opened by `runtime/bundle/files.py` and nowhere else."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
ROOMS = [
    "runtime/bundle", "runtime/prompt", "runtime/session", "runtime/api", "runtime/report", "runtime/policies",
    "runtime/backends", "exporter/checkpoint", "exporter/graphs", "exporter/calibration",
    "tools/calibration", "tools/estimate",
]  # fmt: skip
READS = {"open", "read_text", "read_bytes", "memmap", "fromfile", "from_file", "copyfile", "copytree"}
OWN = {"open": {"Bundle", "model", "Conversation", "files", "self", "folder", "cls", "Image"}}
# What is opened there is not a file of a checkpoint or a bundle that is read, or an open file is handed on.
ALLOWED = {
    "runtime/bundle/files.py": "this is the place",
    "runtime/bundle/seal.py": "writes",
    "runtime/bundle/safetensors.py": "reads open files, and writes",
    "runtime/backends/openvino/narrow.py": "/proc/self/maps",
    "runtime/backends/openvino/integers.py": "a nameless file of its own",
    "tools/calibration/report.py": "a report that the user names",
    "tools/estimate/sizes.py": "published sizes, of the package",
    "runtime/report/doctor.py": "/proc/cpuinfo",
    "runtime/report/traces/files.py": "traces that the user names",
    "runtime/host/confined_child.py": "the child's own request and result",
    "exporter/checkpoint/resolving.py": "copies in an empty folder of our own",
    "exporter/checkpoint/published_ids.py": "copies in an empty folder of our own, in the confined process",
    "exporter/checkpoint/text.py": "copies in an empty folder of our own",
    "exporter/checkpoint/original/tokenizer.py": "a copy in an empty folder of our own, in the confined process",
}


def reads(path: Path) -> list[str]:
    """Calls in a module that open a file by its path."""
    calls = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
        owner = "files" if ".files" in owner else owner
        if name in READS and owner.rpartition(".")[2].lstrip("_") not in OWN.get(name, set()):
            calls.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(function)}")
    return calls


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_opens_files_of_checkpoints_or_bundles_by_itself(room: str) -> None:
    paths = [path for path in sorted((ROOT / room).rglob("*.py")) if path.relative_to(ROOT).as_posix() not in ALLOWED]
    assert paths
    assert [call for path in paths for call in reads(path)] == []


def test_the_search_sees_what_it_looks_for(tmp_path: Path) -> None:
    path = ROOT / "runtime/bundle/files.py"
    assert any("os.open" in call for call in reads(path))


def test_the_packages_for_a_machine_with_a_gpu_are_those_of_the_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = {line for line in project["dependencies"] if ";" not in line}
    wanted |= {line for extra in ("export", "gpu", "rtx") for line in extras[extra]}
    wanted |= {line for line in extras["dev"] if line.startswith(("hypothesis>", "pytest>", "setuptools>"))}
    lines = (ROOT / "scripts/gpu-tests.txt").read_text(encoding="utf-8").splitlines()
    needed = {line.partition("; platform_machine")[0] for line in lines if not line.startswith("#")}
    assert needed == wanted | {line for line in extras["cpu"] if line.startswith("onnxruntime")}


def test_the_run_with_a_gpu_installs_its_packages_and_has_every_test_that_needs_one() -> None:
    _, _, rest = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ntest-gpu:")
    recipe = rest.partition("\n\n")[0]
    assert "-m pip install --requirement scripts/gpu-tests.txt" in recipe
    marked = re.compile(r"^(pytestmark = |@)pytest\.mark\.gpu$", re.MULTILINE)
    paths = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if marked.search(path.read_text("utf-8"))]
    assert paths
    assert recipe.splitlines()[-1].split()[-len(paths) :] == [path.relative_to(ROOT).as_posix() for path in paths]
