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
from pathlib import Path
from typing import Any

import torch
from model import Layer, Llava, Shape, VisionLayer
from torch import nn
from train import Auxiliary, draw, make_optimizers, rate, step_loss
from words import Packer, run_tokenizer

from vtx.tools.data.scene_questions import KINDS


class Run:
    """Model, optimizers and running means of a training run, with what is saved of them in `last.pt`."""

    def __init__(self, args: argparse.Namespace, shape: Shape) -> None:
        torch.manual_seed(args.seed)
        self.args, self.path, self.step = args, args.out / "last.pt", 0
        self.packer = Packer(run_tokenizer(args.out, shape.vocab), shape.vision_tokens, 4 + 13 * args.questions + 8)
        self.model, self.aux = Llava(shape), Auxiliary(shape)
        self.optimizers = make_optimizers(self.model, self.aux, args.lr)
        self.right, self.losses = dict.fromkeys(KINDS, 0.0), [0.0, 0.0]
        self.cpu_seconds = 0.0
        if self.path.exists():
            self._load(torch.load(self.path, weights_only=True))

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.aux.load_state_dict(state["aux"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.right, self.losses = state["step"], state["right"], state["losses"]
        self.cpu_seconds = state["cpu_seconds"]

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(), "aux": self.aux.state_dict(), "layers": self.model.shape.layers,
            "optimizers": [o.state_dict() for o in self.optimizers], "step": self.step, "right": self.right,
            "losses": self.losses, "cpu_seconds": self.cpu_seconds + time.process_time(),
        }  # fmt: skip
        torch.save(state, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").replace(self.path)

    def advance(self) -> None:
        """One step, without withdrawal."""
        args = self.args
        rng = random.Random(f"sibling {args.seed} {self.step}")
        batch = draw(rng, self.packer, self.model.shape, self.right, args.batch, args.questions)
        with torch.autocast("cpu", torch.bfloat16):
            loss, extra, right = step_loss(self.model, self.aux, batch, self.packer.at, None)
        (loss + 0.3 * extra).backward()
        nn.utils.clip_grad_norm_([*self.model.parameters(), *self.aux.parameters()], 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * rate(self.step / args.steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._follow(loss.item(), extra.item(), right, batch["kinds"])
        self.step += 1
        if not math.isfinite(self.losses[0]):
            raise SystemExit(f"the loss is {self.losses[0]} at step {self.step}: lower --lr")

    def _follow(self, loss: float, extra: float, right: torch.Tensor, kinds: torch.Tensor) -> None:
        self.losses = [0.95 * a + 0.05 * b for a, b in zip(self.losses, (loss, extra), strict=True)]
        for number, kind in enumerate(KINDS):
            if len(chosen := right[kinds == number]):
                self.right[kind] = 0.95 * self.right[kind] + 0.05 * chosen.float().mean().item()

    def line(self) -> str:
        losses = {"loss": round(self.losses[0], 4), "aux": round(self.losses[1], 4)}
        cpu = round(self.cpu_seconds + time.process_time())
        shares = {kind: round(share, 3) for kind, share in self.right.items()}
        return json.dumps({"step": self.step, "cpu s": cpu, **losses, **shares})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/sibling"))
    parser.add_argument("--steps", type=int, default=3600, help="in all, resumed runs included")
    parser.add_argument("--stop-at", type=int, help="stop after this step, to resume later")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="pictures a step")
    parser.add_argument("--questions", type=int, default=12, help="questions a picture")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="needs a C compiler")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.compile:
        Layer.forward = torch.compile(Layer.forward)  # type: ignore[method-assign]
        VisionLayer.forward = torch.compile(VisionLayer.forward)  # type: ignore[method-assign]
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args, Shape(layers=args.layers))
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
    main()
