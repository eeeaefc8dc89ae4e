"""Where a checkpoint holds other weights than its configuration states, and is exported nevertheless."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from vtx.exporter.checkpoint.config import TextConfig
from vtx.exporter.checkpoint.loader import Checkpoint
from vtx.runtime.bundle.safetensors import TensorInfo, read_bits
from vtx.runtime.bundle.spec.stored import EMBEDDING

HEAD = "head.weight"
UNTIED = (
    "config.json ties the head to the embeddings, but the weights hold a head with other values; the model's own head "
    "is exported, as transformers 5 computes (4 tied them)"
)
_ROWS = 4096  # compared at a time
_BUFFERS = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")  # that releases of transformers once saved


def with_own_head(text: TextConfig, checkpoint: Checkpoint) -> TextConfig:
    """The decoder's configuration, not tied where the weights hold a head other than the embeddings.

    Raises:
        CheckpointError: a tensor cannot be read.

    """
    head, table = checkpoint.tensors.get(HEAD), checkpoint.tensors.get(EMBEDDING)
    if not text.tied or head is None or table is None or _same(head, table):
        return text
    return replace(text, tied=False)


def _same(a: TensorInfo, b: TensorInfo) -> bool:
    """Whether two matrices hold the same bits; read block by block, up to the first that differs."""
    if (a.dtype, a.shape) != (b.dtype, b.shape) or len(a.shape) != 2:
        return False
    blocks = (slice(start, min(start + _ROWS, a.shape[0])) for start in range(0, a.shape[0], _ROWS))
    return all(np.array_equal(read_bits(a, rows).view(np.uint8), read_bits(b, rows).view(np.uint8)) for rows in blocks)


def unused_weights(checkpoint: Checkpoint, needed: Iterable[str], *, tied: bool) -> str | None:
    """A warning where the decoder or the projector has weights that the configuration does not know; None: none.

    Towers are left out: layers behind the one that is read, and pooling heads, belong there and are not needed.
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
        f"config.json knows nothing of {shown} ({len(unused)} in all), so the export leaves out what transformers "
        "leaves out; if it matters, correct config.json, or merge the adapter that it is of"
    )
