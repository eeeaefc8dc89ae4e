"""The scales of 8-bit K and V, one a channel of a key/value head, as a bundle states them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import KV_SCALES
from vtx.runtime.errors import BundleError

Scales = dict[str, NDArray[np.float32]]
MAX_HEADER = 1 << 18  # of two tensors a layer


def read_kv_scales(bundle: Bundle) -> Scales:
    """`names.key_scale` and `names.value_scale` of every layer, each [1, kv_heads, 1, head_dim] float32.

    Raises:
        BundleError: a scale is missing, has another shape or type, or is not positive and finite.

    """
    model = bundle.manifest.model
    shape = (1, model.kv_heads, 1, model.head_dim)
    stored = bundle.arrays(KV_SCALES, MAX_HEADER + 2 * model.layers * 4 * model.kv_heads * model.head_dim)
    scales: Scales = {}
    for layer in range(1, model.layers + 1):
        for name in (names.key_scale(layer), names.value_scale(layer)):
            if name not in stored or stored[name].shape != shape or stored[name].dtype != np.float32:
                raise BundleError(f"{KV_SCALES}: {name} is not a float32 tensor {shape}; export again")
            if not (np.isfinite(stored[name]) & (stored[name] > 0)).all():
                raise BundleError(f"{KV_SCALES}: {name} has a scale that is not a positive number; export again")
            scales[name] = stored[name]
    return scales
