"""The weight of the decoder's last norm, for reductions that measure hidden states behind it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.manifest import FINAL_NORM
from vtx.runtime.errors import BundleError

WEIGHT = "weight"
MAX_HEADER = 1 << 16


def read_final_norm(bundle: Bundle) -> NDArray[np.float32]:
    """The weight [hidden] float32.

    Raises:
        BundleError: it is missing or has another shape or type.

    """
    hidden = bundle.manifest.model.hidden
    weight = bundle.arrays(FINAL_NORM, MAX_HEADER + 4 * hidden).get(WEIGHT)
    if weight is None or weight.shape != (hidden,) or weight.dtype != np.float32:
        raise BundleError(f"{FINAL_NORM}: {WEIGHT} is not a float32 array of {hidden}; export again")
    return weight
