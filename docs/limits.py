"""Writes docs/limits.md from the constants in the code: `python docs/limits.py`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
HEAD = """# Limits

What vtx reads from files and requests is bounded before it costs anything. Larger is refused, in one line that names
the quantity and the limit. This page is made from the constants by `python docs/limits.py`; a test compares them.
MiB is 2^20 bytes. [SECURITY.md](../SECURITY.md) says what is trusted.
"""
# (section, [(what, module, constant, unit)])
TABLES = [
    ("Checkpoints", [
        ("`config.json` and each other settings file", "exporter.checkpoint.loader", "MAX_CONFIG", "bytes"),
        ("`model.safetensors.index.json`", "exporter.checkpoint.loader", "MAX_INDEX", "bytes"),
        ("`tokenizer.json` and each other vocabulary", "runtime.prompt.text", "MAX_TOKENIZER_BYTES", "bytes"),
        ("A chat template's source", "runtime.prompt.template", "MAX_SOURCE", "characters"),
        ("Layers of a tower or decoder", "exporter.checkpoint.config", "MAX_LAYERS", "layers"),
        ("Width of a layer", "exporter.checkpoint.config", "MAX_WIDTH", "numbers"),
        ("Positions", "exporter.checkpoint.config", "MAX_POSITIONS", "tokens"),
        ("A weight file that is taken whole, by the bytes that are needed of it", "exporter.weights.plan",
         "MOST_UNUSED", "times"),
    ]),
    ("Safetensors headers", [
        ("Header", "runtime.bundle.safetensors", "MAX_HEADER", "bytes"),
        ("Tensors in a file", "runtime.bundle.safetensors", "MAX_TENSORS", "tensors"),
        ("Dimensions of a tensor", "runtime.bundle.safetensors", "MAX_DIMS", "dimensions"),
        ("Nesting, of any JSON", "runtime.bundle.safetensors", "MAX_DEPTH", "levels"),
    ]),
    ("Bundles", [
        ("`vtx.json`", "runtime.bundle.spec.manifest", "MAX_BYTES", "bytes"),
        ("`vtx.json.sha256`", "runtime.bundle.seal", "MAX_CHECKSUM", "bytes"),
        ("A signature", "runtime.bundle.seal", "SIGNATURE_BYTES", "bytes"),
        ("A key file", "runtime.bundle.seal", "MAX_KEY", "bytes"),
        ("`engines.json`", "runtime.bundle.fingerprint", "MAX_BYTES", "bytes"),
        ("Golden vectors", "runtime.report.golden", "MAX_GOLDEN", "bytes"),
        ("Hashed at each load, also without a required signature: files up to", "runtime.bundle.bundle",
         "QUICK_BYTES", "bytes"),
    ]),
    ("Prompts", [
        ("A conversation", "runtime.prompt.messages", "MAX_TEXT", "characters"),
        ("What a chat template prints", "runtime.prompt.template", "MAX_OUTPUT", "characters"),
        ("The spec of a reduction", "runtime.policies.spec", "MAX_SPEC", "characters"),
    ]),
    ("Images", [
        ("File", "runtime.vision.limits", "MAX_FILE_BYTES", "bytes"),
        ("Side", "runtime.vision.limits", "MAX_SIDE", "pixels"),
        ("Area", "runtime.vision.limits", "MAX_PIXELS", "pixels"),
        ("Segments of a JPEG, chunks of a PNG or WebP", "runtime.vision.limits", "MAX_PARTS", "parts"),
        ("Scans of a JPEG", "runtime.vision.limits", "MAX_SCANS", "scans"),
        ("Decoding", "runtime.vision.limits", "MAX_DECODE_SECONDS", "seconds of CPU time"),
    ]),
    ("Questions for calibration", [
        ("File", "exporter.data.items", "MAX_FILE", "bytes"),
        ("Line", "exporter.data.items", "MAX_LINE", "bytes"),
        ("Images of a question", "exporter.data.items", "MAX_IMAGES", "images"),
    ]),
]  # fmt: skip


def page() -> str:
    """The text of docs/limits.md."""
    parts = [HEAD]
    for section, rows in TABLES:
        parts.append(f"\n## {section}\n\n| what | limit |\n|---|---:|\n")
        for subject, module, name, unit in rows:
            parts.append(f"| {subject} | {_quantity(getattr(import_module(f'vtx.{module}'), name), unit)} |\n")
    return "".join(parts)


def _quantity(value: float, unit: str) -> str:
    if unit == "bytes" and value >= 1 << 20:
        return f"{value / (1 << 20):g} MiB"
    if unit == "bytes" and value >= 1 << 10:
        return f"{value / (1 << 10):g} KiB"
    return f"{value:,g} {unit}" if isinstance(value, float) else f"{value:,} {unit}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
