"""A build backend that builds nothing: its answer is the metadata that a source package has already."""

from __future__ import annotations

import email
import shutil
from pathlib import Path
from typing import Any


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """Copy PKG-INFO, and return the name of its folder."""
    fields = email.message_from_string(Path("PKG-INFO").read_text(encoding="utf-8"))
    name = fields["Name"].replace("-", "_")
    folder = Path(metadata_directory, f"{name}-{fields['Version']}.dist-info")
    folder.mkdir()
    shutil.copy("PKG-INFO", folder / "METADATA")
    return folder.name
