"""vtx-plan: the cost of a model before anything is built. It parses, calls and prints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from vtx.commands.shared.options import PRECISION, DepthType, given, joined, option, options
from vtx.runtime.backends.engines import ENGINES, GPUS
from vtx.runtime.backends.slots import LANES
from vtx.runtime.precision import PRECISIONS
from vtx.runtime.terminal.console import command, say, say_json, table

if TYPE_CHECKING:
    from vtx.runtime.bundle.spec.stored import Precisions
    from vtx.runtime.host.profiles import Profile
    from vtx.tools.estimate.plan import CostPlan, PrecisionCost, Workload
    from vtx.tools.estimate.sizes import ModelSize
    from vtx.tools.tensorrt.support import EngineSupport


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """The options of vtx-plan."""

    model: str
    picture: tuple[int, int]
    sequence: int | None
    text: int
    ks: tuple[int | None, ...]
    rest: str | None
    reduction: str
    precisions: tuple[str, ...]
    vision_precision: str | None
    head_precision: str | None
    int4_block: int | None
    int8_block: int | None
    bits: float | None
    max_new_tokens: int
    batch: int
    profile: str | None
    engine: str | None
    jetpack: str | None
    as_json: bool

    @property
    def decoder_precisions(self) -> tuple[str, ...]:
        """Each named precision once, by default all."""
        return tuple(dict.fromkeys(self.precisions or PRECISIONS))

    @property
    def blocks(self) -> dict[str, int | None]:
        """The weights that share a scale, by precision."""
        return {"int4": self.int4_block, "int8": self.int8_block}


def _image_size(_: click.Context, __: click.Parameter, value: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", value)
    if not match or not int(match[1]) or not int(match[2]):
        raise click.BadParameter(f"{value!r} is not a size in pixels such as 1280x720")
    return int(match[1]), int(match[2])


@command(
    epilog="vtx-plan --model llava-1.5-7b\n"
    "vtx-plan --model llava-1.5-7b --sequence 642 --text 66 --k 17 --json\n"
    "vtx-plan --model llava-next-7b --precision int4 --profile orin-nx-16\n"
    "vtx-plan --model llava-1.5-7b --precision int4 --int4-block 32 --bits 6.3\n"
    "vtx-plan --model llava-1.5-7b --profile orin-nx-16 --jetpack 6.2\n"
    "vtx-plan --model qwen2.5-vl-3b --image-size 640x480 --reduce fastv:k=2,ratio=0.5\n"
    "vtx-plan --model vtx-demo-k16-fp16"
)
@options(
    option(
        "--model", str, "Known model, checkpoint or its config.json, or bundle.", required=True, metavar="NAME|FOLDER"
    ),
    option(
        "--image-size picture",
        "1280x720",
        "Image size in pixels, for models whose number of image tokens depends on it.",
        callback=_image_size,
        metavar="WxH",
    ),
    option("--sequence", int, "Prompt length in tokens [default: one image of --image-size plus --text]."),
    option("--text", 64, "Text tokens in the prompt, without those among an image's own."),
    option(
        "--k ks",
        DepthType(several=True, auto=False),
        "First layer without vision tokens, at least 2 [default: none and several K].",
        multiple=True,
        callback=joined,
        metavar="N|none|N,M,...",
    ),
    option(
        "--rest",
        str,
        "Image tokens that stay from each K on: a share, e.g. 10%, or a number [default: none].",
        metavar="N%|N",
    ),
    option(
        "--reduce reduction", "none", "Token reduction, as for vtx-export, e.g. fastv:k=2,ratio=0.5.", metavar="SPEC"
    ),
    option(
        "--precision precisions", PRECISION, "Weight precision; repeat for more.", multiple=True, show_default="all"
    ),
    "vision_precision",
    "head_precision",
    "int4_block",
    "int8_block",
    "bits",
    "max_new_tokens",
    option(
        "--batch",
        click.IntRange(1, LANES),
        "Conversations decoded together on a GPU [default: 1].",
        default=1,
        metavar="N",
    ),
    option("--profile", str, "Device to estimate times and memory for.", metavar="NAME"),
    option(
        "--device engine",
        click.Choice([*ENGINES]),
        "Engine to estimate for; needs --profile [default: the first that can run the model].",
    ),
    option("--jetpack", str, "JetPack release, if --profile is a Jetson [default: its newest].", metavar="VERSION"),
    option("--json as_json", bool, "Print only one JSON object."),
    record=PlanSettings,
)
def plan(settings: PlanSettings) -> None:
    """Calculate the cost of a model: FLOPs, weights, KV cache and memory per K and precision."""
    from vtx.exporter.checkpoint.spec import find_size
    from vtx.runtime.host.profiles import load_profile

    _check(settings)
    device = None if settings.profile is None else load_profile(settings.profile)
    size = find_size(settings.model)
    work = _workload(settings, size)
    parts = _parts(settings, size)
    engines, engine = _engines(settings, size, device, parts)
    _check_batch(settings, engine)
    costs = _costs(settings, size, work, parts, device, engine)
    builds = _buildable(size, device, engine, parts)
    picture = None
    if settings.sequence is None and size.vision is not None and size.layout is not None:
        picture = settings.picture
    if settings.as_json:
        extra = {"image_size": picture, "engines": [engine.to_dict() for engine in engines], "build_layers": builds}
        say_json({**costs.to_dict(), **extra, "counted_for": engine and engine.software})
        return
    _show_plan(costs, picture, size, engines, engine)
    if builds:
        layers = ", ".join(f"{name} {count or 'none'}" for name, count in builds.items())
        say(f"layers of a graph whose engine can be built on the device (--stage-layers of vtx-export): {layers}")


def _check(settings: PlanSettings) -> None:
    """Raise click's UsageError for options that do not go together."""
    if settings.sequence is not None and given("picture"):
        raise click.UsageError("--sequence and --image-size are mutually exclusive")
    if settings.profile is None and (settings.engine or settings.jetpack):
        raise click.UsageError("--device and --jetpack need --profile")
    if settings.bits is not None and "int4" not in settings.decoder_precisions:
        raise click.UsageError("--bits is for an int4 decoder; add --precision int4")
    if settings.rest is not None and settings.ks and not any(settings.ks):
        raise click.UsageError("--rest is what stays from K on, and --k is none; name a K")


def _parts(settings: PlanSettings, size: ModelSize) -> dict[str, Precisions]:
    """By the decoder's precision, those of all parts. Blocks and bits are of the precisions that have them."""
    from vtx.tools.estimate.weights import precisions_of

    blocks = {name: block for name, block in settings.blocks.items() if block is not None}
    parts: dict[str, Precisions] = {}
    unused = {*blocks}
    for name in settings.decoder_precisions:
        others = PRECISIONS[name].other_parts
        present = {name, settings.vision_precision or others, settings.head_precision or others}
        bits = settings.bits if name == "int4" else None
        own_blocks = {precision: block for precision, block in blocks.items() if precision in present}
        parts[name] = precisions_of(size, name, settings.vision_precision, settings.head_precision, own_blocks, bits)
        unused -= present
    for precision in sorted(unused):
        raise click.UsageError(f"--{precision}-block is for {precision} weights; add --precision {precision}")
    return parts


def _check_batch(settings: PlanSettings, engine: EngineSupport | None) -> None:
    """Raise click's UsageError if conversations are to decode together where there is no GPU."""
    if settings.batch > 1 and (engine is None or engine.device not in GPUS):
        raise click.UsageError("--batch is for a GPU: name a --profile that has one, and no --device on a CPU")


def _workload(settings: PlanSettings, size: ModelSize) -> Workload:
    """The prompt and the answer that are counted."""
    from vtx.tools.estimate.plan import Workload

    answer = settings.max_new_tokens
    if size.action_tokens and not given("max_new_tokens"):
        answer = size.action_tokens
    if settings.sequence is not None:
        return Workload(settings.text, settings.sequence - settings.text, answer, batch=settings.batch)
    image, views = size.picture(*settings.picture)
    return Workload(settings.text + size.marks(*settings.picture), image, answer, views, settings.batch)


def _engines(
    settings: PlanSettings, size: ModelSize, device: Profile | None, parts: Mapping[str, Precisions]
) -> tuple[tuple[EngineSupport, ...], EngineSupport | None]:
    """The engines of the device for the model, and the one that is counted for."""
    from vtx.tools.tensorrt.support import choose_engine, engines_on

    if size.action is not None and (settings.engine or settings.jetpack):
        raise click.UsageError("--device and --jetpack are for models that answer in words; this one acts")
    if device is None or size.action is not None:
        return (), None
    engines = engines_on(device, size, parts)
    return engines, choose_engine(engines, settings.engine, settings.jetpack) if engines else None


def _costs(
    settings: PlanSettings,
    size: ModelSize,
    work: Workload,
    parts: Mapping[str, Precisions],
    device: Profile | None,
    engine: EngineSupport | None,
) -> CostPlan:
    from vtx.runtime.policies.make import read_rest
    from vtx.runtime.policies.spec import parse
    from vtx.tools.estimate.plan import PlannedMethods, make_plan

    rest = 0 if settings.rest is None else read_rest(settings.rest)
    return make_plan(
        size,
        work,
        PlannedMethods(settings.ks, parse(settings.reduction), rest),
        parts,
        device,
        engine=None if engine is None else engine.cost,
    )


def _buildable(
    size: ModelSize, device: Profile | None, engine: EngineSupport | None, parts: Mapping[str, Precisions]
) -> dict[str, int]:
    """By precision, the layers of a graph that the device, if it builds engines itself, can make an engine of."""
    from vtx.tools.tensorrt.memory import buildable_layers

    if device is None or device.kind != "jetson" or engine is None or engine.device != "tensorrt":
        return {}
    usable = device.usable_bytes
    return {name: buildable_layers(size, precisions, usable, engine.cost.int8) for name, precisions in parts.items()}


def _show_plan(
    costs: CostPlan,
    picture: tuple[int, int] | None,
    whole: ModelSize,
    engines: Sequence[EngineSupport],
    counted: EngineSupport | None,
) -> None:
    from vtx.runtime.units import size
    from vtx.tools.estimate.plan import ESTIMATE

    _say_prompt(costs, picture, whole)
    for engine in engines:
        _say_engine(engine)
    say("weights: " + ", ".join(f"{name} {size(count)}" for name, count in costs.weights_bytes.items()))
    _show_arithmetic(costs)
    device = costs.profile
    action = costs.model.action
    if action is not None:
        say(f"an answer: {action.cameras} cameras, all pictures new, and {action.steps} steps of the expert")
        if device:
            say("counted as the device could do it, weights as stored; which engine answers is not looked up")
    if tokens := costs.model.action_tokens:
        say(f"an answer: a new picture and {tokens} tokens, one for each number of an action")
    if counted is not None:
        say(f"counted below for {counted.software}: {counted.cost.note}")
    _show_memory(costs, counted)
    if device:
        say(f"{device.power_mode}, {size(device.usable_bytes)} usable; times are {ESTIMATE}")


def _say_prompt(costs: CostPlan, picture: tuple[int, int] | None, whole: ModelSize) -> None:
    """The model, the tokens of the prompt, and what a reduction leaves of those of the image."""
    work = costs.workload
    say(
        f"{costs.model.name}: {costs.model.parameters / 1e9:.3g} billion parameters; a prompt of "
        f"{work.text} text and {work.vision} vision tokens, {work.new_tokens} new ones"
    )
    if picture is not None:
        assert whole.vision is not None
        most = whole.vision.image_tokens
        larger = f"; the largest takes {most:,}" if work.vision < most else ""
        marks = whole.marks(*picture)
        among = f", {marks} of the text tokens among its own" if marks else ""
        say(f"an image of {picture[0]}x{picture[1]} pixels (--image-size){among}{larger}")
    if costs.reduced is None:
        return
    say(f"reduced by {costs.reduced.spec}: vision tokens in {_spans(costs.reduced.vision_tokens)}")
    paper = costs.reduced.paper_ratio
    published = "" if paper is None else f", {paper:.1%} as its paper counts"
    say(f"the image alone in the decoder: {costs.reduced.image_ratio:.1%} of the arithmetic{published}")
    for line in costs.reduced.assumed:
        say(f"assumed: {line}")


def _say_engine(engine: EngineSupport) -> None:
    """The precisions that an engine answers in, and why it refuses the others."""
    if engine.answered:
        only = f", {' '.join(engine.answered)} only" if engine.refusals else ""
        say(f"answers with --device {engine.device}: {engine.software}, {engine.dialect} graphs{only}")
    for reason in dict.fromkeys(engine.refusals.values()):
        precisions = " ".join(name for name, why in engine.refusals.items() if why == reason)
        subject = precisions if engine.answered else engine.device
        say(f"not {subject} with {engine.software}: {reason}")


def _show_arithmetic(costs: CostPlan) -> None:
    """The arithmetic of the prompt at each K, and the share that the last layers spare."""
    from vtx.tools.estimate.flops import full_schedule, total_flops, with_exit

    decoder = costs.model.decoder
    if decoder.shared is not None:
        every = full_schedule(decoder.layers, text=costs.workload.text, vision=costs.workload.vision)
        share = total_flops(decoder, with_exit(decoder, every)) / total_flops(decoder, every)
        say(
            f"layers from {decoder.shared} on run for the prompt's last token alone, without loss: {share:.1%} of the "
            "decoder's arithmetic, which the rows count"
        )
    rows = []
    for depth in costs.depths:
        calflops = f"{depth.calflops / 1e12:.3g} T ({depth.calflops_ratio:.1%})"
        total = f"{depth.total_flops / 1e12:.3g} T ({depth.total_ratio:.1%})"
        rows.append([str(depth.k or "none"), str(depth.full_layers), calflops, total])
    table("arithmetic of the prompt", ["K", "full layers", "calflops", "total"], rows)


def _show_memory(costs: CostPlan, counted: EngineSupport | None) -> None:
    """Memory at each K and precision, with a profile also the times of each phase."""
    device = costs.profile
    acts = costs.model.action is not None
    heads = ["K", "precision", "KV cache", "peak"]
    if device:
        heads += ["fits", "vision", "prefill", "expert" if acts else "per token"]
        heads += ["Hz"] if acts or costs.model.action_tokens else []
    able = set() if counted is None else set(counted.answered)
    if acts:
        able = {*costs.parts}
    rows = []
    for depth in costs.depths:
        for name, cost in depth.precisions.items():
            row = [str(depth.k or "none"), name, *_memory_cells(cost, name in able)]
            rows.append([*row, *["-"] * (len(heads) - len(row))])
    table(f"memory on {device.name}" if device else "memory", heads, rows)


def _memory_cells(cost: PrecisionCost, able: bool) -> list[str]:
    """KV cache and peak; with the times of a profile, whether it fits, the times and the rate, or "no engine"."""
    from vtx.runtime.units import size

    if cost.phases is None:
        return [size(cost.kv_bytes), size(cost.peak_bytes)]
    cells = [size(cost.kv_held_bytes), size(cost.peak_bytes)]
    if not able:
        return [*cells, "no engine"]
    times = [f"{phase.ms:.0f} ms" if phase.ms >= 10 else f"{phase.ms:.3g} ms" for phase in cost.phases.values()]
    rate = [] if cost.hertz is None else [f"{cost.hertz:.3g}"]
    return [*cells, "yes" if cost.fits else "NO", *times, *rate]


def _spans(counts: Sequence[int]) -> str:
    """Counts by layer, e.g. "layers 1-2: 576, 3-32: 288"."""
    starts = [i for i, count in enumerate(counts) if i == 0 or count != counts[i - 1]]
    ends = [*starts[1:], len(counts)]
    return "layers " + ", ".join(f"{a + 1}-{b}: {counts[a]}" for a, b in zip(starts, ends, strict=True))
