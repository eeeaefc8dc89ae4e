"""Bundles of quantised checkpoints: the weights that these stand for, as they are where they fit, on every engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import bundles, cpp
from tests.support.exported import DEVICES, greedy, prompt
from tests.support.families.glm_ocr import GLM_OCR
from tests.support.families.internvl_chat import INTERNLM
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json, write_json
from tests.support.near import assert_near
from tests.support.quantised import FILE, SCHEMES, awq, compressed_int8, gptq, make_quantised, matrices, quantised_pair
from tests.support.reference import Reference
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import Plan, plan_export
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.quantised.matrix import Matrix, stored_scheme
from vtx.exporter.graphs.dialects import ort
from vtx.exporter.weights.tensors import BundleWeights, CheckpointWeights
from vtx.runtime.api.load import load
from vtx.runtime.backends.memory import weights_in_memory
from vtx.runtime.backends.openvino import backend
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.stored import Scheme
from vtx.runtime.errors import CheckpointError, VtxError
from vtx.runtime.report.golden import check_golden

TINY = Tiny(layers=3, hidden=128, ffn=384, dtype="float16")
STEPS, TOLERANCE = 6, 1e-4
Q_PROJ = "text.layers.1.self_attn.q_proj.weight"
FLOATS = {"vision_precision": "fp32", "head_precision": "fp32", "kv_precision": "fp32"}


def pair(tiny_checkpoint: Checkpoints, folder: Path, name: str) -> tuple[Path, Path]:
    return quantised_pair(tiny_checkpoint(TINY), folder, name)


def planned(folder: Path, precision: str | None = None, **options: Any) -> Plan:
    return plan_export(ExportOptions(str(folder), (2,), precision, **options))


def assert_equal_weights(made: Bundle, plan: Plan, plain: Path) -> None:
    stored, source = BundleWeights(made.folder, plan.weights.stored), CheckpointWeights(open_checkpoint(str(plain)))
    for name in plan.weights.stored:
        np.testing.assert_array_equal(stored.read(name).numpy(), source.read(name).numpy(), name)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_bundle_answers_as_the_weights_that_its_checkpoint_stands_for(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(ort, "INT8_ACTIVATIONS", 1)
    settings = backend.arithmetic
    monkeypatch.setattr(backend, "arithmetic", lambda *how: {**settings(*how), "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0})
    folder, plain = pair(tiny_checkpoint, tmp_path, name)
    exact = SCHEMES[name].exact
    options = ExportOptions(
        str(folder), (2,), None if exact else "fp32", dialects=("ort", "plain"), **FLOATS
    )  # fmt: skip
    plan = plan_export(options)
    assert all((plan.weights.stored[f"text.layers.{n}.mlp.up_proj.weight"].scales is not None) == exact for n in (0, 2))
    made = bundles.export_with(options, tmp_path / "b")
    assert_equal_weights(made, plan, plain)
    judge, messages, images = Reference(plain), prompt_messages("How many circle shapes are there?"), [random_image(1)]
    inputs = judge.inputs(messages, images)
    ids, logits = judge.generate_hf(inputs, STEPS)
    for device in DEVICES:
        model = load(made.folder, device=device, threads=1)
        assert all(check.passed for check in check_golden(model))
        asked = prompt(model, messages, images)
        answer = greedy(model, asked, None, STEPS)
        assert answer.ids == ids
        assert_near(answer.logits, logits.numpy(), TOLERANCE)
        withdrawn = judge.greedy(inputs, 2, STEPS)
        answer = greedy(model, asked, 2, STEPS, forced=withdrawn.ids)
        assert_near(answer.logits, withdrawn.logits, TOLERANCE)


@pytest.mark.sampled
@cpp.needs_cpp
@pytest.mark.parametrize("name", ["awq-32", "gptq-int8-zeros", "gptq-rows"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("openvino", marks=cpp.needs_openvino)])
def test_libvtx_answers_as_python(tiny_checkpoint: Checkpoints, tmp_path: Path, name: str, device: str) -> None:
    folder, _ = pair(tiny_checkpoint, tmp_path, name)
    made = bundles.export_with(ExportOptions(str(folder), (2,), dialects=("ort", "plain")), tmp_path / "b")
    pictures = cpp.write_pictures(tmp_path, [(80, 60)])
    model = load(made.folder, device=device, threads=1)
    cpp.assert_asked_equal(model, pictures, ["red?"], "--device", device, max_new_tokens=STEPS)


@pytest.mark.parametrize(
    ("precision", "stored", "told"),
    [
        (None, "I4", "21 matrices keep their integers and scales, int4"),
        ("int4", "I4", "21 matrices keep their integers and scales, int4"),
        ("int8", "I8", "21 matrices are dequantised and stored as int8"),
        ("fp16", "F16", "21 matrices are dequantised and stored as fp16"),
    ],
)
def test_a_precision_that_is_named_holds(
    tiny_checkpoint: Checkpoints, tmp_path: Path, precision: str | None, stored: str, told: str
) -> None:
    folder, _ = pair(tiny_checkpoint, tmp_path, "awq-128")
    plan = planned(folder, precision)
    assert plan.weights.stored[Q_PROJ].dtype == stored
    assert plan.checkpoint.notes == (f"the checkpoint is quantised: {told}",)


def test_matrices_that_the_checkpoint_keeps_in_floats_stay_floats(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    def first_layer(name: str) -> bool:
        return matrices(name) and ".layers.0." in name

    folder, _ = make_quantised(tiny_checkpoint(TINY), tmp_path, awq(128), first_layer)
    plan = planned(folder)
    stored = plan.weights.stored
    assert (plan.precisions.decoder, plan.precisions.vision, plan.precisions.head) == ("int4", "fp16", "fp16")
    assert stored[Q_PROJ.replace("layers.1", "layers.0")].dtype == "I4"
    assert {stored[name].dtype for name in (Q_PROJ, "head.weight", "projector.linear_1.weight")} == {"F16"}
    assert planned(folder, "int4").weights.stored[Q_PROJ].dtype == "I4"


def test_towers_and_projectors_may_be_quantised_and_so_may_heads(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    def every(name: str) -> bool:
        return name.endswith(("proj.weight", "linear_1.weight", "linear_2.weight", "lm_head.weight"))

    tiny = Tiny(layers=2, hidden=64, ffn=96, dtype="float16")
    folder, plain = make_quantised(tiny_checkpoint(tiny), tmp_path, compressed_int8(), every)
    plan = planned(folder, kv_precision="fp32")
    assert (plan.precisions.decoder, plan.precisions.vision, plan.precisions.head) == ("int8", "int8", "int8")
    assert {plan.weights.stored[n].dtype for n in ("head.weight", "projector.linear_1.weight")} == {"I8"}
    made = bundles.export_with(plan.options, tmp_path / "b")
    assert_equal_weights(made, plan, plain)
    assert all(check.passed for check in check_golden(load(made.folder, device="cpu", threads=1)))


@pytest.mark.parametrize(
    ("width", "block", "fits"),
    [(128, 128, True), (48, 48, True), (96, 32, True), (96, 24, False), (320, 40, False), (64, 8, False)],
)
def test_integers_stay_in_blocks_that_engines_read(width: int, block: int, fits: bool) -> None:
    assert (stored_scheme("I4", width, block) == Scheme("I4", block)) is fits


@pytest.mark.parametrize("name", ["awq-32", "gptq-v1-zeros", "packed-int4-zeros", "fp8-block", "nf4-nested"])
def test_some_rows_of_a_matrix_are_those_of_the_whole(tiny_checkpoint: Checkpoints, tmp_path: Path, name: str) -> None:
    folder, _ = pair(tiny_checkpoint, tmp_path, name)
    matrix = open_checkpoint(str(folder)).tensors["text.layers.0.mlp.gate_proj.weight"].source
    assert isinstance(matrix, Matrix)
    rows = matrix.shape[0]
    whole = matrix.read(np.arange(rows))
    for first, last in ((3, 11), (rows // 2 + 1, rows), (rows - 5, rows)):
        np.testing.assert_array_equal(matrix.read(np.arange(first, last)), whole[first:last])


def test_the_last_group_of_a_row_may_be_smaller(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder, plain = make_quantised(tiny_checkpoint(TINY), tmp_path, awq(96))
    assert planned(folder).weights.stored[Q_PROJ].dtype == "F16"  # 128 weights of a row: groups of 96 and 32
    packed, stated = (CheckpointWeights(open_checkpoint(str(path))).read(Q_PROJ) for path in (folder, plain))
    np.testing.assert_array_equal(packed.numpy(), stated.numpy())


def test_a_head_that_is_the_table_stays_it(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    tiny = Tiny(layers=2, hidden=128, ffn=384, dtype="float16", tied=True)
    folder, _ = make_quantised(tiny_checkpoint(tiny), tmp_path, awq(128))
    stored = planned(folder).weights.stored
    assert "head.weight" not in stored
    assert planned(folder, "int4").weights.stored["head.weight"].dtype == "I8"


@pytest.mark.parametrize("names", ["hub", "saved", "new"])
def test_names_of_every_release_are_known(tiny_checkpoint: Checkpoints, tmp_path: Path, names: Any) -> None:
    tiny = Tiny(layers=2, hidden=128, ffn=384, dtype="float16", names=names)
    folder, _ = make_quantised(tiny_checkpoint(tiny), tmp_path, gptq(4, 128, symmetric=True, version=1))
    assert planned(folder).weights.stored[Q_PROJ].dtype == "I4"


def test_qwen_s_names_and_its_tower_of_floats(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    tiny = Tiny(family="qwen2_vl", text="qwen2", layers=2, hidden=128, ffn=384, dtype="float16", tied=True)
    folder, plain = make_quantised(tiny_checkpoint(tiny), tmp_path, awq(128))
    names = load_file(folder / FILE)
    assert "model.layers.1.mlp.up_proj.qweight" in names
    plan = planned(folder, kv_precision="fp32", dialects=bundles.ORT)
    made = bundles.export_with(plan.options, tmp_path / "b")
    assert_equal_weights(made, plan, plain)
    assert all(check.passed for check in check_golden(load(made.folder, device="cpu", threads=1)))


def test_a_matrix_of_queries_keys_and_values_is_separated(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    def every(name: str) -> bool:
        return name.startswith("language_model.model.layers.") and name.endswith(("wqkv.weight", "wo.weight"))

    tiny = replace(INTERNLM, layers=2, hidden=128, ffn=384, dtype="float16")
    folder, plain = make_quantised(tiny_checkpoint(tiny), tmp_path, awq(128), every)
    plan = planned(folder)
    stored, source = plan.weights.stored, CheckpointWeights(open_checkpoint(str(plain)))
    assert {stored[Q_PROJ.replace("q_proj", f"{part}_proj")].dtype for part in "qkv"} == {"I4"}
    made = bundles.export_with(plan.options, tmp_path / "b")
    weights = BundleWeights(made.folder, stored)
    for part in "qkvo":
        name = Q_PROJ.replace("q_proj", f"{part}_proj")
        np.testing.assert_array_equal(weights.read(name).numpy(), source.read(name).numpy())


def test_fused_matrices_and_rows_in_another_order_keep_their_integers(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    def every(name: str) -> bool:
        return name.startswith("model.language_model.layers.0.") and name.endswith("proj.weight")

    tiny = replace(GLM_OCR, layers=2, hidden=128, head_dim=32, ffn=384, dtype="float16")
    folder, plain = make_quantised(tiny_checkpoint(tiny), tmp_path, awq(128), every)
    plan = planned(folder, allow_changed_answers=True)
    stored, source = plan.weights.stored, CheckpointWeights(open_checkpoint(str(plain)))
    made = bundles.export_with(plan.options, tmp_path / "b")
    weights = BundleWeights(made.folder, stored)
    for part in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up", "mlp.down"):
        name = f"text.layers.0.{part}_proj.weight"
        assert stored[name].dtype == "I4"
        np.testing.assert_array_equal(weights.read(name).numpy(), source.read(name).numpy())


def test_prediction_and_memory_count_zero_points(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder, _ = pair(tiny_checkpoint, tmp_path, "awq-32")
    plan = planned(folder, dialects=bundles.ORT)
    made = bundles.export_with(plan.options, tmp_path / "b")
    real = {path.name: path.stat().st_size for path in (made.folder / "weights").iterdir()}
    assert {Path(file.name).name: file.size for file in plan.weights.files} == real
    zeros = sum(t.zeros.nbytes for t in plan.weights.stored.values() if t.zeros)
    assert zeros == sum(np.prod(t.shape) for t in plan.weights.stored.values() if t.zeros) / 32
    symmetric, _ = pair(tiny_checkpoint, tmp_path / "s", "packed-int4")
    without = bundles.export_with(ExportOptions(str(symmetric), (2,), dialects=bundles.ORT), tmp_path / "s" / "b")
    scales = sum(np.prod(t.scales.shape) for t in plan.weights.stored.values() if t.scales)
    assert weights_in_memory(made) - weights_in_memory(without) == zeros + 12 * (scales - scales // 4)


def in_text_config(config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    return config | {"text_config": config["text_config"] | {"quantization_config": settings}}


def without_method(_: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != "quant_method"}


@pytest.mark.parametrize(("file", "place"), [("quantize_config.json", without_method), ("config.json", in_text_config)])
def test_settings_may_stand_elsewhere(
    tiny_checkpoint: Checkpoints, tmp_path: Path, file: str, place: Callable[..., dict[str, Any]]
) -> None:
    folder, _ = pair(tiny_checkpoint, tmp_path, "gptq-v1")
    config = read_json(folder / "config.json")
    settings = config.pop("quantization_config")
    write_json(folder / "config.json", config)
    with pytest.raises(VtxError, match=r"proj\.weight is packed as .*qweight"):
        planned(folder)
    write_json(folder / file, place(config, settings))
    assert planned(folder).weights.stored[Q_PROJ].dtype == "I4"


# ---- bad input -------------------------------------------------------------------------------------------------------

LAYER = "language_model.model.layers.1.self_attn.q_proj"


def altered(folder: Path, end: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Path:
    """The checkpoint with another tensor of `LAYER`, or without it."""
    tensors = load_file(folder / FILE)
    value = change(tensors.pop(f"{LAYER}.{end}"))
    if value is not None:
        tensors[f"{LAYER}.{end}"] = value.contiguous()
    save_file(tensors, folder / FILE, {"format": "pt"})
    return folder


CUTS: dict[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "no scales": ("awq-128", "scales", lambda t: None, r"q_proj\.scales is missing, as awq needs"),
    "no zero points": ("gptq-v1", "qzeros", lambda t: None, r"q_proj\.qzeros is missing"),
    "other groups": ("awq-128", "scales", lambda t: t.repeat(2, 1), r"scales is F16 \[2, 128\], not .* \[1, 128\]"),
    "scales of integers": ("awq-128", "scales", lambda t: t.int(), r"scales is I32 \[1, 128\], not F16 or BF16"),
    "codes of bytes": ("awq-128", "qweight", lambda t: t.to(torch.int8), "qweight is I8"),
    "a group that is not there": ("gptq-order", "g_idx", lambda t: t + 1, r"g_idx names groups 1 to 4, not 0 to 3"),
    "no order": ("gptq-order", "g_idx", lambda t: None, r"g_idx is missing"),
    "another shape": ("packed-int4", "weight_shape", lambda t: t * 2, r"weight_packed is I32 \[128, 16\], not"),
    "no shape": ("packed-int4", "weight_shape", lambda t: None, r"weight_shape is missing"),
    "scales of no block": ("fp8-block", "weight_scale", lambda t: t[:1].repeat(3, 1), r"weight_scale is \[3, 4\], not"),
    "no state": ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda t: None, "bitsandbytes__nf4 is missing, or"),
    "a state cut off": ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda t: t[:-4], "not sound JSON"),
    "half of the codes": ("nf4", "weight", lambda t: t[::2], "weight does not hold 128 x 128 weights"),
    "few scales": ("nf4-nested", "weight.absmax", lambda t: t[1:], r"absmax is U8 \[255\], not U8 \[256\]"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "end", "change", "message"), CUTS.values(), ids=CUTS)
def test_parts_that_do_not_fit_are_named(
    tiny_checkpoint: Checkpoints,
    tmp_path: Path,
    name: str,
    end: str,
    change: Callable[[torch.Tensor], Any],
    message: str,
) -> None:
    folder, _ = pair(tiny_checkpoint, tmp_path, name)
    with pytest.raises(CheckpointError, match=message) as caught:
        planned(altered(folder, end, change))
    assert str(caught.value).isprintable()


def test_zero_points_are_stored_where_they_are_not_all_0(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Whatever the settings say: `sym` is true of both."""
    folder, _ = pair(tiny_checkpoint, tmp_path, "gptq-v1")
    assert all(weight.zeros is None for weight in planned(folder).weights.stored.values())
    stored = planned(altered(folder, "qzeros", lambda t: t + 1)).weights.stored
    assert [name for name, weight in stored.items() if weight.zeros is not None] == [Q_PROJ]


def nan_at_the_end(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[-1] = float("nan")
    return tensor


def all_nan(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.view(torch.uint8) | 0x7F).view(tensor.dtype)


@pytest.mark.parametrize(
    ("name", "end", "change", "message"),
    [
        ("awq-128", "scales", nan_at_the_end, r"q_proj\.weight\.scales holds NaN or infinity in 1 of"),
        ("packed-int4", "weight_scale", lambda t: t * float("inf"), r"weight\.scales holds NaN or infinity"),
        ("packed-int4", "weight_scale", lambda t: t * 1e8, r"scales of tensor .* are beyond float16; export with"),
        ("packed-int4", "weight_scale", lambda t: t * 1e-6, r"scales of tensor .* are beyond float16; export with"),
        ("fp8-tensor", "weight", all_nan, r"holds NaN or infinity in 16,384"),
        ("nf4", "weight.absmax", nan_at_the_end, r"holds NaN or infinity in 64 of"),
    ],
)  # fmt: skip
def test_numbers_that_are_none_leave_nothing_behind(
    tiny_checkpoint: Checkpoints,
    tmp_path: Path,
    name: str,
    end: str,
    change: Callable[[torch.Tensor], Any],
    message: str,
) -> None:
    folder, _ = pair(tiny_checkpoint, tmp_path, name)
    options = ExportOptions(str(altered(folder, end, change)), (2,), dialects=bundles.ORT)
    with pytest.raises(VtxError, match=message):
        bundles.export_anew(options, tmp_path / "out" / "b")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("awq-128", {"quant_method": "aqlm"}, r"is quantised \(aqlm\); vtx reads awq, gptq, compressed-tensors, fp8"),
        ("awq-128", {"bits": 3}, "quantization_config: bits is 3; vtx reads 4"),
        ("awq-128", {"version": "gemv"}, "version is 'gemv'; vtx reads gemm"),
        ("awq-128", {"group_size": 0}, "group_size is 0; it must be -1 or at least 1"),
        ("awq-128", {"group_size": 64}, r"down_proj\.scales is F16 \[3, 128\], not F16 or BF16 or F32 \[6, 128\]"),
        ("gptq-v1", {"bits": "4"}, "bits is '4'; vtx reads 4, 8"),
        ("gptq-v1", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; vtx reads gptq, gptq_v2"),
        ("gptq-v1", {"dynamic": {"x": {}}}, "dynamic is"),
        ("packed-int4", {"format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'; vtx reads pack-quant"),
        ("packed-int4", {"transform_config": {"config_groups": {}}}, "transform_config is"),
        (
            "packed-int4",
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config is .*; vtx reads dense ones",
        ),
        ("packed-int4", {"sparsity_config": 7}, "sparsity_config is 7; vtx reads dense ones"),
        ("packed-int4", {"config_groups": {"0": {"weights": {"num_bits": 2}}}}, "num_bits is 2; vtx reads 4, 8"),
        ("awq-128", {"quant_method": ["awq"]}, r"is quantised \(\['awq'\]\); vtx reads awq"),
        ("awq-128", {"bits": [4]}, r"bits is \[4\]; vtx reads 4"),
        ("fp8-inverse", {"weight_block_size": [0, 1]}, r"a block is \[0, 1\]; vtx reads \[rows, columns\]"),
        ("fp8-inverse", {"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ("nf4", {"load_in_4bit": False}, "load_in_4bit is not set"),
    ],
)
def test_settings_that_vtx_does_not_read_are_named(
    tiny_checkpoint: Checkpoints, tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    folder, _ = pair(tiny_checkpoint, tmp_path, name)
    config = read_json(folder / "config.json")
    config["quantization_config"] |= change
    write_json(folder / "config.json", config)
    with pytest.raises(VtxError, match=message):
        planned(folder)


def test_settings_without_quantised_weights_are_told(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder, plain = pair(tiny_checkpoint, tmp_path, "awq-128")
    shutil.copy(plain / FILE, folder / FILE)
    with pytest.raises(CheckpointError, match="says awq, but no tensor is quantised so; remove quantization_config"):
        planned(folder)


def test_a_matrix_that_is_there_twice_is_named(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder, plain = pair(tiny_checkpoint, tmp_path, "awq-128")
    tensors = load_file(folder / FILE)
    save_file({**tensors, f"{LAYER}.weight": load_file(plain / FILE)[f"{LAYER}.weight"]}, folder / FILE)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight' is both quantised and not"):
        planned(folder)
