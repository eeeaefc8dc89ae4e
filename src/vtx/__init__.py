"""vtx: LLaVA-type vision-language models as split engine graphs, visual tokens withdrawn in depth.

`vtx.load` opens a bundle that `vtx-export` made. Names are imported when they are first used, so that
`import vtx` and every `--help` are quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vtx.runtime.api.answer import Answer as Answer
    from vtx.runtime.api.answer import Options as Options
    from vtx.runtime.api.model import Chat as Chat
    from vtx.runtime.api.model import Conversation as Conversation
    from vtx.runtime.api.model import Model as Model
    from vtx.runtime.api.model import load as load
    from vtx.runtime.errors import VtxError as VtxError
    from vtx.runtime.session.sampling import Sampling as Sampling
    from vtx.runtime.vision.source import bgr as bgr

__version__ = "0.1.0"
_HOMES = {
    "Answer": "api.answer",
    "Chat": "api.model",
    "Conversation": "api.model",
    "Model": "api.model",
    "Options": "api.answer",
    "load": "api.model",
    "Sampling": "session.sampling",
    "VtxError": "errors",
    "bgr": "vision.source",
}
__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vtx' has no attribute {name!r}")
    return getattr(importlib.import_module(f"vtx.runtime.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
