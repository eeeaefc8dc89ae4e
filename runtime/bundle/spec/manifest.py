"""The manifest of a bundle: what is in it, declared once; `vtx_json.py` reads and writes it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

from vtx.runtime.bundle.spec.action_spec import ActionBins, ActionSpec
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.model_spec import ModelSpec, TextTowerSpec, require
from vtx.runtime.bundle.spec.names import CACHE_KINDS, DIALECTS, SLOTTED, STATEFUL, TENSORRT, kv_type
from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.errors import BundleError
from vtx.runtime.precision import ARITHMETIC, KV_DTYPES, PRECISIONS
from vtx.runtime.strict import UPGRADE, optional

FORMAT = 6
MAX_BYTES = 4 << 20
MAX_RELEASE_NAME = 100  # characters
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
ROPE = "rope.safetensors"
GOLDEN = "golden.safetensors"
FINAL_NORM = "final_norm.safetensors"  # for reductions that measure hidden states behind the last norm
STATE = "state_projection.safetensors"  # for a robot's state as a token of the prompt
NEWLINE = "image_newline.safetensors"  # for layouts with a learned newline among the tokens
KV_SCALES = "kv_scales.safetensors"  # of int8 K and V
PAIRS = "pairs"  # the layout of videos of whose frames two are a view


@dataclass(frozen=True, slots=True)
class LayoutSpec:
    """The layout of an image's tokens: its name and parameters, and the most tokens of any one image.

    `min_tokens`: the tokens of the smallest image, if images keep native resolution; the largest then need not fit
    the bundle's context.
    """

    name: str
    max_tokens: int
    parameters: dict[str, Any]
    min_tokens: int | None = optional(None)

    def __post_init__(self) -> None:
        most = self.max_tokens
        least = self.must_fit
        require(1 <= most < 1 << 31, f"layout.max_tokens is {most}, outside 1..2147483647")
        require(1 <= least <= most, f"layout.min_tokens is {least}, outside 1..{most}")

    @property
    def must_fit(self) -> int:
        """Tokens of an image that every context must hold."""
        return self.max_tokens if self.min_tokens is None else self.min_tokens


@dataclass(frozen=True, slots=True)
class VideoSpec:
    """The layout of videos, and the preprocessing of a frame; `own_graph`: frames have a vision graph of their own."""

    layout: LayoutSpec
    image: ImageSettings
    own_graph: bool

    def __post_init__(self) -> None:
        tokens = self.layout.parameters.get("tokens")  # that a frame's graph gives
        valid = not self.own_graph or (type(tokens) is int and 1 <= tokens < 1 << 31)
        require(valid, f"video: tokens is {tokens!r:.40}, outside 1..2147483647")


@dataclass(frozen=True, slots=True)
class StageSpec:
    """Layers `first` to `last`, both counted from 1 and included; `query`: it gives the queries of the last one.

    `inputs` name the `token_inputs` of the manifest that it reads. `caches` is the kind of each layer's cache, one of
    `CACHE_KINDS`; empty: all layers keep K and V in slots.
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
        return self._keeping(SLOTTED) if self.caches else tuple(range(self.first, self.last + 1))

    @property
    def keeps(self) -> bool:
        """True if a layer keeps something of the tokens it has seen: else all read the K and V of earlier stages."""
        return bool(self.cached or self.stateful)

    @property
    def stateful(self) -> tuple[int, ...]:
        """The layers that keep a state."""
        return self._keeping(STATEFUL) if self.caches else ()

    def _keeping(self, wanted: str) -> tuple[int, ...]:
        return tuple(self.first + number for number, kind in enumerate(self.caches) if kind == wanted)


@dataclass(frozen=True, slots=True)
class TokenInput:
    """An input of stages per token, in addition to the hidden state: `width` numbers, and the graphs that give them."""

    name: str
    width: int
    of_text: bool
    of_images: bool

    def __post_init__(self) -> None:
        require(
            1 <= self.width < 1 << 24 and (self.of_text or self.of_images),
            f"token_inputs: a width of {self.width} must be in 1..16777215 and come from the embedding, the tower or "
            "both",
        )


@dataclass(frozen=True, slots=True)
class Graphs:
    """Files of the graphs of one dialect, relative to the bundle; stages and gates in the manifest's order.

    `score` exists if a stage gives its queries. `vision_merges`: the vision graph takes the threshold of window
    merging, one image at a time; `vision_attention`: it gives the class token's attention in the tower's last block in
    use; `vision_last_attention`: in its very last block. `text_tower` exists if the manifest declares one, `video` if
    it declares a graph of frames, but not in `trt`. With `projector`, the projector alone, the vision graph gives the
    tower's own tokens; with `vision_received` the attention that each token gets in that block of the tower.
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
    projector: str | None = optional(None)
    vision_received: int | None = optional(None)

    @property
    def all(self) -> tuple[str, ...]:
        further = tuple(file for file in (self.score, self.text_tower, self.video, self.projector) if file)
        return self.vision, self.embed, *self.stages, self.head, *self.gates, *further


@dataclass(frozen=True, slots=True)
class FileRecord:
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BundleRelease:
    """The number of a signed bundle among those of one name; devices that have answered with a higher one refuse it.

    `until` is the last day on which it may be loaded, YYYY-MM-DD in UTC; None for no end.
    """

    name: str
    number: int
    until: str | None = optional(None)

    def __post_init__(self) -> None:
        valid = bool(self.name) and len(self.name) <= MAX_RELEASE_NAME and 1 <= self.number < 1 << 53
        require(valid, f"release {self.number} of {self.name[:40]!r}: a name and a number of at least 1 are needed")
        if self.until is not None:
            try:
                valid = date.fromisoformat(self.until).isoformat() == self.until
            except ValueError:
                valid = False
            require(valid, f"release: until is {self.until[:40]!r}; it must be a day, e.g. 2027-06-30")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The facts of a bundle that a runtime needs before it opens another file of it.

    `variants` are the prebuilt K in rising order and `default_k` the one used when none is asked for (None: no
    withdrawal; "auto": the gates decide). `reductions` are the specs of the methods that it was exported for, the first
    one used when none is asked for. `stages` cut the decoder, `gates` are the K that have one; both hold for every
    dialect. `token_inputs` are inputs of stages per token. `text_tower` is CLIP's, `video` declares videos; None if the
    bundle has none. `arithmetic` names the types of arithmetic next to float32 that were measured to keep its answers.
    `kv_dtype` is numpy's name of the type of K and V. `files` covers every file of the bundle but the manifest.
    `release` numbers signed bundles. `record` says how the bundle was made and is not interpreted. `action`: the model
    answers with actions, and the head is its expert; `bins`: its tokens are actions.
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
    arithmetic: tuple[str, ...] = optional(())
    release: BundleRelease | None = optional(None)
    action: ActionSpec | None = optional(None)
    bins: ActionBins | None = optional(None)

    def __post_init__(self) -> None:
        parts = self.precision, self.vision_precision, self.head_precision
        if self.kv_dtype not in KV_DTYPES or not set(parts) <= set(PRECISIONS):
            raise BundleError(
                f"vtx.json: precision {', '.join(parts)} with KV type {self.kv_dtype!r} is unknown to this vtx; "
                f"{UPGRADE}"
            )
        unknown = set(self.arithmetic) - set(ARITHMETIC)
        require(not unknown, f"arithmetic {', '.join(sorted(unknown))} is unknown to this vtx")
        context = self.max_context
        image = self.layout.must_fit
        require(1 <= context < 1 << 24, f"max_context {context} is outside 1..16777215")
        require(image < context, f"an image of {image} tokens does not fit max_context {context}")
        require(
            self.bins is None or (self.action is None and self.bins.vocab <= self.model.vocab),
            "bins: they go beyond the model's vocabulary, or the model has an expert, too",
        )
        self._check_stages()
        self._check_dialects()
        for name in self.files:
            check_inside(name)
        names_of_files = [self.tokenizer, self.chat_template, self.rope, self.golden]
        names_of_files += [self.kv_scales] if self.kv_scales is not None else []
        names_of_files += [self.text_tower.tokenizer] if self.text_tower is not None else []
        names_of_files += [file for graphs in self.dialects.values() for file in graphs.all]
        for name in names_of_files:
            require(name in self.files, f"{name!r} has no checksum in 'files'")
        scaled = KV_DTYPES[self.kv_dtype].scaled
        require((self.kv_scales is not None) == scaled, "int8 K and V and a file of their scales go together")

    def _check_stages(self) -> None:
        spans = [(s.first, s.last) for s in self.stages]
        variants = [*self.variants]
        starts = [first for first, _ in spans]
        cuts = [1, *starts[1:], self.model.layers + 1]
        whole_cut = spans == [(a, b - 1) for a, b in pairwise(cuts)] and cuts == sorted(set(cuts))
        missing = set(variants) - set(starts[1:])
        rising = variants == sorted(set(variants))
        require(
            whole_cut and rising and not missing and not self.stages[-1].query,
            f"stages {spans} do not cut {self.model.layers} layers at K = {variants}",
        )
        depths = {None, *variants, *(["auto"] if self.gates else [])}
        gates = [*self.gates]
        require(
            self.default_k in depths and gates == sorted(set(gates)) and set(gates) <= set(variants),
            f"default_k {self.default_k!r} and gates at {gates} do not fit the variants {variants}",
        )
        declared = [token_input.name for token_input in self.token_inputs]
        require(len(set(declared)) == len(declared), f"token_inputs {declared} hold a name twice")
        for stage in self.stages:
            reads = list(stage.inputs)
            require(
                set(reads) <= set(declared) and len(set(reads)) == len(reads),
                f"stage {stage.first}..{stage.last} reads token inputs {reads}, the bundle declares {declared}",
            )
            self._check_caches(stage)

    def _check_caches(self, stage: StageSpec) -> None:
        model = self.model
        where = f"stage {stage.first}..{stage.last}"
        kinds = list(stage.caches)
        unknown = next((kind for kind in kinds if kind not in CACHE_KINDS), None)
        if unknown is not None:
            raise BundleError(
                f"vtx.json: layers with a cache of the kind {unknown!r} are unknown to this vtx, which has "
                f"{', '.join(CACHE_KINDS)}; {UPGRADE}"
            )
        keyless = model.shared is not None and stage.first == model.shared and stage.last == model.layers
        require(
            len(kinds) in (0, stage.layers)
            and stage.keeps != keyless
            and (not stage.query or stage.last in stage.cached),
            f"{where} declares caches {kinds}; it needs one kind a layer, slots or a state in at least one, and "
            "slots in the last one if it gives queries",
        )
        require(
            set(stage.stateful) == set(model.conv_layers) & set(range(stage.first, stage.last + 1)),
            f"{where} keeps states in layers {list(stage.stateful)}, the model has such layers at "
            f"{list(model.conv_layers)!s:.60}",
        )

    def _check_dialects(self) -> None:
        require("ort" in self.dialects, "the bundle holds no graphs of the 'ort' dialect")
        counts = len(self.stages), len(self.gates)
        queries = any(stage.query for stage in self.stages)
        for name, graphs in self.dialects.items():
            if name not in DIALECTS:
                raise BundleError(f"vtx.json: dialect {name!r} is unknown to this vtx; {UPGRADE}")
            where = f"dialect {name!r}"
            numbers = (len(graphs.stages), len(graphs.gates))
            require(
                numbers == counts,
                f"{where} has {numbers[0]} stages and {numbers[1]} gates, the bundle {counts[0]} and {counts[1]}",
            )
            tower = (self.text_tower is None) == (graphs.text_tower is None)
            require(tower, f"{where}: a text tower and its graph go together")
            has_video_graph = self.video is not None and self.video.own_graph and name not in TENSORRT
            video = has_video_graph == (graphs.video is not None) and (self.video is None) == (
                self.text.video_token_id is None
            )
            require(video, f"{where}: videos, their token and their graph go together")
            scored = queries == (graphs.score is not None)
            require(scored, f"{where}: stages that give queries and a score graph go together")

    @property
    def or_more_context(self) -> str:
        """The end of a message about a full context: the larger one that an export could have, if any."""
        if self.max_context < self.model.max_positions:
            return f", or export with a larger --max-context (up to {self.model.max_positions})"
        return "; the model itself has no more positions"

    def kv_slot_bytes(self, dialect: str = "ort") -> int:
        """Bytes of one KV slot of one layer in a dialect's graphs: K and V of all key/value heads.

        The mean of the layers that keep them, if their heads have several sizes.
        """
        numbers = 2 * self.model.kv_heads * self.model.mean_head_dim
        return round(numbers * KV_DTYPES[kv_type(dialect, self.kv_dtype)].bytes)

    def stage_files(self, dialect: str) -> tuple[tuple[StageSpec, str], ...]:
        return tuple(zip(self.stages, self.dialects[dialect].stages, strict=True))

    def gate_files(self, dialect: str) -> dict[int, str]:
        return dict(zip(self.gates, self.dialects[dialect].gates, strict=True))


def check_inside(name: str, where: str = "vtx.json") -> None:
    """Raise BundleError unless `name` is a relative path that stays inside the bundle."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or "\0" in name:
        raise BundleError(f"{where}: the path {name!r} leaves the bundle; do not use this bundle")
