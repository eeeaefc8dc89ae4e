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
from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.loader import Checkpoint, canonical_name
from vtx.exporter.checkpoint.spec import config_of
from vtx.exporter.graphs.vision import vision_tensors
from vtx.exporter.reference.engine import EngineReference
from vtx.exporter.reference.model import Reference
from vtx.exporter.reference.prompts import Source
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.safetensors import TensorInfo
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.precision import PRECISIONS
from vtx.runtime.prompt.text import Text, text_files
from vtx.runtime.strict import json_value
from vtx.runtime.units import Progress
from vtx.tools.calibration.report import CalibratedModel
from vtx.tools.common.loading import Loading


@dataclass(frozen=True, slots=True)
class OpenedModel(Source):
    """A model and its origin: the plan of an export of its checkpoint, or a bundle.

    `engine` is the bundle loaded, if that is measured and not its weights in float32.
    """

    origin: Plan | Bundle
    engine: Model | None = None

    @property
    def cuts(self) -> tuple[int, ...] | None:
        """The K that the bundle on its engine was cut at; None: every K can be measured."""
        return None if self.engine is None else self.engine.manifest.variants

    @property
    def identity(self) -> list[object]:
        """Everything that measurements of it depend on."""
        if self.engine is None:
            return [self.fingerprint, self.version()]
        manifest = self.engine.manifest
        backend = self.engine.backend
        files = sorted((name, record.sha256) for name, record in manifest.files.items())
        return [self.fingerprint, json_value([files, manifest.variants, backend.device, backend.compute])]

    @property
    def calibrated(self) -> CalibratedModel:
        """The model as reports of its measurements name it."""
        engine = None
        if self.engine is not None:
            backend = self.engine.backend
            engine = f"{self.engine.manifest.precision} on {backend.device} in {backend.compute}"
        return CalibratedModel(self.name, self.fingerprint, self.config.text.layers, engine)

    def reference(self) -> Reference | EngineReference:
        return Reference(self.checkpoint, self.config) if self.engine is None else EngineReference(self.engine)


AS_IT_IS = ExportOptions()


def open_source(
    model: str, bundle: Path | None = None, *, engine: Loading | None = None, reading: ExportOptions = AS_IT_IS
) -> OpenedModel:
    """Open checkpoint `model` (a directory, a hub id, "demo"), or a bundle if one is given.

    `reading`: the template, tower, pickles and downsampling of an export of the checkpoint. `engine` loads the bundle,
    to be measured as it is deployed. Raises CheckpointError, BundleError, DeviceError.
    """
    if bundle is not None:
        return _of_bundle(Bundle.open(bundle), None if engine is None else engine.load(bundle))
    options = replace(reading, model=model, precision="fp32")
    plan = plan_export(options)
    _check_answers(plan.name, plan.config)
    if all(entry.source.dtype == "F16" for file in plan.weights.files for entry in file.entries):
        plan = plan_export(replace(options, precision="fp16"))
    source = plan.source()
    return OpenedModel(**{field.name: getattr(source, field.name) for field in fields(source)}, origin=plan)


def _check_answers(name: str, config: ModelConfig) -> None:
    if config.action is not None:
        raise RequestError(f"{name} outputs actions, and only text answers are measured")


def _of_bundle(bundle: Bundle, engine: Model | None) -> OpenedModel:
    manifest = bundle.manifest
    parts = manifest.precision, manifest.vision_precision, manifest.head_precision
    if engine is None and any(PRECISIONS[part].bits for part in parts):
        formats = "/".join(dict.fromkeys(parts))
        options = manifest.record.get("options")
        model = options.get("model") if isinstance(options, dict) else None  # as it was given: a name may not find it
        model = model if isinstance(model, str) else manifest.model.name
        raise BundleError(
            f"{bundle.folder.name} holds {formats} weights, but measuring in float32 needs floating-point ones; "
            f"measure it by its engine with --device auto, or the checkpoint it was made from: --model {model:.200} "
            "without --bundle"
        )
    tensors: dict[str, TensorInfo] = {}
    for file in manifest.files:
        if file.startswith("weights/"):
            stored = bundle.header(file).tensors
            tensors |= {canonical_name(name): info for name, info in stored.items()}
    checkpoint = Checkpoint(bundle.folder, json_value(manifest.model), tensors, None)
    model = config_of(manifest)
    _check_answers(manifest.model.name, model)
    for name, shape in (*vision_tensors(model), *model.text.tensors()) if engine is None else ():
        checkpoint.require(name, shape)
    recorded = manifest.record.get("source")
    fingerprint = recorded.get("fingerprint") if isinstance(recorded, dict) else None
    fingerprint = fingerprint if isinstance(fingerprint, str) else checkpoint.fingerprint()
    text = Text(*text_files(bundle.read), manifest.text)
    most = manifest.max_context
    return OpenedModel(manifest.model.name, fingerprint, checkpoint, model, text, manifest.image, most, bundle, engine)


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
