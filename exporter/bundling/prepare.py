"""An export before it begins: options, every check that needs no weight, and the resulting plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib.resources import files
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from vtx.exporter.bundling.choices import Choices, Prompts, choose, read_prompts
from vtx.exporter.bundling.options import DEMO, ExportOptions
from vtx.exporter.bundling.predict import Prediction, predict, small_files
from vtx.exporter.bundling.reductions import Reductions
from vtx.exporter.bundling.source import SourceModel, read_source
from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.generation import FILE as GENERATION
from vtx.exporter.checkpoint.generation import generation_warnings
from vtx.exporter.checkpoint.loader import Checkpoint
from vtx.exporter.checkpoint.original.templates import TEMPLATES
from vtx.exporter.checkpoint.settings import read_settings
from vtx.exporter.checkpoint.text_tower import TextTowerCheckpoint
from vtx.exporter.graphs.encoder import text_tower_tensors
from vtx.exporter.graphs.expert import expert_tensors
from vtx.exporter.graphs.gates import Gates
from vtx.exporter.graphs.joined import constant_bytes
from vtx.exporter.graphs.mixture import BUILT
from vtx.exporter.graphs.vision import video_tensors, vision_tensors
from vtx.exporter.reference.prompts import Source
from vtx.exporter.weights.mixed import split_head
from vtx.exporter.weights.plan import (
    UNTIED,
    WeightPlan,
    own_precisions,
    plan_weights,
    quantised_note,
    unused_weights,
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
from vtx.runtime.errors import DeviceError, ExportError, RequestError
from vtx.runtime.installing import install
from vtx.runtime.prompt.text import MAX_TEMPLATE_BYTES, Text, utf8
from vtx.runtime.prompt.tokenizer import parse_tokenizer
from vtx.tools.model.mixed import widened
from vtx.tools.model.mixture import ON_CPU

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
        text = self.config.text
        stored = self.weights.stored
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
        queries = self.scored
        shared = self.config.text.shared
        cuts = sorted({*self.reductions.cuts(self.ks), *([] if shared is None else [shared])})
        spans = self._parts(pairwise([1, *cuts, self.config.text.layers + 1]))
        stages = list[StageSpec]()
        inputs = self.config.token_inputs
        for first, after in spans:
            names = tuple(inputs[n].name for n in inputs if first <= n < after)
            convolved = self.config.text.conv_layers
            kinds = tuple(STATEFUL if layer in convolved else SLOTTED for layer in range(first, after))
            caches = kinds if STATEFUL in kinds else ()
            if first == shared:
                caches = (UNCACHED,) * (after - first)
            stages.append(StageSpec(first, after - 1, after - 1 in queries, names, caches))
        return tuple(stages)

    def _parts(self, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Stages from a layer to before another, in nearly equal parts of at most `stage_layers` layers.

        Layers that read K and V of others stay one stage.
        """
        most = self.options.stage_layers or self.config.text.layers
        shared = self.config.text.shared
        for first, after in spans:
            count = 1 if first == shared else -(-(after - first) // most)
            ends = [first + (after - first) * number // count for number in range(count + 1)]
            yield from pairwise(ends)

    @property
    def dialects(self) -> dict[str, Graphs]:
        needs = self.reductions.needs
        graphs = dict[str, Graphs]()
        for dialect in self.options.dialects:
            if dialect == CUDA and self.config.text.sliding is not None:
                continue  # as a warning says
            if dialect not in BUILT and self.config.text.mixture is not None:
                continue  # the same
            suffix = f"{dialect}.onnx"
            stages = tuple(f"stage-{s.first:02d}-{s.last:02d}.{suffix}" for s in self.stages)
            gates = tuple(f"gate-{k:02d}.{suffix}" for k in self.gated_ks)
            graphs[dialect] = Graphs(
                f"vision.{suffix}",
                f"embed.{suffix}",
                f"head.{suffix}",
                stages,
                gates,
                f"score.{suffix}" if self.scored else None,
                vision_merges=needs.merging,
                vision_attention=needs.attention,
                vision_last_attention=needs.last_attention,
                text_tower=f"text-tower.{suffix}" if self.text_tower else None,
                video=f"video.{suffix}" if self.config.frames is not None and dialect not in TENSORRT else None,
                projector=f"projector.{suffix}" if needs.projector else None,
                vision_received=max(needs.tower_layers, default=None),
            )
        return graphs

    @property
    def warnings(self) -> tuple[str, ...]:
        skipped = self.options.aware.skipped if self.options.aware else ()
        tower = self.text_tower.warnings if self.text_tower else ()
        gates = self.gates.warnings if self.gates else ()
        maps = len(self.config.vision.maps)
        unread = (
            f"at K = {k} no text sees {' and '.join(f'map {n}' for n in range(max(1, k - 1), maps + 1))} of the tower: "
            f"map n is added after layer n and seen from layer n + 1 on, so all {maps} count from K = {maps + 2} on"
            for k in sorted(self.ks)
            if k < maps + 2
        )
        windows = self.config.text.sliding is not None and CUDA in self.options.dialects
        left_out = ["no graphs for CUDA: sliding windows are not built for onnxruntime's CUDA provider"] * windows
        if self.config.text.mixture is not None and not {*self.options.dialects} <= {*BUILT}:
            left_out.append(f"no graphs for CUDA and TensorRT: {ON_CPU}")
        return *left_out, *self.disagreements, *gates, *tower, *unread, *(f"skipped {line}" for line in skipped)


def plan_export(options: ExportOptions) -> Plan:
    """Read and check everything but the weights themselves; write nothing."""
    for library in ("torch", "transformers"):  # fail now if one that the last step of an export needs is missing
        if find_spec(library) is None:
            raise DeviceError(f"exporting needs {library}; {install('export')}")
    source = read_source(options, str(demo_checkpoint()) if options.model == DEMO else options.model)
    choices = choose(options, source)
    prompts = read_prompts(options, source)
    checkpoint = source.checkpoint
    config = source.config
    weights, precisions = _placed(checkpoint, config, options, choices.reductions, choices.text_tower)
    prediction = _predicted(options, source, choices, prompts, weights, precisions)
    disagreements = _disagreements(source, prompts, weights)
    if (remark := quantised_note(weights)) is not None:
        checkpoint = replace(checkpoint, notes=(*checkpoint.notes, remark))
    return Plan(
        options,
        checkpoint,
        config,
        choices.ks,
        choices.gates,
        weights,
        choices.image,
        prompts.tokenizer,
        prompts.template,
        prompts.settings,
        choices.context,
        prediction,
        precisions,
        choices.text_tower,
        choices.reductions,
        choices.video,
        disagreements,
    )


def _predicted(
    options: ExportOptions,
    source: SourceModel,
    choices: Choices,
    prompts: Prompts,
    weights: WeightPlan,
    precisions: Precisions,
) -> Prediction:
    """Disk and memory, with what tokenizers, templates, gates and constants of graphs take."""
    config = source.config
    texts = [prompts.tokenizer, prompts.template]
    if choices.text_tower is not None:
        texts.append(choices.text_tower.tokenizer)
    text_bytes = [len(text.encode("utf-8", "replace")) for text in texts]
    written = sum(text_bytes) + choices.gates_bytes + constant_bytes(config.vision) * len(options.dialects)
    layers = _graph_layers(config, choices.text_tower) * len(options.dialects)
    small = small_files(config, choices.context, len(choices.ks), layers, written)
    prediction = predict(config, weights, choices.context, precisions, small, options)
    memory = tokenizer_memory(text_bytes[0], config.text.vocab)
    return replace(
        prediction, export_memory=prediction.export_memory + memory, run_memory=prediction.run_memory + memory
    )


def _disagreements(source: SourceModel, prompts: Prompts, weights: WeightPlan) -> tuple[str, ...]:
    """Warnings about files of the checkpoint that contradict each other."""
    checkpoint = source.checkpoint
    lines = [] if source.config.text.tied == source.stated_tied else [UNTIED]
    if unused := unused_weights(checkpoint, weights.stored, tied=source.config.text.tied):
        lines.append(unused)
    if source.unprinted:
        lines.append(UNPRINTED)
    generation = read_settings(source.text_folder, GENERATION)
    return (*lines, *generation_warnings(generation, prompts.parsed, prompts.template, prompts.settings))


def _placed(
    checkpoint: Checkpoint,
    config: ModelConfig,
    options: ExportOptions,
    reductions: Reductions,
    text_tower: TextTowerCheckpoint | None,
) -> tuple[WeightPlan, Precisions]:
    """The plan of all weights, from their sources to their files, and the precisions."""
    precisions = options.precisions(own_precisions(checkpoint))
    tensors = dict(checkpoint.tensors)
    requirements = [*vision_tensors(config, last_attention=reductions.needs.last_attention), *video_tensors(config)]
    requirements += config.text.tensors()
    if config.action is not None:
        requirements += expert_tensors(config.text, config.action)
    elif config.text.tied:
        shape = (config.text.vocab, config.text.hidden)
        table = checkpoint.require(EMBEDDING, shape)
        precisions = tied_head(precisions, options.head_precision, shape, table.dtype)
        if precisions.head_apart:
            requirements.append((HEAD, shape))
            tensors[HEAD] = table
    if text_tower is not None:
        requirements += text_tower_tensors(text_tower.spec, config.vision.hidden)
        tensors |= text_tower.checkpoint.tensors
    if options.bits is not None:
        if own_precisions(checkpoint):
            raise RequestError("--bits is for weights that vtx rounds; this checkpoint's are integers: leave it out")
        if options.head_precision is None and HEAD in dict(requirements) and not tensors[HEAD].moved:
            tensors, requirements = split_head(tensors, requirements)
            precisions = replace(precisions, head=precisions.decoder)
        precisions = widened(precisions, requirements, options.bits)
    scaled = scaled_weights(config.text, precisions.decoder) if options.aware else set()
    return plan_weights(replace(checkpoint, tensors=tensors), requirements, precisions, scaled), precisions


def _graph_layers(config: ModelConfig, text_tower: TextTowerCheckpoint | None) -> int:
    """The layers and blocks of all graphs of one dialect, which their sizes grow with."""
    layers = config.text.layers + max(config.feature_layers) * (1 if config.frames is None else 2)
    layers += text_tower.spec.layers if text_tower else 0
    return layers + sum(max(tower.layers, sum(tower.stage_blocks)) for tower in config.vision.towers)


def demo_checkpoint() -> Path:
    """The built-in demo model, a small LLaVA in Hugging Face's layout."""
    return Path(str(files("vtx.exporter") / "demo_model"))


def load_template(path: Path) -> str:
    """The chat template in a file, or one of original LLaVA's by its name if there is none. Raises RequestError."""
    if str(path) in TEMPLATES and not path.exists():
        return TEMPLATES[str(path)]
    return utf8(read_text_file(path, MAX_TEMPLATE_BYTES), path.name, RequestError)
