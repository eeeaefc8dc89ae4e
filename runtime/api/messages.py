"""Message lists as OpenAI's and Hugging Face's libraries write them, to images and messages without them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from vtx.runtime.errors import RequestError
from vtx.runtime.prompt.messages import Message, Part, parts_of, texts_of
from vtx.runtime.prompt.tools import read_calls
from vtx.runtime.vision.image import ImageSource
from vtx.runtime.vision.video import Video

ROLES = {"developer": "system"}  # OpenAI's newer name
_FORMS = (
    '{"type": "text", "text": ...}, {"type": "image", "image": path, bytes, data URL, array or PIL image}, '
    '{"type": "image_url", "image_url": {"url": data URL or path}}, '
    'or {"type": "video", "video": path, bytes, data URL or array of frames}'
)


def split_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[ImageSource | Video], list[Message]]:
    """The images and videos of a message list in their order, and the messages with a mark for each.

    Raises RequestError: what is not a message list, or an image that would have to be downloaded.
    """
    if not isinstance(messages, list | tuple):
        raise RequestError(f"messages is a {type(messages).__name__}; it must be a list of dicts with role and content")
    images: list[ImageSource | Video] = []
    turns: list[Message] = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"a message must be a dict with role and content; got {message!r:.80}")
        role: str = message["role"]
        turn: Message
        if role == "assistant":
            turn = _answer(message, images)
        elif role == "tool":
            turn = _result(message, images)
        else:
            turn = {"role": ROLES.get(role, role), "content": _content(message.get("content"), images)}
        turns.append(turn)
    return images, turns


def _answer(message: Mapping[str, Any], images: list[ImageSource | Video]) -> Message:
    """A message of the model, with the calls of tools and the thought that it has."""
    calls = read_calls(message["tool_calls"]) if message.get("tool_calls") else []
    content = message.get("content")
    if calls and content is None:
        content = ""
    turn: Message = {"role": "assistant", "content": _content(content, images)}
    if calls:
        turn["tool_calls"] = calls
    if isinstance(message.get("reasoning_content"), str):
        turn["reasoning_content"] = message["reasoning_content"]
    return turn


def _result(message: Mapping[str, Any], images: list[ImageSource | Video]) -> Message:
    """The message of a tool, whose result is text whatever the template makes of parts."""
    turn: Message = {"role": "tool", "content": _content(message.get("content"), images)}
    if any(part["type"] != "text" for part in parts_of(turn)):
        raise RequestError("a tool's result must be text; give images in a message of the user")
    number = str(message.get("tool_call_id", ""))
    return {"role": "tool", "content": "".join(texts_of(turn)), "tool_call_id": number}


def _content(content: Any, images: list[ImageSource | Video]) -> str | list[Part]:
    """The text or parts of a message, whose images and videos are appended to `images`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"a message's content must be a string or a list of parts, not {type(content).__name__}")
    return [_part(part, images) for part in content]


def _part(part: Any, images: list[ImageSource | Video]) -> Part:
    """A part of a message, whose image or video is appended to `images`."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in ("video", "video_url") and part.get(kind) is not None:
        images.append(_video(part[kind]))
        return {"type": "video"}
    if kind not in ("image", "image_url"):
        raise RequestError(f"a part of a message must be {_FORMS}; got {part!r:.80}")
    if isinstance(part.get("base64"), str):
        try:
            images.append(base64.b64decode(part["base64"], validate=True))
        except (binascii.Error, ValueError) as e:
            raise RequestError(f"an image's base64 text cannot be decoded ({e}); encode the file's bytes") from e
        return _image(part)
    value = next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None), None)
    if isinstance(value, Mapping):
        value = value.get("url")
    if value is None:
        raise RequestError(f"a part of type {part['type']!r} names no image; write {_FORMS}")
    images.append(_local(value) if isinstance(value, str) else value)  # checked when it is read
    return _image(part)


def _video(value: Any) -> Video:
    """A video, also as OpenAI-like interfaces name one: {"url": data URL or path, "frames": n or nothing}."""
    if isinstance(value, Video):
        return value
    source = value
    frames = None
    if isinstance(value, Mapping):
        source = value.get("url")
        frames = value.get("frames")
    if source is None:
        raise RequestError(f"a part of type 'video_url' names no video; write {_FORMS}")
    return Video(_local(source) if isinstance(source, str) else source, frames)


def _image(part: Mapping[str, Any]) -> Part:
    """The mark of an image, with its `image_tokens`, else its `detail`, as the part or its `image_url` has them."""
    address = part.get("image_url")
    for name in ("image_tokens", "detail"):
        for fields in (part, address):
            if isinstance(fields, Mapping) and fields.get(name) is not None:
                return {"type": "image", "image_tokens": fields[name]}
    return {"type": "image"}


def _local(url: str) -> str:
    """A path or a data URL; nothing is downloaded."""
    scheme = url.partition(":")[0].lower()
    if scheme in ("http", "https", "ftp"):
        raise RequestError(f"{url!r:.80} would have to be downloaded; fetch it and pass a path, bytes or a data URL")
    return unquote(urlsplit(url).path) if scheme == "file" else url
