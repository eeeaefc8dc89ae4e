"""Random questions under PyramidDrop: of 8 layers, of images in one piece, in tiles, and at native resolution."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from PIL import Image

from tests.support.families.internvl import INTERNVL
from tests.support.families.llava_next import LLAVA_NEXT
from tests.support.families.qwen import QWEN2
from tests.support.statement import Method
from tests.support.tiny import Tiny, random_image

EXPORTED = "pyramiddrop:layers=1/2/3/4/5/6"
LAYOUTS = tuple(
    replace(tiny, layers=8)
    for tiny in (Tiny(image=126, context=512), LLAVA_NEXT, INTERNVL, replace(QWEN2, context=512))
)
CASES = range(40)
WORDS = ("what", "is", "the", "colour", "of", "this", "red", "shape", "how", "many", "left")


@dataclass(frozen=True)
class Drawn:
    tiny: Tiny
    method: Method
    images: list[Image.Image]
    question: str


def drawn(case: int) -> Drawn:
    """One of `CASES`; its layout is `case` modulo their number."""
    rng, tiny = random.Random(case), LAYOUTS[case % len(LAYOUTS)]
    layers = tuple(sorted(rng.sample(range(1, 7), rng.randint(1, 4))))
    ratio = rng.choice((0.0, 0.3, 0.5, 0.5, 0.7, 0.9))
    positions = "keep" if tiny.family.startswith("qwen") or rng.random() < 0.4 else "renumber"
    images = [
        random_image(rng.randint(0, 99), (rng.randint(50, 130), rng.randint(50, 130)))
        for _ in "ab"[: rng.randint(1, 2)]
    ]
    question = " ".join(rng.choices(WORDS, k=rng.randint(1, 12))) + "?"
    return Drawn(tiny, Method(pyramiddrop=(ratio, layers), positions=positions), images, question)  # type: ignore[arg-type]
