"""The shared parts of LeRobot's policies: the expert's record, and settings that change actions beyond vtx."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from vtx.exporter.checkpoint.config import check_values
from vtx.exporter.checkpoint.families.pi0 import expert_spec
from vtx.exporter.checkpoint.family import Config, ImageProcessor
from vtx.exporter.checkpoint.fields import size
from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.runtime.bundle.spec.action_spec import ActionSpec

# Settings whose other values are not supported.
ADJUSTED: Mapping[str, tuple[Any, ...]] = {
    "use_relative_actions": (None, False),
    "adapt_to_pi_aloha": (None, False),
    "use_delta_joint_actions_aloha": (None, False),
}
_SIZES = {"chunk_size": 50, "max_state_dim": 32, "max_action_dim": 32, "min_period": 4e-3, "max_period": 4.0}
_STATISTICS = [f"{what}_{kind}" for what in ("state", "actions") for kind in ("mean", "std", "low", "high")]
# The picture is resized as PyTorch does it, in numbers, and black surrounds it.
_DEFAULTS = {
    "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "resample": 2,
    "do_pad": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip


def processor(name: str, place: str) -> ImageProcessor:
    """The processor of pictures that keep their shape; `place` is the field of ImageSettings that says where."""
    return ImageProcessor(name, _DEFAULTS, within=True, placed={place: True, "interpolated": True})


def square(side: Any) -> Config:
    """The settings of an image processor for a square of a side, or of [height, width]."""
    height, width = side if isinstance(side, list) and len(side) == 2 else (side, side)
    return {
        "size": {"max_height": height, "max_width": width},
        "pad_size": {"height": height, "width": width},
    }


def action_spec(config: Config, expert: TextConfig, **flags: Any) -> ActionSpec:
    """The expert of a policy, with the cameras and statistics of its files if they were read.

    Raises CheckpointError, UnsupportedModelError.
    """
    check_values(config, "a LeRobot", ADJUSTED)
    policy = SimpleNamespace(**{**_SIZES, **config})
    stated = config.get("policy", {})
    statistics: dict[str, Any] = {name: tuple(stated[name]) for name in _STATISTICS if name in stated}
    width = size(policy, "max_state_dim")
    if flags["state_in"] == "text" and stated.get("state_width"):
        width = stated["state_width"]
    return expert_spec(
        expert,
        policy,
        "the policy",
        state=width,
        cameras=tuple(stated.get("cameras", ())),
        absent_cameras=True,
        instruction_tokens=stated.get("instruction_tokens"),
        **statistics,
        **flags,
    )
