"""No withdrawal: every layer sees the image."""

from __future__ import annotations

from dataclasses import dataclass

from vtx.runtime.policies.base import Reduction


@dataclass(frozen=True, slots=True)
class Full(Reduction):
    """The image tokens never leave as a whole."""

    name = "none"
    whole = True
    fixed = True
