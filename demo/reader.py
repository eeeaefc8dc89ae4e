"""Train a small reader of pages: `python demo/reader.py --batch 8 --questions 6 --out build/reader`.

It sees the page in all its layers in every step, as readers of documents do; pages and questions are those of
`demo/pages.py`. What a step sees depends on its number alone, so the same command resumes from the last checkpoint.

`python demo/publish.py --run build/reader --out build/reader/model` writes it in Hugging Face's layout.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from model import Shape
from pages import DIGITS, GLYPHS, KINDS, LETTERS, LINES, SIDE, draw_page, page_labels, random_page
from sibling import Run, train
from train import Auxiliary, pixels_of

SHAPE = Shape(layers=6, hidden=96, ffn=192, image=SIDE, v_ffn=192)


class ReaderRun(Run):
    """A training run on pages."""

    kinds = KINDS

    def auxiliary(self, shape: Shape) -> Auxiliary:
        return Auxiliary(shape, (len(GLYPHS) + 1, LINES, DIGITS + 2), len(LETTERS))

    def batch(self, rng: random.Random) -> dict[str, torch.Tensor]:
        shape = self.model.shape
        rows = list[tuple[np.ndarray, ...]]()
        for _ in range(self.args.batch):
            page = random_page(rng)
            items = page.questions(rng)
            names = np.array([letter in "".join(page.lines) for letter in LETTERS], np.float32)
            kinds = np.array([KINDS.index(item.kind) for item in items])
            seen = pixels_of(draw_page(page), shape.image), page_labels(page, shape.image // shape.patch)
            rows.append((*self.packer.pack(items, talk=False), *seen, names, kinds))
        names = "ids", "labels", "positions", "blocks", "owner", "pixels", "patches", "names", "kinds"
        columns = [torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True)]
        return dict(zip(names, columns, strict=True))


if __name__ == "__main__":
    train(__doc__, "build/reader", ReaderRun, 1430, SHAPE)
