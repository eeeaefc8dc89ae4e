"""The scales of 8-bit K and V, one a channel of a key/value head, as a bundle states them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle import names
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.manifest import KV_SCALES
from vtx.runtime.bundle.safetensors import read_header, read_tensor
from vtx.runtime.errors import BundleError

Scales = dict[str, NDArray[np.float32]]


def read_kv_scales(bundle: Bundle) -> Scales:
    """`names.key_scale` and `names.value_scale` of every layer, each [1, kv_heads, 1, head_dim] float32.

    Raises:
        BundleError: a scale is missing, has another shape or type, or is not positive and finite.

    """
    model = bundle.manifest.model
    tensors = read_header(bundle.path(KV_SCALES), error=BundleError).tensors
    want = (1, model.kv_heads, 1, model.head_dim)
    found: Scales = {}
    for layer in range(1, model.layers + 1):
        for name in (names.key_scale(layer), names.value_scale(layer)):
            if name not in tensors or tensors[name].shape != want or tensors[name].dtype != "F32":
                raise BundleError(f"{KV_SCALES}: {name} is not a float32 tensor {want}; export again")
            scale = read_tensor(tensors[name])
            if not (np.isfinite(scale) & (scale > 0)).all():
                raise BundleError(f"{KV_SCALES}: {name} has a scale that is no positive number; export again")
            found[name] = scale
    return found
