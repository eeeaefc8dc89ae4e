"""Image tokens per layer under reductions: from their options, or assumed if they depend on the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vtx.runtime.errors import UnsupportedModelError
from vtx.runtime.policies.base import Reduction
from vtx.runtime.policies.make import check_depth, check_layout, check_patches
from vtx.runtime.policies.spec import to_spec
from vtx.tools.estimate.sizes import ModelSize


@dataclass(frozen=True, slots=True)
class Reduced:
    """`vision_tokens` of each layer; `assumed` has a sentence for each method whose numbers depend on the data."""

    spec: str
    vision_tokens: tuple[int, ...]
    assumed: tuple[str, ...]


def reduce_counts(parts: Sequence[Reduction], model: ModelSize, vision: int) -> Reduced:
    """The tokens of one image of `vision` tokens in each layer, methods applied in the runtime's order.

    Raises RequestError if a method works beyond the last layer; UnsupportedModelError if the model lacks what a method
    needs.
    """
    check_depth(parts, model.decoder.layers)
    tower = model.vision
    if tower is None and parts:
        raise UnsupportedModelError(f"{parts[0].name} leaves out image tokens, and {model.name} sees no images")
    if tower is not None:
        side = round((tower.patches / tower.view_tokens) ** 0.5)
        for part in parts:
            check_patches(part, side, class_token=tower.class_token)
    if model.layout is not None:
        check_layout(parts, model.layout)
    counts, count, unknown = list[int](), vision, dict[str, None]()
    for layer in range(1, model.decoder.layers + 1):
        for part in parts:
            if layer in part.needs().cuts or (layer == 1 and part.entry() is not None):
                kept = part.number_kept(count, layer)
                if kept is None:
                    unknown[part.name] = None
                else:
                    count = kept
        counts.append(count)
    assumed = tuple(
        f"{name}: how many tokens leave depends on the picture and the question; counted as if none left, the "
        "upper limit"
        for name in unknown
    )
    return Reduced(to_spec(parts), tuple(counts), assumed)
