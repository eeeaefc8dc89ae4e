"""vtx-chat: questions about an image at a prompt, turn by turn. It parses, calls and prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vtx.commands.shared.answers import print_answer
from vtx.commands.shared.bundles import find_bundle
from vtx.commands.shared.options import Depth, DepthType, options
from vtx.runtime.errors import VtxError
from vtx.runtime.process import home
from vtx.runtime.terminal.console import command, note
from vtx.tools.common.loading import Loading, about_model

if TYPE_CHECKING:
    from vtx.runtime.api.answer import Stats
    from vtx.runtime.api.conversation import Chat
    from vtx.runtime.api.model import Model
    from vtx.runtime.api.options import Options
    from vtx.runtime.prompt.guiding import Guide

HELP = """/k N|none|auto   withdraw the image at another K, from the next question on
/rest N%|N|none  keep image tokens from K on that each question attends to; none for none
/reduce SPEC     drop image tokens, as vtx-run --reduce does; none for none
/thinking on|off  think before each answer, or do not; nothing for as the model does
/image FILE      talk about another image or video
/new             forget the turns so far
/stats           what the last answer cost
/help, /quit     this list; the end (Ctrl-D as well)"""
HISTORY = 1000  # lines
_THINKING = {"on": True, "off": False, "": None}


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """The options of vtx-chat."""

    image: str | None
    bundle: str | None
    hub_model: str | None
    precision: str | None
    k: Depth
    rest: str | None
    reduce: str
    image_tokens: int | None
    thinking: bool | None
    max_thinking_tokens: int | None
    max_new_tokens: int
    guide: Guide | None
    loading: Loading


@command(epilog="vtx-chat photo.jpg\nvtx-chat photo.jpg --k 8\nvtx-chat --bundle llava-7b photo.jpg --device cpu")
@click.argument("image", required=False)
@options(
    "bundle",
    "hub_model",
    "hub_precision",
    "k",
    "rest",
    "reduce",
    "image_tokens",
    "thinking",
    "max_thinking_tokens",
    "max_new_tokens",
    "guide",
    "device",
    "compute",
    "threads",
    "fit",
    "max_tiles",
    "max_pixels",
    "require_signature",
    record=ChatSettings,
)
def chat(settings: ChatSettings) -> None:
    """Chat about an image; each turn builds on the earlier ones. /help lists the commands."""
    from vtx.runtime.api.options import Options
    from vtx.runtime.policies.spec import parse
    from vtx.runtime.vision.image import load_image
    from vtx.runtime.vision.video import as_video

    # A wrong number or name is reported before a bundle is loaded.
    options = Options(
        settings.max_new_tokens,
        guide=settings.guide,
        rest=settings.rest,
        thinking=settings.thinking,
        max_thinking_tokens=settings.max_thinking_tokens,
    )
    if settings.reduce != "default":
        parse(settings.reduce)
    if settings.image and not as_video(settings.image):
        load_image(settings.image)
    model = settings.loading.load(find_bundle(settings.bundle, (settings.k,), settings.hub_model, settings.precision))
    talk = _Talk(model, settings.image, settings.k, settings.reduce, options, settings.image_tokens)
    talk.begin()
    note(f"{model.manifest.model.name} on {model.backend.device}; /help lists commands, Ctrl-D ends")
    if model.loaded.card:
        note(model.loaded.card.in_words)
    for line in about_model(model.manifest.model.name):
        note(line)
    with _history():
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                note("")
                continue
            try:
                if line.startswith("/"):
                    if talk.change(*line[1:].split(maxsplit=1)):
                        return
                elif line:
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
    options: Options
    image_tokens: int | None
    stats: Stats | None = None
    _chat: Chat = field(init=False)

    def begin(self) -> None:
        """Open the image and forget the turns. Raises VtxError."""
        from vtx.runtime.prompt.messages import with_tools

        self.model.loaded.prompts.check_thinking(with_tools([], [], self.options.thinking), self.options)
        images = [self.image] if self.image else []
        conversation = self.model.open(images, image_tokens=self.image_tokens if images else None)
        self._chat = conversation.chat(self.k, reduce=self.reduce)

    def ask(self, question: str) -> None:
        """Print the answer to the next turn as it comes; Ctrl-C ends it, and the turn does not count."""
        stream = self._chat.stream(question, self.options)
        try:
            print_answer(stream)
        except KeyboardInterrupt:
            stream.close()
            note("\nstopped; this turn does not count")
        else:
            self.stats = stream.answer.stats
            for line in stream.answer.warnings:
                note(line)

    def change(self, name: str = "help", value: str = "") -> bool:
        """Do what `/name value` says; return True if that is to end."""
        value = value.strip()
        if name == "quit":
            return True
        if name == "k":
            try:
                self._begin_with(k=DepthType(asking=True).convert(value, None, None))
            except click.BadParameter as e:
                note(str(e))
        elif name == "rest":
            self._begin_with(options=replace(self.options, rest=None if value == "none" else value))
        elif name == "reduce":
            self._begin_with(reduce=value)
        elif name == "thinking":
            if value in _THINKING:
                self._begin_with(options=replace(self.options, thinking=_THINKING[value]))
            else:
                note(f"/thinking is followed by on, off or nothing, not {value[:40]!r}")
        elif name == "image":
            self._begin_with(image=value or None)
        elif name == "new":
            self.begin()
        elif name == "stats":
            note(str(self.stats or "no question was answered yet"))
        else:
            note(HELP if name == "help" else f"there is no /{name[:40]}\n{HELP}")
        return False

    def _begin_with(self, **changes: int | str | Options | None) -> None:
        """Begin again with other settings; if they are refused, the conversation continues as it was."""
        before = {name: getattr(self, name) for name in changes}
        try:
            for name, value in changes.items():
                setattr(self, name, value)
            self.begin()
        except VtxError:
            for name, value in before.items():
                setattr(self, name, value)
            raise


@contextmanager
def _history() -> Iterator[None]:
    """Keep the lines that are typed, for the arrow keys, if this system has readline."""
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
