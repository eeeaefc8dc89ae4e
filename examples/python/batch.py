"""One question about every image of a folder, two at a time, as a table on stdout.

Usage:

    python examples/python/batch.py BUNDLE FOLDER "How many shapes are there?"
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import vtx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("question")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    paths = sorted(options.folder.glob("*.jpg"))
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["image", "answer", "first token ms"])
    with vtx.load(options.bundle) as model:
        items = ((path, options.question) for path in paths)
        for path, answer in zip(paths, model.batch(items, threads=options.threads, max_new_tokens=32), strict=True):
            table.writerow([path.name, answer.text, answer.stats.timings_ms["first_token"]])


if __name__ == "__main__":
    main()
