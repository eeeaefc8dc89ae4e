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
from vtx.runtime.backends.engines import GPUS
from vtx.runtime.errors import VtxError
from vtx.runtime.host.machine import available_memory
from vtx.runtime.session.encoded_images import PreparedImage, next_dropped
from vtx.runtime.units import size


class NoMemoryError(VtxError):
    """The K and V of a request need more than the free memory of the machine, and no other answer is computed."""

    def __init__(self, needed: int) -> None:
        super().__init__(
            f"its K and V need {size(needed)}, {size(available_memory() or 0)} of memory are free; ask again later, or "
            "for fewer tokens, or with an earlier K"
        )


class ConversationPool:
    """Kept conversations, the least recently used first. One thread uses it; others may read its numbers.

    A tenant's request begins only with what the tenant's own conversations hold.

    `hits` and `misses` count the requests whose beginning was, or was not, in a kept conversation.
    """

    def __init__(self, loaded: LoadedBundle, limit_bytes: int, most: int) -> None:
        self._loaded = loaded
        self._limit = limit_bytes
        self._most = most
        self._in_host_memory = loaded.backend.device.partition(":")[0] not in GPUS
        self._kept: list[Conversation] = []
        self._leased: list[tuple[Conversation, int]] = []  # and the bytes of K and V that it may come to need
        self.hits = self.misses = self.kept_bytes = 0

    def lease(
        self,
        images: Sequence[PreparedImage],
        ids: NDArray[np.int64],
        *,
        instead_of: Sequence[PreparedImage] = (),
        prefix_file: Path | None = None,
        needed: int = 0,
        tenant: str = "",
    ) -> Conversation:
        """The tenant's kept conversation about these images that shares most of the prompt `ids`, or a new one.

        A kept one about the images `instead_of`, which nobody asks about again, takes the new one's place.
        `prefix_file` is that of a new one. `needed`: bytes that its K and V come to. Raises NoMemoryError if these are
        not free.
        """
        self._check_free(needed)
        of_tenant = [conversation for conversation in self._kept if conversation.tenant == tenant]
        conversation = _nearest(_about(images, of_tenant), ids)
        if conversation is not None:
            self.hits += 1
            self._kept.remove(conversation)
        else:
            self.misses += 1
            formers = _about(instead_of, of_tenant) if instead_of else []
            if formers:
                conversation = formers[-1]
                self._kept.remove(conversation)
                conversation.replace_prepared(tuple(images))
            else:
                conversation = Conversation(self._loaded, tuple(images), prefix_file=prefix_file, tenant=tenant)
                self._share_prefix(conversation, ids)
        self._leased.append((conversation, needed))
        self._evict()
        return conversation

    def _share_prefix(self, conversation: Conversation, ids: NDArray[np.int64]) -> None:
        """Let a new conversation begin with the prefix of another one of its tenant about the same images."""
        is_image = ids == self._loaded.manifest.text.image_token_id
        if not is_image.any():
            return
        prefix = int(np.flatnonzero(is_image)[-1]) + 1
        others = _about(conversation.images, [*(leased for leased, _ in self._leased), *self._kept])
        for other in others:
            if other.tenant == conversation.tenant and other.agreement(ids)[0] >= prefix:
                conversation.share_prefix(other)
                return

    def lease_unshared(self, images: Sequence[PreparedImage], *, needed: int = 0, tenant: str = "") -> Conversation:
        """A new conversation, which finds no image encoded. Raises NoMemoryError as `lease` does."""
        self._check_free(needed)
        conversation = Conversation(self._loaded, tuple(images), shares_images=False, tenant=tenant)
        self._leased.append((conversation, needed))
        self._evict()
        return conversation

    def give_back(self, conversation: Conversation, *, keep: bool = True) -> None:
        """End a lease. A conversation in which something failed is not kept."""
        self._leased = [lease for lease in self._leased if lease[0] is not conversation]
        if keep:
            self._kept.append(conversation)
        else:
            conversation.close()
        self._evict()

    def fits(self, needed: int) -> bool:
        """True if this many bytes of K and V fit next to those in use: into the limit, and into the free memory.

        For the latter kept conversations are dropped.
        """
        return self._in_use + needed <= self._limit and self._free(needed)

    def _check_free(self, needed: int) -> None:
        if not self._free(needed):
            raise NoMemoryError(needed)

    @property
    def _in_use(self) -> int:
        """Bytes of the conversations in use, at the end of their answers."""
        return sum(
            conversation.cache_bytes + max(0, most - conversation.kv_bytes) for conversation, most in self._leased
        )

    def _free(self, needed: int) -> bool:
        """Drop kept conversations until this much memory is free beside what those in use may yet take."""
        if not self._in_host_memory:
            return True
        needed += sum(max(0, most - conversation.kv_bytes) for conversation, most in self._leased)
        while needed and (free := available_memory()) is not None and needed > free:
            if not self._kept:
                return False
            self._drop()
        return True

    def close(self) -> None:
        """Free the kept conversations."""
        while self._kept:
            self._kept.pop().close()
        self.kept_bytes = 0

    def _evict(self) -> None:
        """Drop kept conversations until they and those in use are within the limit."""
        while True:  # those that remain have a larger part of what they share
            self.kept_bytes = sum(conversation.cache_bytes for conversation in self._kept)
            many = len(self._kept) > self._most
            if not self._kept or (not many and self._in_use + self.kept_bytes <= self._limit):
                return
            self._drop(many=many)

    def _drop(self, *, many: bool = False) -> None:
        """Drop a kept conversation: of the tenant with the most bytes, or if there are too `many`, with the most."""
        entries = [
            (conversation, conversation.tenant, 1 if many else conversation.cache_bytes) for conversation in self._kept
        ]
        dropped = next_dropped(entries)
        self.kept_bytes -= dropped.cache_bytes
        self._kept.remove(dropped)
        dropped.close()


def _about(images: Sequence[PreparedImage], conversations: Sequence[Conversation]) -> list[Conversation]:
    """Those of the conversations that are about these images."""
    keys = [image.key for image in images]
    return [other for other in conversations if [image.key for image in other.images] == keys]


def _nearest(conversations: Sequence[Conversation], ids: NDArray[np.int64]) -> Conversation | None:
    """The conversation that agrees with most of `ids`, about whose images all of them are.

    One that agrees in less than half of what it holds is left for the request that continues it.
    """
    nearest = None
    most = 0
    for conversation in conversations:
        agreed, length = conversation.agreement(ids)
        if agreed > most and 2 * agreed >= length:
            nearest = conversation
            most = agreed
    return nearest
