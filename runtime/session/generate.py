"""The loop: prefill, then one token at a time; and a token of several loops at once. It knows no text or clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.backend import BatchBackend
from vtx.runtime.session.prefix import Check, no_check
from vtx.runtime.session.session import Session

Sample = Callable[[NDArray[np.float32]], int]


class Drafts(Protocol):
    """A source of tokens that may come next: prompt lookup, or a grammar."""

    def push(self, token: int) -> bool:
        """One more token of the answer; True if nothing may follow it."""

    def accept(self) -> None:
        """The token last pushed is the draft's next one."""

    def draft(self, most: int) -> list[int]:
        """Tokens to run in the pass of the token last pushed, at most `most`."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """Parts of the loop. `check` is called before each further token and may raise, to stop there.

    `drafts` gives tokens that are verified in one pass: each is sampled from its own logits as without, and the first
    that differs from the draft ends it. `greedy`: sampling does no more than choose the largest logit, so logits may
    stay on a device that chooses it.
    """

    check: Check = no_check
    drafts: Drafts | None = None
    greedy: bool = False


DECODING = Decoding()


def generate(
    session: Session,
    logits: NDArray[np.float32],
    sample: Sample,
    *,
    end_ids: Collection[int],
    max_new_tokens: int,
    decoding: Decoding = DECODING,
) -> Iterator[int]:
    """Yield token ids after a prefill that gave `logits`, the end token included.

    Stops there, after `max_new_tokens`, or when the context is full. While a token is given that will be decoded
    alone, it is the session's `next_token`.
    """
    drafts = decoding.drafts
    choice: int | None = None
    for remaining in reversed(range(max_new_tokens)):
        token = sample(logits) if choice is None else choice
        complete = drafts is not None and drafts.push(token)
        if complete or not remaining or token in end_ids or session.length + 1 >= session.capacity:
            session.forget_draft()
            session.next_token = None
            yield token
            return
        foreseen: NDArray[np.float32] | None = None
        draft: Sequence[int] = ()
        if drafts is not None:
            foreseen, draft = _foreseen(session, drafts, token, remaining - 1)
        alone = foreseen is None and not draft
        session.next_token = token if alone else None
        yield token
        session.next_token = None
        decoding.check()
        choice = session.choose(token) if decoding.greedy and alone else None
        if choice is None:
            logits = session.decode(token, draft) if foreseen is None else foreseen


def _foreseen(
    session: Session, drafts: Drafts, token: int, most: int
) -> tuple[NDArray[np.float32] | None, Sequence[int]]:
    """The logits after a token that the last draft foresaw, else None and the next draft, of `most` tokens at most."""
    logits = session.accept(token)
    if logits is None:
        return None, drafts.draft(min(most, session.draft_room))
    drafts.accept()
    return logits, ()


def run_ahead(backend: BatchBackend, sessions: Sequence[Session]) -> None:
    """Run what each session has `to_run` in one pass, which reads the weights once; its next step finds the logits.

    That is its next token or, where the backend can, the end of its prompt. Each session has its own slots and
    positions in every stage, so they may hold different numbers of tokens and have lost image tokens at different K. An
    exception leaves all of them as they were.
    """
    caches = [session.decoding_caches for session in sessions]
    lengths = [[cache.length for cache in of_one] for of_one in caches]
    try:
        ids = [session.to_run for session in sessions]
        counts = [len(of_session) for of_session in ids]
        tokens = sessions[0].caches.embedding.text(np.concatenate(ids).astype(np.int64))
        for number, stage in enumerate(zip(*caches, strict=True)):
            firsts = [session.next_position(number) for session in sessions]
            positions = np.concatenate([first + np.arange(count) for first, count in zip(firsts, counts, strict=True)])
            tokens = tokens.after(backend.append_each(number, stage, tokens, positions, counts))
        hidden = tokens.hidden[np.cumsum(counts) - 1]
        logits = backend.head(hidden)
    except BaseException:
        for of_one, before in zip(caches, lengths, strict=True):
            for cache, length in zip(of_one, before, strict=True):
                cache.keep(min(length, cache.length))
        raise
    for session, row, state in zip(sessions, logits, np.asarray(hidden), strict=True):
        session.ran(row, state)
