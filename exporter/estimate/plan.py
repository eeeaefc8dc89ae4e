"""What a model will cost before anything is built: arithmetic, weights, caches, memory, and a guess at the time.

Sizes come from a table of known models, from a checkpoint's `config.json` or from a bundle; formulas from
`vtx.exporter.estimate.flops`, devices from `vtx.profiles`. `docs/plan.md` lists the assumptions and the JSON fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vtx.exporter.estimate.flops import (
    MAX_ROWS,
    calflops,
    decode_flops,
    encode_flops,
    kv_bytes,
    prefill_flops,
    total_flops,
    withdrawn_rows,
)
from vtx.exporter.estimate.sizes import ModelSize
from vtx.exporter.estimate.weights import (
    all_weights,
    head_weights,
    layer_weights,
    precisions_of,
    resident,
    stored_bytes,
    vision_weights,
)
from vtx.exporter.weights.precision import Precisions
from vtx.profiles import Figure, Profile, ProfileError, load_profile
from vtx.runtime.backends.memory import RUN_BASE
from vtx.runtime.bundle.manifest import KV_BYTES, PRECISIONS
from vtx.runtime.errors import RequestError

COMPUTE_EFFICIENCY = 0.5  # share of the peak that matrices reach
BANDWIDTH_EFFICIENCY = 0.7  # share of the bandwidth that weights and caches are read at
ESTIMATE = (
    f"an estimate, not a measurement: {COMPUTE_EFFICIENCY:.0%} of the peak arithmetic and {BANDWIDTH_EFFICIENCY:.0%} "
    "of the peak bandwidth, whichever takes longer"
)
SPREAD = 8  # rows of the table over K


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked: `text` and `vision` tokens of the prompt, and the tokens of the answer."""

    text: int
    vision: int
    new_tokens: int

    def __post_init__(self) -> None:
        if self.text < 1 or self.vision < 0 or self.new_tokens < 0 or self.slots > MAX_ROWS:
            raise RequestError(
                f"{self.text} text, {self.vision} vision and {self.new_tokens} new tokens make no prompt of 1 to "
                f"{MAX_ROWS} tokens; --sequence counts text and vision, --text what of it is no image"
            )

    @property
    def slots(self) -> int:
        return self.text + self.vision + self.new_tokens


def find_profile(name: str) -> Profile:
    """The profile called `name`.

    Raises:
        RequestError: there is none, or its file is damaged; the message lists the known ones.

    """
    try:
        return load_profile(name)
    except ProfileError as e:
        raise RequestError(str(e)) from e


def spread_ks(layers: int) -> tuple[int | None, ...]:
    """None, and some K at even distances."""
    step = max(1, layers // SPREAD)
    return (None, *(full + 1 for full in range(layers - step, 0, -step)))


def make_plan(
    model: ModelSize,
    workload: Workload,
    ks: Sequence[int | None] = (),
    precisions: Sequence[str] = PRECISIONS,
    profile: Profile | None = None,
    vision_precision: str | None = None,
    head_precision: str | None = None,
) -> dict[str, Any]:
    """The plan as plain data, ready for JSON. `ks` empty: no withdrawal and a spread of K.

    `precisions` are those of the decoder; tower and head have vtx-export's defaults beside each unless given.

    Raises:
        RequestError: a K is outside 2..layers, or a precision is none or not the tied head's.

    """
    decoder = model.decoder
    views = model.views(workload.vision)
    parts = {p: precisions_of(model, p, vision_precision, head_precision) for p in precisions}
    rows = [_depth(model, workload, views, k, parts, profile) for k in ks or spread_ks(decoder.layers)]
    return {
        "model": model.to_dict(),
        "sequence": workload.text + workload.vision,
        "text_tokens": workload.text,
        "vision_tokens": workload.vision,
        "vision_views": views,
        "max_new_tokens": workload.new_tokens,
        "parameters": model.parameters,
        "parts": {name: asdict(p) for name, p in parts.items()},
        "weights_bytes": {name: stored_bytes(all_weights(model), p) for name, p in parts.items()},
        "vision_flops": encode_flops(model.vision, views, whole=True),
        "depths": rows,
        "profile": None if profile is None else _profile(profile),
        "estimate": None if profile is None else ESTIMATE,
    }


def _depth(
    model: ModelSize,
    work: Workload,
    views: int,
    k: int | None,
    parts: Mapping[str, Precisions],
    profile: Profile | None,
) -> dict[str, Any]:
    size = model.decoder
    rows = withdrawn_rows(size.layers, k, text=work.text, vision=work.vision)
    full = withdrawn_rows(size.layers, None, text=work.text, vision=work.vision)
    total, whole = (total_flops(size, r, model.vision, views) for r in (rows, full))
    return {
        "k": k,
        "full_layers": size.layers if k is None else k - 1,
        "calflops": round(calflops(size, rows)),
        "calflops_ratio": calflops(size, rows) / calflops(size, full),
        "total_flops": total,
        "total_ratio": total / whole,
        "kv_slots": list(rows),
        "precisions": {name: _memory(model, work, views, rows, p, profile) for name, p in parts.items()},
    }


def _memory(
    model: ModelSize, work: Workload, views: int, rows: Sequence[int], precisions: Precisions, profile: Profile | None
) -> dict[str, Any]:
    element = KV_BYTES[precisions.kv_dtype]
    cache = kv_bytes(model.decoder, rows, element)
    later = sum(kv_bytes(model.decoder, [work.new_tokens] * len(rows), element))
    on_cpu = _widens(profile)
    weights = resident(model, precisions) if on_cpu else stored_bytes(all_weights(model), precisions)
    activations = activation_bytes(model, rows, views, 4 if on_cpu or precisions.decoder == "fp32" else 2)
    peak = weights + sum(cache) + later + activations + RUN_BASE
    found: dict[str, Any] = {
        "kv_bytes": sum(cache),
        "kv_bytes_per_layer": list(cache),
        "resident_weights_bytes": weights,
        "activation_bytes": activations,
        "peak_bytes": peak,
    }
    if profile is not None:
        found["fits"] = peak <= profile.usable_bytes
        found["spare_bytes"] = profile.usable_bytes - peak
        phases = latency(model, views, rows, precisions, profile)
        found["latency_ms"] = {phase: ms for phase, (ms, _) in phases.items()}
        found["bound"] = {phase: bound for phase, (_, bound) in phases.items()}
    return found


# --- memory ---------------------------------------------------------------------------------------


def activation_bytes(model: ModelSize, rows: Sequence[int], views: int, element_bytes: int) -> int:
    """The larger of prefill's and the vision graph's intermediate rows, and one row of fp32 logits.

    A layer holds two residual rows, and q, k, v and their product or the three rows of the feed-forward block;
    no square of attention scores, which fused kernels never write.
    """
    size, vision = model.decoder, model.vision
    attention = size.head_dim * (2 * size.heads + 2 * size.kv_heads)
    prefill = max(rows) * (2 * size.hidden + max(attention, 3 * size.ffn))
    encode = 0
    if vision is not None:
        encode = views * vision.rows * (2 * vision.hidden + max(4 * vision.hidden, 2 * vision.ffn))
    return element_bytes * max(prefill, encode) + 4 * size.vocab


def _widens(profile: Profile | None) -> bool:
    return profile is not None and profile.kind == "cpu"


# --- time -----------------------------------------------------------------------------------------


def latency(
    model: ModelSize, views: int, rows: Sequence[int], precisions: Precisions, profile: Profile
) -> dict[str, tuple[float, str]]:
    """Roofline estimate per phase, (ms, what bounds it), of `vision`, `prefill` and `decode_per_token`.

    Quantised weights are widened in the kernel, so the arithmetic is fp16's. Decode is one token right after
    the prompt.
    """
    size, wide = model.decoder, _widens(profile)
    peak = profile.fp32 if precisions.decoder == "fp32" or profile.fp16 is None else profile.fp16
    weights = stored_bytes([*layer_weights(size), *head_weights(size)], precisions, wide=wide)
    cache = sum(kv_bytes(size, rows, KV_BYTES[precisions.kv_dtype]))
    tower = vision_weights(model.vision) if model.vision is not None and views else ()
    work = {
        "vision": (encode_flops(model.vision, views), stored_bytes(tower, precisions, wide=wide)),
        "prefill": (prefill_flops(size, rows), weights + cache),
        "decode_per_token": (decode_flops(size, rows), weights + cache),
    }
    return {phase: _roofline(flops, read, peak, profile.bandwidth) for phase, (flops, read) in work.items()}


def _roofline(flops: int, read: int, peak: Figure, bandwidth: Figure) -> tuple[float, str]:
    compute = flops / (peak.value * 1e12 * COMPUTE_EFFICIENCY) * 1e3
    memory = read / (bandwidth.value * 1e9 * BANDWIDTH_EFFICIENCY) * 1e3
    return max(compute, memory), "compute" if compute > memory else "memory"


def _profile(profile: Profile) -> dict[str, Any]:
    figures = ("memory_gib", "system_gib", "bandwidth", "fp32", "fp16", "int8", "int4")
    values = {name: getattr(profile, name) for name in figures}
    return {
        "name": profile.name,
        "power_mode": profile.power_mode,
        "usable_bytes": profile.usable_bytes,
        "figures": {n: None if f is None else {"value": f.value, "source": f.source} for n, f in values.items()},
    }
