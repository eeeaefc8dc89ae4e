"""Functions that tests run in a confined child."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vtx.exporter.checkpoint.examples import with_examples
from vtx.exporter.checkpoint.resolving import resolve
from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.errors import VtxError
from vtx.runtime.prompt.template import ChatTemplate, ShapingTemplate
from vtx.runtime.strict import Strict


def render(request: dict[str, Any]) -> str:
    """What a template prints for a conversation."""
    return ChatTemplate(request["source"]).render(request["messages"], {}, add_generation_prompt=True)


def resolve_tokenizers(request: dict[str, Any]) -> list[str]:
    """What becomes of the tokenizer in each of many folders: "sound", or the one line that refuses it."""
    return [_outcome(lambda given=given: _resolve(*given, request["template"])) for given in request["candidates"]]


def write_tokenizers(folder: Path, candidates: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """A folder below `folder` for each tokenizer.json, and the id of its image token, as `resolve_tokenizers` wants."""
    written = []
    for number, (content, image_id) in enumerate(candidates):
        made = folder / str(number)
        made.mkdir()
        (made / "tokenizer.json").write_text(content, encoding="utf-8")
        (made / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
        (made / "config.json").write_text("{}")
        written.append((str(made), image_id))
    return written


def _resolve(folder: str, image_id: int, template: str) -> str:
    ids = {"image_token_id": image_id, "video_token_id": None, "end_ids": [2], "stated": True, "vocab": 1 << 24}
    resolve({"folder": folder, "name": "m", "template": template, **ids})
    return "sound"


def hold_templates(request: dict[str, Any]) -> list[str]:
    """Of each template "rendered" once its examples are made and each chat is tried, or the line that refuses it."""
    made = Strict().read(TextSettings, request["settings"], "text")
    return [
        _outcome(lambda template=template: _hold(template, request["chats"], made)) for template in request["templates"]
    ]


def _hold(template: str, chats: list[Any], made: TextSettings) -> str:
    shaping = ShapingTemplate(template, with_examples(made, template))
    for chat in chats:
        shaping.render(chat, add_generation_prompt=True)
    return "rendered"


def _outcome(attempt: Callable[[], str]) -> str:
    try:
        return attempt()
    except VtxError as error:
        return f"{type(error).__name__}: {error}"
    except MemoryError:
        return "MemoryError: over the limit"
