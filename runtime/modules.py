"""The modules of a folder without a list of its files: a policy, an image layout or a family is one file there."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType


def modules_of(package: ModuleType) -> Iterator[ModuleType]:
    """Every module of `package` and of packages in it, imported, in the order of their names."""
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(module.name)
