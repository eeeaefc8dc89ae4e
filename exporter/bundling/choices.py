"""The choices of an export: K, gates, reductions, slots, and how images, videos and prompts are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.reductions import Reductions, plan_reductions
from vtx.exporter.bundling.source import SourceModel, check_ks
from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.family import Family
from vtx.exporter.checkpoint.loader import Checkpoint
from vtx.exporter.checkpoint.processor import (
    image_settings,
    read_image_processor,
    read_video_processor,
    read_video_settings,
)
from vtx.exporter.checkpoint.text import TextOptions, read_template, read_text
from vtx.exporter.checkpoint.text_tower import TextTowerCheckpoint, open_text_tower
from vtx.exporter.graphs.activations import check_activation
from vtx.exporter.graphs.gates import Gates, read_gates
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.manifest import VideoSpec
from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.errors import ExportError, RequestError, UnsupportedModelError
from vtx.runtime.policies.make import TEXT_TOWER_FIX
from vtx.runtime.prompt.text import Text
from vtx.runtime.prompt.tokenizer import parse_tokenizer
from vtx.runtime.vision.layouts import spec_of
from vtx.runtime.vision.layouts.frames import Frames
from vtx.runtime.vision.layouts.pairs import Pairs

# Slots of a bundle that is exported without --max-context: at least, and beside the largest image those of a question
# and its answer.
DEFAULT_CONTEXT = 4096
ASKED = 1024


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices for one model, checked against it. `context`: slots of the bundle."""

    ks: tuple[int, ...]
    gates: Gates | None
    reductions: Reductions
    text_tower: TextTowerCheckpoint | None
    context: int
    image: ImageSettings
    video: VideoSpec | None

    @property
    def gates_bytes(self) -> int:
        """Bytes of the gates of the chosen K."""
        if self.gates is None:
            return 0
        return sum(array.nbytes for k in self.ks for array in self.gates.by_k.get(k, ()))


@dataclass(frozen=True, slots=True)
class Prompts:
    """The tokenizer, as its file holds it and parsed, and the chat template with the ids of special tokens."""

    tokenizer: str
    template: str
    settings: TextSettings
    parsed: Tokenizer


def choose(options: ExportOptions, source: SourceModel) -> Choices:
    """The choices of `options` for this model. Raises RequestError, UnsupportedModelError, CheckpointError."""
    checkpoint = source.checkpoint
    config = source.config
    if options.aware is not None and config.text.mixture is not None:
        raise UnsupportedModelError(
            "--activation-aware measures the inputs of matrices that every token meets, and this model has experts, "
            "which few tokens meet; leave it out"
        )
    gates, ks = _gates_and_ks(options, checkpoint, config)
    reductions = plan_reductions(options.reductions, config)
    if source.family.reader:
        _check_reader(options, ks)
    text_tower = _text_tower(options, checkpoint, config, reductions)
    if options.retain is not None:
        options.retain.check(options.reductions)
    context = _context(options, config)
    image = _image_settings(checkpoint, config, source.family)
    video = _video(checkpoint, config, source.family, source.downsampling)
    return Choices(ks, gates, reductions, text_tower, context, image, video)


def read_prompts(options: ExportOptions, source: SourceModel) -> Prompts:
    """The tokenizer and the template. Raises CheckpointError, UnsupportedModelError."""
    checkpoint = source.checkpoint
    config = source.config
    family = source.family
    original = checkpoint.original
    tokenizer, template, settings = read_text(
        source.text_folder,
        config.image_token_id,
        checkpoint.config.get("text_config") or {},
        checkpoint.config,
        TextOptions(
            template=_chat_template(options, checkpoint, family, config),
            original=original is not None,
            video_token_id=config.video.token_id if config.video else None,
            seg_token=family.seg_token,
            end_ids=original.end_ids if original else None,
            whole=family.prompt is not None,
            vocab=config.text.vocab,
            fix_mistral_regex=family.fix_mistral_regex,
        ),
    )
    settings = replace(settings, boxes=family.boxes)
    parsed = parse_tokenizer(tokenizer, ExportError)
    if family.check is not None and options.template is None:
        family.check(Text(parsed, template, settings))
    return Prompts(tokenizer, template, settings, parsed)


def _gates_and_ks(
    options: ExportOptions, checkpoint: Checkpoint, config: ModelConfig
) -> tuple[Gates | None, tuple[int, ...]]:
    gates = read_gates(options.gates, config.text, checkpoint.fingerprint()) if options.gates else None
    ks = tuple(gates.by_k) if gates and options.ks == "auto" else tuple(k for k in options.ks if isinstance(k, int))
    check_ks(ks, config.text.layers)
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


def _check_reader(options: ExportOptions, ks: tuple[int, ...]) -> None:
    """Raise RequestError if image tokens would leave, and neither a calibration nor the user accepts other answers."""
    if (ks or options.reductions) and options.calibration is None and not options.allow_changed_answers:
        raise RequestError(
            "this model reads documents, and --k and --reduce drop image tokens whose text it has not read yet (at K "
            "after half of its layers, a reader of drawn pages lost 93% of their lines); leave them out, or add "
            "--allow-changed-answers"
        )


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


def _image_settings(checkpoint: Checkpoint, config: ModelConfig, family: Family) -> ImageSettings:
    processor = checkpoint.original.processor if checkpoint.original else read_image_processor(checkpoint.folder)
    return _of_side(image_settings(processor, family.processors), config, "image")


def _of_side(settings: ImageSettings, config: ModelConfig, kind: str) -> ImageSettings:
    """The settings, which must give images of the tower's size."""
    side = config.vision.image
    height, width = settings.sides
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
            processor = read_video_processor(checkpoint.folder)
            if not isinstance(layout, Pairs):
                processor = processor or read_image_processor(checkpoint.folder)
            layout = family.adjust_video(layout, {**processor, **chosen})
        elif frames is not None:
            assert isinstance(layout, Frames)
            layout = replace(layout, frames=frames)
    return VideoSpec(spec_of(layout), settings, config.frames is not None)


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


def _by_kind(images: str, videos: str) -> str:
    """A chat template that is `videos` for conversations with a video, and else `images`."""
    images = images.removesuffix("\n")  # as jinja reads it alone; the empty text keeps a line break at its beginning
    return (
        "{% set pictures = namespace(videos=false) %}{% for message in messages if message['content'] is not string %}"
        "{% for part in message['content'] if part['type'] == 'video' %}{% set pictures.videos = true %}{% endfor %}"
        f"{{% endfor %}}{{% if pictures.videos %}}{videos}{{% else %}}{{{{ '' }}}}{images}{{% endif %}}"
    )
