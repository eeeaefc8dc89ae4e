"""The score graph gives what full attention matrices give."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from tests.support.graphs import TEXT, session
from vtx.exporter.graphs.builder import Builder
from vtx.exporter.graphs.decoder import build_score
from vtx.exporter.graphs.dialects import make_dialect
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.tools.tensorrt.graph import load_graph
from vtx.tools.tensorrt.lint import lint
from vtx.tools.tensorrt.releases import RTX, TENSORRT, Release

CAPACITY = 40
KV = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16}


def full_attention(query: np.ndarray, key: np.ndarray, total: int, scale: float | None = None) -> torch.Tensor:
    """[rows, slots]: the head-mean attention of the last rows, from one matrix over all slots."""
    heads, kv_heads, size = TEXT.heads, key.shape[1], key.shape[3]
    q = torch.from_numpy(query).double().view(len(query), heads, size).transpose(0, 1)
    k = torch.from_numpy(key[0, :, :total].astype(np.float64)).repeat_interleave(heads // kv_heads, 0)
    everyone = torch.zeros(heads, total, size, dtype=torch.float64)
    everyone[:, total - len(query) :] = q
    scores = everyone @ k.transpose(1, 2) * (1 / math.sqrt(size) if scale is None else scale)
    scores = scores.masked_fill(torch.ones(total, total).triu(1).bool(), -torch.inf)
    return torch.softmax(scores, -1).mean(0)[total - len(query) :]


@pytest.mark.sampled
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("kv_type", KV)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_score_graph_equals_the_rows_of_a_full_attention_matrix(
    tmp_path: Path, kv_heads: int, kv_type: str, dialect: str
) -> None:
    config, rng = replace(TEXT, kv_heads=kv_heads), np.random.default_rng(0)
    made = make_dialect(dialect, "fp16", CAPACITY)
    scorer = session(tmp_path, lambda b: build_score(b, config, KV[kv_type]), made)
    slots_first = made.cache_shape(1, "slots", 1)[1] == "slots"
    key = (3 * rng.standard_normal((1, kv_heads, CAPACITY, 8))).astype(kv_type)
    for rows, total in ((1, 1), (1, 30), (7, 30), (30, 30), (12, CAPACITY)):
        query = rng.standard_normal((rows, 48), dtype=np.float32)
        given = key if dialect.startswith("ort") else key[:, :, :total]
        given = given.swapaxes(1, 2) if slots_first else given
        feed = {"query": query, "key": given, "total_slots": np.array([total], np.int32)}
        summed, most = scorer.run(["attention_sum", "attention_max"], feed)
        wanted = full_attention(query, key, total)
        np.testing.assert_allclose(summed, wanted.sum(0), atol=2e-6, rtol=1e-5)
        np.testing.assert_allclose(most, wanted.max(0).values, atol=1e-6, rtol=1e-5)
        assert summed.sum() == pytest.approx(rows, rel=1e-5)


def test_products_have_the_models_own_scale(tmp_path: Path) -> None:
    """Gemma's is not one over the root of the head size."""
    scorer = session(tmp_path, lambda b: build_score(b, replace(TEXT, attention_scale=0.7), KV["float32"]))
    rng = np.random.default_rng(1)
    key = rng.standard_normal((1, TEXT.kv_heads, CAPACITY, 8), dtype=np.float32)
    query = rng.standard_normal((5, 48), dtype=np.float32)
    found = scorer.run(["attention_sum"], {"query": query, "key": key, "total_slots": np.array([30], np.int32)})[0]
    np.testing.assert_allclose(found, full_attention(query, key, 30, 0.7).sum(0), atol=2e-6, rtol=1e-5)


def test_what_stands_beyond_the_filled_slots_has_no_say(tmp_path: Path) -> None:
    scorer = session(tmp_path, lambda b: build_score(b, TEXT, KV["float32"]))
    rng = np.random.default_rng(1)
    query, key = (rng.standard_normal(shape, dtype=np.float32) for shape in ((4, 48), (1, 2, CAPACITY, 8)))
    feed = {"query": query, "key": key, "total_slots": np.array([20], np.int32)}
    before = scorer.run(None, feed)
    key[:, :, 20:] = np.nan
    for found, wanted in zip(scorer.run(None, feed), before, strict=True):
        assert np.array_equal(found, wanted)


def test_one_row_of_a_long_prompt_costs_no_square_of_it(tmp_path: Path) -> None:
    """Every intermediate, by its inferred size, is at most the key buffer or [heads, rows, slots]."""
    from onnx import load, shape_inference

    session(tmp_path, lambda b: build_score(b, TEXT, KV["float32"]), make_dialect("trt", "fp16", 1000))
    model, sizes = load(tmp_path / "graph.onnx"), {"tokens": 3, "capacity": 1000}
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = sizes[dim.dim_param]
    inferred = shape_inference.infer_shapes(model, data_prop=True).graph.value_info
    counts = [math.prod(dim.dim_value for dim in value.type.tensor_type.shape.dim) for value in inferred]
    assert max(counts) == TEXT.heads * 3 * 1000


@pytest.mark.parametrize(
    ("name", "release"),
    [
        ("plain", Release(TENSORRT, (10, 3))),
        ("trt", Release(TENSORRT, (10, 16))),
        ("trt", Release(TENSORRT, (11, 0))),
        ("trt", Release(RTX, (1, 7))),
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_type", KV)
def test_every_release_of_tensorrt_reads_the_score_graph(
    tmp_path: Path, name: str, release: Release, kv_type: str
) -> None:
    builder = Builder("score", {}, tmp_path, make_dialect(name, "fp16", CAPACITY))
    build_score(builder, TEXT, KV[kv_type])
    builder.write(tmp_path / "score.onnx")
    assert lint(load_graph(tmp_path / "score.onnx"), release) == []
