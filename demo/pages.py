"""White pages of numbers, and questions that quote them: `python demo/pages.py --out build/pages`.

Each page has three lines, a letter and three digits, of one size and at a random place. Asked are all lines, a line by
its place, a number by its letter, and, for comparison, whether there is a letter. `demo/reader.py` trains on such
pages; those written here, for `vtx-eval exact`, are none of them.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vtx.tools.data.scene_questions import SceneQuestion

SIDE = 56
LETTERS = "aemnst"  # each a token of its own
GLYPHS = LETTERS + "0123456789"
LINES, DIGITS = 3, 3
PITCH, ADVANCE, SIZE = 17, 9, 13  # pixels: from line to line, from character to character, of the font
KINDS = ("all", "line", "number", "letter")
SEED = 6_000_000_000


@dataclass(frozen=True, slots=True)
class Page:
    """Lines such as "e 471", and the pixel at which the first begins."""

    lines: tuple[str, ...]
    left: int
    top: int

    def glyphs(self) -> Iterator[tuple[str, int, int, float, float]]:
        """Each character with its line and column, and its middle in pixels."""
        for row, line in enumerate(self.lines):
            for column, glyph in enumerate(line):
                if glyph != " ":
                    x = self.left + ADVANCE * (column + 0.5)
                    yield glyph, row, column, x, self.top + PITCH * (row + 0.5)

    def questions(self, rng: random.Random) -> list[SceneQuestion]:
        """Questions of each kind with their answers: one of all lines and of a letter, two of the others."""
        places = [rng.randrange(LINES) for _ in range(4)]
        there = {line[0] for line in self.lines}
        letter = rng.choice(sorted(there if rng.random() < 0.5 else set(LETTERS) - there))
        return [
            SceneQuestion("all", "read all.", " ".join(self.lines)),
            *(SceneQuestion("line", f"line {place + 1}?", self.lines[place]) for place in places[:2]),
            *(SceneQuestion("number", f"what is {line[0]}?", line[2:]) for line in (self.lines[p] for p in places[2:])),
            SceneQuestion("letter", f"is there {letter}?", "yes" if letter in there else "no"),
        ]


def random_page(rng: random.Random) -> Page:
    letters = rng.sample(LETTERS, LINES)
    lines = tuple(f"{letter} {rng.randrange(10**DIGITS):0{DIGITS}}" for letter in letters)
    return Page(lines, rng.randint(2, SIDE - ADVANCE * (DIGITS + 2) - 2), rng.randint(0, SIDE - PITCH * LINES))


def draw_page(page: Page) -> Image.Image:
    image = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(SIZE)
    for glyph, _, _, x, y in page.glyphs():
        pen.text((x, y), glyph.upper(), (0, 0, 0), font, "mm")
    return image


def page_labels(page: Page, grid: int) -> np.ndarray:
    """[patches, 3] int64: character (0 none), line and column that each patch shows."""
    labels = np.zeros((grid, grid, 3), np.int64)
    nearest = np.full((grid, grid), 0.9)
    middles = (np.arange(grid) + 0.5) * SIDE / grid
    for glyph, row, column, x, y in page.glyphs():
        away = np.hypot((middles[None] - x) / ADVANCE, (middles[:, None] - y) / SIZE)
        near = away < nearest
        nearest[near] = away[near]
        labels[near] = 1 + GLYPHS.index(glyph), row, column
    return labels.reshape(grid * grid, 3)


def write(out: Path, pages: int, kinds: Collection[str] = KINDS) -> None:
    """The pages and the questions of `kinds` in `questions.jsonl`, none of them drawn in training."""
    out.mkdir(parents=True, exist_ok=True)
    rng, records = random.Random(SEED), list[str]()
    for number in range(pages):
        page, name = random_page(rng), f"{number:04}.png"
        draw_page(page).save(out / name)
        for item in page.questions(rng):
            if item.kind in kinds:
                records.append(json.dumps({"image": name, "question": item.question, "answer": item.answer}) + "\n")
    (out / "questions.jsonl").write_text("".join(records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("build/pages"))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of questions")
    args = parser.parse_args()
    write(args.out, args.pages, args.kinds)


if __name__ == "__main__":
    main()
