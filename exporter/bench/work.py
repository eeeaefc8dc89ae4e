"""What a measured question computed and read, from the rows that really ran, and how near that came to the ceilings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vtx.exporter.bench.series import Series
from vtx.exporter.bench.stopwatch import Call
from vtx.exporter.planning.plan import FULL_BYTES, layer_bytes
from vtx.exporter.planning.sizes import ModelSize, bundle_size
from vtx.runtime.bundle import Bundle
from vtx.runtime.flops import append_flops, encode_flops
from vtx.runtime.manifest import KV_BYTES, Manifest, StageSpec

WIDENED = ("fp16", "bf16")  # weights that a CPU holds and computes with in float32


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of the tower and of the prompt's rows; bytes of weights and KV cache that one new token reads."""

    vision_flops: int
    prefill_flops: int
    decode_bytes: int


class Worker:
    """Counts the work of one bundle on one device."""

    def __init__(self, bundle: Bundle, device: str) -> None:
        manifest = bundle.manifest
        self._size: ModelSize = bundle_size(bundle)
        self._stages = stages(manifest)
        widened = device == "cpu" and manifest.precision in WIDENED
        head = self._size.decoder.head_macs * (4 if widened else FULL_BYTES[manifest.precision])
        self._weights = head + layer_bytes(self._size.decoder, manifest.precision, expanded=widened)
        self._slot_bytes = self._size.decoder.slot_elements * KV_BYTES[manifest.kv_dtype]
        self.width = self._size.decoder.ffn

    def count(self, prefill: Sequence[Call], decode: Sequence[Call]) -> Work:
        """The work of one question, from its calls."""
        decoder = self._size.decoder
        appends = [(self._stages[c.stage].layers, c.rows, c.filled) for c in prefill if c.stage is not None]
        views = sum(call.name == "vision" for call in prefill)
        return Work(
            vision_flops=encode_flops(self._size.vision, views),
            prefill_flops=2 * decoder.head_macs + sum(append_flops(decoder, *one) for one in appends if one[1]),
            decode_bytes=self._weights + round(self._read(decode)),
        )

    def _read(self, decode: Sequence[Call]) -> float:
        """Bytes of KV cache that a token reads on average."""
        tokens = sum(call.name == "head" for call in decode)
        slots = sum(self._stages[c.stage].layers * (c.filled + c.rows) for c in decode if c.stage is not None)
        return self._slot_bytes * slots / tokens


def stages(manifest: Manifest) -> tuple[StageSpec, ...]:
    """Which layers each stage has: all dialects of a bundle are cut alike."""
    return next(iter(manifest.dialects.values())).stages


def shares(work: Work, ms: Mapping[str, Series | None], ceilings: Mapping[str, Any]) -> dict[str, float | None]:
    """Arithmetic of tower and prefill as a share of the matrix product's, reading of a token as one of memory's."""
    flops, read = (ceilings[name][unit]["median"] for name, unit in (("gemm", "flops_per_s"), ("read", "bytes_per_s")))

    def share(amount: int, phase: str, ceiling: float) -> float | None:
        series = ms[phase]
        return 1000 * amount / series["median"] / ceiling if amount and series and series["median"] else None

    return {
        "vision": share(work.vision_flops, "vision", flops),
        "prefill": share(work.prefill_flops, "prefill", flops),
        "decode": share(work.decode_bytes, "decode_per_token", read),
    }
