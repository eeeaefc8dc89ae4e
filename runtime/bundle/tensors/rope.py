"""The rotary tables of a bundle, which every stage of every backend reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import names
from vtx.runtime.errors import BundleError

Tables = tuple[NDArray[np.float32], NDArray[np.float32]]
MAX_HEADER = 1 << 16  # of two tables


def read_rope(bundle: Bundle) -> Tables:
    """Cos and sin, each [max_context, head_dim / 2] float32.

    Raises:
        BundleError: a table is missing or has another shape or type.

    """
    manifest = bundle.manifest
    shape = (manifest.max_context, manifest.model.head_dim // 2)
    tables = bundle.arrays(manifest.rope, MAX_HEADER + 2 * 4 * shape[0] * shape[1])

    def table(name: str) -> NDArray[np.float32]:
        if name not in tables or tables[name].shape != shape or tables[name].dtype != np.float32:
            raise BundleError(f"{manifest.rope}: {name} is not a float32 table {shape}; export again")
        return tables[name]

    return table(names.COS), table(names.SIN)


def tables_at(tables: Tables, sections: Sequence[int], positions: NDArray[np.int64]) -> Tables:
    """Tables of n rows, one a token, for positions [n, 3]: token i then stands at position i of these.

    `sections` part the columns: those of the first are read at the position's time, then row, then column.
    """
    read_at = positions[:, np.repeat(np.arange(len(sections)), sections)]
    cos, sin = (np.ascontiguousarray(np.take_along_axis(table, read_at, 0)) for table in tables)
    return cos, sin
