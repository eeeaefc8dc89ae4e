"""Activation-aware scaling: it leaves the function alone, finds what a plain statement finds, and loses less."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import vtx
from tests.support import bundles
from tests.support.exported import THREADS
from tests.support.exporting import interrupted
from tests.support.families.gemma import GEMMA3, GEMMA4
from tests.support.families.glm_ocr import GLM_OCR
from tests.support.families.internvl import INTERNVL
from tests.support.families.lfm2_vl import LFM2
from tests.support.families.lfm3_vl import LFM3
from tests.support.families.llava_next import GRANITE
from tests.support.families.llava_onevision import ONEVISION
from tests.support.families.minicpm import MINICPM
from tests.support.families.paligemma import PALIGEMMA
from tests.support.families.qwen import QWEN2 as QWEN2_VL
from tests.support.families.qwen import QWEN3, QWEN35
from tests.support.families.smolvlm import SMOLVLM
from tests.support.fixtures import Checkpoints
from tests.support.reference import Reference as Judge
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx import cli
from vtx.exporter.bundling import activation_aware as measuring
from vtx.exporter.bundling import build, predict
from vtx.exporter.bundling.activation_aware import drawn, exact_factors, measure_factors, shares
from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import Plan, plan_export
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.exporter.graphs.dialects import ort
from vtx.exporter.reference.model import Encoded, Reference
from vtx.exporter.reference.prompts import messages
from vtx.exporter.weights import writing
from vtx.exporter.weights.plan import plan_weights
from vtx.exporter.weights.quantize import dequantise, quantise
from vtx.exporter.weights.scaling import Scaling, channels, factors_of, scalings
from vtx.exporter.weights.tensors import BundleWeights, CheckpointWeights
from vtx.runtime.bundle.safetensors import EVERY, RowIndex
from vtx.runtime.bundle.spec.stored import scheme
from vtx.runtime.errors import CheckpointError, RequestError
from vtx.runtime.report.golden import check_golden
from vtx.tools.data.items import Data, Item

LAYERS = 3
MHA = Tiny(layers=LAYERS, kv_heads=4, attention_bias=True, mlp_bias=True)
GQA = Tiny(layers=LAYERS, attention_bias=True, mlp_bias=True)
QWEN2 = Tiny(layers=LAYERS, text="qwen2", tied=True)
WORDS = ("red?", "how many circles?", "what is left?", "describe the picture")
DATA = Data("a few pictures", tuple(Item((random_image(n),), words) for n, words in enumerate(WORDS[:3])))


@pytest.fixture(autouse=True)
def _quickly() -> None:
    torch.set_num_threads(1)


class Scaled:
    """A checkpoint's weights, multiplied and not rounded."""

    def __init__(self, weights: CheckpointWeights, by: Mapping[str, Scaling]) -> None:
        self._weights, self._by = weights, by

    def holds(self, name: str) -> bool:
        return self._weights.holds(name)

    def rows(self, name: str) -> int:
        return self._weights.rows(name)

    def read(self, name: str, rows: RowIndex = EVERY) -> torch.Tensor:
        whole = self._weights.read(name)
        if name in self._by:
            whole = torch.from_numpy(self._by[name].apply(whole.numpy(), 0))
        return whole[rows]


def options(folder: Path, precision: str = "int4", data: Data = DATA, **more: Any) -> ExportOptions:
    return ExportOptions(str(folder), (3,), precision, dialects=("ort",), aware=data, **more)


def change(folder: Path, target: Path, change: Callable[[str, np.ndarray], None]) -> Path:
    """A copy of a float32 checkpoint; `change` gets every tensor of the decoder, and may write into it."""
    copy = bundles.copy(folder, target)
    for name, info in open_checkpoint(str(copy)).tensors.items():
        if name.startswith("text."):
            mapped = np.memmap(info.file, np.float32, "r+", info.offset, tuple(info.shape))
            change(name, mapped)
            mapped.flush()
    return copy


OUTLIERS = [3, 17, 30]


def with_outliers(folder: Path, target: Path) -> Path:
    """The same model by other weights: a few channels carry rows 30 times as large to weights 30 times as small."""

    def louder(name: str, values: np.ndarray) -> None:
        if name.endswith(("layernorm.weight", "up_proj.weight", "up_proj.bias")):
            values[OUTLIERS] *= 30
        if name.endswith("_proj.weight") and "o_proj" not in name:
            values[:, OUTLIERS] /= 30

    return change(folder, target, louder)


# ---- the function ----------------------------------------------------------------------------------------------------


FAMILIES = {
    "mha": MHA,
    "gqa": GQA,
    "qwen2": QWEN2,
    "granite": GRANITE,
    "onevision": ONEVISION,
    "internvl": INTERNVL,
    "smolvlm": SMOLVLM,
    "paligemma": PALIGEMMA,
    "qwen2_vl": QWEN2_VL,
    "qwen3_vl": QWEN3,
    "qwen3_5": QWEN35,
    "lfm2_vl": LFM2,
    "lfm3_vl": LFM3,
    "glm_ocr": GLM_OCR,
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
    "minicpm": MINICPM,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tiny", FAMILIES.values(), ids=FAMILIES)
def test_factors_without_rounding_leave_every_family_as_it_is(tiny_checkpoint: Checkpoints, tiny: Tiny) -> None:
    """Every group of channels takes factors from 0.05 to 20; a norm, gate or shared value between would show."""
    checkpoint = open_checkpoint(str(tiny_checkpoint(tiny)))
    config, rng = read_config(checkpoint.config), np.random.default_rng(0)
    text = config.text
    checkpoint = replace(checkpoint, factors=text.factors, shifts=text.shifts)
    groups = [group for layer in range(1, text.layers + 1) for group in channels(text, layer)]
    factors = {g.source: np.exp(rng.standard_normal(g.width // g.sharing)).astype(np.float32) for g in groups}
    weights = CheckpointWeights(checkpoint)
    scaled = Scaled(weights, scalings(text, factors))
    ids = rng.integers(4, min(250, text.vocab), 40)
    nothing = Encoded(torch.zeros(0, text.hidden))
    with torch.inference_mode():
        expected = Reference(checkpoint, config, weights).logits(ids, nothing, (None,))[None]
        logits = Reference(checkpoint, config, scaled).logits(ids, nothing, (None,))[None]
    torch.testing.assert_close(logits, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    assert {matrix for group in groups for matrix in group.readers} <= {name for name, _ in text.tensors()}


@pytest.mark.parametrize("tiny", [GEMMA3, GEMMA4], ids=["gemma3", "gemma4"])
def test_every_group_of_a_family_with_norms_around_its_halves_is_measured(
    tiny_checkpoint: Checkpoints, tmp_path: Path, tiny: Tiny
) -> None:
    """Layers without keys and values of their own, and MLPs of two widths, included."""
    plan = plan_export(options(tiny_checkpoint(tiny), "int8"))
    factors, record = measure_factors(plan, DATA, tmp_path, bundles.IGNORE)
    assert factors
    assert record["items"] == len(DATA.items)
    groups = [group for layer in range(1, plan.config.text.layers + 1) for group in channels(plan.config.text, layer)]
    assert factors.keys() <= {group.source for group in groups}


def test_heads_that_read_the_same_values_share_factors(tiny_checkpoint: Checkpoints) -> None:
    config = read_config(open_checkpoint(str(tiny_checkpoint(GQA))).config).text
    group = list(channels(config, 1))[1]
    factors = np.arange(32, dtype=np.float32)
    spread = group.spread(factors).reshape(4, 16)
    assert np.array_equal(spread[0], spread[1])
    assert np.array_equal(spread[2], factors[16:])
    assert np.array_equal(group.pooled(group.spread(factors)), factors)


# ---- the search ------------------------------------------------------------------------------------------------------


def inputs_of_matrices(judge: Judge, data: Data) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The rows [n, in] that transformers' own modules are called with, by name, and which of them are of an image."""
    seen: dict[str, list[np.ndarray]] = {}
    vision: list[np.ndarray] = []

    def watch(name: str) -> Callable[..., None]:
        return lambda _, inputs: seen.setdefault(name, []).append(inputs[0][0].numpy().copy())

    modules = judge.model.model.language_model.named_modules()
    hooks = [m.register_forward_pre_hook(watch(n)) for n, m in modules if n.endswith("_proj")]
    with torch.inference_mode():
        for item in data.items:
            inputs = judge.inputs(messages(item), list(item.images))
            vision.append((inputs["input_ids"][0] == judge.image_token).numpy())
            judge.model(**inputs)
    for hook in hooks:
        hook.remove()
    return {f"text.{name}.weight": np.concatenate(rows) for name, rows in seen.items()}, np.concatenate(vision)


def stated_search(
    readers: list[np.ndarray], x: np.ndarray, vision: np.ndarray, precision: str, heads: tuple[int, int] | None
) -> tuple[dict[float, float], dict[float, np.ndarray]]:
    """The error and the readers' factors of every alpha; `heads` are those of o and of v where they differ."""
    size = (np.abs(x[vision]).mean(0) + np.abs(x[~vision]).mean(0)) / 2
    if heads:
        kv = size.reshape(heads[1], heads[0] // heads[1], -1).mean(1)
        size = np.concatenate([kv[h * heads[1] // heads[0]] for h in range(heads[0])])
    errors, factors = {}, {}
    for alpha in np.arange(11) / 10:
        s = (size / np.exp(np.log(size).mean())) ** alpha
        error = 0.0
        for w in readers:
            how = scheme(precision, w.shape)
            assert how is not None
            rounded = dequantise(*quantise((w * s).astype(np.float32), how, "w"), how)
            y, got = x @ w.T, (x / s) @ rounded.T
            error += np.mean([np.sum((a - b) ** 2) / np.sum(a**2) for a, b in zip(y, got, strict=True)])
        errors[float(alpha)], factors[float(alpha)] = error, s
    return errors, factors


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("tiny", [MHA, GQA], ids=["mha", "gqa"])
def test_the_search_finds_what_a_plain_statement_over_transformers_rows_finds(
    tiny_checkpoint: Checkpoints, tmp_path: Path, tiny: Tiny, precision: str
) -> None:
    folder = with_outliers(tiny_checkpoint(tiny), tmp_path / "ck")
    plan = plan_export(options(folder, precision))
    found, record = measure_factors(plan, DATA, tmp_path, bundles.IGNORE)
    assert (record["items"], record["data"]) == (3, "a few pictures")
    rows, vision = inputs_of_matrices(Judge(folder), DATA)
    assert record["rows"] == len(vision)
    weights, text, scaled = CheckpointWeights(plan.checkpoint), plan.config.text, 0
    for group in itertools.chain.from_iterable(channels(text, layer) for layer in range(1, LAYERS + 1)):
        matrices = [weights.read(name).numpy() for name in group.readers]
        heads = (text.heads, text.kv_heads) if "v_proj" in group.source else None
        errors, factors = stated_search(matrices, rows[group.readers[0]], vision, precision, heads)
        best = min(errors, key=errors.__getitem__)
        if group.source not in found:
            assert errors[0.0] <= errors[best] * (1 + 1e-4)
            continue
        scaled += 1
        assert best > 0
        got = group.spread(found[group.source])
        np.testing.assert_allclose(got, factors[best], rtol=2e-3)
    assert scaled >= 3 * LAYERS


def test_channels_without_a_row_keep_their_size_and_the_others_their_balance() -> None:
    sizes = np.array([0, 1, 4, 0, 16], np.float32)
    assert factors_of(sizes, 0.5).tolist() == [1, 0.5, 1, 1, 2]
    assert factors_of(np.zeros(3, np.float32), 0.5).tolist() == [1, 1, 1]
    wild = factors_of(np.array([1e-30, 1, 1e30], np.float32), 1)
    assert wild.tolist() == [1 / 128, 1, 128]


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_a_norm_is_divided_into_numbers_that_can_be_stored(dtype: str) -> None:
    from vtx.exporter.weights.writing import narrow_bf16
    from vtx.runtime.bundle.safetensors import widen_bf16

    rng = np.random.default_rng(0)
    norm = np.append(rng.standard_normal(500), [0, 1e-9, -3e4]).astype(np.float32)
    wanted = np.exp(rng.standard_normal(503)).astype(np.float32)
    found = exact_factors(norm, wanted, dtype)
    stored = norm * np.reciprocal(found)
    kept = stored.astype(np.float16).astype(np.float32) if dtype == "F16" else widen_bf16(narrow_bf16(stored))
    np.testing.assert_allclose((kept * found)[:500], norm[:500], rtol=1e-6)
    np.testing.assert_allclose(found[:500], wanted[:500], rtol=8e-3)
    assert found[500] == 1
    assert np.isfinite(found).all()
    assert (found > 0).all()


def test_text_and_image_count_half_each_and_no_row_is_drawn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "TOKENS", 256)
    is_vision = [np.arange(700) >= 50, np.arange(30) < 20, np.zeros(10, bool)]
    weights, rows = shares(is_vision), drawn(is_vision)
    text = sum(float(w[torch.from_numpy(~v)].sum()) for w, v in zip(weights, is_vision, strict=True))
    assert text == pytest.approx(0.5, abs=1e-5)
    assert sum(float(w.sum()) for w in weights) == pytest.approx(1, abs=1e-5)
    assert sum(map(len, rows)) == 256
    assert all(len(set(r)) == len(r) and max(r) < len(v) for r, v in zip(rows, is_vision, strict=True))
    assert sum(int((~v[r]).sum()) for r, v in zip(rows, is_vision, strict=True)) == 70
    assert shares([np.zeros(4, bool)])[0].tolist() == [0.25] * 4


# ---- what it is worth ------------------------------------------------------------------------------------------------


def error_of_logits(plan: Plan, folder: Path) -> float:
    """The error of a bundle's logits from rounded weights, on questions that were not measured, as a share."""
    text = vtx.load(folder, threads=THREADS).loaded.text
    whole = Reference(plan.checkpoint, plan.config)
    rounded = Reference(plan.checkpoint, plan.config, BundleWeights(folder, plan.weights.stored))
    lost = spread = 0.0
    with torch.inference_mode():
        for seed in range(100, 106):
            ids = text.prompt(prompt_messages(WORDS[seed % 4]), plan.config.layout.max_tokens)
            features = Encoded(whole.features(random_noise(seed)))
            a, b = (model.logits(ids, features, [None])[None] for model in (whole, rounded))
            lost, spread = lost + float((a - b).square().sum()), spread + float((a - a.mean()).square().sum())
    return lost / spread


def random_noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, 3, 56, 56)).astype(np.float32)


def test_where_a_few_channels_carry_most_it_loses_much_less(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = with_outliers(tiny_checkpoint(GQA), tmp_path / "ck")
    aware = options(folder, vision_precision="fp32", head_precision="fp32")
    plain = replace(aware, aware=None)
    made = [bundles.export_with(each, tmp_path / name).folder for name, each in (("a", aware), ("p", plain))]
    scaled, left = (error_of_logits(plan_export(each), at) for each, at in zip((aware, plain), made, strict=True))
    assert scaled < 0.5 * left


# ---- bundles ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("tiny", [MHA, QWEN2, replace(GQA, ffn=100, dtype="bfloat16")], ids=["mha", "qwen2", "odd"])
def test_a_bundle_computes_what_its_stored_weights_say_and_tells_how_they_came(
    tiny_checkpoint: Checkpoints, tmp_path: Path, tiny: Tiny, precision: str
) -> None:
    made = bundles.export_with(options(tiny_checkpoint(tiny), precision), tmp_path / "b")
    assert all(check.passed for check in check_golden(vtx.load(made.folder, threads=THREADS)))
    record = made.manifest.record["activation_aware"]
    assert (record["items"], record["skipped"], record["data"]) == (3, 0, "a few pictures")
    assert set(made.manifest.files) == {
        path.relative_to(made.folder).as_posix() for path in made.folder.rglob("*") if path.is_file()
    } - {"vtx.json", "vtx.json.sha256"}
    shown = CliRunner().invoke(cli.inspect, [str(made.folder)])
    assert "activation-aware: channels scaled by what 3 questions" in shown.output


def test_without_it_nothing_is_said(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    made = bundles.export(tiny_checkpoint(), tmp_path / "b", (), "int4")
    assert "activation" not in CliRunner().invoke(cli.inspect, [str(made.folder)]).output


def test_weights_in_small_pieces_are_scaled_alike(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(MHA)
    whole = bundles.export_with(options(folder), tmp_path / "a").manifest.files
    monkeypatch.setattr(writing, "CHUNK", 200)
    pieces = bundles.export_with(options(folder), tmp_path / "b").manifest.files
    weights = [name for name in whole if name.startswith("weights/")]
    assert weights
    assert all(whole[name] == pieces[name] for name in weights)


def test_a_file_with_a_scaled_tensor_is_written_anew(tiny_checkpoint: Checkpoints) -> None:
    checkpoint = open_checkpoint(str(tiny_checkpoint(Tiny(dtype="float16", shards=3))))
    needed = [(name, info.shape) for name, info in checkpoint.tensors.items()]
    name = "text.layers.0.input_layernorm.weight"
    precisions = ExportOptions(precision="fp16").precisions()
    files = plan_weights(checkpoint, needed, precisions, {name}).files
    assert [file.whole for file in files].count(False) == 1
    assert name in {entry.name for file in files if not file.whole for entry in file.entries}


# ---- resuming --------------------------------------------------------------------------------------------------------


def stopped(plan: Plan, out: Path) -> None:
    def stop(phase: str, done: int, total: int) -> None:
        if phase == "weights" and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_export(plan, out, force=False, report=stop)


def test_an_interrupted_export_goes_on_with_the_same_factors(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_export(options(tiny_checkpoint(GQA)))
    whole = run_export(plan, tmp_path / "whole", force=False, report=bundles.IGNORE).manifest
    stopped(plan, tmp_path / "b")
    monkeypatch.setattr(build, "measure_factors", None)
    again = plan_export(options(tiny_checkpoint(GQA)))
    made = run_export(again, tmp_path / "b", force=False, report=bundles.IGNORE).manifest
    assert made.files == whole.files
    assert made.record["activation_aware"] == whole.record["activation_aware"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "whole"]


def test_an_export_interrupted_in_every_phase_has_the_bytes_of_one_that_was_not(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While activations are measured it begins anew; later it resumes with the factors it has."""
    plan = plan_export(options(tiny_checkpoint(MHA), int4_block=32, bits=6.0))
    whole = run_export(plan, tmp_path / "whole", force=False, report=bundles.IGNORE).manifest
    interrupted(plan, tmp_path / "b", "activations", 0.6)
    interrupted(plan, tmp_path / "b", "weights", 0.01)
    monkeypatch.setattr(build, "measure_factors", None)
    for phase, share in (("weights", 0.9), ("reference", 0.5), ("checksums", 0.5)):
        interrupted(plan, tmp_path / "b", phase, share)
    made = run_export(plan, tmp_path / "b", force=False, report=bundles.IGNORE).manifest
    assert made.files == whole.files
    assert made.record["activation_aware"] == whole.record["activation_aware"]
    assert not list((tmp_path / "b").glob(".*"))


def test_sampled_inputs_are_on_the_disk_as_large_as_predicted(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (measuring, predict):
        monkeypatch.setattr(module, "TOKENS", 64)
    plan = plan_export(options(tiny_checkpoint(GQA)))
    factors, _ = measure_factors(plan, DATA, tmp_path, bundles.IGNORE)
    inputs = measuring.read_inputs(tmp_path)
    assert len(list(tmp_path.iterdir())) == LAYERS
    assert len(inputs) == 4 * LAYERS
    assert sum(info.nbytes for info in inputs.values()) == plan.prediction.scratch
    assert all(array.ndim == 1 for array in factors.values()), "samples are in memory, too"


@pytest.mark.parametrize("other", [None, Data("others", DATA.items[:2])], ids=["without", "other data"])
def test_other_questions_or_none_start_afresh(tiny_checkpoint: Checkpoints, tmp_path: Path, other: Data | None) -> None:
    folder = tiny_checkpoint(GQA)
    stopped(plan_export(options(folder)), tmp_path / "b")
    changed = replace(options(folder), aware=other if other else None)
    said: list[str] = []
    made = run_export(plan_export(changed), tmp_path / "b", force=False, report=bundles.IGNORE, say=said.append)
    assert any("starting afresh" in line for line in said)
    assert made.manifest.record.get("activation_aware", {}).get("items") == (2 if other else None)


# ---- odd and hostile -------------------------------------------------------------------------------------------------


def test_channels_that_carry_nothing_are_left_alone(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    def mute(name: str, values: np.ndarray) -> None:
        if name.endswith(("layernorm.weight", "up_proj.weight")):
            values[[0, 5]] = 0

    folder = change(tiny_checkpoint(Tiny(layers=3)), tmp_path / "ck", mute)
    plan = plan_export(options(folder))
    found, _ = measure_factors(plan, DATA, tmp_path, bundles.IGNORE)
    norms = [factors for name, factors in found.items() if name.endswith("layernorm.weight")]
    assert norms
    assert all(factors[0] == factors[5] == 1 for factors in norms)
    made = run_export(plan, tmp_path / "b", force=False, report=bundles.IGNORE)
    assert all(check.passed for check in check_golden(vtx.load(made.folder, threads=THREADS)))


def test_a_layer_of_zeros_and_a_huge_channel_are_exported(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alter(name: str, values: np.ndarray) -> None:
        if name.startswith("text.layers.1.") and values.ndim == 2:
            values[:] = 0
        if name == "text.layers.0.input_layernorm.weight":
            values[3] *= 3000

    folder = change(tiny_checkpoint(Tiny(layers=3)), tmp_path / "ck", alter)
    monkeypatch.setattr(ort, "INT8_ACTIVATIONS", 1)
    plan = plan_export(options(folder, bits=6.0))
    made = run_export(plan, tmp_path / "b", force=False, report=bundles.IGNORE)
    rounded = BundleWeights(made.folder, plan.weights.stored)
    zeros = [name for name in plan.weights.stored if name.startswith("text.layers.1.") and name.endswith("proj.weight")]
    assert len(zeros) == 7
    assert not any(rounded.read(name).any() for name in zeros)
    assert all(check.difference <= 1e-2 for check in check_golden(vtx.load(made.folder, threads=THREADS)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text.layers.1.mlp.up_proj.weight", r"tensor text\.layers\.1\.mlp\.up_proj\.weight holds NaN"),
        ("text.embed_tokens.weight", r"inputs of text\.layers\.0\..* are NaN or infinite.*without"),
    ],
)
def test_nan_is_refused_and_nothing_is_left(
    tiny_checkpoint: Checkpoints, tmp_path: Path, name: str, message: str
) -> None:
    def spoil(tensor: str, values: np.ndarray) -> None:
        if tensor == name:
            values[:, 1] = np.nan

    folder = change(tiny_checkpoint(Tiny(layers=3)), tmp_path / "ck", spoil)
    with pytest.raises(CheckpointError, match=message):
        bundles.export_with(options(folder), tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


@pytest.mark.parametrize(
    "item",
    [Item((), "red?"), Item((random_image(1),), "这张图片里有什么? كم دائرة")],
    ids=["one word", "other languages"],
)
def test_a_single_question_in_any_language_is_enough(tiny_checkpoint: Checkpoints, tmp_path: Path, item: Item) -> None:
    data = Data("one", (item,))
    plan = plan_export(options(tiny_checkpoint(Tiny(layers=3)), data=data))
    made = run_export(plan, tmp_path / "b", force=False, report=bundles.IGNORE)
    assert made.manifest.record["activation_aware"]["items"] == 1
    assert all(check.passed for check in check_golden(vtx.load(made.folder, threads=THREADS)))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_weights_that_are_not_rounded_to_integers_are_refused(tiny_checkpoint: Checkpoints, precision: str) -> None:
    with pytest.raises(RequestError, match=rf"{precision} weights are not rounded.*--precision int4 or int8"):
        options(tiny_checkpoint(), precision)


def test_questions_that_do_not_fit_are_counted_and_too_many_refused(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    long = Item((random_image(9),), "what " * 300)
    few = Data("mixed", (*DATA.items, DATA.items[0], DATA.items[1], long))
    plan = plan_export(options(tiny_checkpoint(Tiny(layers=3)), data=few))
    assert measure_factors(plan, few, tmp_path, bundles.IGNORE)[1]["skipped"] == 1
    with pytest.raises(RequestError, match="cannot be used"):
        measure_factors(plan, Data("mixed", (DATA.items[0], long)), tmp_path, bundles.IGNORE)


def export(checkpoint: Path, out: Path, *arguments: str) -> Any:
    return CliRunner().invoke(
        cli.export,
        ["--model", str(checkpoint), "--precision", "int4", "--activation-aware", "--out", str(out), *arguments],
    )


@pytest.mark.parametrize("lines", ["", "\n\n", '{"question": ""}\n'], ids=["empty", "blank", "no words"])
def test_data_without_a_question_is_refused_before_anything_is_written(
    tiny_checkpoint: Checkpoints, tmp_path: Path, lines: str
) -> None:
    data = tmp_path / "questions.jsonl"
    data.write_text(lines)
    done = export(tiny_checkpoint(), tmp_path / "b", "--calibration", str(data))
    assert done.exit_code == 1
    assert "questions.jsonl" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [data.name]


def test_the_command_measures_a_file_of_questions_and_names_what_it_skips(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    lines = [{"image": f"{n}.png", "question": "red?", "answer": "a circle"} for n in range(6)]
    (data / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for n in range(5):
        random_image(n).save(data / f"{n}.png")
    (data / "5.png").write_bytes(b"no picture")
    done = export(tiny_checkpoint(Tiny(layers=3)), tmp_path / "b", "--calibration", str(data))
    assert done.exit_code == 0, done.stderr
    assert "skipped line 6" in done.stderr
    assert "by the activations of 5 items of questions.jsonl" in done.stderr
    assert bundles.manifest(tmp_path / "b")["record"]["activation_aware"]["items"] == 5
    (data / "0.png").write_bytes(b"")
    spoiled = export(tiny_checkpoint(Tiny(layers=3)), tmp_path / "c", "--calibration", str(data))
    assert spoiled.exit_code == 1
    assert "2 of 6 items" in spoiled.stderr
    shutil.rmtree(data)
    data.mkdir()
    empty = export(tiny_checkpoint(Tiny(layers=3)), tmp_path / "c", "--calibration", str(data))
    assert empty.exit_code == 1
    assert "holds 0 .jsonl files" in empty.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "data"]


def test_the_command_needs_data_for_a_model_of_the_user_s(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    done = export(tiny_checkpoint(), tmp_path / "b")
    assert done.exit_code == 2
    assert "--calibration" in done.stderr


def test_the_predicted_memory_counts_a_layer_and_the_tokens(tiny_checkpoint: Checkpoints) -> None:
    aware = options(tiny_checkpoint(Tiny(hidden=256, ffn=4096)))
    measured, plain = (plan_export(each).prediction for each in (aware, replace(aware, aware=None)))
    layer = 4 * 256 * (3 * 4096 + 2 * 256)
    assert measured.export_memory > plain.export_memory
    assert measured.export_memory > layer + measuring.SAMPLES
    assert replace(measured, export_memory=0, scratch=0) == replace(plain, export_memory=0)
