"""The work directory of gate training: shards of measurements, guarded by a fingerprint.

The items of a shard are fixed beforehand, so any process that measures a shard writes the same file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.calibration.source import OpenedModel
from vtx.runtime.bundle.safetensors import parse_json, read_bits, read_header, write_safetensors
from vtx.runtime.errors import RequestError, VtxError
from vtx.runtime.strict import Strict
from vtx.tools.common.files import read_json_object
from vtx.tools.data.items import MAX_SKIPPED, Item

FORMAT = "2"
MAX_WORK = 1 << 16  # bytes of work.json
STRICT = Strict(RequestError, "name another --work, or remove it")
Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """Settings of the measurement. `answers` are the model's own greedy ones, or the data's.

    `batch` items are measured together and make one shard; own answers need their KV cache in memory.
    """

    answers: Literal["own", "reference"] = "own"
    max_new_tokens: int = 64
    batch: int = 8

    def __post_init__(self) -> None:
        if self.answers not in ("own", "reference"):
            raise RequestError(f"--answers is {self.answers!r}; it must be own or reference")
        if self.max_new_tokens < 1 or self.batch < 1:
            raise RequestError(
                f"--max-new-tokens is {self.max_new_tokens} and --batch {self.batch}; both must be at least 1"
            )


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive items, numbered `numbers` among all items; held out from training or not."""

    number: int
    held_out: bool
    numbers: tuple[int, ...]
    items: tuple[Item, ...]

    @property
    def name(self) -> str:
        return f"{'held-out' if self.held_out else 'train'}-{self.number:05d}.safetensors"


def make_shards(items: Sequence[Item], batch: int, *, held_out: bool, first: int = 0) -> list[Shard]:
    return [
        Shard(n, held_out, tuple(range(first + at, first + at + len(part))), part)
        for n, at in enumerate(range(0, len(items), batch))
        if (part := tuple(items[at : at + batch]))
    ]


class WorkDirectory:
    """A directory of measurements, guarded by a fingerprint of model, data and options. Raises RequestError."""

    def __init__(self, folder: Path, source: OpenedModel, options: MeasureOptions, shards: Sequence[Shard]) -> None:
        self.folder = folder
        self.shards = tuple(shards)
        self.skipped: dict[str, list[str]] = {}
        identity = {
            "model": _digest(source.identity),
            "data": _digest([[shard.name, *(item.digest() for item in shard.items)] for shard in shards]),
            "options": _digest([FORMAT, options.answers, options.max_new_tokens, options.batch]),
        }
        self.fingerprint = _digest(identity)
        path = folder / "work.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_text(json.dumps(identity), encoding="utf-8")
            record = read_json_object(path, MAX_WORK, error=RequestError)
        except (OSError, VtxError) as e:
            raise RequestError(f"cannot use {folder} as the work directory ({e}); name another --work") from e
        different = [name for name, value in identity.items() if record.get(name) != value]
        if different:
            raise RequestError(
                f"{folder} holds measurements that differ in {' and '.join(different)}; "
                "name another --work, or remove it"
            )

    def missing(self) -> list[Shard]:
        """The shards still to measure; damaged ones are removed and count as missing."""
        return [shard for shard in self.shards if not self._is_whole(shard)]

    def write(self, shard: Shard, tensors: Tensors, skipped: Sequence[str]) -> None:
        """Write a shard atomically. Raises `RequestError` when too many items cannot be measured."""
        metadata = {"fingerprint": self.fingerprint, "skipped": json.dumps(list(skipped))}
        write_safetensors(self.folder / shard.name, dict(sorted(tensors.items())), metadata)
        self.skipped[shard.name] = list(skipped)
        total = sum(len(shard.items) for shard in self.shards)
        lines = self.all_skipped
        if len(lines) > MAX_SKIPPED * total:
            raise RequestError(
                f"{len(lines)} of {total} items cannot be measured, the limit is {MAX_SKIPPED:.0%}; fix the data. "
                f"First: {lines[0]}"
            )

    def read(self, name: str, *, held_out: bool) -> NDArray[Any]:
        """One tensor over all shards [items, ...], of the held-out items or of the others."""
        parts = []
        for shard in self.shards:
            if shard.held_out == held_out:
                tensors = read_header(self.folder / shard.name, error=RequestError).tensors
                if name in tensors:
                    parts.append(read_bits(tensors[name], error=RequestError))
        if not parts:
            raise RequestError(f"no item of {self.folder} could be measured, and at least 1 is needed; fix the data")
        return np.concatenate(parts)

    def items(self, *, held_out: bool) -> list[Item]:
        """The measured items, in the order of `read`."""
        numbered = {n: item for shard in self.shards for n, item in zip(shard.numbers, shard.items, strict=True)}
        return [numbered[n] for n in self.read("item", held_out=held_out).tolist()]

    @property
    def all_skipped(self) -> list[str]:
        return [line for shard in self.shards for line in self.skipped.get(shard.name, [])]

    def _is_whole(self, shard: Shard) -> bool:
        path = self.folder / shard.name
        if not path.exists():
            return False
        with suppress(VtxError, KeyError):
            header = read_header(path, error=RequestError)
            if header.metadata.get("fingerprint") == self.fingerprint:
                skipped = parse_json(header.metadata["skipped"].encode(), shard.name, error=RequestError)
                self.skipped[shard.name] = [*STRICT.value(tuple[str, ...], skipped, shard.name)]
                return True
        with suppress(OSError):
            path.unlink()
        return False


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
