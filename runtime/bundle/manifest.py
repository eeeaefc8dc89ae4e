"""`vtx.json`, the manifest of a bundle: what is in it, declared once and read strictly."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, TypeVar, cast

from vtx.runtime.bundle.image_settings import ImageSettings
from vtx.runtime.bundle.names import DIALECTS, kv_type
from vtx.runtime.bundle.safetensors import parse_json
from vtx.runtime.bundle.text_settings import TextSettings
from vtx.runtime.errors import BundleError

FORMAT = 2
MAX_BYTES = 4 << 20
MAX_LAYERS = 512
KV_BYTES = {"float32": 4, "float16": 2, "int8": 1}
KV_SCALES = "kv_scales.safetensors"  # beside int8 K and V
PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int4")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of the model, as the runtime needs them."""

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    vision_tokens: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not 1 <= value < 1 << 31:
                raise BundleError(f"vtx.json: model.{field.name} is {value}, outside 1..2147483647; export again")
        if self.layers > MAX_LAYERS:
            raise BundleError(f"vtx.json: {self.layers} layers, the limit is {MAX_LAYERS}; export again")
        if self.heads % self.kv_heads:
            raise BundleError(
                f"vtx.json: {self.heads} heads cannot share {self.kv_heads} key/value heads evenly; export again"
            )


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One graph of layers `first` to `last`, both counted from 1 and included; `query`: it gives the last one's q."""

    first: int
    last: int
    graph: str
    query: bool = False

    @property
    def layers(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True)
class GateSpec:
    """The gate that is asked before layer `k`, on the question's rows there."""

    k: int
    graph: str


@dataclass(frozen=True, slots=True)
class Graphs:
    """Files of the graphs of one dialect, relative to the bundle.

    `score` is there where a stage gives its queries. `vision_merges`: the vision graph takes the threshold of window
    merging, one image at a time; `vision_attention`: it says what the class token looks at in the tower's last block in
    use; `vision_last_attention`: in its very last block.
    """

    vision: str
    embed: str
    head: str
    stages: tuple[StageSpec, ...]
    gates: tuple[GateSpec, ...]
    score: str | None = None
    vision_merges: bool = False
    vision_attention: bool = False
    vision_last_attention: bool = False

    def __post_init__(self) -> None:
        if any(stage.query for stage in self.stages) != (self.score is not None):
            raise BundleError("vtx.json: stages that give queries and a score graph go together; export again")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and SHA-256 of one file of the bundle."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a runtime must know of a bundle before it opens another file of it.

    `variants` are the prebuilt K in rising order and `default_k` the one used when none is asked for
    (None: no withdrawal; "auto": the gates decide). `reductions` are the words of the methods that it was
    exported for, the first one used when none is asked for. `kv_dtype` is numpy's word for the type of K and V.
    `files` covers every file of the bundle but the manifest. `record` says how the bundle was made and is
    not interpreted.
    """

    format: int
    vtx: str
    model: ModelSpec
    precision: str
    vision_precision: str
    head_precision: str
    kv_dtype: str
    max_context: int
    variants: tuple[int, ...]
    default_k: int | str | None
    reductions: tuple[str, ...]
    dialects: dict[str, Graphs]
    rope: str
    golden: str
    image: ImageSettings
    text: TextSettings
    files: dict[str, FileRecord]
    record: dict[str, Any]

    def __post_init__(self) -> None:
        parts = self.precision, self.vision_precision, self.head_precision
        if self.kv_dtype not in KV_BYTES or not set(parts) <= set(PRECISIONS):
            raise BundleError(
                f"vtx.json: precision {', '.join(parts)} with KV type {self.kv_dtype!r} is unknown to this vtx; "
                'upgrade it with pip install -U "vtx-edge"'
            )
        if not 1 <= self.max_context < 1 << 24:
            raise BundleError(f"vtx.json: max_context {self.max_context} is outside 1..16777215; export again")
        if self.model.vision_tokens >= self.max_context:
            raise BundleError(
                f"vtx.json: an image of {self.model.vision_tokens} tokens does not fit max_context {self.max_context}; "
                "export again"
            )
        if "ort" not in self.dialects:
            raise BundleError("vtx.json: the bundle holds no graphs of the 'ort' dialect; export again")
        for name, dialect in self.dialects.items():
            if name not in DIALECTS:
                raise BundleError(
                    f'vtx.json: dialect {name!r} is unknown to this vtx; upgrade it with pip install -U "vtx-edge"'
                )
            self._check_stages(dialect.stages)
        self._check_files()

    def _check_stages(self, stages: tuple[StageSpec, ...]) -> None:
        spans = [(s.first, s.last) for s in stages]
        starts = [first for first, _ in spans]
        cuts = [1, *starts[1:], self.model.layers + 1]
        sound = spans == [(a, b - 1) for a, b in pairwise(cuts)] and cuts == sorted(set(cuts))
        missing, further = set(self.variants) - set(starts[1:]), set(starts[1:]) - set(self.variants)
        rising = [*self.variants] == sorted(set(self.variants))
        if not sound or not rising or missing or (further and not self.reductions) or stages[-1].query:
            raise BundleError(
                f"vtx.json: stages {spans} do not cut {self.model.layers} layers at K = {list(self.variants)} "
                f"and for the reductions {list(self.reductions)}; export again"
            )
        gated = {gate.k for graphs in self.dialects.values() for gate in graphs.gates}
        known = {None, *self.variants, *(["auto"] if gated else [])}
        if self.default_k not in known or not gated <= set(self.variants):
            raise BundleError(
                f"vtx.json: default_k {self.default_k!r} and gates at {sorted(gated)} do not fit the variants "
                f"{list(self.variants)}; export again"
            )

    def _check_files(self) -> None:
        for name in self.files:
            check_inside(name)
        used = [self.rope, self.golden, "tokenizer.json", "chat_template.jinja"]
        used += [KV_SCALES] if self.kv_dtype == "int8" else []
        for graphs in self.dialects.values():
            used += [graphs.vision, graphs.embed, graphs.head]
            used += [*(s.graph for s in graphs.stages), *(g.graph for g in graphs.gates)]
            used += [graphs.score] if graphs.score else []
        for name in used:
            if name not in self.files:
                raise BundleError(f"vtx.json: {name!r} has no checksum in 'files'; export again")

    def kv_slot_bytes(self, dialect: str = "ort") -> int:
        """Bytes of one KV slot of one layer in a dialect's graphs: K and V of all key/value heads."""
        return 2 * self.model.kv_heads * self.model.head_dim * KV_BYTES[kv_type(dialect, self.kv_dtype)]

    def to_json(self) -> str:
        return json.dumps(_plain(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read a manifest. Unknown, missing or mistyped keys, and newer formats, are BundleErrors."""
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        data = parse_json(raw, "vtx.json", error=BundleError)
        if not isinstance(data, dict):
            raise BundleError("vtx.json is not a JSON object; the bundle is damaged, export again")
        version = data.get("format")
        if not isinstance(version, int) or isinstance(version, bool):
            raise BundleError(f"vtx.json: format is {version!r}, not a number; the bundle is damaged, export again")
        if version != FORMAT:
            side, cure = ("newer", 'pip install -U "vtx-edge"') if version > FORMAT else ("older", "export it again")
            raise BundleError(f"the bundle has format {version}, {side} than this vtx reads ({FORMAT}); {cure}")
        return _read(cls, data, "vtx.json")


def check_inside(name: str) -> None:
    """Raise BundleError unless `name` is a plain relative path that stays inside the bundle."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or "\0" in name:
        raise BundleError(f"vtx.json: the path {name!r} leaves the bundle; do not use this bundle")


def _plain(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple | list) else value


def _read(kind: type[T], data: Any, where: str) -> T:
    """`data` as the dataclass `kind`, every key and type checked."""
    if not isinstance(data, dict):
        raise BundleError(f"{where} is {type(data).__name__}, not an object; export again")
    if hasattr(kind, "from_dict"):
        return cast(T, cast(Any, kind).from_dict(data))
    fields = typing.get_type_hints(kind)
    unknown, missing = sorted(set(data) - set(fields)), sorted(set(fields) - set(data))
    if unknown or missing:
        what = f"unknown key {unknown[0]!r}" if unknown else f"key {missing[0]!r} is missing"
        raise BundleError(f"{where}: {what}; the bundle was altered or made by another vtx, export again")
    return kind(**{name: _value(hint, data[name], f"{where}: {name}") for name, hint in fields.items()})


def _value(hint: Any, data: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(data, list):
        return tuple(_value(args[0], item, where) for item in data)
    if origin is dict and isinstance(data, dict):
        return {key: _value(args[1], item, f"{where}.{key}") for key, item in data.items()}
    if origin is types.UnionType and type(data) in args:
        return data
    if dataclasses.is_dataclass(hint):
        return _read(cast(type, hint), data, where)
    if hint is Any or (isinstance(hint, type) and type(data) is hint):
        return data
    raise BundleError(f"{where} is {str(data)[:60]!r}, not {getattr(hint, '__name__', hint)}; export again")
