"""LFM2-VL: tiny checkpoints, and its image processor, which transformers has for torchvision alone, on Pillow.

Sizes, grids and rows of tiles are what transformers' own functions say; pictures are resized by Pillow.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.support.tiny import Tiny

LFM2 = Tiny(
    family="lfm2_vl", text="lfm2", tokenizer="bytes", vision="siglip2", image=64, patch=8, context=512, tied=True,
    vocab=330,
)  # fmt: skip
GRID = 4  # side of the table of positions; images have 2 to 8 patches a side
FEWEST, MOST = 4, 9  # tokens of an image in one piece
FACTOR = 2


def settings(tiny: Tiny, image_token: int) -> dict[str, Any]:
    """The configuration."""
    text = {
        "model_type": "lfm2", "vocab_size": tiny.vocab, "hidden_size": tiny.hidden, "intermediate_size": tiny.ffn,
        "num_hidden_layers": tiny.layers, "num_attention_heads": tiny.heads, "num_key_value_heads": tiny.kv_heads,
        "max_position_embeddings": tiny.context, "norm_eps": 1e-5, "tie_word_embeddings": tiny.tied,
        "conv_L_cache": tiny.taps, "conv_bias": tiny.attention_bias, "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if tiny.names == "hub":
        text |= {"full_attn_idxs": [*tiny.attending], "rope_theta": tiny.theta}
    else:
        kinds = ["full_attention" if n in tiny.attending else "conv" for n in range(tiny.layers)]
        text |= {"layer_types": kinds, "rope_parameters": {"rope_type": "default", "rope_theta": tiny.theta}}
    vision = {
        "model_type": "siglip2_vision_model", "hidden_size": tiny.vision_hidden, "intermediate_size": tiny.vision_ffn,
        "num_hidden_layers": tiny.vision_layers, "num_attention_heads": tiny.vision_heads, "patch_size": tiny.patch,
        "num_patches": GRID**2, "vision_use_head": tiny.vision_head,
    }  # fmt: skip
    return {
        "architectures": ["Lfm2VlForConditionalGeneration"], "model_type": "lfm2_vl", "text_config": text,
        "vision_config": vision, "image_token_id": image_token, "projector_hidden_act": tiny.projector_act,
        "projector_hidden_size": 80, "projector_bias": tiny.projector_bias, "downsample_factor": FACTOR,
        "projector_use_layernorm": tiny.select == "default", "tie_word_embeddings": tiny.tied,
        "torch_dtype": tiny.dtype,
    }  # fmt: skip


def image_settings(tiny: Tiny) -> dict[str, Any]:
    """The image processor's file."""
    return {
        "image_processor_type": "Lfm2VlImageProcessorFast", "downsample_factor": FACTOR, "do_image_splitting": True,
        "min_tiles": 2, "max_tiles": 3, "use_thumbnail": True, "min_image_tokens": FEWEST, "max_image_tokens": MOST,
        "encoder_patch_size": tiny.patch, "tile_size": tiny.image, "max_pixels_tolerance": 2.0, "do_resize": True,
        "do_pad": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255, "resample": 2,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": tiny.image, "width": tiny.image},
    }  # fmt: skip


@cache
def processor_functions() -> dict[str, Any]:
    """The functions of transformers' image processor that need no torchvision, methods without their class."""
    (folder,) = find_spec("transformers.models.lfm2_vl").submodule_search_locations  # type: ignore[union-attr]
    tree = ast.parse(Path(folder, "image_processing_lfm2_vl.py").read_text(encoding="utf-8"))
    kind = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Lfm2VlImageProcessor")
    wanted = {"round_by_factor", "find_closest_aspect_ratio", "smart_resize", "_get_grid_layout", "_target_ratios"}
    wanted |= {"_is_image_too_large"}
    found = [node for node in (*tree.body, *kind.body) if isinstance(node, ast.FunctionDef) and node.name in wanted]
    for node in found:
        node.decorator_list = []
    functions: dict[str, Any] = {"math": math}
    exec(compile(ast.Module(found, []), "image_processing_lfm2_vl.py", "exec"), functions)
    return functions


def geometry(s: Any, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The size of the whole image, and columns and rows of tiles, (1, 1) without, by transformers' functions."""
    functions = processor_functions()
    limits = s.downsample_factor, s.min_image_tokens, s.max_image_tokens, s.encoder_patch_size
    whole = functions["smart_resize"](None, height, width, *limits)
    own = SimpleNamespace(_target_ratios=lambda *tiles: functions["_target_ratios"](None, *tiles))
    too_large = functions["_is_image_too_large"](
        None, height, width, s.max_image_tokens, s.encoder_patch_size, s.downsample_factor, s.max_pixels_tolerance
    )
    if not too_large or not s.do_image_splitting:
        return whole, (1, 1)
    columns, rows, *_ = functions["_get_grid_layout"](own, height, width, s.min_tiles, s.max_tiles, s.tile_size)
    return whole, (columns, rows)


class PillowProcessor:
    """What transformers' processor asks of an image processor."""

    model_input_names = ("pixel_values", "pixel_attention_mask", "spatial_shapes")

    def __init__(self, settings: dict[str, Any]) -> None:
        self.__dict__.update(settings)

    def fetch_images(self, images: Any) -> Any:
        return images

    def __call__(self, images: Sequence[Sequence[Image.Image]], **_: Any) -> dict[str, Any]:
        s: Any = self
        views, shapes, grids, sizes = [], [], [], []
        for image in (image.convert("RGB") for own in images for image in own):
            (width, height), (columns, rows) = geometry(s, *image.size)
            whole, side = image.resize((width, height), Image.Resampling.BILINEAR), s.tile_size
            large = image.resize((columns * side, rows * side), Image.Resampling.BILINEAR)
            corners = [(x * side, y * side) for y in range(rows) for x in range(columns)]
            tiles = [large.crop((x, y, x + side, y + side)) for x, y in corners]
            grids.append((columns, rows))
            sizes.append([height, width])
            for view in [whole] if len(tiles) == 1 else [*tiles, whole]:
                pixels = (np.asarray(view, np.float32) / 255 - 0.5) / 0.5
                p = s.encoder_patch_size
                down, across = view.height // p, view.width // p
                patches = pixels.reshape(down, p, across, p, 3).swapaxes(1, 2).reshape(down * across, -1)
                views.append(torch.from_numpy(patches))
                shapes.append((down, across))
        most = max(map(len, views))
        padded = torch.stack([torch.nn.functional.pad(view, (0, 0, 0, most - len(view))) for view in views])
        mask = torch.stack([torch.arange(most) < len(view) for view in views]).int()
        return {
            "pixel_values": padded, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor(shapes),
            "image_rows": [rows for _, rows in grids], "image_cols": [columns for columns, _ in grids],
            "image_sizes": sizes,
        }  # fmt: skip


def with_common_names(decoder: Any) -> None:
    """Call the parts of LFM2's decoder as those of a llama are called, too."""
    decoder.norm = decoder.embedding_norm
    for layer in decoder.layers:
        layer.input_layernorm, layer.post_attention_layernorm = layer.operator_norm, layer.ffn_norm
        layer.mlp = layer.feed_forward
        if layer.is_attention_layer:
            attend = layer.self_attn
            attend.q_norm, attend.k_norm, attend.o_proj = attend.q_layernorm, attend.k_layernorm, attend.out_proj
