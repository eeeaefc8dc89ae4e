"""Who takes part, and where each one's environment and converted checkpoint stand."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.contract import TORCH, Result, Work
from benchmarks.peers.worker import MARK

RIVALS = ("vtx", "transformers", "openvino", "llamacpp", "ortgenai")
KINDS = {"f16": "bf16", "q8_0": "int8", "q4_0": "int4"}  # what a rival's own word is compared with
ROOT = Path(__file__).resolve().parents[2]
READY = "ready"
LIMIT = 1800  # seconds for one run


class PeerError(Exception):
    """A contender that could not be had, with the last line of what it said."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One rival at one precision; "int8@openvino" is a checkpoint stored in int8, run on OpenVINO."""

    rival: str
    precision: str

    @property
    def name(self) -> str:
        return f"{self.rival} {self.precision}"

    @property
    def kind(self) -> str:
        return KINDS.get(self.stored, self.stored)

    @property
    def stored(self) -> str:
        return self.precision.partition("@")[0]

    @property
    def module(self) -> Any:
        return importlib.import_module(f"benchmarks.peers.rivals.{self.rival}")


@dataclass(frozen=True, slots=True)
class Places:
    """Folders: of environments, of converted checkpoints; and pip's words for the torch to install."""

    venvs: Path
    work: Path
    torch: str

    def python(self, contender: Contender) -> Path:
        if not contender.module.REQUIREMENTS:
            return Path(sys.executable)
        return self.venvs / f"peers-{contender.rival}" / "bin" / "python"

    def model(self, contender: Contender) -> Path:
        return self.work / f"{contender.rival}-{contender.stored}"


def contenders(words: Sequence[str]) -> list[Contender]:
    """Those that `words` name, "rival" or "rival:precision"; all where there is no word.

    Raises:
        ValueError: a word that names none.

    """
    every = [Contender(rival, p) for rival in RIVALS for p in Contender(rival, "").module.PRECISIONS]
    chosen = [c for c in every if not words or c.rival in words or f"{c.rival}:{c.precision}" in words]
    known = {c.rival for c in every} | {f"{c.rival}:{c.precision}" for c in every}
    if unknown := set(words) - known:
        raise ValueError(f"{', '.join(sorted(unknown))}: not among {', '.join(sorted(known))}")
    return chosen


def prepare(contender: Contender, checkpoint: Path, places: Places) -> None:
    """See that environment and converted checkpoint are there; what is ready stays. Raises PeerError."""
    install(contender, places)
    folder, source = places.model(contender), f"{checkpoint.resolve()}\n"
    marker = folder / READY
    if marker.exists() and marker.read_text() == source:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    call(worker(contender, places, "prepare", contender.stored, str(checkpoint.resolve()), str(folder.resolve())))
    marker.write_text(source)


def install(contender: Contender, places: Places) -> None:
    steps = contender.module.REQUIREMENTS
    python = places.python(contender)
    marker, wanted = python.parent.parent / READY, f"{places.torch}\n{steps}\n"
    if not steps or (marker.exists() and marker.read_text() == wanted):
        return
    if not python.exists():
        call([sys.executable, "-m", "venv", str(python.parent.parent)])
    for step in steps:
        words = [part for word in step for part in (places.torch.split() if word == TORCH else [word])]
        call([str(python), "-m", "pip", *words])
    marker.write_text(wanted)


def run(contender: Contender, work: Work, places: Places) -> Result:
    """One process: load, warm up, two questions. Raises PeerError."""
    said = call(worker(contender, places, "run"), work.to_json())
    lines = [line for line in said.splitlines() if line.startswith(MARK)]
    return Result.from_dict(json.loads(lines[-1].removeprefix(MARK)))


def worker(contender: Contender, places: Places, action: str, *rest: str) -> list[str]:
    return [str(places.python(contender)), "-m", "benchmarks.peers.worker", action, contender.rival, *rest]


def call(command: Sequence[str], given: str | None = None) -> str:
    """Run a command from the root of the repository; what it printed. Raises PeerError."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, input=given, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(str(error)) from error
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise PeerError(lines[-1])
    return done.stdout
