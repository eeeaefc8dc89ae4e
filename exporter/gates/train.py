"""Training gates from end to end: measure items, fit the gates, judge them on held-out items, write the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vtx.exporter.bundling.options import DEMO, ExportOptions
from vtx.exporter.bundling.predict import check_disk
from vtx.exporter.bundling.staging import make_folder
from vtx.exporter.calibration.source import OpenedModel, open_source
from vtx.exporter.checkpoint.spec import model_size
from vtx.exporter.gates.fit import FitOptions, GateWeights, fit_gates, held_out_of, write_gates
from vtx.exporter.gates.measure import Measurer, measure
from vtx.exporter.gates.workdir import MeasureOptions, WorkDirectory, make_shards
from vtx.runtime.errors import DeviceError, RequestError
from vtx.runtime.units import Progress, counter
from vtx.tools.calibration.gates import GatesReport, draw_judgement, judge
from vtx.tools.common.files import write_json
from vtx.tools.common.loading import Loading
from vtx.tools.data.items import SCENES, Item, read_data, split_items


@dataclass(frozen=True, slots=True)
class GateTraining:
    """Settings of the measurements and of the fit."""

    measure: MeasureOptions = field(default_factory=MeasureOptions)
    fit: FitOptions = field(default_factory=FitOptions)


@dataclass(frozen=True, slots=True)
class GateItems:
    """Items to learn from, and items to judge the gates by."""

    learn: Sequence[Item]
    held_out: Sequence[Item] = ()


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Data and settings; `held_out` items share no image with `items`.

    `tower`, `allow_pickle`, `bundle` and `engine` as in `open_source`.
    """

    model: str = DEMO
    data: str = SCENES
    images: Path | None = None
    items: int = 1000
    held_out: int = 250
    training: GateTraining = field(default_factory=GateTraining)
    tower: str | None = None
    allow_pickle: bool = False
    bundle: Path | None = None
    engine: Loading | None = None

    def __post_init__(self) -> None:
        for name, value in (("--items", self.items), ("--held-out", self.held_out)):
            if value < 1:
                raise RequestError(f"{name} is {value}; it must be at least 1")


def train_gates(options: TrainOptions, out: Path, work_folder: Path, report: Progress) -> GatesReport:
    """Write the gate file `out`, and next to it its report as .json and .png; return the report.

    Measurements stay in `work_folder`: an interrupted run resumes from there, and one with other fitting options
    measures nothing again. `report` gets (phase, done, total). Raises RequestError, CheckpointError, ExportError,
    DeviceError.
    """
    if out.is_dir():
        raise RequestError(f"cannot write the gates to {out}, which is a directory; name a file with --out")
    reading = ExportOptions(tower=options.tower, allow_pickle=options.allow_pickle)
    source = open_source(options.model, options.bundle, engine=options.engine, reading=reading)
    data = read_data(options.data, options.images, options.items + options.held_out, options.training.fit.seed)
    shuffle = options.data != SCENES
    items = GateItems(
        *split_items(data.items, options.items, options.held_out, options.training.fit.seed, shuffle=shuffle)
    )
    make_folder(out.parent)

    work, gates = gates_of(source, items, options.training, work_folder, report)
    measured = len(work.items(held_out=False))
    judgement = judge(held_out_of(work, gates), model_size(source.config, source.name))
    training = {
        "items": measured,
        "epochs": options.training.fit.epochs_for(measured),
        "answers": options.training.measure.answers,
        "data": data.source,
        "verdict": judgement.verdict,
    }
    write_gates(out, gates, source.fingerprint, options.training.fit, training)
    skipped = (*data.skipped, *work.all_skipped)
    report_record = GatesReport(source.name, training, skipped, judgement)
    write_json(out.with_suffix(".json"), report_record.to_dict())
    try:
        draw_judgement(judgement, out.with_suffix(".png"))
    except DeviceError as e:  # without matplotlib there is no plot
        return replace(report_record, plot=str(e))
    return report_record


def gates_of(
    source: OpenedModel,
    items: GateItems,
    training: GateTraining,
    folder: Path,
    report: Progress,
) -> tuple[WorkDirectory, dict[int, GateWeights]]:
    """The gates of a model, and `folder` with the measurements of all items.

    Raises as `train_gates` does.
    """
    measuring = training.measure
    measurer = Measurer(source, measuring)
    shards = make_shards(items.learn, measuring.batch, held_out=False)
    shards += make_shards(items.held_out, measuring.batch, held_out=True, first=len(items.learn))
    work = WorkDirectory(folder, source, measuring, shards)
    missing = sum(len(shard.items) for shard in work.missing())
    text = source.config.text
    nbytes = missing * text.layers * (8 * text.hidden + 16)  # a layer and item: two float32 hidden states, and labels
    check_disk(folder, nbytes, purpose="measuring", fix="name another folder, or use fewer --items")
    measure(measurer, work, counter(report, "items", missing))
    ks = measurer.ks
    return work, fit_gates(work, ks, training.fit, counter(report, "gates", len(ks)))


def default_out(model: str) -> Path:
    return Path(f"vtx-gates-{Path(model).expanduser().absolute().name}.safetensors")
