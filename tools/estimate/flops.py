"""Arithmetic and memory of a model as formulas: exact integers, from sizes and tokens per layer.

A policy is given by its schedule, the tokens that each decoder layer computes at prefill: `full_schedule` for Full,
`withdrawal_schedule` for VTW, `make_schedule` for methods that keep some vision tokens in some layers. One
multiply-accumulate is two FLOPs. Two conventions are in print, and both are here under their names:

    calflops   VTW's tables: matrices of the decoder and the head on every token, no attention products, no vision.
    total      DyVTE's tables: vision tower, projector, the decoder's matrices and its attention products
               (the whole square, as if it had no causal mask), no head.

`prefill_flops` and `decode_flops` are neither: they count what the graphs of a bundle compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vtx.runtime.bundle.spec.model_spec import TextTowerSpec
from vtx.runtime.errors import RequestError
from vtx.tools.estimate.vision import VisionSize
from vtx.tools.model.decoder import Decoder

MAX_TOKENS = 1 << 24


def full_schedule(layers: int, *, text: int, vision: int) -> tuple[int, ...]:
    """Every layer sees the `text` and the `vision` tokens."""
    return make_schedule([vision] * layers, text=text)


def withdrawal_schedule(layers: int, k: int | None, *, text: int, vision: int) -> tuple[int, ...]:
    """VTW Eq. 5: layers 1..K-1 see all tokens, layers K..N the text alone. None: no withdrawal. Raises RequestError."""
    if k is None:
        return full_schedule(layers, text=text, vision=vision)
    if not 2 <= k <= layers:
        raise RequestError(f"K = {k} is outside 2..{layers}; K is the first layer without vision tokens; give another")
    return make_schedule([vision] * (k - 1) + [0] * (layers - k + 1), text=text)


def make_schedule(kept: Sequence[int], *, text: int) -> tuple[int, ...]:
    """Tokens per layer if layer l computes `kept[l - 1]` vision tokens in addition to the `text` tokens."""
    if text < 1 or min(kept, default=0) < 0 or text + max(kept, default=0) > MAX_TOKENS:
        raise RequestError(f"{text} text tokens and {max(kept, default=0)} vision tokens are outside 1..{MAX_TOKENS}")
    return tuple(text + count for count in kept)


def calflops(size: Decoder, tokens: Sequence[int]) -> float:
    """VTW's convention, in FLOPs.

    As in the tables, a layer's share of F(s) = 2s[N(4h^2 + 3hm) + vocab h] depends on the tokens of that layer, and
    the head is spread over the layers.
    """
    _check_layers(size, tokens)
    head = sum(tokens) * size.head_macs / size.layers
    return 2 * (sum(count * size.macs_of([layer]) for layer, count in enumerate(tokens, 1)) + head)


def total_flops(size: Decoder, tokens: Sequence[int], vision: VisionSize | None = None, views: int = 0) -> int:
    """DyVTE's convention, in FLOPs: `views` passes of the whole tower and the projector, then the decoder."""
    return encode_flops(vision, views, whole=True) + 2 * decoder_macs(size, tokens)


def encode_flops(vision: VisionSize | None, views: int, *, whole: bool = False, merged: int = 0) -> int:
    """FLOPs of `views` passes of tower and projector: of the exported layers, or of the `whole` tower.

    `merged`: tokens of a view that are removed by merging windows after the first layer (MustDrop section 3.3).
    """
    if vision is None:
        return 0
    tower = vision.tower
    layers = vision.layers if whole else vision.used
    merging = max(0, layers - 1) * tower.layer_macs(vision.tower_tokens - merged)
    projector = (vision.view_tokens - merged) * vision.projector_macs
    return 2 * views * (tower.patch_macs(vision.patches) + min(layers, 1) * vision.layer_macs + merging + projector)


def text_tower_flops(tower: TextTowerSpec, tokens: int) -> int:
    """FLOPs of CLIP's text encoder for `tokens` ids, and of the projection of the last one."""
    layer = 4 * tower.hidden**2 + 2 * tower.hidden * tower.intermediate + 2 * tokens * tower.hidden
    return 2 * (tower.layers * tokens * layer + tower.hidden * tower.width)


def prefill_flops(size: Decoder, tokens: Sequence[int]) -> int:
    """FLOPs of the decoder's graphs for a prompt in one chunk: all tokens, and the head on the last one."""
    return 2 * (decoder_macs(size, tokens) + size.head_macs)


def decode_flops(size: Decoder, slots: Sequence[int]) -> int:
    """FLOPs of one more token when `slots` KV slots are filled per layer; the token attends to itself as well."""
    _check_layers(size, slots)
    attention = sum(attention_macs(size, 1, slots[size.source(layer) - 1] + 1, layer) for layer in size.every)
    return 2 * (size.macs_of(size.every) + size.input_macs + attention + size.head_macs)


def append_flops(size: Decoder, layers: Iterable[int], tokens: int, filled: int) -> int:
    """FLOPs of the `layers`, by their numbers, for `tokens` more tokens after `filled` ones, without the head."""
    return 2 * sum(
        tokens * size.macs_of([layer]) + attention_macs(size, tokens, filled + tokens, layer) for layer in layers
    )


def ahead_flops(size: Decoder, kept: Sequence[int], ahead: Iterable[int], *, text: int) -> int:
    """FLOPs of running the layers `ahead` once more, over the tokens before image tokens leave there.

    `kept` are the image tokens of each layer. A layer where none leave, or all of them at a withdrawal, runs once.
    """
    again = (layer for layer in ahead if 0 < kept[layer - 1] < kept[layer - 2])
    return sum(append_flops(size, [layer], text + kept[layer - 2], 0) for layer in again)


def attention_macs(size: Decoder, tokens: int, slots: int, layer: int = 0) -> int:
    """The two products of a layer's attention, if it has any: `tokens` queries on `slots` keys, no causal saving.

    In a layer that slides, on as many as its window at most; of the gated delta rule the products with its matrices,
    three a token, without those within a chunk.
    """
    if layer in size.conv_layers:
        return 0 if size.delta is None else 3 * tokens * size.delta.memory
    visible = min(slots, size.sliding.window) if size.sliding is not None and size.slides(layer) else slots
    return 2 * tokens * visible * size.heads * size.heads_of(layer)


def decoder_macs(size: Decoder, tokens: Sequence[int]) -> int:
    _check_layers(size, tokens)
    return tokens[0] * size.input_macs + sum(
        count * size.macs_of([layer]) + attention_macs(size, count, tokens[size.source(layer) - 1], layer)
        for layer, count in enumerate(tokens, 1)
    )


def _check_layers(size: Decoder, tokens: Sequence[int]) -> None:
    if len(tokens) != size.layers:
        raise RequestError(
            f"a schedule of {len(tokens)} layers does not fit a model of {size.layers}; give one count per layer"
        )


def kv_bytes(size: Decoder, slots: Sequence[int], element_bytes: int) -> tuple[int, ...]:
    """Bytes of the KV cache per layer when `slots` are filled: after a prefill, its tokens per layer.

    None in layers that keep a state, which has one size, however many tokens there are, and in those that share the K
    and V of another.
    """
    _check_layers(size, slots)
    return tuple(count * size.slot_elements(layer) * element_bytes for layer, count in enumerate(slots, 1))


def with_exit(size: Decoder, tokens: Sequence[int]) -> tuple[int, ...]:
    """`tokens` of each layer at prefill, one in those that share K and V: no other token of a prompt is read there."""
    shared = size.shared or size.layers + 1
    return (*tokens[: shared - 1], *(min(1, count) for count in tokens[shared - 1 :]))
