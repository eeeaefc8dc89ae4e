"""Exact answers of the demo model on held-out scenes, for every K: `python demo/evaluate.py --scenes 250`.

Reads the shipped checkpoint in float32. Questions about one scene share its rows and cannot see each other,
so each is answered as if it stood alone; an answer counts when every greedy token of it, the end token
included, is right. Writes `demo/accuracy.json`, and with matplotlib `demo/accuracy.png`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import Llava, Shape
from publish import HERE, hub_name
from safetensors.torch import load_file
from tokenizers import Tokenizer
from train import attention_mask, pixels_of, with_vision
from words import Packer

from vtx.tools.common.plots import draw, headline
from vtx.tools.data.scene_questions import KINDS, ask
from vtx.tools.data.scenes import photograph, random_scene

HELD_OUT_SEED = 7_000_000_000


def load(folder: Path) -> tuple[Llava, Tokenizer]:
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(layers=config["text_config"]["num_hidden_layers"])
    model, stored = Llava(shape), load_file(folder / "model.safetensors")
    model.load_state_dict({name: stored[hub_name(name)].float() for name in model.state_dict()})
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def held_out(scenes: int, packer: Packer, side: int) -> list[dict[str, Any]]:
    """Scenes with one or two questions of each kind, packed apart from each other."""
    rng, rows = random.Random(HELD_OUT_SEED), []
    for _ in range(scenes):
        scene = random_scene(rng)
        items = [item for kind in KINDS for _ in range(2) if (item := ask(scene, kind, rng))]
        rng.shuffle(items)
        items = items[:12]
        columns = packer.pack(items, talk=False)
        rows.append({"pixels": pixels_of(photograph(scene, rng), side), "columns": columns, "items": items})
    return rows


@torch.inference_mode()
def right_answers(model: Llava, batch: list[dict[str, Any]], at: int, ks: list[int | None]) -> dict[int | None, Any]:
    """For each K a list of (kind, right) over the questions of the batch."""
    ids, labels, positions, blocks, owner = (
        torch.from_numpy(np.stack(c)) for c in zip(*(row["columns"] for row in batch), strict=True)
    )
    vision, _ = model.see(torch.from_numpy(np.stack([row["pixels"] for row in batch])))
    n = model.shape.vision_tokens
    positions = with_vision(positions, at, torch.arange(at, at + n))
    mask = attention_mask(with_vision(blocks, at, torch.zeros(n, dtype=torch.int64))).float()
    wanted = labels.roll(-1, 1)
    answers = wanted != -100
    results = {}
    for k in ks:
        hidden = model(ids, vision, positions, mask, at, k)
        wrong = torch.zeros(answers.shape, dtype=torch.bool)
        wrong[answers] = model.lm_head(hidden[answers]).argmax(-1) != wanted[answers]
        results[k] = [
            (item.kind, not bool(wrong[row][owner[row] == number].any()))
            for row, scene in enumerate(batch)
            for number, item in enumerate(scene["items"])
            if (owner[row] == number).any()
        ]
    return results


def plot(measured: dict[str, Any], path: Path) -> None:
    """Draw the table of exact answers, kinds of question over K, each cell with its figure."""
    table, kinds = measured["accuracy"], [*KINDS, "all"]
    shares = np.array([[100 * table[k][kind] for k in table] for kind in kinds])

    def fill(figure: Any) -> None:
        axes = figure.subplots()
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=220, aspect="auto")
        for (row, column), share in np.ndenumerate(shares):
            axes.text(column, row, f"{share:.1f}" if share < 99.95 else "100", ha="center", va="center", fontsize=8)
        axes.set_xticks(range(len(table)), list(table))
        axes.set_yticks(range(len(kinds)), kinds)
        axes.set(xlabel="K: the first layer without image tokens", title="exact answers, %")
        axes.grid(visible=False)
        axes.tick_params(length=0)
        count = sum(number for kind, number in measured["questions"].items() if kind != "all")
        headline(figure, "The demo model, by kind of question and K", f"{count:,} questions; float32 on a CPU")

    draw(path, fill, width=12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE.parent / "exporter" / "demo_model")
    parser.add_argument("--scenes", type=int, default=250)
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--ks", default="all", help="all, or a list such as none,8,16")
    parser.add_argument("--out", type=Path, default=HERE / "accuracy.json")
    parser.add_argument("--redraw", action="store_true", help="measure nothing; draw what --out holds")
    args = parser.parse_args()
    if args.redraw:
        plot(json.loads(args.out.read_text()), args.out.with_suffix(".png"))
        return
    model, tokenizer = load(args.model)
    every = ["none", *map(str, range(2, model.shape.layers + 1))]
    ks = every if args.ks == "all" else args.ks.split(",")
    packer = Packer(tokenizer, model.shape.vision_tokens, 4 + 12 * 12 + 8)
    rows = held_out(args.scenes, packer, model.shape.image)
    counts: dict[str, dict[str, list[bool]]] = {k: defaultdict(list) for k in ks}
    depths = [None if k == "none" else int(k) for k in ks]
    for start in range(0, len(rows), args.batch):
        for k, answers in right_answers(model, rows[start : start + args.batch], packer.at, depths).items():
            for kind, right in answers:
                counts[str(k or "none")][kind].append(right)
                counts[str(k or "none")]["all"].append(right)
        print(f"{min(start + args.batch, len(rows))} of {len(rows)} scenes", flush=True)
    table = {k: {kind: float(np.mean(v)) for kind, v in by.items()} for k, by in counts.items()}
    questions = {kind: len(v) for kind, v in counts[ks[0]].items()}
    for k, by in table.items():
        print(f"K = {k:>4}: " + ", ".join(f"{kind} {100 * by[kind]:.1f}" for kind in ["all", *KINDS]))
    measured = {"scenes": len(rows), "questions": questions, "accuracy": table}
    args.out.write_text(json.dumps(measured, indent=1) + "\n")
    if args.ks == "all":
        plot(measured, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
