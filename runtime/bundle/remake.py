"""The command that makes a bundle again, from the record of how it was made."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

LISTS = {"k": "--k", "dialects": "--dialect"}
VALUES = {
    "precision": "--precision",
    "vision_precision": "--vision-precision",
    "head_precision": "--head-precision",
    "kv_precision": "--kv-precision",
    "max_context": "--max-context",
    "text_tower": "--text-tower",
    "tower": "--tower",
    "int4_block": "--int4-block",
}
MAX_COMMAND = 2000  # characters


def advice(manifest: Mapping[str, Any], folder: str | None) -> str:
    """What to do about a bundle that this vtx no longer reads, whatever its manifest holds."""
    words = _words(manifest, folder)
    command = shlex.join(words) if words else ""
    if not command or len(command) > MAX_COMMAND or not command.isprintable():
        return "export it again with vtx-export"
    return f"make it again with: {command}"


def _words(manifest: Mapping[str, Any], folder: str | None) -> list[str]:
    record = manifest.get("record")
    options, source = (_table(_table(record).get(key)) for key in ("options", "source"))
    model = options.get("model", source.get("model"))
    if not isinstance(model, str) or not model:
        return []
    out = ["--out", folder, "--force"] if folder else []
    return ["vtx-export", "--model", model, *_options(options, manifest), *_inputs(_table(record)), *out]


def _options(options: Mapping[str, Any], manifest: Mapping[str, Any]) -> Iterator[str]:
    options = {"dialects": sorted(map(str, _table(manifest.get("dialects")))), **options}
    if manifest.get("default_k") == "auto":
        options = {**options, "k": ["auto"]}
    for key, option in LISTS.items():
        values = options.get(key)
        if isinstance(values, list) and values:
            yield from (option, ",".join(map(str, values)))
    for key, option in VALUES.items():
        if isinstance(value := options.get(key), str | int) and not isinstance(value, bool):
            yield from (option, str(value))
    if options.get("allow_pickle") is True:
        yield "--allow-pickle"
    reductions = options.get("reduce")
    for spec in reductions if isinstance(reductions, list) else []:
        yield from ("--reduce", str(spec))


def _inputs(record: Mapping[str, Any]) -> Iterator[str]:
    """Options whose files the record does not name: placeholders for the reader to fill in."""
    if "gates" in record:
        yield from ("--gates", "GATES_FILE")
    aware = _table(record.get("activation_aware"))
    if aware:
        yield from ("--activation-aware", "--calibration", str(aware.get("data", "DATA")))
    if _table(record.get("options")).get("chat_template") is True:
        yield from ("--chat-template", "TEMPLATE_FILE")


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
