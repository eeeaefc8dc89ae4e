"""Several threads ask one model, each about an image of its own.

Usage:

    python examples/python/threads.py BUNDLE "How many shapes are there?" IMAGE...

The weights are in memory once. A conversation belongs to one thread; the model serves all.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import vtx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("question")
    parser.add_argument("images", type=Path, nargs="+")
    options = parser.parse_args()
    with vtx.load(options.bundle) as model:

        def ask(path: Path) -> tuple[vtx.Answer, vtx.Answer]:
            with model.open(path) as image:
                return image.ask(options.question), image.ask(options.question, k="none")

        with ThreadPoolExecutor(max_workers=4) as pool:
            for path, (fast, whole) in zip(options.images, pool.map(ask, options.images), strict=True):
                print(f"{path.name}: {fast} (with all image tokens in all layers: {whole})")


if __name__ == "__main__":
    main()
