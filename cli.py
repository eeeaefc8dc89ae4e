"""The list of commands. Each is imported when it is asked for by name, so that `vtx-run` starts quickly."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import click

from vtx.runtime.terminal.console import Group

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_MODULES = {  # module of `commands/` by the function of each command
    "batch": "batch",
    "bench": "bench",
    "build": "build",
    "cache": "cache",
    "calibrate": "calibrate",
    "chat": "chat",
    "doctor": "doctor",
    "evaluate": "evaluate",
    "export": "export",
    "fit": "fit",
    "inspect": "inspect",
    "list_bundles": "list_bundles",
    "plan": "plan",
    "run": "run",
    "serve": "serve",
    "train_gate": "calibrate",
    "watch": "watch",
}
ENTRY_POINTS = "vtx.commands"  # of packages with further commands, by the function of each
# Of commands that are not named like their function.
_NAMES = {"evaluate": "eval", "list_bundles": "list", "train_gate": "train-gate"}


def __getattr__(name: str) -> Any:
    if name == "main":
        return _main()
    if name in _MODULES:
        return getattr(importlib.import_module(f"vtx.commands.{_MODULES[name]}"), name)
    if name.startswith("_") or name not in _plugins():
        raise AttributeError(f"module 'vtx.cli' has no attribute {name!r}")
    return _plugins()[name].load()


@functools.cache
def _plugins() -> dict[str, EntryPoint]:
    """The commands of other installed packages, by function."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


@functools.cache
def _main() -> click.Group:
    """The command `vtx`, with all others below it."""

    @click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
    @click.version_option(package_name="vtx-edge")
    def main() -> None:
        """LLaVA-type models as split engine graphs, visual tokens withdrawn in depth.

        Each command also stands alone: vtx run is vtx-run.
        """

    for name in (*_MODULES, *_plugins()):
        main.add_command(__getattr__(name), _NAMES.get(name, name))
    return main
