"""An export before it begins: options, every check that needs no weight, and the resulting plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from vtx.exporter.bundling.options import DEMO, ExportOptions
from vtx.exporter.bundling.predict import Prediction, predict, small_files
from vtx.exporter.bundling.reductions import Reductions, plan_reductions
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.families.registry import find_family, read_config
from vtx.exporter.checkpoint.family import Family
from vtx.exporter.checkpoint.generation import FILE as GENERATION
from vtx.exporter.checkpoint.generation import generation_warnings
from vtx.exporter.checkpoint.loader import Checkpoint, read_settings
from vtx.exporter.checkpoint.original.templates import TEMPLATES
from vtx.exporter.checkpoint.processor import (
    image_settings,
    read_image_processor,
    read_video_processor,
    read_video_settings,
)
from vtx.exporter.checkpoint.text import read_template, read_text
from vtx.exporter.checkpoint.text_tower import TextTowerCheckpoint, open_text_tower
from vtx.exporter.graphs.activations import check_activation
from vtx.exporter.graphs.encoder import text_tower_tensors
from vtx.exporter.graphs.expert import expert_tensors
from vtx.exporter.graphs.gates import Gates, read_gates
from vtx.exporter.graphs.joined import constant_bytes
from vtx.exporter.graphs.vision import video_tensors, vision_tensors
from vtx.exporter.reference.prompts import Source
from vtx.exporter.weights.plan import (
    UNTIED,
    WeightPlan,
    own_precisions,
    plan_weights,
    quantised_note,
    unused_weights,
    with_own_head,
)
from vtx.exporter.weights.scaling import scaled_weights
from vtx.runtime.backends.memory import tokenizer_memory
from vtx.runtime.bundle.files import read_text_file
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.manifest import Graphs, StageSpec, VideoSpec
from vtx.runtime.bundle.spec.model_spec import unscored
from vtx.runtime.bundle.spec.names import CUDA, SLOTTED, STATEFUL, TENSORRT, UNCACHED
from vtx.runtime.bundle.spec.stored import EMBEDDING, HEAD, Precisions, tied_head
from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.errors import DeviceError, ExportError, RequestError, UnsupportedModelError
from vtx.runtime.installing import install
from vtx.runtime.policies.make import (
    TEXT_TOWER_FIX,
)
from vtx.runtime.policies.spec import parse
from vtx.runtime.prompt.text import MAX_TEMPLATE_BYTES, Text, utf8
from vtx.runtime.prompt.tokenizer import parse_tokenizer
from vtx.runtime.vision.layouts import spec_of
from vtx.runtime.vision.layouts.frames import Frames
from vtx.runtime.vision.layouts.pairs import Pairs

DOWNSAMPLE = "downsample_mode"
# Slots of a bundle that is exported without --max-context: at least, and beside the largest image those of a question
# and its answer.
DEFAULT_CONTEXT, ASKED = 4096, 1024
UNPRINTED = "no videos: the chat template does not print them"


@dataclass(frozen=True, slots=True)
class Plan:
    """An export that has been checked and not yet begun."""

    options: ExportOptions
    checkpoint: Checkpoint
    config: ModelConfig
    ks: tuple[int, ...]
    gates: Gates | None
    weights: WeightPlan
    image: ImageSettings
    tokenizer: str
    template: str
    text: TextSettings
    max_context: int
    prediction: Prediction
    precisions: Precisions
    text_tower: TextTowerCheckpoint | None = None
    reductions: Reductions = field(default_factory=Reductions)
    video: VideoSpec | None = None
    disagreements: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        if self.options.model == DEMO:
            return DEMO
        name = Path(self.options.model).expanduser().absolute().name
        return name.encode("utf-8", "replace").decode()  # a directory's name need not be Unicode, a manifest is

    @property
    def parameters(self) -> int:
        """The weights of the model: a tied head that is stored beside its table counts once."""
        text, stored = self.config.text, self.weights.stored
        return self.weights.parameters - text.tied * (HEAD in stored) * text.vocab * text.hidden

    def source(self) -> Source:
        text = Text(parse_tokenizer(self.tokenizer, ExportError), self.template, self.text)
        fingerprint = self.checkpoint.fingerprint()
        return Source(self.name, fingerprint, self.checkpoint, self.config, text, self.image, self.max_context)

    @property
    def default_k(self) -> int | str | None:
        if self.options.ks == "auto":
            return "auto"
        return self.ks[0] if self.ks else None

    @property
    def gated_ks(self) -> tuple[int, ...]:
        """The prebuilt depths that have a gate; gates of other layers are left out."""
        return tuple(k for k in sorted(self.ks) if self.gates and k in self.gates.by_k)

    @property
    def scored(self) -> set[int]:
        """Layers whose stage gives its queries: for reductions, and before each K for the choice of a rest."""
        before_k = {k - 1 for k in self.ks if not unscored(self.config.text, k - 1)}
        return before_k | {*self.reductions.needs.scored}

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        queries, shared = self.scored, self.config.text.shared
        cuts = sorted({*self.reductions.cuts(self.ks), *([] if shared is None else [shared])})
        spans = self._parts(pairwise([1, *cuts, self.config.text.layers + 1]))
        stages, inputs = list[StageSpec](), self.config.token_inputs
        for first, after in spans:
            read = tuple(inputs[n].name for n in inputs if first <= n < after)
            convolved = self.config.text.conv_layers
            kinds = tuple(STATEFUL if layer in convolved else SLOTTED for layer in range(first, after))
            caches = kinds if STATEFUL in kinds else ()
            if first == shared:
                caches = (UNCACHED,) * (after - first)
            stages.append(StageSpec(first, after - 1, after - 1 in queries, read, caches))
        return tuple(stages)

    def _parts(self, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Stages from a layer to before another, in nearly equal parts of at most `stage_layers` layers.

        Layers that read K and V of others stay one stage.
        """
        most, shared = self.options.stage_layers or self.config.text.layers, self.config.text.shared
        for first, after in spans:
            count = 1 if first == shared else -(-(after - first) // most)
            ends = [first + (after - first) * number // count for number in range(count + 1)]
            yield from pairwise(ends)

    @property
    def dialects(self) -> dict[str, Graphs]:
        needs, made = self.reductions.needs, dict[str, Graphs]()
        for dialect in self.options.dialects:
            if dialect == CUDA and self.config.text.sliding is not None:
                continue  # as a warning says
            suffix = f"{dialect}.onnx"
            stages = tuple(f"stage-{s.first:02d}-{s.last:02d}.{suffix}" for s in self.stages)
            gates = tuple(f"gate-{k:02d}.{suffix}" for k in self.gated_ks)
            made[dialect] = Graphs(
                f"vision.{suffix}", f"embed.{suffix}", f"head.{suffix}", stages, gates,
                f"score.{suffix}" if self.scored else None,
                vision_merges=needs.merging, vision_attention=needs.attention,
                vision_last_attention=needs.last_attention,
                text_tower=f"text-tower.{suffix}" if self.text_tower else None,
                video=f"video.{suffix}" if self.config.frames is not None and dialect not in TENSORRT else None,
                projector=f"projector.{suffix}" if needs.projector else None,
                vision_received=max(needs.tower_layers, default=None),
            )  # fmt: skip
        return made

    @property
    def warnings(self) -> tuple[str, ...]:
        skipped = self.options.aware.skipped if self.options.aware else ()
        tower = self.text_tower.warnings if self.text_tower else ()
        gates = self.gates.warnings if self.gates else ()
        maps = len(self.config.vision.maps)
        unread = (
            f"at K = {k} no text sees {' and '.join(f'map {n}' for n in range(max(1, k - 1), maps + 1))} of the tower: "
            f"map n is added after layer n and seen from layer n + 1 on, so all {maps} count from K = {maps + 2} on"
            for k in sorted(self.ks) if k < maps + 2
        )  # fmt: skip
        windows = self.config.text.sliding is not None and CUDA in self.options.dialects
        left_out = ["no graphs for CUDA: sliding windows are not built for onnxruntime's CUDA provider"] * windows
        return *left_out, *self.disagreements, *gates, *tower, *unread, *(f"skipped {line}" for line in skipped)


def plan_export(options: ExportOptions) -> Plan:
    """Read and check everything but the weights themselves; write nothing."""
    for library in ("torch", "transformers"):  # fail now if one that the last step of an export needs is missing
        if find_spec(library) is None:
            raise DeviceError(f"exporting needs {library}; {install('export')}")
    model = str(demo_checkpoint()) if options.model == DEMO else options.model
    checkpoint = open_checkpoint(model, tower=options.tower, allow_pickle=options.allow_pickle)
    family, original = find_family(checkpoint.config), checkpoint.original
    for spec in options.reductions:
        parse(spec)  # what needs no more than this, before transformers is loaded to read the rest
    part = checkpoint.config.get("text_config")
    layers = (part if isinstance(part, dict) else checkpoint.config).get("num_hidden_layers")
    if isinstance(layers, int) and options.ks != "auto":
        _check_ks(options.ks, layers)
    chosen = _downsampling(options, family)
    checkpoint, stated = _configured(checkpoint, family, options, chosen)
    config, unprinted = replace(stated, text=with_own_head(stated.text, checkpoint)), False
    if config.video is not None and (family.video_template or not isinstance(config.video.layout, Frames)):
        unprinted = "video" not in (options.template or family.video_template or read_template(checkpoint.folder))
        config = replace(config, video=None) if unprinted else config
    gates, ks = _gates_and_ks(options, checkpoint, config)
    reductions = plan_reductions(options.reductions, config)
    text_tower = _text_tower(options, checkpoint, config, reductions)
    if options.retain is not None:
        options.retain.check(options.reductions)
    context = _context(options, config)
    image = _image_settings(checkpoint, config, family)
    tokenizer, template, text = read_text(
        original.text_folder if original else checkpoint.folder,
        config.image_token_id, checkpoint.config.get("text_config") or {}, checkpoint.config,
        _chat_template(options, checkpoint, family, config), original=original is not None,
        video_token_id=config.video.token_id if config.video else None, seg_token=family.seg_token,
        end_ids=original.end_ids if original else None, whole=family.prompt is not None, vocab=config.text.vocab,
    )  # fmt: skip
    text = replace(text, boxes=family.boxes)
    parsed = parse_tokenizer(tokenizer, ExportError)
    if family.check is not None and options.template is None:
        family.check(Text(parsed, template, text))
    weights, precisions = _placed(checkpoint, config, options, reductions, text_tower)
    if (told := quantised_note(weights)) is not None:
        checkpoint = replace(checkpoint, notes=(*checkpoint.notes, told))
    texts = (tokenizer, template, *([text_tower.tokenizer] if text_tower else []))
    gates_bytes = sum(array.nbytes for k in ks for array in gates.by_k.get(k, ())) if gates else 0
    text_bytes = [len(text.encode("utf-8", "replace")) for text in texts]
    written = sum(text_bytes) + gates_bytes
    written += constant_bytes(config.vision) * len(options.dialects)
    layers = _graph_layers(config, text_tower) * len(options.dialects)
    small = small_files(config, context, len(ks), layers, written)
    unused = unused_weights(checkpoint, weights.stored, tied=config.text.tied)
    disagreements = ([UNTIED] if stated.text.tied != config.text.tied else []) + ([unused] if unused else [])
    disagreements += [UNPRINTED] * unprinted
    generation = read_settings(original.text_folder if original else checkpoint.folder, GENERATION)
    disagreements += generation_warnings(generation, parsed, template, text)
    predicted = predict(config, weights, context, precisions, small, options)
    memory = tokenizer_memory(text_bytes[0], config.text.vocab)
    predicted = replace(
        predicted, export_memory=predicted.export_memory + memory, run_memory=predicted.run_memory + memory
    )
    return Plan(
        options, checkpoint, config, ks, gates, weights, image, tokenizer, template, text, context, predicted,
        precisions, text_tower, reductions, _video(checkpoint, config, family, chosen), tuple(disagreements),
    )  # fmt: skip


def _configured(
    checkpoint: Checkpoint, family: Family, options: ExportOptions, chosen: dict[str, str]
) -> tuple[Checkpoint, ModelConfig]:
    """The configuration with what other files of the checkpoint and the options state, and how to read its weights."""
    stated = read_config({**checkpoint.config, **chosen})
    downsample = _patches_of_a_token(checkpoint, family, chosen)
    checkpoint = replace(checkpoint, factors=stated.text.factors, shifts=stated.text.shifts, downsample=downsample)
    if family.adjust is not None:
        stated = family.adjust(stated, {**read_image_processor(checkpoint.folder), **chosen})
    if family.statistics is not None:
        stated = family.statistics(stated, read_settings(checkpoint.folder, "processor_config.json"))
    stated = _acting(stated, options)
    for activation in (stated.text.activation, stated.vision.activation, stated.projector_activation):
        check_activation(activation)
    return checkpoint, stated


def _text_tower(
    options: ExportOptions, checkpoint: Checkpoint, config: ModelConfig, reductions: Reductions
) -> TextTowerCheckpoint | None:
    """CLIP's text tower if the options name one. Raises RequestError if a reduction needs it and they do not."""
    if not options.text_tower:
        if reductions.needs.text_tower:
            raise RequestError(
                f"cdpruner:text=tower needs CLIP's text tower, which no LLaVA holds; add {TEXT_TOWER_FIX}"
            )
        return None
    text_tower = open_text_tower(options.text_tower, checkpoint, config, allow_pickle=options.allow_pickle)
    check_activation(text_tower.spec.activation)
    return text_tower


def _context(options: ExportOptions, config: ModelConfig) -> int:
    """The slots of the bundle: --max-context, else enough for an image, a question and an answer."""
    most = config.text.max_positions
    must_fit = spec_of(config.layout).must_fit
    context = options.max_context
    if context is None:
        context = min(max(DEFAULT_CONTEXT, config.layout.max_tokens + ASKED), most)
    if context > most:
        longrope = config.text.rope.kind == "longrope"
        beyond = ", beyond which its longrope rotates all tokens by other factors" if longrope else ""
        raise RequestError(f"--max-context is {context}; the model has {most} positions{beyond}; lower it")
    if context <= must_fit + 1:
        raise RequestError(
            f"--max-context is {context}; one image takes up to {must_fit} tokens and a question more; raise it"
        )
    return context


def _placed(
    checkpoint: Checkpoint, config: ModelConfig, options: ExportOptions, reductions: Reductions,
    text_tower: TextTowerCheckpoint | None,
) -> tuple[WeightPlan, Precisions]:  # fmt: skip
    """The plan of all weights, from their sources to their files, and the precisions."""
    precisions = options.precisions(own_precisions(checkpoint))
    tensors = dict(checkpoint.tensors)
    needed = [*vision_tensors(config, last_attention=reductions.needs.last_attention), *video_tensors(config)]
    needed += config.text.tensors()
    if config.action is not None:
        needed += expert_tensors(config.text, config.action)
    elif config.text.tied:
        shape = (config.text.vocab, config.text.hidden)
        table = checkpoint.require(EMBEDDING, shape)
        precisions = tied_head(precisions, options.head_precision, shape, table.dtype)
        if precisions.head_apart:
            needed.append((HEAD, shape))
            tensors[HEAD] = table
    if text_tower is not None:
        needed += text_tower_tensors(text_tower.spec, config.vision.hidden)
        tensors |= text_tower.checkpoint.tensors
    scaled = scaled_weights(config.text, precisions.decoder) if options.aware else ()
    return plan_weights(replace(checkpoint, tensors=tensors), needed, precisions, scaled), precisions


def _graph_layers(config: ModelConfig, text_tower: TextTowerCheckpoint | None) -> int:
    """The layers and blocks of all graphs of one dialect, which their sizes grow with."""
    layers = config.text.layers + max(config.feature_layers) * (1 if config.frames is None else 2)
    layers += text_tower.spec.layers if text_tower else 0
    return layers + sum(max(tower.layers, sum(tower.stage_blocks)) for tower in config.vision.towers)


def _chat_template(options: ExportOptions, checkpoint: Checkpoint, family: Family, config: ModelConfig) -> str | None:
    """The template of prompts: the one given, the family's or the checkpoint's own; None: to be read there."""
    if options.template is None and checkpoint.original is not None:
        return checkpoint.original.template
    if options.template is None and family.prompt is not None:
        return family.prompt
    if family.template is None:
        if options.template is None and family.video_template is not None:
            return _by_kind(read_template(checkpoint.folder), family.video_template)
        return options.template
    # adds the text that the family's processor in transformers adds
    return family.template(read_template(checkpoint.folder) if options.template is None else options.template, config)


def _acting(config: ModelConfig, options: ExportOptions) -> ModelConfig:
    """The configuration with the names of `--cameras`, and a refusal of what needs answers in words."""
    if config.action is None:
        if options.cameras:
            raise RequestError("--cameras names the pictures of a model that outputs actions; leave it out")
        return config
    check_activation(config.action.activation)
    if options.gates or options.text_tower or options.aware or options.calibration:
        raise UnsupportedModelError(
            "models that answer with actions take --k and --precision alone: gates, calibration and "
            "activation-aware scaling are for answers in words; leave them out"
        )
    return replace(config, action=replace(config.action, cameras=options.cameras))


def _downsampling(options: ExportOptions, family: Family) -> dict[str, str]:
    """The setting of `--downsample`, which replaces that of both files of the checkpoint."""
    if options.downsample is None:
        return {}
    if options.downsample not in family.downsampling:
        known = ", ".join(family.downsampling)
        raise RequestError(
            f"--downsample is {options.downsample!r:.40}; "
            + (f"this model has {known}; use one of these" if known else "this model leaves no choice; leave it out")
        )
    return {DOWNSAMPLE: options.downsample}


def _patches_of_a_token(checkpoint: Checkpoint, family: Family, chosen: dict[str, str]) -> str | None:
    """The chosen setting, else the checkpoint's own, else the family's first; None if it leaves no choice."""
    if not family.downsampling:
        return None
    return chosen.get(DOWNSAMPLE) or checkpoint.config.get(DOWNSAMPLE) or family.downsampling[0]


def _check_ks(ks: Sequence[int], layers: int) -> None:
    for k in ks:
        if not 2 <= k <= layers:
            raise RequestError(
                f"K = {k} is outside 2..{layers}; K is the first layer without vision tokens; give another"
            )
    if len(set(ks)) != len(ks):
        raise RequestError(f"K = {', '.join(map(str, ks))} names a depth twice; name each only once")


def _gates_and_ks(
    options: ExportOptions, checkpoint: Checkpoint, config: ModelConfig
) -> tuple[Gates | None, tuple[int, ...]]:
    gates = read_gates(options.gates, config.text, checkpoint.fingerprint()) if options.gates else None
    ks = tuple(gates.by_k) if gates and options.ks == "auto" else tuple(k for k in options.ks if isinstance(k, int))
    _check_ks(ks, config.text.layers)
    source = config.text.first_source
    if source is not None and ks and max(ks) > source:
        raise RequestError(
            f"K = {max(ks)} is behind layer {source}: layers from {config.text.shared} on have no keys and values of "
            f"their own and would still see the image in that layer's; name K from 2 to {source}, or none"
        )
    if gates and not set(ks) & set(gates.by_k):
        raise RequestError(
            f"no gate for K = {list(ks)}; the file has gates for K = {sorted(gates.by_k)}; name one of these"
        )
    return gates, ks


def _image_settings(checkpoint: Checkpoint, config: ModelConfig, family: Family) -> ImageSettings:
    processor = checkpoint.original.processor if checkpoint.original else read_image_processor(checkpoint.folder)
    return _of_side(image_settings(processor, family.processors), config, "image")


def _of_side(settings: ImageSettings, config: ModelConfig, kind: str) -> ImageSettings:
    """The settings, which must give images of the tower's size."""
    side, (height, width) = config.vision.image, settings.sides
    if (height, width) != (side, side) and not (settings.own_size and (config.vision.native or config.vision.naflex)):
        raise UnsupportedModelError(
            f"the {kind} processor gives {height} x {width} pixels, the tower needs {side} x {side}; "
            "correct preprocessor_config.json"
        )
    return settings


def _video(checkpoint: Checkpoint, config: ModelConfig, family: Family, chosen: Mapping[str, str]) -> VideoSpec | None:
    """The checkpoint's treatment of videos; None if it has none. `chosen` replaces settings of its file."""
    if config.video is None:
        return None
    layout = config.video.layout
    if family.video_processor is None:  # frames are images
        settings = _image_settings(checkpoint, config, family)
    else:
        settings, frames = read_video_settings(
            checkpoint.folder, family.video_processor, family.processors, by_rate=family.adjust_video is not None
        )
        settings = _of_side(settings, config, "video")
        if family.adjust_video is not None:
            own = read_video_processor(checkpoint.folder)
            if not isinstance(layout, Pairs):
                own = own or read_image_processor(checkpoint.folder)
            layout = family.adjust_video(layout, {**own, **chosen})
        elif frames is not None:
            assert isinstance(layout, Frames)
            layout = replace(layout, frames=frames)
    return VideoSpec(spec_of(layout), settings, config.frames is not None)


def _by_kind(images: str, videos: str) -> str:
    """A chat template that is `videos` for conversations with a video, and else `images`."""
    images = images.removesuffix("\n")  # as jinja reads it alone; the empty text keeps a line break at its beginning
    return (
        "{% set pictures = namespace(videos=false) %}{% for message in messages if message['content'] is not string %}"
        "{% for part in message['content'] if part['type'] == 'video' %}{% set pictures.videos = true %}{% endfor %}"
        f"{{% endfor %}}{{% if pictures.videos %}}{videos}{{% else %}}{{{{ '' }}}}{images}{{% endif %}}"
    )


def demo_checkpoint() -> Path:
    """The built-in demo model, a small LLaVA in Hugging Face's layout."""
    return Path(str(files("vtx.exporter") / "demo_model"))


def load_template(path: Path) -> str:
    """The chat template in a file, or one of original LLaVA's by its name if there is none. Raises RequestError."""
    if str(path) in TEMPLATES and not path.exists():
        return TEMPLATES[str(path)]
    return utf8(read_text_file(path, MAX_TEMPLATE_BYTES), path.name, RequestError)
