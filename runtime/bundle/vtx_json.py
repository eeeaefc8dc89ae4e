"""`vtx.json`: the manifest as a file, read strictly, with the interface of its graphs written out beside it."""

from __future__ import annotations

from vtx.runtime.bundle import remake
from vtx.runtime.bundle.safetensors import parse_json
from vtx.runtime.bundle.spec import interface
from vtx.runtime.bundle.spec.manifest import FORMAT, Manifest
from vtx.runtime.errors import BundleError
from vtx.runtime.strict import Strict, json_value, write_json

INTERFACE = "interface"


def write_manifest(manifest: Manifest) -> str:
    """The text of `vtx.json`."""
    return write_json({**json_value(manifest), INTERFACE: interface.declare(manifest)})


def parse_manifest(text: str | bytes, folder: str | None = None) -> Manifest:
    """Read the text of `vtx.json`; `folder` is named in the command that makes a bundle of an older format again.

    Raises:
        BundleError: unknown, missing or mistyped keys, another format, or graphs that take or give something else
            than this vtx knows.

    """
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    data = parse_json(raw, "vtx.json", error=BundleError)
    if not isinstance(data, dict):
        raise BundleError("vtx.json is not a JSON object; the bundle is damaged, export again")
    version = data.get("format")
    if not isinstance(version, int) or isinstance(version, bool):
        raise BundleError(f"vtx.json: format is {version!r}, not a number; the bundle is damaged, export again")
    if version != FORMAT:
        side = "newer" if version > FORMAT else "older"
        fix = 'pip install -U "vtx-edge"' if version > FORMAT else remake.advice(data, folder)
        raise BundleError(f"the bundle has format {version}, {side} than this vtx reads ({FORMAT}); {fix}")
    if INTERFACE not in data:
        raise BundleError(f"vtx.json: key {INTERFACE!r} is missing; export again")
    manifest = Strict().read(Manifest, {key: value for key, value in data.items() if key != INTERFACE}, "vtx.json")
    interface.check(manifest, data[INTERFACE])
    return manifest
