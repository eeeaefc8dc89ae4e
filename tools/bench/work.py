"""The work of a measured question, from the tokens that were computed, and its share of the ceilings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vtx.runtime.api.answer import Stats
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.stored import EXPERTS, SCALES
from vtx.runtime.errors import UnsupportedModelError
from vtx.runtime.policies.spec import parse
from vtx.runtime.precision import ARITHMETIC, PRECISIONS
from vtx.tools.bench.ceilings.ceilings import MeasuredCeilings
from vtx.tools.bench.series import Series
from vtx.tools.bench.stopwatch import Call, split
from vtx.tools.estimate.flops import (
    ahead_flops,
    append_flops,
    encode_flops,
    make_schedule,
    prefill_flops,
    text_tower_flops,
)
from vtx.tools.estimate.sizes import ModelSize, bundle_size, decoder_of, text_values

FLOATING = ("F32", "F16", "BF16")
# Weights of a bundle have vtx's names, or those of the checkpoint if its files are used unchanged.
SEEING = re.compile(r"vision|visual|video|clip|projector|tower|mlp1|connector")
HEAD = re.compile(r"(head|output)\.weight")
EMBEDDING = re.compile(r"(embed_tokens|tok_embeddings)\.weight")


@dataclass(frozen=True, slots=True)
class WorkCount:
    """FLOPs of the tower and of the prompt's tokens; bytes of weights and KV cache that one new token reads."""

    vision_flops: int
    prefill_flops: int
    decode_bytes: int


class WorkCounter:
    """Counts the work of one bundle in `compute` arithmetic, to which engines convert floating-point weights.

    `weights` is the precision in which a token reads them; `slot_bytes` are those of a KV slot of a layer there.
    """

    def __init__(self, bundle: Bundle, compute: str, slot_bytes: int) -> None:
        manifest = bundle.manifest
        self._size: ModelSize = bundle_size(bundle)
        self.decoder = self._size.decoder
        if self.decoder.shared is not None:
            raise UnsupportedModelError(
                f"{manifest.model.name}: the work of layers that read the keys and values of others is not counted; "
                "vtx-run, vtx-serve and the Python API answer with such a model, and vtx-plan estimates its cost"
            )
        self._stages = manifest.stages
        self._text_tower = manifest.text_tower
        arithmetic = ARITHMETIC[compute]
        self.weights = manifest.precision if PRECISIONS[manifest.precision].bits else arithmetic.weights
        self._weights = weights_read(bundle, arithmetic.bytes)
        self._slot_bytes = slot_bytes
        self.width = self.decoder.ffn

    def count(self, prefill: Sequence[Call], decode: Sequence[Call]) -> WorkCount:
        stages = [range(stage.first, stage.last + 1) for stage in self._stages]
        appends = [(stages[c.stage], c) for c in prefill if c.stage is not None and c.tokens]
        flops = [
            append_flops(self.decoder, layers, c.tokens, c.filled)
            - 2 * c.spared * self.decoder.macs_after_attention(layers[-1])
            for layers, c in appends
        ]
        tokens = sum(call.name == "head" for call in decode)
        slots = sum(len(self._stages[c.stage].cached) * (c.filled + c.tokens) for c in decode if c.stage is not None)
        return WorkCount(
            vision_flops=self.count_vision(prefill),
            prefill_flops=2 * self.decoder.head_macs + sum(flops),
            decode_bytes=self._weights + round(self._slot_bytes * slots / tokens),
        )

    def first_token(self, stats: Stats, calls: Sequence[Call]) -> int:
        """FLOPs of the towers and of the prompt in one chunk, from a question's calls."""
        return self.count_vision(split(calls)[0]) + self.prompt(stats)

    def prompt(self, stats: Stats) -> int:
        """FLOPs of the prompt in one chunk, as if nothing of it were reused."""
        text = stats.prompt_tokens - stats.vision_tokens
        vision = stats.vision_tokens_kept
        layers_ahead = {layer for part in parse(stats.reduce) for layer in part.needs().ahead}
        again = ahead_flops(self.decoder, vision, layers_ahead, text=text)
        return prefill_flops(self.decoder, make_schedule(vision, text=text)) + again

    def count_vision(self, prefill: Sequence[Call]) -> int:
        """FLOPs of the towers; merged windows do not count in the later layers of the vision tower.

        The tower of frames has the sizes of the one of images, and projects the tokens that it gives.
        """
        vision = self._size.vision
        tokens = dict[str, list[int]]()
        for call in prefill:
            tokens.setdefault(call.name, []).append(call.tokens)
        passes = tokens.get("vision", [])
        text = self._text_flops(tokens.get("text_tower", []), passes)
        if vision is None:
            return text
        if vision.model.vision.positions != "table":
            return sum(encode_flops(vision.seeing(count), 1) for count in passes)
        view_tokens = vision.view_tokens
        images = sum(encode_flops(vision, 1, merged=max(0, view_tokens - count)) for count in passes)
        frames = sum(encode_flops(replace(vision, view_tokens=count), 1) for count in tokens.get("video", []))
        projected = 2 * vision.projector_macs * sum(tokens.get("project", []))
        return images + frames + projected + text

    def _text_flops(self, texts: Sequence[int], passes: Sequence[int]) -> int:
        """FLOPs of the text tower over `texts`, and of comparing them with the tokens of the vision tower's passes."""
        tower = self._text_tower
        if tower is None:
            return 0
        vision = self._size.vision
        width = 0 if vision is None else vision.model.vision.hidden
        return sum(text_tower_flops(tower, count) for count in texts) + 2 * tower.width * width * sum(passes)


def weights_read(bundle: Bundle, float_bytes: int) -> int:
    """Bytes of decoder and head, each read once by a token, of experts those that it is for.

    Floats count `float_bytes`, others as stored.
    """
    stored = [bundle.header(file).tensors for file in bundle.manifest.files if file.startswith("weights/")]
    tensors = {name: info for of_file in stored for name, info in of_file.items() if not SEEING.search(name)}
    tied = not any(HEAD.search(name) for name in tensors)
    sizes = {
        name: info.nbytes
        if name.endswith(SCALES) or info.dtype not in FLOATING
        else float_bytes * math.prod(info.shape)
        for name, info in tensors.items()
        if tied or not EMBEDDING.search(name)
    }
    mixture = decoder_of(text_values(bundle.manifest.model)).mixture
    if mixture is None:
        return sum(sizes.values())
    routed = sum(size for name, size in sizes.items() if EXPERTS in name)
    return sum(sizes.values()) - routed + routed * mixture.active // mixture.count


@dataclass(frozen=True, slots=True)
class Shares:
    """Arithmetic of tower and prefill as shares of the peak, reading a token of bandwidth; None: not measured."""

    vision: float | None
    prefill: float | None
    decode: float | None


def shares(work: WorkCount, ms: Mapping[str, Series | None], ceilings: MeasuredCeilings) -> Shares:
    """The shares of the ceilings that the measured times reach, at most 1."""
    prefill = ceilings.gemm.flops_per_s.max
    vision = ceilings.vision_gemm.flops_per_s.max if ceilings.vision_gemm else prefill

    def share(amount: int, phase: str, ceiling: float) -> float | None:
        series = ms[phase]
        return min(1.0, 1000 * amount / series.median / ceiling) if amount and series and series.median else None

    return Shares(
        vision=share(work.vision_flops, "vision", vision),
        prefill=share(work.prefill_flops, "prefill", prefill),
        decode=share(work.decode_bytes, "decode_per_token", ceilings.read.bytes_per_s.max),
    )
