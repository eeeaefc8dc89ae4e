"""The exporter's own libraries, loaded when a command needs them."""

from __future__ import annotations

import os
from typing import Any

from vtx.runtime.errors import DeviceError


def exporter() -> Any:
    """The module `vtx.exporter.bundling.export`, or DeviceError with the command that installs what it needs."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # what is wrong with a model we say ourselves
    try:
        import vtx.exporter.bundling.export as exporter
    except ImportError as e:
        raise DeviceError(f'exporting needs {e.name}; pip install "vtx-edge[export]"') from e
    return exporter
