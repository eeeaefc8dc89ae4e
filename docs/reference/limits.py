"""Writes docs/reference/limits.md from limits.md.in and the constants in the code: `python docs/reference/limits.py`.

In limits.md.in a limit is {module constant unit}.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
TEXT = PAGE.with_suffix(".md.in").read_text(encoding="utf-8")
LIMIT = re.compile(r"\{(?P<module>[\w.]+) (?P<name>[\w.]+) ?(?P<unit>[^}]*)\}")
# Nothing that is given is refused for these.
OTHERS = {
    ("tools.bench.ceilings.ceilings", "MAX_WEIGHTS"): "a matrix of our own",
    ("exporter.reference.prompts", "MAX_REFERENCE"): "a longer answer is never matched word for word",
    ("tools.data.scenes", "MAX_OBJECTS"): "pictures that vtx draws",
    ("exporter.graphs.dialects.plain", "MAX_SIZE"): "an end that stands for the last one in a slice",
    ("exporter.graphs.vision", "MAX_ROW"): "an end that stands for the last one in a slice",
    ("tools.tensorrt.profiles", "MAX_CONTEXT"): "the name of a size",
    ("runtime.backends.failures", "MAX_REASON"): "what is shown of an engine's message",
    ("runtime.bundle.vtx_json", "MAX_COMMAND"): "a longer command is not shown",
    ("runtime.host.device", "MAX_FILE"): "of a file of the system, the rest is not read",
    ("runtime.server.protocol", "MAX_PROBE_SECONDS"): "the longest pause between two probes",
    ("runtime.server.openai.completions", "MAX_TOKENS"): "of an answer, when left out",
    ("runtime.session.encoded_images", "MAX_SETS"): "how many encoded images are kept",
}


def page() -> str:
    """The text of docs/reference/limits.md."""
    return LIMIT.sub(lambda limit: _quantity(_value(limit["module"], limit["name"]), limit["unit"]), TEXT)


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
