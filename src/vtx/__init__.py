"""vtx: LLaVA-type vision-language models as split engine graphs, visual tokens withdrawn in depth.

`vtx.load` opens a bundle that `vtx-export` made. Names are imported when they are first used, so that
`import vtx` and every `--help` are quick.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as typing has it, whose import would be the larger part of this one
if TYPE_CHECKING:
    from typing import Any

    from vtx.exporter.python import export as export
    from vtx.runtime.api.action_loop import ActionLoop as ActionLoop
    from vtx.runtime.api.answer import Answer as Answer
    from vtx.runtime.api.answer import Stats as Stats
    from vtx.runtime.api.chunks import Continuation as Continuation
    from vtx.runtime.api.conversation import Chat as Chat
    from vtx.runtime.api.conversation import Conversation as Conversation
    from vtx.runtime.api.load import load as load
    from vtx.runtime.api.model import Model as Model
    from vtx.runtime.api.options import Options as Options
    from vtx.runtime.api.stream import AnswerStream as AnswerStream
    from vtx.runtime.api.stream import AsyncAnswerStream as AsyncAnswerStream
    from vtx.runtime.errors import BundleError as BundleError
    from vtx.runtime.errors import CheckpointError as CheckpointError
    from vtx.runtime.errors import ContextError as ContextError
    from vtx.runtime.errors import ConversationBusyError as ConversationBusyError
    from vtx.runtime.errors import DeadlineError as DeadlineError
    from vtx.runtime.errors import DeviceError as DeviceError
    from vtx.runtime.errors import ExportError as ExportError
    from vtx.runtime.errors import ImageError as ImageError
    from vtx.runtime.errors import ModelClosedError as ModelClosedError
    from vtx.runtime.errors import RequestError as RequestError
    from vtx.runtime.errors import TemplateError as TemplateError
    from vtx.runtime.errors import UnsupportedModelError as UnsupportedModelError
    from vtx.runtime.errors import VtxError as VtxError
    from vtx.runtime.prompt.guiding import Guide as Guide
    from vtx.runtime.prompt.tools import ToolCall as ToolCall
    from vtx.runtime.prompt.tools import Tools as Tools
    from vtx.runtime.session.sampling import Sampling as Sampling
    from vtx.runtime.vision.files.source import bgr as bgr
    from vtx.runtime.vision.video import video as video

__version__ = "0.1.0"
_ERRORS = (
    "BundleError",
    "CheckpointError",
    "ContextError",
    "ConversationBusyError",
    "DeadlineError",
    "DeviceError",
    "ExportError",
    "ImageError",
    "ModelClosedError",
    "RequestError",
    "TemplateError",
    "UnsupportedModelError",
    "VtxError",
)
_HOMES = {
    "ActionLoop": "runtime.api.action_loop",
    "Answer": "runtime.api.answer",
    "AnswerStream": "runtime.api.stream",
    "AsyncAnswerStream": "runtime.api.stream",
    "Chat": "runtime.api.conversation",
    "Continuation": "runtime.api.chunks",
    "Conversation": "runtime.api.conversation",
    "Guide": "runtime.prompt.guiding",
    "Model": "runtime.api.model",
    "Options": "runtime.api.options",
    "Sampling": "runtime.session.sampling",
    "Stats": "runtime.api.answer",
    "ToolCall": "runtime.prompt.tools",
    "Tools": "runtime.prompt.tools",
    "bgr": "runtime.vision.files.source",
    "export": "exporter.python",
    "load": "runtime.api.load",
    "video": "runtime.vision.video",
} | dict.fromkeys(_ERRORS, "runtime.errors")
__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vtx' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"vtx.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
