"""The reading of families with Pixtral's tower: images in their own shape up to a longest edge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, feature_layers_of, image_token_of, parse_parts, tower_of
from vtx.exporter.checkpoint.family import CLIP_DEFAULTS, ImageProcessor
from vtx.exporter.checkpoint.fields import size
from vtx.exporter.checkpoint.text_config import TEXT_FAMILIES, text_config_of
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.longest import LongestEdge
from vtx.tools.model.vision import VisionConfig

NORM_EPS = 1e-5  # of the tower's norms: no setting
THETA = 10_000.0
LONGEST = 1024  # pixels by default
PROCESSOR = ImageProcessor(
    "PixtralImageProcessor", {**CLIP_DEFAULTS, "do_center_crop": False, "do_pad": True}, own_size=True
)


def read_pixtral(config: Mapping[str, Any], kind: str, *, marks: bool = True) -> ModelConfig:
    """Read `config.json` with transformers' class `kind`; `marks`: a token ends each row of an image's tokens."""
    parsed = parse_parts(kind, config, TEXT_FAMILIES, ("pixtral",))
    text = text_config_of(parsed)
    merges = hasattr(parsed, "spatial_merge_size")
    merge = size(parsed, "spatial_merge_size", 64) if merges else 1
    if merges and merge == 1:  # transformers has a norm and a matrix there all the same
        raise UnsupportedModelError("spatial_merge_size 1 is not supported; vtx exports models with 2 or more")
    vision = _tower(parsed.vision_config, merge)
    select = getattr(parsed, "vision_feature_select_strategy", "full")
    layers = feature_layers_of(getattr(parsed, "vision_feature_layer", -1), vision.layers)
    if select != "full" or (merge > 1 and len(layers) > 1):
        raise UnsupportedModelError(
            f"vision_feature_select_strategy {select!r} with {len(layers)} layers of a Pixtral tower is not supported; "
            "vtx supports 'full', and one layer where patches are merged"
        )
    return ModelConfig(
        text=text,
        vision=vision,
        feature_layers=layers,
        select="full",
        projector_activation=getattr(parsed, "projector_hidden_act", "gelu"),
        projector_bias=bool(getattr(parsed, "multimodal_projector_bias", False)),
        image_token_id=image_token_of(parsed, text),
        layout=_layout(vision, vision.image, vision.patch * merge, marks, "config.json: image_size"),
        projector_norm_eps=text.eps if merge > 1 else None,
    )


def _tower(config: Any, merge: int) -> VisionConfig:
    config.layer_norm_eps = NORM_EPS
    tower = tower_of(config, "pixtral")
    theta = dict(config.rope_parameters or {}).get("rope_theta", THETA)
    if theta != THETA or tower.hidden // tower.heads % 4:
        raise UnsupportedModelError(
            f"a Pixtral tower with rope_theta {theta!r:.40} and heads of {tower.hidden // tower.heads} is not "
            f"supported; vtx supports {THETA:g} and multiples of 4"
        )
    return replace(tower, native=True, projected=True, shuffle=merge)


def _layout(vision: VisionConfig, longest: int, step: int, marks: bool, source: str) -> LongestEdge:
    """The layout with a longest edge that `source` states. Raises CheckpointError."""
    try:
        return LongestEdge(vision.patch, vision.shuffle, longest, step, marks)
    except BundleError as e:
        raise CheckpointError(f"{source}: {e}") from e


def adjust_pixtral(config: ModelConfig, processor: Mapping[str, Any], step: int | None = None) -> ModelConfig:
    """Set the image processor's longest edge; `step`: pixels of which an image's sides are multiples."""
    name = processor.get("image_processor_type")
    sizes = processor.get("size", {"longest_edge": LONGEST})
    if not str(name).startswith(PROCESSOR.name) or not isinstance(sizes, Mapping) or "longest_edge" not in sizes:
        raise UnsupportedModelError(
            f"image processor {name!r:.40} with size {sizes!r:.60} is not supported with a Pixtral tower; vtx supports "
            f"{PROCESSOR.name} with longest_edge"
        )
    edge = sizes["longest_edge"]
    if type(edge) is not int:
        raise CheckpointError(f"the image processor's longest_edge is {edge!r:.40}, not a number of pixels; correct it")
    assert isinstance(config.layout, LongestEdge)
    unit = step or config.layout.step
    layout = _layout(config.vision, edge, unit, config.layout.marks, "the image processor's longest_edge")
    return replace(config, layout=layout, vision=replace(config.vision, image=edge))
