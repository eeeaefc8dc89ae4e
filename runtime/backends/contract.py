"""Checks of graphs against the manifest: of inputs and outputs when a graph is loaded, of free sizes at each run.

Token ids are checked at each run, since a graph takes -1 for the last token, and an engine may not look at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.spec import graphs, names
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import BundleError
from vtx.runtime.vision.tokens import Ids, TokenStates

DTYPES = {"float32": "float"}  # numpy's names that differ from onnxruntime's
Port = tuple[str, str, Sequence[Any] | None]  # name, type and sizes of an input or output


def embeddable(m: Manifest, ids: Ids) -> Ids:
    """The token ids [n] int64 themselves; raises BundleError unless all are in the model's vocabulary."""
    if ids.size and not 0 <= ids.min() <= ids.max() < m.model.vocab:
        wrong = int(ids[(ids < 0) | (ids >= m.model.vocab)][0])
        raise BundleError(
            f"token {wrong} does not exist, the model has {m.model.vocab:,} tokens, numbered from 0; "
            "export again with the tokenizer that belongs to the model"
        )
    return ids


def vision_extras(
    m: Manifest, dialect: str, extras: Mapping[str, NDArray[np.float32]]
) -> dict[str, NDArray[np.float32]]:
    """Every extra input of the vision graph, [1] float32: the given value, else the one that changes nothing."""
    inputs: dict[str, NDArray[np.float32]] = {}
    for name, value in names.VISION_DEFAULTS.items() if m.dialects[dialect].vision_merges else ():
        inputs[name] = extras.get(name, np.array([value], np.float32))
    assert extras.keys() <= inputs.keys(), f"the vision graph takes {[*inputs]}, not {sorted(extras)}"
    return inputs


def embedded(graph: str, outputs: Mapping[str, NDArray[np.float32]], count: int) -> TokenStates:
    """The outputs of the embed graph for `count` tokens; raises BundleError if it gives another number."""
    inputs: dict[str, NDArray[np.float32]] = {}
    for name, output in outputs.items():
        inputs[name.removeprefix(names.TOKEN_INPUT)] = of_each(graph, output, count)
    return TokenStates(inputs.pop(names.HIDDEN), inputs)


def of_each(graph: str, output: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """The output [count, ..] itself; raises BundleError if a run gave another number, which free sizes allow."""
    if len(output) != count:
        raise BundleError(f"{graph} gives {len(output)} outputs for {count} tokens; export the bundle again")
    return output


def check(graph: str, inputs: Iterable[Port], outputs: Iterable[Port], promised: graphs.GraphIO) -> None:
    """Raise BundleError unless a loaded graph has the promised inputs and outputs, as onnxruntime names their types.

    Only sizes that are numbers on both sides must agree.
    """
    for declared, actual in ((promised.inputs, [*inputs]), (promised.outputs, [*outputs])):
        if {name for name, _, _ in actual} != set(declared):
            raise BundleError(f"{graph} is not the graph that vtx.json says it is; export the bundle again")
        for name, dtype, shape in actual:
            spec = declared[name]
            axes = shape or ()
            kind = DTYPES.get(spec.dtype, spec.dtype)
            sizes = [size if isinstance(size, int) else None for size in spec.shape]
            agree = len(sizes) == len(axes) and all(
                a is None or not isinstance(b, int) or a == b for a, b in zip(sizes, axes, strict=True)
            )
            if dtype != f"tensor({kind})" or not agree:
                raise BundleError(
                    f"{graph}: {name} is {dtype} {shape}, vtx.json says {kind} {sizes}; export the bundle again"
                )
