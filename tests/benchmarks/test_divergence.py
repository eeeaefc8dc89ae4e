"""The measurement of rounding on real decoders: nothing is lost without it, and fewer bits lose more."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.divergence import POSITIONS, PREFILLED, Row, main

from tests.support import bundles
from tests.support.tiny import Tiny

TINY = Tiny(text="qwen2", tokenizer="bytes", context=256)
KINDS = 8


def rows_of(path: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]


def test_a_float32_bundle_loses_nothing_and_fewer_bits_lose_more(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, rows = tiny_checkpoint(TINY), tmp_path / "rows.jsonl"
    bundle = bundles.export(checkpoint, tmp_path / "whole", (), "fp32").folder
    words = ["divergence", str(checkpoint), "--forms", "int8", "int4-32", "int4-64", "--bundle", str(bundle)]
    truth = str(tmp_path / "truth.npz")
    monkeypatch.setattr(sys, "argv", [*words, "--truth", truth, "--rows", str(rows)])
    main()
    int8, int4, coarse, whole = rows_of(rows)
    assert whole.kl < 1e-6
    assert whole.same == 1
    assert whole.positions == KINDS * (POSITIONS - PREFILLED + 1)
    assert int8.positions == KINDS * POSITIONS
    assert whole.kl < int8.kl < int4.kl < coarse.kl
    assert int8.bits is not None
    assert int8.bits > 8
    assert coarse.perplexity > 0
    monkeypatch.setattr(sys, "argv", [*words[:4], "--truth", truth, "--rows", str(rows)])
    main()
    assert rows_of(rows)[-1] == int8, "kept logits give the same row"
