"""Functions that tests run in a confined child."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from vtx.runtime.prompt.template import ChatTemplate


def render(request: dict[str, Any]) -> str:
    """What a template prints for a conversation."""
    return ChatTemplate(request["source"]).render(request["messages"], {}, add_generation_prompt=True)


def loaded(_: Any) -> list[str]:
    """The top-level modules that the child holds."""
    return sorted({name.partition(".")[0] for name in sys.modules})


def fail(kind: str) -> Any:
    """Go wrong in one way."""
    if kind == "memory":
        return len(bytearray(8 << 30))
    if kind == "cpu":
        while True:
            pass
    if kind == "sleep":
        time.sleep(600)
    if kind == "file":
        return "x" * (32 << 20)
    if kind == "print":
        print("noise")
        os.write(1, b"noise")
        return "quiet"
    if kind == "abort":
        os.abort()
    if kind == "error":
        raise ZeroDivisionError("by nothing")
    return kind
