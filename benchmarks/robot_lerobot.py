"""LeRobot's side of `robots.py`, in an environment with lerobot 0.6.

python -m benchmarks.robot_lerobot describe POLICY CHECKPOINT            # its files but the weights
python -m benchmarks.robot_lerobot measure POLICY CHECKPOINT THREADS     # prints a line of JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from benchmarks.robot_work import ROBOTS, STATISTICS, WORDS, Pictures, Robot, chunks
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.pi05 import modeling_pi05, processor_pi05
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.smolvla import modeling_smolvla, processor_smolvla, smolvlm_with_expert
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from safetensors import safe_open
from transformers import AutoTokenizer

IMAGES = "observation.images."
UNUSED = ".lm_head."  # in a policy's class, and left out of the checkpoint: nobody asks for words


def configuration(robot: Robot, base: Path) -> Any:
    pictures = {IMAGES + name: PolicyFeature(FeatureType.VISUAL, (3, robot.side, robot.side)) for name in robot.cameras}
    features: dict[str, Any] = {
        "input_features": {"observation.state": PolicyFeature(FeatureType.STATE, (robot.width,)), **pictures},
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (robot.width,))},
        "device": "cpu",
    }
    if robot.policy == "smolvla":
        return SmolVLAConfig(**features, vlm_model_name=str(base))
    return PI05Config(**features)


def build(robot: Robot, config: Any) -> Any:
    """The policy by its class, without a checkpoint's weights; SmolVLA uses no more of a processor than two ids."""
    if robot.policy == "pi05":
        return modeling_pi05.PI05Policy(config)
    ids = SimpleNamespace(fake_image_token_id=0, global_image_token_id=0)
    processors = SimpleNamespace(from_pretrained=lambda _: SimpleNamespace(tokenizer=ids))
    with mock.patch.object(smolvlm_with_expert, "AutoProcessor", processors):
        return modeling_smolvla.SmolVLAPolicy(config)


def steps(robot: Robot, config: Any, base: Path) -> Any:
    """LeRobot's processors before and after the policy."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    stats = {
        name: {kind: torch.full((robot.width,), value) for kind, value in STATISTICS.items()}
        for name in ("observation.state", "action")
    }
    made = processor_smolvla.make_smolvla_pre_post_processors
    with mock.patch("lerobot.processor.tokenizer_processor.AutoTokenizer.from_pretrained", return_value=tokenizer):
        return (processor_pi05.make_pi05_pre_post_processors if robot.policy == "pi05" else made)(config, stats)


def describe(robot: Robot, folder: Path) -> None:
    """Write the files that LeRobot saves, and the names and shapes of the tensors that act, which have no values."""
    base = folder / robot.name
    config = configuration(robot, base)
    with torch.device("meta"), mock.patch.object(torch.nn.Module, "to", lambda module, *_, **__: module):
        state = build(robot, config).state_dict()
    shapes = {name: list(tensor.shape) for name, tensor in state.items() if UNUSED not in name}
    config.save_pretrained(folder)
    for part in steps(robot, config, base):
        part.save_pretrained(folder)
    named = {"smolvla": "HuggingFaceTB", "pi05": "google"}[robot.policy]
    for file in folder.glob("*.json"):
        file.write_text(file.read_text(encoding="utf-8").replace(str(base), f"{named}/{robot.name}"), encoding="utf-8")
    (folder / "tensors.json").write_text(json.dumps(shapes), encoding="utf-8")


def measure(robot: Robot, folder: Path, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    base = folder / robot.name
    config = configuration(robot, base)
    policy = build(robot, config)
    state = policy.state_dict()
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {*file.keys()} == {name for name in state if UNUSED not in name}
        for name in file.keys():  # noqa: SIM118  not a mapping
            state[name].copy_(file.get_tensor(name))
    policy = policy.float().eval()
    before, after = steps(robot, config, base)

    def act(pictures: Pictures, numbers: np.ndarray, noise: np.ndarray) -> np.ndarray:
        seen = {
            IMAGES + name: torch.from_numpy(picture).permute(2, 0, 1).float() / 255
            for name, picture in pictures.items()
        }
        batch = before({"observation.state": torch.from_numpy(numbers), "task": WORDS, **seen})
        with torch.inference_mode():
            found = policy.predict_action_chunk(batch, noise=torch.from_numpy(noise)[None])
        actions: np.ndarray = after(found)[0].numpy()
        return actions

    return {**chunks(robot, act), "how": "torch in f32"}


def main() -> None:
    action, name, folder, *threads = sys.argv[1:]
    if action == "describe":
        describe(ROBOTS[name], Path(folder))
    else:
        print(json.dumps(measure(ROBOTS[name], Path(folder), *map(int, threads))))


if __name__ == "__main__":
    main()
