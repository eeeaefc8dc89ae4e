"""The head of a mixed decoder in rows of several precisions, and the record of its wider matrices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from vtx.exporter.weights.plan import StoredTensor
from vtx.runtime.bundle.safetensors import TensorInfo
from vtx.runtime.bundle.spec.stored import HEAD, Precisions
from vtx.tools.model.mixed import Shape, head_rows, mean_bits


def split_head(
    tensors: Mapping[str, TensorInfo], needed: Iterable[tuple[str, Shape]]
) -> tuple[dict[str, TensorInfo], list[tuple[str, Shape]]]:
    """A checkpoint's tensors, and the names and shapes of those needed, with the head's rows in three, `HEADS`."""
    head = tensors[HEAD]
    row = head.nbytes // head.shape[0]
    parts = dict[str, TensorInfo]()
    for name, rows in head_rows(head.shape[0]).items():
        shape = (len(rows), head.shape[1])
        parts[name] = replace(head, offset=head.offset + rows.start * row, nbytes=len(rows) * row, shape=shape)
    others = [(name, shape) for name, shape in needed if name != HEAD]
    return {**tensors, **parts}, [*others, *((name, part.shape) for name, part in parts.items())]


def mixed_record(precisions: Precisions, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """The mean bits of the weights of decoder and head, and the names of the wider matrices."""
    shapes = ((name, tensor.shape) for name, tensor in stored.items())
    return {"bits": round(mean_bits(precisions, shapes), 3), "int8": sorted(precisions.wider)}
