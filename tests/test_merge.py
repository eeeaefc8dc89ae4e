"""The vision graph with its extras gives the rows, places and attention that the plain statement gives."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.bundles import export
from tests.exported import Checkpoints
from tests.graphs import session
from tests.reference import Reference
from tests.statement import Method, Statement
from tests.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.export import ExportOptions, plan_export
from vtx.exporter.graphs.vision import build_vision

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


def graph(folder: Path, checkpoint: Path, name: str, **extras: bool) -> Any:
    """The vision graph of a checkpoint, with these extras, beside its bundle's weights."""
    bundle = folder / name
    if not bundle.exists():
        export(checkpoint, bundle, ())
    plan = plan_export(ExportOptions(str(checkpoint), (), "fp32"))
    return session(bundle, lambda b: build_vision(b, plan.config, **extras), weights=plan.weights.stored)


def cosines(judge: Reference, pixels: torch.Tensor) -> list[float]:
    """Mean pairwise cosine of each window of one image, by brute force over transformers' first block."""
    tower = judge.model.model.vision_tower
    with torch.inference_mode():
        x = tower.embeddings(pixels[None])
        clip = hasattr(tower, "pre_layrnorm")
        x = tower.encoder.layers[0](tower.pre_layrnorm(x) if clip else x, None)[0][int(clip) :]
    side = int(len(x) ** 0.5)
    grid = torch.nn.functional.normalize(x, dim=-1).view(side, side, -1)
    found = []
    for top in range(0, side - 2, 3):
        for left in range(0, side - 2, 3):
            window = grid[top : top + 3, left : left + 3].reshape(9, -1)
            found.append(float(((window @ window.T).sum() - 9) / 72))
    return found


def thresholds(values: list[float]) -> list[float]:
    """One below all, one above all, and one in each gap wide enough for float32 to agree on."""
    order = sorted(values)
    return [-1.0, 2.0, *((a + b) / 2 for a, b in pairwise(order) if b - a > 1e-4)]


@pytest.mark.parametrize("tiny", TOWERS.values(), ids=list(TOWERS))
def test_merged_rows_equal_the_statement(
    tiny: Tiny, folder: Path, tiny_checkpoint: Checkpoints, reference: Callable[..., Reference]
) -> None:
    judge, clip = reference(tiny), tiny.vision == "clip"
    vision = graph(folder, tiny_checkpoint(tiny), str(hash(tiny)), merges=True, attention=clip)
    pixels = judge.inputs(prompt_messages("red?"), [random_image(4)])["pixel_values"]
    counts = set()
    for tau in thresholds(cosines(judge, pixels[0])):
        with torch.inference_mode():
            wanted = Statement(judge)._image(pixels[0], Method(tau=tau))
        outputs = [value.name for value in vision.get_outputs()]
        feed = {"pixel_values": pixels.numpy(), "tau": np.array([tau], np.float32)}
        found = dict(zip(outputs, vision.run(None, feed), strict=True))
        assert found["places"].tolist() == wanted.places
        assert found["merged"].tolist() == [int(m) for m in wanted.merged]
        np.testing.assert_allclose(found["image_features"][0], wanted.rows, atol=2e-5, rtol=0)
        if clip:
            np.testing.assert_allclose(found["cls_attention"], wanted.attention, atol=1e-6, rtol=0)
        counts.add(sum(wanted.merged))
    windows = (tiny.image // tiny.patch // 3) ** 2
    assert {0, windows - (not clip and tiny.select == "default")} <= counts
    assert len(counts) > 2 or windows == 1, "the windows are too much alike to prove anything"


@pytest.mark.parametrize("tiny", [Tiny(image=84), Tiny(image=84, vision="siglip")], ids=["clip", "siglip"])
def test_a_threshold_above_one_gives_the_rows_of_the_graph_without_merging(
    tiny: Tiny, folder: Path, tiny_checkpoint: Checkpoints
) -> None:
    pixels = np.random.default_rng(0).standard_normal((1, 3, 84, 84), dtype=np.float32)
    plain = graph(folder, tiny_checkpoint(tiny), str(hash(tiny))).run(None, {"pixel_values": pixels})[0]
    merging = graph(folder, tiny_checkpoint(tiny), str(hash(tiny)), merges=True)
    features, places, merged = merging.run(None, {"pixel_values": pixels, "tau": np.array([2.0], np.float32)})
    assert np.array_equal(features, plain)
    assert len(places) == len(plain[0])
    assert not merged.any()


def test_a_picture_of_one_colour_merges_as_far_as_positions_allow_and_stays_finite(
    folder: Path, tiny_checkpoint: Checkpoints
) -> None:
    tiny = Tiny(image=84)
    vision = graph(folder, tiny_checkpoint(tiny), str(hash(tiny)), merges=True, attention=True)
    feed = {"pixel_values": np.zeros((1, 3, 84, 84), np.float32), "tau": np.array([-1.0], np.float32)}
    features, places, merged, attention = vision.run(None, feed)
    assert features.shape[1] == len(attention) == 4
    assert places.tolist() == [0, 3, 18, 21]
    assert merged.all()
    assert np.isfinite(features).all()


def test_attention_alone_takes_several_images_and_changes_no_feature(
    folder: Path, tiny_checkpoint: Checkpoints, reference: Callable[..., Reference]
) -> None:
    tiny = Tiny(image=84)
    images = [random_image(seed) for seed in range(3)]
    pixels = reference(tiny).inputs(prompt_messages("red?", 3), images)["pixel_values"]
    feed = {"pixel_values": pixels.numpy()}
    plain = graph(folder, tiny_checkpoint(tiny), str(hash(tiny))).run(None, feed)[0]
    features, attention = graph(folder, tiny_checkpoint(tiny), str(hash(tiny)), attention=True).run(None, feed)
    assert np.array_equal(features, plain)
    with torch.inference_mode():
        wanted = [Statement(reference(tiny))._image(image, Method()).attention for image in pixels]
    np.testing.assert_allclose(attention.reshape(3, -1), wanted, atol=1e-6, rtol=0)
