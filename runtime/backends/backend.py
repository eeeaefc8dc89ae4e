"""The interface of backends: they run the graphs and hold the caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.vision.tokens import NO_EXTRAS, Extras, HiddenStates, Ids, ImageTokens, Scores, TokenStates

if TYPE_CHECKING:
    from vtx.runtime.host.device import Device


NOTHING: Mapping[int, Any] = MappingProxyType({})


class StageCache(Protocol):
    """K/V of one stage for one conversation, [layers, 2, kv_heads, capacity, head_dim], and the stage's run.

    `length` counts filled slots. Positions live with the tokens, not here: after a withdrawal the next
    token's position is larger than `length`.
    """

    length: int
    capacity: int
    selects_outputs: bool  # True if hidden states that `append` need not return cost less

    @property
    def resident(self) -> int:
        """Slots that hold memory; of those that several caches share its part."""

    def append(
        self, tokens: TokenStates, positions: Ids, *, query: bool = False, outputs: Ids | None = None
    ) -> HiddenStates:
        """Run tokens [n] at their positions; their K/V fill the next n slots. Returns their hidden states [n, hidden].

        The states stay where the backend keeps them, and other stages and `head` take them from there: on a GPU they
        are `DeviceStates`, which numpy reads as arrays.
        The stage reads the token inputs that the manifest lists for it. `outputs` [m], rising: return the hidden states
        of these tokens only, [m, hidden]; not with `query`. The last layer of the stage needs only K and V of the other
        tokens, so an engine may skip the rest of it for them. Positions are [n], or [n, 3] if the manifest's rotary
        embedding has sections: time, row and column. `query`: keep the queries of the stage's last layer for
        `attention`; only for a stage that has them by the manifest.
        """

    def attention(self, *, last_only: bool = False) -> Scores:
        """The attention of the tokens last appended with `query` to each slot, in the stage's last layer.

        Softmax attention, mean over heads: its sum and maximum over these tokens, or over their last one only, each
        [length] float32. These tokens must still fill the last slots.
        """

    def keys(self) -> NDArray[np.float32]:
        """The rotated keys of the stage's last layer, [kv_heads, length, head_dim] float32."""

    def keep(self, length: int) -> None:
        """Forget every slot from `length` on; `length` must be its own `nearest`."""

    def mark(self, length: int) -> None:
        """Make this length one that `keep` can go back to, as soon as a run reaches it."""

    def nearest(self, length: int) -> int:
        """The largest length, at most this, that `keep` can go back to: this one, unless layers keep a state."""

    @property
    def tried(self) -> int:
        """The most tokens of a run after each of which `keep` can go back."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the states that it holds."""

    def copy(self, other: Any, length: int) -> None:
        """Begin with the first `length` slots of another cache of this stage, one that `mark` has named there."""

    def read(self, slots: Ids) -> Any:
        """A copy of the K/V of some slots, rising, on the backend's device; only `write` reads it."""

    def write(self, slots: Ids, kv: Any, *, length: int) -> None:
        """Put K/V that `read` returned into the same number of slots; then the first `length` slots are filled."""


class Backend(Protocol):
    """The graphs of one bundle, loaded on one device. Safe to share between threads."""

    device: str
    dialect: str  # of the graphs it runs
    compute: str  # the type of its arithmetic: f32, bf16, int8 or f16
    kv_slot_bytes: int  # of one KV slot of one layer as it keeps K and V, scales included

    def embed(self, ids: Ids) -> TokenStates:
        """Token ids [n] int64 to hidden states and further inputs. Raises BundleError for an id beyond the vocabulary.

        Of the manifest's `token_inputs` it has those that the embed graph gives.
        """

    def vision(self, pixels: NDArray[np.float32], extras: Extras = NO_EXTRAS) -> ImageTokens:
        """One image [1, 3, height, width] to its tokens.

        `extras` are extra inputs of the vision graph, [1] each; only inputs that the manifest declares. One that
        is not given has the value that changes nothing.
        """

    def video(self, pixels: NDArray[np.float32]) -> ImageTokens:
        """One frame of a video [1, 3, height, width] to its tokens. Only if the manifest declares videos."""

    def head(self, hidden: HiddenStates) -> NDArray[np.float32]:
        """Hidden states [n, hidden] to logits [n, vocab]."""

    def gate(self, k: int, hidden: HiddenStates) -> NDArray[np.float32]:
        """The odds [2] (stay, withdraw) of the gate before layer `k` for a question's hidden states [n, hidden]."""

    def text_tower(self, ids: Ids) -> NDArray[np.float32]:
        """Ids [n] of a text by the text tower's own tokenizer to the embedding [1, width] of the last.

        Only if the manifest declares a text tower.
        """

    def project(self, states: HiddenStates) -> HiddenStates:
        """The tower's hidden states [n, width] to image tokens [n, hidden].

        Only if the manifest names a graph of the projector.
        """

    def stage(self, index: int, capacity: int, sources: Mapping[int, Any] = NOTHING) -> StageCache:
        """An empty cache of `capacity` slots for stage `index` (from 0).

        Of a stage whose layers keep nothing: over `sources`, this backend's caches of earlier stages by the layers that
        are read.
        """

    def close(self) -> None:
        """Release the engine and its weights. The backend and its caches may not be used afterwards."""


@dataclass(frozen=True, slots=True)
class DeviceState:
    """One value of `--device`: `installed` if its library is, `usable` if it can answer here."""

    device: str
    installed: bool
    usable: bool
    detail: str

    @classmethod
    def on_gpu(cls, device: str, libraries: str, machine: Device) -> DeviceState:
        if not machine.gpus:
            return cls(device, True, False, f"{libraries}; no NVIDIA GPU was detected, so it cannot answer here")
        return cls(device, True, True, f"{libraries} on {machine.gpus[0].name} ({machine.gpus[0].sm})")


class EngineBackend(Backend, Protocol):
    """The class of a row of `ENGINES`: questions before a bundle is loaded, and the load."""

    @staticmethod
    def obstacle(bundle: Bundle, number: int = 0) -> str | None:
        """The reason why it cannot answer a bundle here, and the fix; None if it can. Its module is installed."""

    @staticmethod
    def refusal(kv_dtype: str, *, jetson: bool) -> str | None:
        """The reason why it answers no bundle with K and V of this type, or none on a Jetson; for a plan."""

    @staticmethod
    def state(machine: Device) -> DeviceState:
        """The report of vtx-doctor on this machine."""

    @staticmethod
    def product(graph: bytes, compute: str, precision: str, threads: int) -> Callable[[Mapping[str, Any]], Any]:
        """A function from the inputs to the output "y" of a small graph, whose weights are stored in `precision`.

        Of engines on the CPU, for the ceilings of vtx-bench.
        """

    def __init__(self, bundle: Bundle, threads: int | None, compute: str, number: int = 0) -> None:
        """Load a bundle's graphs; on a GPU, on that of this number."""


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of one token: the id of the largest logit after it, -1 if they are not finite, and its last state.

    `state` [hidden] is of the last layer; `logits` [vocab] are there if they were asked for.
    """

    best: int
    state: HiddenStates
    logits: NDArray[np.float32] | None


class SteppingBackend(Backend, Protocol):
    """A backend that runs one token through the embedding, every stage and the head without the host in between."""

    def step(self, caches: Sequence[Any], token: int, positions: Sequence[int], *, logits: bool) -> Step:
        """Run a token that is text, whose K/V fill the next slot of each stage's cache, at its position in each."""


@runtime_checkable
class BatchBackend(Backend, Protocol):
    """A backend that runs tokens of each of several conversations in one pass through a stage.

    `runs_of_each`: several of each, as the ends of prompts have; else one.
    """

    runs_of_each: bool

    def share_caches(self, conversations: int) -> None:
        """Put the caches of this number of conversations into one pool from now on, which one run reaches.

        Caches may swap lanes within a run, so all of them are for one thread from then on. Raises DeviceError.
        """

    def reaches(self, caches: Sequence[StageCache]) -> bool:
        """True if these caches are in the pool, so that `append_each` can run them."""

    def append_each(
        self, index: int, caches: Sequence[StageCache], tokens: TokenStates, positions: Ids, counts: Sequence[int]
    ) -> HiddenStates:
        """Run stage `index` for several conversations: the next `counts[n]` of `tokens` go into the n-th cache.

        Positions are one of each token; returns the hidden states [tokens, hidden], as of `append` but for the order of
        sums.
        """
