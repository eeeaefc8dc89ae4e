"""A question in CLIP's text tower: its own ids, in segments, and one vector a segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.spec.model_spec import TextTowerSpec
from vtx.runtime.errors import BundleError
from vtx.runtime.prompt.text import MAX_TOKENIZER_BYTES, utf8
from vtx.runtime.prompt.tokenizer import encode, parse_tokenizer

Embeddings = NDArray[np.float32]
Run = Callable[[NDArray[np.int64]], Embeddings]


class TextTower:
    """The tokenizer of a bundle's text tower, read by `read(name, limit)`, and its graph; safe for many threads.

    Raises BundleError.
    """

    def __init__(self, read: Callable[[str, int], bytes], spec: TextTowerSpec, run: Run) -> None:
        text = utf8(read(spec.tokenizer, MAX_TOKENIZER_BYTES), spec.tokenizer, BundleError)
        self._tokenizer = parse_tokenizer(text, BundleError)
        self._spec = spec
        self._run = run
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._last: tuple[str, Embeddings] | None = None  # a chat asks for its first question at every turn

    def embed(self, text: str) -> Embeddings:
        """One vector [width] for each segment of the text, [segments, width].

        Raises RequestError if the tokenizer cannot encode the text; BundleError if its ids are not the tower's.
        """
        last = self._last
        if last is None or last[0] != text:
            spec = self._spec
            ids = list(encode(self._tokenizer, text, add_special_tokens=True).ids)
            if not ids or max(ids) >= spec.vocab:
                raise BundleError(
                    f"{spec.tokenizer} gives token {max(ids, default=None)}, the text tower has {spec.vocab:,} tokens, "
                    "numbered from 0; export again with the tokenizer that belongs to it"
                )
            segments = [ids[start : start + spec.max_tokens] for start in range(0, len(ids), spec.max_tokens)]
            # Later ids are hidden from the pooled one.
            inputs = [np.array(ids[: pooled(ids, spec.end_id) + 1], np.int64) for ids in segments]
            last = self._last = text, np.concatenate([self._run(ids) for ids in inputs])
        return last[1]


def pooled(ids: Sequence[int], end_id: int | None) -> int:
    """The index of the pooled id: the first end token, else the first token; without an end token the highest id."""
    if end_id is None:
        return ids.index(max(ids))
    return ids.index(end_id) if end_id in ids else 0
