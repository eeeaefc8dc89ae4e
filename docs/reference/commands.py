"""Writes the pages of commands from the commands themselves: `python docs/reference/commands.py`."""

from __future__ import annotations

import inspect
from pathlib import Path

import click

from vtx import cli

SHARED = 3  # commands that an option must belong to, word for word, to be described once
HERE = Path(__file__).parent
ANSWERING = ("batch", "cache", "chat", "doctor", "inspect", "list", "run", "serve", "watch")
MEASURING = ("bench", "eval", "fit", "plan")
OTHERS = "# Commands that {}\n\n[Commands](commands.md) covers what all commands share, and the commands that answer."


def pages() -> dict[Path, str]:
    """The text of each page."""
    options = {name: _options(name, command) for name, command in sorted(cli.main.commands.items())}
    users: dict[tuple[str, str], list[str]] = {}
    for name, records in options.items():
        for record in records:
            users.setdefault(record, []).append(f"`{name}`")
    shared = {record: names for record, names in users.items() if len(names) >= SHARED}
    answering = [(HERE / "commands-introduction.md.in").read_text(encoding="utf-8").rstrip()]
    answering.append("## Options of several commands")
    answering.append("\n".join(f"{_item(record)} ({', '.join(names)})" for record, names in shared.items()))
    making, measuring = [OTHERS.format("make bundles")], [OTHERS.format("measure and plan")]
    for name, command in sorted(cli.main.commands.items()):
        parts = answering if name in ANSWERING else measuring if name in MEASURING else making
        context = click.Context(command, info_name=f"vtx-{name}", **command.context_settings)
        usage = " ".join(command.collect_usage_pieces(context))
        parts += [f"## vtx-{name}", inspect.cleandoc(command.help or ""), f"```text\nvtx-{name} {usage}\n```"]
        parts.append("\n".join(_item(record) for record in options[name] if record not in shared))
        also = ", ".join(f"`{record[0].split()[0].rstrip(',')}`" for record in options[name] if record in shared)
        parts.append(f"Options of several commands: {also}." if also else "")
        if command.epilog:
            parts.append(f"```sh\n{inspect.cleandoc(command.epilog)}\n```")
    texts = {
        HERE / "commands.md": answering, HERE / "commands-models.md": making, HERE / "commands-measuring.md": measuring
    }  # fmt: skip
    return {path: "\n\n".join(part for part in parts if part) + "\n" for path, parts in texts.items()}


def _options(name: str, command: click.Command) -> list[tuple[str, str]]:
    context = click.Context(command, info_name=f"vtx-{name}", **command.context_settings)
    options = [p for p in command.params if isinstance(p, click.Option) and p.name != "version"]
    return [record for option in options if (record := option.get_help_record(context)) is not None]


def _item(record: tuple[str, str]) -> str:
    return f"- `{record[0]}`: {_plain(record[1])}"


def _plain(text: str) -> str:
    """Help text without what Markdown would read as markup."""
    return " ".join(text.split()).replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_") or "no description"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
