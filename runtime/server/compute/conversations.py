"""Conversations of one model that are kept for requests to come, bounded in bytes and number.

The least recently used leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.model import Model
from vtx.runtime.session.encoded_images import PreparedImage


@dataclass(slots=True)
class Found:
    """How often a request's beginning was in some kept conversation."""

    hits: int = 0
    misses: int = 0


class ConversationPool:
    """Kept conversations, the least recently used first. One thread uses it; others may read its numbers."""

    def __init__(self, model: Model, limit_bytes: int, most: int) -> None:
        self._model, self._limit, self._most = model, limit_bytes, most
        self._kept: list[Conversation] = []
        self._leased: list[Conversation] = []
        self.found = Found()
        self.kept_bytes = 0

    def lease(self, images: Sequence[PreparedImage], ids: NDArray[np.int64], *, reuse: bool = True) -> Conversation:
        """The kept conversation about these images that has most of the prompt `ids`, or a new one.

        Without `reuse` it is new, and finds no image encoded.
        """
        conversation = self._best(tuple(image.key for image in images), ids) if reuse else None
        if not reuse:
            conversation = Conversation(self._model, tuple(images), shares_images=False)
        elif conversation is None:
            self.found.misses += 1
            conversation = Conversation(self._model, tuple(images))
        else:
            self.found.hits += 1
            self._kept.remove(conversation)
        self._leased.append(conversation)
        self._evict()
        return conversation

    def give_back(self, conversation: Conversation, *, keep: bool = True) -> None:
        """End a lease. A conversation in which something failed is not kept."""
        self._leased.remove(conversation)
        if keep:
            self._kept.append(conversation)
        else:
            conversation.close()
        self._evict()

    def _best(self, keys: tuple[str, ...], ids: NDArray[np.int64]) -> Conversation | None:
        """Where less than half of what a conversation holds agrees, it is left to whoever goes on with it."""
        best, most = None, 0
        for conversation in self._kept:
            agreed, held = conversation.agreement(ids)
            if tuple(i.key for i in conversation.images) == keys and agreed > most and 2 * agreed >= held:
                best, most = conversation, agreed
        return best

    def _evict(self) -> None:
        """Let go of kept conversations until all of them and those in use stay within the limit."""
        in_use = sum(conversation.cache_bytes for conversation in self._leased)
        sizes = [conversation.cache_bytes for conversation in self._kept]
        while sizes and (in_use + sum(sizes) > self._limit or len(sizes) > self._most):
            self._kept.pop(0).close()
            sizes.pop(0)
        self.kept_bytes = sum(sizes)
