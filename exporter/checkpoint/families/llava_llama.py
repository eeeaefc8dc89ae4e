"""LLaVA in its authors' layout (1.5, 1.6; VILA 1.0 is the same): the tower is a checkpoint of its own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from typing import Any

from vtx.exporter.checkpoint.config import MAX_POSITIONS, ModelConfig, VisionConfig
from vtx.exporter.checkpoint.families.llava import in_one_piece
from vtx.exporter.checkpoint.families.llava_next import FAMILY as LLAVA_NEXT
from vtx.exporter.checkpoint.family.declaration import Family, read_llava_like
from vtx.exporter.checkpoint.family.processors import ONE_PIECE
from vtx.exporter.checkpoint.original.known_towers import CLIP_L_336, INTERNVIT, known_tower
from vtx.exporter.checkpoint.original.parts import Config, OriginalLayout
from vtx.exporter.checkpoint.original.templates import TEMPLATES
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layout import Layout
from vtx.runtime.vision.layouts.anyres import Anyres

# The original has no image token: <unk>, which text never becomes, stands for one. Its row is never read.
IMAGE_TOKEN_ID = 0
MAX_PROJECTOR_LAYERS = 8
_MAX_POINTS = 10_000  # characters of a list that is written as a string
_STRATEGIES = {"patch": "default", "cls_patch": "full"}
_ASPECTS = (None, "square", "pad", "anyres")
DECODER = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "hidden_act",
    "attention_bias", "mlp_bias", "sliding_window", "tie_word_embeddings",
)  # fmt: skip
_TOWER = r"^model\.vision_tower\.vision_tower\.(?:vision_model\.)?"


def _read(decoder: str, config: Config) -> ModelConfig:
    tower, aspect = config.get("vision_config") or known_tower(_tower_name(config)), config.get("image_aspect_ratio")
    if tower is None:
        raise UnsupportedModelError(
            f"the sizes of the vision tower {_tower_name(config)!r:.80} stand in a file of its own; name the directory "
            "of a whole checkpoint, or give the tower to vtx-export with --tower PATH"
        )
    if aspect not in _ASPECTS:
        known = ", ".join(str(name) for name in _ASPECTS[1:])
        raise UnsupportedModelError(f"image_aspect_ratio {aspect!r:.40} is not supported; vtx knows {known}")
    selected = config.get("mm_vision_select_feature", "patch")
    if selected not in _STRATEGIES:
        raise UnsupportedModelError(f"mm_vision_select_feature {selected!r:.40} is not supported; vtx knows patch")
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
            f"the vision tower is {model.vision.hidden} wide, and mm_hidden_size is {width!r:.20}; name the tower that "
            "the checkpoint was made with"
        )
    most = min(model.text.max_positions, trained_length(config))
    return replace(model, text=replace(model.text, max_positions=most), projector_layers=_projector_layers(config))


def _internvit(tower: VisionConfig, config: Config) -> VisionConfig:
    """An InternViT-6B of the sizes of `tower`."""
    side = config.get("position_side")
    if config.get("unlike") or not isinstance(side, int) or not tower.patch <= side <= 1 << 14:
        raise UnsupportedModelError(
            f"the vision tower is an InternViT with other {config.get('unlike') or 'image_size'} than InternViT-6B; "
            "vtx exports InternViT-6B only"
        )
    grid = side // tower.patch
    return replace(
        tower, family="internvit", qkv_bias=False, layer_scale=True, rms_norm=True, qk_norm=True,
        position_grid=None if grid == tower.grid else grid,
    )  # fmt: skip


def trained_length(config: Config) -> int:
    """The original cuts prompts off here; vtx refuses longer ones."""
    length = config.get("tokenizer_model_max_length")
    return length if isinstance(length, int) and 1 <= length <= MAX_POSITIONS else MAX_POSITIONS


def _projector_layers(config: Config) -> int:
    kind = str(config.get("mm_projector_type", "linear"))
    match = re.fullmatch(r"mlp(\d)x_gelu", kind)
    layers = 1 if kind == "linear" else int(match[1]) if match else 0
    if not 1 <= layers <= MAX_PROJECTOR_LAYERS:
        raise UnsupportedModelError(f"mm_projector_type {kind!r:.40} is not supported; vtx knows linear and mlp2x_gelu")
    return layers


def _layout(config: Config, parsed: Any, vision: VisionConfig, select: str) -> Layout:
    if config.get("image_aspect_ratio") != "anyres":
        return in_one_piece(parsed, vision, select)
    merge = config.get("mm_patch_merge_type", "flat")
    if merge != "spatial_unpad":
        raise UnsupportedModelError(f"mm_patch_merge_type {merge!r:.40} is not supported; vtx knows spatial_unpad")
    if vision.rows - (select == "default") != vision.grid**2:
        raise UnsupportedModelError("image_aspect_ratio 'anyres' needs one token a patch; this tower gives others")
    try:  # the file has (width, height), unlike Hugging Face's
        layout = Anyres(vision.image, vision.grid, _points(config.get("image_grid_pinpoints")), rounded=False)
    except BundleError as e:
        raise CheckpointError(f"config.json: image_grid_pinpoints: {e}") from e
    if not layout.resolutions:
        raise CheckpointError("config.json: image_grid_pinpoints is empty; correct config.json")
    return layout


def _points(value: Any) -> tuple[tuple[int, int], ...]:
    """Pairs of numbers, or a string that spells them."""
    if isinstance(value, str) and len(value) <= _MAX_POINTS:
        try:
            value = json.loads(value.replace("(", "[").replace(")", "]"))
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, list) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(type(side) is int for side in pair) for pair in value
    ):
        raise CheckpointError(
            f"config.json: image_grid_pinpoints is {str(value)[:60]!r}, not pairs of numbers; correct config.json"
        )
    return tuple((width, height) for width, height in value)


def _tower_name(config: Config) -> str:
    if "mm_video_tower" in config or "mm_image_tower" in config:
        raise UnsupportedModelError("this is Video-LLaVA in its authors' layout; take the -hf checkpoint")
    name = config.get("mm_vision_tower", config.get("vision_tower"))
    if not isinstance(name, str) or not name or len(name) > 1024:
        raise CheckpointError(
            f"config.json: mm_vision_tower is {name!r:.60}, not the name of a vision tower; write there which one the "
            f"model has, as {CLIP_L_336}"
        )
    return name


def _processor(config: Config, tower: Config) -> Config:
    """The tower's processor, which pads or cuts into tiles first."""
    kinds = {"pad": "LlavaImageProcessor", "anyres": "LlavaNextImageProcessor"}
    aspect = config.get("image_aspect_ratio")
    return padding(tower, kinds[aspect]) if aspect in kinds else tower


def padding(tower: Config, kind: str = "LlavaImageProcessor") -> Config:
    """The tower's image processor as one of the class `kind`, which pads; what it leaves out is SigLIP's."""
    return {"do_center_crop": "crop_size" in tower, **tower, "image_processor_type": kind, "do_pad": True}


def _template(name: str, config: Config) -> str:
    """Images stand between tokens of their own where the model was trained so."""
    around = config.get("mm_use_im_start_end", False)
    image = "<im_start>{{ image_token }}<im_end>" if around else "{{ image_token }}"
    return TEMPLATES[name].replace("{{ image_token }}", image)


def original_family(
    model_type: str, architecture: str, decoder: str, template: str, seg_token: str | None = None
) -> Family:
    """A family of this layout, with another `decoder` or chat `template`, or a `seg_token`."""
    return Family(
        model_type=model_type,
        architecture=architecture,
        read=partial(_read, decoder),
        processors=(*ONE_PIECE, *LLAVA_NEXT.processors),
        tensors=(
            (_TOWER, "vision."),
            (r"^vision_model\.", "vision."),  # of the tower's own checkpoint
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
        seg_token=seg_token,
    )


FAMILY = original_family("llava_llama", "LlavaLlamaForCausalLM", "llama", "vicuna_v1")
