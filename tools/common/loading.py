"""The options that say how a bundle is loaded, and the one call of `load` with them."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING

from vtx.runtime.backends.engines import AUTO
from vtx.runtime.vision.limits import DEFAULT_FORMATS

if TYPE_CHECKING:
    from vtx.runtime.api.model import Model
    from vtx.runtime.bundle.seal import PublicKey


WORLD = (
    "the demo model knows only drawn scenes of coloured shapes; to a photo or to 'hello' it answers nonsense. "
    "vtx-export --model exports a real one"
)
SLOW = 2.0  # seconds of loading after which a terminal says what is waited for


@dataclass(frozen=True, slots=True)
class Loading:
    """The arguments of `vtx.load` but for the bundle."""

    device: str = AUTO
    compute: str | None = None
    threads: int | None = None
    force: bool = False
    require_signature: Path | None = None
    fit: str | None = None
    max_tiles: int | None = None
    max_pixels: int | None = None
    image_formats: tuple[str, ...] = DEFAULT_FORMATS

    @property
    def key(self) -> PublicKey | None:
        from vtx.runtime.bundle.seal import PublicKey

        return PublicKey.load(self.require_signature) if self.require_signature else None

    def load(self, bundle: Path) -> Model:
        """Load the bundle; if that is slow, a terminal says so. Raises as `vtx.load` does."""
        from vtx.runtime.api.load import load
        from vtx.runtime.terminal.console import note

        slow = Timer(SLOW, note, (f"loading {bundle}",))
        slow.daemon = True
        if sys.stderr.isatty():
            slow.start()
        try:
            return load(bundle, **asdict(self))
        finally:
            slow.cancel()


def about_model(model: str) -> list[str]:
    """Lines to note before the first answer of a bundle of the model `model`."""
    return [WORLD] if model == "demo" else []
