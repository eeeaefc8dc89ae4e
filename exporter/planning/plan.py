"""What a model will cost before anything is built: arithmetic, weights, caches, memory, and a guess at the time.

Sizes come from a table of known models, from a checkpoint's `config.json` or from a bundle; formulas from
`vtx.runtime.flops`, devices from `vtx.profiles`. `docs/plan.md` lists the assumptions and the JSON fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vtx.exporter.planning.sizes import ModelSize
from vtx.profiles import Figure, Profile, ProfileError, load_profile
from vtx.runtime.errors import RequestError
from vtx.runtime.flops import (
    MAX_ROWS,
    DecoderSize,
    calflops,
    decode_flops,
    encode_flops,
    kv_bytes,
    prefill_flops,
    total_flops,
    withdrawn_rows,
)

PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int4")
FULL_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 2, "int4": 2}  # of what is not quantised, and of K and V
INT4_BLOCK = 32  # weights that share one scale; an int8 matrix has one scale a row
SCALE_BYTES = 2
RUNTIME_BYTES = 110 << 20  # interpreter, libraries and tokenizer, measured with onnxruntime on a CPU
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
) -> dict[str, Any]:
    """The plan as plain data, ready for JSON. `ks` empty: no withdrawal and a spread of K.

    Raises:
        RequestError: a K is outside 2..layers.

    """
    decoder = model.decoder
    views = model.views(workload.vision)
    rows = [_depth(model, workload, views, k, precisions, profile) for k in ks or spread_ks(decoder.layers)]
    return {
        "model": model.to_dict(),
        "sequence": workload.text + workload.vision,
        "text_tokens": workload.text,
        "vision_tokens": workload.vision,
        "vision_views": views,
        "max_new_tokens": workload.new_tokens,
        "parameters": model.parameters,
        "weights_bytes": {p: weight_bytes(model, p) for p in precisions},
        "vision_flops": encode_flops(model.vision, views, whole=True),
        "depths": rows,
        "profile": None if profile is None else _profile(profile),
        "estimate": None if profile is None else ESTIMATE,
    }


def _depth(
    model: ModelSize, work: Workload, views: int, k: int | None, precisions: Sequence[str], profile: Profile | None
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
        "precisions": {p: _memory(model, work, views, rows, p, profile) for p in precisions},
    }


def _memory(
    model: ModelSize, work: Workload, views: int, rows: Sequence[int], precision: str, profile: Profile | None
) -> dict[str, Any]:
    cache = kv_bytes(model.decoder, rows, FULL_BYTES[precision])
    later = sum(kv_bytes(model.decoder, [work.new_tokens] * len(rows), FULL_BYTES[precision]))
    weights = weight_bytes(model, precision, expanded=_expands(profile))
    activations = activation_bytes(model, rows, views, 4 if _expands(profile) else FULL_BYTES[precision])
    peak = weights + sum(cache) + later + activations + RUNTIME_BYTES
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
        phases = latency(model, views, rows, precision, profile)
        found["latency_ms"] = {phase: ms for phase, (ms, _) in phases.items()}
        found["bound"] = {phase: bound for phase, (_, bound) in phases.items()}
    return found


# --- memory ---------------------------------------------------------------------------------------


def weight_bytes(model: ModelSize, precision: str, *, expanded: bool = False) -> int:
    """Bytes of all weights. int8 and int4 are the matrices of the decoder's layers, all else is fp16 then.

    `expanded`: as onnxruntime's CPU provider holds them, fp16 and bf16 widened to fp32.
    """
    size, full = model.decoder, 4 if expanded else FULL_BYTES[precision]
    layers = size.layers * size.layer_macs
    return layer_bytes(size, precision, expanded=expanded) + (model.parameters - layers) * full


def layer_bytes(size: DecoderSize, precision: str, *, expanded: bool = False) -> int:
    """Bytes of the matrices of all decoder layers, scales included."""
    count = size.layers * size.layer_macs
    if precision == "int8":
        return count + SCALE_BYTES * size.layers * size.layer_outputs
    if precision == "int4":
        return count // 2 + SCALE_BYTES * count // INT4_BLOCK
    return count * (4 if expanded else FULL_BYTES[precision])


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


def _expands(profile: Profile | None) -> bool:
    return profile is not None and profile.kind == "cpu"


# --- time -----------------------------------------------------------------------------------------


def latency(
    model: ModelSize, views: int, rows: Sequence[int], precision: str, profile: Profile
) -> dict[str, tuple[float, str]]:
    """Roofline estimate per phase, (ms, what bounds it), of `vision`, `prefill` and `decode_per_token`.

    Quantised weights are widened in the kernel, so the arithmetic is fp16's. Decode is one token right after
    the prompt.
    """
    size, full = model.decoder, FULL_BYTES[precision]
    peak = profile.fp32 if precision == "fp32" or profile.fp16 is None else profile.fp16
    expanded = _expands(profile)
    head = size.head_macs * (4 if expanded else full)
    weights = layer_bytes(size, precision, expanded=expanded) + head
    cache = sum(kv_bytes(size, rows, full))
    encoder = 0 if model.vision is None or not views else model.vision.parameters * (4 if expanded else full)
    work = {
        "vision": (encode_flops(model.vision, views), encoder),
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
