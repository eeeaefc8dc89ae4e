"""A dictionary that processes share by a folder."""

from __future__ import annotations

import os
from collections import UserDict
from pathlib import Path
from typing import Any

from tests.support.json_files import read_json, write_json


class Shared(UserDict[str, Any]):
    """JSON by name, a file each: what another process has set is here too. Nothing is ever removed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __contains__(self, key: object) -> bool:
        return key in self.data or (self._folder / str(key)).exists()

    def __missing__(self, key: str) -> Any:
        self.data[key] = read_json(self._folder / key)
        return self.data[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.data[key] = value
        whole = self._folder / f"{key}.{os.getpid()}"
        write_json(whole, value)
        whole.replace(self._folder / key)
