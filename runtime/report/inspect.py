"""The contents of a bundle as data for `vtx-inspect` and its JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vtx.runtime.backends.devices import accepted_arithmetic
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.bundle.spec.names import kv_type
from vtx.runtime.vision.layouts import read_layout
from vtx.runtime.vision.preprocess import trained_fit

TEXT_TOKENS = 64
INT8_KV = (
    "K and V: int8 on a CPU, by measured scales with onnxruntime and by its own with OpenVINO; float16 with TensorRT"
)


def kv_bytes(manifest: Manifest, k: int | None, *, text: int, vision: int) -> int:
    """Bytes of filled KV slots after a prompt of `text` and `vision` tokens: layers 1..K-1 hold both."""
    convolved = manifest.model.conv_layers
    attending = [layer for layer in range(1, manifest.model.layers + 1) if layer not in convolved]
    full = sum(k is None or layer < k for layer in attending)
    return manifest.kv_slot_bytes() * (full * vision + len(attending) * text)


def describe(bundle: Bundle) -> dict[str, Any]:
    """Sizes, stages, variants and KV bytes of a bundle, ready for JSON."""
    manifest = bundle.manifest
    model = manifest.model
    sizes = {name: record.bytes for name, record in manifest.files.items()}
    vision = min(manifest.layout.max_tokens, manifest.max_context - 1)
    height, width = manifest.image.sides
    rest = max(0, manifest.max_context - vision)
    views = read_layout(manifest.layout, model.tower).max_views
    aware = manifest.record.get("activation_aware")  # the questions by whose activations channels were scaled
    measured = aware.get("items") if isinstance(aware, dict) else None
    return {
        "bundle": str(bundle.folder),
        "format": manifest.format,
        "model": dataclasses.asdict(model),
        "layout": dataclasses.asdict(manifest.layout),
        "precision": manifest.precision,
        "kv_dtype": manifest.kv_dtype,
        "kv_dtypes": {dialect: kv_type(dialect, manifest.kv_dtype) for dialect in manifest.dialects},
        "image": {"height": height, "width": width, "fit": trained_fit(manifest.image) if views == 1 else "none"},
        "max_tiles": views,
        **({} if manifest.video is None else {"video": dataclasses.asdict(manifest.video.layout)}),
        "max_context": manifest.max_context,
        "default_k": manifest.default_k,
        "activation_aware": measured if isinstance(measured, int) else None,
        "reductions": list(manifest.reductions),
        "bytes": {"weights": sum(b for n, b in sizes.items() if n.startswith("weights/")), "all": sum(sizes.values())},
        "stages": [
            {"first": s.first, "last": s.last, "graph": graph, "graph_bytes": sizes[graph]}
            for s, graph in manifest.stage_files("ort")
        ],
        "variants": [
            {
                "k": k,
                "full_layers": model.layers if k is None else k - 1,
                "kv_bytes_one_image": kv_bytes(manifest, k, text=TEXT_TOKENS, vision=vision),
                "kv_bytes_full_context": kv_bytes(manifest, k, text=rest, vision=min(vision, manifest.max_context)),
            }
            for k in (None, *manifest.variants)
        ],
        "record": manifest.record,
    }


def fidelity_lines(manifest: Manifest) -> list[str]:
    """The bits of mixed weights, and what integer weights and narrower arithmetic cost, as far as an export says it."""
    lines = list[str]()
    mixed = manifest.record.get("mixed")
    if isinstance(mixed, dict) and isinstance(wider := mixed.get("int8"), list):
        lines.append(f"weights: {mixed.get('bits')} bits in the mean of the decoder's; int8: {len(wider)} matrices")
    measured = manifest.record.get("arithmetic")
    own = measured.get("f32") if isinstance(measured, dict) else None
    if not isinstance(measured, dict) or not isinstance(own, dict):
        return lines
    tokens = measured.get("tokens")
    if measured.get("reference") == "the checkpoint":
        lines.append(f"quality: {_divergence(own)}, over {tokens} tokens of its answers, beside the checkpoint")
        if isinstance(moved := own.get("moved"), float):
            lines.append(f"largest error of a layer: {moved:.2%} of its output, in layer {own.get('layer')}")
    kinds = {kind: part for kind, part in measured.items() if isinstance(part, dict) and kind != "f32"}
    if kinds:
        results = [f"{kind}: {part.get('obstacle') or _divergence(part)}" for kind, part in kinds.items()]
        default = ", ".join(accepted_arithmetic(manifest)) or "none of them"
        lines.append(f"arithmetic: {'; '.join(results)}; used by default: {default}")
    return lines


def _divergence(part: Mapping[str, Any]) -> str:
    same = part.get("same")
    share = f", {same:.1%} keep the most probable token" if isinstance(same, float) else ""
    return f"KL {part.get('kl')} nats{share}"


def images_seen(facts: Mapping[str, Any]) -> str:
    """One line on the tower's input for an image, and the option that changes it."""
    image = facts["image"]
    parameters = facts["layout"]["parameters"]
    if image["height"] is None:
        least, most = (f"{parameters[name]:,}" for name in ("min_pixels", "max_pixels"))
        if facts["max_tiles"] > 1:
            return (
                f"images: at native resolution, {least} to {most} pixels, larger ones in up to {facts['max_tiles']} "
                "tiles, the whole image one of them (--max-tiles)"
            )
        return f"images: at native resolution, {least} to {most} pixels (--max-pixels)"
    size = f"{image['width']}x{image['height']} pixels"
    if facts["max_tiles"] > 1:
        return f"images: up to {facts['max_tiles']} tiles of {size}, the whole image in one of them (--max-tiles)"
    return f"images: {size}; other shapes: {image['fit']} (--fit)"
