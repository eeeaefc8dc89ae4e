"""A model to measure, opened from a checkpoint or a bundle: weights for the plain reference, text, answers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import Plan, plan_export
from vtx.exporter.checkpoint.loader import Checkpoint, canonical_name
from vtx.exporter.checkpoint.spec import config_of
from vtx.exporter.graphs.decoder import decoder_tensors
from vtx.exporter.graphs.vision import vision_tensors
from vtx.exporter.reference.prompts import Source
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.safetensors import TensorInfo
from vtx.runtime.errors import BundleError
from vtx.runtime.precision import PRECISIONS
from vtx.runtime.prompt.text import Text, text_files
from vtx.runtime.strict import json_value
from vtx.runtime.units import Progress


@dataclass(frozen=True, slots=True)
class OpenedModel(Source):
    """A model and its origin: the plan of an export of its checkpoint, or a bundle."""

    origin: Plan | Bundle


def open_source(
    model: str, bundle: Path | None = None, template: str | None = None, tower: str | None = None, *,
    allow_pickle: bool = False,
) -> OpenedModel:  # fmt: skip
    """Open checkpoint `model` (a directory, a hub id, "demo"), or a bundle if one is given.

    `template` is a chat template for a checkpoint without one, `tower` the vision tower of one that only names it;
    `allow_pickle` allows weights that are pickles. Raises CheckpointError, BundleError.
    """
    if bundle is not None:
        return _of_bundle(Bundle.open(bundle))
    options = ExportOptions(model, precision="fp32", template=template, tower=tower, allow_pickle=allow_pickle)
    plan = plan_export(options)
    if all(entry.source.dtype == "F16" for file in plan.weights.files for entry in file.entries):
        plan = plan_export(replace(options, precision="fp16"))
    source = plan.source()
    return OpenedModel(**{field.name: getattr(source, field.name) for field in fields(source)}, origin=plan)


def _of_bundle(bundle: Bundle) -> OpenedModel:
    manifest = bundle.manifest
    parts = manifest.precision, manifest.vision_precision, manifest.head_precision
    if any(PRECISIONS[part].bits for part in parts):
        held, options = "/".join(dict.fromkeys(parts)), manifest.record.get("options")
        model = options.get("model") if isinstance(options, dict) else None  # as it was given: a name may not find it
        model = model if isinstance(model, str) else manifest.model.name
        raise BundleError(
            f"{bundle.folder.name} holds {held} weights, but measuring needs floating-point ones; measure the "
            f"checkpoint it was made from instead: --model {model:.200} without --bundle"
        )
    tensors: dict[str, TensorInfo] = {}
    for file in manifest.files:
        if file.startswith("weights/"):
            stored = bundle.header(file).tensors
            tensors |= {canonical_name(name): info for name, info in stored.items()}
    checkpoint, model = Checkpoint(bundle.folder, json_value(manifest.model), tensors, None), config_of(manifest)
    for name, shape in (*vision_tensors(model), *decoder_tensors(model.text)):
        checkpoint.require(name, shape)
    recorded = manifest.record.get("source")
    fingerprint = recorded.get("fingerprint") if isinstance(recorded, dict) else None
    fingerprint = fingerprint if isinstance(fingerprint, str) else checkpoint.fingerprint()
    text, most = Text(*text_files(bundle.read), manifest.text), manifest.max_context
    return OpenedModel(manifest.model.name, fingerprint, checkpoint, model, text, manifest.image, most, bundle)


@contextmanager
def answering(source: OpenedModel, folder: Path, report: Progress) -> Iterator[Model]:
    """The model as the runtime answers with it; a checkpoint is exported to a temporary bundle in `folder`."""
    if isinstance(source.origin, Bundle):
        yield load(source.origin.folder)
        return
    try:
        run_export(source.origin, folder, force=True, report=report)
        yield load(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
