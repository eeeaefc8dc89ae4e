"""The messages of a conversation: their shape, and the check that they can be asked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from vtx.runtime.errors import RequestError

PICTURES = ("image", "video")
MAX_TEXT = 2 << 20  # characters of one conversation


class Part(TypedDict, total=False):
    """One part of a message: an image, a video, or text; `image_tokens`, of an image, is an `ImageDetail`."""

    type: Literal["image", "video", "text"]
    text: str
    image_tokens: Any


class _RoleAndContent(TypedDict):
    role: str
    content: str | Sequence[Part]


class Message(_RoleAndContent, total=False):
    """One turn: role "system", "user", "assistant" or "tool"; content a string, or parts in the order they are read.

    An assistant's may have `tool_calls` and its thought (`reasoning_content`), and a tool's, its result, has the call's
    `tool_call_id`. A first message of the role "tools" has the `tools` that may be called, and whether the answer
    begins with thoughts (`thinking`; left out: as the template has it). A single message of the role "prompt" may have
    the prompt's `ids` and no content.
    """

    tool_calls: Sequence[Mapping[str, Any]]
    tool_call_id: str
    tools: Sequence[Mapping[str, Any]]
    thinking: bool
    reasoning_content: str
    ids: Sequence[int]


def with_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], thinking: bool | None = None
) -> list[Message]:
    """The messages, with tools that may be called, and with or without thoughts if that is not None.

    What a first message of the role "tools" has of both stays where nothing is given.
    """
    if not tools and thinking is None:
        return list(messages)
    has_head = bool(messages) and messages[0]["role"] == "tools"
    head: Message = {"role": "tools", "content": ""}
    if has_head:
        head = {**head, **messages[0]}
    if tools:
        head["tools"] = tools
    if thinking is not None:
        head["thinking"] = thinking
    return [head, *messages[1:]] if has_head else [head, *messages]


def thinking_of(messages: Sequence[Message]) -> bool | None:
    """True or False if messages switch thoughts on or off, else None."""
    head = messages[0] if messages else None
    return head.get("thinking") if isinstance(head, Mapping) else None


def with_schema(messages: Sequence[Message], schema: str) -> list[Message]:
    """The messages, with the schema of the answer behind the question."""
    *before, last = messages
    text = f"\nAnswer with JSON that matches this schema: {schema}"
    question: Any = [*parts_of(last), {"type": "text", "text": text}]
    return [*before, {**last, "content": question}]


def extras_of(message: Message) -> dict[str, Any]:
    """The fields of a message beside its role and content."""
    return {name: value for name, value in message.items() if name not in ("role", "content")}


def parts_of(message: Message) -> Sequence[Part]:
    """The content as parts."""
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def texts_of(message: Message) -> list[str]:
    """The texts of a message, one a part."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def image_details(messages: Sequence[Message]) -> list[Any]:
    """The `image_tokens` of the images and videos of messages, in their order; None of one that has none."""
    parts = [part for message in messages for part in parts_of(message)]
    return [part.get("image_tokens") for part in parts if part["type"] in PICTURES]


def asked_text(messages: Sequence[Message]) -> str:
    """The question about the last image or video: the user's text in its message, else in the first one after it.

    It is the same at every turn of a chat. Empty if there is no image or video.
    """
    number = _asking(messages)
    return "" if number is None else " ".join(texts_of(messages[number]))


def asking_about(messages: Sequence[Message], about: str) -> list[Message]:
    """The messages up to the question about the last image or video, with `about` in place of the question."""
    number = _asking(messages)
    if number is None:
        return list(messages)
    parts = [part for part in parts_of(messages[number]) if part["type"] != "text"]
    first = [part["type"] for part in parts_of(messages[number])].index("text")
    content: list[Part] = [*parts[:first], {"type": "text", "text": about}, *parts[first:]]
    return [*messages[:number], {"role": "user", "content": content}]


def _asking(messages: Sequence[Message]) -> int | None:
    """The number of the message that asks about the last image or video."""
    with_image = [n for n, message in enumerate(messages) if any(p["type"] != "text" for p in parts_of(message))]
    following = range(with_image[-1], len(messages)) if with_image else ()
    asking = (n for n in following if messages[n]["role"] == "user" and " ".join(texts_of(messages[n])).strip())
    return next(asking, None)


def check_messages(messages: Sequence[Message]) -> tuple[list[str], int]:
    """The types of the images and videos, in their order, and the number of characters.

    Raises `RequestError` if they cannot be asked.
    """
    if not messages:
        raise RequestError("the conversation is empty; ask a question")
    kinds = list[str]()
    question = ""
    length = 0
    for message in messages:
        kinds += _pictures(message)
        texts = texts_of(message)
        if message["role"] == "user":
            question = "".join(texts)
        extras = extras_of(message)
        if extras:
            texts.append(json.dumps(extras, ensure_ascii=False))
        _check_characters((message["role"], *texts))
        length += sum(map(len, texts))
    if length > MAX_TEXT:
        raise RequestError(f"the conversation has {length:,} characters, the limit is {MAX_TEXT:,}; shorten it")
    if not question.strip():
        raise RequestError("the question is empty; write at least one word")
    return kinds, length


def _pictures(message: Message) -> list[str]:
    """The types of a message's images and videos. Raises RequestError for what is no message."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError("a message must be a dict with a role and content; got " + type(message).__name__)
    content = message.get("content")
    if isinstance(content, str):
        return []
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"a message's content must be a string or a list of parts, not {type(content).__name__}")
    kinds = list[str]()
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in PICTURES:
            kinds.append(kind)
        elif kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                'a part must be {"type": "image"}, {"type": "video"} or {"type": "text", "text": ...}; got '
                + repr(part)[:99]
            )
    return kinds


def _check_characters(texts: Sequence[str]) -> None:
    """Raise RequestError for a text with half of a surrogate pair, which no tokenizer reads."""
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:
            raise RequestError(f"character {e.start} of the text is half of a surrogate pair; remove it") from e
