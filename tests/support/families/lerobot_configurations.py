"""Compare actions of random SmolVLA and pi0.5 with those of LeRobot's own code, the noise being the same.

Needs what `lerobot_vectors.py` needs: `python -m tests.support.families.lerobot_configurations 30`. Sizes of decoder,
tower, expert, pictures, states, actions and chunks are drawn, and cameras, steps, kinds of normalisation and how the
expert reads the decoder. At three K LeRobot's code runs with image tokens masked. Exits with 1 beyond the limit.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot.configs.types import NormalizationMode

from tests.support.bundles import ORT, export_with
from tests.support.drawn import paligemma, smolvlm
from tests.support.families.lerobot import WORDS, make_base, make_pi_tiny
from tests.support.families.lerobot_vectors import NAMES, Robot, act, save
from tests.support.tiny import random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load

LIMIT = 1e-4  # in normalised units, of actions beyond 1 as a share of the largest
ENDS = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
MODES = ("MEAN_STD", *ENDS, "IDENTITY")


def statistics(draw: random.Random, width: int) -> dict[str, list[float]]:
    """Every statistic of a feature; those of a kind of normalisation fit together."""
    found = {"mean": [draw.uniform(-2, 2) for _ in range(width)], "std": [draw.uniform(0.2, 3) for _ in range(width)]}
    for low, high in ENDS.values():
        found[low] = [draw.uniform(-2, 1) for _ in range(width)]
        found[high] = [least + draw.uniform(0.3, 4) for least in found[low]]
    return found


def draw_robot(policy: str, draw: random.Random) -> Robot:
    states, actions = draw.randint(1, 9), draw.randint(1, 8)
    of_state, of_actions = statistics(draw, states), statistics(draw, actions)
    modes = {"STATE": draw.choice(MODES), "ACTION": draw.choice(MODES), "VISUAL": "IDENTITY"}
    settings: dict[str, Any] = {
        "normalization_mapping": {kind: NormalizationMode(mode) for kind, mode in modes.items()},
        "min_period": draw.choice([4e-3, 1e-2]), "max_period": draw.choice([4.0, 2.0]),
    }  # fmt: skip
    cameras = {f"camera{n}": (draw.randint(20, 120), draw.randint(20, 120)) for n in range(draw.randint(1, 3))}
    robot = Robot(
        policy,
        smolvlm(draw) if policy == "smolvla" else paligemma(draw),
        cameras=cameras,
        state=[draw.uniform(-2.5, 2.5) for _ in range(states)],
        width=actions,
        widths=(states + draw.randint(0, 6), actions + draw.randint(0, 6)),
        horizon=draw.randint(2, 20),
        steps=draw.randint(1, 10),
        statistics={name: (of_state[name], of_actions[name]) for name in of_state},
    )
    if policy == "smolvla":
        head = draw.choice([8, 16, 24, 32])  # onnxruntime's attention takes multiples of 8
        tiny = replace(
            robot.tiny, rope="default", hidden=robot.tiny.heads * head, head_dim=None, shards=1, names="saved"
        )
        used = draw.randint(3, tiny.layers)
        settings |= {
            "num_vlm_layers": used, "empty_cameras": draw.randint(0, 2),
            "attention_mode": draw.choice(["cross_attn", "cross_attn", "self_attn"]),
            "self_attn_every_n_layers": draw.randint(1, 4),
            "expert_width_multiplier": draw.choice([0.25, 0.5, 0.75, 1]),
        }  # fmt: skip
        return replace(robot, tiny=tiny, settings=settings)
    expert = {"hidden_size": draw.choice([16, 32, 48]), "intermediate_size": draw.choice([32, 48, 80])}
    tiny = replace(robot.tiny, names="hub", tokenizer="metaspace")  # PaliGemma's, which begins with a <bos>
    return replace(robot, tiny=tiny, expert=expert, settings=settings)


def scale(robot: Robot) -> np.ndarray:
    """One normalised unit of each number of an action, in the robot's units."""
    mode = robot.settings["normalization_mapping"]["ACTION"].value
    of_actions = {name: np.array(actions) for name, (_, actions) in robot.statistics.items()}
    if mode == "IDENTITY":
        return np.ones(robot.width)
    if mode == "MEAN_STD":
        return of_actions["std"]
    low, high = ENDS[mode]
    return (of_actions[high] - of_actions[low]) / 2


def compare(robot: Robot, folder: Path, draw: random.Random) -> tuple[float, float]:
    """The largest difference in normalised units, and the least that a K makes."""
    name = NAMES[robot.policy]
    checkpoint = folder / "checkpoint"
    base = make_base(checkpoint / name.split("/")[-1], robot.tiny)
    made = save(robot, base, checkpoint)
    for file in checkpoint.glob("*.json"):
        file.write_text(file.read_text(encoding="utf-8").replace(str(base), name), encoding="utf-8")
    layers = robot.settings.get("num_vlm_layers", robot.tiny.layers)
    ks = sorted(draw.sample(range(2, layers + 1), min(3, layers - 1)))
    with pytest.MonkeyPatch.context() as patch:
        if robot.policy != "smolvla":
            make_pi_tiny(patch, robot.tiny, robot.expert)
        bundle = export_with(ExportOptions(str(checkpoint), tuple(ks), "fp32", dialects=ORT), folder / "bundle").folder
    pictures = {name: random_image(number, size) for number, (name, size) in enumerate(robot.cameras.items())}
    worst, changes, whole = 0.0, [], None
    with load(bundle, device="cpu", threads=1) as model:
        for k in (None, *ks):
            wanted = np.array(act(robot, made.config, base, made, k))
            found = model.act(pictures, WORDS, robot.state, k=k, noise=robot.noise())
            largest = max(1.0, float(np.abs(wanted / scale(robot)).max()))
            worst = max(worst, float(np.abs((found - wanted) / scale(robot)).max()) / largest)
            whole = wanted if whole is None else whole
            changes += [float(np.abs((wanted - whole) / scale(robot)).max())] * (k is not None)
    return worst, min(changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="configurations of each policy")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--policies", nargs="+", default=["smolvla", "pi05"])
    settings = parser.parse_args()
    torch.set_num_threads(1)
    most = dict.fromkeys(settings.policies, 0.0)
    for policy in settings.policies:
        for seed in range(settings.first, settings.first + settings.count):
            draw = random.Random(f"{policy} {seed}")
            robot = draw_robot(policy, draw)
            with tempfile.TemporaryDirectory() as folder:
                worst, change = compare(robot, Path(folder), draw)
            most[policy] = max(most[policy], worst)
            print(f"{policy} {seed}: {worst:.1e} from LeRobot, K changes {change:.1e} at least", flush=True)
    print(", ".join(f"{policy} {worst:.1e}" for policy, worst in most.items()), f"at most, the limit is {LIMIT:g}")
    if max(most.values()) >= LIMIT:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
