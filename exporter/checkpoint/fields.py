"""Fields of a configuration, read strictly: numbers, and the rotary embedding with its tables of cos and sin."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.spec.model_spec import RopeSpec
from vtx.runtime.errors import CheckpointError, UnsupportedModelError

MAX_WIDTH = 1 << 20
NUMBERS = (1e-15, 1e15)  # float32 computes with these without overflow
# default numbers of frequencies by time, row and column, the last those of a part of a head
SECTIONS = (16, 24, 24)
INTERLEAVED = (24, 20, 20)
PARTIAL = (11, 11, 10)
KINDS = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional")


def size(config: Any, name: str, limit: int = MAX_WIDTH, file: str = "config.json") -> int:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise CheckpointError(f"{file}: {name} is {value!r:.60}, not a number from 1 to {limit}; correct config.json")
    return value


def number(parameters: Mapping[str, Any], name: str, default: float | None = None, file: str = "config.json") -> float:
    value = parameters.get(name, default)
    low, high = NUMBERS
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise CheckpointError(
            f"{file}: {name} is {value!r:.60}, not a number from {low:g} to {high:g}; correct config.json"
        )
    return float(value)


def check_patches(processor: Mapping[str, Any], tower: Mapping[str, int | str], kind: str = "image") -> None:
    """Raise CheckpointError if sizes that the processor of a `kind` gives are not the tower's, by the same names."""
    for name, value in tower.items():
        if processor.get(name, value) != value:
            raise CheckpointError(
                f"the {kind} processor's {name} is {processor[name]!r:.40}, the tower's is {value}; correct it"
            )


def rope_tables(rope: RopeSpec, positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cos and sin, each [positions, head_dim / 2] float32."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * np.array(rope.frequencies, np.float32)
    scale = np.float32(rope.scale)
    return np.cos(angles) * scale, np.sin(angles) * scale


def read_rope(
    config: Any,
    head_dim: int,
    *,
    three_part: bool,
    interleaved: bool = False,
    partial: bool = False,
    parameters: Mapping[str, Any] | None = None,
) -> RopeSpec:
    """The rotary embedding of a text model's parsed configuration; `interleaved`: of three parts, if it has them.

    `parameters`: those of the layers meant, of a model with several. "proportional" rotates a part of each head. So
    does any kind if `partial`, by the frequencies of a head of the size of the part; further ones are 0.
    "dynamic" (NTK by length) changes nothing up to `max_position_embeddings`, the limit of a bundle's context, and
    "longrope" up to `original_positions`. Raises
    UnsupportedModelError, CheckpointError.
    """
    parameters = dict((getattr(config, "rope_parameters", None) if parameters is None else parameters) or {})
    kind = _rope_kind(parameters, three_part=three_part)
    if kind != "proportional" and not partial and parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor is not supported; vtx rotates whole heads")
    rotated = _rotated_part(head_dim, parameters) if partial else head_dim
    rates, scale = _rates(kind, head_dim, rotated, parameters, config)
    interleaved = interleaved and three_part
    sections: tuple[int, ...] = ()
    if three_part:
        usual = SECTIONS
        if interleaved:
            usual = PARTIAL if partial else INTERLEAVED
        sections = _sections(parameters.get("mrope_section", usual), rotated)
    still = (head_dim - rotated) // 2
    if still and sections:
        sections = (sections[0] + still, *sections[1:]) if interleaved else (*sections[:-1], sections[-1] + still)
    frequencies = (*(float(r) for r in rates.astype(np.float32)), *[0.0] * still)
    return RopeSpec(kind, number(parameters, "rope_theta", 10000.0), frequencies, sections, scale, interleaved)


def _rope_kind(parameters: Mapping[str, Any], *, three_part: bool) -> str:
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    if kind not in KINDS or (three_part and kind != "default"):
        supported = "default" if three_part else ", ".join(KINDS)
        raise UnsupportedModelError(f"rope type {kind!r} is not supported; vtx supports {supported}")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedModelError("rope parameters that differ between layers are not supported")
    return kind


def _rotated_part(head_dim: int, parameters: Mapping[str, Any]) -> int:
    """The numbers of a head that are rotated."""
    rotated = int(head_dim * number(parameters, "partial_rotary_factor", 1.0))
    if not 2 <= rotated <= head_dim or rotated % 2:
        raise CheckpointError(
            f"config.json: partial_rotary_factor {parameters['partial_rotary_factor']!r:.40} rotates {rotated} "
            f"numbers of a head, not an even number from 2 to {head_dim}; correct config.json"
        )
    return rotated


def _rates(
    kind: str, head_dim: int, rotated: int, parameters: Mapping[str, Any], config: Any
) -> tuple[NDArray[np.floating[Any]], float]:
    """The frequencies [rotated / 2] of a `kind` of rotation, and the scale of cos and sin."""
    theta = number(parameters, "rope_theta", 10000.0)
    rates = 1.0 / np.float32(theta) ** (np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated))
    if kind == "proportional":
        turned = int(number(parameters, "partial_rotary_factor", 1.0) * head_dim // 2)
        return np.where(np.arange(len(rates)) < turned, rates, 0) / np.float32(number(parameters, "factor", 1.0)), 1.0
    if kind == "linear":
        return rates / np.float32(number(parameters, "factor")), 1.0
    if kind == "llama3":
        return _llama3(rates, parameters), 1.0
    if kind == "yarn":
        return _yarn(rates, theta, parameters)
    if kind == "longrope":
        original = original_positions(config)
        if original is None:
            raise UnsupportedModelError("longrope of some layers only is not supported; vtx supports it for all layers")
        return _longrope(theta, rotated, parameters, original, config.max_position_embeddings)
    return rates, 1.0


def _llama3(rates: NDArray[Any], parameters: Mapping[str, Any]) -> NDArray[Any]:
    """Long waves divided by the factor, short ones unchanged, those between blended."""
    factor, low, high = (number(parameters, n) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise CheckpointError(f"config.json: rope high_freq_factor {high} is not above low_freq_factor {low}")
    context = number(parameters, "original_max_position_embeddings")
    waves = 2 * math.pi / rates
    blend = (context / waves - low) / (high - low)
    blended = (1 - blend) * rates / factor + blend * rates
    return np.where(waves > context / low, rates / factor, np.where(waves < context / high, rates, blended))


def _sections(sections: Any, rotated: int) -> tuple[int, ...]:
    """`mrope_section`, if it divides the frequencies of a head into three."""
    numbers = isinstance(sections, list | tuple) and all(type(part) is int and part > 0 for part in sections)
    if not numbers or len(sections) != len(SECTIONS) or 2 * sum(sections) != rotated:
        raise CheckpointError(
            f"config.json: mrope_section {sections!r:.60} does not divide the {rotated // 2} frequencies of a head "
            "into three; correct config.json"
        )
    return tuple(sections)


def original_positions(config: Any) -> int | None:
    """The positions of a text model with longrope up to which it rotates by its short factors; None if it has another.

    In transformers a sequence beyond them rotates all of its tokens by the long factors, so that K in caches is void.
    """
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    if str(parameters.get("rope_type", parameters.get("type", "default"))) != "longrope":
        return None
    name = "original_max_position_embeddings"
    positions = config.max_position_embeddings
    attribute = getattr(config, name, None)  # which comes first in transformers
    return int(number(parameters if attribute is None else {name: attribute}, name, positions))


def _longrope(
    theta: float, rotated: int, parameters: Mapping[str, Any], original: int, positions: int
) -> tuple[NDArray[np.floating[Any]], float]:
    """LongRoPE's rates by the short factors, and its scale (arXiv 2402.13753)."""
    for name in ("short_factor", "long_factor"):
        factors = parameters.get(name)
        numbers = [number({name: value}, name) for value in factors] if isinstance(factors, list | tuple) else []
        if len(numbers) != rotated // 2:
            raise CheckpointError(
                f"config.json: rope {name} is {factors!r:.60}, not {rotated // 2} positive numbers; correct config.json"
            )
    factor = number(parameters, "factor", positions / original)
    scale = 1.0
    if parameters.get("attention_factor") is not None:
        scale = number(parameters, "attention_factor")
    elif factor > 1:
        if original <= 1:
            raise CheckpointError(
                f"config.json: rope original_max_position_embeddings is {original}; it must be above 1"
            )
        scale = math.sqrt(1 + math.log(factor) / math.log(original))
    powers = np.float32(theta) ** (np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated))
    return 1.0 / (np.array(parameters["short_factor"], np.float32) * powers), scale


def _yarn(
    rates: NDArray[np.floating[Any]], theta: float, parameters: Mapping[str, Any]
) -> tuple[NDArray[np.floating[Any]], float]:
    """YaRN's rates and scale (arXiv 2309.00071, section 3.2): slow pairs / factor, fast ones unchanged, a ramp between.

    A pair is fast with `beta_fast` turns or more within the original context, slow with fewer than `beta_slow` turns.
    """
    factor, context = (number(parameters, n) for n in ("factor", "original_max_position_embeddings"))
    fast = number(parameters, "beta_fast", 32.0)
    slow = number(parameters, "beta_slow", 1.0)
    if theta <= 1 or fast <= slow:
        raise CheckpointError(
            f"config.json: rope_theta {theta} must be above 1, and beta_fast {fast} above beta_slow {slow}"
        )
    pairs = len(rates)
    low, high = (pairs * math.log(context / (turns * 2 * math.pi)) / math.log(theta) for turns in (fast, slow))
    if parameters.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, 2 * pairs - 1)
    ramp = np.clip((np.arange(pairs, dtype=np.float32) - low) / ((high - low) or 0.001), 0, 1)
    growth = math.log(max(factor, 1.0))
    scale = 0.1 * growth + 1
    if parameters.get("attention_factor") is not None:
        scale = number(parameters, "attention_factor")
    elif parameters.get("mscale") and parameters.get("mscale_all_dim"):
        wide, narrow = (0.1 * number(parameters, name) * growth + 1 for name in ("mscale", "mscale_all_dim"))
        scale = wide / narrow
    return rates / np.float32(factor) * ramp + rates * (1 - ramp), scale
