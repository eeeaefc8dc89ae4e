"""Writes docs/reference/limits.md from the constants in the code: `python docs/reference/limits.py`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
HEAD = """# Limits

What vtx reads from files and requests is bounded before it costs anything. Larger is refused, in one line that names
the quantity and the limit. This page is made from the constants by `python docs/reference/limits.py`; a test compares
them. MiB is 2^20 bytes, GiB 2^30. [SECURITY.md](../../SECURITY.md) says what is trusted.
"""
# (section, [(what, module, constant, unit)])
TABLES = [
    ("Checkpoints", [
        ("`config.json` and each other settings file", "exporter.checkpoint.loader", "MAX_CONFIG", "bytes"),
        ("`model.safetensors.index.json`", "exporter.checkpoint.loader", "MAX_INDEX", "bytes"),
        ("`tokenizer.json` and each other vocabulary", "runtime.prompt.text", "MAX_TOKENIZER_BYTES", "bytes"),
        ("A chat template's source", "runtime.prompt.template", "MAX_SOURCE", "characters"),
        ("Layers of a tower or decoder", "exporter.checkpoint.config", "MAX_LAYERS", "layers"),
        ("Files of pickled weights", "exporter.checkpoint.original.pickled", "MAX_SHARDS", "files"),
        ("A pickle in such a file", "exporter.checkpoint.original.pickled", "MAX_PICKLE", "bytes"),
        ("Opcodes of it", "exporter.checkpoint.original.opcodes", "MAX_OPCODES", "opcodes"),
        ("Tensors of such a file, by its size, where some share values", "exporter.checkpoint.original.pickled",
         "MOST_SHARED", "times"),
        ("Files in its archive", "exporter.checkpoint.original.archive", "MAX_ENTRIES", "files"),
        ("Directory of its archive", "exporter.checkpoint.original.archive", "MAX_DIRECTORY", "bytes"),
        ("System text of an InternVL-Chat's config.json",
         "exporter.checkpoint.families.internvl.internvl_chat", "MAX_SYSTEM",
         "characters"),
        ("Matrices of an original LLaVA's projector", "exporter.checkpoint.families.llava_llama",
         "MAX_PROJECTOR_LAYERS", "matrices"),
        ("Width of a layer", "exporter.checkpoint.fields", "MAX_WIDTH", "numbers"),
        ("Positions", "exporter.checkpoint.config", "MAX_POSITIONS", "tokens"),
        ("A weight file that is taken whole, by the bytes that are needed of it", "exporter.weights.plan",
         "MOST_UNUSED", "times"),
        ("Width of a gate", "exporter.graphs.gates", "MAX_WIDTH", "numbers"),
        ("Metadata of a file of gates", "exporter.graphs.gates", "MAX_METADATA", "characters"),
    ]),
    ("Tokenizers of checkpoints", [
        ("Id of a token", "runtime.bundle.spec.text_settings", "MAX_ID", ""),
        ("Added token, or string that a normalizer or decoder writes", "exporter.checkpoint.tokenizer_spec",
         "MAX_STRING", "characters"),
        ("What normalizers make of one character", "exporter.checkpoint.tokenizer_spec", "MAX_GROWTH", "characters"),
        ("Parts of a normalizer, pre-tokenizer, post-processor or decoder", "exporter.checkpoint.tokenizer_spec",
         "MAX_PARTS", "parts"),
        ("Tokens added around a prompt", "exporter.checkpoint.resolving", "MAX_ADDED_IDS", "tokens"),
        ("Memory of the process that tries a tokenizer or template", "runtime.host.confined",
         "ChildLimits.memory", "bytes"),
        ("Its processor time", "runtime.host.confined", "ChildLimits.cpu_seconds", "seconds"),
        ("Its time", "runtime.host.confined", "ChildLimits.wall_seconds", "seconds"),
        ("A file that it writes", "runtime.host.confined", "ChildLimits.file", "bytes"),
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
        ("Any size of the model", "runtime.bundle.spec.model_spec", "MAX_SIZE", ""),
        ("Layers", "runtime.bundle.spec.model_spec", "MAX_LAYERS", "layers"),
        ("Segment of a question in CLIP's text tower", "runtime.bundle.spec.model_spec", "MAX_SEGMENT", "tokens"),
        ("Side of what a vision tower takes", "runtime.bundle.spec.image_settings", "MAX_INPUT_SIDE", "pixels"),
        ("`chat_template.jinja`", "runtime.prompt.text", "MAX_TEMPLATE_BYTES", "bytes"),
        ("Header of a file of small tensors, e.g. `rope.safetensors`", "runtime.bundle.tensors", "MAX_HEADER", "bytes"),
        ("Golden vectors", "runtime.report.golden", "MAX_GOLDEN", "bytes"),
        ("Hashed at each load, also without a required signature: files up to", "runtime.bundle.bundle",
         "QUICK_BYTES", "bytes"),
    ]),
    ("Prompts", [
        ("A conversation", "runtime.prompt.messages", "MAX_TEXT", "characters"),
        ("What a chat template prints", "runtime.prompt.template", "MAX_OUTPUT", "characters"),
        ("What a product in a chat template makes", "runtime.prompt.template", "MAX_PRODUCT",
         "characters, items or bits"),
        ("Threads to compute with", "runtime.checks", "MOST_THREADS", "threads"),
        ("Stop strings", "runtime.api.options", "MAX_STOPS", "strings"),
        ("Tokens that prompt lookup drafts for one pass", "runtime.api.options", "MAX_DRAFT", "tokens"),
        ("Most likely tokens that are given in one place", "runtime.api.options", "MAX_LIKELY", "tokens"),
        ("The spec of a reduction", "runtime.policies.spec", "MAX_SPEC", "characters"),
        ("A whole number in it", "runtime.policies.spec", "MAX_NUMBER", ""),
    ]),
    ("Images", [
        ("File", "runtime.vision.limits", "MAX_FILE_BYTES", "bytes"),
        ("Side", "runtime.vision.limits", "MAX_SIDE", "pixels"),
        ("Area", "runtime.vision.limits", "MAX_PIXELS", "pixels"),
        ("Tiles of an image, in layouts that have them", "runtime.vision.layouts.anyres", "MAX_TILES", "tiles"),
        ("Tiles along a side, in SmolVLM's layout", "runtime.vision.layouts.marked", "MAX_SIDE", "tiles"),
        ("Resolutions of such a layout", "runtime.vision.layouts.anyres", "MAX_RESOLUTIONS", "resolutions"),
        ("An image's longer side over its shorter, at its own resolution", "runtime.vision.layouts.native", "MAX_RATIO",
         "times"),
        ("Segments of a JPEG, chunks of a PNG or WebP", "runtime.vision.limits", "MAX_PARTS", "parts"),
        ("Scans of a JPEG", "runtime.vision.limits", "MAX_SCANS", "scans"),
        ("Blocks of 8x8 pixels that the scans of a JPEG pass over", "runtime.vision.limits", "MAX_SCAN_BLOCKS",
         "blocks"),
        ("Blocks of a GIF up to the end of its first frame", "runtime.vision.limits", "MAX_GIF_BLOCKS", "blocks"),
        ("Side after resizing, before the crop", "runtime.vision.limits", "MAX_RESIZED_SIDE", "pixels"),
        ("Area after resizing, before the crop", "runtime.vision.limits", "MAX_RESIZED_PIXELS", "pixels"),
        ("Decoding", "runtime.vision.limits", "MAX_DECODE_SECONDS", "seconds of CPU time"),
    ]),
    ("Videos", [
        ("File", "runtime.vision.limits", "MAX_VIDEO_BYTES", "bytes"),
        ("Duration, as the file declares it", "runtime.vision.limits", "MAX_VIDEO_SECONDS", "seconds"),
        ("Frames of a file", "runtime.vision.limits", "MAX_VIDEO_FRAMES", "frames"),
        ("Area of a frame", "runtime.vision.limits", "MAX_FRAME_PIXELS", "pixels"),
        ("Frames that are sampled", "runtime.vision.limits", "MAX_SAMPLED_FRAMES", "frames"),
        ("Tokens of a frame", "runtime.vision.layouts.frames", "MAX_FRAME_TOKENS", "tokens"),
        ("Text of a prompt between two frames", "runtime.vision.layouts.frames", "MAX_BETWEEN", "characters"),
        ("The process that decodes: its time", "runtime.vision.limits", "MAX_VIDEO_DECODE_SECONDS", "seconds"),
        ("Its threads", "runtime.vision.video_child", "MAX_THREADS", "threads"),
        ("Its address space", "runtime.vision.limits", "MAX_VIDEO_MEMORY", "bytes"),
    ]),
    ("Requests to vtx-serve, by default", [
        ("Body", "runtime.server.limits", "Limits.body", "bytes"),
        ("Images", "runtime.server.limits", "Limits.images", "images"),
        ("Area of an image", "runtime.server.limits", "Limits.pixels", "pixels"),
        ("Tokens of an answer", "runtime.server.limits", "Limits.new_tokens", "tokens"),
        ("Answers of a model that are computed side by side", "runtime.server.limits", "Limits.parallel", "answers"),
        ("Of these, in one pass through the model", "runtime.server.limits", "Limits.batch", "answers"),
        ("Conversations of a model that are kept", "runtime.server.limits", "Limits.kept", "conversations"),
        ("Requests beside them that wait", "runtime.server.limits", "Limits.queue", "requests"),
        ("Time for a body to arrive", "runtime.server.limits", "Limits.body_seconds", "seconds"),
        ("Time for a request, waiting included", "runtime.server.limits", "Limits.seconds", "seconds"),
        ("Time for a client to take what was sent", "runtime.server.limits", "Limits.write_seconds", "seconds"),
        ("Time without a sign of life of a model's thread", "runtime.server.limits", "Limits.stall_seconds", "seconds"),
        ("Time for a header to arrive", "runtime.server.protocol", "HEADER_SECONDS", "seconds"),
        ("Header", "runtime.server.protocol", "MAX_HEADER", "bytes"),
        ("Chunks of a body before their size counts", "runtime.server.protocol", "FREE_CHUNKS", "chunks"),
        ("Least mean size of the chunks beyond these", "runtime.server.protocol", "CHUNK_BYTES", "bytes"),
        ("Connections", "runtime.server.protocol", "CONNECTIONS", "connections"),
        ("Connections without a request", "runtime.server.protocol", "MAX_IDLE", "connections"),
        ("Of these, of one client", "runtime.server.protocol", "MAX_IDLE_PER_CLIENT", "connections"),
        ("Time for an image at an address to arrive", "runtime.server.limits", "Limits.fetch_seconds", "seconds"),
        ("An image's address", "runtime.server.remote", "MAX_URL", "characters"),
        ("K and V in use and kept", "runtime.server.limits", "Limits.kv", "bytes"),
        ("Encoded images kept", "runtime.server.limits", "Limits.image_tokens", "bytes"),
        ("API key", "runtime.server.limits", "MAX_KEY", "characters"),
    ]),
    ("Questions to measure with", [
        ("File", "tools.data.items", "MAX_FILE", "bytes"),
        ("File that is one JSON list", "tools.data.items", "MAX_LIST_FILE", "bytes"),
        ("Line", "tools.data.items", "MAX_LINE", "bytes"),
        ("Images of a question", "tools.data.items", "MAX_IMAGES", "images"),
        ("Share of questions that are skipped", "tools.data.items", "MAX_SKIPPED", ""),
        ("Choices of a question, in benchmarks", "tools.evaluation.formats", "MAX_CHOICES", "choices"),
        ("Annotators of a question, in benchmarks", "tools.evaluation.formats", "MAX_ANSWERS", "answers"),
    ]),
    ("Files of vtx", [
        ("Report of a calibration", "exporter.calibration.report", "MAX_REPORT", "bytes"),
        ("Journal of a measurement", "tools.common.journal", "MAX_JOURNAL", "bytes"),
        ("Record of a training's work", "exporter.gates.workdir", "MAX_WORK", "bytes"),
        ("Index of traces", "runtime.report.traces.files", "MAX_BYTES", "bytes"),
        ("Tokens of a prompt whose cost is estimated", "tools.estimate.flops", "MAX_TOKENS", "tokens"),
    ]),
]  # fmt: skip
# Nothing that is given is refused for these.
OTHERS = {
    ("exporter.tuning.judge", "MAX_DROP"): "the accuracy by which a K is chosen",
    ("exporter.tuning.train", "MAX_NORM"): "gradients are clipped to it",
    ("tools.bench.ceilings.ceilings", "MAX_WEIGHTS"): "a matrix of our own",
    ("exporter.checkpoint.forms", "MAX_SPLIT"): "a template beyond it has no forms and stays a template",
    ("exporter.checkpoint.template_syntax", "MAX_SLICES"): "a template beyond it has no forms and stays a template",
    ("exporter.reference.prompts", "MAX_REFERENCE"): "a longer answer is never matched word for word",
    ("tools.data.scenes", "MAX_OBJECTS"): "pictures that vtx draws",
    ("exporter.graphs.dialects.plain", "MAX_SIZE"): "an end that stands for the last one in a slice",
    ("exporter.graphs.vision", "MAX_ROW"): "an end that stands for the last one in a slice",
    ("tools.tensorrt.profiles", "MAX_CONTEXT"): "the name of a size",
    ("runtime.backends.failures", "MAX_REASON"): "what is shown of an engine's message",
    ("runtime.bundle.vtx_json", "MAX_COMMAND"): "a longer command is not shown",
    ("runtime.host.device", "MAX_FILE"): "of a file of the system, the rest is not read",
    ("runtime.server.protocol", "MAX_PROBE_SECONDS"): "the longest pause between two probes",
    ("runtime.session.encoded_images", "MAX_SETS"): "how many encoded images are kept",
}


def page() -> str:
    """The text of docs/reference/limits.md."""
    parts = [HEAD]
    for section, rows in TABLES:
        parts.append(f"\n## {section}\n\n| what | limit |\n|---|---:|\n")
        for subject, module, name, unit in rows:
            parts.append(f"| {subject} | {_quantity(_value(module, name), unit)} |\n")
    return "".join(parts)


def _value(module: str, name: str) -> float:
    """A constant of a module, or, written `Class.field`, the default of a dataclass."""
    owner, _, field = name.rpartition(".")
    source = import_module(f"vtx.{module}")
    value: float = getattr(getattr(source, owner)() if owner else source, field)
    return value


def _quantity(value: float, unit: str) -> str:
    if unit == "bytes" and value >= 1 << 30:
        return f"{value / (1 << 30):g} GiB"
    if unit == "bytes" and value >= 1 << 20:
        return f"{value / (1 << 20):g} MiB"
    if unit == "bytes" and value >= 1 << 10:
        return f"{value / (1 << 10):g} KiB"
    return (f"{value:,g} {unit}" if isinstance(value, float) else f"{value:,} {unit}").rstrip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
