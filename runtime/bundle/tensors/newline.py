"""The learned newline that some layouts put among an image's tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.manifest import NEWLINE
from vtx.runtime.errors import BundleError

NEWLINE_TENSOR = "newline"
MAX_HEADER = 1 << 16


def read_newline(bundle: Bundle) -> NDArray[np.float32]:
    """The newline as one token, [1, hidden] float32.

    Raises:
        BundleError: it is missing or has another shape or type.

    """
    hidden = bundle.manifest.model.hidden
    if NEWLINE not in bundle.manifest.files:
        raise BundleError(f"the bundle's image layout needs {NEWLINE}, which is not there; export again")
    newline = bundle.arrays(NEWLINE, MAX_HEADER + 4 * hidden).get(NEWLINE_TENSOR)
    if newline is None or newline.shape != (hidden,) or newline.dtype != np.float32:
        raise BundleError(f"{NEWLINE}: {NEWLINE_TENSOR} is not a float32 array of {hidden}; export again")
    return newline[None]
