"""LLaVA in its authors' layout (1.5, 1.6; VILA 1.0 is the same): the tower is a separate checkpoint."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from functools import partial
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.families.llava import in_one_piece
from vtx.exporter.checkpoint.families.llava_next import FAMILY as LLAVA_NEXT
from vtx.exporter.checkpoint.families.llava_next import tiles_of
from vtx.exporter.checkpoint.family import LLAVA, ONE_PIECE, Config, Family, OriginalLayout, read_llava_like
from vtx.exporter.checkpoint.original.known_towers import CLIP_L_336, CLIP_L_336_CONFIG, INTERNVIT
from vtx.exporter.checkpoint.original.templates import TEMPLATES
from vtx.exporter.checkpoint.text_config import MAX_POSITIONS
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layout import Layout
from vtx.tools.model.vision import VisionConfig

# The original has no image token: <unk>, which no text gives, is its placeholder. Its embedding is never read.
IMAGE_TOKEN_ID = 0
MAX_PROJECTOR_LAYERS = 8
_MAX_POINTS = 10_000  # characters of a list written as a string
_STRATEGIES = {"patch": "default", "cls_patch": "full"}
_ASPECTS = (None, "square", "pad", "anyres")
DECODER = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "hidden_act",
    "attention_bias", "mlp_bias", "sliding_window", "tie_word_embeddings",
)  # fmt: skip
_TOWER = r"^model\.vision_tower\.vision_tower\.(?:vision_model\.)?"


def _read(decoder: str, config: Config) -> ModelConfig:
    tower = config.get("vision_config")
    aspect = config.get("image_aspect_ratio")
    if not tower:
        name = _tower_name(config)
        if name != CLIP_L_336:
            raise UnsupportedModelError(
                f"the sizes of the vision tower {name!r:.80} are in a separate file; name the directory of a whole "
                "checkpoint, or give the tower to vtx-export with --tower PATH"
            )
        tower = CLIP_L_336_CONFIG
    if aspect not in _ASPECTS:
        raise UnsupportedModelError(
            f"image_aspect_ratio {aspect!r:.40} is not supported; vtx supports {', '.join(map(str, _ASPECTS[1:]))}"
        )
    selected = config.get("mm_vision_select_feature", "patch")
    if selected not in _STRATEGIES:
        raise UnsupportedModelError(f"mm_vision_select_feature {selected!r:.40} is not supported; vtx supports patch")
    projector_layers = projector_layers_of(config)
    internvit = tower.get("model_type") == INTERNVIT
    text = {key: config[key] for key in DECODER if config.get(key) is not None}
    shaped = {
        "text_config": {**text, "model_type": decoder},
        "vision_config": {**tower, "model_type": "clip_vision_model"} if internvit else tower,
        "vision_feature_layer": config.get("mm_vision_select_layer", -2),
        "vision_feature_select_strategy": _STRATEGIES[selected],
        "image_token_index": IMAGE_TOKEN_ID,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
    }
    model = read_llava_like(shaped, "LlavaConfig", partial(_layout, config))
    if internvit:
        model = replace(model, vision=_internvit(model.vision, tower))
    width = config.get("mm_hidden_size", model.vision.hidden)
    if width != model.vision.hidden:
        raise CheckpointError(
            f"the vision tower has hidden size {model.vision.hidden}, and mm_hidden_size is {width!r:.20}; name the "
            "tower that the checkpoint was made with"
        )
    most = min(model.text.max_positions, trained_length(config))
    return replace(model, text=replace(model.text, max_positions=most), projector_layers=projector_layers)


def _internvit(tower: VisionConfig, config: Config) -> VisionConfig:
    side = config.get("position_side")
    if config.get("unlike") or not isinstance(side, int) or not tower.patch <= side <= 1 << 14:
        raise UnsupportedModelError(
            f"the vision tower is an InternViT with other {config.get('unlike') or 'image_size'} than InternViT-6B; "
            "vtx exports InternViT-6B only"
        )
    grid = side // tower.patch
    return replace(
        tower,
        family="internvit",
        qkv_bias=False,
        layer_scale=True,
        rms_norm=True,
        qk_norm=True,
        position_grid=None if grid == tower.grid else grid,
    )


def projector_layers_of(config: Config) -> int:
    """The number of the projector's matrices. Raises UnsupportedModelError."""
    kind = str(config.get("mm_projector_type", "linear"))
    match = re.fullmatch(r"mlp(\d)x_gelu", kind)
    layers = 1 if kind == "linear" else int(match[1]) if match else 0
    if not 1 <= layers <= MAX_PROJECTOR_LAYERS:
        raise UnsupportedModelError(
            f"mm_projector_type {kind!r:.40} is not supported; vtx supports linear and mlp2x_gelu"
        )
    return layers


def trained_length(config: Config) -> int:
    """The length at which the original truncates prompts; vtx refuses longer ones."""
    length = config.get("tokenizer_model_max_length")
    return length if isinstance(length, int) and 1 <= length <= MAX_POSITIONS else MAX_POSITIONS


def _layout(config: Config, parsed: Any, vision: VisionConfig, select: str) -> Layout:
    if config.get("image_aspect_ratio") != "anyres":
        return in_one_piece(parsed, vision, select)
    merge = config.get("mm_patch_merge_type", "flat")
    if merge != "spatial_unpad":
        raise UnsupportedModelError(f"mm_patch_merge_type {merge!r:.40} is not supported; vtx supports spatial_unpad")
    if vision.states - (select == "default") != vision.grid**2:
        raise UnsupportedModelError("image_aspect_ratio 'anyres' needs one token a patch; this tower gives others")
    points = config.get("image_grid_pinpoints")
    if isinstance(points, str) and len(points) <= _MAX_POINTS:
        with contextlib.suppress(ValueError, RecursionError):
            points = json.loads(points.replace("(", "[").replace(")", "]"))
    return tiles_of(vision, points, rounded=False)


def _tower_name(config: Config) -> str:
    if "mm_video_tower" in config or "mm_image_tower" in config:
        raise UnsupportedModelError("this is Video-LLaVA in its authors' layout; use the -hf checkpoint")
    name = config.get("mm_vision_tower", config.get("vision_tower"))
    if not isinstance(name, str) or not name or len(name) > 1024:
        raise CheckpointError(
            f"config.json: mm_vision_tower is {name!r:.60}, not the name of a vision tower; set it to the model's "
            f"tower, e.g. {CLIP_L_336}"
        )
    return name


def _processor(config: Config, tower: Config) -> Config:
    """The tower's image processor, with padding or tiles."""
    kinds = {"pad": LLAVA.name, "anyres": "LlavaNextImageProcessor"}
    aspect = config.get("image_aspect_ratio")
    return padding(tower, kinds[aspect]) if aspect in kinds else tower


def padding(tower: Config, kind: str = LLAVA.name) -> Config:
    """The tower's image processor as class `kind`, which pads; without crop_size it does not crop, like SigLIP's."""
    return {"do_center_crop": "crop_size" in tower, **tower, "image_processor_type": kind, "do_pad": True}


def _template(name: str, config: Config) -> str:
    """The chat template, with tokens around each image if the model was trained with them."""
    around = config.get("mm_use_im_start_end", False)
    image = "<im_start>{{ image_token }}<im_end>" if around else "{{ image_token }}"
    return TEMPLATES[name].replace("{{ image_token }}", image)


def original_family(
    model_type: str, architecture: str, decoder: str, template: str, seg_token: str | None = None
) -> Family:
    """A family of this layout with the given `decoder`, chat `template` and `seg_token`."""
    return Family(
        model_type=model_type,
        architecture=architecture,
        read=partial(_read, decoder),
        seg_token=seg_token,
        processors=(*ONE_PIECE, *LLAVA_NEXT.processors),
        tensors=(
            (_TOWER, "vision."),
            (r"^vision_model\.", "vision."),  # in the tower's own checkpoint
            *((rf"^model\.mm_projector\.{2 * n}\.", f"projector.linear_{n + 1}.") for n in range(MAX_PROJECTOR_LAYERS)),
            (r"^model\.mm_projector\.(weight|bias)$", r"projector.linear_1.\1"),
            (r"^model\.(embed_tokens|layers|norm)\.", r"text.\1."),
        ),
        original=OriginalLayout(
            tower=_tower_name,
            own_tower=lambda config: config.get("unfreeze_mm_vision_tower") is True,
            processor=_processor,
            template=partial(_template, template),
        ),
    )


FAMILY = original_family("llava_llama", "LlavaLlamaForCausalLM", "llama", "vicuna_v1")
