"""The decoder's part of a configuration: its record, and how `text_config` is read, strictly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vtx.exporter.checkpoint.fields import MAX_WIDTH, number, read_rope, size
from vtx.runtime.bundle.spec.model_spec import MAX_LAYERS, MAX_TAPS, RopeSpec, SlidingSpec
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.tools.estimate.sizes import DecoderShape

MAX_POSITIONS = (1 << 24) - 1
TEXT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "granite", "gemma", "lfm2")
# text models whose positions have three parts, qwen3 rotates by interleaved ones
THREE_PART = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
ATTENTION_KINDS = {"full_attention", "sliding_attention"}  # of a decoder's layers
GEMMA_NORMS = r"^text\.(.*norm)\.weight$"  # whose weights are differences from 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig(DecoderShape):
    """A decoder of the llama family with what its graphs compute.

    `v_norm`: an RMS norm without weights over each head of values. `conv_bias`: convolutions have biases. `two_way` and
    the numbers from `padding_id` on as in `ModelSpec`.

    `factors` are pairs of a pattern of weights' canonical names, and what these weights of a checkpoint are multiplied
    by wherever they are read, `shifts` the same of what is added to them then; a bundle holds the results.
    `scaled_embedding`: a text token's embedding is multiplied by sqrt(hidden) on its way into the decoder.
    """

    family: str
    eps: float
    activation: str
    rope: RopeSpec
    max_positions: int
    factors: tuple[tuple[str, float], ...] = ()
    shifts: tuple[tuple[str, float], ...] = ()
    scaled_embedding: bool = False
    two_way: str | None = None
    conv_bias: bool = False
    v_norm: bool = False
    sliding: SlidingSpec | None = None
    padding_id: int | None = None
    attention_scale: float | None = None
    softcap: float | None = None

    def scale(self, layer: int) -> float:
        """The factor of the products of a layer's attention."""
        return self.heads_of(layer) ** -0.5 if self.attention_scale is None else self.attention_scale


def text_config_of(parsed: Any) -> TextConfig:
    config = parsed.text_config
    heads, hidden = size(config, "num_attention_heads"), size(config, "hidden_size")
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = size(config, "num_key_value_heads")
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} heads are not a multiple of {kv_heads} key/value heads")
    if isinstance(head_dim, bool) or not isinstance(head_dim, int) or not 8 <= head_dim <= MAX_WIDTH or head_dim % 8:
        raise UnsupportedModelError(
            f"head_dim {head_dim!r:.60} is not supported: onnxruntime's GroupQueryAttention needs a multiple of 8"
        )
    family = THREE_PART.get(config.model_type, config.model_type)
    positions = size(config, "max_position_embeddings", MAX_POSITIONS)
    window, layer_types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    kinds = {"conv", "full_attention"} if family == "lfm2" else ATTENTION_KINDS
    if unknown := sorted({*map(str, layer_types or ())} - kinds):
        raise UnsupportedModelError(
            f"layers of the kind {unknown[0]!r:.40} are not supported; vtx exports {', '.join(sorted(kinds))}"
        )
    if isinstance(window, int) and window > 0 and (not layer_types or "sliding_attention" in layer_types):
        positions = min(positions, window)  # attention is full up to here
    layers, ffn = size(config, "num_hidden_layers", MAX_LAYERS), size(config, "intermediate_size")
    eps = number(vars(config), "norm_eps" if family == "lfm2" else "rms_norm_eps")
    factors, more = tuple[tuple[str, float], ...](), dict[str, Any]()
    if family == "granite":
        eps, factors = _granite(config, eps, head_dim)
    if family == "lfm2":
        ffn, more = _lfm2(config, layers, ffn)
    biases, gemma = family in ("llama", "granite", "gemma"), family == "gemma"
    return TextConfig(
        family=family, layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        vocab=size(config, "vocab_size", 1 << 22), eps=eps,
        activation="silu" if family == "lfm2" else str(config.hidden_act),
        qkv_bias=family == "qwen2" or bool(getattr(config, "attention_bias", False)),
        o_bias=(biases or family == "qwen3") and bool(getattr(config, "attention_bias", False)),
        mlp_bias=biases and bool(getattr(config, "mlp_bias", False)), tied=bool(parsed.tie_word_embeddings),
        rope=read_rope(
            config, head_dim, three_part=config.model_type in THREE_PART, interleaved=family == "qwen3"
        ),
        max_positions=positions,
        qk_norm=family in ("qwen3", "lfm2"), factors=factors, shifts=((GEMMA_NORMS, 1.0),) if gemma else (),
        scaled_embedding=gemma, **more,
    )  # fmt: skip


def _lfm2(config: Any, layers: int, ffn: int) -> tuple[int, dict[str, Any]]:
    """The width of LFM2's MLP, and its convolutions."""
    if config.block_auto_adjust_ff_dim:
        ffn, multiple = int(2 * ffn / 3), size(config, "block_multiple_of")
        if config.block_ffn_dim_multiplier is not None:
            ffn = int(number(vars(config), "block_ffn_dim_multiplier") * ffn)
        ffn = -(-ffn // multiple) * multiple
        if not 1 <= ffn <= MAX_WIDTH:
            raise CheckpointError(
                f"config.json: block_ffn_dim_multiplier makes an MLP of width {ffn}, outside 1..{MAX_WIDTH}; correct "
                "config.json"
            )
    kinds, taps = config.layer_types, config.conv_L_cache
    if len(kinds) != layers:
        raise CheckpointError(
            f"config.json: layer_types names {len(kinds)} layers, num_hidden_layers {layers}; correct config.json"
        )
    convolved = tuple(number for number, kind in enumerate(kinds, 1) if kind == "conv")
    if len(convolved) == layers:
        raise UnsupportedModelError("none of this model's layers has attention; vtx exports models with one at least")
    if convolved and (isinstance(taps, bool) or not isinstance(taps, int) or not 2 <= taps <= MAX_TAPS):
        raise UnsupportedModelError(
            f"conv_L_cache {taps!r:.40} is not supported; vtx exports convolutions over 2 to {MAX_TAPS} tokens"
        )
    return ffn, {"conv_layers": convolved, "conv_taps": taps if convolved else 1, "conv_bias": bool(config.conv_bias)}


def _granite(config: Any, eps: float, head_dim: int) -> tuple[float, tuple[tuple[str, float], ...]]:
    """Granite's four multipliers as a norm's epsilon and factors of weights: what is left is a llama.

    Hidden states are those of Granite divided by the embedding's multiplier, which the norms take out again. Each
    addition to them is the product of two matrices, and each of the two takes half of its factor.
    """
    names = "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"
    embedding, attention, residual, logits = (number(vars(config), name) for name in names)
    added = residual / embedding
    least, most = 1e-3, 1e3  # weights times these are still well within half precision
    scale, out = attention * head_dim**0.5, 1 / logits
    for name, factor in (("attention_multiplier", scale), ("residual_multiplier", added), ("logits_scaling", out)):
        if not least <= factor <= most:
            raise UnsupportedModelError(
                f"{name} {getattr(config, name):g} with embedding_multiplier {embedding:g} and heads of {head_dim} "
                f"multiplies weights by {factor:g}, and vtx by {least:g} to {most:g}; correct config.json"
            )
    return eps / embedding**2, (
        (r"^text\..*\.q_proj\.", scale), (r"^text\..*\.((v|up)_proj\.|(o|down)_proj\.weight$)", added**0.5),
        (r"^text\..*\.(o|down)_proj\.bias$", added), (r"^text\.norm\.", out),
    )  # fmt: skip
