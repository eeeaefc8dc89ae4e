"""`vtx.json`: the manifest as a file, read strictly, with the interface of its graphs written out next to it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from vtx.runtime.bundle.safetensors import parse_json
from vtx.runtime.bundle.spec import interface
from vtx.runtime.bundle.spec.manifest import FORMAT, Manifest
from vtx.runtime.errors import BundleError
from vtx.runtime.strict import UPGRADE, Strict, json_value, write_json

INTERFACE = "interface"
LISTS = {"k": "--k", "dialects": "--dialect"}
VALUES = (
    "precision",
    "vision_precision",
    "head_precision",
    "kv_precision",
    "max_context",
    "text_tower",
    "tower",
    "int4_block",
    "int8_block",
    "bits",
)
MAX_COMMAND = 2000  # characters


def write_manifest(manifest: Manifest) -> str:
    return write_json({**json_value(manifest), INTERFACE: interface.declare(manifest)})


def parse_manifest(text: str | bytes, folder: str | None = None) -> Manifest:
    """Read the text of `vtx.json`; `folder` is named in the command that makes a bundle of an older format again."""
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    data = parse_json(raw, "vtx.json", error=BundleError)
    if not isinstance(data, dict):
        raise BundleError("vtx.json is not a JSON object; the bundle is damaged, export again")
    version = data.get("format")
    if not isinstance(version, int) or isinstance(version, bool):
        raise BundleError(f"vtx.json: format is {version!r}, not a number; the bundle is damaged, export again")
    if version != FORMAT:
        side = "newer" if version > FORMAT else "older"
        fix = UPGRADE if version > FORMAT else remake_advice(data, folder)
        raise BundleError(f"the bundle has format {version}, {side} than this vtx reads ({FORMAT}); {fix}")
    if INTERFACE not in data:
        raise BundleError(f"vtx.json: key {INTERFACE!r} is missing; export again")
    manifest = Strict().read(Manifest, {key: value for key, value in data.items() if key != INTERFACE}, "vtx.json")
    interface.check(manifest, data[INTERFACE])
    return manifest


def remake_advice(manifest: Mapping[str, Any], folder: str | None) -> str:
    """The command that makes a bundle again, from the record of how it was made; `manifest` may hold anything."""
    record = _table(manifest.get("record"))
    options, source, aware = (_table(record.get(key)) for key in ("options", "source", "activation_aware"))
    model = options.get("model", source.get("model"))
    words = ["vtx-export", "--model", str(model)]
    options = {"dialects": sorted(map(str, _table(manifest.get("dialects")))), **options}
    if manifest.get("default_k") == "auto":
        options = {**options, "k": ["auto"]}
    words += _option_words(options)
    words += ["--gates", "GATES_FILE"] if "gates" in record else []
    words += ["--activation-aware", "--calibration", str(aware.get("data", "DATA"))] if aware else []
    words += ["--chat-template", "TEMPLATE_FILE"] if options.get("chat_template") is True else []
    words += ["--out", folder, "--force"] if folder else []
    command = shlex.join(words)
    if not isinstance(model, str) or not model or len(command) > MAX_COMMAND or not command.isprintable():
        return "export it again with vtx-export"
    return f"make it again with: {command}"


def _option_words(options: Mapping[str, Any]) -> list[str]:
    """The words of a command line for options whose value is in the record."""
    words = list[str]()
    for key, option in LISTS.items():
        values = options.get(key)
        if isinstance(values, list) and values:
            words += [option, ",".join(map(str, values))]
    for key in VALUES:
        if isinstance(value := options.get(key), str | int | float) and not isinstance(value, bool):
            words += [f"--{key.replace('_', '-')}", str(value)]
    if options.get("allow_pickle") is True:
        words.append("--allow-pickle")
    reductions = options.get("reduce")
    for spec in reductions if isinstance(reductions, list) else []:
        words += ["--reduce", str(spec)]
    return words


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
