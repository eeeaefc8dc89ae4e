"""The rotary tables of a bundle, which every stage of every backend reads."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle import names
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.safetensors import read_header, read_tensor
from vtx.runtime.errors import BundleError

Tables = tuple[NDArray[np.float32], NDArray[np.float32]]


def read_rope(bundle: Bundle) -> Tables:
    """Cos and sin, each [max_context, head_dim / 2] float32.

    Raises:
        BundleError: a table is missing or has another shape or type.

    """
    manifest = bundle.manifest
    tensors = read_header(bundle.path(manifest.rope), error=BundleError).tensors
    want = (manifest.max_context, manifest.model.head_dim // 2)

    def table(name: str) -> NDArray[Any]:
        if name not in tensors or tensors[name].shape != want or tensors[name].dtype != "F32":
            raise BundleError(f"{manifest.rope}: {name} is not a float32 table {want}; export again")
        return read_tensor(tensors[name])

    return table(names.COS), table(names.SIN)
