"""Facts of vision towers, as manifests state them."""

from __future__ import annotations

from vtx.runtime.bundle.spec.model_spec import TowerSpec


def tower_spec(image: int, patch: int, tokens: int, square: int = 1, positions: str = "table") -> TowerSpec:
    """A tower whose `tokens` tokens are of `square` x `square` patches each."""
    states = (image // patch) ** 2
    return TowerSpec(
        layers=2, image=image, patch=patch, square=square, pool=1, tokens=tokens, states=states, state_width=8,
        key_width=8, class_token=False, several=False, positions=positions,
    )  # fmt: skip
