"""Eagle-X5 in its authors' layout: LLaVA-1.5's prompts and projector behind five towers, whose weights it holds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from types import SimpleNamespace

from vtx.exporter.checkpoint.config import ModelConfig, check_layers, check_values, parse
from vtx.exporter.checkpoint.families.llava_llama import (
    DECODER,
    IMAGE_TOKEN_ID,
    original_family,
    projector_layers_of,
    trained_length,
)
from vtx.exporter.checkpoint.family import CLIP_DEFAULTS, ONE_PIECE, Config, WholeLayout
from vtx.exporter.checkpoint.fields import MAX_WIDTH
from vtx.exporter.checkpoint.text_config import text_config_of
from vtx.runtime.bundle.safetensors import TensorInfo
from vtx.runtime.bundle.spec.image_settings import MAX_INPUT_SIDE
from vtx.runtime.bundle.spec.model_spec import MAX_LAYERS
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.single import Single
from vtx.tools.model.vision import NECK_SQUARE, VisionConfig

NAMES = "clip-448;convnext-1024;sam-1024;det-1024;pix2struct-1024"
SIDE = 1024  # pixels: of a picture, and of a token
TOKEN = 32
# Pixels a side of CLIP's input. The released code sets it, and remarks that it was 448: no published file tells which.
CLIP_SIDE = 336
EVA_WINDOW = 16  # patches a side of a window; of that many blocks the last attends to all patches
EVA_WHOLE = 3
PIX2STRUCT_PATCHES = 2048  # the most that it cuts a picture into; a square one is 45 x 45
HEAD = 64  # the size of a head where no tensor tells it: in CLIP, EVA-02 and Pix2Struct
STAGES = 4  # of ConvNeXt
TOWERS = "towers"  # the key of the sizes that were read from the tensors; no file holds a tuple
# The towers of the published checkpoints, in the order of their features.
PUBLISHED = (
    VisionConfig("clip", 24, 1024, 4096, 16, CLIP_SIDE, 14, 1e-5, "quick_gelu"),
    VisionConfig(
        "convnext", 1, 3072, 12288, 1, SIDE, TOKEN, 1e-5, "gelu", stage_blocks=(3, 4, 30, 3),
        stage_widths=(384, 768, 1536, 3072),
    ),
    VisionConfig("sam", 24, 1024, 4096, 16, SIDE, 16, 1e-6, "gelu", window=14, full_blocks=(5, 11, 17, 23), neck=256),
    VisionConfig(
        "eva02", 24, 1024, 2730, 16, SIDE, 16, 1e-6, "silu", window=EVA_WINDOW, position_grid=14,
        full_blocks=tuple(range(EVA_WHOLE - 1, 24, EVA_WHOLE)),
    ),
    VisionConfig(
        "pix2struct", 18, 1536, 3968, 24, 45 * 16, 16, 1e-6, "gelu_new", axis_positions=4096,
        pixel_scale=tuple(CLIP_DEFAULTS["image_std"]), pixel_shift=tuple(CLIP_DEFAULTS["image_mean"]),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The tensors of the tower `name`, from whose shapes its sizes are read."""

    held: Mapping[str, TensorInfo]
    name: str

    def shape(self, tensor: str, axes: int) -> tuple[int, ...]:
        name = f"vision.{self.name}.{tensor}"
        info = self.held.get(name)
        if info is None:
            raise CheckpointError(f"tensor {name} is missing; use the whole checkpoint, whose files hold five towers")
        if len(info.shape) != axes or not all(1 <= size <= MAX_WIDTH for size in info.shape):
            raise CheckpointError(
                f"tensor {name} in {info.file.name} has shape {list(info.shape)!s:.60}, not {axes} sizes from 1 to "
                f"{MAX_WIDTH}; download it again"
            )
        return info.shape

    def layers(self, before: str) -> int:
        """The number of layers, whose tensors' names begin with `before` and a number from 0."""
        pattern = re.compile(rf"vision\.{self.name}\.{re.escape(before)}(\d{{1,9}})\.")
        count = 1 + max((int(found[1]) for found in map(pattern.match, self.held) if found), default=-1)
        if not 1 <= count <= MAX_LAYERS:
            raise CheckpointError(
                f"the tower {self.name} has {count} layers {before}N by the names of its tensors, not 1 to "
                f"{MAX_LAYERS}; use the whole checkpoint"
            )
        return count

    def heads(self, hidden: int, head: int) -> int:
        if head < 1 or hidden % head:
            raise CheckpointError(f"the tower {self.name} has hidden size {hidden}, no multiple of its heads' {head}")
        return hidden // head

    def side(self, count: int, tensor: str) -> int:
        """The side of a square of `count` places."""
        side = math.isqrt(max(count, 0))
        if side < 1 or side**2 != count:
            raise CheckpointError(f"tensor vision.{self.name}.{tensor} is of {count} places, which are no square")
        return side


def _sizes(_: Config, tensors: Mapping[str, TensorInfo]) -> Config:
    """The towers, with the sizes of their tensors."""
    sam = _sam(_Tensors(tensors, "sam"))
    others = [read(_Tensors(tensors, name), sam.image) for name, read in _OTHERS.items()]
    towers = (*others[:2], sam, *others[2:])
    for found, published in zip(towers, PUBLISHED, strict=True):
        depth, wanted = (tower.stage_blocks or tower.layers for tower in (found, published))
        if found.hidden == published.hidden and depth != wanted:
            raise CheckpointError(
                f"by its tensors the tower {found.family} has {depth!s:.60} layers, and Eagle-X5's of that width has "
                f"{wanted}; use the whole checkpoint"
            )
    return {TOWERS: tuple(map(astuple, towers))}


def _sam(held: _Tensors) -> VisionConfig:
    hidden, _, patch, _ = held.shape("patch_embed.projection.weight", 4)
    grid = held.shape("pos_embed", 4)[1]
    if grid % NECK_SQUARE or grid * patch % TOKEN or grid * patch > MAX_INPUT_SIDE:
        raise CheckpointError(
            f"tensors of vision.sam are for pictures of {grid * patch} pixels and {grid} patches a side; the pixels "
            f"must be a multiple of {TOKEN} up to {MAX_INPUT_SIDE}, and the patches one of {NECK_SQUARE}"
        )
    count = held.layers("layers.")
    tables = [held.shape(f"layers.{layer}.attn.position_embedding_h", 2) for layer in range(count)]
    whole = tuple(layer for layer, (rows, _) in enumerate(tables) if rows == 2 * grid - 1)
    windows = sorted({(rows + 1) // 2 for layer, (rows, _) in enumerate(tables) if layer not in whole})
    if len(windows) > 1:
        raise CheckpointError(f"tensors vision.sam.layers.N.attn are for windows of several sizes, {windows!s:.60}")
    return replace(
        PUBLISHED[2],
        layers=count,
        hidden=hidden,
        ffn=held.shape("layers.0.mlp.lin1.weight", 2)[0],
        heads=held.heads(hidden, tables[0][1]),
        image=grid * patch,
        patch=patch,
        window=windows[0] if windows else None,
        full_blocks=whole,
        neck=held.shape("neck.conv1.weight", 4)[0],
    )


def _clip(held: _Tensors, _: int) -> VisionConfig:
    hidden, _, patch, _ = held.shape("embeddings.patch_embedding.weight", 4)
    table = "embeddings.position_embedding.weight"
    grid = held.side(held.shape(table, 2)[0] - 1, table)
    if patch > CLIP_SIDE:
        raise CheckpointError(f"patches of vision.clip have {patch} pixels a side, and its pictures {CLIP_SIDE}")
    return replace(
        PUBLISHED[0],
        layers=held.layers("encoder.layers."),
        hidden=hidden,
        image=CLIP_SIDE,
        patch=patch,
        ffn=held.shape("encoder.layers.0.mlp.fc1.weight", 2)[0],
        heads=held.heads(hidden, HEAD),
        position_grid=None if grid == CLIP_SIDE // patch else grid,
    )


def _convnext(held: _Tensors, image: int) -> VisionConfig:
    widths = tuple(held.shape(f"stages.{stage}.blocks.0.conv_dw.weight", 4)[0] for stage in range(STAGES))
    blocks = tuple(held.layers(f"stages.{stage}.blocks.") for stage in range(STAGES))
    return replace(
        PUBLISHED[1], hidden=widths[-1], ffn=4 * widths[-1], image=image, stage_blocks=blocks, stage_widths=widths
    )


def _eva(held: _Tensors, image: int) -> VisionConfig:
    hidden, _, patch, _ = held.shape("patch_embed.proj.weight", 4)
    positions = held.side(held.shape("pos_embed", 3)[1] - 1, "pos_embed")
    window = EVA_WINDOW
    head = HEAD
    for angles in ("rope_win.freqs_cos", "blocks.0.attn.rope.freqs_cos"):  # buffers, which files may lack
        if f"vision.{held.name}.{angles}" in held.held:
            places, head = held.shape(angles, 2)
            window = held.side(places, angles)
    if image % patch or head % 4:
        raise CheckpointError(
            f"patches of vision.eva02 have {patch} pixels a side and its heads {head} numbers; pictures of {image} "
            "pixels must divide into patches, and heads into four"
        )
    grid = image // patch
    layers = held.layers("blocks.")
    return replace(
        PUBLISHED[3],
        layers=layers,
        hidden=hidden,
        ffn=held.shape("blocks.0.mlp.w1.weight", 2)[0],
        heads=held.heads(hidden, head),
        image=image,
        patch=patch,
        window=window,
        full_blocks=tuple(range(EVA_WHOLE - 1, layers, EVA_WHOLE)),
        position_grid=None if positions == grid else positions,
    )


def _pix2struct(held: _Tensors, _: int) -> VisionConfig:
    hidden, numbers = held.shape("embeddings.patch_projection.weight", 2)
    patch = held.side(numbers // 3, "embeddings.patch_projection.weight")
    table = "embeddings.row_embedder.weight"
    grid = math.isqrt(PIX2STRUCT_PATCHES)
    rows = held.shape(table, 2)[0]
    if rows <= grid:
        raise CheckpointError(f"tensor vision.pix2struct.{table} has {rows} rows, {grid + 1} are needed")
    return replace(
        PUBLISHED[4],
        layers=held.layers("encoder.layer."),
        hidden=hidden,
        image=grid * patch,
        patch=patch,
        ffn=held.shape("encoder.layer.0.mlp.wi_0.weight", 2)[0],
        heads=held.heads(hidden, HEAD),
        axis_positions=rows,
    )


_OTHERS = {"clip": _clip, "convnext": _convnext, "eva02": _eva, "pix2struct": _pix2struct}


def _read(config: Config) -> ModelConfig:
    names = config.get("mm_vision_tower", config.get("vision_tower"))
    if names != NAMES:
        raise UnsupportedModelError(f"the vision towers {names!r:.120} are not supported; vtx supports {NAMES}")
    check_values(config, "an Eagle-X5", {"image_aspect_ratio": (None, "square", "pad")})
    read = config.get(TOWERS)
    towers = tuple(VisionConfig(*sizes) for sizes in read) if isinstance(read, tuple) else PUBLISHED
    hidden = sum(tower.width for tower in towers)
    image = towers[2].image
    if config.get("mm_hidden_size", hidden) != hidden:
        raise CheckpointError(
            f"config.json: mm_hidden_size is {config['mm_hidden_size']!r:.40}, but the five towers give {hidden} "
            "numbers a token; correct config.json"
        )
    settings = {key: config[key] for key in DECODER if config.get(key) is not None}
    check_layers(settings)
    tied = bool(config.get("tie_word_embeddings", False))
    text = text_config_of(SimpleNamespace(text_config=parse("LlamaConfig", settings), tie_word_embeddings=tied))
    joined = VisionConfig(
        "joined", 1, hidden, max(tower.ffn for tower in towers), 1, image, TOKEN, 1e-6, "gelu", towers=towers
    )
    return ModelConfig(
        text=replace(text, max_positions=min(text.max_positions, trained_length(config))),
        vision=joined,
        feature_layers=(1,),
        select="full",
        projector_activation="gelu",
        projector_bias=True,
        image_token_id=IMAGE_TOKEN_ID,
        layout=Single(joined.grid**2),
        projector_layers=projector_layers_of(config),
    )


def _processor(config: Config, _: Config) -> Config:
    """That of the released code, which is in no file: CLIP's, for larger pictures."""
    side = _read(config).vision.image
    square = {"height": side, "width": side}
    tower = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": side}, "crop_size": square}
    return _LIKE_LLAVA.processor(config, tower)


_BASE = original_family("eagle_llama", "EagleLlamaForCausalLM", "llama", "vicuna_v1")
assert _BASE.original is not None
_LIKE_LLAVA = _BASE.original
_TOWER = r"^model\.vision_tower\.vision_towers\.{}\.vision_tower\."
_NAMES = ("convnext", "sam", "eva02", "pix2struct")
FAMILY = replace(
    _BASE,
    read=_read,
    processors=ONE_PIECE,
    tensors=(  # of the towers; the others are called as in llava_llama, whose patterns hold for all families
        # a name that says what it is, so that it stays a float in integer bundles, as other tables do
        (_TOWER.format(2) + r"(layers\.\d+\.attn)\.rel_pos_([hw])$", r"vision.sam.\1.position_embedding_\2"),
        (_TOWER.format(0) + r"(?:vision_model\.)?", "vision.clip."),
        *((_TOWER.format(n), f"vision.{name}.") for n, name in enumerate(_NAMES, 1)),
    ),
    original=replace(
        _LIKE_LLAVA,
        tower=None,
        processor=_processor,
        whole=WholeLayout(None, None, None, lambda _, tensors: tensors.items(), _sizes),
    ),
)
