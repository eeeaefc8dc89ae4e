"""Train a sibling of the demo model the ordinary way: `python demo/sibling.py --steps 3600 --out build/sibling`.

The demo model was trained with withdrawal and from a shallow model, so that nearly every K is free. This one sees the
picture in all its layers in every step and has its full depth from the first: a test bed for choosing K, gates and
`vtx-tune`. Everything else is the demo's: data, loss, optimizers. What a step sees depends on its number alone, and the
rate on the share of `--steps`; so the same command resumes from the last checkpoint as if it had not been interrupted.

`python demo/publish.py --run build/sibling --out build/sibling/model` writes it in Hugging Face's layout.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import replace
from typing import ClassVar

import torch
from model import Llava, Shape
from torch import Tensor
from train import Auxiliary, draw, learn, make_optimizers, rate, save, start
from words import Packer, run_tokenizer

from vtx.tools.data.scene_questions import KINDS


class Run:
    """Model, optimizers and running means of a training run, with what is saved of them in `last.pt`."""

    kinds: ClassVar[tuple[str, ...]] = KINDS

    def __init__(self, args: argparse.Namespace, shape: Shape) -> None:
        torch.manual_seed(args.seed)
        self.args, self.path, self.step = args, args.out / "last.pt", 0
        self.packer = Packer(run_tokenizer(args.out, shape.vocab), shape.vision_tokens, 4 + 13 * args.questions + 8)
        self.model, self.aux = Llava(shape), self.auxiliary(shape)
        self.optimizers = make_optimizers(self.model, self.aux, args.lr)
        self.right, self.losses = dict.fromkeys(self.kinds, 0.0), [0.0, 0.0]
        self.cpu_seconds = 0.0
        if self.path.exists():
            state = torch.load(self.path, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.aux.load_state_dict(state["aux"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.right, self.losses = state["step"], state["right"], state["losses"]
            self.cpu_seconds = state["cpu_seconds"]

    def auxiliary(self, shape: Shape) -> Auxiliary:
        return Auxiliary(shape)

    def batch(self, rng: random.Random) -> dict[str, Tensor]:
        return draw(rng, self.packer, self.model.shape, self.right, self.args.batch, self.args.questions)

    def save(self) -> None:
        save(
            self.path,
            self.model,
            self.aux,
            self.optimizers,
            step=self.step,
            right=self.right,
            losses=self.losses,
            cpu_seconds=self.cpu_seconds + time.process_time(),
        )

    def advance(self) -> None:
        """One step, without withdrawal."""
        args = self.args
        rng = random.Random(f"sibling {args.seed} {self.step}")
        lr = args.lr * rate(self.step / args.steps)
        self.losses = learn(
            self.model, self.aux, self.optimizers, self.batch(rng), self.packer.at, None, lr, self.right, self.losses
        )
        self.step += 1
        if not math.isfinite(self.losses[0]):
            raise SystemExit(f"the loss is {self.losses[0]} at step {self.step}: lower --lr")

    def line(self) -> str:
        losses = {"loss": round(self.losses[0], 4), "aux": round(self.losses[1], 4)}
        cpu = round(self.cpu_seconds + time.process_time())
        shares = {kind: round(share, 3) for kind, share in self.right.items()}
        return json.dumps({"step": self.step, "cpu s": cpu, **losses, **shares})


def train(doc: str, out: str, run_type: type[Run], steps: int, shape: Shape) -> None:
    """Begin or resume a run with the options of the command line."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help="in all, resumed runs included")
    parser.add_argument("--stop-at", type=int, help="stop after this step, to resume later")
    parser.add_argument("--layers", type=int, default=shape.layers)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    args = start(parser, out, 1)
    run = run_type(args, replace(shape, layers=args.layers))
    with (args.out / "log.jsonl").open("a") as log:
        while run.step < min(args.steps, args.stop_at or args.steps):
            run.advance()
            if run.step % args.save_every == 0:
                run.save()
                print(run.line(), flush=True)
                log.write(run.line() + "\n")
                log.flush()
    run.save()


if __name__ == "__main__":
    train(__doc__, "build/sibling", Run, 3600, Shape(layers=12))
