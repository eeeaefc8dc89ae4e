"""Bindings of a stage's contexts: shapes and addresses of what it takes and gives, and what it is told of one token."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.cuda import Graph
from vtx.runtime.backends.tensorrt.engine import Shape
from vtx.runtime.backends.tensorrt.loaded import TensorrtCacheContext, sight_of
from vtx.runtime.backends.tensorrt.regions import Region, part
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.bundle.spec.model_spec import ModelSpec

Bindings = tuple[dict[str, Shape], dict[str, int]]  # shapes and addresses
_numbers = itertools.count()
PAST_AND_PRESENT = ((names.past_key, names.present_key), (names.past_value, names.present_value))
DECODE = 0  # of an engine's profiles, which may be one and the same
PREFILL = -1


def next_number() -> int:
    """A number that no other memory has."""
    return next(_numbers)


class BoundStates(NamedTuple):
    """Addresses of the state before a run, of those that it gives out, and of the numbers of their tokens."""

    given: int
    made: int
    ends: int
    number: int


class BoundTokens(NamedTuple):
    """The `number` of tokens of a run after `filled` slots, and where their K and V go."""

    number: int
    filled: int
    new: list[Region]


class BoundStage:
    """A stage's context for one token, and the numbers that the host tells it of that token, by the input's name.

    `number` is never that of another one; `recordings` are of steps that end with this stage, by the numbers of all
    that are bound for them; None once one has run, False if it cannot be recorded.
    """

    def __init__(self, shared: TensorrtCacheContext, spec: StageSpec, graph: str, slots: Iterable[str]) -> None:
        cuda = shared.cuda
        self._shared = shared
        self._spec = spec
        self.number = next_number()
        self.slots = [*slots]
        self.recordings = dict[tuple[int, ...], Graph | Literal[False] | None]()
        self.told: dict[str, NDArray[Any]] = {
            **{name: cuda.pinned((1, 1), np.int64) for name in (names.POSITIONS, *sight_of(shared.model))},
            **{name: cuda.pinned((1,), np.int32) for name in self.slots},
        }
        self.decode = shared.engines.new_context(graph, DECODE, captures=True)

    def tell(self, told: dict[str, int]) -> None:
        for name, value in told.items():
            self.told[name][...] = value

    def turn(self) -> None:
        """Queue what makes the memory ready for the token after the one whose run is queued, at the same addresses."""

    def bind_tokens(self, tokens: int, queries: int | None = None, *, turned: bool = False) -> Bindings:
        """Shapes and addresses of all but K and V for `tokens` tokens; `turned`: rotary tables have a row for each."""
        shapes, addresses = token_bindings(self._shared, self._spec, (1, tokens), self.slots, turned=turned)
        if queries is not None:
            addresses[names.QUERY] = queries
        return shapes, addresses


def token_bindings(
    shared: TensorrtCacheContext,
    spec: StageSpec,
    sizes: tuple[int, int],
    slots: Iterable[str] = (names.TOTAL_SLOTS,),
    *,
    turned: bool = False,
) -> Bindings:
    """Shapes and addresses of what a stage takes and gives of tokens: `sizes` conversations and tokens of each.

    `slots`: its inputs of a number of each conversation. `turned`: rotary tables have a row for each token.
    """
    model = shared.model
    tokens = sizes[0] * sizes[1]
    shapes: dict[str, Shape] = {names.HIDDEN: (tokens, model.hidden), **dict.fromkeys(slots, sizes[:1])}
    shapes |= dict.fromkeys((names.POSITIONS, *sight_of(model)), sizes)
    shapes |= {names.token_input(name): (tokens, width) for name, width in shared.widths(spec).items()}
    outputs = [names.HIDDEN_OUT, *([names.QUERY] if spec.query else [])]
    addresses = {name: shared.engines.address(name) for name in (*shapes, *outputs)}
    addresses |= {name: buffer.address for name, buffer in (shared.turned if turned else shared.rope).items()}
    return shapes, addresses


def kv_bindings(model: ModelSpec, regions: Sequence[Region], new: Sequence[Region], sizes: tuple[int, int]) -> Bindings:
    """Shapes and addresses of K and V: `sizes` conversations and slots of each in `regions`, and what goes to `new`."""
    shapes = dict[str, Shape]()
    addresses = dict[str, int]()
    for layer in [layer for region in regions for layer in region.layers]:
        for half, (past, present) in enumerate(PAST_AND_PRESENT):
            addresses |= {past(layer): part(regions, layer, half), present(layer): part(new, layer, half)}
            shapes[past(layer)] = (*sizes, model.kv_heads, model.heads_of(layer))
    return shapes, addresses
