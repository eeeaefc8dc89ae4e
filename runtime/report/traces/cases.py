"""The cases of a bundle: every way to choose tokens that it offers, each with the same questions in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from PIL import Image, ImageOps

from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.policies.spec import parse, to_spec
from vtx.runtime.prompt.messages import Message, Part
from vtx.runtime.report.golden import golden_image

RESTED = "20%"  # of the image tokens stay where a case has a rest
TEXT_TOKENS = 96  # left free next to the images of a prompt, for its text and the answer


@dataclass(frozen=True, slots=True)
class TraceCase:
    """A policy: `k`, `reduce` and `rest` as in `vtx-run`."""

    k: str
    reduce: str
    rest: str | None = None


@dataclass(frozen=True, slots=True)
class TraceQuestion:
    """One question of a case: its messages, the images in them by number, and whether it continues the one before.

    `replaces`: its images are those of a conversation that replaced the ones before.
    """

    name: str
    messages: tuple[Message, ...]
    images: tuple[int, ...] = (0,)
    continues: bool = False
    replaces: bool = False


def images() -> tuple[Image.Image, ...]:
    """Fixed pictures: that of the golden vectors, its negative, turned, and the first with a mark in a corner."""
    first = golden_image()
    marked = first.copy()
    marked.paste((255, 0, 0), (first.width - 12, first.height - 12, first.width - 4, first.height - 4))
    return first, ImageOps.invert(first).rotate(90, expand=True), marked


def cases(manifest: Manifest) -> Iterator[TraceCase]:
    """No withdrawal, each K and the gates, each with no reduction, each one exported for, and each part of those.

    Then the first K at which a rest can stay, with one.
    """
    ks = ["none", *map(str, manifest.variants), *(["auto"] if manifest.gates else [])]
    composed = [parse(spec) for spec in manifest.reductions]
    parts = [(part,) for reductions in composed for part in reductions]
    for k, spec in product(ks, dict.fromkeys(map(to_spec, [(), *composed, *parts]))):
        yield TraceCase(k, spec)
    scored = [stage.last + 1 for stage in manifest.stages if stage.query and stage.last + 1 in manifest.variants]
    if scored:
        yield TraceCase(str(scored[0]), "none", RESTED)


def questions(manifest: Manifest) -> Iterator[TraceQuestion]:
    """The questions of one conversation, in an order that reuses, rebuilds and replaces caches."""
    yield TraceQuestion("first", (_user("What is in the picture?", 1),))
    yield TraceQuestion("second", (_user("Which colors can you see?", 1),))
    opening = _user("Is there a pattern?", 1)
    yield TraceQuestion("chat, first turn", (opening,))
    answer: Message = {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}
    if manifest.model.two_way != "prompt":  # a prompt that sees itself both ways has one turn
        yield TraceQuestion("chat, second turn", (opening, answer, _user("Where is it?", 0)), continues=True)
    yield TraceQuestion("third", (_user("What is in the picture?", 1),))
    yield TraceQuestion("replaced image", (_user("What is in the picture?", 1),), (2,), replaces=True)
    yield TraceQuestion("another image", (_user("What is in the picture?", 1),), (1,))
    if 2 * manifest.layout.max_tokens + TEXT_TOKENS <= manifest.max_context:
        yield TraceQuestion("two images", (_user("Are they alike?", 2),), (0, 1))
        yield TraceQuestion("replaced second image", (_user("Are they alike?", 2),), (0, 2), replaces=True)
    yield TraceQuestion("text", (_user("What can you do?", 0),), ())


def _user(text: str, count: int) -> Message:
    pictures: list[Part] = [{"type": "image"} for _ in range(count)]
    return {"role": "user", "content": [*pictures, {"type": "text", "text": text}]}
