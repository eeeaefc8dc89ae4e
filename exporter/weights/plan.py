"""The plan of a bundle's weights: the file, the form and the offset of each tensor.

A source file whose tensors all are needed and have the right dtype is used whole; any other is rewritten tensor by
tensor, without what no graph uses. The plan needs no weights, so graphs can be built first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vtx.exporter.checkpoint.loader import Checkpoint
from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.runtime.bundle.safetensors import TensorInfo, layout, read_bits, read_header
from vtx.runtime.bundle.spec.stored import EMBEDDING, HEAD, Precisions, Scheme

WHOLE = ".safetensors"  # pickled files are never used whole


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of one weight: `file` is relative to the bundle, `dtype` a safetensors dtype.

    A quantised matrix [out, in] is I8, or I4 with two to a byte, and has float16 `scales` [out, blocks of a row].
    """

    file: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    scales: StoredTensor | None = None


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """One tensor to copy from `source` to `target` as `dtype` ("I8" and "I4" with a scheme and `scales`).

    Its values are multiplied by `factor`, then `shift` is added.
    """

    name: str
    source: TensorInfo
    dtype: str
    target: TensorInfo
    scheme: Scheme | None = None
    scales: TensorInfo | None = None
    factor: float = 1.0
    shift: float = 0.0

    @property
    def end(self) -> int:
        last = self.scales or self.target
        return last.offset + last.nbytes


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file to write: `entries` in order, from `source`. `header` is None if the source is used whole."""

    name: str
    source: Path
    entries: tuple[WeightEntry, ...]
    header: bytes | None
    size: int

    @property
    def whole(self) -> bool:
        return self.header is None

    @property
    def work(self) -> int:
        return self.size if self.whole else sum(entry.source.nbytes for entry in self.entries)


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """All files, and the location of each tensor in them, by canonical name."""

    files: tuple[WeightFile, ...]
    stored: Mapping[str, StoredTensor]

    @property
    def parameters(self) -> int:
        return sum(int(np.prod(t.shape)) for t in self.stored.values())


def plan_weights(
    checkpoint: Checkpoint, needed: Iterable[tuple[str, tuple[int, ...]]], precisions: Precisions,
    scaled: Collection[str] = (),
) -> WeightPlan:  # fmt: skip
    """Check that every needed tensor exists in its shape, and lay out the files.

    A file that holds one of the tensors `scaled`, whose values will change, is not used whole. Raises CheckpointError.
    """
    by_source: dict[Path, list[tuple[str, TensorInfo]]] = {}
    for name, shape in needed:
        info = checkpoint.require(name, shape)
        by_source.setdefault(info.file, []).append((name, info))
    files, stored = [], dict[str, StoredTensor]()
    for number, (source, tensors) in enumerate(sorted(by_source.items()), 1):
        name = f"weights/{number:05d}-of-{len(by_source):05d}.safetensors"
        forms = [
            ("F32", None) if checkpoint.shift(tensor) else precisions.stored(tensor, info.shape, info.dtype)
            for tensor, info in tensors
        ]
        if (
            source.suffix == WHOLE
            and all(info.dtype == dtype for (_, info), (dtype, _) in zip(tensors, forms, strict=True))
            and {info.name for _, info in tensors} == read_header(source).tensors.keys()
            and not any(
                tensor in scaled or info.moved or checkpoint.factor(tensor) != 1 or checkpoint.shift(tensor)
                for tensor, info in tensors
            )
        ):
            entries = tuple(WeightEntry(tensor, info, info.dtype, info) for tensor, info in tensors)
            files.append(WeightFile(name, source, entries, None, source.stat().st_size))
        else:
            header, entries = _laid_out(name, tensors, forms, checkpoint)
            files.append(WeightFile(name, source, entries, header, entries[-1].end))
        for entry in entries:
            target, scales = entry.target, entry.scales
            parts = StoredTensor(name, scales.offset, scales.nbytes, "F16", scales.shape) if scales else None
            shape = entry.source.shape
            stored[entry.name] = StoredTensor(name, target.offset, target.nbytes, entry.dtype, shape, parts)
    return WeightPlan(tuple(files), stored)


def _laid_out(
    file: str, tensors: list[tuple[str, TensorInfo]], forms: list[tuple[str, Scheme | None]],
    checkpoint: Checkpoint,
) -> tuple[bytes, tuple[WeightEntry, ...]]:  # fmt: skip
    """The header of a rewritten file and its entries; a matrix's scales come right after its integers."""
    specs: list[tuple[str, str, tuple[int, ...]]] = []
    for (name, info), (dtype, scheme) in zip(tensors, forms, strict=True):
        if scheme is None:
            specs.append((name, dtype, info.shape))
        else:
            rows, width = info.shape
            specs.append((name, scheme.held, (rows, scheme.nbytes(width))))
            specs.append((f"{name}.scales", "F16", (rows, scheme.scales(width))))
    header, targets = layout(Path(file), specs)
    by_name = {target.name: target for target in targets}
    entries = list[WeightEntry]()
    for (name, info), (dtype, scheme) in zip(tensors, forms, strict=True):
        scales, factor, shift = by_name.get(f"{name}.scales"), checkpoint.factor(name), checkpoint.shift(name)
        entries.append(WeightEntry(name, info, dtype, by_name[name], scheme, scales if scheme else None, factor, shift))
    return header, tuple(entries)


UNTIED = (
    "config.json ties the head to the embeddings, but the weights hold a head with other values; the model's own head "
    "is exported, as transformers 5 computes (4 tied them)"
)
_ROWS = 4096  # compared at a time
_BUFFERS = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")  # saved by old releases of transformers


def with_own_head(text: TextConfig, checkpoint: Checkpoint) -> TextConfig:
    """The decoder's configuration, not tied if the weights hold a head that differs from the embeddings."""
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
