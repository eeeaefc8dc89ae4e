"""The decoder's part of a configuration: its record, and how `text_config` is read, strictly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vtx.exporter.checkpoint.fields import MAX_WIDTH, number, original_positions, read_rope, size
from vtx.runtime.bundle.spec.model_spec import MAX_LAYERS, MAX_TAPS, DeltaSpec, RopeSpec, SlidingSpec
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.runtime.strict import optional
from vtx.tools.model.decoder import Decoder
from vtx.tools.model.mixture import Mixture

MAX_POSITIONS = (1 << 24) - 1
TEXT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "granite", "gemma", "lfm2", "qwen3_5", "ministral3")
# text models whose positions have three parts, qwen3 and qwen3_5 rotate by interleaved ones
THREE_PART = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3",
    "qwen3_5_text": "qwen3_5",
    "glm_ocr_text": "glm",
    "qwen3_5_moe_text": "qwen3_5",
    "paddleocr_vl_text": "ernie",
}
ATTENTION_KINDS = {"full_attention", "sliding_attention"}  # of a decoder's layers
STATE_KINDS = {"lfm2": "conv", "lfm3": "conv", "qwen3_5": "linear_attention"}  # of layers that keep a state, by family
GEMMA_NORMS = r"^text\.(.*norm)\.weight$"  # whose weights are differences from 1
QWEN_NORMS = r"^text\.(?!.*linear_attn)(.*norm)\.weight$"  # the same of Qwen3.5
SHIFTS = {"gemma": ((GEMMA_NORMS, 1.0),), "gemma2": ((GEMMA_NORMS, 1.0),), "qwen3_5": ((QWEN_NORMS, 1.0),)}
MLP_BIASED = ("llama", "granite", "gemma", "ernie")  # families whose settings may state biases of the MLP
O_BIASED = (*MLP_BIASED, "gemma2", "qwen3", "qwen3_5")  # and of attention's output
MAX_EXPERTS = 1 << 12  # of a layer
MAX_HEADS = 1 << 12  # of layers with the delta rule, and numbers of one


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig(Decoder):
    """A decoder of the llama family with what its graphs compute.

    `v_norm`: an RMS norm without weights over each head of values.
    `rotates_first`: of a head only the first numbers rotate, twice as many as there are frequencies other than 0.
    `two_way` as in `ModelSpec`. `padding_id`: the token of whose entries in the table of inputs to layers those of
    image tokens are made; `attention_scale`: the factor of attention's products if it is not 1 over the root of the
    head size; `softcap`: the bound of logits, by tanh; `attention_softcap`: that of attention's scaled products.

    `factors` are pairs of a pattern of weights' canonical names, and what these weights of a checkpoint are multiplied
    by wherever they are read, `shifts` the same of what is added to them then; a bundle holds the results.
    `scaled_embedding`: a text token's embedding is multiplied by sqrt(hidden) on its way into the decoder.
    """

    family: str
    eps: float
    activation: str
    rope: RopeSpec
    max_positions: int
    factors: tuple[tuple[str, float], ...] = optional(())
    shifts: tuple[tuple[str, float], ...] = optional(())
    scaled_embedding: bool = optional(False)
    two_way: str | None = optional(None)
    v_norm: bool = optional(False)
    rotates_first: bool = optional(False)
    sliding: SlidingSpec | None = optional(None)
    padding_id: int | None = optional(None)
    attention_scale: float | None = optional(None)
    softcap: float | None = optional(None)
    attention_softcap: float | None = optional(None)

    def scale(self, layer: int) -> float:
        """The factor of the products of a layer's attention."""
        return self.heads_of(layer) ** -0.5 if self.attention_scale is None else self.attention_scale

    @property
    def head_order(self) -> list[int]:
        """The numbers of a query's or key's head in an order whose halves rotate together; empty: as they are."""
        turned = sum(rate > 0 for rate in self.rope.frequencies)
        half = self.head_dim // 2
        if not self.rotates_first or turned == half:
            return []
        still = range(2 * turned, self.head_dim)
        first = still[: half - turned]
        second = still[half - turned :]
        return [*range(turned), *first, *range(turned, 2 * turned), *second]


def _fields_of(config: Any, family: str, layers: int) -> dict[str, Any]:
    """The fields that text models of some families have beside those of all."""
    if family == "qwen3_5":
        return _qwen3_5(config, layers)
    if family == "gemma2":
        return _gemma2(config)
    return {"post_norms": True} if family == "glm" else {}


def text_config_of(parsed: Any, *, three_part: bool = True) -> TextConfig:
    """`three_part`: positions have three parts if the text model can have them."""
    config = parsed.text_config
    heads, kv_heads = _attention_heads(config)
    hidden = size(config, "hidden_size")
    head_dim = head_size(config, hidden // heads)
    kind = type(config).model_type  # the class's: some configurations name another one, which transformers ignores
    family = THREE_PART.get(kind, kind)
    positions = _positions(config, family)
    layers = size(config, "num_hidden_layers", MAX_LAYERS)
    mixture = _mixture(config, layers)
    ffn = size(config, "shared_expert_intermediate_size" if mixture and mixture.shared else "intermediate_size")
    eps = number(vars(config), "norm_eps" if family == "lfm2" else "rms_norm_eps")
    factors = tuple[tuple[str, float], ...]()
    if family == "granite":
        eps, factors = _granite(config, eps, head_dim)
    fields = _fields_of(config, family, layers)
    if family == "lfm2":
        ffn, fields = _lfm2(config, layers, ffn)
    biases = ("use_bias", "use_bias") if family == "ernie" else ("attention_bias", "mlp_bias")
    biased, mlp_biased = (bool(getattr(config, name, False)) for name in biases)
    biased = biased and family != "glm"
    return TextConfig(
        family=family,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=size(config, "vocab_size", 1 << 22),
        eps=eps,
        activation=_activation(config, family),
        qkv_bias=family == "qwen2" or biased,
        o_bias=family in O_BIASED and biased,
        mlp_bias=family in MLP_BIASED and mlp_biased,
        tied=bool(parsed.tie_word_embeddings),
        rope=read_rope(
            config,
            head_dim,
            three_part=three_part and kind in THREE_PART,
            interleaved=family in ("qwen3", "qwen3_5"),
            partial=family in ("qwen3_5", "glm"),
        ),
        max_positions=positions,
        qk_norm=family in ("qwen3", "lfm2", "qwen3_5"),
        factors=factors,
        shifts=SHIFTS.get(family, ()),
        scaled_embedding=family in ("gemma", "gemma2"),
        mixture=mixture,
        **fields,
    )


def windowed_config_of(
    parsed: Any, family: str, widths: tuple[int, int], sliding: tuple[int, ...], **fields: Any
) -> TextConfig:
    """A decoder with norms of heads, of whose layers `sliding`, from 1, have a window.

    `widths`: the size of a head in the other layers, and in these. `fields`: the family's.
    """
    config = parsed.text_config
    heads, kv_heads = _attention_heads(config)
    ropes = dict(config.rope_parameters or {})

    def rope(kind: str, width: int) -> RopeSpec:
        return read_rope(config, width, three_part=False, parameters=ropes.get(kind) or {})

    windows = None
    if sliding:
        window = size(config, "sliding_window", MAX_POSITIONS)
        windows = SlidingSpec(sliding, window, widths[1], rope("sliding_attention", widths[1]))
    return TextConfig(
        family=family,
        layers=size(config, "num_hidden_layers", MAX_LAYERS),
        hidden=size(config, "hidden_size"),
        ffn=size(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=widths[0],
        tied=bool(parsed.tie_word_embeddings),
        rope=rope("full_attention", widths[0]),
        max_positions=size(config, "max_position_embeddings", MAX_POSITIONS),
        qk_norm=True,
        sliding=windows,
        **fields,
    )


def _attention_heads(config: Any) -> tuple[int, int]:
    """The heads of queries, and those of keys and values. Raises CheckpointError."""
    heads = size(config, "num_attention_heads")
    kv_heads = size(config, "num_key_value_heads")
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} heads are not a multiple of {kv_heads} key/value heads")
    return heads, kv_heads


def head_size(config: Any, default: int = 0) -> int:
    """The size of a head. Raises UnsupportedModelError for one that onnxruntime's attention does not take."""
    head_dim = getattr(config, "head_dim", None) or default
    if isinstance(head_dim, bool) or not isinstance(head_dim, int) or not 8 <= head_dim <= MAX_WIDTH or head_dim % 8:
        raise UnsupportedModelError(
            f"head_dim {head_dim!r:.60} is not supported: onnxruntime's GroupQueryAttention needs a multiple of 8"
        )
    return head_dim


def _positions(config: Any, family: str) -> int:
    """The positions up to which attention is full. Raises UnsupportedModelError for layers of an unknown kind."""
    positions = size(config, "max_position_embeddings", MAX_POSITIONS)
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    kinds = {STATE_KINDS[family], "full_attention"} if family in STATE_KINDS else ATTENTION_KINDS
    if unknown := sorted({*map(str, layer_types or ())} - kinds):
        raise UnsupportedModelError(
            f"layers of the kind {unknown[0]!r:.40} are not supported; vtx exports {', '.join(sorted(kinds))}"
        )
    if isinstance(window, int) and window > 0 and (not layer_types or "sliding_attention" in layer_types):
        positions = min(positions, window)
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    if family == "ministral3" and parameters.get("llama_4_scaling_beta") != 0:  # beyond which queries grow
        positions = min(positions, int(number(parameters, "original_max_position_embeddings")))
    return min(positions, original_positions(config) or positions)


def _lfm2(config: Any, layers: int, ffn: int) -> tuple[int, dict[str, Any]]:
    """The width of LFM2's MLP, and its convolutions."""
    if config.block_auto_adjust_ff_dim:
        ffn = int(2 * ffn / 3)
        multiple = size(config, "block_multiple_of")
        if config.block_ffn_dim_multiplier is not None:
            ffn = int(number(vars(config), "block_ffn_dim_multiplier") * ffn)
        ffn = -(-ffn // multiple) * multiple
        if not 1 <= ffn <= MAX_WIDTH:
            raise CheckpointError(
                f"config.json: block_ffn_dim_multiplier makes an MLP of width {ffn}, outside 1..{MAX_WIDTH}; correct "
                "config.json"
            )
    fields = convolved_layers(config, "lfm2", layers, "conv_L_cache")
    return ffn, fields | {"conv_bias": bool(config.conv_bias)}


def _qwen3_5(config: Any, layers: int) -> dict[str, Any]:
    """Qwen3.5's layers with the gated delta rule, and what its attention has beyond Qwen3's."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    key_heads, value_heads, key_dim, value_dim = (size(config, f"linear_{name}", MAX_HEADS) for name in names)
    if value_heads % key_heads:
        raise CheckpointError(
            f"config.json: linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}; "
            "correct config.json"
        )
    fields = convolved_layers(config, "qwen3_5", layers, "linear_conv_kernel_dim")
    fields |= {"gated": True, "rotates_first": True}
    return fields | ({"delta": DeltaSpec(key_heads, value_heads, key_dim, value_dim)} if fields["conv_layers"] else {})


def _mixture(config: Any, layers: int) -> Mixture | None:
    """The experts of Qwen's mixtures; None of a dense model, and of one whose every layer is dense."""
    if not hasattr(config, "moe_intermediate_size"):
        return None
    count, active = (size(config, name, MAX_EXPERTS) for name in ("num_experts", "num_experts_per_tok"))
    if active > count:
        raise CheckpointError(
            f"config.json: num_experts_per_tok {active} is beyond num_experts {count}; correct config.json"
        )
    step = size(config, "decoder_sparse_step", MAX_LAYERS) if hasattr(config, "decoder_sparse_step") else 1
    listed = getattr(config, "mlp_only_layers", ())
    dense = tuple(layer for layer in range(1, layers + 1) if layer - 1 in listed or layer % step)
    if len(dense) == layers:
        return None
    shared = hasattr(config, "shared_expert_intermediate_size")
    return Mixture(count, active, size(config, "moe_intermediate_size"), shared, dense)


def _gemma2(config: Any) -> dict[str, Any]:
    """Gemma 2's norms behind attention and the MLP, its scale of attention's products, and its bounds by tanh."""
    settings = vars(config)
    caps = {"softcap": "final_logit_softcapping", "attention_softcap": "attn_logit_softcapping"}
    bounds = {field: number(settings, name) for field, name in caps.items() if settings[name] is not None}
    return {"post_norms": True, "attention_scale": number(settings, "query_pre_attn_scalar") ** -0.5, **bounds}


def _activation(config: Any, family: str) -> str:
    """The function between the matrices of the MLP."""
    if family == "lfm2":
        return "silu"
    return str(config.hidden_activation if family == "gemma2" else config.hidden_act)


def convolved_layers(config: Any, family: str, layers: int, setting: str) -> dict[str, Any]:
    """The layers with a convolution, and the tokens that one spans, by a `setting`."""
    kinds = config.layer_types
    taps = getattr(config, setting)
    if len(kinds) != layers:
        raise CheckpointError(
            f"config.json: layer_types names {len(kinds)} layers, num_hidden_layers {layers}; correct config.json"
        )
    convolved = tuple(number for number, kind in enumerate(kinds, 1) if kind == STATE_KINDS[family])
    if len(convolved) == layers:
        raise UnsupportedModelError("none of this model's layers has attention; vtx exports models with one at least")
    if convolved and (isinstance(taps, bool) or not isinstance(taps, int) or not 2 <= taps <= MAX_TAPS):
        raise UnsupportedModelError(
            f"{setting} {taps!r:.40} is not supported; vtx exports convolutions over 2 to {MAX_TAPS} tokens"
        )
    return {"conv_layers": convolved, "conv_taps": taps if convolved else 1}


def _granite(config: Any, eps: float, head_dim: int) -> tuple[float, tuple[tuple[str, float], ...]]:
    """Granite's four multipliers as a norm's epsilon and factors of weights: what is left is a llama.

    Hidden states are those of Granite divided by the embedding's multiplier, which the norms take out again. Each
    addition to them is the product of two matrices, and each of the two takes half of its factor.
    """
    names = "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"
    embedding, attention, residual, logits = (number(vars(config), name) for name in names)
    added = residual / embedding
    least = 1e-3  # weights times these are still well within half precision
    most = 1e3
    scale = attention * head_dim**0.5
    out = 1 / logits
    for name, factor in (("attention_multiplier", scale), ("residual_multiplier", added), ("logits_scaling", out)):
        if not least <= factor <= most:
            raise UnsupportedModelError(
                f"{name} {getattr(config, name):g} with embedding_multiplier {embedding:g} and heads of {head_dim} "
                f"multiplies weights by {factor:g}, and vtx by {least:g} to {most:g}; correct config.json"
            )
    return eps / embedding**2, (
        (r"^text\..*\.q_proj\.", scale),
        (r"^text\..*\.((v|up)_proj\.|(o|down)_proj\.weight$)", added**0.5),
        (r"^text\..*\.(o|down)_proj\.bias$", added),
        (r"^text\.norm\.", out),
    )
