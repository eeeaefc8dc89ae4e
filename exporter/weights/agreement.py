"""Checkpoints whose weights disagree with their configuration, and are exported nevertheless."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from vtx.exporter.checkpoint.config import TextConfig
from vtx.exporter.checkpoint.loader import Checkpoint
from vtx.runtime.bundle.safetensors import read_bits
from vtx.runtime.bundle.spec.stored import EMBEDDING

HEAD = "head.weight"
UNTIED = (
    "config.json ties the head to the embeddings, but the weights hold a head with other values; the model's own head "
    "is exported, as transformers 5 computes (4 tied them)"
)
_ROWS = 4096  # compared at a time
_BUFFERS = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")  # saved by old releases of transformers


def with_own_head(text: TextConfig, checkpoint: Checkpoint) -> TextConfig:
    """The decoder's configuration, not tied if the weights hold a head that differs from the embeddings.

    Raises CheckpointError if a tensor cannot be read.
    """
    head, table = checkpoint.tensors.get(HEAD), checkpoint.tensors.get(EMBEDDING)
    if not text.tied or head is None or table is None:
        return text
    same = (head.dtype, head.shape) == (table.dtype, table.shape) and len(head.shape) == 2
    for start in range(0, head.shape[0], _ROWS) if same else ():
        block = slice(start, min(start + _ROWS, head.shape[0]))
        ours, theirs = (read_bits(info, block).view(np.uint8) for info in (head, table))
        if not np.array_equal(ours, theirs):
            return replace(text, tied=False)
    return text if same else replace(text, tied=False)


def unused_weights(checkpoint: Checkpoint, needed: Iterable[str], *, tied: bool) -> str | None:
    """A warning if the decoder or the projector has weights that the configuration lacks, else None.

    Towers are excluded: layers after the last used one, and pooling heads, are normal there.
    """
    known = {*needed, *((HEAD,) if tied else ())}
    parts = ("text.", "projector.", "head.")
    unused = sorted(
        name
        for name in checkpoint.tensors
        if name.startswith(parts) and name not in known and not name.endswith(_BUFFERS)
    )
    if not unused:
        return None
    shown = ", ".join(unused[:3]) + ", ..." * (len(unused) > 3)
    return (
        f"config.json does not account for {shown} ({len(unused)} in total), so they are not exported, as transformers "
        "does not load them; if they matter, correct config.json, or merge their adapter"
    )
