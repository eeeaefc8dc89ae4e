"""Who takes part, and where each one's environment and converted checkpoint stand."""

from __future__ import annotations

import importlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.contract import AUTO, TORCH, Precision, Result, Work
from benchmarks.peers.worker import MARK

US = "vtx"
CPP = "libvtx"  # us, too: the same bundles in C++
RIVALS = (US, CPP, "transformers", "exporters", "openvino", "openvino_cdpruner", "llamacpp", "ortgenai")
WITH_OPTIONS = ("openvino_cdpruner",)  # nothing without options
INSTALLED = tuple(f"{rival}@{AUTO}" for rival in RIVALS if rival not in WITH_OPTIONS)
USUAL = (US, f"{US}/9", *RIVALS[1:])  # the checkpoint made by default has 16 layers
KINDS = {"f16": "bf16", "q8_0": "int8", "q4_0": "int4"}  # what a rival's own word is compared with
ROOT = Path(__file__).resolve().parents[2]
READY = "ready"
LIMIT = 1800  # seconds for one run; to install and convert takes what it takes


class PeerError(Exception):
    """A contender that could not be had, with the last line of what it said."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One rival at one precision; "int8@openvino/9" is stored in int8, run on OpenVINO, with withdrawal at K = 9."""

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
        return Precision.parse(self.precision).stored

    @property
    def installed(self) -> bool:
        return Precision.parse(self.precision).installed

    @property
    def k(self) -> int | None:
        return Precision.parse(self.precision).k

    @property
    def whole(self) -> Contender:
        """The same with the image in all layers."""
        return Contender(self.rival, self.precision.partition("/")[0])

    @property
    def module(self) -> Any:
        return importlib.import_module(f"benchmarks.peers.rivals.{self.rival}")

    @property
    def converted(self) -> str:
        """The rival whose environment and conversion it uses, itself as a rule."""
        return getattr(self.module, "SAME_AS", self.rival)


@dataclass(frozen=True, slots=True)
class Places:
    """Folders: of environments, of converted checkpoints; and pip's words for the torch to install.

    `ours`: the Python with vtx of contenders as installed, where it is not this one.
    """

    venvs: Path
    work: Path
    torch: str
    ours: Path | None = None

    def python(self, contender: Contender) -> Path:
        if contender.rival == US and contender.installed and self.ours:
            return self.ours.absolute()  # not resolved: a link in a virtual environment
        if not contender.module.REQUIREMENTS:
            return Path(sys.executable)
        return self.venvs / f"peers-{contender.converted}" / "bin" / "python"

    def model(self, contender: Contender) -> Path:
        return self.work / f"{contender.converted}-{contender.stored}{'-installed' * contender.installed}"


def contenders(words: Sequence[str]) -> list[Contender]:
    """Those that `words` name, as in "rival", "rival@auto", "rival:precision", for vtx each with "/K"; else USUAL.

    Raises:
        ValueError: a word that names none.

    """
    every = [Contender(rival, p) for rival in RIVALS for p in Contender(rival, "").module.PRECISIONS]
    every += dict.fromkeys(Contender(c.rival, f"{c.stored}@{AUTO}") for c in every if c.rival not in WITH_OPTIONS)
    chosen = [c for word in words or USUAL for c in _named(word, every)]
    return sorted(dict.fromkeys(chosen), key=lambda c: (every.index(c.whole), c.k or 0))


def _named(word: str, every: Sequence[Contender]) -> list[Contender]:
    who, slash, k = word.partition("/")
    found = [c for c in every if who == f"{c.rival}:{c.precision}" or (who == c.rival and not c.installed)]
    found += [c for c in every if c.installed and who == f"{c.rival}@{AUTO}"]
    if not found:
        known = {c.rival for c in every} | {f"{c.rival}:{c.precision}" for c in every}
        raise ValueError(f"{word}: not among {', '.join(sorted(known))}")
    if not slash:
        return found
    if not k.isdecimal() or {c.rival for c in found} != {US}:
        raise ValueError(f"{word}: a K is a number, and only {US} has one, as in {US}/9 or {US}:int8/9")
    return [Contender(c.rival, f"{c.precision}/{int(k)}") for c in found]


def prepare(contender: Contender, checkpoint: Path, places: Places, ks: Iterable[int] = ()) -> None:
    """See that environment and conversion are there, prebuilt for all `ks`; what is ready stays. Raises PeerError."""
    install(contender, places)
    folder = places.model(contender)
    source = str(checkpoint.resolve())
    needed = sorted(map(str, ks))
    marker = folder / READY
    lines = marker.read_text().splitlines() if marker.exists() else []
    if lines[:1] == [source] and set(needed) <= set(lines[1:]):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    word = contender.stored + f"@{AUTO}" * contender.installed + (f"/{','.join(needed)}" if needed else "")
    here = replace(places, ours=None)  # vtx is exported by this environment, answers may come from one without torch
    call(worker(contender, here, "prepare", word, source, str(folder.resolve())))
    marker.write_text("\n".join([source, *needed, ""]))


def prebuilt(contender: Contender, places: Places) -> list[str]:
    """The K that its conversion holds, whoever asked for them."""
    return (places.model(contender) / READY).read_text().splitlines()[1:]


def install(contender: Contender, places: Places) -> None:
    steps = contender.module.REQUIREMENTS
    python = places.python(contender)
    marker = python.parent.parent / READY
    wanted = f"{places.torch}\n{steps}\n"
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
    said = call(worker(contender, places, "run"), work.to_json(), LIMIT)
    lines = [line for line in said.splitlines() if line.startswith(MARK)]
    return Result.from_dict(json.loads(lines[-1].removeprefix(MARK)))


def worker(contender: Contender, places: Places, action: str, *rest: str) -> list[str]:
    return [str(places.python(contender)), "-m", "benchmarks.peers.worker", action, contender.rival, *rest]


def call(command: Sequence[str], given: str | None = None, limit: float | None = None) -> str:
    """Run a command from the root of the repository; what it printed. Raises PeerError."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, input=given, capture_output=True, text=True, timeout=limit, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(str(error)) from error
    if done.returncode < 0:
        raise PeerError(f"it ended by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise PeerError(lines[-1])
    return done.stdout
