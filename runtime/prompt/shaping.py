"""Messages in the shape that a chat template reads.

Some templates read content as a string, some as parts, some both, and what they cannot read they drop or print as
Python. So each role is tried once in both shapes, and messages are given in the shape that works.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime

from vtx.runtime.bundle.spec.text_settings import ROLES, TextSettings
from vtx.runtime.errors import TemplateError
from vtx.runtime.prompt.messages import Message, Part
from vtx.runtime.prompt.template import ChatTemplate, LimitError

_PROBE = "vtx-probe-7f3a"


class ShapingTemplate:
    """A chat template that takes content of either shape. Raises `TemplateError` when the template cannot be used."""

    def __init__(self, source: str, settings: TextSettings, now: Callable[[], datetime] = datetime.now) -> None:
        self._template, self._settings = ChatTemplate(source, now), settings
        self._reads: dict[str, tuple[bool, bool]] = {}  # by role: the template reads parts, it reads strings
        for role in ("user", *(role for role in ROLES if role != "user")):
            image: list[Part] = [{"type": "image"}] if role == "user" else []
            parts = self._try(role, [*image, {"type": "text", "text": _PROBE}])
            reads_parts = _PROBE in parts and not re.search("""['"]type['"]""", parts)
            reads_parts = reads_parts and parts.count(settings.image_token) == len(image)
            self._reads[role] = reads_parts, _PROBE in self._try(role, _PROBE)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The conversation as text. Raises `TemplateError`."""
        shaped = [self._shape(message) for message in messages]
        return self._template.render(shaped, self._settings.variables(), add_generation_prompt=add_generation_prompt)

    def _try(self, role: str, content: str | Sequence[Part]) -> str:
        chat: list[Message] = [{"role": role, "content": content}]
        if role != "user":
            chat.insert(0 if role == "assistant" else 1, self._shape({"role": "user", "content": "?"}))
        try:
            return self._template.render(chat, self._settings.variables(), add_generation_prompt=False)
        except LimitError:
            raise
        except TemplateError:
            return ""

    def _shape(self, message: Message) -> Message:
        content = message["content"]
        reads_parts, reads_strings = self._reads.get(message["role"], (True, True))
        if isinstance(content, str) and reads_parts and not reads_strings:
            content = [{"type": "text", "text": content}]
        elif not isinstance(content, str) and reads_strings and not reads_parts:
            tokens = {"image": f"{self._settings.image_token}\n", "video": f"{self._settings.video_token}\n"}
            content = "".join(part["text"] if part["type"] == "text" else tokens[part["type"]] for part in content)
        return {"role": message["role"], "content": content}
