"""The manifest of a bundle: what is in it, declared once; `vtx_json.py` reads and writes it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.model_spec import ModelSpec, TextTowerSpec
from vtx.runtime.bundle.spec.names import CACHE_KINDS, DIALECTS, SLOTTED, kv_type
from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.errors import BundleError
from vtx.runtime.precision import KV_DTYPES, PRECISIONS
from vtx.runtime.strict import optional

FORMAT = 4
MAX_BYTES = 4 << 20
TOKENIZER, TEMPLATE, ROPE, GOLDEN = "tokenizer.json", "chat_template.jinja", "rope.safetensors", "golden.safetensors"
FINAL_NORM = "final_norm.safetensors"  # where a reduction measures hidden states behind the last norm
NEWLINE = "image_newline.safetensors"  # where a layout puts a learned newline among the tokens
KV_SCALES = "kv_scales.safetensors"  # beside int8 K and V


@dataclass(frozen=True, slots=True)
class LayoutSpec:
    """How many tokens an image gives: the layout's name and parameters, and the most tokens of any one image.

    `min_tokens`: those of the smallest image, where images keep their own resolution; the largest then need not fit
    the bundle's context.
    """

    name: str
    max_tokens: int
    parameters: dict[str, Any]
    min_tokens: int | None = optional(None)

    def __post_init__(self) -> None:
        if not 1 <= self.max_tokens < 1 << 31:
            raise BundleError(f"vtx.json: layout.max_tokens is {self.max_tokens}, outside 1..2147483647; export again")
        if self.min_tokens is not None and not 1 <= self.min_tokens <= self.max_tokens:
            raise BundleError(
                f"vtx.json: layout.min_tokens is {self.min_tokens}, outside 1..{self.max_tokens}; export again"
            )

    @property
    def must_fit(self) -> int:
        """Tokens of an image that every context must hold."""
        return self.max_tokens if self.min_tokens is None else self.min_tokens


@dataclass(frozen=True, slots=True)
class VideoSpec:
    """How videos become tokens: their layout, and how a frame's pixels are prepared.

    `own_graph`: frames have a vision graph of their own, with other weights or other tokens than images' have.
    """

    layout: LayoutSpec
    image: ImageSettings
    own_graph: bool

    def __post_init__(self) -> None:
        tokens = self.layout.parameters.get("tokens")  # that a frame's graph gives
        if self.own_graph and (type(tokens) is not int or not 1 <= tokens < 1 << 31):
            raise BundleError(f"vtx.json: video: tokens is {tokens!r:.40}, outside 1..2147483647; export again")


@dataclass(frozen=True, slots=True)
class StageSpec:
    """Layers `first` to `last`, both counted from 1 and included; `query`: it gives the last one's q.

    `inputs` name what it reads of each token beside the hidden state, among the manifest's `token_inputs`. `caches` is
    the kind of each layer's cache, one of `CACHE_KINDS`; empty: all layers keep K and V in slots.
    """

    first: int
    last: int
    query: bool = False
    inputs: tuple[str, ...] = optional(())
    caches: tuple[str, ...] = optional(())

    @property
    def layers(self) -> int:
        return self.last - self.first + 1

    @property
    def cached(self) -> tuple[int, ...]:
        """The layers that keep K and V in slots."""
        layers = range(self.first, self.last + 1)
        kinds = self.caches or (SLOTTED,) * self.layers
        return tuple(layer for layer, kind in zip(layers, kinds, strict=True) if kind == SLOTTED)


@dataclass(frozen=True, slots=True)
class TokenInput:
    """What stages read of each token beside its hidden state: `width` numbers, and which graphs give them."""

    name: str
    width: int
    of_text: bool
    of_images: bool

    def __post_init__(self) -> None:
        if not 1 <= self.width < 1 << 24 or not (self.of_text or self.of_images):
            raise BundleError(
                f"vtx.json: token_inputs: a width of {self.width} must be in 1..16777215 and come from the embedding, "
                "the tower or both; export again"
            )


@dataclass(frozen=True, slots=True)
class Graphs:
    """Files of the graphs of one dialect, relative to the bundle; of the stages and gates in the manifest's order.

    `score` is there where a stage gives its queries. `vision_merges`: the vision graph takes the threshold of window
    merging, one image at a time; `vision_attention`: it says what the class token looks at in the tower's last block in
    use; `vision_last_attention`: in its very last block. `text_tower` is there where the manifest declares one,
    `video` where it declares a graph of frames, but not in `trt`.
    """

    vision: str
    embed: str
    head: str
    stages: tuple[str, ...]
    gates: tuple[str, ...]
    score: str | None = None
    vision_merges: bool = False
    vision_attention: bool = False
    vision_last_attention: bool = False
    text_tower: str | None = None
    video: str | None = optional(None)

    @property
    def all(self) -> tuple[str, ...]:
        """Every file, once."""
        further = tuple(file for file in (self.score, self.text_tower, self.video) if file)
        return self.vision, self.embed, *self.stages, self.head, *self.gates, *further


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and SHA-256 of one file of the bundle."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a runtime must know of a bundle before it opens another file of it.

    `variants` are the prebuilt K in rising order and `default_k` the one used when none is asked for
    (None: no withdrawal; "auto": the gates decide). `reductions` are the specs of the methods that it was
    exported for, the first one used when none is asked for. `stages` cut the decoder, `gates` are the K that have
    one; both hold for every dialect. `token_inputs` are what stages read of a token beside its hidden state.
    `text_tower` is CLIP's, `video` says how videos are seen; None where the bundle
    has no such thing.
    `kv_dtype` is numpy's name of the type of K and V. `files` covers every file of
    the bundle but the manifest. `record` says how the bundle was made and is not interpreted.
    """

    format: int
    vtx: str
    model: ModelSpec
    layout: LayoutSpec
    precision: str
    vision_precision: str
    head_precision: str
    kv_dtype: str
    max_context: int
    variants: tuple[int, ...]
    default_k: int | str | None
    reductions: tuple[str, ...]
    stages: tuple[StageSpec, ...]
    gates: tuple[int, ...]
    dialects: dict[str, Graphs]
    tokenizer: str
    chat_template: str
    rope: str
    golden: str
    kv_scales: str | None
    text_tower: TextTowerSpec | None
    image: ImageSettings
    text: TextSettings
    files: dict[str, FileRecord]
    record: dict[str, Any]
    video: VideoSpec | None = optional(None)
    token_inputs: tuple[TokenInput, ...] = optional(())

    def __post_init__(self) -> None:
        parts = self.precision, self.vision_precision, self.head_precision
        if self.kv_dtype not in KV_DTYPES or not set(parts) <= set(PRECISIONS):
            raise BundleError(
                f"vtx.json: precision {', '.join(parts)} with KV type {self.kv_dtype!r} is unknown to this vtx; "
                'upgrade it with pip install -U "vtx-edge"'
            )
        if not 1 <= self.max_context < 1 << 24:
            raise BundleError(f"vtx.json: max_context {self.max_context} is outside 1..16777215; export again")
        if self.layout.must_fit >= self.max_context:
            raise BundleError(
                f"vtx.json: an image of {self.layout.must_fit} tokens does not fit max_context {self.max_context}; "
                "export again"
            )
        self._check_stages()
        self._check_layers()
        self._check_gates()
        self._check_dialects()
        self._check_files()

    def _check_stages(self) -> None:
        spans = [(s.first, s.last) for s in self.stages]
        starts = [first for first, _ in spans]
        cuts = [1, *starts[1:], self.model.layers + 1]
        sound = spans == [(a, b - 1) for a, b in pairwise(cuts)] and cuts == sorted(set(cuts))
        missing, further = set(self.variants) - set(starts[1:]), set(starts[1:]) - set(self.variants)
        rising = [*self.variants] == sorted(set(self.variants))
        if not sound or not rising or missing or (further and not self.reductions) or self.stages[-1].query:
            raise BundleError(
                f"vtx.json: stages {spans} do not cut {self.model.layers} layers at K = {list(self.variants)} "
                f"and for the reductions {list(self.reductions)}; export again"
            )

    def _check_layers(self) -> None:
        declared = [each.name for each in self.token_inputs]
        if len(set(declared)) != len(declared):
            raise BundleError(f"vtx.json: token_inputs {declared} hold a name twice; export again")
        for stage in self.stages:
            unknown = [name for name in stage.inputs if name not in declared]
            kinds = [kind for kind in stage.caches if kind not in CACHE_KINDS]
            if unknown or len(set(stage.inputs)) != len(stage.inputs):
                raise BundleError(
                    f"vtx.json: stage {stage.first}..{stage.last} reads token inputs {list(stage.inputs)}, the bundle "
                    f"declares {declared}; export again"
                )
            if kinds:
                raise BundleError(
                    f"vtx.json: layers with a cache of the kind {kinds[0]!r} are unknown to this vtx, which has "
                    f'{", ".join(CACHE_KINDS)}; upgrade it with pip install -U "vtx-edge"'
                )
            if (
                len(stage.caches) not in (0, stage.layers)
                or not stage.cached
                or (stage.query and stage.cached[-1] != stage.last)
            ):
                raise BundleError(
                    f"vtx.json: stage {stage.first}..{stage.last} declares caches {list(stage.caches)}; it needs one "
                    "kind a layer, and slots in at least one, the last one where it gives queries; export again"
                )

    def _check_gates(self) -> None:
        known = {None, *self.variants, *(["auto"] if self.gates else [])}
        rising = [*self.gates] == sorted(set(self.gates))
        if self.default_k not in known or not rising or not set(self.gates) <= set(self.variants):
            raise BundleError(
                f"vtx.json: default_k {self.default_k!r} and gates at {list(self.gates)} do not fit the variants "
                f"{list(self.variants)}; export again"
            )

    def _check_dialects(self) -> None:
        if "ort" not in self.dialects:
            raise BundleError("vtx.json: the bundle holds no graphs of the 'ort' dialect; export again")
        for name, graphs in self.dialects.items():
            if name not in DIALECTS:
                raise BundleError(
                    f'vtx.json: dialect {name!r} is unknown to this vtx; upgrade it with pip install -U "vtx-edge"'
                )
            if (len(graphs.stages), len(graphs.gates)) != (len(self.stages), len(self.gates)):
                raise BundleError(
                    f"vtx.json: dialect {name!r} has {len(graphs.stages)} stages and {len(graphs.gates)} gates, "
                    f"the bundle {len(self.stages)} and {len(self.gates)}; export again"
                )
            if (self.text_tower is None) != (graphs.text_tower is None):
                raise BundleError(f"vtx.json: dialect {name!r}: a text tower and its graph go together; export again")
            wanted = self.video is not None and self.video.own_graph and name != "trt"
            if wanted != (graphs.video is not None) or (self.video is None) != (self.text.video_token_id is None):
                raise BundleError(
                    f"vtx.json: dialect {name!r}: videos, their token and their graph go together; export again"
                )
            if any(stage.query for stage in self.stages) != (graphs.score is not None):
                raise BundleError(
                    f"vtx.json: dialect {name!r}: stages that give queries and a score graph go together; export again"
                )

    def _check_files(self) -> None:
        for name in self.files:
            check_inside(name)
        used = [self.tokenizer, self.chat_template, self.rope, self.golden]
        used += [self.kv_scales] if self.kv_scales is not None else []
        used += [self.text_tower.tokenizer] if self.text_tower is not None else []
        for graphs in self.dialects.values():
            used += graphs.all
        for name in used:
            if name not in self.files:
                raise BundleError(f"vtx.json: {name!r} has no checksum in 'files'; export again")
        if (self.kv_scales is None) == KV_DTYPES[self.kv_dtype].scaled:
            raise BundleError("vtx.json: int8 K and V and a file of their scales go together; export again")

    @property
    def or_more_context(self) -> str:
        """How a message ends that says what does not fit: with the larger context that an export could have, if any."""
        if self.max_context < self.model.max_positions:
            return f", or export with a larger --max-context (up to {self.model.max_positions})"
        return "; the model itself has no more positions"

    def kv_slot_bytes(self, dialect: str = "ort") -> int:
        """Bytes of one KV slot of one layer in a dialect's graphs: K and V of all key/value heads."""
        return 2 * self.model.kv_heads * self.model.head_dim * KV_DTYPES[kv_type(dialect, self.kv_dtype)].bytes

    def stage_files(self, dialect: str) -> tuple[tuple[StageSpec, str], ...]:
        """Each stage with the file of its graph."""
        return tuple(zip(self.stages, self.dialects[dialect].stages, strict=True))

    def gate_files(self, dialect: str) -> dict[int, str]:
        """The file of each gate's graph, by K."""
        return dict(zip(self.gates, self.dialects[dialect].gates, strict=True))


def check_inside(name: str) -> None:
    """Raise BundleError unless `name` is a plain relative path that stays inside the bundle."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or "\0" in name:
        raise BundleError(f"vtx.json: the path {name!r} leaves the bundle; do not use this bundle")
