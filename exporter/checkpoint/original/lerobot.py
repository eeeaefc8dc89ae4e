"""The files of a policy of LeRobot beside its weights: cameras, statistics, and the steps around the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtx.exporter.checkpoint.hub import checkpoint_files
from vtx.exporter.checkpoint.settings import MAX_CONFIG, read_settings
from vtx.runtime.bundle.safetensors import unpack
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.runtime.strict import Strict, optional

BEFORE = "policy_preprocessor.json"
AFTER = "policy_postprocessor.json"
STATE = "observation.state"
ACTION = "action"
IMAGES = "observation.images."
EMPTY = re.compile(r"^observation\.images\.empty_camera_\d+$")
# The statistics of a mode of normalisation, by the names of their fields in ActionSpec.
MODES: Mapping[str, Mapping[str, str]] = {
    "MEAN_STD": {"mean": "mean", "std": "std"},
    "MIN_MAX": {"low": "min", "high": "max"},
    "QUANTILES": {"low": "q01", "high": "q99"},
    "QUANTILE10": {"low": "q10", "high": "q90"},
}
IDENTITY = "IDENTITY"
# Steps that the runtime or the template of prompts does, or that concern tensors and devices only.
KNOWN = {
    "rename_observations_processor", "tokenizer_processor", "normalizer_processor", "unnormalizer_processor",
    "to_batch_processor", "device_processor", "smolvla_new_line_processor", "pi0_new_line_processor",
    "pi05_prepare_state_tokenizer_processor_step",
}  # fmt: skip
UNUSED = {"relative_actions_processor", "absolute_actions_processor"}  # unless `enabled`


@dataclass(frozen=True, slots=True)
class Feature:
    """A camera's picture, a state or an action."""

    type: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise CheckpointError(f"config.json: the shape of a feature is {list(self.shape)}; correct it")


@dataclass(frozen=True, slots=True)
class PolicyFeatures:
    """The inputs and outputs in config.json."""

    input_features: dict[str, Feature]
    output_features: dict[str, Feature]


@dataclass(frozen=True, slots=True)
class StepConfig:
    """The settings of a step that vtx reads, whichever step it is."""

    rename_map: dict[str, str] | None = optional(None)
    norm_map: dict[str, str] | None = optional(None)
    max_length: int | None = optional(None)
    enabled: bool = optional(False)


@dataclass(frozen=True, slots=True)
class PolicyStep:
    """A step before or after the model; `state_file` has its tensors."""

    registry_name: str | None = optional(None)
    config: StepConfig = optional(StepConfig())
    state_file: str | None = optional(None)


@dataclass(frozen=True, slots=True)
class PolicySteps:
    """The contents of a file of steps."""

    steps: tuple[PolicyStep, ...]


class _PolicyFiles(Strict):
    def unknown(self, where: str, name: str) -> None:
        """Other keys are LeRobot's."""


READER = _PolicyFiles(CheckpointError, "download it again")


def policy_settings(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ActionSpec: cameras, widths of states and actions, statistics, and the most tokens of an instruction.

    Raises CheckpointError, UnsupportedModelError.
    """
    policy = READER.read(PolicyFeatures, config, "config.json")
    before = _steps(folder, BEFORE)
    normalising = before.get("normalizer_processor", PolicyStep())
    mode = (normalising.config.norm_map or {}).get("VISUAL", IDENTITY)
    if mode != IDENTITY:
        raise UnsupportedModelError(f"{BEFORE}: pictures are normalised by {mode!r:.40}; vtx supports {IDENTITY}")
    renaming = before.get("rename_observations_processor", PolicyStep())
    names = {target: source for source, target in (renaming.config.rename_map or {}).items()}
    images = [n for n, feature in policy.input_features.items() if feature.type == "VISUAL" and not EMPTY.match(n)]
    if not images:
        raise CheckpointError("config.json: input_features has no camera; add its VISUAL features")
    restoring = _steps(folder, AFTER).get("unnormalizer_processor", PolicyStep())
    state = policy.input_features.get(STATE)
    return {
        "cameras": [names.get(name, name).removeprefix(IMAGES) for name in images],
        "state_width": None if state is None else state.shape[0],
        "instruction_tokens": before.get("tokenizer_processor", PolicyStep()).config.max_length,
        **_statistics(folder, normalising, "state", STATE, state),
        **_statistics(folder, restoring, "actions", ACTION, policy.output_features.get(ACTION)),
    }


def _steps(folder: Path, file: str) -> dict[str | None, PolicyStep]:
    """The steps of a file by their names. Raises CheckpointError, UnsupportedModelError."""
    if not checkpoint_files(folder).exists(file):
        raise CheckpointError(
            f"{folder} has no {file}, so it is of a LeRobot before 0.4; convert it with LeRobot's "
            "migrate_policy_normalization"
        )
    steps = READER.read(PolicySteps, read_settings(folder, file), file).steps
    for step in steps:
        if step.registry_name not in KNOWN and (step.registry_name not in UNUSED or step.config.enabled):
            raise UnsupportedModelError(
                f"{file}: the step {step.registry_name!r:.60} changes inputs or actions and is not supported by vtx"
            )
    return {step.registry_name: step for step in steps}


def _statistics(
    folder: Path, step: PolicyStep, field: str, name: str, feature: Feature | None
) -> dict[str, list[float]]:
    """The statistics of a feature by their fields; none if the policy has none, as one that is to be trained further.

    Raises CheckpointError, UnsupportedModelError.
    """
    mode = (step.config.norm_map or {}).get(field.removesuffix("s").upper(), IDENTITY)
    if mode == IDENTITY and feature is not None:
        return {f"{field}_mean": [0.0] * feature.shape[0], f"{field}_std": [1.0] * feature.shape[0]}
    file = step.state_file
    if file is None:
        return {}
    if mode not in MODES:
        raise UnsupportedModelError(f"{field} are normalised by {mode!r:.40}; vtx supports {', '.join(MODES)}")
    if "/" in file or not checkpoint_files(folder).exists(file):
        raise CheckpointError(f"the statistics of {field}, {file!r:.80}, are not in {folder}; download them too")
    tensors = unpack(checkpoint_files(folder).read(file, MAX_CONFIG), file, error=CheckpointError)
    numbers = dict[str, list[float]]()
    for kind, key in MODES[mode].items():
        value = tensors.get(f"{name}.{key}")
        shape = None if value is None else value.shape
        if value is None or (feature is not None and shape != feature.shape):
            wanted = None if feature is None else list(feature.shape)
            raise CheckpointError(f"{file}: {name}.{key} has the shape {shape}, not {wanted}; correct it")
        numbers[f"{field}_{kind}"] = value.astype(float).tolist()
    return numbers
