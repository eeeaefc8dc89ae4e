"""The model of an export: the checkpoint, its family, and the configuration with what the options state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.families.registry import find_family, read_config
from vtx.exporter.checkpoint.family import Family
from vtx.exporter.checkpoint.loader import Checkpoint
from vtx.exporter.checkpoint.processor import read_image_processor
from vtx.exporter.checkpoint.settings import read_settings
from vtx.exporter.checkpoint.text import read_template
from vtx.exporter.graphs.activations import check_activation
from vtx.exporter.weights.plan import with_own_head
from vtx.runtime.errors import RequestError, UnsupportedModelError
from vtx.runtime.policies.spec import parse
from vtx.runtime.vision.layouts.frames import Frames

DOWNSAMPLE = "downsample_mode"


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A checkpoint and its configuration.

    `downsampling`: the setting of --downsample. `stated_tied`: whether config.json ties the head, which the weights may
    contradict. `unprinted`: the model sees videos, and its chat template does not print them.
    """

    checkpoint: Checkpoint
    family: Family
    config: ModelConfig
    downsampling: dict[str, str]
    stated_tied: bool
    unprinted: bool

    @property
    def text_folder(self) -> Path:
        """The folder of the tokenizer."""
        original = self.checkpoint.original
        return self.checkpoint.folder if original is None else original.text_folder


def read_source(options: ExportOptions, model: str) -> SourceModel:
    """Open the checkpoint `model` and read its configuration. Raises CheckpointError, UnsupportedModelError, and
    RequestError for options that it rules out.
    """
    checkpoint = open_checkpoint(model, tower=options.tower, allow_pickle=options.allow_pickle)
    family = find_family(checkpoint.config)
    _check_early(options, checkpoint)
    downsampling = _downsampling(options, family)
    checkpoint, stated = _configured(checkpoint, family, options, downsampling)
    config = replace(stated, text=with_own_head(stated.text, checkpoint))
    unprinted = False
    if config.video is not None and (family.video_template or not isinstance(config.video.layout, Frames)):
        template = options.template or family.video_template or read_template(checkpoint.folder)
        unprinted = "video" not in template
    if unprinted:
        config = replace(config, video=None)
    return SourceModel(checkpoint, family, config, downsampling, stated.text.tied, unprinted)


def _check_early(options: ExportOptions, checkpoint: Checkpoint) -> None:
    """Check what needs no more than config.json, before transformers is loaded to read the rest."""
    for spec in options.reductions:
        parse(spec)
    part = checkpoint.config.get("text_config")
    text = part if isinstance(part, dict) else checkpoint.config
    layers = text.get("num_hidden_layers")
    if isinstance(layers, int) and options.ks != "auto":
        check_ks(options.ks, layers)


def check_ks(ks: Sequence[int], layers: int) -> None:
    """Raise RequestError for a K that is outside the model, or named twice."""
    for k in ks:
        if not 2 <= k <= layers:
            raise RequestError(
                f"K = {k} is outside 2..{layers}; K is the first layer without vision tokens; give another"
            )
    if len(set(ks)) != len(ks):
        raise RequestError(f"K = {', '.join(map(str, ks))} names a depth twice; name each only once")


def _configured(
    checkpoint: Checkpoint, family: Family, options: ExportOptions, chosen: dict[str, str]
) -> tuple[Checkpoint, ModelConfig]:
    """The configuration with what other files of the checkpoint and the options state, and how to read its weights."""
    config = read_config({**checkpoint.config, **chosen})
    downsample = _patches_of_a_token(checkpoint, family, chosen)
    checkpoint = replace(checkpoint, factors=config.text.factors, shifts=config.text.shifts, downsample=downsample)
    if family.adjust is not None:
        config = family.adjust(config, {**read_image_processor(checkpoint.folder), **chosen})
    if family.statistics is not None:
        config = family.statistics(config, read_settings(checkpoint.folder, "processor_config.json"))
    config = _acting(config, options)
    for activation in (config.text.activation, config.vision.activation, config.projector_activation):
        check_activation(activation)
    return checkpoint, config


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
    if not config.action.cameras:
        return replace(config, action=replace(config.action, cameras=options.cameras))
    if options.cameras:
        raise RequestError(
            f"--cameras is for checkpoints that name none, this one names {', '.join(config.action.cameras)}; leave "
            "it out"
        )
    return config


def _downsampling(options: ExportOptions, family: Family) -> dict[str, str]:
    """The setting of `--downsample`, which replaces that of both files of the checkpoint."""
    if options.downsample is None:
        return {}
    if options.downsample not in family.downsampling:
        names = ", ".join(family.downsampling)
        fix = f"this model has {names}; use one of these" if names else "this model leaves no choice; leave it out"
        raise RequestError(f"--downsample is {options.downsample!r:.40}; {fix}")
    return {DOWNSAMPLE: options.downsample}


def _patches_of_a_token(checkpoint: Checkpoint, family: Family, chosen: dict[str, str]) -> str | None:
    """The chosen setting, else the checkpoint's own, else the family's first; None if it leaves no choice."""
    if not family.downsampling:
        return None
    return chosen.get(DOWNSAMPLE) or checkpoint.config.get(DOWNSAMPLE) or family.downsampling[0]
