"""The cost of a model before anything is built: arithmetic, weights, caches, memory, and an estimate of the time.

Sizes come from a table of known models, from a checkpoint's `config.json` or from a bundle; formulas from
`vtx.tools.estimate.flops`, devices from `vtx.profiles`. `docs/how-to/plan.md` lists the assumptions and the fields of
the JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from vtx.runtime.backends.engines import ENGINES, EXPANDED, WIDEST_VIEW, EngineCost
from vtx.runtime.backends.slots import GROWTH
from vtx.runtime.bundle.spec.stored import Precisions
from vtx.runtime.errors import RequestError, UnsupportedModelError
from vtx.runtime.host.profiles import Figure, Profile
from vtx.runtime.policies.base import Reduction
from vtx.runtime.policies.make import check_depth, check_layout, check_patches
from vtx.runtime.policies.methods.withdraw import Rest, WithdrawToRest
from vtx.runtime.policies.spec import to_spec
from vtx.runtime.precision import KV_DTYPES, PRECISIONS
from vtx.runtime.vision.layouts.budget import TokenBudget
from vtx.runtime.vision.layouts.native import Native
from vtx.tools.estimate import flops, weights
from vtx.tools.estimate.sizes import ModelSize
from vtx.tools.estimate.vision import VisionSize
from vtx.tools.model.decoder import Decoder

SPREAD = 8  # rows of the table over K
COMPUTE_EFFICIENCY = 0.5  # share of the peak that matrices reach
BANDWIDTH_EFFICIENCY = 0.7  # share of the bandwidth that weights and caches are read at
ESTIMATE = (
    f"an estimate, not a measurement: {COMPUTE_EFFICIENCY:.0%} of the peak arithmetic and {BANDWIDTH_EFFICIENCY:.0%} "
    "of the peak bandwidth, whichever takes longer"
)


@dataclass(frozen=True, slots=True)
class Reduced:
    """`vision_tokens` of each layer; `assumed` has a sentence for each method whose numbers depend on the data.

    `image_ratio`: FLOPs of a prompt of these alone in the decoder's layers, over those without a method; `paper_ratio`
    as the method's paper counts them, if that differs. `ahead`: layers that a method also runs over the tokens before
    some leave there.
    """

    spec: str
    vision_tokens: tuple[int, ...]
    assumed: tuple[str, ...]
    image_ratio: float = 1.0
    paper_ratio: float | None = None
    ahead: tuple[int, ...] = ()


def _check_tower(parts: Sequence[Reduction], model: ModelSize) -> None:
    """Raise RequestError, UnsupportedModelError for a reduction that the tower or the layout does not allow."""
    tower = model.vision
    if tower is None and parts:
        raise UnsupportedModelError(f"{parts[0].name} leaves out image tokens, and {model.name} sees no images")
    if tower is not None:
        side = round((tower.patches / tower.view_tokens) ** 0.5)
        shape = tower.model.vision
        for part in parts:
            check_patches(part, side, class_token=shape.class_token, two_towers=shape.several)
    if model.layout is not None:
        check_layout(parts, model.layout)


def _token_counts(parts: Sequence[Reduction], layers: int, vision: int, views: int) -> tuple[list[int], list[str]]:
    """The tokens in each layer, and the methods of which only the picture tells how many they drop."""
    counts = list[int]()
    count = vision
    unknown = dict[str, None]()
    for layer in range(1, layers + 1):
        for part in parts:
            if layer in part.needs().cuts or (layer == 1 and part.entry() is not None):
                share = views if part.per_view else 1
                number = part.number_kept((counts[0] if part.of_entered else count) // share, layer)
                if number is None:
                    unknown[part.name] = None
                else:
                    count = min(count, number * share)
        counts.append(count)
    return counts, [*unknown]


def reduce_counts(parts: Sequence[Reduction], model: ModelSize, vision: int, views: int = 1) -> Reduced:
    """The tokens of one image of `vision` tokens, of `views` views, in each layer, in the runtime's order of methods.

    Raises RequestError, UnsupportedModelError.
    """
    check_depth(parts, model.decoder.layers)
    _check_tower(parts, model)
    counts, unknown = _token_counts(parts, model.decoder.layers, vision, views)
    assumed = tuple(
        f"{name}: how many tokens leave depends on the picture and the question; counted as if none left, the "
        "upper limit"
        for name in unknown
    )
    size = model.decoder
    full = flops.with_exit(model.decoder, [vision] * len(counts))
    ahead = tuple(sorted(layer for part in parts for layer in part.needs().ahead))
    macs = flops.decoder_macs(size, flops.with_exit(size, counts)) + flops.ahead_flops(size, counts, ahead, text=0) // 2
    ratio = macs / max(1, flops.decoder_macs(size, full))
    fewer = parts[0].paper_layers if len(parts) == 1 and parts[0].needs().cuts else None
    paper = None
    if fewer is not None:
        runs, whole = (
            flops.decoder_macs(size, tokens) - sum(tokens) * size.hidden * size.ffn
            for tokens in ([*counts[fewer:], *counts[-1:] * fewer], full)
        )
        paper = runs / max(1, whole)
    return Reduced(to_spec(parts), tuple(counts), assumed, ratio, paper, ahead)


@dataclass(frozen=True, slots=True)
class Phase:
    """The roofline estimate of one phase of an answer; `bound` is "compute" or "memory"."""

    ms: float
    bound: str


IDEAL = EngineCost()


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A prompt: `views` of images, the tokens in each layer, and `again`, FLOPs of layers that run some twice.

    `new_tokens`: those of its answer; `batch`: conversations that a GPU decodes together.
    """

    views: int
    schedule: Sequence[int]
    again: int = 0
    new_tokens: int = 0
    batch: int = 1


def latency(
    model: ModelSize,
    prompt: PlannedPrompt,
    precisions: Precisions,
    profile: Profile,
    engine: EngineCost = IDEAL,
    read: int | None = None,
) -> dict[str, Phase]:
    """Roofline estimate of each phase: `vision`, `prefill` and `decode_per_token`.

    Of a model that acts `expert` is the last one, all of its steps.

    Quantised weights are widened in the kernel, so the arithmetic is fp16's. Decode is one token right after
    the prompt, which reads `read` bytes of K/V [default: those of the schedule].
    """
    size = model.decoder
    views = prompt.views
    schedule = prompt.schedule
    again = prompt.again
    wide = engine.floats == EXPANDED
    exact = engine.wide or PRECISIONS[precisions.decoder].arithmetic == "float32"
    peak = profile.fp32 if exact or profile.fp16 is None else profile.fp16
    matrices = weights.token_bytes(model, precisions, wide, int8=engine.int8)
    prompt_bytes = matrices
    if size.mixture:
        prompt_bytes = weights.token_bytes(model, precisions, wide, max(schedule), engine.int8)
    cache = sum(flops.kv_bytes(size, schedule, KV_DTYPES[precisions.kv_dtype].bytes))
    tower = weights.vision_weights(model.vision) if model.vision is not None and views else ()
    vision_bytes = weights.stored_bytes(tower, precisions, wide=wide, int8=engine.int8)
    work = {
        "vision": (flops.encode_flops(model.vision, views), vision_bytes),
        "prefill": (flops.prefill_flops(size, schedule) + again, prompt_bytes + cache),
        "decode_per_token": (flops.decode_flops(size, schedule), matrices + (cache if read is None else read)),
    }
    if model.action is not None:  # no token follows; the expert reads its weights, and K and V, in each of its steps
        own = model.action.beside(size)
        action = model.action
        del work["decode_per_token"]
        layers = weights.stored_bytes(weights.layer_weights(size), precisions, wide=wide)
        work["prefill"] = 2 * flops.decoder_macs(size, schedule) + again, layers + cache  # without the output matrix
        rows = action.rows * own.macs_of(own.every)
        seen = sum(
            flops.attention_macs(own, action.rows, slots + action.rows, n) for n, slots in enumerate(schedule, 1)
        )
        once = weights.stored_bytes(weights.expert_weights(action, size), precisions, wide=wide) + cache
        work["expert"] = 2 * action.steps * (rows + seen), action.steps * once
    phases = dict[str, Phase]()
    for phase, (operations, read) in work.items():
        compute = operations / (peak.value * 1e12 * COMPUTE_EFFICIENCY) * 1e3
        memory = read / (profile.bandwidth.value * 1e9 * BANDWIDTH_EFFICIENCY) * 1e3
        phases[phase] = Phase(max(compute, memory), "compute" if compute > memory else "memory")
    return phases


@dataclass(frozen=True, slots=True)
class Workload:
    """A question: `text`, `vision` and the answer's tokens; `views`: passes of the tower, None: of whole images.

    `batch`: conversations that a GPU decodes together.
    """

    text: int
    vision: int
    new_tokens: int
    views: int | None = None
    batch: int = 1

    def __post_init__(self) -> None:
        if self.text < 1 or self.vision < 0 or self.new_tokens < 0 or self.slots > flops.MAX_TOKENS:
            raise RequestError(
                f"{self.text} text, {self.vision} vision and {self.new_tokens} new tokens are outside the limits "
                f"(1 text token at least, {flops.MAX_TOKENS} tokens in all); "
                "--sequence counts text and vision tokens, --text the text tokens alone"
            )

    @property
    def slots(self) -> int:
        return self.text + self.vision + self.new_tokens


@dataclass(frozen=True, slots=True)
class PrecisionCost:
    """Memory of one precision at one K; on a device also `phases`, and `spare_bytes`, negative if it does not fit.

    `hertz`: actions a second of a model that acts, all pictures being new.
    `kv_bytes_per_layer` are those of the prompt, `kv_held_bytes` all that the engine sets aside for prompt and answer.
    """

    kv_bytes_per_layer: tuple[int, ...]
    kv_held_bytes: int
    resident_weights_bytes: int
    activation_bytes: int
    peak_bytes: int
    spare_bytes: int | None = None
    phases: Mapping[str, Phase] | None = None
    hertz: float | None = None

    @property
    def kv_bytes(self) -> int:
        return sum(self.kv_bytes_per_layer)

    @property
    def fits(self) -> bool | None:
        return None if self.spare_bytes is None else self.spare_bytes >= 0

    def to_dict(self) -> dict[str, Any]:
        named = (
            "kv_bytes",
            "kv_bytes_per_layer",
            "kv_held_bytes",
            "resident_weights_bytes",
            "activation_bytes",
            "peak_bytes",
        )
        values: dict[str, Any] = {name: getattr(self, name) for name in named}
        if self.phases is not None:
            values |= {"fits": self.fits, "spare_bytes": self.spare_bytes}
            values["latency_ms"] = {name: phase.ms for name, phase in self.phases.items()}
            values["bound"] = {name: phase.bound for name, phase in self.phases.items()}
            values |= {} if self.hertz is None else {"hertz": self.hertz}
        return values


@dataclass(frozen=True, slots=True)
class DepthCost:
    """Cost at one K (None: no withdrawal): arithmetic of the prompt in FLOPs and as a share of K = none's.

    `rest`: image tokens that stay from K on.
    """

    k: int | None
    rest: int
    full_layers: int
    calflops: int
    calflops_ratio: float
    total_flops: int
    total_ratio: float
    kv_slots: tuple[int, ...]
    precisions: Mapping[str, PrecisionCost]

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"precisions": {name: cost.to_dict() for name, cost in self.precisions.items()}}


@dataclass(frozen=True, slots=True)
class CostPlan:
    """The cost of a model for a workload, per K and precision; `reduced` is None without a reduction."""

    model: ModelSize
    workload: Workload
    vision_views: int
    parts: Mapping[str, Precisions]
    weights_bytes: Mapping[str, int]
    vision_flops: int
    depths: tuple[DepthCost, ...]
    profile: Profile | None
    reduced: Reduced | None = None

    def to_dict(self) -> dict[str, Any]:
        profile: dict[str, Any] | None = None
        if self.profile is not None:
            named = ("memory_gib", "system_gib", "bandwidth", "fp32", "fp16", "int8", "int4")
            figures: dict[str, Figure | None] = {name: getattr(self.profile, name) for name in named}
            profile = {name: getattr(self.profile, name) for name in ("name", "power_mode", "usable_bytes")}
            profile["figures"] = {name: figure and asdict(figure) for name, figure in figures.items()}
        return {
            "model": self.model.to_dict(),
            "sequence": self.workload.text + self.workload.vision,
            "text_tokens": self.workload.text,
            "vision_tokens": self.workload.vision,
            "vision_views": self.vision_views,
            "reduced": None if self.reduced is None else asdict(self.reduced),
            "max_new_tokens": self.workload.new_tokens,
            "batch": self.workload.batch,
            "parameters": self.model.parameters,
            "parts": {name: _precisions(p) for name, p in self.parts.items()},
            "weights_bytes": dict(self.weights_bytes),
            "vision_flops": self.vision_flops,
            "depths": [depth.to_dict() for depth in self.depths],
            "profile": profile,
            "estimate": None if self.profile is None else ESTIMATE,
        }


def _precisions(parts: Precisions) -> dict[str, Any]:
    """The precision of each part; a plan is of parts that an export quantises, not of a quantised checkpoint's.

    `int8`: the matrices of an int4 decoder that are wider, if there are any.
    """
    fields = asdict(parts)
    del fields["own"]
    wider = sorted(fields.pop("wider"))
    return {**fields, "int8": wider} if wider else fields


def spread_ks(layers: int) -> tuple[int | None, ...]:
    """None, and some K at even distances."""
    step = max(1, layers // SPREAD)
    return (None, *(full + 1 for full in range(layers - step, 0, -step)))


@dataclass(frozen=True, slots=True)
class PlannedMethods:
    """Each of `ks` under the same reductions; empty: no withdrawal and a spread of K. `rest`: what stays from K on."""

    ks: Sequence[int | None] = ()
    reductions: Sequence[Reduction] = ()
    rest: Rest = 0


SPREAD_OF_K = PlannedMethods()


def make_plan(
    model: ModelSize,
    workload: Workload,
    methods: PlannedMethods = SPREAD_OF_K,
    parts: Mapping[str, Precisions] | None = None,
    profile: Profile | None = None,
    *,
    engine: EngineCost | None = None,
) -> CostPlan:
    """The cost of `model`.

    `parts` [default: all of the decoder's, with the tower's and the head's of vtx-export for each]. `engine` [default:
    onnxruntime on a CPU, elsewhere weights as stored and K/V as long as used]. Raises RequestError.
    """
    engine = engine or _usual_engine(profile)
    largest = largest_view(model, engine.reserved)
    model = model.seeing(workload.vision)
    views = model.views(workload.vision) if workload.views is None else workload.views
    reduced = reduce_counts(methods.reductions, model, workload.vision, views)
    parts = parts or weights.precisions_by_name(model)
    size = model.decoder
    depths = list[DepthCost]()
    full = flops.with_exit(size, flops.full_schedule(size.layers, text=workload.text, vision=workload.vision))
    whole = flops.total_flops(size, full, model.vision, views)
    deepest = size.first_source or size.layers
    kept = flops.make_schedule(reduced.vision_tokens, text=workload.text)
    for k in methods.ks or spread_ks(deepest):
        _check_sources(size, k, deepest)
        stays = 0 if k is None else WithdrawToRest(k, methods.rest).number_kept(reduced.vision_tokens[k - 2], k)
        present = tuple(map(min, _withdrawn(size.layers, workload, k, stays), kept))
        vision = [count - workload.text for count in present]
        slots = flops.with_exit(size, present)
        again = flops.ahead_flops(size, vision, reduced.ahead, text=workload.text)
        total = flops.total_flops(size, slots, model.vision, views) + again
        prompt = PlannedPrompt(views, slots, again, workload.new_tokens, workload.batch)
        depths.append(
            DepthCost(
                k=k,
                rest=stays,
                full_layers=size.layers if k is None else k - 1,
                calflops=round(flops.calflops(size, slots)),
                calflops_ratio=flops.calflops(size, slots) / flops.calflops(size, full),
                total_flops=total,
                total_ratio=total / whole,
                kv_slots=tuple(count * (size.source(n) == n) for n, count in enumerate(slots, 1)),
                precisions={p: _cost(model, prompt, c, profile, engine, largest) for p, c in parts.items()},
            )
        )
    return CostPlan(
        model=model,
        workload=workload,
        vision_views=views,
        parts=parts,
        weights_bytes={name: weights.bundle_bytes(model, p) for name, p in parts.items()},
        vision_flops=flops.encode_flops(model.vision, views, whole=True),
        depths=tuple(depths),
        profile=profile,
        reduced=reduced if methods.reductions else None,
    )


def _usual_engine(profile: Profile | None) -> EngineCost:
    """The engine that is planned for where none is named: onnxruntime on a CPU, else none that takes more."""
    return ENGINES["cpu"].costs["ort"] if profile is not None and profile.kind == "cpu" else IDEAL


def _check_sources(size: Decoder, k: int | None, deepest: int) -> None:
    """Raise RequestError for a K behind the last layer with keys and values of its own."""
    if k is not None and k > deepest and size.shared is not None:
        raise RequestError(
            f"K = {k} is behind layer {deepest}: layers from {size.shared} on have no keys and values of their own "
            f"and would still see the image in that layer's; name K from 2 to {deepest}, or none"
        )


def _withdrawn(layers: int, workload: Workload, k: int | None, stays: int) -> tuple[int, ...]:
    """The tokens in each layer if the image leaves at `k`, but for the `stays` tokens that do not."""
    counts = flops.withdrawal_schedule(layers, k, text=workload.text, vision=workload.vision)
    if k is None:
        return counts
    return (*counts[: k - 1], *(count + stays for count in counts[k - 1 :]))


def largest_view(model: ModelSize, reserved: int) -> VisionSize | None:
    """The tower with the view for which an engine takes memory at load; `reserved`: times the pixels of an image."""
    if not reserved or model.vision is None:
        return None
    vision = model.vision.model.vision
    if vision.kind == "native" and isinstance(model.layout, Native):
        return model.vision.stretched(reserved * model.layout.max_pixels // vision.patch**2)
    if isinstance(model.layout, TokenBudget):
        return model.vision.stretched(reserved * model.layout.max_tokens * vision.square**2)
    if vision.projected:
        return model.vision
    return model.vision.stretched(WIDEST_VIEW * model.vision.patches) if vision.naflex else None


def _cost(
    model: ModelSize,
    prompt: PlannedPrompt,
    precisions: Precisions,
    profile: Profile | None,
    engine: EngineCost,
    largest: VisionSize | None,
) -> PrecisionCost:
    """The memory of one precision; `largest`: the tower for which the engine takes memory at load, if that is fixed."""
    slots = prompt.schedule
    element = KV_DTYPES[precisions.kv_dtype].bytes
    cache = tuple(flops.kv_bytes(model.decoder, slots, element))
    step = GROWTH if engine.blocks else 1
    used = [-(-(count + prompt.new_tokens) // step) * step for count in slots]
    kv = _batch_bytes(model.decoder, prompt.batch, sum(flops.kv_bytes(model.decoder, used, element)))
    read = engine.passes * sum(cache)
    if engine.floats is None:
        held = weights.bundle_bytes(model, precisions, engine.int8)
    else:
        held = weights.resident(model, precisions, engine.floats)
    wide = engine.wide or PRECISIONS[precisions.decoder].arithmetic == "float32"
    each = 4 if wide else 2
    if engine.apart:
        activations = summed_activation_bytes(model, slots, prompt.views, each)
    else:
        activations = largest_activation_bytes(model, slots, prompt.views, each, largest)
    packing = weights.packed_twice(model, precisions, engine.floats) if engine.packing and engine.floats else 0
    peak = held + max(kv + activations, packing) + engine.base
    if profile is None:
        return PrecisionCost(cache, kv, held, activations, peak)
    phases = latency(model, prompt, precisions, profile, engine, read)
    ms = sum(phase.ms for phase in phases.values())
    if model.action_tokens:  # the prompt gives the first of them
        ms += (model.action_tokens - 2) * phases["decode_per_token"].ms
    hertz = 1000 / ms if model.action is not None or model.action_tokens else None
    return PrecisionCost(cache, kv, held, activations, peak, profile.usable_bytes - peak, phases, hertz)


def _batch_bytes(size: Decoder, batch: int, kv: int) -> int:
    """Bytes of conversations that decode together, each of `kv`: lanes, and the memory in which the next prompt runs.

    For a token of each also states before and after it, hidden states and logits.
    """
    if batch == 1:
        return kv
    states = 2 * size.state_numbers * len(size.conv_layers)
    return (batch + 1) * kv + 4 * batch * (states + 2 * size.hidden + size.vocab)


def largest_activation_bytes(
    model: ModelSize, tokens: Sequence[int], views: int, element_bytes: int, largest: VisionSize | None
) -> int:
    """The larger of prefill's and the vision graph's intermediate values, whose memory is reused, and fp32 logits.

    `largest`: the tower with the image for which memory is taken at load, with that of its inputs and outputs in fp32.

    A layer holds two residual vectors a token, and q, k, v and their product or the three vectors of the feed-forward
    block (of the tower: `widest`); no square of attention scores, which fused kernels never write.
    """
    size = model.decoder
    encode = 0
    ends = 0
    prefill = max(tokens) * (2 * size.hidden + max(_attention_values(model), 3 * size.mlp_values))
    if model.vision is not None:
        encode = views * model.vision.widest
    if largest is not None:
        encode = largest.widest
        ends = largest.ends
    return element_bytes * max(prefill, encode) + 4 * (ends + size.vocab)


def summed_activation_bytes(model: ModelSize, tokens: Sequence[int], views: int, element_bytes: int) -> int:
    """The intermediate values of an engine that reuses no memory between them (`EngineCost.apart`), and fp32 logits.

    Those of a layer's attention and its feed-forward block, of the tower, of a stage that sees the image and of one
    that does not, each with its hidden states in fp32.
    """
    size = model.decoder
    vision = model.vision
    stages = sum({max(tokens), min(tokens)})
    values = stages * (2 * size.hidden + _attention_values(model) + 3 * size.mlp_values)
    ends = stages * 2 * size.hidden
    if vision is not None and views:
        values += views * vision.apart
        ends += views * vision.ends
    return element_bytes * values + 4 * (ends + size.vocab)


def _attention_values(model: ModelSize) -> int:
    """Numbers of a token's q, k, v and their product."""
    size = model.decoder
    return size.head_dim * (2 * size.heads + 2 * size.kv_heads)
