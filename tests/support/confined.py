"""Functions that tests run in a confined child."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vtx.exporter.checkpoint.resolving import resolve, with_forms
from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.errors import TemplateError, VtxError
from vtx.runtime.prompt.forms import render_forms
from vtx.runtime.prompt.shaping import ShapingTemplate
from vtx.runtime.prompt.template import ChatTemplate
from vtx.runtime.strict import Strict


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


def resolve_tokenizers(request: dict[str, Any]) -> list[str]:
    """What becomes of each of many tokenizer.json files: "sound", or the one line that refuses it."""
    template = request["template"]
    return [_outcome(lambda pair=pair: _resolve(*pair, template)) for pair in request["candidates"]]


def _resolve(content: str, image_id: int, template: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.json").write_text(content, encoding="utf-8")
        Path(folder, "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
        Path(folder, "config.json").write_text("{}")
        ids = {"image_token_id": image_id, "video_token_id": None, "end_ids": [2]}
        request = {"folder": folder, "name": "m", "template": template, **ids}
        resolve(request)
    return "sound"


def hold_templates(request: dict[str, Any]) -> list[str]:
    """Of each template: "forms" where it has some that give every chat as it does, "none", or what refuses it."""
    made = Strict().read(TextSettings, request["settings"], "text")
    return [
        _outcome(lambda template=template: _hold(template, request["chats"], made)) for template in request["templates"]
    ]


def _hold(template: str, chats: list[Any], made: TextSettings) -> str:
    derived = with_forms(made, template)
    if derived.forms is None:
        return "none"
    shaping = ShapingTemplate(template, derived)
    for chat in chats:
        for reply in (True, False):
            text = render_forms(derived.forms, chat, add_generation_prompt=reply)
            try:
                expected = shaping.render(chat, add_generation_prompt=reply)
            except TemplateError as error:
                expected = f"refused: {error}"
            if text is not None and text != expected:
                return f"differs: {chat!r} {text!r} {expected!r}"
    return "forms"


def _outcome(attempt: Callable[[], str]) -> str:
    try:
        return attempt()
    except VtxError as error:
        return f"{type(error).__name__}: {error}"
    except MemoryError:
        return "MemoryError: over the limit"
