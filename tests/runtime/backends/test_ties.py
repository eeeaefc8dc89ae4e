"""Golden vectors of models with experts: a router's tie is told from a fault, by margins and by another engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import bundles
from tests.support.families.qwen import QWEN3_EXPERTS, QWEN35_EXPERTS
from tests.support.tiny import Tiny, make
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.reference.golden import image_parts, router_margin
from vtx.exporter.reference.model import Reference, Sample, Watchers
from vtx.exporter.weights.tensors import BundleWeights
from vtx.runtime.api.load import load
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.safetensors import read_header, read_tensor, write_safetensors
from vtx.runtime.report.doctor import check_bundle
from vtx.runtime.report.golden import check_golden, decoded_ids, golden_image

GOLDEN = "golden.safetensors"
NOISE = 2e-3  # of logits in fp16, where no other expert is chosen
CLOSE = 1  # the seed of QWEN3_EXPERTS whose first tokens nearly tie: logits were 8e-3 off


def export(tiny: Tiny, folder: Path, precision: str, seed: int) -> tuple[ExportOptions, Bundle]:
    checkpoint = make(folder / "checkpoint", tiny, seed)
    options = ExportOptions(str(checkpoint), (3,), precision, dialects=("ort", "plain"), allow_changed_answers=True)
    return options, bundles.export_with(options, folder / "bundle")


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return {name: read_tensor(info) for name, info in read_header(folder / GOLDEN).tensors.items()}


def margin_of(reference: Reference, sample: Sample) -> float:
    """The closest choice of any router for a prompt, with the image in all layers and without it from layer 3 on."""
    found = [float("inf")]

    def feed(layer: int, _: int, name: str, inputs: torch.Tensor) -> None:
        if name == "mlp.gate":
            found.append(router_margin(reference, layer, inputs))

    reference.hidden([sample], [None, 3], watchers=Watchers(feed=feed))
    return min(found)


@pytest.mark.slow
def test_the_part_of_the_image_is_the_one_whose_experts_are_the_farthest_apart(tmp_path: Path) -> None:
    options, bundle = export(QWEN3_EXPERTS, tmp_path, "fp16", CLOSE)
    plan = plan_export(options)
    reference = Reference(plan.checkpoint, plan.config, BundleWeights(bundle.folder, plan.weights.stored))
    stored = tensors(bundle.folder)
    with torch.inference_mode():
        features = reference.encode([golden_image()], plan.image)
        parts = image_parts(len(features.hidden))
        samples = [
            Sample(decoded_ids(stored["ids"], plan.config.image_token_id, part), features.part(part)) for part in parts
        ]
        margins = [margin_of(reference, sample) for sample in samples]
    assert len(parts) > 1
    best = parts[int(np.argmax(margins))]
    assert stored["image_part"].tolist() == [best.start, best.stop]
    np.testing.assert_allclose(stored["router_margin"], [max(margins)], rtol=1e-3)
    with load(bundle.folder, device="cpu", threads=1) as model:
        logits = [check for check in check_golden(model) if check.name.startswith("logits")]
    assert max(check.difference for check in logits) < NOISE


@pytest.mark.slow
def test_a_tie_within_an_engines_rounding_is_judged_by_one_that_rounds_less(tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="the [openvino] extra is not installed")
    _, bundle = export(QWEN35_EXPERTS, tmp_path, "int4", 1)
    with load(bundle.folder, device="cpu", threads=1) as model:
        differing = [check for check in check_golden(model) if not check.passed]
    assert differing, "onnxruntime's integer kernels chose the reference's experts"
    assert all(check.tied for check in differing)
    report = check_bundle(str(bundle.folder), "cpu", None)
    assert not report.failed
    judged = [check for check in report.checks if check.name.endswith("openvino in f32")]
    assert len(judged) == len(differing)
    assert max(check.difference for check in judged) <= judged[0].limit == 5e-3

    values = tensors(bundle.folder)
    for name in ("logits.none", "logits.3"):
        values[name] = values[name] + 0.02 * np.abs(values[name]).max()
    write_safetensors(bundle.folder / GOLDEN, values)
    bundles.reseal(bundle.folder, GOLDEN)
    assert {*check_bundle(str(bundle.folder), "cpu", None).failed} >= {check.name for check in judged}


@pytest.mark.slow
def test_a_bundle_without_graphs_for_that_engine_keeps_its_difference(tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "checkpoint", QWEN35_EXPERTS, 1)
    options = ExportOptions(str(checkpoint), (3,), "int4", dialects=("ort",), allow_changed_answers=True)
    folder = bundles.export_with(options, tmp_path / "bundle").folder
    report = check_bundle(str(folder), "cpu", None)
    assert report.failed
    assert all(check.tied for check in report.checks if not check.passed)
