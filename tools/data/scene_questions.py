"""Questions about drawn scenes with their answers: in many wordings, as people type them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vtx.tools.data.scenes import COLORS, GRID, PLACES, SHAPES, Scene, Thing

# Wordings: {n} a noun, {ns} its plural, {a} its article, {c} a colour, {s} a shape, {p} a place.
HOW_MANY = (
    "how many {n} are there", "how many {n} do you see", "how many {n} are in the picture", "count the {n}",
    "how many {n} are in the image", "how many {n}", "how many {n} can you see", "how many {n} are in this picture",
    "how many {n} are in this image", "how many {n} does the picture have", "how many {n} does the image show",
    "what is the number of {n}", "number of {n}", "how many {n} are there in the picture",
)  # fmt: skip
WHICH_COLOR = (
    "what color is the {s}", "what colour is the {s}", "which color is the {s}", "which colour is the {s}",
    "which color does the {s} have", "what is the color of the {s}", "what is the colour of the {s}",
    "what color does the {s} have", "tell me the color of the {s}", "what's the color of the {s}",
    "what's the colour of the {s}", "what color is the {s} in the picture", "the {s} is what color",
)  # fmt: skip
WHICH_SHAPE = (
    "what shape is {c}", "which shape is {c}", "what is {c}", "what is the {c} {n}", "what shape is the {c} {n}",
    "which shape is the {c} {n}", "what is the shape of the {c} {n}", "what kind of shape is {c}",
    "tell me the shape of the {c} {n}", "what's the {c} {n}", "which {n} is {c}", "what {n} is {c}",
    "what shape does the {c} {n} have",
)  # fmt: skip
IS_THERE = (
    "is there {a} {n}", "is there {a} {n} in the picture", "is there {a} {n} in the image", "do you see {a} {n}",
    "can you see {a} {n}", "does the picture have {a} {n}", "does the image show {a} {n}", "is there any {n}",
    "are there any {ns}", "are there {ns} in the picture", "do you see any {ns}", "can you see any {ns}",
    "does the image contain {a} {n}", "is there {a} {n} in this picture", "do you see {a} {n} in the image",
)  # fmt: skip
HAS_COLOR = ("is the {s} {c}", "is the color of the {s} {c}", "is the {s} in the picture {c}")
WHERE = (
    "where is the {n}", "where do you see the {n}", "in which place is the {n}", "where in the picture is the {n}",
    "where in the image is the {n}", "where can you see the {n}", "where's the {n}", "tell me where the {n} is",
    "what is the position of the {n}", "where is the {n} in the picture", "where is the {n} located",
    "in what position is the {n}",
)  # fmt: skip
WHAT_IS_AT = (
    "what is in the {p}", "what is at the {p}", "what do you see in the {p}", "what is there in the {p}",
    "what can you see at the {p}", "what is on the {p}", "what's in the {p}", "what's at the {p}",
    "what do you see at the {p}", "what object is at the {p}", "what is in the {p} of the picture",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SceneQuestion:
    """One question about a scene: `kind` is one of `KINDS`."""

    kind: str
    question: str
    answer: str


def _unique(scene: Scene, key: Callable[[Thing], str]) -> list[Thing]:
    counts = Counter(map(key, scene.things))
    return [t for t in scene.things if counts[key(t)] == 1]


def _ask(rng: random.Random, wordings: tuple[str, ...], **slots: str) -> str:
    return rng.choice(wordings).format(**slots)


def _thing(rng: random.Random) -> str:
    return rng.choice(("shape", "thing", "object"))


def _how_many(rng: random.Random, noun: str, number: int) -> tuple[str, str]:
    return _ask(rng, HOW_MANY, n=noun), str(number)


def _present_or_any(rng: random.Random, present: list[str], anything: Sequence[str]) -> str:
    return rng.choice(present) if rng.random() < 0.75 else rng.choice(anything)


def _plural(shape: str) -> str:
    return shape + ("es" if shape.endswith("cross") else "s")


def _asked(kind: str, scene: Scene, rng: random.Random) -> tuple[str, str] | None:
    """A question of that kind and its answer; None if the scene has no clear one."""
    by_shape = _unique(scene, lambda t: t.shape)
    by_color = _unique(scene, lambda t: t.color)
    match kind:
        case "count":
            return _how_many(rng, rng.choice(("shapes", "shapes", "things", "objects")), len(scene.things))
        case "count of a colour":
            color = _present_or_any(rng, [t.color for t in scene.things], list(COLORS))
            return _how_many(rng, f"{color} {_thing(rng)}s", sum(t.color == color for t in scene.things))
        case "count of a shape":
            shape = _present_or_any(rng, [t.shape for t in scene.things], SHAPES)
            return _how_many(rng, _plural(shape), sum(t.shape == shape for t in scene.things))
        case "colour of a shape" if by_shape:
            thing = rng.choice(by_shape)
            return _ask(rng, WHICH_COLOR, s=thing.shape), thing.color
        case "shape of a colour" if by_color:
            thing = rng.choice(by_color)
            return _ask(rng, WHICH_SHAPE, c=thing.color, n=_thing(rng)), thing.shape
        case "place":
            return _place(scene, rng)
        case "what is at a place":
            return _what_is_at(scene, rng)
        case "yes or no":
            return _exists(scene, rng)
    return None


def _place(scene: Scene, rng: random.Random) -> tuple[str, str] | None:
    options = [(t, t.shape) for t in _unique(scene, lambda t: t.shape)]
    options += [(t, f"{t.color} {_thing(rng)}") for t in _unique(scene, lambda t: t.color)]
    options += [(t, t.name) for t in _unique(scene, lambda t: t.name)]
    if not options:
        return None
    thing, name = rng.choice(options)
    return _ask(rng, WHERE, n=name), PLACES[thing.cell]


def _what_is_at(scene: Scene, rng: random.Random) -> tuple[str, str]:
    names = {thing.cell: thing.name for thing in scene.things}
    cell = rng.choice(sorted(names)) if rng.random() < 0.8 else rng.randrange(GRID * GRID)
    corner = " corner" if " " in PLACES[cell] and rng.random() < 0.25 else ""
    return _ask(rng, WHAT_IS_AT, p=PLACES[cell] + corner), names.get(cell, "nothing")


def _exists(scene: Scene, rng: random.Random) -> tuple[str, str]:
    chance = rng.random()
    if chance < 0.15 and (unique := _unique(scene, lambda t: t.shape)):
        return _has_color(rng.choice(unique), rng)
    if chance < 0.4:  # about a shape of any colour, or a colour of any shape
        by_shape = rng.random() < 0.5
        present = {t.shape if by_shape else t.color for t in scene.things}
        absent = [name for name in (SHAPES if by_shape else COLORS) if name not in present]
        name = rng.choice(sorted(present) if rng.random() < 0.5 or not absent else absent)
        noun = name if by_shape else f"{name} {_thing(rng)}"
    else:
        present = {t.name for t in scene.things}
        noun = name = rng.choice(sorted(present)) if rng.random() < 0.5 else _absent(scene, rng, present)
    article = "an" if noun.startswith("orange") else "a"
    return _ask(rng, IS_THERE, a=article, n=noun, ns=_plural(noun)), "yes" if name in present else "no"


def _has_color(thing: Thing, rng: random.Random) -> tuple[str, str]:
    color = thing.color if rng.random() < 0.5 else rng.choice([c for c in COLORS if c != thing.color])
    return _ask(rng, HAS_COLOR, s=thing.shape, c=color), "yes" if color == thing.color else "no"


def _absent(scene: Scene, rng: random.Random, names: set[str]) -> str:
    """A colour and shape that is absent; mostly a near miss, with one of the two present."""
    mixed = rng.random()
    thing = rng.choice(scene.things)
    colors = [thing.color] if mixed < 0.3 else list(COLORS)
    shapes = [thing.shape] if 0.3 <= mixed < 0.6 else list(SHAPES)
    absent = [f"{c} {s}" for c in colors for s in shapes if f"{c} {s}" not in names]
    return rng.choice(absent or [f"{c} {s}" for c in COLORS for s in SHAPES if f"{c} {s}" not in names])


KINDS = (
    "count",
    "count of a colour",
    "count of a shape",
    "colour of a shape",
    "shape of a colour",
    "place",
    "what is at a place",
    "yes or no",
)


def ask(scene: Scene, kind: str, rng: random.Random) -> SceneQuestion | None:
    """A question of `kind` about `scene`, or None if the scene has no clear answer to one."""
    if (pair := _asked(kind, scene, rng)) is None:
        return None
    question, answer = pair
    case = rng.random()  # capitals and the question mark vary, as people type
    if case < 0.45:
        question = question[0].upper() + question[1:]
    elif case < 0.55:
        question = question.upper()
    return SceneQuestion(kind, question + ("?" if rng.random() < 0.7 else ""), answer)


def ask_some(
    scene: Scene, count: int, rng: random.Random, weights: dict[str, float] | None = None
) -> list[SceneQuestion]:
    """`count` questions of kinds drawn by `weights` (even when not given)."""
    kinds = list(KINDS)
    items = list[SceneQuestion]()
    odds = [weights[k] if weights else 1.0 for k in kinds]
    while len(items) < count:
        if item := ask(scene, rng.choices(kinds, odds)[0], rng):
            items.append(item)
    return items
