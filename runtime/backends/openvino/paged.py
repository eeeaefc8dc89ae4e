"""Stages of `plain` graphs as OpenVINO runs them: paged attention, and hidden states of the requested tokens only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.openvino.nodes import add_parameter, kind_of, readers_of, replace
from vtx.runtime.bundle.spec import names
from vtx.runtime.errors import BundleError, DeviceError
from vtx.runtime.installing import pip_install

BLOCK = 32  # slots of a block, by OpenVINO's CPU plugin
PAST = "past_lens"  # filled slots before the run, of each sequence
BEGINS = "subsequence_begins"  # index of the first token of each sequence, then the number of tokens
BLOCKS = "block_indices"  # the blocks that hold the slots of each sequence
BLOCK_BEGINS = "block_indices_begins"
FILLED = "max_context_len"  # filled slots after the run, the most of any sequence
SLIDING = "sliding."  # before the names of the same for layers that slide, in which a run's slots may be others
WINDOW = "window"  # slots that the run's tokens see in layers that slide, their own included; 0: all
IMAGES = "token_types"  # of each of the run's tokens: 1 if those beside it with a 1 see it and it sees them
OUTPUTS = "rows"  # the tokens whose hidden states the stage returns, [m] int32
SCORED = "scored"  # tokens of each sequence that scores are asked for: none; not an input
HEADS_AND_TOKENS = np.array([0, 2, 1, 3])  # swaps these axes

_SIZES = {PAST: [-1], BEGINS: [-1], BLOCKS: [-1], BLOCK_BEGINS: [-1], FILLED: []}
PLACES = (PAST, BLOCKS, BLOCK_BEGINS, FILLED)  # where a run's slots are
# Inputs for features of the operator that are not used: biases; scores, blocks rotated or left out.
_BEFORE: tuple[tuple[Any, Any], ...] = ((np.float32, []),)
_AFTER: tuple[tuple[Any, Any], ...] = (
    (np.int32, []), (np.int32, []), (np.float32, []), (np.float32, []), (np.int32, 128), (np.int32, 8),
    (np.float32, []), (np.int32, 0), (np.int32, []), (np.int32, []), (np.int32, []), (np.int32, []), (np.uint8, []),
    (np.int32, []),
)  # fmt: skip
OF_IMAGES = 11  # the place of `IMAGES` among them
_TO_THE_PROJECTION = ("Reshape", "Transpose", "Squeeze", "Convert", "Multiply")  # the last by a gate
_TO_THE_RESIDUAL = ("Convert", "Multiply", "Add", "Divide")  # the factor of a product, its bias, and a norm behind it


def page_caches(
    model: Any,
    layers: Sequence[int],
    heads: int,
    sliding: Collection[int] = (),
    *,
    both_ways: bool = False,
    key_scales: Mapping[int, NDArray[np.float32]] | None = None,
) -> None:
    """Replace each softmax(q k^T * scale + mask) v, and the caches that it grows, by one operator that fills blocks.

    Caches become inputs with the same names, [blocks, kv_heads, BLOCK, head_dim], which the operator writes into; the
    engine's settings say in which type. A token sees its own slot and the ones before, as by the mask; in layers
    `sliding` the last of these alone, as many as the input `WINDOW` says, over the slots that the inputs of `PLACES`
    behind `SLIDING` say. `both_ways`: tokens with a 1 in the input
    `IMAGES` also see those that follow. Keys are divided by `key_scales` [1, kv_heads, 1, head_dim] of their layer, and
    queries multiplied: products stay, and channels have one range. `model` is an openvino.Model and is changed.
    Raises BundleError, DeviceError.
    """
    from openvino import opset13 as ops

    inputs = {name: add_parameter(model, name, sizes, "i32") for name, sizes in _SIZES.items()}
    inputs[SCORED] = ops.multiply(inputs[PAST], np.int32(0))
    softmaxes = [node for node in model.get_ordered_ops() if node.get_type_name() == "Softmax"]
    if len(softmaxes) != len(layers):
        raise BundleError(
            f"a stage of {len(layers)} layers has attention in {len(softmaxes)} of them; export the bundle again"
        )
    inputs[WINDOW] = ops.constant(np.array(0, np.int32))
    if both_ways:
        inputs[IMAGES] = add_parameter(model, IMAGES, [-1], "i32")
    of_sliding = inputs
    if sliding:
        places = {name: add_parameter(model, SLIDING + name, _SIZES[name], "i32") for name in PLACES}
        of_sliding = inputs | places | {WINDOW: add_parameter(model, WINDOW, [], "i32")}
    for layer, softmax in zip(layers, softmaxes, strict=True):
        products, scale = _inputs(_inputs(softmax.input_value(0), "Add")[0], "Multiply")
        query, _ = _inputs(products, "MatMul")
        (attended,) = readers_of(softmax.output(0))
        _, kv_heads, _, head_dim = (size.get_max_length() for size in model.input(names.past_key(layer)).partial_shape)
        key, keys = _cache(model, names.past_key(layer), names.present_key(layer))
        value, values = _cache(model, names.past_value(layer), names.present_value(layer))
        if key_scales:
            scales = key_scales[layer]
            query = ops.multiply(query, ops.constant(np.repeat(scales, heads // kv_heads, 1)))
            key = ops.multiply(key, ops.constant(1 / scales))
        flat = []  # [1, heads, tokens, head_dim] to [tokens, heads * head_dim]
        for x, count in ((query, heads), (key, kv_heads), (value, kv_heads)):
            swapped = ops.transpose(x, HEADS_AND_TOKENS)
            flat.append(ops.reshape(swapped, np.array([-1, count * head_dim]), special_zero=False))
        attention = _paged_attention([*flat, keys, values], scale, of_sliding if layer in sliding else inputs)
        info = attention.get_rt_info()
        info["num_k_heads"] = info["num_v_heads"] = kv_heads
        info["k_head_size"] = info["v_head_size"] = head_dim
        by_head = ops.reshape(attention.output(0), np.array([1, -1, heads, head_dim]), special_zero=False)
        replace(attended.output(0), ops.transpose(by_head, HEADS_AND_TOKENS).output(0))
    for name in (*[names.FIRST_SLOT] * bool(sliding), *[names.SEEN_SLOTS] * both_ways):
        model.remove_parameter(model.input(name).get_node())
    model.validate_nodes_and_infer_types()


def select_outputs(model: Any, *, whole: bool = False) -> None:
    """Add the input `OUTPUTS`: the last layer computes K and V of all tokens, and everything after for these only.

    So are token inputs that are added after it. If the last layer keeps a state, it needs all tokens, and only the
    result is selected from. `model` is an openvino.Model whose caches are paged already, and is changed. Raises
    BundleError.
    """
    selected = add_parameter(model, OUTPUTS, [-1], "i32")
    nodes = model.get_ordered_ops()
    if whole:
        _gather(model.output(names.HIDDEN_OUT).get_node().input(0), selected)
        model.validate_nodes_and_infer_types()
        return
    last = max(n for n, node in enumerate(nodes) if node.get_type_name() == "PagedAttentionExtension")
    for node in nodes[last:]:
        if node.get_type_name() in ("Add", "Multiply"):
            for port in filter(_is_token_input, node.inputs()):
                _gather(port, selected)
    reader = _only_reader(nodes[last].output(0))
    while reader.get_type_name() in _TO_THE_PROJECTION:
        reader = _only_reader(reader.output(0))
    if reader.get_type_name() == "MatMul":
        _gather(reader.input(0), selected)
        total = reader.output(0)
        reader = _normed(reader.output(0))
        while reader.get_type_name() in _TO_THE_RESIDUAL:
            addends = [x for x in reader.inputs() if x.get_source_output() != total]
            sums = reader.get_type_name() == "Add"
            if sums and addends and len(addends[0].get_partial_shape()) == 2:  # the residual sum; a bias has one axis
                _gather(addends[0], selected)
                model.validate_nodes_and_infer_types()
                return
            total = reader.output(0)
            reader = _normed(reader.output(0))
    raise BundleError(f"unexpected {reader.get_type_name()} after a layer's attention; export the bundle again")


def _is_token_input(port: Any) -> bool:
    source = port.get_source_output()
    if source.get_node().get_type_name() == "Convert":
        source = source.get_node().input_value(0)
    return any(name.startswith(names.TOKEN_INPUT) for name in source.get_names())


def _paged_attention(first: list[Any], scale: Any, inputs: Mapping[str, Any]) -> Any:
    from openvino import opset13 as ops

    refusal = f"this release of OpenVINO cannot attend over blocks; {pip_install()} -U openvino"
    try:
        from openvino.op import _PagedAttentionExtension
    except ImportError as e:
        raise DeviceError(refusal) from e
    before, after = ([ops.constant(np.array(x, kind)) for kind, x in unused] for unused in (_BEFORE, _AFTER))
    fewest = 0
    if IMAGES in inputs:
        after[OF_IMAGES], fewest = inputs[IMAGES], OF_IMAGES + 1
    nodes = [*first, *(inputs[name] for name in (PAST, BEGINS, BLOCKS, BLOCK_BEGINS))]
    rest = [inputs[WINDOW], *before, inputs[FILLED], inputs[SCORED], *after]
    values = [*(node.output(0) for node in nodes), scale, *(node.output(0) for node in rest)]
    for count in range(
        len(values), len(values) - len(after) + fewest - 1, -1
    ):  # releases differ in how many of `_AFTER`
        try:
            return _PagedAttentionExtension(values[:count])
        except RuntimeError as e:
            refused = e
    raise DeviceError(refusal) from refused


def _cache(model: Any, past: str, present: str) -> tuple[Any, Any]:
    """K or V of the new tokens, [1, kv_heads, tokens, head_dim], and the input that now holds the cache in blocks."""
    parameter = model.input(past).get_node()
    result = model.output(present).get_node()
    grown = result.input_value(0)
    if kind_of(grown) == "Convert":  # to the type that the bundle gives K and V
        grown = grown.get_node().input_value(0)
    _, new = _inputs(grown, "Concat")
    model.remove_result(result)
    model.remove_parameter(parameter)
    return new, add_parameter(model, past, [-1, -1, -1, -1], "dynamic")


def _inputs(value: Any, kind: str) -> tuple[Any, Any]:
    if kind_of(value) != kind:
        raise BundleError(f"expected {kind} in attention, found {kind_of(value)}; export the bundle again")
    return value.get_node().input_value(0), value.get_node().input_value(1)


def _gather(reader: Any, tokens: Any) -> None:
    """Make an input [tokens, width] read these tokens of what it read."""
    from openvino import opset13 as ops

    first_axis = ops.constant(np.array(0, np.int32))
    reader.replace_source_output(ops.gather(reader.get_source_output(), tokens, first_axis).output(0))


def _normed(value: Any) -> Any:
    """The reader of a value; of a norm, which reads it for its size too, the division by the size."""
    divisions = [node for node in readers_of(value) if node.get_type_name() == "Divide"]
    return divisions[0] if len(divisions) == 1 else _only_reader(value)


def _only_reader(value: Any) -> Any:
    readers = readers_of(value)
    if len(readers) != 1:
        raise BundleError(f"{len(readers)} operators read a layer's attention; export the bundle again")
    return readers[0]
