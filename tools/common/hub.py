"""Names of models on the Hugging Face Hub."""

from __future__ import annotations

import re

from vtx.runtime.bundle.safetensors import shown
from vtx.runtime.errors import CheckpointError

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(?:@\w[\w./-]*)?", re.ASCII)


def check_hub_id(model: str) -> None:
    """Raise CheckpointError unless `model`, which is not a directory, may be the name of a model on the Hub."""
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"{shown(model)}: no such directory, and not a hub id (org/name or org/name@revision)")
