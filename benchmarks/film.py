"""A film of drawn shapes that appear, move and vanish, with what is true of each of its frames."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from PIL import Image

from vtx.tools.data.scenes import COLORS, GRID, MAX_OBJECTS, SHAPES, Scene, Thing, draw

SIDE = 144
RADIUS = 0.12
WANTED = ("red", "circle")
QUESTIONS = {"count": "How many shapes are there?", "red": "Is there a red circle?"}


class Steady(random.Random):
    """Draws every shape alike, so that what does not move does not change."""

    def randint(self, *_: int) -> int:
        return 0

    def uniform(self, *_: float) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Shot:
    """A frame: its number, its time in the film, its picture, and the right answers by question."""

    number: int
    seconds: float
    image: Image.Image
    truth: dict[str, str]


def film(seconds: float, rate: float = 30.0, seed: int = 0, noise: float = 0.0) -> Iterator[Shot]:
    """Every 2 to 6 s a shape appears, vanishes, or moves to another place within a second.

    `noise`: the standard deviation of the sensor's, of 255.
    """
    rng, sensor = random.Random(seed), np.random.default_rng(seed)
    things: dict[int, Thing] = {}
    for _ in range(3):
        add(things, rng)
    moving: tuple[int, int, float] | None = None  # from, to, since
    following, still = rng.uniform(2, 6), None
    for number in range(int(seconds * rate)):
        at = number / rate
        if moving is not None and at >= moving[2] + 1:
            things[moving[1]] = placed(things.pop(moving[0]), moving[1])
            moving, still = None, None
        if moving is None and at >= following:
            free = [cell for cell in range(GRID**2) if cell not in things]
            kind = rng.choice(("appear", "vanish", "move"))
            if kind == "appear" and len(things) < MAX_OBJECTS:
                add(things, rng)
            elif kind == "vanish" and len(things) > 1:
                del things[rng.choice(sorted(things))]
            elif free:
                moving = rng.choice(sorted(things)), rng.choice(free), at
            following, still = at + rng.uniform(2, 6), None
        if still is None or moving is not None:
            shown = dict(things)
            if moving is not None:
                begin, end, part = things[moving[0]], placed(things[moving[0]], moving[1]), at - moving[2]
                x, y = (a + part * (b - a) for a, b in ((begin.x, end.x), (begin.y, end.y)))
                shown[moving[0]] = replace(begin, x=x, y=y)
            still = draw(Scene(tuple(shown.values()), (240, 240, 240)), SIDE, Steady())
        image = still
        if noise:
            noisy = np.asarray(still) + sensor.normal(0, noise, (SIDE, SIDE, 3))
            image = Image.fromarray(noisy.round().clip(0, 255).astype(np.uint8))
        red = any((thing.color, thing.shape) == WANTED for thing in things.values())
        yield Shot(number, at, image, {"count": str(len(things)), "red": "yes" if red else "no"})


def add(things: dict[int, Thing], rng: random.Random) -> None:
    """Put another shape into a free place, often a red circle if there is none."""
    cell = rng.choice([cell for cell in range(GRID**2) if cell not in things])
    color, shape = rng.choice(list(COLORS)), rng.choice(SHAPES)
    there = {(thing.color, thing.shape) for thing in things.values()}
    if rng.random() < 0.4:
        color, shape = WANTED
    if (color, shape) in there:  # each once
        color, shape = rng.choice([(c, s) for c in COLORS for s in SHAPES if (c, s) not in there])
    things[cell] = placed(Thing(color, shape, cell, 0, 0, RADIUS), cell)


def placed(thing: Thing, cell: int) -> Thing:
    return replace(thing, cell=cell, x=(cell % GRID + 0.5) / GRID, y=(cell // GRID + 0.5) / GRID)


@dataclass
class Judged:
    """The answers of one way, against what is true: `found` and `missed` changes, and `false` ones.

    A change is found if, before the next one, an answer gives the new truth; its delay is in seconds of the film. A
    false one is a changed answer that was not true of its frame.
    """

    answers: int = 0
    right: int = 0
    reused: int = 0
    found: int = 0
    missed: int = 0
    false: int = 0
    delays: list[float] = field(default_factory=list)


def judge(truths: Sequence[dict[str, str]], answers: Iterable[tuple[int, str, str, bool]], rate: float) -> Judged:
    """`truths` of each frame; `answers` are frame, question, text and whether it was reused, in their order."""
    result, said = Judged(), dict[str, list[tuple[int, str]]]()
    for frame, question, text, reused in answers:
        result.answers += 1
        result.reused += reused
        right = text == truths[frame][question]
        result.right += right
        before = said.setdefault(question, [])
        if not before or before[-1][1] != text:
            result.false += bool(before) and not right
        before.append((frame, text))
    for question, given in said.items():
        starts = [n for n in range(1, len(truths)) if truths[n][question] != truths[n - 1][question]]
        for start, end in zip(starts, [*starts[1:], len(truths)], strict=False):
            new = truths[start][question]
            first = next((frame for frame, text in given if start <= frame < end and text == new), None)
            result.found += first is not None
            result.missed += first is None
            if first is not None:
                result.delays.append((first - start) / rate)
    return result
