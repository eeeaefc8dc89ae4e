"""A model whose prompts and hidden states are measured, and items of data as its tokens: prompt and right answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.loader import Checkpoint
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.errors import RequestError, TemplateError
from vtx.runtime.prompt.messages import Message, Part
from vtx.runtime.prompt.text import Text
from vtx.tools.data.items import Data, Item, check_skipped, prompt_images

MAX_REFERENCE = 32  # tokens; longer answers are not compared


@dataclass(frozen=True, slots=True)
class Source:
    """A checked model. `fingerprint` is its checkpoint's, also for a bundle."""

    name: str
    fingerprint: str
    checkpoint: Checkpoint
    config: ModelConfig
    text: Text
    image: ImageSettings
    context: int

    def version(self) -> list[list[str | int]]:
        files = sorted({info.file for info in self.checkpoint.tensors.values()})
        return [[f.name, (s := f.stat()).st_size, s.st_mtime_ns] for f in files]


@dataclass(frozen=True, slots=True)
class PreparedItem:
    """An item as tokens: `ids` [n] of the prompt, `answer_ids` [m] of the right answer and its end."""

    item: Item
    ids: NDArray[np.int64]
    answer_ids: NDArray[np.int64] | None


def prepare(source: Source, data: Data, max_new_tokens: int) -> tuple[list[PreparedItem], list[str]]:
    """Tokenise every item; items that cannot be asked, or do not fit the context, are reported instead."""
    prepared = []
    skipped = list(data.skipped)
    room = source.context - max(max_new_tokens, MAX_REFERENCE)
    for number, item in enumerate(data.items, 1):
        try:
            ids = prompt_ids(source, item)
        except RequestError as e:
            skipped.append(f"question {number}: {e}")
            continue
        if len(ids) <= room:
            answer = answer_ids(source, item, ids)
            short = answer is not None and len(answer) <= MAX_REFERENCE
            prepared.append(PreparedItem(item, ids, answer if short else None))
        else:
            limit = f"the limit is {room} of a context of {source.context}"
            skipped.append(f"question {number}: {len(ids)} tokens, {limit}")
    check_skipped(data.source, len(prepared), skipped, "items", "")
    return prepared, skipped


def messages(item: Item) -> list[Message]:
    """One user turn: the item's images, then its question."""
    parts: list[Part] = [{"type": "image"} for _ in item.images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": item.question}]}]


def prompt_ids(source: Source, item: Item) -> NDArray[np.int64]:
    """Token ids [tokens] of an item's prompt, with the image tokens of each image's size."""
    return source.text.prompt(messages(item), prompt_images(source.config.layout, item))


def answer_ids(source: Source, item: Item, ids: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The right answer's tokens after the prompt `ids`, an end token last; None if the template omits it."""
    if item.answer is None:
        return None
    text = source.text
    answer = [Part(type="text", text=item.answer)]
    try:
        turns: list[Message] = [*messages(item), {"role": "assistant", "content": answer}]
        all_ids = text.prompt(turns, prompt_images(source.config.layout, item), add_generation_prompt=False)
    except (RequestError, TemplateError):
        return None
    if not np.array_equal(all_ids[: len(ids)], ids):
        return None
    tokens = all_ids[len(ids) :]
    ends = np.flatnonzero(np.isin(tokens, text.settings.end_ids))
    tokens = tokens[: ends[0]] if len(ends) else tokens
    while len(tokens) and not text.decode(tokens[-1:]).strip():  # some templates print a space after the answer
        tokens = tokens[:-1]
    return np.append(tokens, np.array(text.settings.end_ids[:1], np.int64)) if len(tokens) else None
