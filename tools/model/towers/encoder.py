"""CLIP's, SigLIP's and InternVL's tower: patches of an image of one size, and equal blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vtx.tools.model.tensors import Shapes, linear_tensors, norm_tensors
from vtx.tools.model.towers.tower import Tower
from vtx.tools.model.vision import VisionConfig

TOWER = "vision"  # the first part of weights' names
LAYER_SCALES = ("lambda_1", "lambda_2")  # of attention and of the MLP
POST_NORM = "vision.post_layernorm"


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """CLIP's tower of text, whose tokens attend to themselves and those before."""

    causal: ClassVar[bool] = True
    hidden: int
    ffn: int
    heads: int
    eps: float
    activation: str
    qkv_bias: bool = True
    layer_scale: bool = False
    rms_norm: bool = False
    qk_norm: bool = False


Encoder = VisionConfig | TextEncoder


class EncoderTower(Tower):
    """Blocks of attention and an MLP, each after a layer norm."""

    __slots__ = ()

    def tensors(self, *, last_attention: bool = False) -> Shapes:
        yield from embedding_tensors(self.vision, TOWER)
        yield from encoder_tensors(self.vision, self.used, last_attention)
        yield from post_norm_tensors(self.vision)


def embedding_tensors(v: VisionConfig, tower: str, kernel: tuple[int, ...] | None = None) -> Shapes:
    """The weights before the blocks of the tower whose names begin with `tower`."""
    yield f"{tower}.embeddings.patch_embedding.weight", (v.hidden, *(kernel or (3, v.patch, v.patch)))
    batch = (1,) if v.batch_axis else ()
    positions = v.position_grid**2 + v.class_token if v.position_grid else v.states
    positions = v.grid**2 if v.registers else positions
    yield f"{tower}.embeddings.position_embedding.weight", (*batch, positions, v.hidden)
    if v.class_token:
        yield f"{tower}.embeddings.class_embedding", (*batch, *batch, v.hidden)
    if v.registers:
        yield f"{tower}.embeddings.registers", (v.registers, v.hidden)
    if v.pre_norm:
        yield from norm_tensors("vision.pre_layrnorm", v.hidden)
    else:
        yield f"{tower}.embeddings.patch_embedding.bias", (v.hidden,)


def encoder_tensors(v: VisionConfig, used: int, last_attention: bool = False, tower: str = TOWER) -> Shapes:
    """The weights of the first `used` blocks; `last_attention`: and what the last block's attention takes."""
    for layer in range(max(used, v.layers - 1) if last_attention else used):
        yield from block_tensors(v, f"{tower}.encoder.layers.{layer}")
    if last_attention and used < v.layers:
        last = f"{tower}.encoder.layers.{v.layers - 1}"
        attention = f"{last}.layer_norm1", f"{last}.self_attn.q_", f"{last}.self_attn.k_"
        yield from (tensor for tensor in block_tensors(v, last) if tensor[0].startswith(attention))


def post_norm_tensors(v: VisionConfig) -> Shapes:
    if v.post_norm:
        yield from norm_tensors(POST_NORM, v.hidden)


def block_tensors(e: Encoder, p: str) -> Shapes:
    """The weights of the block whose names begin with `p`."""
    for name in ("layer_norm1", "layer_norm2"):
        yield from norm_tensors(f"{p}.{name}", e.hidden, bias=not e.rms_norm)
    for part in "qk" if e.qk_norm else "":
        yield f"{p}.self_attn.{part}_norm.weight", (e.hidden,)
    square = ((f"self_attn.{part}_proj", e.hidden, e.hidden) for part in ("q", "k", "v", "out"))
    for name, out, into in (*square, ("mlp.fc1", e.ffn, e.hidden), ("mlp.fc2", e.hidden, e.ffn)):
        bias = e.qkv_bias or not name.endswith(("q_proj", "k_proj", "v_proj"))
        yield from linear_tensors(f"{p}.{name}", out, into, bias=bias)
    for half in LAYER_SCALES if e.layer_scale else ():
        yield f"{p}.{half}", (e.hidden,)
