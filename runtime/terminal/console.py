"""Shared by all commands: their errors, notes on stderr, tables on stdout, progress bars."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

from vtx.runtime.errors import VtxError, printable
from vtx.runtime.interrupts import INTERRUPTED, Interruptible
from vtx.runtime.process import STARTED, leave_on_success, mark_success, own_process
from vtx.runtime.terminal.streams import drop_stdout, prepare_streams
from vtx.runtime.units import Progress, duration, size

COLUMN_GAP = 3  # of blanks
INCOMPLETE = 3  # the exit code of an answer that was cut before its form was complete
LINE_EVERY = 30.0  # seconds between lines of progress where there is no terminal


class Program(click.Command):
    """A click command that knows that it is a process of its own: it was called, as scripts do, not run by `main`.

    If it `leaves`, the process ends without cleaning up (`leave_on_success`).
    """

    leaves = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own_process()
        prepare_streams()
        if self.leaves:
            leave_on_success()
        try:
            return super().__call__(*args, **kwargs)
        except SystemExit as end:
            if end.code in (None, 0):
                mark_success()
            raise

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run as click does; output that cannot be written, of help and versions too, ends in one line and code 1."""
        try:
            return super().main(*args, **kwargs)
        except OSError as e:  # but for a reader that went away, which click ends quietly
            drop_stdout()
            note(f"{os.path.basename(sys.argv[0])}: cannot write the output ({e.strerror or e})")
            sys.exit(1)


class Group(Program, click.Group):
    """Several commands under one name."""


class Command(Program):
    """A click command whose VtxErrors are one line on stderr and exit code 1, and Ctrl-C is 130."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with Interruptible():
                return self._invoke(ctx)
        except KeyboardInterrupt:
            _fail(ctx, "interrupted", INTERRUPTED)

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # so that a full disk is an error here, not at the interpreter's end
            return result
        except VtxError as e:
            _fail(ctx, " ".join(str(e).split()), 1)
        except MemoryError:
            _fail(ctx, "out of memory; use a smaller precision, a smaller --max-context, or another machine", 1)

    def get_short_help_str(self, limit: int = 0) -> str:
        """The whole first sentence, for the list of commands."""
        return super().get_short_help_str(max(limit, 400))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():  # unwrapped, so that they can be pasted
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")


def _fail(ctx: click.Context, message: str, code: int) -> None:
    note(f"{ctx.info_name}: {message}")
    ctx.exit(code)


def note(message: str) -> None:
    """Print on stderr; lines wrap at words on a terminal."""
    text = printable(message)
    click.echo(_wrapped(text) if sys.stderr.isatty() else text, err=True)


def _wrapped(text: str, width: int = 0) -> str:
    """`text` in lines of `width`, by default the terminal's; longer words, and each line's indent, stay whole."""
    width = width or shutil.get_terminal_size().columns
    lines = text.split("\n")
    return "\n".join(textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in lines)


def say(text: str, *, line: bool = True) -> None:
    """Print text: on a terminal without escape sequences, lines wrapped at words; unchanged into a pipe or a file."""
    if sys.stdout.isatty():
        text = _wrapped(printable(text)) if line else printable(text)
    click.echo(text, nl=line)


def say_json(value: object) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))


def command(*, epilog: str, leaves: bool = False) -> Callable[[Callable[..., None]], click.Command]:
    """A vtx command: examples in `epilog`, `--version`, errors as `Command` ends them; `leaves` as in `Program`."""

    def make(function: Callable[..., None]) -> click.Command:
        version = click.version_option(package_name="vtx-edge", message="%(prog)s %(version)s")
        settings = {"help_option_names": ["-h", "--help"]}
        wrapped = click.command(cls=Command, context_settings=settings, epilog=epilog)(version(function))
        wrapped.leaves = leaves
        return wrapped

    return make


@contextmanager
def bar(in_bytes: Collection[str] = ()) -> Iterator[Progress]:
    """Progress bars on stderr, one a phase: amount, elapsed time, time left; `in_bytes` names phases of bytes.

    Without a terminal a line every `LINE_EVERY` seconds.
    """
    from rich import progress as rich
    from rich.console import Console

    tasks: dict[str, rich.TaskID] = {}
    columns = (
        rich.TextColumn("{task.description:>10}"),
        rich.BarColumn(24),
        rich.TaskProgressColumn(),
        rich.TextColumn("{task.fields[amount]}"),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    ended = threading.Event()
    latest = "starting"

    def lines() -> None:
        while not ended.wait(LINE_EVERY):
            note(f"{latest}; {duration(time.monotonic() - STARTED)} so far")

    if not console.is_terminal:
        threading.Thread(target=lines, daemon=True).start()
    with rich.Progress(*columns, console=console) as progress:

        def report(phase: str, done: int, total: int) -> None:
            nonlocal latest
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, amount="")
            amount = f"{size(done)} of {size(total)}" if phase in in_bytes else f"{done} of {total}"
            progress.update(tasks[phase], completed=done, total=total, amount=amount)
            latest = f"{phase}: {amount}"

        try:
            yield report
        finally:
            ended.set()


@dataclass(frozen=True, slots=True)
class WideTable:
    """A table of figures in a report; its first column names the rows."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, figures: bool = False) -> None:
    """Print a table; cells wrap if the terminal, or a file's 80 columns, are too narrow; `figures` do not."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(heads))
    for number, head in enumerate(heads):
        table.add_column(head, no_wrap=figures and number > 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console = Console()
    if title:
        console.print(Text(printable(title), style="bold"))  # the table's own title would wrap at the table's width
    console.print(table)


def _fitting(rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """The columns of each table of at most `width`, all with the first, which counts as a third at most."""
    widths = [max(len(row[column]) for row in rows) + COLUMN_GAP for column in range(len(rows[0]))]
    if sum(widths) <= width:
        return [list(range(len(widths)))]
    first = min(widths[0], width // 3)
    tables = [[0]]
    total = first
    for column, column_width in enumerate(widths[1:], 1):
        if total + column_width > width and len(tables[-1]) > 1:
            tables.append([0])
            total = first
        tables[-1].append(column)
        total += column_width
    return tables


def say_report(parts: Sequence[str | WideTable]) -> None:
    """Print paragraphs, wrapped to the terminal's width, and tables, with empty lines between."""
    from rich.console import Console

    width = Console().width
    for number, part in enumerate(parts):
        if number:
            click.echo()
        if isinstance(part, WideTable):
            for index, columns in enumerate(_fitting([part.heads, *part.rows], width)):
                heads, *rows = [[row[column] for column in columns] for row in (part.heads, *part.rows)]
                table(part.title if index == 0 else "", heads, rows, figures=True)
            continue
        for line in part.splitlines():
            say(_wrapped(line, width))


def end_on_sigterm() -> None:
    """Let a SIGTERM end the command by an exception, so that unfinished output is removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
