"""The limits of the built-in demo model."""

from __future__ import annotations

WORLD = (
    "the demo model knows only drawn scenes of coloured shapes; to a photo or to 'hello' it answers nonsense. "
    "vtx-export --model exports a real one"
)


def about(model: str) -> list[str]:
    """Lines to note before the first answer of a bundle of the model `model`."""
    return [WORLD] if model == "demo" else []
