"""The settings files of a checkpoint, JSON objects of a limited size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vtx.exporter.checkpoint.hub import checkpoint_files
from vtx.tools.common.files import json_object

# Each is several times the largest of published files, in brackets: of OpenVLA 7B and Gemma 3.
MAX_CONFIG = 2**20  # [60,736 bytes]
MAX_TOKENIZER_CONFIG = 8 * 2**20  # [1,157,007 bytes]

TOKENIZER_CONFIG = "tokenizer_config.json"


def read_settings(folder: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint, empty if the file does not exist. Raises `CheckpointError`."""
    files = checkpoint_files(folder)
    limit = MAX_TOKENIZER_CONFIG if name == TOKENIZER_CONFIG else MAX_CONFIG
    return json_object(files.read(name, limit), name) if files.exists(name) else {}
