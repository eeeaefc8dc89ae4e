"""What all commands share: how errors end, notes on stderr, tables on stdout, progress bars."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from vtx.runtime.errors import VtxError, printable

INTERRUPTED = 130


class Command(click.Command):
    """A click command whose VtxErrors are one line on stderr and exit code 1, and Ctrl-C is 130."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except VtxError as e:
            _fail(ctx, " ".join(str(e).split()), 1)
        except KeyboardInterrupt:
            _fail(ctx, "interrupted", INTERRUPTED)
        except MemoryError:
            _fail(ctx, "out of memory; use a smaller precision, a smaller --max-context, or another machine", 1)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write_text(line)


def _fail(ctx: click.Context, message: str, code: int) -> None:
    click.echo(f"{ctx.info_name}: {printable(message)}", err=True)
    ctx.exit(code)


def note(message: str) -> None:
    click.echo(printable(message), err=True)


def say(text: str, *, line: bool = True) -> None:
    """Print text that names or models chose: a terminal gets it without escape sequences, a pipe or a file as it is."""
    click.echo(printable(text) if sys.stdout.isatty() else text, nl=line)


command = functools.partial(click.command, cls=Command, context_settings={"help_option_names": ["-h", "--help"]})


require_signature_option = click.option(
    "--require-signature", type=click.Path(path_type=Path), metavar="PUBKEY",
    help="Use the bundle only if the private half of this Ed25519 key (PEM) signed it; every file is hashed first.",
)  # fmt: skip


@contextmanager
def bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr with the time that is left, one task a phase."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:>10}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def report(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=total)
            progress.update(tasks[phase], completed=done)

        yield report


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*heads, title=Text(printable(title)), title_justify="left", box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console().print(table)


def end_on_sigterm() -> None:
    """Let a SIGTERM end the command as an exception, so that what it was building is removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
