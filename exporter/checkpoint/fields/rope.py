"""Rotary embeddings as configurations state them: the frequencies of each kind, and the tables of cos and sin."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.checkpoint.fields.numbers import number
from vtx.runtime.errors import CheckpointError, UnsupportedModelError

SECTIONS = (16, 24, 24)  # of the frequencies, by time, row and column, where the configuration does not say
KINDS = ("default", "linear", "llama3", "yarn", "dynamic")
Rates = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: `inverse_frequencies` [head_dim / 2] float32.

    `sections`: how many of them turn by a position's time, its row and its column; empty where it is one number.
    `scale`: what cos and sin are multiplied by.
    """

    kind: str
    theta: float
    inverse_frequencies: tuple[float, ...]
    sections: tuple[int, ...] = ()
    scale: float = 1.0

    def tables(self, positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cos and sin, each [positions, head_dim / 2] float32."""
        rates = np.array(self.inverse_frequencies, np.float32)
        angles = np.arange(positions, dtype=np.float32)[:, None] * rates
        scale = np.float32(self.scale)
        return np.cos(angles) * scale, np.sin(angles) * scale


def read_rope(config: Any, head_dim: int, *, three_part: bool) -> Rope:
    """The rotary embedding of a text model's parsed configuration.

    "dynamic" (NTK by length) changes nothing up to `max_position_embeddings`, where a bundle's context ends.

    Raises:
        UnsupportedModelError: another kind, other frequencies in some layers, or heads rotated in part.
        CheckpointError: a number that is missing or makes no sense.

    """
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    if kind not in KINDS or (three_part and kind != "default"):
        known = "default" if three_part else ", ".join(KINDS)
        raise UnsupportedModelError(f"rope type {kind!r} is not supported; vtx knows {known}")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedModelError("rope parameters that differ between layers are not supported")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor is not supported; vtx rotates whole heads")
    theta = number(parameters, "rope_theta", 10000.0)
    rates = 1.0 / np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    scale = 1.0
    if kind == "linear":
        rates = rates / np.float32(number(parameters, "factor"))
    if kind == "llama3":
        rates = _llama3(rates, parameters)
    if kind == "yarn":
        rates, scale = _yarn(rates, theta, parameters), _yarn_scale(parameters)
    sections = _sections(parameters, head_dim) if three_part else ()
    return Rope(kind, theta, tuple(float(r) for r in rates.astype(np.float32)), sections, scale)


def _sections(parameters: Mapping[str, Any], head_dim: int) -> tuple[int, ...]:
    stated = parameters.get("mrope_section", SECTIONS)
    numbers = isinstance(stated, list | tuple) and all(type(part) is int and part > 0 for part in stated)
    if not numbers or len(stated) != len(SECTIONS) or 2 * sum(stated) != head_dim:
        raise CheckpointError(
            f"config.json: mrope_section {stated!r:.60} does not part the {head_dim // 2} frequencies of a head in "
            "three; correct config.json"
        )
    return tuple(stated)


def _llama3(rates: Rates, parameters: Mapping[str, Any]) -> Rates:
    """Llama 3's rescaling: long waves divided by the factor, short ones kept, those between blended."""
    factor, low, high = (number(parameters, n) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise CheckpointError(f"config.json: rope high_freq_factor {high} is not above low_freq_factor {low}")
    context = number(parameters, "original_max_position_embeddings")
    waves = 2 * math.pi / rates
    blend = (context / waves - low) / (high - low)
    blended = (1 - blend) * rates / factor + blend * rates
    return np.where(waves > context / low, rates / factor, np.where(waves < context / high, rates, blended))


def _yarn(rates: Rates, theta: float, parameters: Mapping[str, Any]) -> Rates:
    """YaRN (arXiv 2309.00071, section 3.2): slow pairs are slowed by the factor, fast ones kept, a ramp between.

    A pair is fast where it turns `beta_fast` times or more within the original context, slow below `beta_slow` times.
    """
    factor, context = (number(parameters, n) for n in ("factor", "original_max_position_embeddings"))
    fast, slow = number(parameters, "beta_fast", 32.0), number(parameters, "beta_slow", 1.0)
    if theta <= 1 or fast <= slow:
        raise CheckpointError(
            f"config.json: rope_theta {theta} must be above 1, and beta_fast {fast} above beta_slow {slow}"
        )
    pairs = len(rates)
    low, high = (pairs * math.log(context / (turns * 2 * math.pi)) / math.log(theta) for turns in (fast, slow))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp: Rates = np.clip((np.arange(pairs, dtype=np.float32) - low) / ((high - low) or 0.001), 0, 1)
    return rates / np.float32(factor) * ramp + rates * (1 - ramp)


def _yarn_scale(parameters: Mapping[str, Any]) -> float:
    if parameters.get("attention_factor") is not None:
        return number(parameters, "attention_factor")
    growth = math.log(max(number(parameters, "factor"), 1.0))
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        wide, narrow = (0.1 * number(parameters, name) * growth + 1 for name in ("mscale", "mscale_all_dim"))
        return wide / narrow
    return 0.1 * growth + 1
