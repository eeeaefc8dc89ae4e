"""The options that say how a bundle is loaded, and the one call of `load` with them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
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
        """Load the bundle. Raises as `vtx.load` does."""
        from vtx.runtime.api.load import load

        return load(bundle, **asdict(self))


def about_model(model: str) -> list[str]:
    """Lines to note before the first answer of a bundle of the model `model`."""
    return [WORLD] if model == "demo" else []
