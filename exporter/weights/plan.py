"""The plan of a bundle's weights: the file, the form and the offset of each tensor.

A source file whose tensors all are needed and have the right dtype is used whole; any other is rewritten tensor by
tensor, without what no graph uses. The plan needs no weights, so graphs can be built first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path

import numpy as np

from vtx.exporter.checkpoint.loader import Checkpoint
from vtx.exporter.checkpoint.quantised.matrix import Matrix
from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.runtime.bundle.safetensors import TensorInfo, layout, read_bits, read_header
from vtx.runtime.bundle.spec.stored import EMBEDDING, HEAD, SCALES, ZEROS, Precisions, Scheme, multiplied, part_of
from vtx.runtime.precision import STORED

WHOLE = ".safetensors"  # pickled files are never used whole
# Matrices of one module that are multiplied by the same inputs.
SAME_INPUTS = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"), **dict.fromkeys(("gate_proj", "up_proj"), "ffn")}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of one weight: `file` is relative to the bundle, `dtype` a safetensors dtype.

    A quantised matrix [out, in] is I8, or I4 with two to a byte, and has float16 `scales` [out, blocks of a row]; one
    that is not symmetric also has `zeros` [out, blocks], I8, or U8 with two to a byte.
    """

    file: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    scales: StoredTensor | None = None
    zeros: StoredTensor | None = None


def adjoining(tensors: Sequence[StoredTensor]) -> StoredTensor | None:
    """The rows of several tensors as one, if they lie side by side in a file; None if not."""
    for before, after in pairwise(tensors):
        if (after.file, after.offset) != (before.file, before.offset + before.nbytes):
            return None
    return _joined(tensors)  # so are their scales and zero points


def _joined(tensors: Sequence[StoredTensor]) -> StoredTensor:
    rows = sum(tensor.shape[0] for tensor in tensors)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    scales = [tensor.scales for tensor in tensors if tensor.scales is not None]
    zeros = [tensor.zeros for tensor in tensors if tensor.zeros is not None]
    return replace(
        tensors[0],
        nbytes=nbytes,
        shape=(rows, *tensors[0].shape[1:]),
        scales=_joined(scales) if scales else None,
        zeros=_joined(zeros) if zeros else None,
    )


@dataclass(frozen=True, slots=True)
class Form:
    """The storage of a tensor in a bundle: `dtype`, and the scheme of a quantised matrix.

    `matrix`: the codes and scales are the checkpoint's.
    """

    dtype: str
    scheme: Scheme | None = None
    matrix: Matrix | None = None

    @property
    def zero_bits(self) -> int:
        """Those of the zero point of each block of the matrix, 0 if there is none."""
        if self.matrix is not None:
            return 8 * self.matrix.zeroed
        return self.scheme.zero_bits if self.scheme is not None else 0


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """One tensor to copy from `source` in the form `form`.

    `parts`: the tensors that are written: the weights, and of a quantised matrix the scales, and zero points if it has
    any. Its values are multiplied by `factor`, then `shift` is added.
    """

    name: str
    source: TensorInfo
    form: Form
    parts: tuple[TensorInfo, ...]
    factor: float = 1.0
    shift: float = 0.0

    @property
    def end(self) -> int:
        last = self.parts[-1]
        return last.offset + last.nbytes

    def stored(self, file: str) -> StoredTensor:
        """Its location in `file`."""
        weights = self.parts[0]
        shape = self.source.shape
        further = [StoredTensor(file, part.offset, part.nbytes, part.dtype, part.shape) for part in self.parts[1:]]
        return StoredTensor(file, weights.offset, weights.nbytes, self.form.dtype, shape, *further)


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
    def groups(self) -> list[list[WeightEntry]]:
        """The entries that are written together: their integers, then their scales, then their zero points."""
        groups = list[list[WeightEntry]]()
        end = -1
        for entry in self.entries:
            if not groups or entry.parts[0].offset == end:
                groups.append([])
            groups[-1].append(entry)
            end = max(end, entry.end)
        return groups

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
    checkpoint: Checkpoint,
    needed: Iterable[tuple[str, tuple[int, ...]]],
    precisions: Precisions,
    scaled: AbstractSet[str] = frozenset(),
) -> WeightPlan:
    """Check that every needed tensor exists in its shape, and lay out the files.

    A file that holds one of the tensors `scaled`, whose values will change, is not used whole. Raises CheckpointError.
    """
    by_source: dict[Path, list[tuple[str, TensorInfo]]] = {}
    for name, shape in needed:
        info = checkpoint.require(name, shape)
        by_source.setdefault(info.file, []).append((name, info))
    files = []
    stored = dict[str, StoredTensor]()
    for number, (source, tensors) in enumerate(sorted(by_source.items()), 1):
        name = f"weights/{number:05d}-of-{len(by_source):05d}.safetensors"
        forms = [form_of(tensor, info, checkpoint, precisions, changed=tensor in scaled) for tensor, info in tensors]
        if scaled.isdisjoint(tensor for tensor, _ in tensors) and _stays(source, tensors, forms, checkpoint):
            entries = tuple(WeightEntry(tensor, info, Form(info.dtype), (info,)) for tensor, info in tensors)
            files.append(WeightFile(name, source, entries, None, source.stat().st_size))
        else:
            header, entries = _laid_out(name, tensors, forms, checkpoint)
            files.append(WeightFile(name, source, entries, header, entries[-1].end))
        stored |= {entry.name: entry.stored(name) for entry in entries}
    return WeightPlan(tuple(files), stored)


def _stays(
    source: Path, tensors: Sequence[tuple[str, TensorInfo]], forms: Sequence[Form], checkpoint: Checkpoint
) -> bool:
    """True if a file holds these tensors in these forms, and nothing else."""
    if source.suffix != WHOLE or any(info.dtype != form.dtype for (_, info), form in zip(tensors, forms, strict=True)):
        return False
    if {info.name for _, info in tensors} != read_header(source).tensors.keys():
        return False
    return not any(info.moved or checkpoint.factor(name) != 1 or checkpoint.shift(name) for name, info in tensors)


def form_of(
    name: str, info: TensorInfo, checkpoint: Checkpoint, precisions: Precisions, *, changed: bool = False
) -> Form:
    """The storage of a checkpoint's tensor; a quantised matrix stays as it is where it can, unless it is `changed`."""
    if checkpoint.shift(name):
        return Form("F32")
    form = Form(*precisions.stored(name, info.shape, info.dtype))
    matrix = info.source
    if not isinstance(matrix, Matrix) or matrix.scheme is None:
        return form
    same_form = form.scheme is not None and form.dtype == matrix.scheme.dtype
    if (
        changed
        or info.transposed
        or not (same_form or (part_of(name) in precisions.own and multiplied(name, info.shape)))
    ):
        return form
    return Form(matrix.scheme.dtype, matrix.scheme, matrix)


def own_precisions(checkpoint: Checkpoint) -> dict[str, str]:
    """The precision of the integers of quantised matrices, by the part that they belong to."""
    schemes = ((name, getattr(info.source, "scheme", None)) for name, info in checkpoint.tensors.items())
    return {part_of(name): STORED[scheme.dtype].name for name, scheme in schemes if scheme}


def quantised_note(plan: WeightPlan) -> str | None:
    """A line about the matrices of a quantised checkpoint, None for any other."""
    forms = [entry.form for file in plan.files for entry in file.entries if isinstance(entry.source.source, Matrix)]
    counts = Counter(
        f"{'keep their integers and scales,' if form.matrix else 'are dequantised and stored as'} "
        f"{STORED[form.dtype].name}"
        for form in forms
    )
    parts = [f"{count} matrices {state}" for state, count in counts.items()]
    return f"the checkpoint is quantised: {', '.join(parts)}" if parts else None


def _laid_out(
    file: str, tensors: list[tuple[str, TensorInfo]], forms: list[Form], checkpoint: Checkpoint
) -> tuple[bytes, tuple[WeightEntry, ...]]:
    """The header of a rewritten file and its entries; a matrix's scales and zero points follow its integers.

    Those of matrices that are multiplied by the same inputs follow the integers of the last of them.
    """
    together = dict[Hashable, list[tuple[str, TensorInfo, Form]]]()
    for (name, info), form in zip(tensors, forms, strict=True):
        together.setdefault(_group(name, form), []).append((name, info, form))
    ordered = [tensor for group in together.values() for tensor in group]
    specs = {name: _specs(name, info.shape, form) for name, info, form in ordered}
    parts = [zip(*(specs[name] for name, _, _ in group), strict=True) for group in together.values()]
    header, targets = layout(Path(file), chain.from_iterable(chain.from_iterable(parts)))
    places = {target.name: target for target in targets}
    entries = []
    for name, info, form in ordered:
        own = tuple(places[part] for part, _, _ in specs[name])
        entries.append(WeightEntry(name, info, form, own, checkpoint.factor(name), checkpoint.shift(name)))
    return header, tuple(entries)


def _group(name: str, form: Form) -> Hashable:
    """A key of the matrices that lie side by side, so that engines may read them as one; the name of any other."""
    module, _, matrix = name.removesuffix(".weight").rpartition(".")
    if form.scheme is None or matrix not in SAME_INPUTS:
        return name
    return module, SAME_INPUTS[matrix], form.dtype, form.scheme, form.zero_bits


def _specs(name: str, shape: tuple[int, ...], form: Form) -> Sequence[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor that is written for one of a checkpoint."""
    if form.scheme is None:
        return [(name, form.dtype, shape)]
    rows, width = shape
    blocks = rows, form.scheme.scales(width)
    specs = [(name, form.scheme.held, (rows, form.scheme.nbytes(width))), (name + SCALES, "F16", blocks)]
    if form.zero_bits == 4:
        specs.append((name + ZEROS, "U8", (rows, blocks[1] // 2)))
    elif form.zero_bits:
        specs.append((name + ZEROS, "I8", blocks))
    return specs


UNTIED = (
    "config.json ties the head to the embeddings, but the weights hold a head with other values; the model's own head "
    "is exported, as transformers 5 computes (4 tied them)"
)
_ROWS = 4096  # compared at a time
_BUFFERS = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")  # saved by old releases of transformers


def with_own_head(text: TextConfig, checkpoint: Checkpoint) -> TextConfig:
    """The decoder's configuration, not tied if the weights hold a head that differs from the embeddings."""
    head = checkpoint.tensors.get(HEAD)
    table = checkpoint.tensors.get(EMBEDDING)
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
    used_names = {*needed, *((HEAD,) if tied else ())}
    parts = ("text.", "projector.", "head.")
    unused = sorted(
        name
        for name in checkpoint.tensors
        if name.startswith(parts) and name not in used_names and not name.endswith(_BUFFERS)
    )
    if not unused:
        return None
    listed = ", ".join(unused[:3]) + ", ..." * (len(unused) > 3)
    return (
        f"config.json does not account for {listed} ({len(unused)} in total), so they are not exported, as "
        "transformers does not load them; if they matter, correct config.json, or merge their adapter"
    )
