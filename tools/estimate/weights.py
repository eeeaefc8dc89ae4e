"""A model's weights as an export stores them (`Precisions.stored`), and their bytes in each precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from vtx.runtime.backends.engines import EXPANDED
from vtx.runtime.backends.memory import resident_bytes
from vtx.runtime.bundle.safetensors import DTYPES
from vtx.runtime.bundle.spec.stored import EMBEDDING, HEAD, HEADS, Precisions, Scheme, tied_head
from vtx.runtime.precision import PRECISIONS
from vtx.tools.estimate.sizes import ActionSize, ModelSize
from vtx.tools.estimate.vision import VisionSize
from vtx.tools.model.decoder import PER_LAYER, Decoder
from vtx.tools.model.mixed import head_rows, widened

PLANS = 64  # whose sums over thousands of tensors are kept: a plan asks for the same ones at every K
SOURCE = "F16"  # of the checkpoint; bfloat16 has the same size


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """`count` weights of one `shape`, by the canonical name of one of them."""

    name: str
    shape: tuple[int, ...]
    count: int = 1


def precisions_of(
    model: ModelSize,
    decoder: str,
    vision: str | None = None,
    head: str | None = None,
    blocks: Mapping[str, int] | None = None,
    bits: float | None = None,
) -> Precisions:
    """The precisions that an export of `model` stores, with the defaults of vtx-export. Raises RequestError.

    `blocks`: the most weights to a scale, by precision; `bits`: the mean of a decoder with wider matrices.
    """
    precisions = Precisions.choose(decoder, vision, head, None, blocks)
    table = (model.decoder.vocab, model.decoder.hidden)
    if model.decoder.tied:
        precisions = tied_head(precisions, head, table, "BF16" if head == "bf16" else SOURCE)
    if bits is None:
        return precisions
    shapes = {group.name: group.shape for group in all_weights(model, precisions)}
    if head is None and HEAD in shapes:
        shapes |= {name: (len(rows), table[1]) for name, rows in head_rows(table[0]).items()}
        precisions = replace(precisions, head=precisions.decoder)
    return widened(precisions, shapes.items(), bits)


def precisions_by_name(
    model: ModelSize, names: Iterable[str] = PRECISIONS, vision: str | None = None, head: str | None = None
) -> dict[str, Precisions]:
    """`precisions_of` each of the decoder's precisions named."""
    return {name: precisions_of(model, name, vision, head) for name in names}


def all_weights(model: ModelSize, precisions: Precisions) -> Iterator[WeightGroup]:
    decoder = model.decoder
    yield from (WeightGroup(name, shape) for name, shape in decoder.tensors() if name != HEAD)
    if not head_is_table(model, precisions):
        yield from head_weights(model, precisions)
    if model.action is not None:
        yield from expert_weights(model.action, decoder)
    if model.vision is not None:
        yield from vision_weights(model.vision)


def expert_weights(action: ActionSize, decoder: Decoder) -> Iterator[WeightGroup]:
    """The matrices of an expert's layers, which have the precision of the decoder's, and its norms together."""
    small = 0
    for name, shape in action.tensors(decoder):
        if len(shape) == 1:
            small += shape[0]
        else:
            yield WeightGroup(name, shape)
    yield WeightGroup("head.norm.weight", (small,))


def layer_weights(decoder: Decoder) -> Iterator[WeightGroup]:
    """The matrices of all layers."""
    for layer in decoder.every:
        yield from (WeightGroup(name, shape) for name, shape in decoder.layer_tensors(layer) if len(shape) > 1)


def read_weights(decoder: Decoder, tokens: int) -> Iterator[WeightGroup]:
    """The matrices of all layers, of experts the most that `tokens` read."""
    mixture = decoder.mixture
    if mixture is None:
        yield from layer_weights(decoder)
        return
    experts = min(mixture.count, tokens * mixture.active)
    for group in layer_weights(decoder):
        yield replace(group, shape=mixture.part(group.name, group.shape, experts))


def head_is_table(model: ModelSize, precisions: Precisions) -> bool:
    """True if no output matrix is stored beside the embedding table."""
    return model.decoder.tied and (model.action is not None or not precisions.head_apart)


def head_weights(model: ModelSize, precisions: Precisions) -> Iterator[WeightGroup]:
    """The output matrix, which may be the embedding table, or have rows of several precisions."""
    size = model.decoder
    if precisions.wider.isdisjoint({*HEADS} - {HEAD}):
        yield WeightGroup(EMBEDDING if head_is_table(model, precisions) else HEAD, (size.vocab, size.hidden))
    else:
        yield from (WeightGroup(name, (len(rows), size.hidden)) for name, rows in head_rows(size.vocab).items())


def vision_weights(size: VisionSize) -> Iterator[WeightGroup]:
    """The exported part of the towers, and the projector: their matrices, and all else together."""
    yield from (WeightGroup("vision.weight", shape, count) for shape, count in size.weights().items())


def stored_bytes(weights: Iterable[WeightGroup], precisions: Precisions, *, wide: bool = False, int8: int = 1) -> int:
    """Bytes in a bundle's files, with scales and zero points.

    `wide`: as onnxruntime's CPU provider reads them, floats in fp32; `int8`: bytes of an int8 weight in an engine's
    memory.
    """
    total = 0
    for group in weights:
        dtype, scheme = precisions.stored(group.name, group.shape, SOURCE)
        if scheme is None:
            total += group.count * prod(group.shape) * (4 if wide else DTYPES[dtype][0] // 8)
        else:
            bits = scheme.bits_of_a_weight + (8 * (int8 - 1) if scheme.bits == 8 else 0)
            total += group.count * round(prod(group.shape) * bits / 8)
    return total


@lru_cache(PLANS)
def bundle_bytes(model: ModelSize, precisions: Precisions, int8: int = 1) -> int:
    """Bytes of all weights in a bundle's files; `int8` as for `stored_bytes`."""
    return stored_bytes(all_weights(model, precisions), precisions, int8=int8)


@lru_cache(PLANS)
def token_bytes(model: ModelSize, precisions: Precisions, wide: bool, tokens: int = 1, int8: int = 1) -> int:
    """Bytes of the matrices that a run of `tokens` reads: those of all layers, and the output matrix."""
    groups = [*read_weights(model.decoder, tokens), *head_weights(model, precisions)]
    return stored_bytes(groups, precisions, wide=wide, int8=int8)


def resident(model: ModelSize, precisions: Precisions, floats: Mapping[str, int] = EXPANDED) -> int:
    """Bytes that a CPU engine holds; the embedding table stays in its file unless it is the head, and so does the one
    of inputs to layers.

    `floats` are the bytes of a float in its memory, by type: `EXPANDED` for onnxruntime, `KEPT` for OpenVINO.
    """
    return _resident(model, precisions, tuple(floats.items()))


@lru_cache(PLANS)
def _resident(model: ModelSize, precisions: Precisions, floats: tuple[tuple[str, int], ...]) -> int:
    total = 0
    bytes_by_type = dict(floats)
    for group in all_weights(model, precisions):
        if group.name == PER_LAYER or (group.name == EMBEDDING and not head_is_table(model, precisions)):
            continue
        dtype, scheme = precisions.stored(group.name, group.shape, SOURCE)
        scales = _scales(group, scheme) if scheme else 0
        zeros = scales * scheme.zero_bits // 8 if scheme else 0
        total += group.count * (resident_bytes(dtype, group.shape, scales, bytes_by_type) + zeros)
    return total


def packed_twice(model: ModelSize, precisions: Precisions, floats: Mapping[str, int]) -> int:
    """Bytes of the output matrix in floats, as long as a CPU engine packs them from a copy that it widened."""
    if model.action is not None:
        return 0
    groups = head_weights(model, precisions)
    stored = [(precisions.stored(group.name, group.shape, SOURCE), group.shape) for group in groups]
    return sum(floats[dtype] * prod(shape) for (dtype, scheme), shape in stored if scheme is None)


def _scales(group: WeightGroup, scheme: Scheme) -> int:
    rows, width = group.shape
    return rows * scheme.scales(width)
