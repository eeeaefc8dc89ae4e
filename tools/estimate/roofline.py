"""Time by the roofline: each phase takes the longer of the times for its arithmetic and its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vtx.runtime.bundle.spec.stored import Precisions
from vtx.runtime.host.profiles import Profile
from vtx.runtime.precision import KV_DTYPES
from vtx.tools.estimate.flops import (
    decode_flops,
    encode_flops,
    kv_bytes,
    prefill_flops,
)
from vtx.tools.estimate.sizes import ModelSize
from vtx.tools.estimate.weights import (
    head_weights,
    layer_weights,
    stored_bytes,
    vision_weights,
)

COMPUTE_EFFICIENCY = 0.5  # share of the peak that matrices reach
BANDWIDTH_EFFICIENCY = 0.7  # share of the bandwidth that weights and caches are read at
ESTIMATE = (
    f"an estimate, not a measurement: {COMPUTE_EFFICIENCY:.0%} of the peak arithmetic and {BANDWIDTH_EFFICIENCY:.0%} "
    "of the peak bandwidth, whichever takes longer"
)


@dataclass(frozen=True, slots=True)
class Phase:
    """The roofline estimate of one phase of an answer; `bound` is "compute" or "memory"."""

    ms: float
    bound: str


def widens(profile: Profile | None) -> bool:
    """True if half-precision weights count as float32, as onnxruntime's CPU provider holds them."""
    return profile is not None and profile.kind == "cpu"


def latency(
    model: ModelSize, views: int, schedule: Sequence[int], precisions: Precisions, profile: Profile
) -> dict[str, Phase]:
    """Roofline estimate of each phase: `vision`, `prefill` and `decode_per_token`.

    Quantised weights are widened in the kernel, so the arithmetic is fp16's. Decode is one token right after
    the prompt.
    """
    size, wide = model.decoder, widens(profile)
    peak = profile.fp32 if precisions.decoder == "fp32" or profile.fp16 is None else profile.fp16
    weights = stored_bytes([*layer_weights(size), *head_weights(size)], precisions, wide=wide)
    cache = sum(kv_bytes(size, schedule, KV_DTYPES[precisions.kv_dtype].bytes))
    tower = vision_weights(model.vision) if model.vision is not None and views else ()
    work = {
        "vision": (encode_flops(model.vision, views), stored_bytes(tower, precisions, wide=wide)),
        "prefill": (prefill_flops(size, schedule), weights + cache),
        "decode_per_token": (decode_flops(size, schedule), weights + cache),
    }
    phases = dict[str, Phase]()
    for phase, (flops, read) in work.items():
        compute = flops / (peak.value * 1e12 * COMPUTE_EFFICIENCY) * 1e3
        memory = read / (profile.bandwidth.value * 1e9 * BANDWIDTH_EFFICIENCY) * 1e3
        phases[phase] = Phase(max(compute, memory), "compute" if compute > memory else "memory")
    return phases
