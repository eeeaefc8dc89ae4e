"""The measurement of rounding on real decoders: nothing is lost without it, and fewer bits lose more."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from benchmarks import divergence, shuffled
from benchmarks.divergence import POSITIONS, PREFILLED, Row, main, rounded_rows
from benchmarks.divergence_rivals import type_of

from tests.support import bundles
from tests.support.families.gemma import GEMMA3
from tests.support.fixtures import Checkpoints
from tests.support.near import assert_near
from tests.support.tiny import Tiny

TINY = Tiny(text="qwen2", tokenizer="bytes", context=256)
KINDS = 8


def rows_of(path: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_float32_bundle_loses_nothing_and_fewer_bits_lose_more(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, rows = tiny_checkpoint(TINY), tmp_path / "rows.jsonl"
    bundle = bundles.export(checkpoint, tmp_path / "whole", (), "fp32").folder
    words = ["divergence", str(checkpoint), "--forms", "int8", "int4-32", "int4-64", "int4-64@7", "--bundle"]
    words += [str(bundle), "--stored", str(bundle)]
    truth = str(tmp_path / "truth.npz")
    monkeypatch.setattr(sys, "argv", [*words, "--truth", truth, "--rows", str(rows)])
    main()
    int8, int4, coarse, mixed, stored, whole = rows_of(rows)
    assert stored.kl < 1e-9
    assert stored.bits == 32
    assert whole.kl < 1e-6
    assert whole.same == 1
    assert whole.positions == KINDS * (POSITIONS - PREFILLED + 1)
    assert int8.positions == KINDS * POSITIONS
    assert whole.kl < int8.kl < int4.kl < coarse.kl
    assert int8.bits is not None
    assert int8.bits > 8
    assert coarse.perplexity > 0
    assert mixed.bits is not None
    assert 6.5 < mixed.bits <= 7
    assert mixed.kl < coarse.kl
    monkeypatch.setattr(sys, "argv", [*words[:4], "--truth", truth, "--rows", str(rows)])
    main()
    assert rows_of(rows)[-1] == int8, "kept logits give the same row"


@pytest.mark.sampled
@pytest.mark.parametrize("tiny", [TINY, GEMMA3], ids=["qwen2", "gemma3"])
def test_a_shuffled_decoder_computes_the_same(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Tiny
) -> None:
    checkpoint, other = tiny_checkpoint(tiny), tmp_path / "shuffled"
    monkeypatch.setattr(sys, "argv", ["shuffled", str(checkpoint), str(other)])
    shuffled.main()
    logits = []
    for folder in (checkpoint, other):
        plan = divergence.plan_export(divergence.ExportOptions(str(folder), (), "fp32"))
        texts = divergence.texts_of(folder)
        weights = divergence.CheckpointWeights(plan.checkpoint)
        logits.append((divergence.forward(plan, texts, weights), weights.read("text.layers.0.mlp.up_proj.weight")))
    (wanted, whole), (computed, drawn) = logits
    assert not np.array_equal(whole, drawn)
    for kind, values in wanted.items():
        assert_near(computed[kind], values, 1e-4)


def test_results_of_a_decoder_replace_its_own_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text('{"table": "a-1", "row": ["old"]}\n{"table": "b", "row": ["kept"]}\n')
    monkeypatch.setattr(divergence, "RESULTS", results)
    forms = {"int4-64": 4.25, "int8": 8.0, "int8, cpu f32": None}
    rows = [Row("a.1", form, bits, 0.0123, 0.01, 0.9, 12.0, 9) for form, bits in forms.items()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    divergence.write_results(tmp_path / "rows.jsonl")
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    cells = [line["row"] for line in lines if "row" in line]
    assert cells == [
        ["kept"],
        ["int8", "8.00", "0.012", "90.0%", "12.00"],
        ["int4-64", "4.25", "0.012", "90.0%", "12.00"],
        ["int8, cpu f32", "", "0.012", "90.0%", "12.00"],
    ]
    assert lines[-1]["table"] == "a-1-engines"


def test_mixes_give_more_bits_to_the_head_and_to_half_of_the_sensitive_matrices() -> None:
    def types(name: str, width: int) -> list[str]:
        return [type_of("Q4_K_M", f"text.layers.{n}.{name}.weight", width, 24, is_head=False) for n in range(24)]

    assert types("mlp.down_proj", 4864)[:6] == ["Q6_K", "Q6_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K"]
    assert types("mlp.down_proj", 4864).count("Q6_K") == 12
    assert set(types("self_attn.v_proj", 896)) == {"Q5_0", "Q8_0"}
    assert set(types("self_attn.q_proj", 896)) == {"Q5_0"}
    assert type_of("Q4_K_M", "head.weight", 896, 24, is_head=True) == "Q8_0"
    assert type_of("Q4_0", "head.weight", 896, 24, is_head=True) == "Q8_0"
    assert type_of("Q4_0", "head.weight", 1536, 28, is_head=True) == "Q6_K"
    assert type_of("Q8_0", "head.weight", 1536, 28, is_head=True) == "Q8_0"
    assert type_of("Q4_0", "text.layers.0.mlp.up_proj.weight", 896, 24, is_head=False) == "Q4_0"


@pytest.mark.parametrize(
    ("form", "bits"),
    [("int8", 8 + 16 / 256), ("int8-64", 8.25), ("int8-32", 8.5), ("int4-64", 4.25), ("int4-32", 4.625)],
)
def test_a_form_has_the_scales_of_its_name(form: str, bits: float) -> None:
    values = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    rounded, stated = rounded_rows(values, form, "w")
    assert stated == bits
    assert 0 < np.abs(rounded - values).max() < 1
