"""A new method is one file of Python and one of C++: the walk-through of CONTRIBUTING.md, followed in a copy."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cpp import BUILD, needs_cpp, onnxruntime
from tests.support.fixtures import Checkpoints
from tests.support.tiny import random_image

pytestmark = [needs_cpp, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
PARTS = ("runtime", "tools", "exporter", "commands", "profiles", "src", "scripts")
SPECS = ("every:n=2", "every:n=3", "every")
PYTHON = """
import json
import sys
import vtx

checkpoint, bundle, picture, *specs = sys.argv[1:]
exported = vtx.export(checkpoint, bundle, precision="fp32", reduce="every:n=2+odd")
with vtx.load(exported.folder, device="cpu", threads=1) as model, model.open(picture) as image:
    answers = [image.ask("How many?", reduce=spec, max_new_tokens=8) for spec in specs]
print(json.dumps([[list(answer.token_ids), list(answer.stats.vision_tokens_kept)] for answer in answers]))
"""


def blocks() -> dict[str, str]:
    """The files of the walk-through by their language."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## How to add a policy")[1]
    return dict(re.findall(r"```(python|cpp)\n(.*?)```", text, re.DOTALL))


def cpp_files(tree: Path) -> dict[str, bytes]:
    folder = tree / "runtime/cpp"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def link(build: Path, library: Path, output: Callable[..., str]) -> None:
    """libvtx with the methods of `build`, and all else as `make cpp` has built it, which takes most of a minute."""

    def of_methods(name: str) -> bool:
        return name.endswith(".o") and "policies" in name

    targets = (line.partition(":")[0] for line in output("ninja", "-C", build, "-t", "targets", "all").splitlines())
    methods = [target for target in targets if of_methods(target)]
    output("ninja", "-C", build, *methods)
    commands = output("ninja", "-C", BUILD, "-t", "commands", "libvtx.so").splitlines()
    command = next(line for line in commands if "-soname,libvtx.so" in line).split()
    kept = [word for word in command[command.index("&&") + 1 : -2] if not of_methods(word)]
    assert len(kept) < len(command) - 4, "it links none of the methods"
    kept[kept.index("-o") + 1] = str(library)
    first = next(number for number, word in enumerate(kept) if word.endswith(".o"))
    kept[first:first] = [str(build / method) for method in methods]
    output("env", "-C", BUILD, *kept)


def test_a_planted_method_answers_alike_in_both_runtimes(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    tree, build, bundle, picture = (tmp_path / name for name in ("tree", "build", "bundle", "picture.png"))
    tree.mkdir()
    for part in PARTS:
        shutil.copytree(ROOT / part, tree / part, symlinks=True)
    shutil.copy(ROOT / "cli.py", tree)
    before, files = cpp_files(tree), blocks()
    methods = tree / "runtime/policies/methods"
    (methods / "every.py").write_text(files["python"])
    # and a second one that has no file of C++
    (methods / "odd.py").write_text(files["python"].replace("every", "odd").replace("Every", "Odd"))
    (tree / "runtime/cpp/src/policies/methods/every.cpp").write_text(files["cpp"])
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "VTX_ONNXRUNTIME": onnxruntime()}

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, check=False)

    def output(*command: str | Path) -> str:
        done = run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    output(sys.executable, tree / "scripts/cpp_methods.py")
    after = cpp_files(tree)
    assert {name for name in after if after[name] != before.get(name)} == {
        "src/policies/methods/every.cpp",
        "src/policies/methods.inc",  # written by the script
    }
    options = ("-DVTX_UNITY=ON", "-DVTX_WERROR=ON", "-DCMAKE_BUILD_TYPE=Debug")
    output("cmake", "-S", tree / "runtime/cpp", "-B", build, "-G", "Ninja", *options)
    link(build, tmp_path / "libvtx.so.0", output)
    environment["LD_LIBRARY_PATH"] = str(tmp_path)

    random_image(4, (61, 47)).save(picture)
    want = json.loads(output(sys.executable, "-c", PYTHON, tiny_checkpoint(), bundle, picture, *SPECS))
    settings = ("--json", "--max-new-tokens", "8")
    ask = (BUILD / "vtx-cpp-run", "--bundle", bundle, *settings, picture, "How many?", "--reduce")
    found = [json.loads(output(*ask, spec)) for spec in SPECS]
    assert [[answer["token_ids"], answer["vision_tokens_kept"]] for answer in found] == want
    assert want[0][1] != want[1][1]
    refused = run(*ask, "odd")
    assert refused.returncode == 1
    assert (
        "odd is not built into libvtx, which has cdpruner, cls, dart, divprune, every, fastv, hiprune, lsm, mustdrop, "
        "pyramiddrop, random, visionzip" in refused.stderr
    )
    assert "every: n is 0; it must be at least 1" in run(*ask, "every:n=0").stderr
