"""The operator sets that the graphs can be written in; the graphs themselves know none of them by name."""

from __future__ import annotations

from vtx.exporter.graphs.dialects.base import Dialect
from vtx.exporter.graphs.dialects.ort import Ort
from vtx.exporter.graphs.dialects.plain import Plain


def make_dialect(name: str) -> Dialect:
    """The dialect of that name, one of `names.DIALECTS`."""
    return Plain() if name == "plain" else Ort()
