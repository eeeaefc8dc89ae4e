"""Matrices as integers with scales: as near as promised, in the layout that engines read, and clear at the edges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vtx
from tests.support import bundles
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.graphs.dialects import ort
from vtx.exporter.weights import quantize
from vtx.exporter.weights.quantize import LEAST, dequantise, pack, quantise, unpack
from vtx.exporter.weights.tensors import BundleWeights, CheckpointWeights
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.stored import EMBEDDING, HEAD, Scheme, scheme
from vtx.runtime.errors import CheckpointError, ExportError, RequestError
from vtx.runtime.report.golden import check_golden


def matrix(rows: int = 32, width: int = 256, scale: float = 0.02) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal((rows, width)) * scale).astype(np.float32)


def restored(weights: np.ndarray, how: Scheme) -> np.ndarray:
    return dequantise(*quantise(weights, how, "w"), how)


# ---- the arithmetic --------------------------------------------------------------------------------------------------


def test_two_integers_to_a_byte_the_first_in_the_low_half() -> None:
    assert pack(np.array([[1, -1, -8, 7]], np.int8)).tolist() == [[0xF1, 0x78]]


def test_unpacking_undoes_packing() -> None:
    every = np.array([[a, b] for a in range(-8, 8) for b in range(-8, 8)], np.int8).reshape(1, -1)
    assert np.array_equal(unpack(pack(every)), every)


@pytest.mark.parametrize(
    ("how", "most"),
    [
        (Scheme("I4", 32, zero_bits=4), 0.0784),
        (Scheme("I4", 32), 0.090),
        (Scheme("I4", 64), 0.098),
        (Scheme("I8", 256), 0.008),
    ],
)
def test_the_error_of_gaussian_weights_is_the_promised_share(how: Scheme, most: float) -> None:
    weights = matrix(256)
    assert np.sqrt(np.mean((restored(weights, how) - weights) ** 2)) / weights.std() < most


def test_chosen_scales_beat_those_that_reach_the_largest_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, how = matrix(256), Scheme("I4", 64)
    chosen = np.mean((restored(weights, how) - weights) ** 2)
    monkeypatch.setitem(quantize.RATIOS, 4, (1.0,))
    assert chosen < 0.85 * np.mean((restored(weights, how) - weights) ** 2)


def test_no_integer_is_further_than_half_a_step_where_scales_reach_every_weight() -> None:
    weights, how = matrix(), Scheme("I8", 256)
    step = quantise(weights, how, "w")[1].astype(np.float32)
    assert (np.abs(restored(weights, how) - weights) <= 0.501 * step).all()


def test_rows_are_quantised_alike_whichever_rows_are_beside_them() -> None:
    weights, how = matrix(), Scheme("I4", 64)
    assert np.array_equal(restored(weights, how)[5:9], restored(weights[5:9], how))


@pytest.mark.parametrize("how", [Scheme("I4", 64), Scheme("I4", 32, zero_bits=4), Scheme("I8", 256)])
def test_blocks_of_zeros_stay_zeros_and_no_scale_is_zero(how: Scheme) -> None:
    weights = matrix()
    weights[3] = 0
    weights[4, 64:128] = 0
    _, scales, _ = quantise(weights, how, "w")
    assert (scales > 0).all()
    assert not restored(weights, how)[3].any()
    assert not restored(weights, how)[4, 64:128].any()


@pytest.mark.parametrize("how", [Scheme("I4", 64), Scheme("I4", 32, zero_bits=4), Scheme("I8", 256)])
@pytest.mark.parametrize("scale", [1e-4, 1e-6, 1e-9, 1e-42])
def test_weights_too_small_for_a_normal_scale_lose_at_most_its_smallest_step(how: Scheme, scale: float) -> None:
    weights = matrix(scale=scale)
    _, scales, _ = quantise(weights, how, "w")
    assert (scales.astype(np.float32) >= LEAST).all()
    reach = np.abs(weights).max()
    assert np.abs(restored(weights, how) - weights).max() <= max(0.3 * reach, LEAST)


@pytest.mark.parametrize("how", [Scheme("I4", 64), Scheme("I4", 32, zero_bits=4), Scheme("I8", 256)])
def test_a_weight_beyond_the_largest_scale_is_named_with_the_cure(how: Scheme) -> None:
    weights = matrix()
    weights[7, 9] = -1e9
    with pytest.raises(ExportError, match=r"tensor w holds 1e\+09.*--precision fp32"):
        quantise(weights, how, "w")


@pytest.mark.parametrize(
    ("precision", "width", "block", "how"),
    [
        ("int4", 4096, None, Scheme("I4", 64)),
        ("int4", 4304, None, Scheme("I4", 16)),
        ("int4", 96, None, Scheme("I4", 32)),
        ("int4", 4096, 32, Scheme("I4", 32, zero_bits=4)),
        ("int4", 96, 32, Scheme("I4", 32, zero_bits=8)),
        ("int4", 100, None, None),
        ("int4", 65, None, None),
        ("int8", 4304, None, Scheme("I8", 4304)),
        ("int8", 4096, 128, Scheme("I8", 128)),
        ("int8", 96, 64, Scheme("I8", 32)),
        ("int8", 65, 64, None),
    ],
)
def test_a_row_that_no_block_divides_is_left_alone(
    precision: str, width: int, block: int | None, how: Scheme | None
) -> None:
    assert scheme(precision, (8, width), block) == how


# ---- bundles ---------------------------------------------------------------------------------------------------------

FAMILIES = [Tiny(), Tiny(text="qwen2"), Tiny(attention_bias=True, mlp_bias=True), Tiny(tied=True), Tiny(ffn=100)]


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("tiny", FAMILIES, ids=["llama", "qwen2", "biases", "tied", "odd"])
def test_a_bundle_computes_what_its_stored_weights_say(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Tiny, precision: str
) -> None:
    """With rows of 8 bits within the tolerance of that, with rows of float32 as closely as an fp16 bundle."""
    for level, limit in ((4, 0.15), (1, 1e-2)):
        monkeypatch.setattr(ort, "INT8_ACTIVATIONS", level)
        made = bundles.export(tiny_checkpoint(tiny), tmp_path / f"{level}", (3,), precision, dialects=bundles.ORT)
        checks = list(check_golden(vtx.load(made.folder, threads=1)))
        assert len(checks) == 5
        assert all(check.difference <= min(check.limit, limit) for check in checks), checks


@pytest.mark.parametrize("device", ["cpu", "openvino"])
def test_blocks_of_32_have_zero_points_and_are_nearer(
    tiny_checkpoint: Checkpoints, tmp_path: Path, device: str
) -> None:
    """On both engines the bundle computes what its stored weights say; its activations are rounded to 8 bits."""
    if device == "openvino":
        pytest.importorskip("openvino", reason="needs vtx-edge[openvino]", exc_type=ImportError)
    folder, errors = tiny_checkpoint(Tiny(hidden=128, ffn=192)), dict[int, float]()
    for block in (32, 64):
        options = ExportOptions(str(folder), (3,), "int4", int4_block=block, dialects=("ort", "plain"))
        made, stored = bundles.export_with(options, tmp_path / f"{block}"), plan_export(options).weights.stored
        with vtx.load(made.folder, device=device, threads=1) as model:
            assert all(check.passed for check in check_golden(model))
        name = "text.layers.3.mlp.up_proj.weight"
        assert (stored[name].zeros is not None) == (block == 32)
        whole, rounded = CheckpointWeights(open_checkpoint(str(folder))), BundleWeights(made.folder, stored)
        errors[block] = float((whole.read(name) - rounded.read(name)).square().mean())
    assert errors[32] < 0.8 * errors[64]


@pytest.mark.parametrize("device", ["cpu", "openvino"])
def test_int8_in_smaller_blocks_is_nearer_to_the_checkpoint(
    tiny_checkpoint: Checkpoints, tmp_path: Path, device: str
) -> None:
    if device == "openvino":
        pytest.importorskip("openvino", reason="needs vtx-edge[openvino]", exc_type=ImportError)
    folder, errors = tiny_checkpoint(Tiny(hidden=128, ffn=192)), dict[int | None, float]()
    for block in (None, 64, 32):
        options = ExportOptions(str(folder), (3,), "int8", int8_block=block, dialects=("ort", "plain"))
        made, stored = bundles.export_with(options, tmp_path / f"{block}"), plan_export(options).weights.stored
        with vtx.load(made.folder, device=device, threads=1) as model:
            assert all(check.passed for check in check_golden(model))
        for name in ("text.layers.3.mlp.up_proj.weight", "head.weight"):
            scales = stored[name].scales
            assert scales is not None
            assert scales.shape[1] == 128 // (block or 128)
        whole, rounded = CheckpointWeights(open_checkpoint(str(folder))), BundleWeights(made.folder, stored)
        errors[block] = float((whole.read(name) - rounded.read(name)).square().mean())
        assert made.manifest.record["options"].get("int8_block") == block
    assert errors[32] < errors[64] < errors[None]


def test_every_part_has_its_own_precision(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    found = {}
    for vision, head in (("fp16", "int8"), ("int4", "fp32"), ("int8", "int4")):
        options = ExportOptions(str(tiny_checkpoint()), (), "int4", vision_precision=vision, head_precision=head)
        stored = plan_export(options).weights.stored
        found[vision, head] = [stored[n].dtype for n in ("vision.encoder.layers.0.mlp.fc1.weight", "head.weight")]
        made = bundles.export_with(options, tmp_path / vision)
        assert (made.manifest.vision_precision, made.manifest.head_precision) == (vision, head)
        assert all(check.passed for check in check_golden(vtx.load(made.folder, threads=1)))
    assert found == {("fp16", "int8"): ["F16", "I8"], ("int4", "fp32"): ["I4", "F32"], ("int8", "int4"): ["I8", "I4"]}


def test_a_quantised_decoder_goes_with_an_int8_tower_and_head(tiny_checkpoint: Checkpoints) -> None:
    plan = plan_export(ExportOptions(str(tiny_checkpoint()), (), "int4"))
    assert (plan.precisions.vision, plan.precisions.head, plan.precisions.kv) == ("int8", "int8", "fp16")
    stored = plan.weights.stored
    assert stored["text.embed_tokens.weight"].dtype == "F16"
    assert stored["text.layers.3.mlp.up_proj.weight"].dtype == "I4"
    assert stored["text.layers.3.input_layernorm.weight"].dtype == "F16"


@pytest.mark.parametrize("head", [None, "int4", "bf16"])
def test_a_tied_head_is_quantised_beside_the_table_or_is_the_table(
    head: str | None, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(Tiny(tied=True, dtype="bfloat16"))
    options = ExportOptions(str(folder), (3,), "int4", head_precision=head, dialects=bundles.ORT)
    plan, once = plan_export(options), plan_export(ExportOptions(str(folder)))
    found = {name: plan.weights.stored[name].dtype for name in (EMBEDDING, HEAD) if name in plan.weights.stored}
    assert found == {EMBEDDING: "BF16"} | {None: {HEAD: "I8"}, "int4": {HEAD: "I4"}, "bf16": {}}[head]
    assert plan.parameters == once.parameters == once.weights.parameters
    made = bundles.export_with(options, tmp_path / "b")
    assert made.manifest.head_precision == (head or "int8")
    assert all(check.passed for check in check_golden(vtx.load(made.folder, threads=1)))


def test_a_tied_head_in_other_floats_than_the_table_s_is_refused(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint(Tiny(tied=True, dtype="bfloat16"))
    with pytest.raises(RequestError, match=r"--head-precision fp32 would store a weight twice.*name int8 or int4"):
        plan_export(ExportOptions(str(folder), (), "int4", head_precision="fp32"))


def test_a_tied_head_whose_rows_cannot_be_quantised_is_the_table(tiny_checkpoint: Checkpoints) -> None:
    plan = plan_export(ExportOptions(str(tiny_checkpoint(Tiny(tied=True, hidden=72, head_dim=16))), (), "int4"))
    assert plan.precisions.head == "fp16"
    assert HEAD not in plan.weights.stored


@pytest.mark.parametrize("kv", ["int4", "fp8", "bf16"])
def test_other_keys_and_values_are_refused_by_name(kv: str) -> None:
    with pytest.raises(RequestError, match=rf"--kv-precision '{kv}' is not among fp32, fp16, int8"):
        ExportOptions(kv_precision=kv)


def test_keys_and_values_have_their_own_precision(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    options = ExportOptions(str(tiny_checkpoint()), (3,), "int4", kv_precision="fp32")
    made = bundles.export_with(options, tmp_path / "b")
    assert made.manifest.kv_dtype == "float32"
    assert all(check.passed for check in check_golden(vtx.load(made.folder, threads=1)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_stored_integers_stand_for_the_checkpoint_s_weights(
    tiny_checkpoint: Checkpoints, tmp_path: Path, dtype: Any
) -> None:
    from vtx.exporter.graphs.vision import vision_tensors

    folder = tiny_checkpoint(Tiny(dtype=dtype, shards=3))
    plan = plan_export(ExportOptions(str(folder), (), "int4"))
    made = bundles.export(folder, tmp_path / "b", (), "int4", dialects=bundles.ORT)
    stored, source = BundleWeights(made.folder, plan.weights.stored), CheckpointWeights(open_checkpoint(str(folder)))
    quantised = [name for name, tensor in plan.weights.stored.items() if tensor.scales]
    layers = [name for name in quantised if name.startswith("text.")]
    tower = {name for name, _ in vision_tensors(plan.config) if name.endswith(("proj.weight", "mlp.fc1.weight"))}
    assert len(layers) == 7 * 8
    assert {"head.weight", "projector.linear_1.weight", "projector.linear_2.weight"} | tower <= set(quantised)
    for name in quantised:
        want, got = source.read(name).numpy(), stored.read(name).numpy()
        share = 0.11 if name in layers else 0.01
        assert np.sqrt(np.mean((got - want) ** 2)) < share * want.std(), name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused_before_they_are_quantised(
    tiny_checkpoint: Checkpoints, tmp_path: Path, value: float
) -> None:
    from tests.support.checkpoints import alter

    name = "text.layers.4.mlp.up_proj.weight"
    folder = alter(tiny_checkpoint(), tmp_path / "ck", name, value)
    with pytest.raises(CheckpointError, match=f"{name}.*NaN or infinity"):
        bundles.export(folder, tmp_path / "out", (), "int4", dialects=bundles.ORT)


def test_a_quantised_bundle_is_smaller_by_what_its_bits_say(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    sizes = {}
    for precision in ("fp16", "int8", "int4"):
        made = bundles.export(tiny_checkpoint(), tmp_path / precision, (), precision, dialects=bundles.ORT)
        sizes[precision] = sum(path.stat().st_size for path in (made.folder / "weights").iterdir())
    matrices = 8 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 96 * 3)
    assert sizes["int8"] - sizes["int4"] == pytest.approx(matrices / 2, rel=0.15)
    assert sizes["fp16"] - sizes["int8"] == pytest.approx(matrices + 320 * 64, rel=0.15)


def test_the_predicted_disk_is_the_bundle_s(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    made = bundles.export(tiny_checkpoint(), tmp_path / "b", (), "int4", dialects=bundles.ORT)
    planned = plan_export(ExportOptions(str(tiny_checkpoint()), (), "int4")).weights
    real = {path.name: path.stat().st_size for path in (made.folder / "weights").iterdir()}
    assert {Path(file.name).name: file.size for file in planned.files} == real
    assert all(problem is None for _, problem in Bundle.open(made.folder).verify())
