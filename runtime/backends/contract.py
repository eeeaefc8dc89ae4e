"""What each graph must take and give, by the manifest: compared when a graph is loaded, so that no run fails for it.

Token ids are compared at each run, since a graph takes -1 for the last token, and an engine may not look at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.spec import graphs, names
from vtx.runtime.bundle.spec.manifest import Manifest, StageSpec
from vtx.runtime.errors import BundleError
from vtx.runtime.vision.tokens import Ids, TokenStates

Tensor = tuple[Sequence[int | None], str]  # sizes (None: any) and onnxruntime's name of the type
Contract = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]  # inputs and outputs
DTYPES = {"float32": "float"}  # numpy's names that differ from onnxruntime's


def embed(m: Manifest) -> Contract:
    return _contract(graphs.embed(m))


def embeddable(m: Manifest, ids: Ids) -> Ids:
    """The token ids [n] int64 themselves; raises BundleError unless all are in the model's vocabulary."""
    if ids.size and not 0 <= ids.min() <= ids.max() < m.model.vocab:
        wrong = int(ids[(ids < 0) | (ids >= m.model.vocab)][0])
        raise BundleError(
            f"token {wrong} does not exist, the model has {m.model.vocab:,} tokens, numbered from 0; "
            "export again with the tokenizer that belongs to the model"
        )
    return ids


def vision(m: Manifest, dialect: str) -> Contract:
    return _contract(graphs.vision(m, dialect))


def video(m: Manifest) -> Contract:
    return _contract(graphs.video(m))


def vision_extras(
    m: Manifest, dialect: str, extras: Mapping[str, NDArray[np.float32]]
) -> dict[str, NDArray[np.float32]]:
    """Every extra input that the vision graph takes, [1] float32: as given, else the value that changes nothing."""
    taken = [name for name in vision(m, dialect)[0] if name != names.PIXELS]
    assert set(extras) <= set(taken), f"the vision graph takes {taken}, not {sorted(extras)}"
    return {name: extras.get(name, np.array([names.VISION_DEFAULTS[name]], np.float32)) for name in taken}


def stage(m: Manifest, spec: StageSpec, dialect: str) -> Contract:
    return _contract(graphs.stage(m, dialect, query=spec.query, reads=spec.inputs).of_layers(spec))


def score(m: Manifest, dialect: str) -> Contract:
    return _contract(graphs.score(m, dialect))


def head(m: Manifest) -> Contract:
    return _contract(graphs.head(m))


def text_tower(m: Manifest) -> Contract:
    return _contract(graphs.text_tower(m))


def gate(m: Manifest) -> Contract:
    return _contract(graphs.gate(m))


def embedded(graph: str, outputs: Mapping[str, NDArray[np.float32]], count: int) -> TokenStates:
    """What the embed graph gives for `count` tokens; raises BundleError where it gives another number."""
    each = {name: of_each(graph, output, count) for name, output in outputs.items()}
    return TokenStates(each.pop(names.HIDDEN), {name.removeprefix(names.TOKEN_INPUT): x for name, x in each.items()})


def of_each(graph: str, output: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """The output [count, ..] itself; raises BundleError where a run gave another number: free sizes show only there."""
    if len(output) != count:
        raise BundleError(f"{graph} gives {len(output)} outputs for {count} tokens; export the bundle again")
    return output


def _contract(io: graphs.GraphIO) -> Contract:
    return _tensors(io.inputs), _tensors(io.outputs)


def _tensors(tensors: Mapping[str, graphs.Tensor]) -> dict[str, Tensor]:
    return {
        name: ([size if isinstance(size, int) else None for size in t.shape], DTYPES.get(t.dtype, t.dtype))
        for name, t in tensors.items()
    }


def check(graph: str, session: Any, contract: Contract) -> None:
    """Raise BundleError unless a loaded graph takes and gives what its contract says."""
    for declared, actual in zip(contract, (session.get_inputs(), session.get_outputs()), strict=True):
        if {tensor.name for tensor in actual} != set(declared):
            raise BundleError(f"{graph} is not the graph that vtx.json says it is; export the bundle again")
        for tensor in actual:
            sizes, kind = declared[tensor.name]
            if tensor.type != f"tensor({kind})" or not _fits(sizes, tensor.shape or ()):
                raise BundleError(
                    f"{graph}: {tensor.name} is {tensor.type} {tensor.shape}, vtx.json says {kind} {list(sizes)}; "
                    "export the bundle again"
                )


def _fits(declared: Sequence[int | None], actual: Sequence[Any]) -> bool:
    """Equal in every size that both sides name; a graph's free size is a string."""
    return len(declared) == len(actual) and all(
        a is None or not isinstance(b, int) or a == b for a, b in zip(declared, actual, strict=True)
    )
