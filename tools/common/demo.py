"""What a newcomer must know of the built-in demo model before its answers are believed."""

from __future__ import annotations

WORLD = (
    "the demo model knows only drawn scenes of coloured shapes; to a photo or to 'hello' it answers nonsense. "
    "vtx-export --model takes a real one"
)


def about(model: str) -> list[str]:
    """The lines to say before the first answer of a bundle that calls its model `model`."""
    return [WORLD] if model == "demo" else []
