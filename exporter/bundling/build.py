"""Filling the staging directory of a bundle: text files, graphs, weights, golden vectors, and the manifest last."""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from vtx import __version__
from vtx.exporter.bundling.activation_aware import FACTORS, INPUTS, measure_factors, read_factors, read_inputs
from vtx.exporter.bundling.prepare import Plan
from vtx.exporter.checkpoint.fields import rope_tables
from vtx.exporter.checkpoint.spec import model_spec
from vtx.exporter.graphs.builder import Builder
from vtx.exporter.graphs.decoder import build_embed, build_head, build_score, build_stage
from vtx.exporter.graphs.dialects import make_dialect
from vtx.exporter.graphs.encoder import build_text_tower
from vtx.exporter.graphs.expert import STATE_PROJECTION, build_expert
from vtx.exporter.graphs.gates import FEATURES, build_gate, gate_tensors
from vtx.exporter.graphs.vision import IMAGES, VIDEO, Extras, build_projector, build_vision
from vtx.exporter.graphs.vision import NEWLINE as IMAGE_NEWLINE
from vtx.exporter.weights.journal import JOURNAL, ExportJournal
from vtx.exporter.weights.mixed import mixed_record
from vtx.exporter.weights.plan import StoredTensor
from vtx.exporter.weights.scaling import scalings
from vtx.exporter.weights.tensors import BundleWeights, CheckpointWeights
from vtx.exporter.weights.writing import write_weights
from vtx.runtime.backends.allocation import returning_memory
from vtx.runtime.bundle.bundle import seal_manifest, sha256
from vtx.runtime.bundle.files import sync_file
from vtx.runtime.bundle.safetensors import read_header, write_safetensors
from vtx.runtime.bundle.spec import manifest as spec
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import FileRecord, Graphs, Manifest
from vtx.runtime.bundle.tensors import NEWLINE_TENSOR
from vtx.runtime.bundle.tensors import WEIGHT as FINAL_NORM_WEIGHT
from vtx.runtime.errors import ExportError
from vtx.runtime.precision import KV_TYPES
from vtx.runtime.prompt.text import Text
from vtx.runtime.prompt.tokenizer import parse_tokenizer
from vtx.runtime.strict import json_value
from vtx.runtime.units import Progress, counter
from vtx.runtime.vision.layouts import spec_of
from vtx.runtime.vision.preprocess import trained_fit

GATES = "gates.safetensors"
# Bytes of a bundle above which the reference gives back the memory of each matrix once it is done with it, as the
# prediction assumes. Small matrices would only make that slower.
LARGE = 256 << 20


def fill(folder: Path, plan: Plan, journal: ExportJournal, report: Progress) -> None:
    """Write the parts of the bundle that `journal` lacks into `folder`; `report` gets (phase, done, total)."""
    started = time.time()
    _write_texts(folder, plan)
    _write_positions(folder, plan)
    stored = dict(plan.weights.stored)
    if plan.gates is not None:
        gates = {n: w for k in plan.gated_ks for n, w in zip(gate_tensors(k), plan.gates.by_k[k], strict=True)}
        write_safetensors(folder / GATES, gates, plan.gates.metadata)
        for info in read_header(folder / GATES).tensors.values():
            stored[info.name] = StoredTensor(GATES, info.offset, info.nbytes, info.dtype, info.shape)
    for number, (dialect, graphs) in enumerate(plan.dialects.items(), 1):
        _write_dialect(folder, plan, dialect, graphs, stored)
        report("graphs", number, len(plan.dialects))
    factors = dict[str, NDArray[Any]]()
    measured = dict[str, Any]()
    if plan.options.aware is not None:
        if "factors" not in journal.parts:
            found, record = measure_factors(plan, plan.options.aware, folder, report)
            write_safetensors(folder / FACTORS, found, {"record": json.dumps(record)})
            sync_file(folder / FACTORS)
            journal.add_part("factors")
        factors, measured = read_factors(folder / FACTORS)
    scaled = scalings(plan.config.text, factors, read_inputs(folder))
    records = write_weights(plan.weights, folder, journal, counter(report, "weights", plan.prediction.work), scaled)
    _write_small_tensors(folder, plan)
    if "golden" not in journal.parts:
        with returning_memory() if plan.prediction.disk > LARGE else nullcontext():
            _write_golden(folder, plan, report)
        journal.add_part("golden")
    manifest = _manifest(folder, plan, records, measured, started, report)
    seal_manifest(folder, manifest)


def _write_texts(folder: Path, plan: Plan) -> None:
    """Write the chat template and the tokenizers."""
    texts = {spec.TOKENIZER: plan.tokenizer, spec.TEMPLATE: plan.template}
    if plan.text_tower is not None:
        texts[plan.text_tower.spec.tokenizer] = plan.text_tower.tokenizer
    for name, text in texts.items():
        (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))


def _write_positions(folder: Path, plan: Plan) -> None:
    """Write the tables of rotary positions."""
    sliding = plan.config.text.sliding
    tables = dict(zip((names.COS, names.SIN), rope_tables(plan.config.text.rope, plan.max_context), strict=True))
    if sliding is not None:
        own = rope_tables(sliding.rope, plan.max_context)
        tables |= dict(zip((names.SLIDING_COS, names.SLIDING_SIN), own, strict=True))
    write_safetensors(folder / spec.ROPE, tables, None)


def _write_small_tensors(folder: Path, plan: Plan) -> None:
    """Write the weights that the runtime itself computes with."""
    if plan.reductions.needs.final_norm or plan.text.seg_token_id is not None:
        weight = CheckpointWeights(plan.checkpoint).read("text.norm.weight").numpy()
        write_safetensors(folder / spec.FINAL_NORM, {FINAL_NORM_WEIGHT: weight}, None)
    if plan.config.layout.newline:
        newline = BundleWeights(folder, plan.weights.stored).read(IMAGE_NEWLINE).numpy()
        write_safetensors(folder / spec.NEWLINE, {NEWLINE_TENSOR: newline}, None)
    if plan.config.action is not None and plan.config.action.state_in == "prompt":
        projection = BundleWeights(folder, plan.weights.stored)
        parts = {name: projection.read(f"{STATE_PROJECTION}.{name}").numpy() for name in ("weight", "bias")}
        write_safetensors(folder / spec.STATE, parts, None)


def end(folder: Path, journal: ExportJournal) -> None:
    """Remove what an interrupted export would have needed to resume."""
    journal.remove()
    for name in _measured_files(folder):
        (folder / name).unlink(missing_ok=True)


def _measured_files(folder: Path) -> list[str]:
    """The files of activations that an export reads while it rounds, and no bundle has."""
    return [FACTORS, *(path.name for path in folder.glob(INPUTS.format("*")))]


def _write_dialect(folder: Path, plan: Plan, dialect: str, graphs: Graphs, weights: Mapping[str, StoredTensor]) -> None:
    text = plan.config.text
    precisions = plan.precisions
    kv = ir.DataType.from_numpy(np.dtype(names.kv_type(dialect, plan.precisions.kv_dtype)))
    blocked = any(weight.scales is not None and weight.scales.shape[1] > 1 for weight in weights.values())
    blocked = blocked or text.mixture is not None  # whose matrices have three axes, so that a row's scale is a block's

    def write(
        name: str,
        precision: str,
        build: Callable[[Builder], None],
        kv_type: ir.DataType | None = None,
        weights: Mapping[str, StoredTensor] = weights,
    ) -> None:
        written = make_dialect(dialect, precision, plan.max_context, kv_type, blocked=blocked)
        builder = Builder(name.partition(".")[0], weights, folder, written)
        build(builder)
        builder.write(folder / name)

    tower = plan.text_tower.spec if plan.text_tower else None
    extras = Extras(
        merges=graphs.vision_merges,
        attention=graphs.vision_attention,
        last_attention=graphs.vision_last_attention,
        tower_tokens=graphs.projector is not None,
        text_tower=tower,
        received=graphs.vision_received,
    )
    write(graphs.vision, precisions.vision, partial(build_vision, c=plan.config, extras=extras))
    frames = plan.config.frames
    if graphs.video and frames is not None:
        frame_weights = {IMAGES + name.removeprefix(VIDEO): w for name, w in weights.items() if name.startswith(VIDEO)}
        write(graphs.video, precisions.vision, lambda b: build_vision(b, frames), weights={**weights, **frame_weights})
    if graphs.text_tower and tower is not None:
        write(graphs.text_tower, precisions.vision, partial(build_text_tower, spec=tower))
    if graphs.projector:
        write(graphs.projector, precisions.vision, lambda b: build_projector(b, plan.config))
    write(graphs.embed, precisions.decoder, lambda b: build_embed(b, text))
    for stage, file in zip(plan.stages, graphs.stages, strict=True):
        build = partial(
            build_stage,
            c=text,
            layers=range(stage.first, stage.last + 1),
            kv_type=kv,
            query=stage.query,
            inputs=plan.config.token_inputs,
        )
        write(file, precisions.decoder, build, kv)
    action = plan.config.action
    build_last = partial(build_head, c=text) if action is None else partial(build_expert, c=text, a=action)
    write(graphs.head, precisions.head, build_last)
    if graphs.score:
        write(graphs.score, precisions.decoder, lambda b: build_score(b, text, kv))
    for k, file in zip(plan.gated_ks, graphs.gates, strict=True):
        write(file, precisions.decoder, partial(build_gate, c=text, k=k), ir.DataType.FLOAT)


def _write_golden(folder: Path, plan: Plan, report: Progress) -> None:
    from vtx.exporter.reference.acting import record_golden_actions
    from vtx.exporter.reference.golden import record_golden, record_kv_scales
    from vtx.exporter.reference.model import Reference

    scaled = KV_TYPES[plan.precisions.kv].scaled
    layer = counter(report, "reference", plan.config.text.layers * (1 + scaled))
    layer(0)
    reference = Reference(plan.checkpoint, plan.config, BundleWeights(folder, plan.weights.stored))
    text = Text(parse_tokenizer(plan.tokenizer, ExportError), plan.template, plan.text)
    if scaled:
        record_kv_scales(folder / spec.KV_SCALES, reference, text, plan.image, layer)
    record = record_golden if plan.config.action is None else record_golden_actions
    record(folder / spec.GOLDEN, reference, text, plan.image, [None, *plan.ks], layer)


def _manifest(
    folder: Path,
    plan: Plan,
    weights: Mapping[str, FileRecord],
    factors: Mapping[str, Any],
    started: float,
    report: Progress,
) -> Manifest:
    """The manifest, with the checksums of all files and a record of what is needed to make the bundle again."""
    precisions = plan.precisions
    others = {*weights, JOURNAL, *_measured_files(folder)}
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.relative_to(folder).as_posix() not in others)
    hashed = counter(report, "checksums", sum(p.stat().st_size for p in paths))
    records = dict(weights)
    for path in paths:
        records[path.relative_to(folder).as_posix()] = FileRecord(path.stat().st_size, sha256(path, hashed))
    record = {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 1),
        **_record(plan, factors),
        "versions": {"python": platform.python_version(), **packages(f"{DISTRIBUTION}[export]")},
    }
    return Manifest(
        format=spec.FORMAT,
        vtx=__version__,
        model=model_spec(plan.config, plan.name),
        layout=spec_of(plan.config.layout),
        precision=precisions.decoder,
        vision_precision=precisions.vision,
        head_precision=precisions.head,
        kv_dtype=precisions.kv_dtype,
        max_context=plan.max_context,
        variants=tuple(sorted(plan.ks)),
        default_k=plan.default_k,
        reductions=plan.reductions.specs,
        stages=plan.stages,
        token_inputs=tuple(plan.config.token_inputs.values()),
        gates=plan.gated_ks,
        dialects=plan.dialects,
        tokenizer=spec.TOKENIZER,
        chat_template=spec.TEMPLATE,
        rope=spec.ROPE,
        golden=spec.GOLDEN,
        kv_scales=spec.KV_SCALES if KV_TYPES[precisions.kv].scaled else None,
        text_tower=plan.text_tower.spec if plan.text_tower else None,
        image=plan.image,
        text=plan.text,
        files=records,
        record=record,
        video=plan.video,
        action=plan.config.action,
        bins=plan.config.bins,
    )


def _record(plan: Plan, factors: Mapping[str, Any]) -> dict[str, Any]:
    """The source, the options and the measurements that a bundle was made of."""
    options = plan.options
    parts: dict[str, Any] = {
        "source": {
            "model": plan.name,
            "revision": plan.checkpoint.revision,
            "fingerprint": plan.checkpoint.fingerprint(),
            "tower": plan.config.vision.family,
            "fit": trained_fit(plan.image),
            "parameters": plan.parameters,
        },
        "options": _options(plan),
    }
    if plan.text_tower:
        parts["text_tower"] = {"fingerprint": plan.text_tower.checkpoint.fingerprint()}
    if plan.gates:
        parts["gates"] = {"features": FEATURES, **plan.gates.metadata}
    if options.calibration:
        parts["calibration"] = json_value(options.calibration)
    if factors:
        parts["activation_aware"] = factors
    if options.bits is not None:
        parts["mixed"] = mixed_record(plan.precisions, plan.weights.stored)
    return parts


def _options(plan: Plan) -> dict[str, Any]:
    """The options of an export that change its bundle."""
    options = plan.options
    precisions = plan.precisions
    choices = {
        "text_tower": options.text_tower,
        **{f"{precision}_block": block for precision, block in precisions.blocks.items()},
        "tower": options.tower,
        "allow_pickle": options.allow_pickle,
        "bits": options.bits,
        "downsample": options.downsample,
        "allow_changed_answers": options.allow_changed_answers,
    }
    return {
        "model": options.model.encode("utf-8", "replace").decode(),  # a directory's name need not be Unicode
        "k": list(plan.ks),
        "reduce": list(options.reductions),
        "precision": precisions.decoder,
        "vision_precision": precisions.vision,
        "head_precision": precisions.head,
        "kv_precision": precisions.kv,
        "max_context": options.max_context,
        "dialects": list(options.dialects),
        "chat_template": options.template is not None,
        **{name: choice for name, choice in choices.items() if choice},
    }


DISTRIBUTION = "vtx-edge"
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(?:\[(?P<extras>[^]]*)\])?[^;]*(?:;(?P<marker>.*))?")


@cache
def packages(requirement: str) -> Mapping[str, str]:
    """Name and version of every installed distribution that `requirement` leads to, itself included, by name.

    Dependencies of an extra count only if that extra was asked for; other markers count as met. Distributions that are
    not installed are left out. Cached: reading the metadata takes longer than writing the graphs of a small model.
    """
    versions: dict[str, str] = {}
    pending = [requirement]
    seen = set[tuple[str, str]]()
    while pending:
        match = REQUIREMENT.match(pending.pop())
        name, extras = (match["name"].lower().replace("_", "-"), match["extras"] or "") if match else ("", "")
        if not name or (name, extras) in seen:
            continue
        seen.add((name, extras))
        with suppress(metadata.PackageNotFoundError):
            distribution = metadata.distribution(name)
            versions[name] = distribution.version
            for line in distribution.requires or ():
                extra = re.search(r"extra\s*==\s*[\"']([^\"']+)", line)
                if extra is None or extra[1] in map(str.strip, extras.split(",")):
                    pending.append(line)
    return dict(sorted(versions.items()))
