"""A quantised matrix in every dialect: blocks of any size, with zero points and without, in products of its inputs."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from vtx.exporter.graphs.builder import Builder
from vtx.exporter.graphs.dialects import make_dialect, ort
from vtx.exporter.weights.plan import StoredTensor
from vtx.exporter.weights.quantize import pack
from vtx.runtime.backends.ort.library import session_options
from vtx.runtime.bundle.safetensors import read_header, write_safetensors
from vtx.runtime.bundle.spec.names import DIALECTS

ROWS, WIDTH, WEIGHT = 32, 384, "matrix.weight"
FILE = "weights.safetensors"


@pytest.mark.sampled
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("bits", "block", "zero_bits"),
    [(4, 32, 4), *itertools.product((4, 8), (128, 32, WIDTH), (0, 8))],
)
def test_a_product_is_that_of_the_weights_less_their_zero_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: str, bits: int, block: int, zero_bits: int
) -> None:
    monkeypatch.setattr(ort, "INT8_ACTIVATIONS", 1)
    rng, half = np.random.default_rng(bits * block), 1 << (bits - 1)
    codes = rng.integers(-half, half, (ROWS, WIDTH)).astype(np.int8)
    blocks = WIDTH // block
    scales = (rng.random((ROWS, blocks)) + 0.5).astype(np.float16) / np.float16(half)
    zeros = rng.integers(-half, half, (ROWS, blocks)).astype(np.int8)
    points = pack(zeros) if zero_bits == 4 else zeros
    parts = {WEIGHT: pack(codes) if bits == 4 else codes, f"{WEIGHT}.scales": scales, f"{WEIGHT}.zeros": points}
    write_safetensors(tmp_path / FILE, parts)
    at = {
        name: StoredTensor(FILE, info.offset, info.nbytes, info.dtype, info.shape)
        for name, info in read_header(tmp_path / FILE).tensors.items()
    }
    whole = at[WEIGHT]
    stored = StoredTensor(
        FILE, whole.offset, whole.nbytes, f"I{bits}", (ROWS, WIDTH), at[f"{WEIGHT}.scales"],
        at[f"{WEIGHT}.zeros"] if zero_bits else None,
    )  # fmt: skip
    written = make_dialect(dialect, f"int{bits}", 16, ir.DataType.FLOAT, blocked=True)
    builder = Builder("product", {WEIGHT: stored}, tmp_path, written)
    x = builder.input("x", ir.DataType.FLOAT, ["tokens", WIDTH])
    builder.output(builder.project(x, WEIGHT), "y", ir.DataType.FLOAT, ["tokens", ROWS])
    builder.write(tmp_path / "product.onnx")
    engine = onnxruntime.InferenceSession(
        tmp_path / "product.onnx", session_options(onnxruntime, 1), providers=["CPUExecutionProvider"]
    )
    values = rng.standard_normal((5, WIDTH)).astype(np.float32)
    integers = codes.astype(np.float64) - bool(zero_bits) * np.repeat(zeros, block, 1)
    wanted = values @ (integers * np.repeat(scales, block, 1).astype(np.float64)).T
    np.testing.assert_allclose(engine.run(None, {"x": values})[0], wanted, atol=2e-4, rtol=1e-5)
