"""`plain` graphs as OpenVINO's own kernel takes them: one operator fills caches in blocks and attends to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vtx.runtime.bundle.spec import names
from vtx.runtime.errors import BundleError, DeviceError

BLOCK = 32  # slots of a block, by OpenVINO's CPU plugin
PAST = "past_lens"  # slots filled before, of each sequence
BEGINS = "subsequence_begins"  # where the rows of each sequence begin, and where the last one's end
BLOCKS = "block_indices"  # which blocks the slots of a sequence stand in
BLOCK_BEGINS = "block_indices_begins"
FILLED = "max_context_len"  # slots filled after, the most of any sequence
SCORED = "scored"  # rows of each sequence that scores are asked for: none; not an input
HEADS_AND_ROWS = np.array([0, 2, 1, 3])  # change places

_SIZES = {PAST: [-1], BEGINS: [-1], BLOCKS: [-1], BLOCK_BEGINS: [-1], FILLED: []}
# What else the operator can do, and none of it is used: windows, biases; scores, blocks turned or left out.
_BEFORE: tuple[tuple[Any, Any], ...] = ((np.int32, 0), (np.float32, []))
_AFTER: tuple[tuple[Any, Any], ...] = (
    (np.int32, []), (np.int32, []), (np.float32, []), (np.float32, []), (np.int32, 128), (np.int32, 8),
    (np.float32, []), (np.int32, 0), (np.int32, []), (np.int32, []), (np.int32, []), (np.int32, []), (np.uint8, []),
    (np.int32, []),
)  # fmt: skip


def page_caches(model: Any, layers: Sequence[int], heads: int) -> None:
    """Replace each softmax(q k^T * scale + mask) v, and the caches that it grows, by one operator that fills blocks.

    Caches become inputs, named as they were, [blocks, kv_heads, BLOCK, head_dim], which the operator writes into; in
    which type, the engine's settings say. A row sees its own slot and those before, as the mask said. `model` is an
    openvino.Model and is changed.

    Raises:
        BundleError: attention is written in another way than vtx writes it.

    """
    from openvino import opset13 as ops

    said = {name: add_parameter(model, name, sizes, "i32") for name, sizes in _SIZES.items()}
    said[SCORED] = ops.multiply(said[PAST], np.int32(0))
    softmaxes = [node for node in model.get_ordered_ops() if node.get_type_name() == "Softmax"]
    if len(softmaxes) != len(layers):
        raise BundleError(f"{len(softmaxes)} layers attend where {len(layers)} are said to; export the bundle again")
    for layer, softmax in zip(layers, softmaxes, strict=True):
        _page(model, layer, softmax, heads, said)
    model.validate_nodes_and_infer_types()


def _page(model: Any, layer: int, softmax: Any, heads: int, said: dict[str, Any]) -> None:
    from openvino import opset13 as ops

    products, scale = _inputs(_inputs(softmax.input_value(0), "Add")[0], "Multiply")
    query, _ = _inputs(products, "MatMul")
    (attended,) = _readers(softmax.output(0))
    _, kv_heads, _, head_dim = model.input(names.past_key(layer)).get_partial_shape()
    sizes = kv_heads.get_length(), head_dim.get_length()
    key, keys = _cache(model, names.past_key(layer), names.present_key(layer))
    value, values = _cache(model, names.past_value(layer), names.present_value(layer))
    rows = [_joined(query, heads, sizes[1]), *(_joined(x, *sizes) for x in (key, value))]
    attention = _attention([*rows, keys, values], scale, said)
    info = attention.get_rt_info()
    info["num_k_heads"] = info["num_v_heads"] = sizes[0]
    info["k_head_size"] = info["v_head_size"] = sizes[1]
    apart = ops.reshape(attention.output(0), np.array([1, -1, heads, sizes[1]]), special_zero=False)
    _lead(attended.output(0), ops.transpose(apart, HEADS_AND_ROWS).output(0))


def _attention(first: list[Any], scale: Any, said: dict[str, Any]) -> Any:
    from openvino import opset13 as ops

    refusal = 'this release of OpenVINO cannot attend over blocks; pip install -U "vtx-edge[openvino]"'
    try:
        from openvino.op import _PagedAttentionExtension
    except ImportError as e:
        raise DeviceError(refusal) from e
    before, after = ([ops.constant(np.array(x, kind)) for kind, x in unused] for unused in (_BEFORE, _AFTER))
    places = [said[name] for name in (PAST, BEGINS, BLOCKS, BLOCK_BEGINS)]
    behind = [*before, said[FILLED], said[SCORED], *after]
    inputs = [*(node.output(0) for node in (*first, *places)), scale, *(node.output(0) for node in behind)]
    for count in range(len(inputs), len(inputs) - len(after) - 1, -1):  # how many of `_AFTER`, releases differ in
        try:
            return _PagedAttentionExtension(inputs[:count])
        except RuntimeError as e:
            refused = e
    raise DeviceError(refusal) from refused


def _cache(model: Any, past: str, present: str) -> tuple[Any, Any]:
    """The rows that a cache grew by, [1, kv_heads, rows, head_dim], and the input that now holds them in blocks."""
    given, result = model.input(past).get_node(), model.output(present).get_node()
    grown = result.input_value(0)
    if _kind(grown) == "Convert":  # to the type that the bundle gives K and V
        grown = grown.get_node().input_value(0)
    _, rows = _inputs(grown, "Concat")
    model.remove_result(result)
    model.remove_parameter(given)
    return rows, add_parameter(model, past, [-1, -1, -1, -1], "dynamic")


def add_parameter(model: Any, name: str, sizes: list[int], kind: str) -> Any:
    """A new input of the model."""
    from openvino import PartialShape, Type
    from openvino import opset13 as ops

    parameter = ops.parameter(PartialShape(sizes), getattr(Type, kind), name=name)
    parameter.output(0).tensor.set_names({name})
    model.add_parameters([parameter])
    return parameter


def _joined(x: Any, heads: int, head_dim: int) -> Any:
    """[1, heads, rows, head_dim] to [rows, heads * head_dim]."""
    from openvino import opset13 as ops

    return ops.reshape(ops.transpose(x, HEADS_AND_ROWS), np.array([-1, heads * head_dim]), special_zero=False)


def _lead(old: Any, new: Any) -> None:
    """Let everything that reads `old` read `new`."""
    for reader in old.get_target_inputs():
        reader.replace_source_output(new)


def _readers(value: Any) -> list[Any]:
    return [reader.get_node() for reader in value.get_target_inputs()]


def _kind(value: Any) -> str:
    kind: str = value.get_node().get_type_name()
    return kind


def _inputs(value: Any, kind: str) -> tuple[Any, Any]:
    if _kind(value) != kind:
        raise BundleError(f"a {_kind(value)} stands where attention has its {kind}; export the bundle again")
    return value.get_node().input_value(0), value.get_node().input_value(1)
