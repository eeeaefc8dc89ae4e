"""vtx-list: the bundles that commands here know. It parses, calls and prints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from vtx.commands.shared.options import option, options
from vtx.runtime.errors import VtxError
from vtx.runtime.terminal.console import command, note, say_json, table
from vtx.runtime.terminal.last import exported, remembered
from vtx.runtime.units import size
from vtx.tools.common import cache


@command(epilog="vtx-list\nvtx-list vtx-*")
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[DIR ...]")
@options(option("--json as_json", bool, "Print only JSON, one list."))
def list_bundles(folders: tuple[Path, ...], as_json: bool) -> None:
    """List bundles: those exported here, those that --model cached, and those in DIR.

    The first is the one that commands use without --bundle: $VTX_BUNDLE, else the one exported last.
    """
    default = Path(os.environ["VTX_BUNDLE"]) if os.environ.get("VTX_BUNDLE") else remembered()
    candidates = [*([default] if default else []), *exported(), *(entry.folder for entry in cache.entries()), *folders]
    paths = dict.fromkeys(path.absolute() for path in candidates)
    records = list[dict[str, Any]]()
    for folder in paths:
        if not os.path.isfile(folder / "vtx.json"):
            continue
        try:
            record = _record(folder)
        except VtxError as e:
            note(f"{folder}: {e}")
            continue
        record["default"] = default is not None and folder == default.absolute()
        records.append(record)
    if as_json:
        say_json(records)
    elif not records:
        note('no bundles yet; vtx-run image.jpg "question" exports the demo, vtx-export --model another model')
    else:
        table("", ["bundle", "model", "precision", "K", "size", "card"], [_row(record) for record in records])


def _record(folder: Path) -> dict[str, Any]:
    """The facts of a bundle that are listed. Raises VtxError."""
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.bundle.card import read_card

    bundle = Bundle.open(folder)
    card = read_card(bundle)
    manifest = bundle.manifest
    return {
        "bundle": str(folder),
        "default": False,
        "model": manifest.model.name,
        "precision": manifest.precision,
        "k": list(manifest.variants),
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "card": None if card is None else card.chosen.configuration.name,
    }


def _row(record: dict[str, Any]) -> list[str]:
    """The cells of a bundle's row."""
    return [
        f"{record['bundle']}{' (default)' if record['default'] else ''}",
        str(record["model"]),
        str(record["precision"]),
        ", ".join(map(str, record["k"])) or "none",
        size(record["bytes"]),
        str(record["card"] or "-"),
    ]
