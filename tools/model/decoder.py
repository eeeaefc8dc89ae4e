"""A decoder: its layers' tensors, and the work of their matrices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from vtx.runtime.bundle.spec.model_spec import ByLayer, DeltaSpec, SlidingLayers
from vtx.runtime.bundle.spec.stored import EMBEDDING, HEAD
from vtx.runtime.strict import optional
from vtx.tools.model.mixture import Mixture
from vtx.tools.model.tensors import Shapes, linear_tensors

# Of inputs to each layer: a token's own, side by side, and the matrix and the norm of those made from its embedding.
# The matrix is part of the embedding and of the vision graph, and not quantised, as the table.
PER_LAYER = "text.embed_tokens_per_layer.weight"
PER_LAYER_PROJECTION = "text.embed_projection.weight"
PER_LAYER_NORM = "text.per_layer_projection_norm.weight"
NORM = "text.norm.weight"


@dataclass(frozen=True, slots=True)
class Decoder(ByLayer):
    """A decoder of the llama family; `kv_heads` below `heads` is grouped-query attention.

    `qk_norm`: an RMS norm over each head of queries and keys, unrotated. `conv_layers`, counted from 1, have in place
    of attention a gated convolution of each channel over the last `conv_taps` tokens, and keep no K and V; with
    `delta`, the gated delta rule behind it. `conv_bias`: the convolution and its matrices have biases. `gated`: a
    sigmoid of numbers of the query's matrix, as many as its heads give out, multiplies what attention gives.
    `head_gates`: the same with one number a head, of a matrix of its own. `post_norms`: a norm follows attention and
    the MLP too, before their sum with the hidden states. `layer_scale`: a number by which a layer's hidden states are
    multiplied. `sliding` and `shared` as in `ByLayer`; `shared_ffn`: width of the MLPs from layer `shared` on.
    `per_layer`: numbers of a token's input to each layer, from a table of their own. `mixture`: experts in place of
    MLPs.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = optional(False)
    qkv_bias: bool = optional(False)
    o_bias: bool = optional(False)
    mlp_bias: bool = optional(False)
    qk_norm: bool = optional(False)
    conv_layers: tuple[int, ...] = optional(())
    conv_taps: int = optional(1)
    conv_bias: bool = optional(False)
    delta: DeltaSpec | None = optional(None)
    gated: bool = optional(False)
    head_gates: bool = optional(False)
    post_norms: bool = optional(False)
    layer_scale: bool = optional(False)
    sliding: SlidingLayers | None = optional(None)
    shared: int | None = optional(None)
    shared_ffn: int | None = optional(None)
    per_layer: int | None = optional(None)
    mixture: Mixture | None = optional(None)

    @property
    def attending(self) -> int:
        """The number of layers with attention."""
        return self.layers - len(self.conv_layers)

    @property
    def every(self) -> range:
        """The numbers of all layers."""
        return range(1, self.layers + 1)

    def ffn_of(self, layer: int) -> int:
        """The width of a layer's MLP."""
        return self.ffn if self.shared_ffn is None or self.source(layer) == layer else self.shared_ffn

    def mixture_of(self, layer: int) -> Mixture | None:
        """The experts of a layer, None if it has an MLP."""
        return None if self.mixture is None or layer in self.mixture.dense else self.mixture

    def keeps(self, layer: int) -> bool:
        """True if a layer has K and V of its own."""
        return layer not in self.conv_layers and self.source(layer) == layer

    def slot_elements(self, layer: int) -> int:
        """Elements of K and V in one KV slot of a layer."""
        return 2 * self.kv_heads * self.heads_of(layer) if self.keeps(layer) else 0

    def tensors(self) -> Shapes:
        """All weights, in the order in which the graphs use them."""
        yield EMBEDDING, (self.vocab, self.hidden)
        if self.per_layer is not None:
            yield PER_LAYER, (self.vocab, self.layers * self.per_layer)
            yield PER_LAYER_PROJECTION, (self.layers * self.per_layer, self.hidden)
            yield PER_LAYER_NORM, (self.per_layer,)
        for layer in self.every:
            yield from self.layer_tensors(layer)
        yield NORM, (self.hidden,)
        if not self.tied:
            yield HEAD, (self.vocab, self.hidden)

    def layer_tensors(self, layer: int) -> Shapes:
        """The weights of `layer`, counted from 1."""
        prefix = f"text.layers.{layer - 1}"
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.post_norms:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in norms:
            yield f"{prefix}.{name}.weight", (self.hidden,)
        attends = layer not in self.conv_layers
        if attends:
            yield from self._attention_tensors(f"{prefix}.self_attn", layer)
        yield from self._mlp_tensors(f"{prefix}.mlp", layer)
        if not attends:
            yield from self._state_tensors(prefix)
        if attends and self.qk_norm:
            yield f"{prefix}.self_attn.q_norm.weight", (self.heads_of(layer),)
            if self.keeps(layer):
                yield f"{prefix}.self_attn.k_norm.weight", (self.heads_of(layer),)
        if self.per_layer is not None:
            yield f"{prefix}.per_layer_input_gate.weight", (self.per_layer, self.hidden)
            yield f"{prefix}.per_layer_projection.weight", (self.hidden, self.per_layer)
            yield f"{prefix}.post_per_layer_input_norm.weight", (self.hidden,)
        if self.layer_scale:
            yield f"{prefix}.layer_scalar", (1,)

    def _mlp_tensors(self, name: str, layer: int) -> Shapes:
        """The weights of an MLP, or of experts and the MLP beside them."""
        mixture = self.mixture_of(layer)
        if mixture is not None:
            yield from mixture.tensors(name, self.hidden)
            if not mixture.shared:
                return
            name = f"{name}.shared_expert"
        ffn = self.ffn_of(layer)
        yield from linear_tensors(f"{name}.gate_proj", ffn, self.hidden, bias=self.mlp_bias)
        yield from linear_tensors(f"{name}.up_proj", ffn, self.hidden, bias=self.mlp_bias)
        yield from linear_tensors(f"{name}.down_proj", self.hidden, ffn, bias=self.mlp_bias)

    def _attention_tensors(self, name: str, layer: int) -> Shapes:
        queries = self.heads * self.heads_of(layer)
        keys = self.kv_heads * self.heads_of(layer)
        yield from linear_tensors(f"{name}.q_proj", queries * (1 + self.gated), self.hidden, bias=self.qkv_bias)
        if self.keeps(layer):
            yield from linear_tensors(f"{name}.k_proj", keys, self.hidden, bias=self.qkv_bias)
            yield from linear_tensors(f"{name}.v_proj", keys, self.hidden, bias=self.qkv_bias)
        if self.head_gates:
            yield f"{name}.g_proj.weight", (self.heads, self.hidden)
        yield from linear_tensors(f"{name}.o_proj", self.hidden, queries, bias=self.o_bias)

    def _state_tensors(self, prefix: str) -> Shapes:
        """The weights of a convolution, or of the gated delta rule."""
        if self.delta is None:
            name = f"{prefix}.conv"
            yield from linear_tensors(f"{name}.in_proj", 3 * self.hidden, self.hidden, bias=self.conv_bias)
            yield f"{name}.conv.weight", (self.hidden, 1, self.conv_taps)
            if self.conv_bias:
                yield f"{name}.conv.bias", (self.hidden,)
            yield from linear_tensors(f"{name}.out_proj", self.hidden, self.hidden, bias=self.conv_bias)
            return
        name = f"{prefix}.linear_attn"
        yield f"{name}.in_proj_qkv.weight", (self.delta.channels, self.hidden)
        yield f"{name}.in_proj_z.weight", (self.delta.values, self.hidden)
        yield f"{name}.in_proj_b.weight", (self.delta.value_heads, self.hidden)
        yield f"{name}.in_proj_a.weight", (self.delta.value_heads, self.hidden)
        yield f"{name}.conv1d.weight", (self.delta.channels, 1, self.conv_taps)
        yield f"{name}.A_log", (self.delta.value_heads,)
        yield f"{name}.dt_bias", (self.delta.value_heads,)
        yield f"{name}.norm.weight", (self.delta.value_dim,)
        yield f"{name}.out_proj.weight", (self.hidden, self.delta.values)

    def macs_of(self, layers: Iterable[int]) -> int:
        """Multiply-accumulates of these layers' matrices for one token; without experts the number of their weights."""
        return sum(_layer_macs(self, layer) for layer in layers)

    @property
    def layer_macs(self) -> int:
        """Multiply-accumulates of an attention layer's matrices for one token, if all layers are alike."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.ffn

    @property
    def input_macs(self) -> int:
        """Multiply-accumulates of the matrix that makes one token's inputs to all layers; also its weights."""
        return self.layers * (self.per_layer or 0) * self.hidden

    @property
    def head_macs(self) -> int:
        return self.vocab * self.hidden

    def macs_after_attention(self, layer: int) -> int:
        """Multiply-accumulates of a layer after its attention, for one token."""
        return self.hidden * self.heads_of(layer) * self.heads + self.products_of(self._mlp_tensors("", layer))

    def products_of(self, tensors: Shapes) -> int:
        """Multiply-accumulates of the matrices among these for one token."""
        mixture = self.mixture
        matrices = ((name, shape) for name, shape in tensors if len(shape) > 1)
        if mixture is None:
            return sum(prod(shape) for _, shape in matrices)
        return sum(prod(mixture.part(name, shape, mixture.active)) for name, shape in matrices)

    @property
    def mlp_values(self) -> int:
        """The most numbers of a token between the matrices of its MLP, or of all experts that read it."""
        return self.ffn if self.mixture is None else max(self.ffn, self.mixture.active * self.mixture.ffn)

    @property
    def small_parameters(self) -> int:
        """Norms and biases of all layers, and the norms outside of them."""
        return sum(prod(shape) for _, shape in self.tensors() if len(shape) == 1)

    @property
    def parameters(self) -> int:
        """All weights: layers, embedding, final norm, and the head unless it is the embedding."""
        return sum(prod(shape) for _, shape in self.tensors())


@lru_cache(maxsize=1024)
def _layer_macs(decoder: Decoder, layer: int) -> int:
    return decoder.products_of(decoder.layer_tensors(layer))
