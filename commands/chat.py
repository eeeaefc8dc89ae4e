"""vtx-chat: questions about an image at a prompt, turn by turn. It parses, calls and prints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vtx.commands.export import find_bundle
from vtx.commands.shared.options import (
    bundle_option,
    compute_option,
    device_option,
    fit_option,
    max_pixels_option,
    max_tiles_option,
    threads_option,
)
from vtx.runtime.errors import VtxError
from vtx.runtime.terminal.console import command, note, require_signature_option, say
from vtx.runtime.terminal.depth import Depth, DepthType
from vtx.runtime.terminal.last import home
from vtx.tools.common.demo import about

if TYPE_CHECKING:
    from vtx.runtime.api.answer import Stats
    from vtx.runtime.api.chat import Chat
    from vtx.runtime.api.model import Model

HELP = """/k N|none|auto   withdraw the image at another K, from the next question on
/reduce SPEC     drop image tokens, as vtx-run --reduce does; none for none
/image FILE      talk about another image or video
/new             forget the turns so far
/stats           what the last answer cost
/help, /quit     this list; the end (Ctrl-D as well)"""
HISTORY = 1000  # lines


@command(epilog="vtx-chat photo.jpg\nvtx-chat photo.jpg --k 8\nvtx-chat --bundle llava-7b photo.jpg --device cpu")
@click.argument("image", required=False)
@bundle_option
@click.option(
    "--k", type=DepthType(default=True), default="default", metavar="N|auto|none", help="[default: the bundle's]"
)
@click.option("--reduce", default="default", metavar="SPEC|none", help="[default: the bundle's first]")
@click.option("--max-new-tokens", type=int, default=256, show_default=True)
@device_option
@compute_option
@threads_option
@fit_option
@max_tiles_option
@max_pixels_option
@require_signature_option
def chat(
    image: str | None, bundle: str | None, k: Depth, reduce: str, max_new_tokens: int, device: str,
    compute: str | None, threads: int | None, fit: str | None, max_tiles: int | None, max_pixels: int | None,
    require_signature: Path | None,
) -> None:  # fmt: skip
    """Talk about an image at a prompt; each turn builds on those before it. /help lists what can be changed."""
    from vtx.runtime.api.load import load
    from vtx.runtime.api.options import Options
    from vtx.runtime.policies.spec import parse
    from vtx.runtime.vision.image import load_image
    from vtx.runtime.vision.video import as_video

    Options(max_new_tokens)  # a number that is none is told before a bundle is loaded, and so is a wrong name
    if reduce != "default":
        parse(reduce)
    if image and not as_video(image):
        load_image(image)
    model = load(
        find_bundle(bundle, (k,)),
        device=device,
        compute=compute,
        threads=threads,
        require_signature=require_signature,
        fit=fit,
        max_tiles=max_tiles,
        max_pixels=max_pixels,
    )
    talk = _Talk(model, image, k, reduce, max_new_tokens)
    talk.begin()
    note(f"{model.manifest.model.name} on {model.backend.device}; /help lists commands, Ctrl-D ends")
    for line in about(model.manifest.model.name):
        note(line)
    with _history():
        for line in _lines():
            try:
                if line.startswith("/"):
                    if talk.change(*line[1:].split(maxsplit=1)):
                        return
                else:
                    talk.ask(line)
            except VtxError as e:
                note(" ".join(str(e).split()))


@dataclass(slots=True)
class _Talk:
    """One conversation, its settings and the cost of its last answer."""

    model: Model
    image: str | None
    k: Depth
    reduce: str
    max_new_tokens: int
    stats: Stats | None = None
    _chat: Chat = field(init=False)

    def begin(self) -> None:
        """Open the image and forget the turns."""
        self._chat = self.model.open([self.image] if self.image else []).chat(self.k, reduce=self.reduce)

    def ask(self, question: str) -> None:
        """Print the answer to the next turn as it comes; Ctrl-C ends it, and the turn does not count."""
        stream = self._chat.stream(question, max_new_tokens=self.max_new_tokens)
        try:
            for piece in stream:
                say(piece, line=False)
                sys.stdout.flush()
            self.stats = stream.answer.stats
        except KeyboardInterrupt:
            stream.close()
            note("\nstopped; this turn does not count")
        else:
            click.echo()

    def change(self, name: str = "help", value: str = "") -> bool:
        """Do what `/name value` says; whether that is to end."""
        changes: dict[str, Callable[[str], None]] = {
            "k": self._set_k, "reduce": self._set_reduce, "image": self._set_image, "new": lambda _: self.begin(),
            "stats": lambda _: note(str(self.stats or "no question was answered yet")), "help": lambda _: note(HELP),
        }  # fmt: skip
        if name not in (*changes, "quit"):
            note(f"there is no /{name[:40]}\n{HELP}")
        elif name != "quit":
            changes[name](value.strip())
        return name == "quit"

    def _set_k(self, value: str) -> None:
        try:
            k = DepthType(default=True).convert(value, None, None)
        except click.BadParameter as e:
            note(str(e))
            return
        self._begin_with(k=k)

    def _set_reduce(self, value: str) -> None:
        self._begin_with(reduce=value)

    def _set_image(self, value: str) -> None:
        self._begin_with(image=value or None)

    def _begin_with(self, **changes: int | str | None) -> None:
        """Begin anew with other settings; where they are refused, the conversation goes on as it was."""
        before = {name: getattr(self, name) for name in changes}
        try:
            for name, value in changes.items():
                setattr(self, name, value)
            self.begin()
        except VtxError:
            for name, value in before.items():
                setattr(self, name, value)
            raise


def _lines() -> Iterator[str]:
    """What is typed, line by line, without empty ones, to the end of the input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            note("")
            continue
        if line:
            yield line


@contextmanager
def _history() -> Iterator[None]:
    """Lines typed earlier come back with the arrow keys, where this system has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    path: Path = home("XDG_STATE_HOME", ".local/state") / "vtx" / "chat-history"
    if sys.stdin.isatty():
        with suppress(OSError):
            readline.read_history_file(path)
    try:
        yield
    finally:
        if sys.stdin.isatty():
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                readline.set_history_length(HISTORY)
                readline.write_history_file(path)
