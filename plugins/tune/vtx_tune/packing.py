"""Questions about one image in one row: its prefix once, then each question with its answer, blind to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtx.exporter.reference.prompts import Source, answer_ids, prompt_ids
from vtx.runtime.errors import RequestError
from vtx.runtime.vision.image import ImageSource
from vtx.tools.data.items import Item, image_key
from vtx_tune.options import Packing

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TuningQuestion:
    """An item's prompt, cut after its last image token: `prefix` [p] and `suffix` [s]; `answer` [a] if given."""

    item: Item
    prefix: Ids
    suffix: Ids
    answer: Ids | None


@dataclass(frozen=True, slots=True)
class Row:
    """Packed questions, by their `numbers`: tensors over n tokens, and over the m tokens that predict an answer's.

    `ids`, `blocks`, `positions` [n] int64: block 0 is the prefix, block i the i-th question. `image` [n] bool.
    `at` [m]: the tokens that predict; `targets` [m]: what comes next; `given` [m] bool: the data gave this answer.
    """

    numbers: tuple[int, ...]
    images: tuple[ImageSource, ...]
    ids: Tensor
    blocks: Tensor
    positions: Tensor
    image: Tensor
    at: Tensor
    targets: Tensor
    given: Tensor

    def __len__(self) -> int:
        return len(self.ids)


def read_questions(source: Source, items: Sequence[Item], packing: Packing) -> tuple[list[TuningQuestion], list[str]]:
    """Tokenise items; those that cannot be asked, or do not fit, are reported instead.

    An answer of the data that is longer than `max_new_tokens` is cut there, without its end.
    """
    questions = list[TuningQuestion]()
    skipped = list[str]()
    limit = min(packing.max_tokens, source.context)
    for number, item in enumerate(items, 1):
        try:
            ids = prompt_ids(source, item)
            answer = answer_ids(source, item, ids)
        except RequestError as e:
            skipped.append(f"question {number}: {e}")
            continue
        images = np.flatnonzero(ids == source.config.image_token_id)
        if not len(images) or images[-1] + 1 == len(ids):
            skipped.append(f"question {number}: no text follows the image in its prompt")
        elif len(ids) + packing.max_new_tokens > limit:
            skipped.append(f"question {number}: {len(ids)} tokens and its answer, the limit is {limit}")
        else:
            cut = int(images[-1]) + 1
            kept = None if answer is None else answer[: packing.max_new_tokens]
            questions.append(TuningQuestion(item, ids[:cut], ids[cut:], kept))
    return questions, skipped


def pack(
    questions: Sequence[TuningQuestion], own: Mapping[int, Ids], image_token: int, packing: Packing, context: int
) -> list[Row]:
    """Rows of questions about the same images, in the order of their first question.

    `own` has the teacher's answer of each question, by its number, to which the data give none.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, question in enumerate(questions):
        groups.setdefault((*map(image_key, question.item.images), question.prefix.tobytes()), []).append(number)
    limit = min(packing.max_tokens, context)
    rows = list[Row]()
    for numbers in groups.values():
        batch = list[int]()
        tokens = len(questions[numbers[0]].prefix)
        for number in numbers:
            question = questions[number]
            length = len(question.suffix) + packing.max_new_tokens
            if batch and (len(batch) == packing.questions or tokens + length > limit):
                rows.append(_row(batch, questions, own, image_token))
                batch = []
                tokens = len(question.prefix)
            batch.append(number)
            tokens += length
        rows.append(_row(batch, questions, own, image_token))
    return rows


def _row(numbers: Sequence[int], questions: Sequence[TuningQuestion], own: Mapping[int, Ids], image_token: int) -> Row:
    batch = [questions[number] for number in numbers]
    prefix = batch[0].prefix
    ids = [prefix]
    blocks = [np.zeros_like(prefix)]
    positions = [np.arange(len(prefix))]
    at = list[Ids]()
    targets = list[Ids]()
    masks = list[NDArray[np.bool_]]()
    length = len(prefix)
    for block, question in enumerate(batch, 1):
        answer = question.answer if question.answer is not None else own.get(numbers[block - 1])
        if answer is None:
            raise ValueError("a question has no answer, neither the data's nor the teacher's")
        tokens = np.concatenate([question.suffix, answer[:-1]])
        ids.append(tokens)
        blocks.append(np.full(len(tokens), block))
        positions.append(len(prefix) + np.arange(len(tokens)))
        at.append(length + len(question.suffix) - 1 + np.arange(len(answer)))
        targets.append(answer)
        masks.append(np.full(len(answer), question.answer is not None))
        length += len(tokens)
    parts: dict[str, Any] = {"ids": ids, "blocks": blocks, "positions": positions, "at": at, "targets": targets}
    tensors = {name: torch.from_numpy(np.concatenate(part)) for name, part in (parts | {"given": masks}).items()}
    return Row(tuple(numbers), batch[0].item.images, image=tensors["ids"] == image_token, **tensors)


def visible(blocks: Tensor) -> Tensor:
    """[n, n] bool: true if token i sees token j. Causal; a question sees the prefix and itself."""
    causal = torch.ones(len(blocks), len(blocks), dtype=torch.bool, device=blocks.device).tril()
    return causal & ((blocks[None] == 0) | (blocks[None] == blocks[:, None]))
