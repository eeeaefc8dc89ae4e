"""Models on engines of stand-ins, and engines whose records are changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import gpu_standin
from tests.support.gpu_standin import Gpu, build_all
from vtx.runtime.api.model import Model
from vtx.runtime.api.stream import AnswerStream
from vtx.runtime.backends import device_lanes
from vtx.runtime.backends.slots import LANES
from vtx.runtime.backends.tensorrt import backend
from vtx.runtime.backends.tensorrt.backend import TensorrtBackend
from vtx.runtime.bundle import fingerprint
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.seal import write_sealed
from vtx.runtime.host import gpu
from vtx.runtime.scheduler.batching import Batching
from vtx.tools.tensorrt.releases import TENSORRT, Release

ORIN = gpu.Gpu("Orin", (8, 7), 8 << 30, (12, 6))
CARD = gpu.Gpu("RTX 4090", (8, 9), 24 << 30, (13, 0))
JETPACK_6 = Release(TENSORRT, (10, 3))
SMALL_GROWTH = 32  # slots, so that the answers of tiny models outgrow their memory
DUAL = "mustdrop:gamma=0.05,alpha=1,tau=off,layers=1/2"


def on_standin(patch: pytest.MonkeyPatch, card: gpu.Gpu = CARD, version: str = gpu_standin.VERSION) -> Gpu:
    """The stand-in for the GPU and for TensorRT, found wherever the backend looks for them."""
    found = Gpu()
    patch.setattr(backend, "load_driver", lambda: found)
    patch.setattr(device_lanes, "GROWTH", SMALL_GROWTH)
    patch.setattr(backend, "load_flavour", lambda flavour: gpu_standin.module(found, version, flavour))
    patch.setattr(backend, "find_gpu", lambda *_: card)
    return found


def build_for(dialect: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Build a bundle's engines of a dialect, and be on a machine that has them: with `trt10` on JetPack 6."""
    if dialect == "trt10":
        build_all(folder, "jetson-orin", JETPACK_6, dialect)
        patch.setattr(backend, "find_gpu", lambda *_: ORIN)
    else:
        build_all(folder)


def open_model(folder: Path) -> Model:
    bundle = Bundle.open(folder)
    return Model(bundle, TensorrtBackend(bundle), 0.0)


def rewrite(folder: Path, target: str = "sm89", **changes: Any) -> None:
    """Change the record of a target's engines."""
    found = fingerprint.read_engines(Bundle.open(folder), target)
    write_sealed(folder / f"engines/{target}/engines.json", replace(found, **changes).to_json().encode())


def shorten(folder: Path, target: str, tokens: int) -> None:
    """Have the engines of a target's stages take at most `tokens` tokens at once."""
    found = fingerprint.read_engines(Bundle.open(folder), target)
    engines = dict(found.engines)
    for graph in Bundle.open(folder).manifest.dialects[found.dialect].stages:
        profiles = tuple(
            {name: (low, tokens, tokens) if name == "tokens" and high > tokens else (low, likely, high)
             for name, (low, likely, high) in profile.items()}
            for profile in engines[graph].profiles
        )  # fmt: skip
        engines[graph] = replace(engines[graph], profiles=profiles)
    rewrite(folder, target, engines=engines)


def read_together(model: Model, streams: Sequence[AnswerStream]) -> list[list[int]]:
    """The ids of answers of one length, whose tokens but the first are decoded together."""
    batching = Batching(model, LANES, LANES)
    assert batching.obstacle is None
    running = [*streams]
    while running:
        batching.decode(running)
        running = [stream for stream in running if stepped(stream)]
    ids = [stream.answer.token_ids for stream in streams]
    assert batching.tokens == sum(len(of_answer) - 1 for of_answer in ids)
    return ids


def stepped(stream: AnswerStream) -> bool:
    """Step an answer; False if it has ended."""
    try:
        stream.step()
    except StopIteration:
        return False
    return True
