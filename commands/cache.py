"""vtx-cache: the bundles that vtx-run --model keeps. It parses, calls and prints."""

from __future__ import annotations

from datetime import datetime

import click

from vtx.commands.shared.options import option, options, size_of
from vtx.runtime.errors import RequestError
from vtx.runtime.terminal.console import command, note, say, table
from vtx.runtime.units import size
from vtx.tools.common import cache as bundles


@command(
    epilog="vtx-cache\nvtx-cache remove HuggingFaceTB--SmolVLM-256M-Instruct-knone\n"
    "vtx-cache --limit 10GB\nvtx-cache clear"
)
@click.argument("action", default="list", type=click.Choice(["list", "remove", "clear"]))
@click.argument("names", nargs=-1, metavar="[NAME ...]")
@options(
    option(
        "--limit", str, "Remove the least recently used bundles until the rest fit.", callback=size_of, metavar="SIZE"
    )
)
def cache(action: str, names: tuple[str, ...], limit: int | None) -> None:
    """List or remove the bundles that --model has cached; bundles in use are kept.

    $VTX_CACHE_LIMIT limits their total size (default: 40GB).
    """
    if (action == "remove") != bool(names):
        raise click.UsageError("vtx-cache remove takes NAMEs, and nothing else does")
    folders_of = {entry.folder.name: entry for entry in bundles.entries()}
    if unknown := [name for name in names if name not in folders_of]:
        raise RequestError(f"{unknown[0]!r:.200} is not in {bundles.folder()}; vtx-cache lists what is")
    busy = [
        name for name in (folders_of if action == "clear" else names) if not bundles.remove(folders_of[name].folder)
    ]
    if busy:
        raise RequestError(f"{', '.join(busy)}: in use, so not removed; end the command that uses it first")
    if limit is not None:
        for name in bundles.trim(limit):
            note(f"removed {name}")
    if action == "list":
        _show()


def _show() -> None:
    """Print the bundles in the cache, the last used first, and their total size."""
    newest = bundles.entries()[::-1]
    dates = [datetime.fromtimestamp(entry.used).isoformat(" ", "minutes") for entry in newest]
    if newest:
        rows = [[entry.folder.name, size(entry.bytes), time] for entry, time in zip(newest, dates, strict=True)]
        table("", ["bundle", "size", "last use"], rows)
    say(f"{size(sum(entry.bytes for entry in newest))} of {size(bundles.limit())} in {bundles.folder()}")
