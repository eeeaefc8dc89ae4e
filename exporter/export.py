"""From a checkpoint to a bundle: check, plan, say what it will take, write beside the target, rename.

Nothing stands at `out` until the bundle is complete; the manifest is the last file written into it.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.resources import files
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from vtx.exporter.graphs.activations import check_activation
from vtx.exporter.graphs.builder import Builder, StoredTensor
from vtx.exporter.graphs.decoder import build_embed, build_head, build_stage, decoder_tensors
from vtx.exporter.graphs.gates import FEATURES, Gates, build_gate, gate_tensors, read_gates
from vtx.exporter.graphs.vision import build_vision, vision_tensors
from vtx.exporter.hf.checkpoint import Checkpoint, open_checkpoint
from vtx.exporter.hf.config import ModelConfig
from vtx.exporter.hf.processor import read_image_settings
from vtx.exporter.hf.text import read_text
from vtx.exporter.predict import Prediction, check_disk, predict
from vtx.exporter.weights import WeightPlan, plan_weights, write_weights
from vtx.runtime import names
from vtx.runtime.bundle import MANIFEST, Bundle, sha256
from vtx.runtime.errors import DeviceError, ExportError, RequestError, UnsupportedModelError
from vtx.runtime.image import ImageSettings
from vtx.runtime.manifest import FORMAT, PRECISIONS, FileRecord, GateSpec, Graphs, Manifest, ModelSpec, StageSpec
from vtx.runtime.safetensors import read_header, write_safetensors
from vtx.runtime.text import Text, TextSettings

DEMO = "demo"
GATES = "gates.safetensors"
CONFIG = "config.json"
DEFAULT_CONTEXT = 4096
KV_TYPES = {"fp32": "float32", "fp16": "float16"}
KV_ELEMENTS = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16}
RECORDED = ("onnx-ir", "numpy", "torch", "transformers", "tokenizers", "safetensors")
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What to export. `ks` are the withdrawal depths to prebuild, the first one the default; empty: none.

    "auto" stands for every depth that has a gate in the file `gates`, and the gates decide by default.
    `calibration` says how K was chosen where it was measured; it is kept in the record.
    """

    model: str = DEMO
    ks: tuple[int, ...] | Literal["auto"] = ()
    precision: str = "fp16"
    max_context: int | None = None
    template: str | None = None
    gates: Path | None = None
    calibration: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise RequestError(f"precision {self.precision!r} is not among {', '.join(PRECISIONS)}")
        if self.max_context is not None and self.max_context < 2:
            raise RequestError(f"--max-context is {self.max_context}; give at least 2")
        if self.ks == "auto" and self.gates is None:
            raise RequestError(
                "--k auto needs something to choose by; add --gates FILE (vtx-train-gate makes one) for a K per "
                "question or --calibration DATA for one K, or name K"
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """An export that has been checked and not yet begun."""

    options: ExportOptions
    checkpoint: Checkpoint
    config: ModelConfig
    ks: tuple[int, ...]
    gates: Gates | None
    weights: WeightPlan
    image: ImageSettings
    tokenizer: str
    template: str
    text: TextSettings
    max_context: int
    prediction: Prediction

    @property
    def name(self) -> str:
        demo = self.options.model == DEMO
        name = DEMO if demo else Path(self.options.model).expanduser().absolute().name
        return name.encode("utf-8", "replace").decode()  # a directory's name need not be Unicode, a manifest is

    @property
    def kv_dtype(self) -> str:
        return KV_TYPES[self.options.precision]

    @property
    def default_k(self) -> int | str | None:
        if self.options.ks == "auto":
            return "auto"
        return self.ks[0] if self.ks else None

    @property
    def gate_specs(self) -> tuple[GateSpec, ...]:
        """The gates of the prebuilt depths; those of other layers are left out."""
        gated = self.gates.by_k if self.gates else {}
        return tuple(GateSpec(k, f"gate-{k:02d}.ort.onnx") for k in sorted(self.ks) if k in gated)

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        cuts = [1, *sorted(self.ks), self.config.text.layers + 1]
        spans = [(a, b - 1) for a, b in pairwise(cuts)]
        return tuple(StageSpec(a, b, f"stage-{a:02d}-{b:02d}.ort.onnx") for a, b in spans)


def plan_export(options: ExportOptions) -> Plan:
    """Read and check everything but the weights themselves; write nothing.

    Raises:
        CheckpointError: the checkpoint is damaged or hostile; its subclass UnsupportedModelError where vtx
            does not export this kind of model.
        RequestError: a K out of range, or a context the model was not made for.
        DeviceError: a library of the [export] extra is missing.

    """
    _check_libraries()
    checkpoint = open_checkpoint(str(demo_checkpoint()) if options.model == DEMO else options.model)
    config = ModelConfig.from_hf(checkpoint.config)
    for activation in (config.text.activation, config.vision.activation, config.projector_activation):
        check_activation(activation)
    gates = read_gates(options.gates, config.text, checkpoint.fingerprint()) if options.gates else None
    ks = tuple(gates.by_k) if gates and options.ks == "auto" else tuple(k for k in options.ks if isinstance(k, int))
    _check_ks(ks, config.text.layers)
    if gates and not set(ks) & set(gates.by_k):
        raise RequestError(f"no gate for K = {list(ks)}; the file has gates for K = {sorted(gates.by_k)}; name one")
    context = _context(options.max_context, config)
    image = read_image_settings(checkpoint.folder)
    if (image.height, image.width) != (config.vision.image, config.vision.image):
        raise UnsupportedModelError(
            f"the image processor gives {image.height} x {image.width} pixels, the tower takes "
            f"{config.vision.image} x {config.vision.image}; correct preprocessor_config.json"
        )
    text_config = checkpoint.config.get("text_config") or {}
    tokenizer, template, text = read_text(
        checkpoint.folder, config.image_token_id, text_config, checkpoint.config, options.template
    )
    weights = plan_weights(checkpoint, [*vision_tensors(config), *decoder_tensors(config.text)], options.precision)
    prediction = predict(config, weights, context, KV_TYPES[options.precision])
    return Plan(options, checkpoint, config, ks, gates, weights, image, tokenizer, template, text, context, prediction)


def _check_libraries() -> None:
    """See now that what the last step of an export needs is there."""
    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            raise DeviceError(f'exporting needs {name}; pip install "vtx-edge[export]"')


def demo_checkpoint() -> Path:
    """The built-in demo model, a small LLaVA in Hugging Face's layout."""
    return Path(str(files("vtx.exporter") / "demo_model"))


def _check_ks(ks: Sequence[int], layers: int) -> None:
    for k in ks:
        if not 2 <= k <= layers:
            raise RequestError(f"K = {k} is outside 2..{layers}: it is the first layer without vision tokens")
    if len(set(ks)) != len(ks):
        raise RequestError(f"K = {', '.join(map(str, ks))} names a depth twice; name each once")


def _context(asked: int | None, config: ModelConfig) -> int:
    most = config.text.max_positions
    context = min(DEFAULT_CONTEXT, most) if asked is None else asked
    if context > most:
        raise RequestError(f"--max-context {context} is beyond the {most} positions the model was made for; lower it")
    if context <= config.vision_tokens + 1:
        raise RequestError(
            f"--max-context {context} does not hold one image of {config.vision_tokens} tokens and a question; raise it"
        )
    return context


def run_export(plan: Plan, out: Path, *, force: bool, report: Report) -> Bundle:
    """Write the bundle `out`. `report` gets (phase, done, total) as the work goes on.

    Raises:
        ExportError: `out` exists, the disk is too small or full; nothing is left behind.
        CheckpointError: a weight is NaN, or a file changed underway.

    """
    try:
        out = out.expanduser().absolute()
        _make_folder(out.parent)
        with _alone_in(out.parent):
            _clear_after_killed(out)
            _check_target(out, force)
        check_disk(out.parent, plan.prediction.disk - _linkable(plan, out.parent))
    except (OSError, RuntimeError, ValueError) as e:
        raise ExportError(f"cannot write to {out} ({getattr(e, 'strerror', e)}); name another --out") from e
    with _building(out) as folder:
        started = time.time()
        _write_text(folder, plan)
        _write_graphs(folder, plan)
        total, done = plan.prediction.work, 0

        def wrote(count: int) -> None:
            nonlocal done
            done += count
            report("weights", done, total)

        write_weights(plan.weights, folder, wrote)
        _write_golden(folder, plan, report)
        manifest = _manifest(folder, plan, started, report)
        _write_file(folder / MANIFEST, manifest.to_json())
        _sync(folder)
        with _alone_in(out.parent):
            _put_in_place(folder, out, force)
    return Bundle.open(out, check=False)


def _linkable(plan: Plan, folder: Path) -> int:
    """Bytes that need no room, because they are linked: whole files on the same disk."""
    device = folder.stat().st_dev
    return sum(file.size for file in plan.weights.files if file.whole and file.source.stat().st_dev == device)


def _check_target(out: Path, force: bool) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if not force:
        raise ExportError(f"{out} exists already; --force replaces it, or name another --out")
    replaceable = out.is_dir() and not out.is_symlink() and ((out / MANIFEST).is_file() or not any(out.iterdir()))
    if not replaceable:
        raise ExportError(f"{out} is there and is no bundle, so --force does not replace it; name another --out")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ExportError(f"cannot make the directory {folder} ({e.strerror}); name another --out") from e


def _clear_after_killed(out: Path) -> None:
    """Remove what killed exports to the same place have left, and put back the bundle that one had set aside."""
    for left in out.parent.glob(f".{glob.escape(out.name)}.partial-*"):
        lock = _lock(left)
        if lock is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    for old in out.parent.glob(f".{glob.escape(out.name)}.replaced-*"):
        _set_back(old, out)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """No other export makes or moves directories in `folder` meanwhile, where the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock of `folder` while it is open, killed or not; None where another holds it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def _building(out: Path) -> Iterator[Path]:
    """A hidden sibling of `out` to build in; gone afterwards, whatever happens."""
    folder, lock = out.with_name(f".{out.name}.partial-{secrets.token_hex(4)}"), None
    try:
        with _alone_in(out.parent):
            folder.mkdir()
            lock = _lock(folder)
        yield folder
    except OSError as e:
        raise ExportError(f"cannot write the bundle under {out.parent} ({e.strerror}); nothing was left behind") from e
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _put_in_place(folder: Path, out: Path, force: bool) -> None:
    """Rename the complete bundle to its place; what stood there is removed only after.

    Without `force` the rename fails where another export was quicker.
    """
    old = out.with_name(f".{out.name}.replaced-{secrets.token_hex(4)}")
    try:
        if force and out.exists():
            out.rename(old)
        folder.rename(out)
    except OSError as e:
        if (out / MANIFEST).is_file():
            raise ExportError(f"another export made {out} meanwhile; --force replaces it, or name another --out") from e
        raise
    finally:
        _set_back(old, out)


def _set_back(old: Path, out: Path) -> None:
    """Put the bundle `old` back to `out` where nothing took its place, else remove it."""
    with suppress(OSError):
        old.rename(out)
    if old.exists() and (out / MANIFEST).is_file():
        shutil.rmtree(old, ignore_errors=True)


def _write_file(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


def _write_text(folder: Path, plan: Plan) -> None:
    _write_file(folder / "tokenizer.json", plan.tokenizer)
    _write_file(folder / "chat_template.jinja", plan.template)
    _write_file(folder / CONFIG, json.dumps(plan.checkpoint.config, indent=1) + "\n")  # for measuring the bundle
    cos, sin = plan.config.text.rope.tables(plan.max_context)
    write_safetensors(folder / "rope.safetensors", {names.COS: cos, names.SIN: sin}, None)


def _write_graphs(folder: Path, plan: Plan) -> None:
    text, kv = plan.config.text, KV_ELEMENTS[plan.kv_dtype]

    weights = {**plan.weights.stored, **_write_gates(folder, plan)}

    def write(name: str, build: Callable[[Builder], None]) -> None:
        builder = Builder(name.partition(".")[0], weights, folder)
        build(builder)
        builder.write(folder / name)

    write("vision.ort.onnx", lambda b: build_vision(b, plan.config))
    write("embed.ort.onnx", lambda b: build_embed(b, text))
    for stage in plan.stages:
        write(stage.graph, lambda b, s=stage: build_stage(b, text, s.first, s.last, kv))  # type: ignore[misc]
    write("head.ort.onnx", lambda b: build_head(b, text))
    for gate in plan.gate_specs:
        write(gate.graph, lambda b, k=gate.k: build_gate(b, text, k))  # type: ignore[misc]


def _write_gates(folder: Path, plan: Plan) -> dict[str, StoredTensor]:
    """Write the weights of the gates that are used, and say where they lie."""
    if plan.gates is None:
        return {}
    tensors: dict[str, NDArray[np.float32]] = {}
    for spec in plan.gate_specs:
        tensors.update(zip(gate_tensors(spec.k), plan.gates.by_k[spec.k], strict=True))
    write_safetensors(folder / GATES, tensors, plan.gates.metadata)
    places = read_header(folder / GATES).tensors.values()
    return {p.name: StoredTensor(GATES, p.offset, p.nbytes, p.dtype, p.shape) for p in places}


def _write_golden(folder: Path, plan: Plan, report: Report) -> None:
    from vtx.exporter.golden import record_golden
    from vtx.exporter.reference import Reference

    layers, done = plan.config.text.layers, 0

    def layer(count: int) -> None:
        nonlocal done
        done += count
        report("reference", done, layers)

    report("reference", 0, layers)
    record_golden(
        folder / "golden.safetensors",
        Reference(plan.checkpoint, plan.config),
        Text.load(folder, plan.text),
        plan.image,
        plan.config.vision_tokens,
        [None, *plan.ks],
        layer,
    )


def _manifest(folder: Path, plan: Plan, started: float, report: Report) -> Manifest:
    text, options = plan.config.text, plan.options
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    total, done, records = sum(p.stat().st_size for p in paths), 0, dict[str, FileRecord]()

    def hashed(count: int) -> None:
        nonlocal done
        done += count
        report("checksums", done, total)

    for path in paths:
        records[path.relative_to(folder).as_posix()] = FileRecord(path.stat().st_size, sha256(path, hashed))
    graphs = Graphs("vision.ort.onnx", "embed.ort.onnx", "head.ort.onnx", plan.stages, plan.gate_specs)
    spec = ModelSpec(
        plan.name, text.family, text.layers, text.hidden, text.heads, text.kv_heads, text.head_dim, text.vocab,
        plan.config.vision_tokens,
    )  # fmt: skip
    return Manifest(
        format=FORMAT,
        vtx=_version("vtx-edge"),
        model=spec,
        precision=options.precision,
        kv_dtype=plan.kv_dtype,
        max_context=plan.max_context,
        variants=tuple(sorted(plan.ks)),
        default_k=plan.default_k,
        dialects={"ort": graphs},
        rope="rope.safetensors",
        golden="golden.safetensors",
        image=plan.image,
        text=plan.text,
        files=records,
        record=_record(plan, started),
    )


def _record(plan: Plan, started: float) -> dict[str, Any]:
    """How the bundle was made: enough to make it again."""
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 1),
        "source": {
            "model": plan.name,
            "revision": plan.checkpoint.revision,
            "fingerprint": plan.checkpoint.fingerprint(),
            "tower": plan.config.vision.family,
            "parameters": plan.weights.parameters,
        },
        "options": {
            "k": list(plan.ks),
            "precision": plan.options.precision,
            "max_context": plan.options.max_context,
        },
        **({"gates": {"features": FEATURES, **plan.gates.metadata}} if plan.gates else {}),
        **({"calibration": dict(plan.options.calibration)} if plan.options.calibration else {}),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in RECORDED}},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _sync(folder: Path) -> None:
    """See the files onto the disk before the rename that makes them a bundle."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def load_template(path: Path) -> str:
    """A chat template from a file of the user's."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise RequestError(f"the chat template {path} cannot be read ({e}); name a text file") from e


__all__ = [
    "CONFIG",
    "DEMO",
    "ExportOptions",
    "Plan",
    "demo_checkpoint",
    "load_template",
    "plan_export",
    "run_export",
]
