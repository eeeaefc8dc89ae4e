"""How often an exported model reaches the named shape, driven by `model.act`, and with which interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.toy_robot.tabletop import (
    CAMERAS,
    CHUNKS,
    Numbers,
    Pictures,
    Tables,
    draw_shapes,
    draw_tables,
    drive,
    ends_at,
    with_hands,
)

from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.tools.data.intervals import wilson

TABLES = 7_000_000  # seeds of the episodes that models are judged by
NOISE = 8_000_000


def export(checkpoint: Path, out: Path, ks: Sequence[int]) -> Path:
    from vtx.exporter.bundling.export import run_export
    from vtx.exporter.bundling.options import ExportOptions
    from vtx.exporter.bundling.prepare import plan_export

    options = ExportOptions(str(checkpoint), tuple(ks), "fp32", dialects=("ort",), cameras=tuple(CAMERAS))
    run_export(plan_export(options), out, force=True, report=lambda *_: None)
    return out


def episodes(count: int) -> tuple[Tables, Numbers]:
    """The tables that every model is judged by, and where the hands begin: anywhere."""
    rng = np.random.default_rng(TABLES)
    return draw_tables(rng, count), rng.uniform((0, 0), (2, 1), (count, 2)).astype(np.float32)


def success(model: Model, count: int, k: int | None, *, elsewhere: bool = False) -> dict[str, Any]:
    """How many of the episodes end on the named shape, and how many on another.

    `elsewhere` shows the shapes of the next episode's table, so that pictures tell nothing.
    """
    tables, starts = episodes(count)
    others = np.roll(draw_shapes(tables), 1, 0) if elsewhere else None

    def act(number: int, chunk: int, pictures: Pictures, text: str, hand: Numbers) -> Numbers:
        if others is not None:
            pictures = with_hands(others[number : number + 1], hand[None])[0]
        given = dict(zip(CAMERAS, pictures, strict=True))
        return model.act(given, text, hand, k=k, seed=NOISE + CHUNKS * number + chunk)

    ends = ends_at(tables, drive(tables, starts, act))
    return {"k": k, "elsewhere": elsewhere, "reached": int((ends == 0).sum()), "other": int((ends > 0).sum())}


def reuse(bundle: Path, count: int) -> dict[str, Any]:
    """Actions with the tokens of pictures that did not change, beside those for which every picture is encoded."""
    tables, starts = episodes(count)
    steps = []
    encoded = 0
    with load(bundle, device="cpu", threads=1) as model, load(bundle, device="cpu", threads=1) as fresh:

        def act(number: int, chunk: int, pictures: Pictures, text: str, hand: Numbers) -> Numbers:
            nonlocal encoded
            given = dict(zip(CAMERAS, pictures, strict=True))
            seed = NOISE + CHUNKS * number + chunk
            actions = model.act(given, text, hand, k=None, seed=seed)
            encoded += model.actor.encoded
            steps.append((chunk, given, text, hand, seed, actions, model.actor.encoded))
            return actions

        drive(tables, starts, act)
        largest = 0.0
        compared = 0
        for _, given, text, hand, seed, actions, before in sorted(steps, key=lambda step: step[0]):
            again = fresh.act(given, text, hand, k=None, seed=seed)
            if before < len(CAMERAS) == fresh.actor.encoded:
                largest = max(largest, float(np.abs(again - actions).max()))
                compared = compared + 1
    pictures = len(CAMERAS) * len(steps)
    return {"pictures": pictures, "encoded": encoded, "compared": compared, "largest_difference": largest}


T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t for 2 to 10 seeds


def interval(reached: Sequence[int], count: int) -> tuple[str, str, str]:
    """Percent of episodes with a 95% interval over seeds, which is never narrower than Wilson's over all episodes."""
    shares = np.array(reached) / count
    half = T95[len(shares) - 2] * shares.std(ddof=1) / len(shares) ** 0.5
    low, high = wilson(float(shares.mean()), count * len(shares))
    ends = shares.mean(), max(0.0, min(low, shares.mean() - half)), min(1.0, max(high, shares.mean() + half))
    return tuple(f"{100 * end:.1f}" for end in ends)  # type: ignore[return-value]
