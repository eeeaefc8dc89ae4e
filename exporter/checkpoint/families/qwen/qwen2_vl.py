"""Qwen2-VL in Hugging Face's layout: images at native resolution, and positions of three parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, VideoConfig, check_layers, image_token_of, parse_parts
from vtx.exporter.checkpoint.family import CLIP_DEFAULTS, Family, ImageProcessor
from vtx.exporter.checkpoint.fields import check_patches, size
from vtx.exporter.checkpoint.text_config import TextConfig, text_config_of
from vtx.runtime.bundle.spec.model_spec import MAX_LAYERS
from vtx.runtime.bundle.spec.text_settings import BoxForm
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.native import Native
from vtx.runtime.vision.layouts.pairs import Pairs
from vtx.runtime.vision.limits import MAX_SAMPLED_FRAMES
from vtx.tools.model.towers.native import MOMENTS
from vtx.tools.model.vision import VisionConfig

NORM_EPS = 1e-6  # of the tower's norms: no setting
FEWEST = 56 * 56  # pixels by default
MOST = 28 * 28 * 1280
FRAME_TOKENS = 128, 768  # of a frame of a video by default
A_SECOND = 2.0  # frames of a video by default
FEWEST_FRAMES = 4
CAPS = {True: 768, False: 128_000}  # tokens that cap_pixels_per_frame goes by, if limits are of all frames together
# Settings of the tower whose other values are not supported.
SUPPORTED: Mapping[str, Any] = {"temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3}
_DEFAULTS = {**CLIP_DEFAULTS, "do_center_crop": False, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
PROCESSOR = ImageProcessor("Qwen2VLImageProcessor", _DEFAULTS, own_size=True)
VIDEO_PROCESSOR = ImageProcessor("Qwen2VLVideoProcessor", _DEFAULTS, own_size=True)
TENSORS = (  # Qwen3-VL has other names for the parts of blocks and mergers
    (r"^(?:model\.)?visual\.(blocks\.\d+\.mlp)\.linear_fc", r"vision.\1.fc"),
    (r"^(?:model\.)?visual\.(merger|deepstack_merger_list\.\d+)\.norm\.", r"vision.\1.ln_q."),
    (r"^(?:model\.)?visual\.(merger|deepstack_merger_list\.\d+)\.linear_fc1\.", r"vision.\1.mlp.0."),
    (r"^(?:model\.)?visual\.(merger|deepstack_merger_list\.\d+)\.linear_fc2\.", r"vision.\1.mlp.2."),
    (r"^(?:model\.)?visual\.", "vision."),
    (r"^model\.(embed_tokens|layers|norm)\.", r"text.\1."),
)


def read_qwen(
    config: Mapping[str, Any],
    kind: str,
    tower: Callable[[Any, TextConfig], VisionConfig],
    in_time: Callable[[Pairs, Any], Pairs] = lambda frames, _: frames,
) -> ModelConfig:
    """Read `config.json` with transformers' class `kind`; `tower` reads its vision_config.

    `in_time` sets the place in time of the frames of videos, also by vision_config.
    """
    check_layers(config)
    parsed = parse_parts(kind, config)
    text = text_config_of(parsed)
    vision = tower(parsed.vision_config, text)
    frames = pairs_of(vision)
    return ModelConfig(
        text=text,
        vision=vision,
        feature_layers=(vision.layers,),
        select="full",
        projector_activation="gelu",
        projector_bias=True,
        image_token_id=image_token_of(parsed, text),
        layout=Native(vision.patch, vision.shuffle, FEWEST, MOST),
        projector_norm_eps=NORM_EPS,
        projector_rms=vision.rms_norm,
        video=VideoConfig(image_token_of(parsed, text, "video"), in_time(frames, parsed.vision_config), "full"),
    )


def pairs_of(vision: VisionConfig) -> Pairs:
    """The layout of videos before their own file is read."""
    area = (vision.patch * vision.shuffle) ** 2
    least, most = (count * area for count in FRAME_TOKENS)
    return Pairs(vision.patch, vision.shuffle, least, most, MAX_SAMPLED_FRAMES, A_SECOND, FEWEST_FRAMES)


def native_tower(config: Any, family: str, hidden: int, ffn: int, out: int, text: TextConfig) -> VisionConfig:
    """A tower of images at native resolution; `out` is the width of its tokens."""
    rope = dict(config.rope_parameters or {})
    found = {name: getattr(config, name) for name in SUPPORTED} | {"rope_theta": rope.get("rope_theta", 10000.0)}
    for name, built in {**SUPPORTED, "rope_theta": 10000.0}.items():
        if found[name] != built:
            raise UnsupportedModelError(
                f"{name} of the vision tower is {found[name]!r:.40}, vtx exports {family} models with {built} only"
            )
    heads = size(config, "num_heads")
    patch = size(config, "patch_size", 1 << 10)
    if hidden % heads or hidden // heads % 4 or out != text.hidden:
        raise CheckpointError(
            f"config.json: a tower of hidden size {hidden} with {heads} heads and tokens of width {out} does not fit "
            f"a text model of hidden size {text.hidden}; correct config.json"
        )
    return VisionConfig(
        family=family,
        layers=size(config, "depth", MAX_LAYERS),
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        image=largest_side(MOST, patch * config.spatial_merge_size),
        patch=patch,
        eps=NORM_EPS,
        activation=str(config.hidden_act),
        shuffle=config.spatial_merge_size,
        native=True,
    )


def largest_side(pixels: int, unit: int) -> int:
    return max(1, int(math.sqrt(pixels)) // unit) * unit


def _tower(config: Any, text: TextConfig) -> VisionConfig:
    hidden = size(config, "embed_dim")
    ratio = size(config, "mlp_ratio", 64)
    return native_tower(config, "qwen2_vl", hidden, hidden * ratio, size(config, "hidden_size"), text)


def adjust(config: ModelConfig, processor: Mapping[str, Any]) -> ModelConfig:
    """Set the image processor's limits of pixels; its patches must be the tower's."""
    vision = config.vision
    moments = 1 if vision.one_frame else MOMENTS
    check_patches(processor, {"patch_size": vision.patch, "merge_size": vision.shuffle, "temporal_patch_size": moments})
    least, most = (_pixels(processor, *names) for names in (("min", "shortest", FEWEST), ("max", "longest", MOST)))
    assert isinstance(config.layout, Native)
    try:
        layout = replace(config.layout, min_pixels=least, max_pixels=most)
    except BundleError as e:
        raise CheckpointError(f"the image processor's min_pixels and max_pixels: {e}") from e
    return replace(config, layout=layout, vision=replace(vision, image=largest_side(most, layout.unit)))


def adjust_video(frames: Pairs, processor: Mapping[str, Any]) -> Pairs:
    """Set the video processor's limits of pixels and its sampling; its patches must be the tower's."""
    check_patches(
        processor, {"patch_size": frames.patch, "merge_size": frames.merge, "temporal_patch_size": 2}, "video"
    )
    if processor.get("num_frames") is not None:
        raise UnsupportedModelError(
            f"the video processor's num_frames {processor['num_frames']!r:.20} is not supported; leave it out, and ask "
            "with --frames"
        )
    least, most = (
        _pixels(processor, *names)
        for names in (("min", "shortest", frames.min_pixels), ("max", "longest", frames.max_pixels))
    )
    counts = {name: processor.get(name) for name in ("min_frames", "max_frames", "max_video_tokens")}
    cap = counts["max_video_tokens"] or CAPS[frames.of_clip] if processor.get("cap_pixels_per_frame") else None
    rate = processor.get("fps") or frames.a_second
    if not all(count is None or type(count) is int for count in counts.values()) or type(rate) not in (int, float):
        raise CheckpointError(f"the video processor's fps is {rate!r:.20}, with {counts!r:.60}; correct them")
    fewest = counts["min_frames"] or frames.fewest
    more = counts["max_frames"] or MAX_SAMPLED_FRAMES
    try:
        return replace(
            frames,
            min_pixels=least,
            max_pixels=most,
            frames=min(more, frames.frames),
            fewest=fewest,
            a_second=float(rate),
            capped=cap,
        )
    except BundleError as e:
        raise CheckpointError(f"the video processor's settings: {e}") from e


def _pixels(processor: Mapping[str, Any], limit: str, edge: str, default: int) -> int:
    """`min_pixels` or `max_pixels`, an edge of `size` in newer files."""
    sizes = processor.get("size") or {}
    if not isinstance(sizes, Mapping):
        raise CheckpointError(f"the image processor's size is {sizes!r:.40}, not an object; correct it")
    stated = (processor.get(f"{limit}_pixels"), sizes.get(f"{limit}_pixels"), sizes.get(f"{edge}_edge"), default)
    value = next(value for value in stated if value is not None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(
            f"the image processor's {limit}_pixels is {value!r:.40}, not a number of pixels; correct it"
        )
    return value


# Of Qwen2.5-VL, whose boxes are in pixels of the picture as the model sees it.
JSON_BOXES = BoxForm('"bbox_2d" : [ # , # , # , # ]', "inside", None, rows_first=False)
FAMILY = Family(
    model_type="qwen2_vl",
    architecture="Qwen2VLForConditionalGeneration",
    read=lambda config: read_qwen(config, "Qwen2VLConfig", _tower),
    processors=(PROCESSOR,),
    tensors=TENSORS,
    adjust=adjust,
    video_processor=VIDEO_PROCESSOR,
    adjust_video=adjust_video,
    boxes=BoxForm("( # , # ) , ( # , # )", "before", 1000, rows_first=False),
)
