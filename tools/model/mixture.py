"""A feed-forward of many MLPs, the experts, of which a router chooses a few for each token: its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from vtx.runtime.bundle.spec.stored import EXPERTS
from vtx.runtime.strict import optional
from vtx.tools.model.tensors import Shapes

# The reason why there are no graphs for CUDA and TensorRT.
ON_CPU = "experts are built for the CPU, as standard operators would read all of them for every token"


@dataclass(frozen=True, slots=True)
class Mixture:
    """`count` experts of width `ffn`, of which `active` read a token: those with the largest logits of the router.

    The softmax of these logits gives the shares of their outputs. `shared`: an MLP of the decoder's width reads every
    token, too, and a sigmoid of one number multiplies its output. `dense`: layers, counted from 1, without experts.
    The matrices of all experts are one, expert after expert.
    """

    count: int
    active: int
    ffn: int
    shared: bool = optional(False)
    dense: tuple[int, ...] = optional(())

    def tensors(self, name: str, hidden: int) -> Shapes:
        """The weights of the router and the experts of the feed-forward `name`."""
        yield f"{name}.gate.weight", (self.count, hidden)
        yield f"{name}{EXPERTS}gate_proj.weight", (self.count * self.ffn, hidden)
        yield f"{name}{EXPERTS}up_proj.weight", (self.count * self.ffn, hidden)
        yield f"{name}{EXPERTS}down_proj.weight", (self.count * hidden, self.ffn)
        if self.shared:
            yield f"{name}.shared_expert_gate.weight", (1, hidden)

    def part(self, name: str, shape: tuple[int, ...], experts: int) -> tuple[int, ...]:
        """The shape of a weight's rows of some experts; of one that they do not have in common, its own."""
        return shape if EXPERTS not in name else (shape[0] // self.count * experts, *shape[1:])
