"""Items of data as the model reads them: the prompt's tokens, and those of the right answer behind it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.data.items import MAX_SKIPPED, Data, Item
from vtx.exporter.data.source import Source
from vtx.runtime.errors import RequestError, TemplateError
from vtx.runtime.prompt.messages import Message, Part

MAX_REFERENCE = 32  # tokens; what is longer is no answer that could be met word for word


@dataclass(frozen=True, slots=True)
class PreparedItem:
    """An item as the model reads it: `ids` [n] of the prompt; `wanted` [m] of the right answer, its end included."""

    item: Item
    ids: NDArray[np.int64]
    wanted: NDArray[np.int64] | None


def prepare(source: Source, data: Data, max_new_tokens: int) -> tuple[list[PreparedItem], list[str]]:
    """Tokenise every item; those that cannot be asked, or do not fit the context, are named instead.

    Raises:
        RequestError: too many of them.

    """
    asked, skipped, room = [], list(data.skipped), source.context - max(max_new_tokens, MAX_REFERENCE)
    for number, item in enumerate(data.items, 1):
        try:
            ids = source.text.prompt(messages(item), source.config.vision_tokens)
        except RequestError as e:
            skipped.append(f"question {number}: {e}")
            continue
        if len(ids) <= room:
            wanted = answer_ids(source, item, ids)
            asked.append(
                PreparedItem(item, ids, wanted if wanted is not None and len(wanted) <= MAX_REFERENCE else None)
            )
        else:
            skipped.append(f"question {number}: {len(ids)} tokens, {room} fit the context of {source.context}")
    if len(skipped) > MAX_SKIPPED * (len(asked) + len(skipped)):
        raise RequestError(f"{len(skipped)} of {len(asked) + len(skipped)} items cannot be used. Last: {skipped[-1]}")
    return asked, skipped


def messages(item: Item) -> list[Message]:
    """One user turn: the item's images, then its question."""
    parts: list[Part] = [{"type": "image"} for _ in item.images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": item.question}]}]


def answer_ids(source: Source, item: Item, ids: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The right answer's tokens after the prompt `ids`, an end token last, where the template goes on with them."""
    if item.answer is None:
        return None
    text, answer = source.text, [Part(type="text", text=item.answer)]
    try:
        turns: list[Message] = [*messages(item), {"role": "assistant", "content": answer}]
        whole = text.prompt(turns, source.config.vision_tokens, add_generation_prompt=False)
    except (RequestError, TemplateError):
        return None
    if not np.array_equal(whole[: len(ids)], ids):
        return None
    wanted = whole[len(ids) :]
    ends = np.flatnonzero(np.isin(wanted, text.settings.end_ids))
    wanted = wanted[: ends[0]] if len(ends) else wanted
    while len(wanted) and not text.decode(wanted[-1:]).strip():  # some templates print a space behind the answer
        wanted = wanted[:-1]
    return np.append(wanted, np.array(text.settings.end_ids[:1], np.int64)) if len(wanted) else None
