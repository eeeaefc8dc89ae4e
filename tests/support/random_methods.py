"""Random questions under each method: of images in one piece, in tiles of two kinds, and at native resolution."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from PIL import Image

from tests.support.families.internvl import INTERNVL
from tests.support.families.llava_next import LLAVA_NEXT
from tests.support.families.qwen import QWEN2
from tests.support.statement import Method
from tests.support.tiny import Tiny, random_image

COUNT = int(os.environ.get("VTX_METHOD_CASES", "2"))  # of each method, if it has no more layouts
PLAIN, TILES, SHUFFLED, NATIVE = (
    replace(tiny, layers=8)
    for tiny in (Tiny(image=126, context=768), LLAVA_NEXT, INTERNVL, replace(QWEN2, context=512))
)
SHARES = "pyramiddrop:layers=1/2/3/4/5/6"
CUTS = (SHARES, "fastv:k=1", "fastv:k=2", "fastv:k=5", "dart:k=2", "dart:k=5", "mustdrop:layers=2/5,tau=off,key=0")
OF_PATCHES = ("cls", "visionzip", "hiprune:layer=1")
EXPORTED = {
    PLAIN: (*CUTS, *OF_PATCHES, "lsm", "mustdrop:layers=2/5"),
    TILES: (*CUTS, *OF_PATCHES, "mustdrop:layers=2/5,tau=off"),
    SHUFFLED: CUTS,
    NATIVE: (SHARES,),
}  # fmt: skip
ANY, OF_CLIP = (PLAIN, TILES, SHUFFLED), (PLAIN, TILES)
WORDS = ("what", "is", "the", "colour", "of", "this", "red", "shape", "how", "many", "left")


@dataclass(frozen=True)
class Drawn:
    tiny: Tiny
    method: Method
    images: list[Image.Image]
    question: str


def mustdrop(rng: random.Random) -> Method:
    gamma, alpha = (10 ** rng.uniform(-3, -1) for _ in "ga")
    positions = rng.choice(("keep", "renumber"))
    return Method(layers=(2, 5), gamma=gamma, alpha=alpha, positions=positions)  # type: ignore[arg-type]


def dart(rng: random.Random, *, before: bool) -> Method:
    k, pivots, text_pivots = 0 if before else rng.choice((2, 5)), rng.randint(1, 4), rng.randint(0, 4)
    order = "size" if before or rng.random() < 0.5 else "code"
    return Method(dart=(rng.randint(8, 40), k, pivots, text_pivots), dart_order=order)  # type: ignore[arg-type]


def pyramiddrop(rng: random.Random) -> Method:
    layers = tuple(sorted(rng.sample(range(1, 7), rng.randint(1, 4))))
    ratio, positions = rng.choice((0.0, 0.3, 0.5, 0.5, 0.7, 0.9)), rng.choice(("keep", "renumber"))
    return Method(pyramiddrop=(ratio, layers), positions=positions)


METHODS: dict[str, tuple[tuple[Tiny, ...], Callable[[random.Random], Method]]] = {
    "fastv": (ANY, lambda rng: Method(fastv=(rng.choice((1, 2, 5)), rng.choice((0.1, 0.29, 0.5, 0.75, 0.9, 1.0))))),
    "dart": (ANY, lambda rng: dart(rng, before=False)),
    "dart, before layer 1": (ANY, lambda rng: dart(rng, before=True)),
    "mustdrop": (ANY, mustdrop),
    "mustdrop, key tokens": (OF_CLIP, lambda rng: replace(mustdrop(rng), key=rng.choice((0.08, 0.3)))),
    "cdpruner": (ANY, lambda rng: Method(cdpruner=(rng.randint(2, 12), rng.choice(("embedding", "none"))))),
    "divprune": (ANY, lambda rng: Method(divprune=rng.randint(2, 15))),
    "cls": (OF_CLIP, lambda rng: Method(cls_keep=rng.choice((0.05, 0.25, 0.29, 0.5, 0.9)))),
    "visionzip": (OF_CLIP, lambda rng: Method(visionzip=(rng.randint(2, 12), rng.randint(2, 5)))),
    "hiprune": (OF_CLIP, lambda rng: Method(hiprune=(rng.randint(10, 14), rng.choice((0.1, 0.4, 0.9)), 1))),
    "lsm": ((PLAIN,), lambda rng: Method(tau=rng.uniform(0.3, 0.99), order=rng.choice(("raster", "merged-first")))),
    "pyramiddrop": ((*ANY, NATIVE), pyramiddrop),
}  # type: ignore[arg-type]
CASES = [(name, number) for name, (layouts, _) in METHODS.items() for number in range(max(COUNT, len(layouts)))]


def drawn(name: str, case: int) -> Drawn:
    """A case of a method; its layout is `case` modulo the number of those that the method has."""
    rng = random.Random(f"{name} {case}")
    layouts, draw = METHODS[name]
    tiny, method = layouts[case % len(layouts)], draw(rng)
    if tiny is NATIVE:  # positions of three parts are not renumbered
        method = replace(method, positions="keep")
    images = [
        random_image(rng.randint(0, 99), (rng.randint(50, 130), rng.randint(50, 130)))
        for _ in "ab"[: rng.randint(1, 2)]
    ]
    question = " ".join(rng.choices(WORDS, k=rng.randint(1, 12))) + "?"
    return Drawn(tiny, method, images, question)
