"""Tiny checkpoints of LeRobot's policies, in the files that its own code wrote, and what its own code makes of them.

`lerobot.json` has these files and actions; `lerobot_vectors.py` wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.families.paligemma import PALIGEMMA
from tests.support.families.smolvlm import SMOLVLM
from tests.support.json_files import read_json, write_json
from tests.support.tiny import Tiny, make, random_tensor
from tests.support.tiny_tokenizer import write_tokenizer

POLICIES = ("smolvla", "pi05", "pi0")
TINY: dict[str, Tiny] = {
    "smolvla": replace(SMOLVLM, layers=6, theta=100_000.0),
    "pi05": replace(PALIGEMMA, layers=4),
    "pi0": replace(PALIGEMMA, layers=4),
}
EXPERT = {"hidden_size": 32, "intermediate_size": 48}  # of pi0 and pi0.5, all else as the decoder
WORDS = "red_square left"


@cache
def recorded() -> dict[str, Any]:
    """What LeRobot's code wrote, by policy."""
    return read_json(Path(__file__).with_suffix(".json"))


def weight(name: str, shape: list[int]) -> np.ndarray:
    """A weight of a tiny checkpoint by the name in its file, whichever policy it is of."""
    if ".dense." in name:
        return random_tensor(name.replace("norm", "modulation"), tuple(shape), 0)
    value = random_tensor(name, tuple(shape), 0)
    of_gemma = "paligemma_with_expert" in name and "vision_tower" not in name and name.endswith("norm.weight")
    return value - 1 if of_gemma else value


def make_base(folder: Path, tiny: Tiny) -> Path:
    """The checkpoint that a policy names: a SmolVLM2, or a tokenizer and sizes of PaliGemma."""
    if tiny.family == "smolvlm":
        return make(folder, tiny)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, tiny)
    tokenizer = read_json(folder / "tokenizer.json")
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}  # as Gemma's
    write_json(folder / "tokenizer.json", tokenizer)
    settings = read_json(folder / "tokenizer_config.json")
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "config.json", {"model_type": "paligemma"})
    return folder


def make_policy(folder: Path, policy: str) -> Path:
    """The checkpoint as LeRobot's code saved it, with the folder of the model that it names inside."""
    from safetensors.numpy import save_file

    files = recorded()[policy]
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files["settings"].items():
        write_json(folder / name, content)
    for name, tensors in files["statistics"].items():
        save_file({n: np.array(v, np.float32) for n, v in tensors.items()}, folder / name)
    save_file({n: weight(n, s) for n, s in files["tensors"].items()}, folder / "model.safetensors")
    make_base(folder / files["base"], TINY[policy])
    return folder


def make_pi_tiny(monkeypatch: pytest.MonkeyPatch, tiny: Tiny = TINY["pi0"], expert: Mapping[str, int] = EXPERT) -> None:
    """PaliGemma's sizes and its expert's, which are LeRobot's own and in no file, made tiny."""
    from vtx.exporter.checkpoint.families.lerobot import pi

    sizes = {
        "hidden_size": tiny.hidden, "intermediate_size": tiny.ffn, "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads, "num_key_value_heads": tiny.kv_heads, "head_dim": tiny.head_dim,
    }  # fmt: skip
    tower = {
        "hidden_size": tiny.vision_hidden, "intermediate_size": tiny.vision_ffn,
        "num_hidden_layers": tiny.vision_layers, "num_attention_heads": tiny.vision_heads, "patch_size": tiny.patch,
    }  # fmt: skip
    monkeypatch.setattr(pi, "VOCAB", tiny.vocab - 1)
    monkeypatch.setattr(pi, "DECODERS", {"gemma_2b": sizes, "gemma_300m": {**sizes, **expert}})
    monkeypatch.setattr(pi, "TOWER", {**pi.TOWER, **tower})
