"""Bundles made from tiny checkpoints in this process, and ways to damage a copy of one."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.json_files import read_json
from tests.support.store import new_folder, publish, verified
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.safetensors import write_safetensors
from vtx.runtime.bundle.seal import write_sealed
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.bundle.vtx_json import INTERFACE
from vtx.runtime.bundle.vtx_json import write_manifest as to_text
from vtx.runtime.errors import BundleError
from vtx.runtime.strict import Strict

if TYPE_CHECKING:
    from vtx.exporter.bundling.options import ExportOptions

ORT = ("ort",)
CPUS = ("ort", "plain")  # of the engines that compute where tests run
SHARED: Path | None = None  # where `shared` keeps bundles, next to `tiny_checkpoint`'s
IGNORE: Callable[[str, int, int], None] = lambda *_: None  # noqa: E731 - a constant, not a function to call
EXPORT_ONLY = ("torch", "transformers", "onnx", "onnx_ir", "safetensors", "huggingface_hub")


def export(
    checkpoint: Path,
    out: Path,
    ks: tuple[int, ...] = (3, 5),
    precision: str = "fp32",
    *,
    max_context: int | None = None,
    reductions: tuple[str, ...] = (),
    allow_pickle: bool = False,
    dialects: tuple[str, ...] = CPUS,
) -> Bundle:
    """Export a checkpoint to `out`, without a command around it, or copy what has been exported so.

    Graphs take more than half of the time of a tiny export: whoever runs none but onnxruntime's names `ORT`, whoever
    needs those of GPUs names them.
    """
    from vtx.exporter.bundling.options import ExportOptions

    return export_with(
        ExportOptions(
            str(checkpoint), ks, precision, max_context,
            reductions=reductions, allow_pickle=allow_pickle, dialects=dialects,
            allow_changed_answers=reads_documents(checkpoint),
        ),
        out,
    )  # fmt: skip


def reads_documents(checkpoint: Path) -> bool:
    """True for a checkpoint whose K and reductions are exported with the user's word alone."""
    from vtx.exporter.checkpoint.families.registry import FAMILIES

    config = checkpoint / "config.json"
    kind = read_json(config).get("model_type") if config.is_file() else None
    return kind in {family.model_type for family in FAMILIES if family.reader}


def export_all(
    checkpoint: Path, out: Path, ks: tuple[int, ...] = (3, 5), precision: str = "fp32", **more: Any
) -> Bundle:
    """As `export`, with graphs for every engine."""
    return export(checkpoint, out, ks, precision, dialects=DIALECTS, **more)


def export_with(options: ExportOptions, out: Path) -> Bundle:
    """Export with any options to `out`, or copy what has been exported so."""
    made = shared(options)
    return export_anew(options, out) if made is None else Bundle.open(copy(made, out), check=False)


def export_anew(options: ExportOptions, out: Path) -> Bundle:
    """Export with any options to `out`, for the sake of the export."""
    from vtx.exporter.bundling.export import run_export
    from vtx.exporter.bundling.prepare import plan_export

    return run_export(plan_export(options), out, force=False, report=IGNORE)


def shared(options: ExportOptions) -> Path | None:
    """The bundle that these options give, made once for all workers and later runs, of which nobody changes a file.

    None if the checkpoint is none of those that all tests share, or if options name further files or measurements.
    """
    from vtx.exporter.bundling.options import DEMO

    made_by_tests = (
        getattr(options, name) for name in ("gates", "calibration", "retain", "aware", "arithmetic", "release")
    )
    if SHARED is None or any(made_by_tests) or options.text_tower or options.tower:
        return None
    if options.model != DEMO and Path(options.model).parent != SHARED.parent / "tiny":
        return None
    folder = SHARED / hashlib.sha256(repr(options).encode()).hexdigest()[:16]
    if not folder.exists():
        place = new_folder(SHARED.parent)
        publish(export_anew(options, place / "bundle").folder, folder)
        shutil.rmtree(place)
    return verified(folder)


def copy(bundle: Path, target: Path) -> Path:
    """A copy that shares no file with the original, to be altered."""
    return Path(shutil.copytree(bundle, target, symlinks=True))


def manifest(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = read_json(folder / "vtx.json")
    return value


def write_manifest(folder: Path, value: object) -> None:
    """Write a manifest with its checksum, as a forger would."""
    write_sealed(folder / "vtx.json", json.dumps(value).encode())


def forge(folder: Path, value: dict[str, Any]) -> None:
    """Write an altered manifest with the interface that follows from it, as a forger would, or the old one."""
    declared = {key: item for key, item in value.items() if key != INTERFACE}
    write_manifest(folder, value)
    with suppress(BundleError):
        write_sealed(folder / "vtx.json", to_text(Strict().read(Manifest, declared, "forged")).encode())


def reseal(folder: Path, *names: str) -> None:
    """Write the sizes and checksums of altered files into the manifest, as a forger would."""
    value = manifest(folder)
    for name in names:
        content = (folder / name).read_bytes()
        value["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_manifest(folder, value)


def cut_output(folder: Path, name: str, rows: int, output: str | None = None) -> None:
    """Let an output of a graph, the first unless named, be its first `rows` rows alone, as a forger may: it is free."""
    import onnx

    model = onnx.load(folder / name, load_external_data=False)
    output = output or model.graph.output[0].name
    for node in model.graph.node:
        for ports in (node.input, node.output):
            ports[:] = ["whole" if port == output else port for port in ports]
    for key, value in {"from": 0, "to": rows, "axis": 0}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([value], np.int64), key))
    model.graph.node.append(onnx.helper.make_node("Slice", ["whole", "from", "to", "axis"], [output]))
    (folder / name).write_bytes(model.SerializeToString())
    reseal(folder, name)


def flip(path: Path, at: int = -1) -> None:
    """Change one byte, the last unless told; the size stays."""
    content = bytearray(path.read_bytes())
    content[at] ^= 0x55
    path.write_bytes(content)


def write_gate(folder: Path, seed: int, k: int = 3) -> Path:
    """A file with a random gate before layer `k`, for models of hidden size 64."""
    random = np.random.default_rng(seed)
    hidden = random.standard_normal((24, 2 * 64)).astype(np.float32) / 128**0.5
    odds = random.standard_normal((2, 24)).astype(np.float32)
    path = folder / "gates.safetensors"
    write_safetensors(path, {f"gate.{k - 2}.fc1.weight": hidden, f"gate.{k - 2}.fc2.weight": odds}, None)
    return path
