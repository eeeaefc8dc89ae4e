"""Conversations whose images are replaced, and the tokens that stages run for their answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tests.support.sequences import NotedSampling, noted, same_answer
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.backends.slots import SlotCounter

QUESTION, SYSTEM = "How many?", "Be brief, please."


@contextmanager
def tokens_run() -> Iterator[list[int]]:
    """The number of tokens of each run of a stage."""
    counts, append = list[int](), SlotCounter.append

    def counted(self: Any, tokens: Any, *args: Any, **keywords: Any) -> Any:
        counts.append(len(tokens))
        return append(self, tokens, *args, **keywords)

    with patch.object(SlotCounter, "append", counted):
        yield counts


def asked(conversation: Conversation, k: int | None, reduce: str = "none") -> tuple[Any, Any, int]:
    """An answer, its logits, and the tokens that all stages ran for its prompt."""
    sampling = NotedSampling()
    with noted(), tokens_run() as counts:
        stream = conversation.stream(QUESTION, k, Options(3, ignore_eos=True, sampling=sampling), reduce=reduce)
        next(iter(stream))
        run = sum(counts)
        answer = stream.read()
    return answer, sampling.logits, run


def check(model: Model, held: Conversation, images: Any, k: int | None, reduce: str = "none") -> tuple[int, int]:
    """Replace the images, hold the answer to a fresh one; the tokens that were run, and those of the fresh one."""
    held.replace(images)
    answer, logits, run = asked(held, k, reduce)
    with model.open(images, system=SYSTEM) as fresh:
        wanted, wanted_logits, whole = asked(fresh, k, reduce)
    same_answer(answer, logits, wanted, wanted_logits, 2e-5)
    return run, whole
