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
        self.bytes, self.hits, self.misses = 0, 0, 0
        self._tokens = OrderedDict[Hashable, ImageTokens]()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> ImageTokens | None:
        """The tokens of an image, None where they are not kept."""
        with self._lock:
            tokens = self._tokens.get(key)
            if tokens is None:
                self.misses += 1
                return None
            self._tokens.move_to_end(key)
            self.hits += 1
            return tokens

    def put(self, key: Hashable, tokens: ImageTokens) -> None:
        """Keep an image's tokens; one that alone exceeds the limit is not kept."""
        with self._lock:
            if key in self._tokens or nbytes(tokens) > self.limit_bytes:
                return
            self._tokens[key] = tokens
            self.bytes += nbytes(tokens)
            while self.bytes > self.limit_bytes:
                self.bytes -= nbytes(self._tokens.popitem(last=False)[1])


def nbytes(tokens: ImageTokens) -> int:
    """Bytes of an image's tokens and of what is known of their patches."""
    patches = tokens.patches
    signals = sum(signal.nbytes for signal in patches.signals.values())
    return tokens.rows.nbytes + patches.indices.nbytes + signals
