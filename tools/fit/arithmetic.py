"""The arithmetic narrower than float32 that keeps a bundle's answers, measured on the new bundle.

OpenVINO multiplies bfloat16, or integers, several times faster than float32. A bundle uses such arithmetic by default
if it gave float32's answers at export, on processors with instructions for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from vtx.runtime.api.load import load
from vtx.runtime.api.options import Options
from vtx.runtime.backends.allocation import returning_memory
from vtx.runtime.backends.engines import ENGINES, INSTRUCTIONS, floats_in_memory, merit_on_cpu
from vtx.runtime.backends.memory import needed_memory
from vtx.runtime.bundle.bundle import Bundle, seal_manifest
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import DeviceError
from vtx.runtime.host.machine import cpu_flags
from vtx.runtime.precision import PRECISIONS
from vtx.runtime.units import Progress
from vtx.tools.data.intervals import grouped_share
from vtx.tools.data.items import Data, image_key

DEVICE = next(
    name for name, engine in ENGINES.items() if not engine.gpu and INSTRUCTIONS.keys() & engine.compute.keys()
)
SAMPLES = 36  # questions, each about another image: with 35 unchanged answers the interval begins at 90.1%
TOKENS = 8  # of an answer, at most
LEAST_KEPT = 0.9  # the lower end of the interval of the share of answers that stay the same


def candidates(manifest: Manifest, *, always: bool) -> tuple[str, ...]:
    """Types of arithmetic to measure; none without OpenVINO, or if CPUs choose another engine and not `always`."""
    engine = ENGINES[DEVICE]
    chosen = merit_on_cpu(manifest, openvino=True)[0] > merit_on_cpu(manifest, openvino=False)[0]
    if find_spec(engine.module) is None or engine.dialect not in manifest.dialects or not (chosen or always):
        return ()
    return tuple(k for k in engine.compute if k != "f32" and (k != "int8" or PRECISIONS[manifest.precision].bits))


def memory_to_measure(folder: Path, kinds: Sequence[str]) -> int:
    """Bytes that `measure_arithmetic` needs at most, with one engine at a time."""
    bundle, flags = Bundle.open(folder, check=False), cpu_flags()
    return max(needed_memory(bundle, floats_in_memory(DEVICE, kind, flags)) for kind in ("f32", *kinds))


def measure_arithmetic(folder: Path, kinds: Sequence[str], data: Data, report: Progress) -> None:
    """Answer `data` in float32 and in each of `kinds`; write those that keep the answers into the manifest.

    An answer is kept if its first `TOKENS` greedy tokens are the same. A type of arithmetic is written if the share of
    kept answers is at least `LEAST_KEPT`, by the lower end of its 95% interval over images. Its record has every count.
    """
    manifest = Bundle.open(folder, check=False).manifest
    done, total, numbers = 0, len(data.items) * (1 + len(kinds)), dict[object, int]()
    about = [numbers.setdefault(tuple(map(image_key, item.images)), len(numbers)) for item in data.items]

    def ids(model: Any) -> list[tuple[int, ...]]:
        nonlocal done
        found = []
        for _, items in groupby(data.items, key=lambda item: [*map(image_key, item.images)]):
            asked = list(items)
            with model.open(list(asked[0].images)) as images:
                for item in asked:
                    report("arithmetic", done, total)
                    done += 1
                    found.append(tuple(images.ask(item.question, options=Options(TOKENS)).token_ids))
        return found

    answers: dict[str, list[tuple[int, ...]]] = {}
    measured: dict[str, Any] = {}
    report("arithmetic", 0, total)  # before an engine takes memory, which is not the export's own
    for kind in ("f32", *kinds):
        try:  # one engine at a time, and the system has its memory back before the next one loads
            with returning_memory(at_once=False), load(folder, device=DEVICE, compute=kind) as model:
                answers[kind] = ids(model)
        except DeviceError as e:  # no memory, or no such arithmetic on this processor
            measured[kind] = {"obstacle": str(e)}
            if kind == "f32":
                break
            done += len(data.items)
            continue
        if kind != "f32":
            kept = [got == want for got, want in zip(answers[kind], answers["f32"], strict=True)]
            share = grouped_share(kept, about)
            measured[kind] = {"kept": sum(kept), "low": round(share.low, 4), "high": round(share.high, 4)}
    report("arithmetic", total, total)
    counts = {"questions": len(data.items), "images": len(numbers)}
    found = {"data": data.source, **counts, "tokens": TOKENS, "least": LEAST_KEPT, **measured}
    keeping = tuple(kind for kind in kinds if measured.get(kind, {}).get("low", 0.0) >= LEAST_KEPT)
    changed = dataclasses.replace(manifest, arithmetic=keeping, record={**manifest.record, "arithmetic": found})
    seal_manifest(folder, changed)
