"""Try vtx with the lowest versions that pyproject.toml declares, each set of extras in a fresh environment.

    python scripts/lowest.py            # every lower bound: runtime extras, then the exporter
    python scripts/lowest.py --matrix   # every minor release of onnxruntime from the lower bound to the pinned one

In each environment vtx-doctor runs, and the demo answers one question; an environment with the exporter also exports
the demo. Packages are downloaded; PyTorch is installed by `--torch`, so its own lower bound is not tried without a
build for CPUs of that release.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vtx.runtime.backends.ort.library import INT8_KV_RELEASE

ROOT = Path(__file__).resolve().parents[1]
PICTURE, QUESTION, ANSWER = ROOT / "examples" / "scene-1.jpg", "How many shapes are there?", "5"
RUNTIMES = {"cpu": "cpu", "openvino": "openvino"}  # extra: the device that it brings
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[^]]*\])?>=(?P<version>[\w.]+)(?:,<[\w.]+)?(?:;(?P<marker>.*))?")


def main() -> None:
    """Run every environment; exit with 1 at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrix", action="store_true", help="onnxruntime's releases instead of the lower bounds")
    parser.add_argument("--torch", default="torch", help="what pip installs for PyTorch, options included")
    parser.add_argument("--bundle", type=Path, help="a demo bundle [default: exported by this environment]")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vtx-lowest-") as folder:
        work = Path(folder)
        bundles = [given.bundle] if given.bundle else [_export(work / "demo")]
        if given.matrix:
            narrow = _export(work / "demo-int8-kv", "--kv-precision", "int8")
            for release in onnxruntime_releases():
                able = tuple(map(int, release.split("."))) >= INT8_KV_RELEASE
                asked = [*bundles, narrow] if able else bundles
                _answer(work / release, [*bounds("dependencies"), f"onnxruntime=={release}.*"], "cpu", asked)
                if not able:
                    _refused(work / release / "bin" / "python", narrow)
            return
        for extra, device in RUNTIMES.items():
            _answer(work / extra, [*bounds("dependencies"), *bounds(extra)], device, bundles)
        requirements = [*bounds("dependencies"), *bounds("cpu"), *bounds("export")]
        lowest = [r for r in requirements if not r.startswith(("torch==", "tokenizers=="))]  # transformers pins its own
        print(f"== exporter: {given.torch} {' '.join(lowest)}", flush=True)
        python, demo = _environment(work / "export", lowest, given.torch.split()), work / "export" / "demo"
        _vtx(python, "export", "--k", "16", "--precision", "fp16", "--out", str(demo))
        _vtx(python, "doctor", str(demo))
        _check(_vtx(python, "run", "--bundle", str(demo), str(PICTURE), QUESTION))


def project() -> dict[str, object]:
    """The [project] table of pyproject.toml."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def bounds(extra: str) -> list[str]:
    """`name==lowest version` for the dependencies of an extra, or for "dependencies" themselves."""
    table = project()
    lines = table[extra] if extra == "dependencies" else table["optional-dependencies"][extra]  # type: ignore[index]
    pinned = []
    for line in lines:  # type: ignore[attr-defined]
        match = REQUIREMENT.fullmatch(line.replace(" ", ""))
        if match is None:
            raise SystemExit(f"lowest: {line!r} in pyproject.toml declares no lower bound; write name>=version")
        if not (match["marker"] and sys.version_info >= (3, 11)):
            pinned.append(f"{match['name']}=={match['version']}")
    return pinned


def onnxruntime_releases() -> list[str]:
    """Minor releases from the lower bound to the one in constraints.txt, as 1.27."""
    lowest = bounds("cpu")[0].partition("==")[2]
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    newest = re.search(r"^onnxruntime==([\d.]+)", pins, re.MULTILINE)
    assert newest is not None, "constraints.txt pins no onnxruntime"
    first, last = (int(version.split(".")[1]) for version in (lowest, newest[1]))
    return [f"1.{minor}" for minor in range(first, last + 1)]


def _answer(folder: Path, requirements: Sequence[str], device: str, bundles: Sequence[Path]) -> None:
    print(f"== {device}: {' '.join(requirements)}", flush=True)
    python = _environment(folder, requirements)
    _vtx(python, "doctor")
    for bundle in bundles:
        _vtx(python, "doctor", str(bundle), "--device", device)
        _check(_vtx(python, "run", "--bundle", str(bundle), "--device", device, str(PICTURE), QUESTION))


def _refused(python: Path, bundle: Path) -> None:
    """Check that an onnxruntime too old for K and V of 8 bits is refused with the release that is needed."""
    try:
        _vtx(python, "run", "--bundle", str(bundle), "--device", "cpu", str(PICTURE), QUESTION)
    except SystemExit as e:
        if f"need onnxruntime {'.'.join(map(str, INT8_KV_RELEASE))}" not in str(e):
            raise
        print("   refuses K and V of 8 bits by name", flush=True)
    else:
        raise SystemExit("lowest: an old onnxruntime accepted K and V of 8 bits")


def _environment(folder: Path, requirements: Sequence[str], first: Sequence[str] = ()) -> Path:
    """The Python of a new virtual environment with these packages; vtx itself is found by its path."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    for packages in filter(None, (first, requirements)):
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def _export(out: Path, *options: str) -> Path:
    _vtx(Path(sys.executable), "export", "--k", "16", "--precision", "fp16", "--out", str(out), *options)
    return out


def _vtx(python: Path, command: str, *words: str) -> str:
    script = f"import sys; sys.argv[0] = 'vtx-{command}'; from vtx.start import {command}; {command}()"
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([str(python), "-c", script, *words], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"lowest: vtx-{command} {' '.join(words)} ended with {done.returncode}\n{done.stderr}")
    return done.stdout


def _check(answer: str) -> None:
    if answer.strip() != ANSWER:
        raise SystemExit(f"lowest: the demo answered {answer.strip()!r}, not {ANSWER!r}")
    print("   answered right", flush=True)


if __name__ == "__main__":
    main()
