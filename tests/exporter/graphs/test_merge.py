"""The vision graph with its extras gives the rows, places and attention that the plain statement gives."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.bundles import export_all
from tests.support.fixtures import Checkpoints, References
from tests.support.graphs import session
from tests.support.near import assert_near
from tests.support.reduced import window_cosines
from tests.support.statement import Method, Statement
from tests.support.tiny import Tiny, prompt_messages, random_image
from tests.support.towers import tower_spec
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.graphs.dialects import make_dialect
from vtx.exporter.graphs.vision import Extras, build_vision
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.vision.tokens import ImageTokens
from vtx.tools.tensorrt.graph import load_graph
from vtx.tools.tensorrt.lint import lint
from vtx.tools.tensorrt.releases import RTX, TENSORRT, Release

TOWERS = {
    "clip-two-windows-a-side": Tiny(image=84),
    "clip-three-windows-a-side": Tiny(image=126, context=512),
    "clip-patches-left-over": Tiny(image=70),
    "clip-class-token-is-a-row": Tiny(image=84, select="full", feature_layer=-1),
    "clip-three-feature-layers": Tiny(image=84, feature_layer=(1, 2, -1)),
    "siglip-without-class-token": Tiny(image=84, vision="siglip", select="full"),
    "siglip-first-row-left-out": Tiny(image=84, vision="siglip"),
}
Runs = Callable[..., list[np.ndarray]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("merge")


def graph(
    folder: Path, checkpoint: Path, name: str, dialect: str = "ort", precision: str = "fp32", **extras: bool
) -> Any:
    """The vision graph of a checkpoint, with these extras, beside its bundle's weights."""
    bundle = folder / f"{name}-{precision}"
    if not bundle.exists():
        export_all(checkpoint, bundle, (), precision)
    plan = plan_export(ExportOptions(str(checkpoint), (), precision))
    written = make_dialect(dialect, precision, plan.max_context)
    return session(bundle, lambda b: build_vision(b, plan.config, Extras(**extras)), written, plan.weights.stored)


def encode(vision: Any, pixels: np.ndarray, tau: float) -> tuple[dict[str, np.ndarray], ImageTokens]:
    """What a merging graph gives, and what the runtime makes of it."""
    outputs = [value.name for value in vision.get_outputs()]
    feed = {"pixel_values": pixels, "tau": np.array([tau], np.float32)}
    found = dict(zip(outputs, vision.run(None, feed), strict=True))
    return found, ImageTokens.of(found, tower_spec(84, 14, 36))  # whose patches the graph itself names


def thresholds(values: list[float]) -> list[float]:
    """One below all, one above all, and one in each gap wide enough for float32 to agree on."""
    order = sorted(values)
    return [-1.0, 2.0, *((a + b) / 2 for a, b in pairwise(order) if b - a > 1e-4)]


@pytest.mark.sampled
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("tiny", TOWERS.values(), ids=list(TOWERS))
def test_merged_rows_equal_the_statement(
    tiny: Tiny, dialect: str, folder: Path, tiny_checkpoint: Checkpoints, reference: References
) -> None:
    judge, clip = reference(tiny), tiny.vision == "clip"
    vision = graph(folder, tiny_checkpoint(tiny), str(hash(tiny)), dialect, merges=True, attention=clip)
    pixels = judge.inputs(prompt_messages("red?"), [random_image(4)])["pixel_values"]
    counts = set()
    for tau in thresholds(window_cosines(judge, pixels[0])):
        with torch.inference_mode():
            wanted = Statement(judge).image(pixels[0], Method(tau=tau))
        given, found = encode(vision, pixels.numpy(), tau)
        assert found.patches.indices.tolist() == wanted.places
        assert found.patches.merged.tolist() == wanted.merged
        assert_near(found.hidden, wanted.rows, 2e-5)
        similarity = [value or 0.0 for value in wanted.similarity]
        assert_near(found.patches.signals["similarity"], similarity, 2e-6)
        if clip:
            assert_near(found.patches.signals["cls_attention"], wanted.attention, 1e-6)
        rows = given["image_features"].shape[1]
        assert rows == (len(wanted.rows) if dialect.startswith("ort") else judge.model.config.image_seq_length)
        assert len(found) + found.idle == rows
        counts.add(sum(wanted.merged))
    windows = (tiny.image // tiny.patch // 3) ** 2
    assert {0, windows - (not clip and tiny.select == "default")} <= counts
    assert len(counts) > 2 or windows == 1, "the windows are too much alike to prove anything"


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("tiny", [Tiny(image=84), Tiny(image=84, vision="siglip")], ids=["clip", "siglip"])
def test_a_threshold_above_one_gives_the_rows_of_the_graph_without_merging(
    tiny: Tiny, dialect: str, folder: Path, tiny_checkpoint: Checkpoints
) -> None:
    pixels = np.random.default_rng(0).standard_normal((1, 3, 84, 84), dtype=np.float32)
    plain = graph(folder, tiny_checkpoint(tiny), str(hash(tiny)), dialect).run(None, {"pixel_values": pixels})[0]
    merging = graph(folder, tiny_checkpoint(tiny), str(hash(tiny)), dialect, merges=True)
    given, found = encode(merging, pixels, 2.0)
    assert np.array_equal(given["image_features"], plain)
    assert len(given["patch_index"]) == len(plain[0])
    assert not given["merged"].any()
    assert found.idle == 0


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_picture_of_one_colour_merges_as_far_as_positions_allow_and_stays_finite(
    dialect: str, folder: Path, tiny_checkpoint: Checkpoints
) -> None:
    tiny = Tiny(image=84)
    vision = graph(folder, tiny_checkpoint(tiny), str(hash(tiny)), dialect, merges=True, attention=True)
    given, found = encode(vision, np.zeros((1, 3, 84, 84), np.float32), -1.0)
    assert found.patches.indices.tolist() == [0, 3, 18, 21]
    assert found.patches.merged.all()
    assert len(found) == 4
    assert np.isfinite(given["image_features"]).all()


@pytest.mark.parametrize("dialect", [name for name in DIALECTS if not name.startswith("ort")])
def test_rows_that_are_gone_say_so_and_nothing_looks_at_them(
    dialect: str, folder: Path, tiny_checkpoint: Checkpoints
) -> None:
    tiny = Tiny(image=84)
    vision = graph(folder, tiny_checkpoint(tiny), str(hash(tiny)), dialect, merges=True, attention=True)
    given, _ = encode(vision, np.zeros((1, 3, 84, 84), np.float32), -1.0)
    gone = given["merged"] < 0
    assert given["patch_index"].tolist() == list(range(36))
    assert np.flatnonzero(~gone).tolist() == [0, 3, 18, 21]
    assert not given["cls_attention"][gone].any()


def test_attention_alone_takes_several_images_and_changes_no_feature(
    folder: Path, tiny_checkpoint: Checkpoints, reference: References
) -> None:
    tiny = Tiny(image=84)
    images = [random_image(seed) for seed in range(3)]
    pixels = reference(tiny).inputs(prompt_messages("red?", 3), images)["pixel_values"]
    feed = {"pixel_values": pixels.numpy()}
    plain = graph(folder, tiny_checkpoint(tiny), str(hash(tiny))).run(None, feed)[0]
    features, attention = graph(folder, tiny_checkpoint(tiny), str(hash(tiny)), attention=True).run(None, feed)
    assert np.array_equal(features, plain)
    with torch.inference_mode():
        wanted = [Statement(reference(tiny)).image(image, Method()).attention for image in pixels]
    assert_near(attention.reshape(3, -1), wanted, 1e-6)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_half_precision_merges_the_same_windows(
    dialect: str, folder: Path, tiny_checkpoint: Checkpoints, reference: References
) -> None:
    tiny = Tiny(image=126, context=512)
    judge = reference(tiny)
    vision = graph(folder, tiny_checkpoint(tiny), str(hash(tiny)), dialect, "fp16", merges=True, attention=True)
    pixels = judge.inputs(prompt_messages("red?"), [random_image(4)])["pixel_values"]
    low, high = max(pairwise(sorted(window_cosines(judge, pixels[0]))), key=lambda pair: pair[1] - pair[0])
    assert high - low > 1e-2
    with torch.inference_mode():
        wanted = Statement(judge).image(pixels[0], Method(tau=(low + high) / 2))
    _, found = encode(vision, pixels.numpy(), (low + high) / 2)
    assert 0 < sum(wanted.merged) < 9
    assert found.patches.indices.tolist() == wanted.places
    assert found.patches.merged.tolist() == wanted.merged
    assert_near(found.hidden, wanted.rows, 1.5e-2)
    assert_near(found.patches.signals["cls_attention"], wanted.attention, 1e-3)


@pytest.mark.parametrize(
    ("dialect", "release"),
    [
        ("plain", Release(TENSORRT, (10, 3))),
        ("trt", Release(TENSORRT, (10, 16))),
        ("trt", Release(TENSORRT, (11, 0))),
        ("trt", Release(RTX, (1, 7))),
    ],
    ids=str,
)
def test_every_release_of_tensorrt_reads_a_vision_graph_that_merges(
    dialect: str, release: Release, folder: Path, tiny_checkpoint: Checkpoints
) -> None:
    tiny = Tiny(image=84)
    graph(folder, tiny_checkpoint(tiny), str(hash(tiny)), dialect, merges=True, attention=True)
    assert lint(load_graph(folder / f"{hash(tiny)}-fp32" / "graph.onnx"), release) == []
