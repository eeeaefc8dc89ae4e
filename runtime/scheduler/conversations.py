"""Conversations of one model that are kept for later requests, bounded in bytes and number.

The least recently used are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.loaded import LoadedBundle
from vtx.runtime.host.machine import available_memory
from vtx.runtime.session.encoded_images import PreparedImage


class ConversationPool:
    """Kept conversations, the least recently used first. One thread uses it; others may read its numbers.

    `hits` and `misses` count the requests whose beginning was, or was not, in a kept conversation.
    """

    def __init__(self, loaded: LoadedBundle, limit_bytes: int, most: int) -> None:
        self._loaded, self._limit, self._most = loaded, limit_bytes, most
        self._kept: list[Conversation] = []
        self._leased: list[Conversation] = []
        self.hits = self.misses = self.kept_bytes = 0

    def lease(
        self, images: Sequence[PreparedImage], ids: NDArray[np.int64], *, reuse: bool = True,
        instead_of: Sequence[PreparedImage] = (), prefix_file: Path | None = None,
    ) -> Conversation:  # fmt: skip
        """The kept conversation about these images that shares most of the prompt `ids`, or a new one.

        A kept one about the images `instead_of`, which nobody asks about again, takes the new one's place. Without
        `reuse` it is new, and finds no image encoded. `prefix_file` is that of a new one.
        """
        conversation, best, keys = None, 0, _keys(images)
        for kept in self._kept if reuse else ():
            agreed, held = kept.agreement(ids)
            # One that agrees in less than half of what it holds is left for the request that continues it.
            if _keys(kept.images) == keys and agreed > best and 2 * agreed >= held:
                conversation, best = kept, agreed
        if not reuse:
            conversation = Conversation(self._loaded, tuple(images), shares_images=False)
        elif conversation is None:
            self.misses += 1
            before = _keys(instead_of)
            former = next((kept for kept in reversed(self._kept) if before and _keys(kept.images) == before), None)
            if former is not None:
                self._kept.remove(former)
                former.replace_prepared(tuple(images))
            conversation = former or Conversation(self._loaded, tuple(images), prefix_file=prefix_file)
            is_image = ids == self._loaded.manifest.text.image_token_id
            prefix = int(np.flatnonzero(is_image)[-1]) + 1 if is_image.any() else 0
            for other in [*self._leased, *self._kept] if prefix and former is None else ():
                if _keys(other.images) == keys and other.agreement(ids)[0] >= prefix:
                    conversation.share_prefix(other)
                    break
        else:
            self.hits += 1
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

    def fits(self, tokens: int) -> bool:
        """True if K and V of one more conversation with this many tokens fit into the memory that is free.

        And, next to those in use, into the limit.
        """
        manifest, slot = self._loaded.manifest, self._loaded.backend.kv_slot_bytes
        more = min(tokens, manifest.max_context) * manifest.model.attending * slot
        if (free := available_memory()) is not None and more > free:
            return False
        return sum(conversation.cache_bytes for conversation in self._leased) + more <= self._limit

    def close(self) -> None:
        """Free the kept conversations."""
        while self._kept:
            self._kept.pop().close()
        self.kept_bytes = 0

    def _evict(self) -> None:
        """Drop kept conversations until they and those in use are within the limit."""
        in_use = sum(conversation.cache_bytes for conversation in self._leased)
        sizes = [conversation.cache_bytes for conversation in self._kept]
        while sizes and (in_use + sum(sizes) > self._limit or len(sizes) > self._most):
            self._kept.pop(0).close()
            sizes.pop(0)
        self.kept_bytes = sum(sizes)


def _keys(images: Sequence[PreparedImage]) -> list[str]:
    return [image.key for image in images]
