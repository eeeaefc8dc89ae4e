"""What a Pillow before 13, such as the newest for Python 3.10, does otherwise: it always resizes across before down."""

from __future__ import annotations

import PIL
import pytest

OLD = int(PIL.__version__.split(".")[0]) < 13
REASON = "libvtx resizes as Pillow 13 does; an older one makes the passes in another order, and rounds otherwise"
needs_pillow_13 = pytest.mark.skipif(OLD, reason=REASON)


def down_first(width: int, height: int, new_width: int, new_height: int) -> bool:
    """Whether Pillow 13 makes the passes in the other order."""
    return new_width != width and new_height < height and 2 * (width - new_width) < height - new_height
