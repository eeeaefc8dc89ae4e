"""A table with drawn shapes that two cameras see, and a hand that an instruction sends to one of them.

The table is 2 wide and 1 high; the left camera sees its left half, the right one its right half. Three shapes are on
it, of different colours and different forms. The hand is a black disc.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float32]
Pictures = NDArray[np.uint8]

COLORS = {"red": (214, 40, 40), "green": (42, 157, 63), "blue": (36, 84, 214)}
FORMS = ("circle", "triangle", "cross")
CAMERAS = {"left": (255, 255, 255), "right": (225, 220, 205)}  # and the colour of the half that each sees
SIDE = 48  # pixels of a picture
SHAPES = 3  # on a table
RADIUS = 0.13  # of a shape and of the hand
HAND = 0.05
REACHED = RADIUS  # the hand is on the shape
HORIZON = 5  # each action covers this share of what is left
GAIN = 1 / 3
CHUNKS = 3  # of actions in an episode
_CENTRES = (np.arange(SIDE, dtype=np.float32) + 0.5) / SIDE


@dataclass(frozen=True)
class Tables:
    """`places` [tables, shapes, 2], `colors` and `forms` [tables, shapes]; the first shape of each is the named one."""

    places: Numbers
    colors: NDArray[np.int64]
    forms: NDArray[np.int64]

    @property
    def targets(self) -> Numbers:
        return self.places[:, 0]

    def instruction(self, number: int) -> str:
        return instruction(self.colors[number, 0], self.forms[number, 0])


def instruction(color: int, form: int) -> str:
    return f"reach the {[*COLORS][color]} {FORMS[form]}"


def draw_tables(rng: np.random.Generator, count: int) -> Tables:
    """Random tables, each shape in a cell of its own of 4 x 2, so that none lies under another or between cameras."""
    cells = rng.random((count, 8)).argsort(1)[:, :SHAPES]
    corners = np.stack([cells % 4, cells // 4], -1) / 2 + 0.25
    places = corners + rng.uniform(-0.11, 0.11, corners.shape)
    colors, forms = (rng.random((count, len(words))).argsort(1)[:, :SHAPES] for words in (COLORS, FORMS))
    return Tables(places.astype(np.float32), colors, forms)


def draw_hands(rng: np.random.Generator, tables: Tables) -> Numbers:
    """A hand for each table: half of them anywhere, the others near a shape, as they are later in an episode."""
    count = len(tables.places)
    anywhere = rng.uniform((0, 0), (2, 1), (count, 2))
    shape = tables.places[np.arange(count), rng.integers(SHAPES, size=count)]
    near = shape + rng.normal(0, 0.15, (count, 2))
    return on_table(np.where(rng.random((count, 1)) < 0.5, anywhere, near))


def on_table(hands: NDArray[np.floating]) -> Numbers:
    return np.clip(hands, (0, 0), (2, 1)).astype(np.float32)


def _inside(form: int, x: Numbers, y: Numbers) -> Numbers:
    """How far points lie inside a shape around 0, in the table's units; negative outside."""
    x = abs(x)
    if FORMS[form] == "circle":
        return RADIUS - np.hypot(x, y)
    if FORMS[form] == "triangle":
        return RADIUS * 0.56 - np.maximum(y, 0.866 * x - 0.5 * y)
    y = abs(y)
    return np.minimum(RADIUS - np.maximum(x, y), RADIUS * 0.38 - np.minimum(x, y))


def draw_shapes(tables: Tables) -> Numbers:
    """The pictures without a hand, [tables, cameras, side, side, 3] from 0 to 255."""
    count = len(tables.places)
    grounds = np.array([*CAMERAS.values()], np.float32)
    pictures = np.tile(grounds[:, None, None], (count, 1, SIDE, SIDE, 1))
    paints = np.array([*COLORS.values()], np.float32)
    for shape in range(SHAPES):
        for form in range(len(FORMS)):
            chosen = np.flatnonzero(tables.forms[:, shape] == form)
            camera = tables.places[chosen, shape, 0].astype(int)
            place = tables.places[chosen, shape]
            x = _CENTRES[None, None, :] - (place[:, 0] - camera)[:, None, None]
            inside = _inside(form, x, _CENTRES[None, :, None] - place[:, 1, None, None])
            _paint(pictures, (chosen, camera), inside, paints[tables.colors[chosen, shape]])
    return pictures


def with_hands(pictures: Numbers, hands: Numbers) -> Pictures:
    """Pictures of `draw_shapes` with the hand of each table where a camera sees it, rounded to bytes."""
    out = pictures.copy()
    for camera in range(len(CAMERAS)):
        x = _CENTRES[None, None, :] - (hands[:, 0] - camera)[:, None, None]
        inside = HAND - np.hypot(x, _CENTRES[None, :, None] - hands[:, 1, None, None])
        seen = np.flatnonzero((inside * SIDE > -0.5).any((1, 2)))
        _paint(out, (seen, camera), inside[seen], np.zeros((len(seen), 3), np.float32))
    return out.round().astype(np.uint8)


def _paint(pictures: Numbers, which: tuple[object, object], inside: Numbers, colors: Numbers) -> None:
    """Lay colours [n, 3] over pictures, where points [n, side, side] are inside, with smooth edges."""
    cover = np.clip(inside * SIDE + 0.5, 0, 1)[..., None]
    pictures[which] = pictures[which] * (1 - cover) + colors[:, None, None] * cover


def wanted_actions(targets: Numbers, hands: Numbers) -> Numbers:
    """The displacements [hands, horizon, 2] of a driver who knows where the target is."""
    shares = GAIN * (1 - GAIN) ** np.arange(HORIZON, dtype=np.float32)
    return (targets - hands)[:, None] * shares[:, None]


def patch_labels(tables: Tables, grid: int) -> tuple[NDArray[np.int64], Numbers]:
    """What each patch shows: colour and form, 0 for none, [tables, cameras * patches, 2], and where its centre is."""
    middles = (np.arange(grid, dtype=np.float32) + 0.5) / grid
    camera, y, x = np.meshgrid(np.arange(len(CAMERAS), dtype=np.float32), middles, middles, indexing="ij")
    patches = np.stack([camera + x, y], -1).reshape(-1, 2)
    away = tables.places[:, None] - patches[:, None]  # [tables, patches, shapes, 2]
    away[
        np.broadcast_to(tables.places[:, None, :, 0].astype(int) != patches[:, None, 0].astype(int), away.shape[:3])
    ] = 9
    nearest = np.abs(away).max(-1).argmin(-1)
    centre = np.take_along_axis(away, nearest[..., None, None], 2)[:, :, 0]
    named = np.stack([np.take_along_axis(each, nearest, 1) + 1 for each in (tables.colors, tables.forms)], -1)
    shown = np.abs(centre).max(-1) < RADIUS + 0.28 / grid
    return np.where(shown[..., None], named, 0), np.where(shown[..., None], centre * grid, 0).astype(np.float32)


def ends_at(tables: Tables, hands: Numbers) -> NDArray[np.int64]:
    """The number of the shape that each hand [tables, 2] is on, 0 the named one; -1: on none."""
    away = np.hypot(*np.moveaxis(tables.places - hands[:, None], -1, 0))
    return np.where(away.min(1) <= REACHED, away.argmin(1), -1)


Act = Callable[[int, int, Pictures, str, Numbers], Numbers]  # episode, chunk, pictures, instruction, hand: actions


def drive(tables: Tables, starts: Numbers, act: Act) -> Numbers:
    """Where the hands are after an episode on each table; the pictures are drawn anew before each chunk of actions."""
    ends: list[Sequence[float]] = []
    for number, hand in enumerate(starts):
        one = Tables(*(each[number : number + 1] for each in (tables.places, tables.colors, tables.forms)))
        shapes = draw_shapes(one)
        for chunk in range(CHUNKS):
            pictures = with_hands(shapes, hand[None])[0]
            hand = on_table(hand + act(number, chunk, pictures, one.instruction(0), hand).sum(0))
        ends.append(hand)
    return np.array(ends, np.float32)
