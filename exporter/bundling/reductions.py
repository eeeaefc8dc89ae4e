"""The reductions of a bundle, checked against the model that they are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.merge import SIDE
from vtx.runtime.bundle.spec.model_spec import unscored
from vtx.runtime.errors import RequestError, UnsupportedModelError
from vtx.runtime.policies.base import Needs, Policy, Reduction
from vtx.runtime.policies.make import NO_VIDEOS, NOT_RENUMBERED, check_depth, check_layout, check_patches
from vtx.runtime.policies.spec import parse, to_spec


@dataclass(frozen=True, slots=True)
class Reductions:
    """The canonical specs, the default first, and their needs together."""

    specs: tuple[str, ...] = ()
    needs: Needs = Needs()  # noqa: RUF009 - frozen

    def cuts(self, ks: Sequence[int]) -> list[int]:
        return sorted({*ks, *self.needs.boundaries})


def plan_reductions(texts: Sequence[str], config: ModelConfig) -> Reductions:
    """Read and check the specs of `--reduce`. Raises RequestError, UnsupportedModelError."""
    needs = Needs()
    specs = list[str]()
    if texts and config.action is not None:
        raise UnsupportedModelError("models that output actions support --k, but no reductions; leave --reduce out")
    for text in texts:
        parts = parse(text)
        check_depth(parts, config.text.layers)
        for part in parts:
            _check_decoder(part, config)
            _check_tower(part, config)
            _check_states(part, config.text)
            _check_merging(part, config)
        check_layout(parts, config.layout)
        if (canonical := to_spec(parts)) in specs:
            raise RequestError(f"--reduce {canonical} is given twice; name each variant once")
        specs.append(canonical)
        needs |= Policy(parts).needs
    _check_together(needs, config)
    return Reductions(tuple(specs), needs)


def _check_decoder(part: Reduction, config: ModelConfig) -> None:
    """Raise UnsupportedModelError if a reduction needs what the decoder's layers do not have."""
    needs = part.needs()
    text = config.text
    if part.renumbers and text.rope.sections:
        raise UnsupportedModelError(f"{part.name}: this model has {NOT_RENUMBERED}")
    if text.two_way == "prompt" and needs.scored:
        raise UnsupportedModelError(
            f"{part.name} ranks tokens by the question's attention, but in this model the image also attends "
            "to the question; use a method that selects before the decoder, e.g. divprune or cdpruner, or --k"
        )
    if part.of_videos and config.video is None:
        raise UnsupportedModelError(f"{part.name} {NO_VIDEOS}")
    _check_layers(part, text)


def _check_layers(part: Reduction, text: TextConfig) -> None:
    """Raise UnsupportedModelError for layers that cannot rank tokens, or would still see those that are dropped."""
    needs = part.needs()
    if windowed := [layer for layer in needs.scored if text.slides(layer)]:
        full = [layer for layer in range(1, text.shared or text.layers) if not unscored(text, layer)]
        raise UnsupportedModelError(
            f"{part.name} reads the attention of layer {windowed[0]}, which has a sliding window of "
            f"{text.sliding.window if text.sliding else 0} positions; use one with full "
            f"attention: {', '.join(map(str, full)) or 'none'}"
        )
    source = text.first_source
    if source is not None and (beyond := [cut for cut in needs.boundaries if cut > source]):
        raise UnsupportedModelError(
            f"{part.name} drops tokens after layer {beyond[0] - 1}, but this model's layers from "
            f"{text.shared} on would still see them in K and V of layer {source}; use layers before it"
        )


def _check_states(part: Reduction, c: TextConfig) -> None:
    """Raise UnsupportedModelError if a reduction needs what layers that keep a state do not have."""
    verb, kind = ("is", "a convolution") if c.delta is None else ("has", "the gated delta rule")
    needs = part.needs()
    convolved = c.conv_layers
    scored = set(needs.scored) | ({cut - 1 for cut in needs.cuts} if needs.final_norm else set())
    if convolved and needs.shrinks is not None:
        raise UnsupportedModelError(
            f"{part.name} takes tokens out of the caches after the prompt, and layers with {kind} keep a state, "
            "from which none can be taken; use fastv, or dart after a layer"
        )
    if wrong := sorted(scored & set(convolved)):
        attending = [layer for layer in range(1, c.layers + 1) if not unscored(c, layer)]
        raise UnsupportedModelError(
            f"{part.name} reads the attention of layer {wrong[0]}, which {verb} {kind} in this model; use a layer "
            f"with attention: {', '.join(map(str, attending))}"
        )


def _check_tower(part: Reduction, config: ModelConfig) -> None:
    """Raise UnsupportedModelError if a reduction needs what the tower does not have."""
    needs = part.needs()
    vision = config.vision
    blocks = max(config.feature_layers)
    side = max(vision.square, vision.pool)
    check_patches(part, side, class_token=vision.class_token, two_towers=vision.several)
    if (vision.stage_blocks or vision.native) and (needs.tower_layers or needs.merging):
        form = "is convolutional" if vision.stage_blocks else "sees images at native resolution"
        raise UnsupportedModelError(
            f"{part.name} reads the blocks of a transformer tower for images of one size, but this model's tower "
            f"{form}; use fastv, cdpruner, divprune, dart, or mustdrop:...,tau=off,key=0"
        )
    if needs.tower_layers and max(needs.tower_layers) > blocks:
        raise UnsupportedModelError(
            f"{part.name} reads block {max(needs.tower_layers)} of the tower, but this model uses only {blocks} "
            f"blocks; set layer to a number from 1 to {blocks}"
        )


def _check_merging(part: Reduction, config: ModelConfig) -> None:
    """Raise UnsupportedModelError if a reduction merges windows of patches and the model cannot."""
    grid = config.vision.grid
    if not part.needs().merging:
        return
    if grid < SIDE:
        raise UnsupportedModelError(
            f"{part.name} merges windows of {SIDE} x {SIDE} patches, but the tower has only {grid} x "
            f"{grid}; disable merging (mustdrop:...,tau=off)"
        )
    if config.layout.max_views > 1:
        raise UnsupportedModelError(
            f"{part.name} merges windows of patches, but this model joins its tiles into one grid; "
            "disable merging (mustdrop:...,tau=off)"
        )
    if 0 in config.feature_layers:
        raise UnsupportedModelError(
            f"{part.name} merges patches after the tower's first layer, but the model also uses the hidden "
            "states before it (vision_feature_layer 0); disable merging (mustdrop:...,tau=off)"
        )


def _check_together(needs: Needs, config: ModelConfig) -> None:
    """Raise if reductions that one vision graph serves need different ones: merging changes what others read."""
    if len(needs.tower_layers) > 1:
        blocks = " and ".join(map(str, sorted(needs.tower_layers)))
        raise RequestError(
            f"--reduce names blocks {blocks} of the tower; a bundle has the attention of one, so give one"
        )
    too_early = needs.attention and max(config.feature_layers) < 2
    if needs.merging and (too_early or (needs.last_attention and config.vision.layers < 2)):
        raise UnsupportedModelError(
            "merging and the class token's attention need two layers of the tower, and the model uses one; "
            "leave out merging (tau=off) or key tokens (key=0)"
        )
