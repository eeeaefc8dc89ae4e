"""Drawn scenes of coloured shapes on a 3x3 grid, for the demo model, and for vtx-calibrate without data."""

from __future__ import annotations

import io
import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

GRID = 3
COLORS = {
    "red": (214, 40, 40),
    "green": (42, 157, 63),
    "blue": (36, 84, 214),
    "yellow": (244, 205, 35),
    "purple": (142, 54, 176),
    "orange": (245, 128, 20),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
PLACES = (
    "top left", "top", "top right",
    "left", "middle", "right",
    "bottom left", "bottom", "bottom right",
)  # fmt: skip
MAX_OBJECTS = 6


@dataclass(frozen=True, slots=True)
class Thing:
    """One shape, with its position and size as shares of the picture's side."""

    color: str
    shape: str
    cell: int
    x: float
    y: float
    radius: float

    @property
    def name(self) -> str:
        return f"{self.color} {self.shape}"


@dataclass(frozen=True, slots=True)
class Scene:
    things: tuple[Thing, ...]
    background: tuple[int, int, int]


def random_scene(rng: random.Random, objects: int | None = None) -> Scene:
    """A scene of `objects` shapes (1 to 6 when not given), one in a cell."""
    count = objects or rng.randint(1, MAX_OBJECTS)
    things = []
    for cell in rng.sample(range(GRID * GRID), count):
        radius = rng.uniform(0.095, 0.145)
        slack = 0.5 / GRID - radius - 0.005
        x = (cell % GRID + 0.5) / GRID + rng.uniform(-slack, slack)
        y = (cell // GRID + 0.5) / GRID + rng.uniform(-slack, slack)
        things.append(Thing(rng.choice(list(COLORS)), rng.choice(SHAPES), cell, x, y, radius))
    shade = rng.randint(222, 255)
    background = tuple(min(255, shade + rng.randint(-8, 8)) for _ in range(3))
    return Scene(tuple(things), background)  # type: ignore[arg-type]


def _outline(shape: str, x: float, y: float, r: float, turn: float) -> list[tuple[float, float]]:
    """Corner points of a shape of radius `r` round (x, y)."""

    def ring(angles: list[float], radii: list[float]) -> list[tuple[float, float]]:
        return [(x + q * math.sin(a + turn), y - q * math.cos(a + turn)) for a, q in zip(angles, radii, strict=True)]

    if shape == "square":
        return ring([math.pi / 4 + i * math.pi / 2 for i in range(4)], [r * 1.2] * 4)
    if shape == "triangle":
        return [(px, py + r * 0.2) for px, py in ring([i * math.tau / 3 for i in range(3)], [r * 1.15] * 3)]
    if shape == "star":
        return ring([i * math.pi / 5 for i in range(10)], [r * 1.1, r * 0.45] * 5)
    arm = r * 0.36
    corners = [
        (-arm, -r),
        (arm, -r),
        (arm, -arm),
        (r, -arm),
        (r, arm),
        (arm, arm),
        (arm, r),
        (-arm, r),
        (-arm, arm),
        (-r, arm),
        (-r, -arm),
        (-arm, -arm),
    ]
    c = math.cos(turn)
    s = math.sin(turn)
    return [(x + px * c - py * s, y + px * s + py * c) for px, py in corners]


def draw(scene: Scene, size: int, rng: random.Random | None = None) -> Image.Image:
    """The scene as an RGB picture of `size` x `size` pixels; `rng` varies shades and angles a little."""
    rng = rng or random.Random(0)
    image = Image.new("RGB", (size, size), scene.background)
    pen = ImageDraw.Draw(image)
    for thing in scene.things:
        fill = tuple(max(0, min(255, v + rng.randint(-12, 12))) for v in COLORS[thing.color])
        x = thing.x * size
        y = thing.y * size
        r = thing.radius * size
        if thing.shape == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)
        else:
            pen.polygon(_outline(thing.shape, x, y, r, rng.uniform(-0.12, 0.12)), fill=fill)
    return image


def photograph(scene: Scene, rng: random.Random) -> Image.Image:
    """The scene at a random size, sometimes through JPEG, as a user's file would hold it."""
    image = draw(scene, rng.choice((72, 108, 144, 144, 216, 288)), rng)
    if rng.random() < 0.2:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=rng.randint(70, 95))
        image = Image.open(buffer).convert("RGB")
    return image
