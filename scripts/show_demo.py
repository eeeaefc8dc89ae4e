"""Show the effect of withdrawal on the demo model: a picture, questions, and the cost of each answer at two K.

python scripts/show_demo.py build/demo
python scripts/show_demo.py build/demo --record demo.svg
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path
from statistics import median

from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import vtx

PICTURE = Path("examples/scene-1.jpg")
QUESTIONS = ("How many shapes are there?", "What color is the star?", "Where is the red circle?")
WIDTH = 80
FONTS = re.compile(r"@font-face \{.*?\}", re.DOTALL)  # from another host; the reader's monospace font is used
ROUNDS = 7
SIDE = 24  # characters of the picture's width; each shows two pixels, one above the other


def main() -> None:
    """Load the bundle, ask every question with and without withdrawal, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--record", type=Path, metavar="FILE.svg", help="also write the output as a picture")
    given = parser.parse_args()
    console = Console(width=WIDTH, record=given.record is not None, highlight=False)
    with vtx.load(given.bundle) as model:
        k = model.manifest.variants[0]
        console.print(f"[bold]vtx[/] {vtx.__version__}: {PICTURE} on {model.backend.device}")
        if console.is_terminal or given.record:  # without colours the blocks show nothing
            console.print(drawn(PICTURE))
        table, saved = answers(model, k)
        console.print(table)
        console.print(f"[bold]{saved}[/]")
        layers, tokens = model.manifest.model.layers, model.manifest.layout.max_tokens
        console.print(
            f"K = {k}: the image's {tokens} tokens leave after layer {k - 1} of {layers}; deeper layers hold no "
            "K and V for them. The first question includes the vision encoder; the next ones reuse the image."
        )
    console.print("The demo model knows only drawn scenes like this one; to a photo or to 'hello' it answers nonsense.")
    activate = "" if shutil.which("vtx-chat") else f"source {Path(sys.executable).parent}/activate, then "
    console.print(f"Next: {activate}vtx-chat examples/scene-2.jpg, vtx-inspect, vtx-export --help")
    if given.record:
        svg = console.export_svg(title=f"make demo (K = none and K = {k})")
        given.record.write_text(FONTS.sub("", svg), encoding="utf-8")


def drawn(path: Path) -> Text:
    """The picture as coloured half blocks."""
    with Image.open(path) as file:
        pixels = file.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    text = Text()
    for y in range(0, SIDE, 2):
        for x in range(SIDE):
            above, below = (pixels.getpixel((x, y + row)) for row in (0, 1))
            text.append("▀", style="rgb({},{},{}) on rgb({},{},{})".format(*above, *below))  # type: ignore[misc]
        text.append("\n")
    return text


def answers(model: vtx.Model, k: int) -> tuple[Table, str]:
    """Every question without withdrawal and at `k`, each depth in a new conversation, and what `k` saves."""
    rounds: dict[int | None, list[list[vtx.Answer]]] = {None: [], k: []}
    for number in range(ROUNDS + 1):
        for depth, repeats in rounds.items():
            with model.open(PICTURE) as image:
                asked = [image.ask(question, depth) for question in QUESTIONS]
            repeats += [asked] if number else []  # the first round of a process costs more
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=f"first token: median of {ROUNDS} rounds")
    for head in ("question", "all layers", "first token", f"K = {k}", "first token"):
        table.add_column(head, justify="right" if head == "first token" else "left")
    texts, times = [], []
    for repeats in rounds.values():
        texts.append([answer.text for answer in repeats[0]])
        times.append(
            [median(answer.stats.timings_ms["first_token"] for answer in alike) for alike in zip(*repeats, strict=True)]
        )
    for question, full, full_ms, cut, cut_ms in zip(QUESTIONS, texts[0], times[0], texts[1], times[1], strict=True):
        table.add_row(question, full, f"{full_ms:.1f} ms", cut, f"{cut_ms:.1f} ms")
    full_kv, cut_kv = (repeats[0][0].stats.kv_bytes for repeats in rounds.values())
    saved = (
        f"{'The same' if texts[0] == texts[1] else 'Other'} answers. The first token comes "
        f"{times[0][0] / times[1][0]:.1f} times as fast, and the KV cache takes {cut_kv / 1000:.0f} kB instead of "
        f"{full_kv / 1000:.0f} kB."
    )
    return table, saved


if __name__ == "__main__":
    main()
