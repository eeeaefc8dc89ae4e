"""Gates in the loop of a tuning: halfway they choose the K of what follows; at its end they are trained anew."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtx.exporter.calibration.source import OpenedModel, open_source
from vtx.exporter.gates.fit import FitOptions, all_odds, held_out_of, write_gates
from vtx.exporter.gates.train import GateItems, GateTraining, gates_of
from vtx.exporter.gates.workdir import MeasureOptions
from vtx.exporter.reference.prompts import Source
from vtx.runtime.errors import RequestError
from vtx.runtime.units import Progress
from vtx.tools.calibration.gates import THRESHOLDS, HeldOut, exits
from vtx.tools.common.files import write_json
from vtx.tools.data.items import Data, Item
from vtx_tune.judge import deployed
from vtx_tune.options import TuneOptions
from vtx_tune.write import Changed, write_merged

GATES = "gates.safetensors"
HALFWAY = "halfway"
CHOSEN = "chosen.json"
FITTED = FitOptions(alpha=math.inf)  # labels by the answer alone: a cross-entropy near 0 is bounded by noise


def choose(
    source: Source, changed: Changed, items: Sequence[Item], options: TuneOptions, out: Path, report: Progress
) -> None:
    """Train gates on the model as it is now, and write the K that they choose for each of `items`, None for none."""
    folder = out / HALFWAY
    merged = folder / "merged"
    bundle = folder / "bundle"
    measured = folder / "measured"
    if not merged.exists():
        write_merged(source, changed, merged, "")
    model = open_source(str(merged))
    if options.judged is not None:
        model = deployed(model, options.judged, bundle, report)
    work, gates = gates_of(model, GateItems(items), _training(options), measured, report)
    ks = (*sorted(gates), None)
    columns = exits(all_odds(work, gates, held_out=False), THRESHOLDS[0])
    ks_of = {item.digest(): ks[n] for item, n in zip(work.items(held_out=False), columns.tolist(), strict=True)}
    write_json(folder / CHOSEN, {"k": [ks_of.get(item.digest()) for item in items]})
    for entry in (merged, bundle, measured):
        shutil.rmtree(entry, ignore_errors=True)


def chosen(out: Path, count: int) -> list[int | None]:
    """The K that `choose` has written for `count` items. Raises RequestError."""
    path = out / HALFWAY / CHOSEN
    try:
        ks = json.loads(path.read_text(encoding="utf-8"))["k"]
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise RequestError(f"cannot read {path}, what the gates chose halfway; remove {out} to begin again") from e
    if not isinstance(ks, list) or len(ks) != count or not all(k is None or type(k) is int for k in ks):
        raise RequestError(f"{path} is damaged; remove {out} to begin again")
    return ks


@dataclass(frozen=True, slots=True)
class TunedGates:
    """The gates of a tuned model, which learn from `learn`; they are written into the tuning's directory `out`."""

    options: TuneOptions
    learn: Data
    out: Path
    report: Progress

    def train(self, model: OpenedModel, held_out: Sequence[Item], folder: Path) -> tuple[HeldOut, list[Item]]:
        """Train and write the gates, measured in `folder`; the items held out under them."""
        items = GateItems(self.learn.items, held_out)
        work, gates = gates_of(model, items, _training(self.options), folder, self.report)
        measured = len(work.items(held_out=False))
        record: dict[str, Any] = {"items": measured, "epochs": FITTED.epochs_for(measured), "answers": "own"}
        write_gates(self.out / GATES, gates, model.fingerprint, FITTED, {**record, "data": self.learn.source})
        return held_out_of(work, gates), work.items(held_out=True)


def _training(options: TuneOptions) -> GateTraining:
    return GateTraining(MeasureOptions(max_new_tokens=options.packing.max_new_tokens), FITTED)
