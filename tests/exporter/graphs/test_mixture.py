"""Experts as each engine computes them, in every precision, beside the plain PyTorch form with the bundle's weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.support.bundles import IGNORE
from tests.support.families.qwen import QWEN3_EXPERTS, QWEN35_EXPERTS
from tests.support.near import assert_near
from tests.support.quantised import awq, bitsandbytes, fp8, make_quantised
from tests.support.tiny import Tiny, edited, make
from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import Plan, plan_export
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.graphs.builder import FLOAT, Builder
from vtx.exporter.graphs.dialects import make_dialect
from vtx.exporter.graphs.mixture import mix_experts
from vtx.exporter.reference.feed_forward import mix_experts as plain_experts
from vtx.exporter.weights.tensors import BundleWeights, CheckpointWeights
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.safetensors import EVERY
from vtx.runtime.errors import CheckpointError, UnsupportedModelError, VtxError
from vtx.tools.bench.work import weights_read
from vtx.tools.estimate.sizes import KNOWN
from vtx.tools.estimate.weights import bundle_bytes, precisions_of, token_bytes

Export = Callable[..., Path]
WIDE = replace(QWEN35_EXPERTS, experts=(8, 3, 64), hidden=128, ffn=128, layers=2, attending=(1,))
PRECISIONS: tuple[dict[str, Any], ...] = (
    {"precision": "fp32"}, {"precision": "fp16"}, {"precision": "bf16"}, {"precision": "int8"},
    {"precision": "int8", "int8_block": 64}, {"precision": "int4"}, {"precision": "int4", "int4_block": 32},
    {"precision": "int4", "int4_block": 128},
)  # fmt: skip
TOKENS = 5
INT8_INPUTS = 0.02  # of the largest output: onnxruntime's integer kernels round what a matrix reads


@pytest.fixture(scope="module", params=PRECISIONS, ids=lambda options: "-".join(map(str, options.values())))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    place = tmp_path_factory.mktemp("mixture")
    options = ExportOptions(str(make(place / "checkpoint", WIDE)), (), dialects=("ort", "plain"), **request.param)
    plan = plan_export(options)
    return plan, run_export(plan, place / "bundle", force=False, report=IGNORE).folder


@pytest.fixture(scope="module")
def inputs() -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((TOKENS, WIDE.hidden), dtype=np.float32)


def outputs(plan: Plan, folder: Path, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
    """The feed-forward of the first layer in plain PyTorch, by the weights that the bundle stores."""
    weights = BundleWeights(folder, plan.weights.stored)
    text = plan.config.text
    assert text.mixture is not None

    def weight(name: str, rows: slice = EVERY) -> torch.Tensor:
        return weights.read(f"text.layers.0.{name}", rows)

    mixed = plain_experts(
        text,
        text.mixture,
        torch.from_numpy(inputs)[None],
        weight,
        lambda x, name: F.linear(x, weight(f"{name}.weight")),
    )
    return mixed[0].numpy()


def graph(plan: Plan, folder: Path, dialect: str) -> Path:
    """A graph with the feed-forward of the first layer alone."""
    text = plan.config.text
    assert text.mixture is not None
    b = Builder("experts", plan.weights.stored, folder, make_dialect(dialect, plan.precisions.decoder, 0, blocked=True))
    hidden = b.input("hidden", FLOAT, ["tokens", text.hidden])
    b.output(mix_experts(b, text, text.mixture, hidden, "text.layers.0.mlp"), "out", FLOAT, ["tokens", text.hidden])
    b.write(folder / f"experts.{dialect}.onnx")
    return folder / f"experts.{dialect}.onnx"


@pytest.mark.sampled(5)
def test_onnxruntime_computes_experts_by_its_own_operator(
    exported: tuple[Plan, Path], inputs: NDArray[np.float32]
) -> None:
    plan, folder = exported
    session = ort.InferenceSession(graph(plan, folder, "ort"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"hidden": inputs})
    wanted = outputs(plan, folder, inputs)
    exact = plan.precisions.decoder not in ("int8", "int4")
    assert np.abs(found - wanted).max() < (1e-5 if exact else INT8_INPUTS * np.abs(wanted).max())


@pytest.mark.sampled
def test_openvino_computes_the_chosen_experts_alone(exported: tuple[Plan, Path], inputs: NDArray[np.float32]) -> None:
    openvino = pytest.importorskip("openvino")
    plan, folder = exported
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    compiled = openvino.Core().compile_model(graph(plan, folder, "plain"), "CPU", exact)
    assert_near(compiled([inputs])[0], outputs(plan, folder, inputs), 1e-5)
    kinds = Counter(
        str(node.get_rt_info()["layerType"].value) for node in compiled.get_runtime_model().get_ordered_ops()
    )
    assert kinds["GatherMatmul"] == 3, "gate, up and down"


@pytest.mark.sampled
def test_standard_operators_compute_the_same(exported: tuple[Plan, Path], inputs: NDArray[np.float32]) -> None:
    plan, folder = exported
    session = ort.InferenceSession(graph(plan, folder, "plain"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"hidden": inputs})
    assert_near(found, outputs(plan, folder, inputs), 1e-5)


def test_the_router_is_never_rounded(exported: tuple[Plan, Path]) -> None:
    plan, _ = exported
    routers = {
        name: tensor
        for name, tensor in plan.weights.stored.items()
        if name.endswith(("mlp.gate.weight", "_gate.weight"))
    }
    assert len(routers) == 2 * WIDE.layers
    assert all(tensor.scales is None for tensor in routers.values())


@pytest.mark.sampled
@pytest.mark.parametrize("tiny", [QWEN3_EXPERTS, QWEN35_EXPERTS], ids=lambda tiny: tiny.family)
def test_every_layout_of_a_file_gives_the_same_matrices(tmp_path: Path, tiny: Tiny) -> None:
    layouts = [
        replace(tiny, dtype="bfloat16", **more) for more in ({}, {"names": "saved"}, {"apart": True, "shards": 3})
    ]
    opened = [open_checkpoint(str(make(tmp_path / str(number), layout))) for number, layout in enumerate(layouts)]
    stated = load_file(tmp_path / "1/model.safetensors")
    count, _, ffn = tiny.experts
    for layer in range(tiny.layers):
        gates, ups = stated[f"model.language_model.layers.{layer}.mlp.experts.gate_up_proj"].float().split(ffn, 1)
        down = stated[f"model.language_model.layers.{layer}.mlp.experts.down_proj"].float()
        for part, matrices in (("gate", gates), ("up", ups), ("down", down)):
            name = f"text.layers.{layer}.mlp.experts.{part}_proj.weight"
            for checkpoint in opened:
                weights = CheckpointWeights(checkpoint)
                assert torch.equal(weights.read(name), matrices.reshape(-1, matrices.shape[-1]))
                rows = np.array([count * 3, 0, 2])
                assert torch.equal(weights.read(name, rows), matrices.reshape(-1, matrices.shape[-1])[rows])


def test_experts_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    place = make(tmp_path / "checkpoint", replace(QWEN3_EXPERTS, apart=True))
    tensors = load_file(place / "model.safetensors")
    name = "model.language_model.layers.1.mlp.experts.2.up_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, place / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.experts\.up_proj\.weight are 5 tensors, not of one shape"
    ):
        open_checkpoint(str(place))
    save_file({**tensors, f"{name}_scale_inv": torch.ones(1)}, place / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="belongs to quantised experts, which vtx does not read"):
        open_checkpoint(str(place))


FORMS = {"fp8": fp8((16, 16)), "awq": awq(16), "nf4": bitsandbytes("nf4", nested=False)}


@pytest.mark.sampled
@pytest.mark.parametrize("form", FORMS)
def test_quantised_experts_are_refused_where_the_settings_state_them(tmp_path: Path, form: str) -> None:
    checkpoint = make(tmp_path / "checkpoint", replace(QWEN3_EXPERTS, apart=True))
    place, _ = make_quantised(checkpoint, tmp_path, FORMS[form])
    with pytest.raises(
        UnsupportedModelError, match=r"experts\.\w+_proj\.weight has quantised experts, which vtx does no"
    ):
        open_checkpoint(str(place))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 is beyond num_experts 6"),
        ({"num_experts": 1 << 20}, "num_experts is 1048576, not a number from 1"),
        ({"num_experts": 8}, "has shape"),
        ({"mlp_only_layers": [1]}, r"layers\.1\.mlp\.gate_proj\.weight is missing"),
    ],
    ids=str,
)
def test_configurations_that_do_not_fit_are_refused(
    tiny_checkpoint: Export, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    broken = edited(tiny_checkpoint(QWEN3_EXPERTS), tmp_path / "broken", "config.json", change, "text_config")
    with pytest.raises(VtxError, match=reason):
        plan_export(ExportOptions(str(broken), (), "fp32"))


def test_graphs_for_gpus_are_left_out_with_a_reason(tiny_checkpoint: Export) -> None:
    plan = plan_export(ExportOptions(str(tiny_checkpoint(QWEN3_EXPERTS)), (), "fp32"))
    assert [*plan.dialects] == ["ort", "plain"]
    assert any("no graphs for CUDA and TensorRT: experts are built for the CPU" in line for line in plan.warnings)


def test_experts_stay_in_one_precision_if_matrices_get_more_bits(tiny_checkpoint: Export) -> None:
    plan = plan_export(ExportOptions(str(tiny_checkpoint(QWEN3_EXPERTS)), (), "int4", bits=5.0))
    assert plan.precisions.wider
    assert not any(".experts." in name for name in plan.precisions.wider)


def test_a_token_reads_the_weights_of_its_experts(exported: tuple[Plan, Path]) -> None:
    plan, folder = exported
    count, active, _ = WIDE.experts
    read = {name: 0.0 for name in ("all", "of experts")}
    for name, tensor in plan.weights.stored.items():
        if name.startswith(("text.layers", "text.norm", "head")):
            floating = 4 * prod(tensor.shape)  # as onnxruntime widens them
            nbytes = sum(part.nbytes for part in (tensor, tensor.scales, tensor.zeros) if part)
            read["all"] += nbytes if tensor.scales else floating
            read["of experts"] += nbytes if ".experts." in name and tensor.scales else 0
            read["of experts"] += floating if ".experts." in name and not tensor.scales else 0
    unread = read["of experts"] * (count - active) / count
    assert weights_read(Bundle.open(folder, check=False), 4) == read["all"] - unread


def test_published_mixtures_are_planned_with_what_a_token_reads() -> None:
    for name, billions, active in (("qwen3-vl-30b-a3b", 31, 3.3), ("qwen3.5-35b-a3b", 35, 3.5)):
        model = KNOWN[name]
        assert model.parameters / 1e9 == pytest.approx(billions, rel=0.03)
        macs = model.decoder.macs_of(model.decoder.every) + 2 * model.decoder.head_macs
        assert macs / 1e9 == pytest.approx(active, rel=0.15)
        precisions = precisions_of(model, "int4")
        assert token_bytes(model, precisions, wide=False) < bundle_bytes(model, precisions) / 7
        assert token_bytes(model, precisions, wide=False, tokens=1000) > 0.9 * bundle_bytes(model, precisions)
