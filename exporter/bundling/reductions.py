"""The reductions named at export and what they need of the bundle, checked against the model before any writing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.graphs.merge import SIDE
from vtx.runtime.errors import RequestError, UnsupportedModelError
from vtx.runtime.policies.base import Needs
from vtx.runtime.policies.make import NOT_RENUMBERED, check_depth, check_layout, check_patches
from vtx.runtime.policies.policy import Policy
from vtx.runtime.policies.spec import parse, to_spec


@dataclass(frozen=True, slots=True)
class Reductions:
    """The canonical specs, the default first, and their needs together."""

    specs: tuple[str, ...] = ()
    needs: Needs = Needs()  # noqa: RUF009 - frozen

    def cuts(self, ks: Sequence[int]) -> list[int]:
        """Layers, rising, before which the decoder is cut."""
        return sorted({*ks, *self.needs.boundaries})


def plan_reductions(texts: Sequence[str], config: ModelConfig) -> Reductions:
    """Read and check the specs of `--reduce`.

    Raises RequestError for an unknown reduction or option, a layer that the model does not have, one variant named
    twice; UnsupportedModelError if the model's vision tower lacks an input of a reduction.
    """
    needs, specs, vision = Needs(), list[str](), config.vision
    for text in texts:
        parts = parse(text)
        check_depth(parts, config.text.layers)
        for part in parts:
            own = part.needs()
            if part.renumbers and config.text.rope.sections:
                raise UnsupportedModelError(f"{part.name}: this model has {NOT_RENUMBERED}")
            check_patches(part, vision.shuffle, class_token=vision.class_token)
            if own.merging and vision.grid < SIDE:
                raise UnsupportedModelError(
                    f"{part.name} merges windows of {SIDE} x {SIDE} patches, the tower has {vision.grid} x "
                    f"{vision.grid}; leave merging out (mustdrop:...,tau=off)"
                )
            if own.merging and config.layout.max_views > 1:
                raise UnsupportedModelError(
                    f"{part.name} merges windows of patches, and this model's images come in tiles that form one grid; "
                    "leave merging out (mustdrop:...,tau=off)"
                )
            if own.merging and 0 in config.feature_layers:
                raise UnsupportedModelError(
                    f"{part.name} merges patches after the tower's first layer, and the model also uses the hidden "
                    "states before it (vision_feature_layer 0); leave merging out (mustdrop:...,tau=off)"
                )
        check_layout(parts, config.layout)
        if (canonical := to_spec(parts)) in specs:
            raise RequestError(f"--reduce {canonical} is given twice; name each variant once")
        specs.append(canonical)
        needs |= Policy(parts).needs()
    # One vision graph serves all variants, so the merging of one changes the attention that another reads.
    too_early = needs.attention and max(config.feature_layers) < 2
    if needs.merging and (too_early or (needs.last_attention and config.vision.layers < 2)):
        raise UnsupportedModelError(
            "merging and the class token's attention need two layers of the tower, and the model uses one; "
            "leave out merging (tau=off) or key tokens (key=0)"
        )
    return Reductions(tuple(specs), needs)
