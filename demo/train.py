"""Train the demo model: `python demo/train.py --minutes 100 --out build/demo-train`.

Resumable: the same command goes on from the last checkpoint in `--out`. The model starts shallow
(`--shallow` layers) and is deepened to its full depth after `--grow-at` of the time by layers that
begin as the identity. Every step draws fresh scenes; `--none` of the batches see the picture in all
layers, the others withdraw it at a random depth. Auxiliary heads on the vision tokens and on the CLS
row speed learning up and are dropped afterwards. Uses CUDA where there is one.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from queue import Queue
from typing import Any, TextIO

import numpy as np
import torch
import torch.nn.functional as F
from model import Layer, Llava, Shape, VisionLayer, init_linear
from muon import Float32Muon
from PIL import Image
from torch import Tensor, nn
from words import Packer, run_tokenizer

from vtx.tools.data.scene_questions import KINDS, ask_some
from vtx.tools.data.scenes import COLORS, GRID, SHAPES, Scene, photograph, random_scene

MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
LOG_STEPS, SAVE_STEPS = 50, 500
# Processors with AVX2 alone emulate bfloat16, several times slower than float32.
BF16 = torch.cuda.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX2"


def pixels_of(image: Image.Image, side: int) -> np.ndarray:
    """Preprocessing as CLIP's: bicubic resize, scale to 0..1, normalise. [3, side, side] float32."""
    small = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC), np.float32) / 255.0
    return ((small - MEAN) / STD).transpose(2, 0, 1)


def patch_labels(scene: Scene, grid: int) -> np.ndarray:
    """[patches, 3] int64: colour (0 none), shape (0 none) and cell that each patch shows."""
    centers = (np.arange(grid) + 0.5) / grid
    y, x = np.meshgrid(centers, centers, indexing="ij")
    cell = (y * GRID).astype(np.int64) * GRID + (x * GRID).astype(np.int64)
    color, shape = np.zeros_like(cell), np.zeros_like(cell)
    for thing in scene.things:
        near = np.hypot(x - thing.x, y - thing.y) < thing.radius
        color[near] = 1 + list(COLORS).index(thing.color)
        shape[near] = 1 + SHAPES.index(thing.shape)
    return np.stack((color, shape, cell), -1).reshape(grid * grid, 3)


class Auxiliary(nn.Module):
    """Heads that read labels, colour, shape and cell, off each vision token, and all names off the CLS row."""

    def __init__(
        self,
        s: Shape,
        sizes: tuple[int, ...] = (len(COLORS) + 1, len(SHAPES) + 1, GRID * GRID),
        names: int = len(COLORS) * len(SHAPES),
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.patch = init_linear(sum(sizes), s.hidden, bias=True)
        self.scene = init_linear(names, s.v_hidden, bias=True)

    def loss(self, vision: Tensor, cls: Tensor, labels: Tensor, names: Tensor) -> Tensor:
        parts = self.patch(vision).float().split(self.sizes, -1)
        patch = sum(F.cross_entropy(p.flatten(0, 1), labels[..., i].flatten()) for i, p in enumerate(parts))
        return patch + F.binary_cross_entropy_with_logits(self.scene(cls).float(), names)


class Batches:
    """Batches drawn in a thread of their own; the mixture follows what is not yet learnt."""

    def __init__(self, args: argparse.Namespace, packer: Packer, shape: Shape, seed: int) -> None:
        self.args, self.packer, self.shape, self.rng = args, packer, shape, random.Random(seed)
        self.right = dict.fromkeys(KINDS, 0.0)
        self.queue: Queue[dict[str, Any]] = Queue(maxsize=4)
        threading.Thread(target=self._fill, daemon=True).start()

    def _fill(self) -> None:
        while True:
            self.queue.put(draw(self.rng, self.packer, self.shape, self.right, self.args.batch, self.args.questions))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield self.queue.get()


def draw(
    rng: random.Random, packer: Packer, shape: Shape, right: dict[str, float], pictures: int, questions: int
) -> dict[str, Any]:
    """One batch of scenes with their questions; kinds that are seldom `right` are asked more often."""
    weights = {kind: 0.12 + (1 - share) for kind, share in right.items()}
    talk = rng.random() < 0.2
    side, grid = shape.image, shape.image // shape.patch
    images, columns, patches, names, kinds = [], [], [], [], []
    for _ in range(pictures):
        scene = random_scene(rng)
        items = ask_some(scene, questions, rng, weights)
        images.append(pixels_of(photograph(scene, rng), side))
        columns.append(packer.pack(items, talk=talk))
        patches.append(patch_labels(scene, grid))
        seen = np.zeros(len(COLORS) * len(SHAPES), np.float32)
        for thing in scene.things:
            seen[list(COLORS).index(thing.color) * len(SHAPES) + SHAPES.index(thing.shape)] = 1
        names.append(seen)
        kinds.append([list(KINDS).index(item.kind) for item in items])
    ids, labels, positions, blocks, owner = (torch.from_numpy(np.stack(c)) for c in zip(*columns, strict=True))
    return {
        "pixels": torch.from_numpy(np.stack(images)),
        "ids": ids,
        "labels": labels,
        "positions": positions,
        "blocks": blocks,
        "owner": owner,
        "patches": torch.from_numpy(np.stack(patches)),
        "names": torch.from_numpy(np.stack(names)),
        "kinds": torch.tensor(kinds),
    }


def with_vision(column: Tensor, at: int, middle: Tensor) -> Tensor:
    return torch.cat((column[:, :at], middle.expand(len(column), -1), column[:, at:]), 1)


def attention_mask(blocks: Tensor) -> Tensor:
    """[batch, 1, rows, rows], 0 where a row may look, else -30000: causal, within one's own block and block 0."""
    rows = blocks.shape[1]
    causal = torch.ones(rows, rows, dtype=torch.bool, device=blocks.device).tril()
    seen = causal & ((blocks[:, None, :] == 0) | (blocks[:, None, :] == blocks[:, :, None]))
    return torch.where(seen, 0.0, -30000.0)[:, None].to(torch.bfloat16)


def step_loss(
    model: Llava, aux: Auxiliary, batch: dict[str, Tensor], at: int, k: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Answer loss, auxiliary loss, and which items were answered right, [batch, questions]."""
    n = model.shape.vision_tokens
    device = batch["ids"].device
    vision, cls = model.see(batch["pixels"])
    positions = with_vision(batch["positions"], at, torch.arange(at, at + n, device=device))
    blocks = with_vision(batch["blocks"], at, torch.zeros(n, dtype=torch.int64, device=device))
    hidden = model(batch["ids"], vision, positions, attention_mask(blocks), at, k)
    wanted = batch["labels"].roll(-1, 1)
    wanted[:, -1] = -100
    answers = wanted != -100
    logits = model.lm_head(hidden[answers]).float()
    target = wanted[answers]
    loss = F.cross_entropy(logits, target)
    wrong = torch.zeros(len(answers), batch["kinds"].shape[1] + 1, device=device)
    owner = torch.where(answers, batch["owner"], batch["kinds"].shape[1])
    flags = torch.zeros(answers.shape, device=device)
    flags[answers] = (logits.argmax(-1) != target).float()
    wrong.scatter_add_(1, owner.roll(0, 1), flags)
    return loss, aux.loss(vision, cls, batch["patches"], batch["names"]), wrong[:, :-1] == 0


def make_optimizers(model: Llava, aux: Auxiliary, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for everything else."""
    matrices, others = [], list(aux.parameters())
    for name, parameter in model.named_parameters():
        in_layer = ".layers." in name or "projector" in name
        (matrices if in_layer and parameter.ndim == 2 else others).append(parameter)
    muon: torch.optim.Optimizer
    if BF16:
        muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
    else:
        muon = Float32Muon(matrices, lr=lr, weight_decay=0.02)
    return [
        muon,
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learn(
    model: Llava,
    aux: Auxiliary,
    optimizers: list[torch.optim.Optimizer],
    batch: dict[str, Tensor],
    at: int,
    k: int | None,
    lr: float,
    right: dict[str, float],
    losses: list[float],
) -> list[float]:
    """One step at the rate `lr`: the running means of the losses after it; those in `right` are updated."""
    with torch.autocast(batch["ids"].device.type, torch.bfloat16, enabled=BF16):
        loss, extra, answered = step_loss(model, aux, batch, at, k)
    (loss + 0.3 * extra).backward()
    nn.utils.clip_grad_norm_([*model.parameters(), *aux.parameters()], 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    for number, kind in enumerate(right):
        if len(chosen := answered[batch["kinds"] == number]):
            right[kind] = 0.95 * right[kind] + 0.05 * chosen.float().mean().item()
    return [0.95 * a + 0.05 * b.item() for a, b in zip(losses, (loss, extra), strict=True)]


def save(path: Path, model: Llava, aux: Auxiliary, optimizers: list[torch.optim.Optimizer], **more: Any) -> None:
    """Replace the checkpoint at `path`."""
    state = {
        "model": model.state_dict(),
        "aux": aux.state_dict(),
        "shape": asdict(model.shape),
        **more,
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def start(parser: argparse.ArgumentParser, out: str, threads: int) -> argparse.Namespace:
    """The options of a training: those of `parser`, and those that all have."""
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--batch", type=int, default=32, help="pictures a step")
    parser.add_argument("--questions", type=int, default=12, help="questions a picture")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="needs a C compiler")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.compile:
        Layer.forward = torch.compile(Layer.forward)  # type: ignore[method-assign]
        VisionLayer.forward = torch.compile(VisionLayer.forward)  # type: ignore[method-assign]
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def deepen(model: Llava, layers: int) -> Llava:
    """The same function with more layers: those added at the end begin as the identity."""
    deeper = Llava(replace(model.shape, layers=layers))
    own = model.state_dict()
    deeper.load_state_dict({**deeper.state_dict(), **own})
    for layer in list(deeper.model.language_model.layers)[model.shape.layers :]:
        assert isinstance(layer, Layer)
        layer.silence()
    return deeper


def rate(share: float) -> float:
    """Learning rate factor at `share` of the time: short warm-up, plateau, linear to zero over the last 35%."""
    if share < 0.005:
        return max(0.05, share / 0.005)
    return 1.0 if share < 0.65 else max(0.0, (1 - share) / 0.35)


class Training:
    """A model on its way: begun anew, or resumed from the last checkpoint in `args.out`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.full = args, Shape()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.last = args.out / "last.pt"
        packer = Packer(run_tokenizer(args.out, self.full.vocab), self.full.vision_tokens, 4 + 13 * args.questions + 8)
        torch.manual_seed(0)
        state = torch.load(self.last, weights_only=True) if self.last.exists() else None
        layers, spent, self.step = (
            (state["shape"]["layers"], state["spent"], state["step"]) if state else (args.shallow, 0.0, 0)
        )
        model, aux = Llava(replace(self.full, layers=layers)), Auxiliary(self.full)
        if state:
            model.load_state_dict(state["model"])
            aux.load_state_dict(state["aux"])
        self.model, self.aux = model.to(self.device), aux.to(self.device)
        self.optimizers = make_optimizers(self.model, self.aux, args.lr)
        self.at, self.batches = packer.at, Batches(args, packer, self.full, seed=self.step + 1)
        if state:
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.batches.right.update(state["right"])
        self.rng, self.began, self.losses = random.Random(self.step), time.time() - spent, [0.0, 0.0]

    def run(self) -> None:
        """Train for the time or the steps asked for, and save."""
        tick = time.time()
        with (self.args.out / "log.jsonl").open("a") as log:
            for batch in self.batches:
                share = (time.time() - self.began) / (60 * self.args.minutes)
                if share >= 1 or (self.args.steps and self.step >= self.args.steps):
                    break
                if share >= self.args.grow_at and self.model.shape.layers < self.full.layers:
                    self.model = deepen(self.model, self.full.layers).to(self.device)
                    self.optimizers = make_optimizers(self.model, self.aux, self.args.lr)
                seen = {name: value.to(self.device) for name, value in batch.items()}
                none = self.rng.random() < self.args.none
                k = None if none else self.rng.randint(self.args.first_k, self.model.shape.layers)
                self.losses = learn(
                    self.model,
                    self.aux,
                    self.optimizers,
                    seen,
                    self.at,
                    k,
                    self.args.lr * rate(share),
                    self.batches.right,
                    self.losses,
                )
                self.step += 1
                if self.step % LOG_STEPS == 0:
                    seconds, tick = (time.time() - tick) / LOG_STEPS, time.time()
                    self._log(log, share, seconds)
                if self.step % SAVE_STEPS == 0:
                    self._save()
                if not math.isfinite(self.losses[0]):
                    raise SystemExit(f"the loss is {self.losses[0]} at step {self.step}: lower --lr")
        self._save()

    def _log(self, log: TextIO, share: float, seconds: float) -> None:
        line = {
            "step": self.step,
            "share": round(share, 4),
            "s/step": round(seconds, 3),
            "layers": self.model.shape.layers,
            "loss": round(self.losses[0], 4),
            "aux": round(self.losses[1], 4),
            **{kind: round(v, 3) for kind, v in self.batches.right.items()},
        }
        print(json.dumps(line), flush=True)
        log.write(json.dumps(line) + "\n")
        log.flush()

    def _save(self) -> None:
        save(
            self.last,
            self.model,
            self.aux,
            self.optimizers,
            step=self.step,
            spent=time.time() - self.began,
            right=self.batches.right,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=100, help="time to train in all, resumed runs included")
    parser.add_argument("--shallow", type=int, default=8, help="layers before the model is deepened")
    parser.add_argument("--grow-at", type=float, default=0.5, help="share of the time after which it is")
    parser.add_argument("--first-k", type=int, default=5, help="smallest withdrawal depth in training")
    parser.add_argument("--none", type=float, default=0.4, help="share of batches without withdrawal")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps (for a trial)")
    Training(start(parser, "build/demo-train", 2)).run()


if __name__ == "__main__":
    main()
