"""The time an export will take: the work of its plan at the current rates of this machine.

What an interrupted export has finished is left out. The rates hold while the machine is no busier than when they were
measured, and the disk no slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

from vtx.exporter.bundling.build import write_first_layer
from vtx.exporter.bundling.options import ActivationAware
from vtx.exporter.bundling.predict import PASSAGE_TOKENS, QUESTION_TOKENS
from vtx.exporter.bundling.prepare import Plan
from vtx.exporter.bundling.rates import (
    LAYER_SECONDS,
    Disk,
    Form,
    Pace,
    cached_share,
    form_of,
    measure_disk,
    measure_paces,
    product_speed,
    seconds_of,
)
from vtx.exporter.bundling.retain import USUAL_STEPS, Retain
from vtx.exporter.checkpoint.sizes import model_size
from vtx.exporter.reference.golden import golden_ids
from vtx.exporter.weights.awq import ALPHAS, OUTPUTS, TOKENS
from vtx.exporter.weights.journal import PROBE, ExportJournal
from vtx.exporter.weights.plan import WeightFile
from vtx.exporter.weights.writing import THREADS
from vtx.runtime.bundle.spec.stored import EMBEDDING
from vtx.runtime.errors import CheckpointError
from vtx.runtime.host.machine import available_memory
from vtx.runtime.prompt.text import Text
from vtx.runtime.prompt.tokenizer import parse_tokenizer
from vtx.runtime.report.golden import SEEN_ROWS, golden_image
from vtx.tools.estimate.flops import attention_macs, encode_flops, prefill_flops
from vtx.tools.estimate.native import seeing
from vtx.tools.estimate.sizes import ModelSize

USUAL_IMAGE = 1024  # tokens, where images keep their own resolution
LEAST, WIDEST = 512, 1 << 22  # the least side and the most weights of the matrix in product trials
OTHER_FILES = 8  # of a bundle, beside graphs and weights


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds of each phase of an export, by the name under which its progress is reported."""

    phases: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


def forecast(plan: Plan, folder: Path, journal: ExportJournal) -> Forecast:
    """Measure in `folder`, for well under a second, and predict the time of the parts that `journal` lacks."""
    try:
        return Forecast(_phases(plan, folder, journal))
    finally:
        (folder / PROBE).unlink(missing_ok=True)


def _phases(plan: Plan, folder: Path, journal: ExportJournal) -> dict[str, float]:
    left = [file for file in plan.weights.files if file.name not in journal.files]
    disk = measure_disk(folder, [file.source for file in left], sum(file.size for file in left))
    paces = measure_paces(plan.weights.files, folder)
    writing = sum(_file(file, folder, journal, paces, disk) for file in left)
    sizes, phases = model_size(plan.config, plan.name), {"graphs": _graphs(plan, folder)}
    if plan.options.aware is not None and not journal.factors:
        phases["activations"] = _activations(plan, plan.options.aware, sizes, paces)
    phases["weights"] = writing
    if not journal.golden:
        phases["reference"] = _reading(plan, paces, disk) + _products(plan, sizes)
    graphs = sum(len(dialect.all) for dialect in plan.dialects.values())
    phases["checksums"] = disk.sync * (graphs + OTHER_FILES)
    if plan.options.retain is not None:
        phases["thresholds"] = _thresholds(plan.options.retain, sizes)
    return phases


def _graphs(plan: Plan, folder: Path) -> float:
    """A layer of the tower takes as long to write as one of the decoder."""
    layers, probe = plan.config.text.layers + max(plan.config.feature_layers), folder / PROBE
    layers += plan.text_tower.spec.layers if plan.text_tower else 0
    dialects = plan.options.dialects
    write_first_layer(probe, plan, dialects[0])  # imports must not count with each layer
    return layers * sum(seconds_of(partial(write_first_layer, probe, plan, dialect)) for dialect in dialects)


def _file(file: WeightFile, folder: Path, journal: ExportJournal, paces: Mapping[Form, Pace], disk: Disk) -> float:
    """The processor and the disk work side by side, and the slower one counts."""
    finished = len(journal.tensors.get(file.name, []))
    finished_bytes = file.entries[finished - 1].end if finished else 0
    entries = file.entries[finished:]
    read = file.size if file.whole else sum(entry.source.nbytes for entry in entries)
    linked = file.whole and file.source.stat().st_dev == folder.stat().st_dev
    converting = sum(entry.source.nbytes * paces[form_of(file, entry)].write for entry in entries)
    moving = (
        read * (1 - cached_share(file.source)) / disk.read + (0 if linked else file.size - finished_bytes) / disk.write
    )
    return max(converting, moving) + finished_bytes / disk.read


def _reading(plan: Plan, paces: Mapping[Form, Pace], disk: Disk) -> float:
    """Of the weights as float32 for the golden vectors: layers from the first K on twice, tables by their rows alone.

    For the scales of int8 K and V once more.
    """
    first = min(plan.ks, default=plan.config.text.layers + 1)
    seconds, cold = 0.0, 0
    memory = available_memory() or 0
    for file in plan.weights.files:
        kept = file.whole and plan.prediction.disk < memory  # rewritten files are sent to the disk at once
        for entry in file.entries:
            if (entry.name == EMBEDDING and not plan.config.text.tied) or entry.name.startswith("clip."):
                continue
            cold += 0 if kept else entry.target.nbytes
            times = (2 if _layer(entry.name) >= first else 1) + (plan.precisions.kv == "int8")
            seconds += times * prod(entry.source.shape) * paces[form_of(file, entry)].read
    return seconds + cold / disk.read


def _layer(name: str) -> int:
    """The decoder's layer that a weight belongs to, from 1; 0 for any other."""
    return int(name.split(".")[2]) + 1 if name.startswith("text.layers.") else 0


def _products(plan: Plan, sizes: ModelSize) -> float:
    """The products of golden vectors and scales at the decoder's and the tower's speeds, and the cost per layer."""
    size, tower = sizes.decoder, sizes.vision
    assert tower is not None
    text = Text(parse_tokenizer(plan.tokenizer, CheckpointError), plan.template, plan.text)
    layout = plan.config.layout
    image = layout.count(*golden_image().size)
    tower = seeing(tower, image) or tower
    text_tokens = len(golden_ids(text, layout)) - image
    tokens, withdrawn_layers = min(image, SEEN_ROWS) + text_tokens, [size.layers - k + 1 for k in plan.ks]
    flops = prefill_flops(size, [tokens] * size.layers)
    flops += (
        2 * sum(withdrawn_layers) * (text_tokens * size.layer_macs + attention_macs(size, text_tokens, text_tokens))
    )
    seconds = flops / _speed(size.hidden, size.ffn, tokens)
    looking = encode_flops(tower, tower.views) / _speed(tower.hidden, tower.ffn, tower.tower_tokens)
    if plan.precisions.kv == "int8":
        tokens = image + PASSAGE_TOKENS
        seconds += looking + prefill_flops(size, [tokens] * size.layers) / _speed(size.hidden, size.ffn, tokens)
    return seconds + looking + LAYER_SECONDS * (size.layers + max(withdrawn_layers, default=0) + tower.used)


def _activations(plan: Plan, aware: ActivationAware, sizes: ModelSize, paces: Mapping[Form, Pace]) -> float:
    """The reference over every question, each layer's weights read once, and a search that rounds a part of them."""
    size, tower = sizes.decoder, sizes.vision
    assert tower is not None
    tokens = plan.options.measured_tokens(plan.config)
    tower = seeing(tower, max(tokens)) or tower
    flops = sum(prefill_flops(size, [count] * size.layers) for count in tokens)
    speed = _speed(size.hidden, size.ffn, max(tokens))
    images = sum(len(item.images) for item in aware.data.items)
    seconds = flops / speed
    seconds += images * encode_flops(tower, tower.views) / _speed(tower.hidden, tower.ffn, tower.tower_tokens)
    for file in plan.weights.files:
        for entry in file.entries:
            if _layer(entry.name) and entry.scheme is not None:
                height, width = entry.source.shape
                tried, pace = min(height, OUTPUTS), paces[form_of(file, entry)]
                seconds += height * width * pace.read
                seconds += len(ALPHAS) * THREADS * tried * pace.write * entry.source.nbytes / height
                seconds += len(ALPHAS) * 2 * tried * TOKENS * width / speed
    return seconds + LAYER_SECONDS * (size.layers * len(tokens) + tower.used * images)


def _thresholds(retain: Retain, sizes: ModelSize) -> float:
    """Each spec tried answers every question with one token and encodes its image; the number of trials varies."""
    size, tower = sizes.decoder, sizes.vision
    assert tower is not None
    images = max(len(item.images) for item in retain.data.items)
    tower = seeing(tower, USUAL_IMAGE) or tower
    tokens = images * tower.image_tokens + QUESTION_TOKENS
    flops = images * encode_flops(tower, tower.views) + prefill_flops(size, [tokens] * size.layers)
    return USUAL_STEPS * len(retain.data.items) * flops / _speed(size.hidden, size.ffn, tokens)


def _speed(hidden: int, ffn: int, tokens: int) -> float:
    """FLOPs a second; what small products cost beside their arithmetic is counted with the layers."""
    hidden, ffn = max(LEAST, hidden), max(LEAST, ffn)
    return product_speed(hidden, min(ffn, max(LEAST, WIDEST // hidden)), tokens)
