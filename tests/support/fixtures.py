"""Types of what fixtures give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from tests.support.cabi import Loaded
    from tests.support.reference import Reference

Checkpoints = Callable[..., Path]
References: TypeAlias = "Callable[..., Reference]"
Libraries: TypeAlias = "Callable[..., Loaded]"
