"""What estimates keep for every family of `tests.support.contract`: they are what a plan and an export write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.bundles import ORT, export_with, reads_documents
from tests.support.contract import FAMILIES
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny

from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import Plan, plan_export
from vtx.exporter.checkpoint.spec import find_size, model_size
from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.mixture import BUILT
from vtx.runtime.backends.memory import needed_memory, weights_in_memory
from vtx.runtime.bundle.safetensors import TensorInfo
from vtx.runtime.bundle.spec.names import CUDA, DIALECTS
from vtx.tools.estimate.sizes import bundle_size
from vtx.tools.estimate.weights import all_weights, precisions_of, resident, stored_bytes

PRECISIONS = [
    ("fp32", None, None), ("fp16", "fp32", None), ("bf16", None, None), ("int8", None, None), ("int4", None, None),
    ("int4", "int4", "fp16"),
]  # fmt: skip


def left_out(tiny: Tiny) -> int:
    """Numbers that estimates leave out: a newline between tiles."""
    return tiny.hidden if tiny.family.startswith(("llava_next", "llava_onevision")) else 0


def not_built(text: TextConfig) -> set[str]:
    """The dialects without graphs of a decoder: experts are built for the CPU, sliding windows not for CUDA."""
    if text.mixture is not None:
        return {*DIALECTS} - {*BUILT}
    return {CUDA} if text.sliding is not None else set()


def more_bytes(tiny: Tiny, plan: Plan, tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes of weights beyond the estimate: what it leaves out, and norms that become float32 as 1 is added to them."""
    if plan.precisions.decoder == "fp32":
        return 4 * left_out(tiny)
    shifted = [tensor for name, tensor in tensors.items() if plan.checkpoint.shift(name)]
    return 2 * left_out(tiny) + sum(tensor.nbytes // 2 for tensor in shifted)


@pytest.mark.sampled
@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_has_graphs_for_every_engine_and_its_size_is_the_estimated_one(
    tiny_checkpoint: Checkpoints, name: str
) -> None:
    for tiny in (FAMILIES[name].tiny, *FAMILIES[name].variants):
        checkpoint = tiny_checkpoint(tiny)
        reader = reads_documents(checkpoint)
        plan = plan_export(ExportOptions(str(checkpoint), (3,), "fp32", allow_changed_answers=reader))
        missing = not_built(plan.config.text)
        assert {*plan.dialects} == {*DIALECTS} - missing
        assert any("no graphs for CUDA" in line for line in plan.warnings) == bool(missing)
        size = find_size(str(checkpoint))
        assert size == model_size(plan.source().config, checkpoint.name)
        assert plan.parameters - size.parameters == left_out(tiny)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "vision", "head"), PRECISIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_exported_bundle_has_the_weights_and_takes_the_memory_that_the_plan_counts(
    tiny_checkpoint: Checkpoints, tmp_path: Path, name: str, precision: str, vision: str | None,
    head: str | None,
) -> None:  # fmt: skip
    dtype = "bfloat16" if precision in ("fp16", "bf16") else "float16"
    tiny = replace(FAMILIES[name].tiny, **{**FAMILIES[name].rounding, "dtype": dtype})
    head = None if tiny.tied else head
    checkpoint = tiny_checkpoint(tiny)
    options = ExportOptions(
        str(checkpoint), (), precision, vision_precision=vision, head_precision=head, dialects=ORT
    )  # fmt: skip
    bundle, size = export_with(options, tmp_path / "bundle"), find_size(str(checkpoint))
    told = bundle_size(bundle)
    assert told == find_size(str(bundle.folder))
    assert (told.decoder, told.vision, told.parameters) == (size.decoder, size.vision, size.parameters)
    parts = precisions_of(size, precision, vision, head)
    assert parts.head == bundle.manifest.head_precision
    plan = plan_export(options)
    files = [bundle.header(file) for file in bundle.manifest.files if file.startswith("weights/")]
    tensors = {key: tensor for header in files for key, tensor in header.tensors.items()}
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert stored - stored_bytes(all_weights(size, parts), parts) == more_bytes(tiny, plan, tensors)
    assert weights_in_memory(bundle) - resident(size, parts) == 4 * left_out(tiny)
    assert plan.prediction.run_memory == needed_memory(bundle)
