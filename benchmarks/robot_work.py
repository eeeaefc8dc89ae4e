"""What `robots.py` asks of a policy, on either side: LeRobot's environment needs no vtx to read this file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from benchmarks.peers.worker import peak_rss
from numpy.typing import NDArray

WORDS = "pick up the red cup and put it on the plate"
CHUNK = 50  # actions
WIDTH = 32  # of the policies' states and actions, the robot's among them
STATISTICS = {"mean": 0.0, "std": 1.0, "q01": -1.0, "q99": 1.0}
Pictures = dict[str, NDArray[np.uint8]]
Act = Callable[[Pictures, NDArray[np.float32], NDArray[np.float32]], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Robot:
    """A policy beside its robot; `base` is the checkpoint that it names: its folder, its configuration, its tokens.

    Pictures are squares of `side` pixels. `k` is measured beside none.
    """

    title: str
    policy: str
    cameras: tuple[str, ...]
    side: int
    width: int
    k: int
    name: str
    base: Mapping[str, Any]
    vocab: int
    specials: Mapping[str, int]
    roles: Mapping[str, str] = field(default_factory=dict)


SMOLVLM = {
    "model_type": "smolvlm",
    "architectures": ["SmolVLMForConditionalGeneration"],
    "image_token_id": 49190,
    "pad_token_id": 2,
    "scale_factor": 4,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "llama",
        "vocab_size": 49280,
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "pad_token_id": 2,
    },
    "vision_config": {
        "model_type": "smolvlm_vision",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    },
}
ROBOTS = {
    "smolvla": Robot(
        "SmolVLA 450M",
        "smolvla",
        ("camera1", "camera2", "camera3"),
        256,
        6,
        6,
        "SmolVLM2-500M-Video-Instruct",
        SMOLVLM,
        49280,
        {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<image>": 49190},
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
    ),
    "pi05": Robot(
        "pi0.5",
        "pi05",
        ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"),
        224,
        32,
        7,
        "paligemma-3b-pt-224",
        {"model_type": "paligemma"},
        257152,
        {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3},
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"},
    ),
}


def chunks(robot: Robot, act: Act) -> dict[str, Any]:
    """Seconds of a chunk with new pictures, and of one with the same pictures and another state; MiB; the actions.

    A chunk with other pictures comes before both.
    """
    seconds = dict[str, float]()
    actions = np.zeros(0, np.float32)
    for number, (part, seed) in enumerate((("warm", 1), ("first", 2), ("next", 2))):
        rng = np.random.default_rng(seed)
        pictures = {name: rng.integers(0, 256, (robot.side, robot.side, 3), np.uint8) for name in robot.cameras}
        state = np.random.default_rng(number).uniform(-0.9, 0.9, robot.width).astype(np.float32)
        noise = np.random.default_rng(5).standard_normal((CHUNK, WIDTH), np.float32)
        begun = time.perf_counter()
        actions = act(pictures, state, noise)
        seconds[part] = time.perf_counter() - begun
        assert actions.shape == (CHUNK, robot.width)
        assert np.isfinite(actions).all()
    return {**seconds, "rss": peak_rss(), "actions": actions.tolist()}
