"""Encoded images that several conversations share, bounded in bytes: the least recently used leave."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

from vtx.runtime.vision.tokens import ImageTokens


class ImageCache:
    """Image tokens by the hash of their pixels and the vision graph's extra inputs. Safe for many threads."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.hits, self.misses = 0, 0
        self._tokens = OrderedDict[Hashable, ImageTokens]()
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """What all of them take now: a policy may keep what it found out about an image with it."""
        with self._lock:
            return self._size()

    def get(self, key: Hashable) -> ImageTokens | None:
        """The tokens of an image, None where they are not kept."""
        with self._lock:
            tokens = self._tokens.get(key)
            if tokens is None:
                self.misses += 1
                return None
            self._tokens.move_to_end(key)
            self.hits += 1
            self._shrink()
            return tokens

    def put(self, key: Hashable, tokens: ImageTokens) -> None:
        """Keep an image's tokens; one that alone exceeds the limit is not kept."""
        with self._lock:
            if key in self._tokens or nbytes(tokens) > self.limit_bytes:
                return
            self._tokens[key] = tokens
            self._shrink()

    def _size(self) -> int:
        return sum(map(nbytes, self._tokens.values()))

    def _shrink(self) -> None:
        while self._size() > self.limit_bytes:
            self._tokens.popitem(last=False)


def nbytes(tokens: ImageTokens) -> int:
    """Bytes of an image's tokens, of what is known of their patches, and of what policies derived from them."""
    patches = tokens.patches
    known = [*patches.signals.values(), *list(tokens.derived.values())]  # a list at once: another thread may add to it
    return tokens.hidden.nbytes + patches.indices.nbytes + sum(array.nbytes for array in known)
