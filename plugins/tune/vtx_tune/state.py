"""The saved state of a tuning: trained weights, optimizer and step in one safetensors file; and the log next to it."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from vtx.runtime.bundle.safetensors import Header, read_header, read_tensor, write_safetensors
from vtx.runtime.errors import ExportError, RequestError

STATE = "state.safetensors"
LOG = "log.csv"
COLUMNS = ("step", "loss", "kl", "ce", "hidden", "k", "lr", "grad_norm", "seconds")
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class StateFile:
    """The state in `folder` of the tuning that `identity` names; a file of another one is refused."""

    folder: Path
    identity: str

    @property
    def path(self) -> Path:
        return self.folder / STATE

    def step(self) -> int:
        """The step of the saved state, 0 if nothing is saved. Raises RequestError as `load` does."""
        return int(self._checked().metadata["step"]) if self.path.exists() else 0

    def _checked(self) -> Header:
        header = read_header(self.path, error=RequestError)
        if header.metadata.get("tuning") != self.identity:
            raise RequestError(
                f"{self.folder} holds a tuning with another model, other data or other options; name another --out, "
                "or remove it"
            )
        if not header.metadata.get("step", "").isdecimal():
            raise RequestError(f"{self.path} is damaged; remove it to begin again")
        return header

    def save(self, step: int, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Replace the saved state once the new one is whole. Raises ExportError; the old one then stays."""
        tensors: dict[str, NDArray[np.float32]] = {}
        for name, parameter in parameters.items():
            tensors[f"weight/{name}"] = parameter.detach().float().cpu().numpy()
            for moment in _MOMENTS:
                tensors[f"{moment}/{name}"] = optimizer.state[parameter][moment].float().cpu().numpy()
        write_safetensors(self.path, tensors, {"tuning": self.identity, "step": str(step)})

    def load(self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
        """Set the weights and the optimizer to the saved state and return its step, 0 if nothing is saved."""
        if not self.path.exists():
            return 0
        header = self._checked()
        kinds = ("weight", *_MOMENTS)
        step = int(header.metadata["step"])
        shapes = {f"{kind}/{name}": tuple(p.shape) for kind in kinds for name, p in parameters.items()}
        if {name: info.shape for name, info in header.tensors.items()} != shapes:
            raise RequestError(f"{self.path} is damaged; remove it to begin again")
        for name, parameter in parameters.items():
            stored = {
                kind: torch.from_numpy(read_tensor(header.tensors[f"{kind}/{name}"], error=RequestError))
                for kind in kinds
            }
            parameter.data.copy_(stored["weight"])
            moments = {moment: stored[moment].to(parameter.device) for moment in _MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
        return step


def seconds_of_steps(folder: Path) -> float:
    """Seconds of all steps in log.csv, those before an interruption too."""
    with (folder / LOG).open(encoding="utf-8", newline="") as file:
        return sum(float(line["seconds"]) for line in csv.DictReader(file))


class Log:
    """log.csv: a line a step; on resuming, lines after the saved step are dropped."""

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / LOG
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        remaining = [line for line in lines[1:] if line.split(",")[0].isdecimal() and int(line.split(",")[0]) <= step]
        self._write("w", "\n".join([",".join(COLUMNS), *remaining]) + "\n")

    def add(self, values: Mapping[str, float | int]) -> None:
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow([f"{values[name]:.6g}" for name in COLUMNS])
        self._write("a", line.getvalue())

    def _write(self, mode: str, text: str) -> None:
        try:
            with self._path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as e:
            raise ExportError(f"cannot write {self._path} ({e.strerror}); free some space and run again") from e
