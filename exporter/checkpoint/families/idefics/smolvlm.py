"""SmolVLM and SmolVLM2: tiles marked with their positions in text, a SigLIP tower, several patches a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, VideoConfig, image_token_of, parse_parts, tower_of
from vtx.exporter.checkpoint.family import SIGLIP_DEFAULTS, Family, ImageProcessor
from vtx.exporter.checkpoint.fields import size
from vtx.exporter.checkpoint.text_config import TEXT_FAMILIES, text_config_of
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.frames import MAX_LONGER, Frames
from vtx.runtime.vision.layouts.marked import MAX_SIDE, MarkedTiles
from vtx.runtime.vision.limits import MAX_SAMPLED_FRAMES
from vtx.tools.model.vision import VisionConfig

SIDE = 4  # tiles along the longer side by default
A_SECOND = 1.0  # frames of a video by default
_LONGEST = "longest_edge"
_DEFAULTS = {
    **SIGLIP_DEFAULTS,
    "resample": 1,
    "size": {_LONGEST: 1456},
    "max_image_size": {_LONGEST: 364},
    "do_pad": True,
}
# Transformers' processor takes it for any conversation with a video. Here the image token stands for a video too.
VIDEO_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for line in message['content'] %}"
    "{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' or line['type'] == 'video' %}{{ '<image>' }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# Transformers finds a patch's position by comparing fractions of the side. In these grids each patch gets its own; in
# others rounding gives some patches their neighbour's.
_UNROUNDED = (26, 27, *(1 << power for power in range(11)))


def read_marked(name: str, config: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a model whose classes in transformers begin with `name`."""
    parsed = parse_parts(f"{name}Config", config, TEXT_FAMILIES)
    text_config = text_config_of(parsed)
    side = size(parsed, "scale_factor", 64)
    tower = replace(tower_of(parsed.vision_config, "siglip", side), shuffle=side, post_norm=True)
    if tower.grid not in _UNROUNDED:
        raise UnsupportedModelError(
            f"a tower of {tower.grid} x {tower.grid} patches is not supported: their positions may be rounded; vtx "
            "exports 26, 27 or a power of two a side"
        )
    return ModelConfig(
        text=text_config,
        vision=tower,
        feature_layers=(tower.layers,),
        select="full",
        projector_activation="gelu",
        projector_bias=False,
        image_token_id=image_token_of(parsed, text_config),
        layout=_layout(tower, SIDE),
        projector_layers=1,
    )


def _layout(tower: VisionConfig, side: int) -> MarkedTiles:
    return MarkedTiles(tower.image, (tower.grid // tower.shuffle) ** 2, side, side**2 + (side > 1))


def _adjust(config: ModelConfig, processor: Mapping[str, Any]) -> ModelConfig:
    """Set the image size of the image processor."""
    tile = config.vision.image
    edge = processor.get("size", {_LONGEST: SIDE * tile})
    longest = edge.get(_LONGEST) if isinstance(edge, Mapping) else None
    for flag in ("do_resize", "do_image_splitting"):
        if processor.get(flag, True) is not True:
            raise UnsupportedModelError(f"the image processor's {flag} is {processor[flag]!r:.20}; it must be true")
    if type(longest) is not int or longest % tile or not 1 <= longest // tile <= MAX_SIDE:
        raise UnsupportedModelError(
            f"the image processor's size is {edge!r:.60}; vtx supports a longest_edge of 1 to {MAX_SIDE} times the "
            f"tower's {tile} pixels"
        )
    try:
        return replace(config, layout=_layout(config.vision, longest // tile))
    except BundleError as e:
        raise CheckpointError(f"the image processor's size: {e}") from e


def _with_videos(config: Mapping[str, Any]) -> ModelConfig:
    model = read_marked("SmolVLM", config)
    frames = Frames(MAX_SAMPLED_FRAMES, model.view_tokens, a_second=A_SECOND, longer=SIDE * model.vision.image)
    return replace(model, video=VideoConfig(model.image_token_id, frames, model.select))


def _adjust_video(frames: Frames, processor: Mapping[str, Any]) -> Frames:
    """Set how the video processor samples and resizes frames; its `size` counts, even if video_sampling has one."""
    sampling = processor.get("video_sampling") or {}
    if not isinstance(sampling, Mapping):
        raise CheckpointError(f"the video processor's video_sampling is {sampling!r:.40}, not an object; correct it")
    rate, most = (
        sampling.get(name, processor.get(other)) for name, other in (("fps", "fps"), ("max_frames", "num_frames"))
    )
    edge = processor.get("size") or sampling.get("video_size") or {_LONGEST: frames.longer}
    longer = edge.get(_LONGEST) if isinstance(edge, Mapping) else None
    rate = A_SECOND if rate is None else rate
    most = MAX_SAMPLED_FRAMES if most is None else most
    if type(rate) not in (int, float) or type(most) is not int or most < 1 or type(longer) is not int:
        raise CheckpointError(
            f"the video processor samples {rate!r:.20} frames a second, at most {most!r:.20}, and its size is "
            f"{edge!r:.60}; vtx needs two numbers and a longest_edge; correct them"
        )
    try:
        return replace(
            frames, frames=min(most, MAX_SAMPLED_FRAMES), a_second=float(rate), longer=min(longer, MAX_LONGER)
        )
    except BundleError as e:
        raise CheckpointError(f"the video processor's settings: {e}") from e


def marked_family(name: str) -> Family:
    """The family whose transformers classes begin with `name`."""
    return Family(
        model_type=name.lower(),
        architecture=f"{name}ForConditionalGeneration",
        read=partial(read_marked, name),
        processors=(ImageProcessor(f"{name}ImageProcessor", _DEFAULTS, tiled=True, size="max_image_size"),),
        adjust=_adjust,
        tensors=(
            (r"^model\.vision_model\.", "vision."),
            (r"^model\.text_model\.", "text."),
            (r"^model\.connector\.modality_projection\.proj\.", "projector.linear_1."),
        ),
    )


FAMILY = replace(
    marked_family("SmolVLM"),
    read=_with_videos,
    adjust_video=_adjust_video,
    video_template=VIDEO_TEMPLATE,
    video_processor=ImageProcessor("SmolVLMVideoProcessor", _DEFAULTS, tiled=True, size="max_image_size"),
)
