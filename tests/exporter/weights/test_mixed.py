"""Matrices of more bits in an int4 decoder: the mean that is asked for, which matrices have them, and the limits."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

import vtx
from tests.support import bundles
from tests.support.exporting import interrupted, run
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json
from tests.support.quantised import awq, make_quantised
from tests.support.tiny import Tiny, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.weights.plan import StoredTensor
from vtx.exporter.weights.tensors import BundleWeights, CheckpointWeights
from vtx.runtime.backends.engines import INSTRUCTIONS
from vtx.runtime.bundle.spec.stored import EMBEDDING, HEAD, HEADS, Precisions
from vtx.runtime.errors import RequestError
from vtx.runtime.host.machine import cpu_flags
from vtx.runtime.report.golden import check_golden
from vtx.runtime.report.inspect import fidelity_lines
from vtx.tools.data.items import Data, Item
from vtx.tools.model.mixed import head_rows, widened

WIDE = Tiny(hidden=128, ffn=192)


def matrices_of(stored: dict[str, StoredTensor]) -> list[tuple[str, StoredTensor]]:
    return [
        (name, tensor)
        for name, tensor in stored.items()
        if tensor.scales is not None and name.startswith(("text.", "head."))
    ]


def original(whole: CheckpointWeights, name: str, stored: dict[str, StoredTensor]) -> torch.Tensor:
    """The checkpoint's weights of a stored matrix, which may be some rows of the head."""
    parts = head_rows(whole.rows(HEAD)) if HEADS[0] in stored else {}
    if name not in parts:
        return whole.read(name)
    return whole.read(HEAD, slice(parts[name].start, parts[name].stop))


def bits_of(stored: dict[str, StoredTensor]) -> float:
    """Bits of a weight of the decoder's matrices and the head, of the bytes that are stored."""
    matrices = [tensor for _, tensor in matrices_of(stored)]
    parts = [part for tensor in matrices for part in (tensor, tensor.scales, tensor.zeros) if part is not None]
    return 8 * sum(part.nbytes for part in parts) / sum(prod(tensor.shape) for tensor in matrices)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "compute"), [("cpu", "f32"), ("openvino", "f32"), ("openvino", "int8")])
def test_a_bundle_has_the_bits_that_were_asked_for_and_is_nearer(
    tiny_checkpoint: Checkpoints, tmp_path: Path, device: str, compute: str
) -> None:
    """Both engines compute what the stored weights say."""
    if device == "openvino":
        pytest.importorskip("openvino", reason="needs vtx-edge[openvino]", exc_type=ImportError)
    if compute == "int8" and cpu_flags().isdisjoint(INSTRUCTIONS["int8"]):
        pytest.skip("this processor has no products of bytes")
    folder = tiny_checkpoint(WIDE)
    whole = CheckpointWeights(open_checkpoint(str(folder)))
    low = ExportOptions(str(folder), (3,), "int4", int4_block=32, dialects=("ort", "plain"))
    errors = list[float]()
    bits = list[float]()
    for options in (low, replace(low, bits=6.0), replace(low, bits=7.0)):
        stored = dict(plan_export(options).weights.stored)
        made = bundles.export_with(options, tmp_path / f"{options.bits}")
        with vtx.load(made.folder, device=device, threads=1, compute=compute) as model:
            assert all(check.passed for check in check_golden(model))
        rounded = BundleWeights(made.folder, stored)
        names = [name for name, _ in matrices_of(stored)]
        errors.append(sum(float((original(whole, n, stored) - rounded.read(n)).square().sum()) for n in names))
        bits.append(bits_of(stored))
        if options.bits is not None:
            record = made.manifest.record["mixed"]
            wider = [n for n, tensor in matrices_of(stored) if tensor.dtype == "I8"]
            assert set(wider) >= {HEADS[0], HEADS[2]}
            assert stored[HEAD].dtype == "I4"
            assert (record["bits"], record["int8"]) == (round(bits[-1], 3), sorted(wider))
            assert fidelity_lines(made.manifest)[0].startswith(f"weights: {record['bits']} bits in the mean")
    assert bits[0] < 5.9 < bits[1] <= 6 < 6.9 < bits[2] <= 7
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.sampled
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_s_parts_are_its_rows_in_order(tiny_checkpoint: Checkpoints, tmp_path: Path, tied: bool) -> None:
    folder = tiny_checkpoint(replace(WIDE, tied=tied))
    options = ExportOptions(str(folder), (3,), "int4", int4_block=32, bits=6.5, dialects=("ort",))
    stored = dict(plan_export(options).weights.stored)
    rounded = BundleWeights(bundles.export_with(options, tmp_path / "b").folder, stored)
    whole = CheckpointWeights(open_checkpoint(str(folder))).read(EMBEDDING if tied else HEAD)
    assert [stored[name].dtype for name in HEADS] == ["I8", "I4", "I8"]
    made = torch.cat([rounded.read(name) for name in HEADS])
    assert made.shape == whole.shape
    assert float((made - whole).abs().max()) < 0.15 * float(whole.abs().max())


def test_a_head_whose_precision_is_named_stays_whole(tiny_checkpoint: Checkpoints) -> None:
    options = ExportOptions(str(tiny_checkpoint(WIDE)), (3,), "int4", head_precision="int8", bits=6.5)
    stored = plan_export(options).weights.stored
    assert stored[HEAD].dtype == "I8"
    assert HEADS[0] not in stored


@pytest.mark.parametrize("bits", [1.0, 4.2, 9.0, float("nan"), float("inf")])
def test_bits_out_of_reach_are_refused_with_the_range(tiny_checkpoint: Checkpoints, bits: float) -> None:
    options = ExportOptions(str(tiny_checkpoint(WIDE)), (3,), "int4", bits=bits)
    with pytest.raises(
        RequestError, match=r"--bits \S+ is out of reach: .* take \S+ bits .* int4 alone and \S+"
    ) as error:
        plan_export(options)
    words = str(error.value).split()
    low = float(words[words.index("take") + 1])
    high = float(words[words.index("alone") + 2])
    for end in (low, high):
        stored = dict(plan_export(replace(options, bits=end)).weights.stored)
        assert 0 <= end - bits_of(stored) < 0.25
    assert [tensor.dtype for _, tensor in matrices_of(stored)].count("I4") <= 1


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_bits_are_for_int4(precision: str) -> None:
    with pytest.raises(RequestError, match=f"this one is {precision}; add --precision int4"):
        ExportOptions("m", (3,), precision, bits=6.3)


def test_integers_of_a_checkpoint_keep_their_bits(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    quantised, _ = make_quantised(tiny_checkpoint(WIDE), tmp_path, awq(32))
    with pytest.raises(RequestError, match="this checkpoint's are integers"):
        plan_export(ExportOptions(str(quantised), (3,), "int4", bits=6.3))


def test_matrices_are_widened_in_the_order_of_their_kinds_and_from_the_last_layer() -> None:
    kinds = ("v_proj", "k_proj", "o_proj", "up_proj", "down_proj", "q_proj")
    tensors = [(f"text.layers.{layer}.{kind}.weight", (64, 64)) for layer in range(12) for kind in kinds]
    precisions = Precisions("int4", "int8", "int8", "fp16", {"int4": 32})
    order = list[str]()
    for step in range(201):
        wider = widened(precisions, tensors, 4.625 + step * (8.25 - 4.625) / 200).wider
        assert wider >= {*order}
        order += sorted(wider - {*order})
    turns = [kinds.index(name.split(".")[3]) for name in order]
    assert turns == [0] * 12 + [1] * 12 + [2] * 12 + [4, 5, 3] * 12
    assert [int(name.split(".")[2]) for name in order[:12]] == [*range(11, -1, -1)]


@pytest.mark.parametrize(("count", "character"), [(32_000, 29_871), (256_000, 235_248), (262_208, 236_743)])
def test_the_single_characters_of_sentencepiece_are_among_the_last_rows(count: int, character: int) -> None:
    first, middle, last = head_rows(count).values()
    assert character in last
    assert (first.start, last.stop) == (0, count)
    assert (first.stop, middle.stop) == (middle.start, last.start)
    assert len(middle) > count // 2


def test_an_interrupted_export_resumes_with_the_same_matrices(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    options = ExportOptions(
        str(tiny_checkpoint(WIDE)),
        (3,),
        "int4",
        dialects=("ort",),
        bits=6.0,
        aware=Data("pictures", (Item((random_image(1),), "red?"), Item((random_image(2),), "how many?"))),
    )
    whole = run(plan_export(options), tmp_path / "whole").manifest
    interrupted(plan_export(options), tmp_path / "b", "weights", 0.5)
    made = run(plan_export(options), tmp_path / "b").manifest
    assert made.files == whole.files
    assert made.record["mixed"] == whole.record["mixed"]
    with vtx.load(tmp_path / "b", threads=1) as model:
        assert all(check.passed for check in check_golden(model))
    assert read_json(tmp_path / "b/vtx.json")["record"]["options"]["bits"] == 6
