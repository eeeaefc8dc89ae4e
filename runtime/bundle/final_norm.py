"""The weight of the decoder's last norm, for reductions that measure hidden states behind it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.manifest import FINAL_NORM
from vtx.runtime.bundle.safetensors import read_header, read_tensor
from vtx.runtime.errors import BundleError

WEIGHT = "weight"


def read_final_norm(bundle: Bundle) -> NDArray[np.float32]:
    """The weight [hidden] float32.

    Raises:
        BundleError: it is missing or has another shape or type.

    """
    tensors, hidden = read_header(bundle.path(FINAL_NORM), error=BundleError).tensors, bundle.manifest.model.hidden
    if WEIGHT not in tensors or (tensors[WEIGHT].shape, tensors[WEIGHT].dtype) != ((hidden,), "F32"):
        raise BundleError(f"{FINAL_NORM}: {WEIGHT} is not a float32 array of {hidden}; export again")
    weight: NDArray[np.float32] = read_tensor(tensors[WEIGHT])
    return weight
