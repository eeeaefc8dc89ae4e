"""The model and the method stated plainly in PyTorch, one layer in memory at a time.

This is what a bundle is judged by: no graph, no cache, no onnxruntime. All asked K share one pass, since
the rows that enter layer K are those of the unwithdrawn pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vtx.exporter.checkpoint import Checkpoint
from vtx.exporter.config import ModelConfig, TextConfig
from vtx.runtime.safetensors import read_tensor


class Reference:
    """A checkpoint as a function of images and token ids, in float32."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self._checkpoint, self._config = checkpoint, config

    def features(self, pixels: NDArray[np.float32]) -> Tensor:
        """Images [images, 3, side, side] to rows [images * vision_tokens, hidden]."""
        c, v = self._config, self._config.vision
        w, name = self._tensor, "vision.embeddings"
        bias = w(f"{name}.patch_embedding.bias") if v.family == "siglip" else None
        x = F.conv2d(torch.from_numpy(pixels), w(f"{name}.patch_embedding.weight"), bias, stride=v.patch)
        x = x.flatten(2).transpose(1, 2)
        if v.family == "clip":
            x = torch.cat((w(f"{name}.class_embedding").expand(len(x), 1, -1), x), 1)
        x = x + w(f"{name}.position_embedding.weight")
        if v.family == "clip":
            x = self._layer_norm(x, "vision.pre_layrnorm")
        states = [x]
        for layer in range(max(c.feature_layers)):
            states.append(self._vision_layer(states[-1], f"vision.encoder.layers.{layer}"))
        first = int(c.select == "default")
        chosen = torch.cat([states[number][:, first:] for number in c.feature_layers], -1)
        hidden = _activate(self._linear(chosen, "projector.linear_1"), c.projector_activation)
        return self._linear(hidden, "projector.linear_2").flatten(0, 1)

    def logits(
        self,
        ids: NDArray[np.int64],
        features: Tensor,
        ks: Sequence[int | None],
        report: Callable[[int], None] = lambda _: None,
    ) -> dict[int | None, Tensor]:
        """Logits [vocab] at the last position for each K (None: no withdrawal). `report` gets 1 a layer."""
        text = self._config.text
        is_vision = torch.from_numpy(ids == self._config.image_token_id)
        table = self._tensor("text.embed_tokens.weight")
        x = F.embedding(torch.from_numpy(ids), table)
        x[is_vision] = features
        del table
        positions = torch.arange(len(ids))
        streams: dict[int | None, Tensor] = {None: x}
        for layer in range(1, text.layers + 1):
            if layer in ks:
                streams[layer] = streams[None][~is_vision]
            weights = self._weights(f"text.layers.{layer - 1}")
            for k, rows in streams.items():
                at = positions if k is None else positions[~is_vision]
                streams[k] = _decoder_layer(text, rows, at, weights)
            report(1)
        norm = self._tensor("text.norm.weight")
        head = self._tensor("text.embed_tokens.weight" if text.tied else "head.weight")
        return {k: F.linear(_rms(streams[k][-1], norm, text.eps), head) for k in ks}

    def _vision_layer(self, x: Tensor, name: str) -> Tensor:
        v = self._config.vision
        y = self._layer_norm(x, f"{name}.layer_norm1")
        q, k, w = (
            self._linear(y, f"{name}.self_attn.{part}_proj").reshape(*y.shape[:2], v.heads, -1).transpose(1, 2)
            for part in "qkv"
        )
        y = F.scaled_dot_product_attention(q, k, w).transpose(1, 2).flatten(2)
        x = x + self._linear(y, f"{name}.self_attn.out_proj")
        y = self._linear(self._layer_norm(x, f"{name}.layer_norm2"), f"{name}.mlp.fc1")
        return x + self._linear(_activate(y, v.activation), f"{name}.mlp.fc2")

    def _layer_norm(self, x: Tensor, name: str) -> Tensor:
        w = self._weights(name)
        return F.layer_norm(x, x.shape[-1:], w("weight"), w("bias"), self._config.vision.eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        w = self._weights(name)
        weight = w("weight")
        assert weight is not None
        return F.linear(x, weight, w("bias"))

    def _tensor(self, name: str) -> Tensor:
        return torch.from_numpy(read_tensor(self._checkpoint.tensors[name]).astype(np.float32, copy=False))

    def _weights(self, prefix: str) -> Callable[[str], Tensor | None]:
        """A reader of the weights under `prefix`; one that is not there, such as a bias, is None."""

        def read(name: str) -> Tensor | None:
            full = f"{prefix}.{name}"
            return self._tensor(full) if full in self._checkpoint.tensors else None

        return read


def _decoder_layer(c: TextConfig, x: Tensor, positions: Tensor, read: Callable[[str], Tensor | None]) -> Tensor:
    """One layer of the llama family over rows [n, hidden] at `positions` [n]; causal among these rows."""

    def linear(y: Tensor, name: str) -> Tensor:
        weight = read(f"{name}.weight")
        assert weight is not None
        return F.linear(y, weight, read(f"{name}.bias"))

    y = _rms(x, read("input_layernorm.weight"), c.eps)
    q, k, v = (linear(y, f"self_attn.{part}_proj").reshape(len(x), -1, c.head_dim).transpose(0, 1) for part in "qkv")
    q, k = _rotate(c, q, positions), _rotate(c, k, positions)
    groups = c.heads // c.kv_heads
    y = F.scaled_dot_product_attention(
        q[None], k.repeat_interleave(groups, 0)[None], v.repeat_interleave(groups, 0)[None], is_causal=True
    )[0]
    x = x + linear(y.transpose(0, 1).flatten(1), "self_attn.o_proj")
    y = _rms(x, read("post_attention_layernorm.weight"), c.eps)
    return x + linear(_activate(linear(y, "mlp.gate_proj"), c.activation) * linear(y, "mlp.up_proj"), "mlp.down_proj")


def _rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _rotate(c: TextConfig, x: Tensor, positions: Tensor) -> Tensor:
    angles = positions[:, None].float() * torch.tensor(c.rope.inverse_frequencies)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def _activate(x: Tensor, name: str) -> Tensor:
    from transformers.activations import ACT2FN

    function: Any = ACT2FN[name]
    out: Tensor = function(x)
    return out
