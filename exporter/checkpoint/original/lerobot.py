"""The files of a policy of LeRobot beside its weights: cameras, statistics, and the steps around the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vtx.exporter.checkpoint.hub import checkpoint_files
from vtx.exporter.checkpoint.loader import MAX_CONFIG, read_settings
from vtx.runtime.bundle.safetensors import unpack
from vtx.runtime.errors import CheckpointError, UnsupportedModelError

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
RENAMING = "rename_observations_processor"
TOKENS = "tokenizer_processor"
NORMALISING = "normalizer_processor"
RESTORING = "unnormalizer_processor"
# Steps that the runtime or the template of prompts does, or that concern tensors and devices only.
KNOWN = {
    RENAMING, TOKENS, NORMALISING, RESTORING, "to_batch_processor", "device_processor", "smolvla_new_line_processor",
    "pi0_new_line_processor", "pi05_prepare_state_tokenizer_processor_step",
}  # fmt: skip
UNUSED = {"relative_actions_processor", "absolute_actions_processor"}  # unless `enabled`


def policy_settings(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ActionSpec: cameras, widths of states and actions, statistics, and the most tokens of an instruction.

    Raises CheckpointError, UnsupportedModelError.
    """
    before = _steps(folder, BEFORE)
    after = _steps(folder, AFTER)
    inputs = _features(config, "input_features")
    outputs = _features(config, "output_features")
    names = _renamed(before.get(RENAMING, {}))
    images = [name for name, feature in inputs.items() if feature["type"] == "VISUAL" and not EMPTY.match(name)]
    if not images:
        raise CheckpointError("config.json: input_features has no camera; add its VISUAL features")
    modes = _modes(before.get(NORMALISING, {}))
    if modes.get("VISUAL", IDENTITY) != IDENTITY:
        raise UnsupportedModelError(
            f"{BEFORE}: pictures are normalised by {modes['VISUAL']!r:.40}; vtx supports {IDENTITY}"
        )
    settings = {
        "cameras": [names.get(name, name).removeprefix(IMAGES) for name in images],
        "state_width": _width(inputs, STATE),
        "actions_width": _width(outputs, ACTION),
        "instruction_tokens": before.get(TOKENS, {}).get("max_length", config.get("tokenizer_max_length")),
    }
    settings |= _statistics(folder, before.get(NORMALISING, {}), "STATE", STATE, "state", settings["state_width"])
    return settings | _statistics(
        folder, after.get(RESTORING, {}), "ACTION", ACTION, "actions", settings["actions_width"]
    )


def _steps(folder: Path, file: str) -> dict[str, dict[str, Any]]:
    """The configuration of each step of a file by the step's name, with the name of its tensors as `state_file`."""
    if not checkpoint_files(folder).exists(file):
        raise CheckpointError(
            f"{folder} has no {file}, so it is of a LeRobot before 0.4; convert it with LeRobot's "
            "migrate_policy_normalization"
        )
    steps = read_settings(folder, file).get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
        raise CheckpointError(f"{file}: steps is {steps!r:.60}, not a list of steps; download it again")
    found = dict[str, dict[str, Any]]()
    for step in steps:
        name = step.get("registry_name", step.get("class"))
        settings = step.get("config") or {}
        if not isinstance(settings, Mapping):
            raise CheckpointError(f"{file}: the configuration of {name!r:.60} is not an object; download it again")
        if name not in KNOWN and not (name in UNUSED and not settings.get("enabled")):
            raise UnsupportedModelError(f"{file}: the step {name!r:.60} is not supported by vtx; it changes actions")
        found[str(name)] = {**settings, "state_file": step.get("state_file")}
    return found


def _renamed(step: Mapping[str, Any]) -> dict[str, str]:
    """The names that a robot gives, by those of the policy."""
    names = step.get("rename_map", {})
    return {str(target): str(source) for source, target in names.items()} if isinstance(names, Mapping) else {}


def _features(config: Mapping[str, Any], key: str) -> Mapping[str, Mapping[str, Any]]:
    features = config.get(key)
    if not isinstance(features, Mapping) or not all(
        isinstance(feature, Mapping) and isinstance(feature.get("type"), str) for feature in features.values()
    ):
        raise CheckpointError(f"config.json: {key} is {features!r:.60}, not features by name; download it again")
    return features


def _width(features: Mapping[str, Mapping[str, Any]], name: str) -> int | None:
    """The numbers of a feature, None if the policy names none."""
    shape = features.get(name, {"shape": None}).get("shape")
    if shape is None:
        return None
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int or shape[0] < 1:
        raise CheckpointError(f"config.json: the shape of {name} is {shape!r:.40}, not one number; correct it")
    return shape[0]


def _modes(step: Mapping[str, Any]) -> Mapping[str, Any]:
    modes = step.get("norm_map", {})
    return modes if isinstance(modes, Mapping) else {}


def _statistics(
    folder: Path, step: Mapping[str, Any], kind: str, feature: str, field: str, width: int | None
) -> dict[str, list[float]]:
    """The statistics of a feature by their fields; none if the policy has none, as one that is to be trained further.

    Raises CheckpointError, UnsupportedModelError.
    """
    mode = _modes(step).get(kind, IDENTITY)
    if mode == IDENTITY and width is not None:
        return {f"{field}_mean": [0.0] * width, f"{field}_std": [1.0] * width}
    file = step.get("state_file")
    if file is None:
        return {}
    if mode not in MODES:
        raise UnsupportedModelError(
            f"{field} are normalised by {mode!r:.40}; vtx supports {', '.join((IDENTITY, *MODES))}"
        )
    if not isinstance(file, str) or "/" in file or not checkpoint_files(folder).exists(file):
        raise CheckpointError(f"the statistics of {field}, {file!r:.80}, are not in {folder}; download them too")
    tensors = unpack(checkpoint_files(folder).read(file, MAX_CONFIG), file, error=CheckpointError)
    values = {f"{field}_{name}": tensors.get(f"{feature}.{key}") for name, key in MODES[mode].items()}
    if all(value is None for value in values.values()):
        return {}
    numbers = dict[str, list[float]]()
    for name, value in values.items():
        if value is None or value.ndim != 1 or (width is not None and len(value) != width):
            shape = None if value is None else list(value.shape)
            raise CheckpointError(f"{file}: the statistics {name} have the shape {shape}, not [{width}]; correct it")
        numbers[name] = value.astype(float).tolist()
    return numbers
