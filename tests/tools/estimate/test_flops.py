"""FLOPs and KV bytes: the papers' figures, properties, and what onnxruntime executes of our own graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.bundles import export_all
from tests.support.exported import THREADS
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json
from tests.support.tiny import Tiny

from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.exporter.checkpoint.spec import config_size
from vtx.runtime.backends.ort.library import session_options
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import RequestError
from vtx.tools.estimate.flops import (
    attention_macs,
    calflops,
    decode_flops,
    encode_flops,
    full_schedule,
    kv_bytes,
    make_schedule,
    prefill_flops,
    total_flops,
    withdrawal_schedule,
)
from vtx.tools.estimate.sizes import KNOWN
from vtx.tools.model.decoder import Decoder

SEVEN, THIRTEEN, NEXT = (KNOWN[name] for name in ("llava-1.5-7b", "llava-1.5-13b", "llava-next-7b"))
TERA = 1e12


def fastv_schedule(layers: int, *, text: int, vision: int, after: int = 2) -> tuple[int, ...]:
    """FastV: the first `after` layers see all, the others the better half of the vision tokens."""
    return make_schedule([vision] * after + [vision - vision // 2] * (layers - after), text=text)


# --- the papers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "sequence", "full", "withdrawn", "fastv", "full_layers"),
    [(SEVEN, 642, 8.48, 4.68, 4.91, 16), (THIRTEEN, 642, 16.50, 9.10, 9.56, 20), (NEXT, 2174, 28.73, 14.80, 15.67, 16)],
    ids=["1.5-7b", "1.5-13b", "next-7b"],
)
def test_vtw_table_2_is_reproduced(
    model: Any, sequence: int, full: float, withdrawn: float, fastv: float, full_layers: int
) -> None:
    size, text, vision = model.decoder, 66, sequence - 66
    layers = size.layers
    none = calflops(size, full_schedule(layers, text=text, vision=vision))
    at_k = calflops(size, withdrawal_schedule(layers, full_layers + 1, text=text, vision=vision))
    assert none / TERA == pytest.approx(full, rel=0.001)
    assert at_k / TERA == pytest.approx(withdrawn, rel=0.001)
    assert calflops(size, fastv_schedule(layers, text=text, vision=vision)) / TERA == pytest.approx(fastv, rel=0.01)


def test_vtw_table_3_is_reproduced() -> None:
    size = KNOWN["video-llava-7b"].decoder
    vision = 2048
    shares = []
    for rows in (
        withdrawal_schedule(size.layers, 17, text=1, vision=vision),
        fastv_schedule(size.layers, text=1, vision=vision),
    ):
        kept = [count - 1 for count in rows]
        shares.append(calflops(size, kept) / calflops(size, [vision] * size.layers))
    assert shares == pytest.approx([0.5, 0.53125])


def test_vtw_table_4_is_reproduced() -> None:
    # The mean lengths are not printed: s follows from the baseline's 22.9 T, the text from VTW's 12.3 T.
    size, sequence, text = NEXT.decoder, 1733, 128
    vision = sequence - text
    found = [
        calflops(size, rows) / TERA
        for rows in (
            full_schedule(32, text=text, vision=vision),
            withdrawal_schedule(32, 17, text=text, vision=vision),
            fastv_schedule(32, text=text, vision=vision),
        )
    ]
    assert found == pytest.approx([22.9, 12.3, 12.9], rel=0.01)


@pytest.mark.parametrize(
    ("sequence", "seven", "vila", "thirteen"),
    [
        (662, 9.2, 9.2, 17.6),  # SEED
        (638, 8.9, 8.9, 16.9),  # MME
        (687, 9.6, 9.5, 18.3),  # MMB
        (632, 8.8, 8.8, 16.8),  # POPE, GQA, VQA
        (627, 8.7, 8.7, 16.7),  # MM-Vet
        (682, 9.5, 9.5, 18.1),  # TextVQA
        (703, 9.8, 9.8, 18.6),  # SQA-I
    ],
)
def test_dyvte_totals_are_reproduced(sequence: int, seven: float, vila: float, thirteen: float) -> None:
    # The mean lengths are not printed: one length a benchmark has to give all three models.
    for model, expected in ((SEVEN, seven), (KNOWN["vila-7b"], vila), (THIRTEEN, thirteen)):
        rows = full_schedule(model.decoder.layers, text=sequence - 576, vision=576)
        found = total_flops(model.decoder, rows, model.vision, views=1)
        assert found / TERA == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("sequence", "expected"), [(627, 15.4), (703, 16.4)], ids=["least", "most"])
def test_dyvte_totals_of_internvl_span_what_is_printed(sequence: int, expected: float) -> None:
    model = KNOWN["internvl-7b"]
    found = total_flops(model.decoder, full_schedule(32, text=sequence - 576, vision=576), model.vision, views=1)
    assert found / TERA == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(
    ("sequence", "mean_exit", "expected"),
    [(632, 16.4, 5.3), (682, 19.7, 6.7), (627, 21.1, 6.3), (703, 13.4, 5.5)],
    ids=["GQA", "TextVQA", "MM-Vet", "SQA-I"],
)
def test_dyvte_totals_after_the_exit_are_reproduced(sequence: int, mean_exit: float, expected: float) -> None:
    # Its table of exit layers counts from 0, so one layer more is full; the cost is linear in the exit.
    size, text, full_layers = SEVEN.decoder, sequence - 576, mean_exit + 1
    low, high = (
        total_flops(size, withdrawal_schedule(32, k, text=text, vision=576), SEVEN.vision, views=1)
        for k in (int(full_layers) + 1, int(full_layers) + 2)
    )
    assert (low + (high - low) * (full_layers % 1)) / TERA == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("sequence", "expected", "rel"), [(703, 6.2, 0.01), (627, 5.2, 0.01), (687, 6.0, 0.01), (662, 5.8, 0.02)]
)
def test_dyvte_fastv_totals_are_reproduced(sequence: int, expected: float, rel: float) -> None:
    rows = fastv_schedule(32, text=sequence - 576, vision=576, after=3)
    assert total_flops(SEVEN.decoder, rows, SEVEN.vision, views=1) / TERA == pytest.approx(expected, rel=rel)


def test_clip_l_336_and_the_7b_projector_take_what_dyvte_counts() -> None:
    vision = SEVEN.vision
    assert vision is not None
    whole, projector = encode_flops(vision, 1, whole=True), 2 * vision.view_tokens * vision.projector_macs
    assert (whole - projector) / TERA == pytest.approx(0.382, abs=0.0005)
    assert projector / TERA == pytest.approx(0.024, abs=0.0005)
    used = encode_flops(vision, 1)
    assert whole - used == 2 * vision.layer_macs  # the last layer is behind the feature layer


@pytest.mark.parametrize(
    ("tokens", "megabytes"), [(576, 302.4), (440, 231.0), (64, 33.6), (45, 23.6), (2880, 1512.1), (320, 168.0)]
)
def test_mustdrop_kv_bytes_are_reproduced(tokens: int, megabytes: float) -> None:
    assert sum(kv_bytes(SEVEN.decoder, [tokens] * 32, 2)) / 1e6 == pytest.approx(megabytes, rel=0.002)


# --- properties -----------------------------------------------------------------------------------


@st.composite
def decoders(draw: st.DrawFn) -> Decoder:
    kv_heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    small, wide = st.integers(1, 64), st.integers(1, 4096)
    biases = [draw(st.booleans()) for _ in range(4)]
    return Decoder(draw(small), draw(wide), draw(wide), kv_heads * group, kv_heads, draw(small), draw(wide), *biases)


texts, visions = st.integers(1, 200), st.integers(0, 3000)


@pytest.mark.slow
@given(size=decoders(), text=texts, vision=visions, data=st.data())
def test_withdrawal_is_the_schedule_that_keeps_all_and_then_nothing(
    size: Decoder, text: int, vision: int, data: st.DataObject
) -> None:
    full = data.draw(st.integers(1, size.layers)) if size.layers > 1 else 1
    kept = [vision] * full + [0] * (size.layers - full)
    k = None if full == size.layers else full + 1
    assert make_schedule(kept, text=text) == withdrawal_schedule(size.layers, k, text=text, vision=vision)


@pytest.mark.slow
@given(size=decoders(), text=texts)
def test_without_vision_tokens_k_changes_nothing(size: Decoder, text: int) -> None:
    rows = {withdrawal_schedule(size.layers, k, text=text, vision=0) for k in [None, *range(2, size.layers + 1)]}
    assert len(rows) == 1


@pytest.mark.parametrize("k", [-1, 0, 1, 33])
def test_a_k_outside_the_model_is_refused_with_the_range(k: int) -> None:
    with pytest.raises(RequestError, match=r"outside 2\.\.32"):
        withdrawal_schedule(32, k, text=1, vision=1)


def test_a_schedule_of_another_depth_or_of_negative_rows_is_refused() -> None:
    with pytest.raises(RequestError, match="3 layers does not fit a model of 32"):
        calflops(SEVEN.decoder, [1, 2, 3])
    with pytest.raises(RequestError, match="vision tokens are outside"):
        make_schedule([5, -1], text=3)


# --- our own graphs -------------------------------------------------------------------------------

TINIES = {
    "mha": Tiny(kv_heads=4),
    "gqa": Tiny(),
    "gqa-bias-head_dim": Tiny(head_dim=24, attention_bias=True, mlp_bias=True, feature_layer=(-2, -1)),
    "qwen2-siglip-tied": Tiny(
        text="qwen2", vision="siglip", select="full", tied=True, tokenizer="bytes", projector_bias=False
    ),
}


def size_of(checkpoint: Path) -> Any:
    return config_size(read_json(checkpoint / "config.json"), "tiny")


@pytest.mark.sampled
@pytest.mark.parametrize("tiny", TINIES.values(), ids=TINIES)
def test_the_tensors_of_a_decoder_are_those_that_transformers_saves(tiny: Tiny, tiny_checkpoint: Checkpoints) -> None:
    checkpoint = open_checkpoint(str(tiny_checkpoint(tiny)))
    stored = {name: info.shape for name, info in checkpoint.tensors.items() if name.startswith("text.")}
    stated = read_config(checkpoint.config).text.tensors()
    assert {name: shape for name, shape in stated if name.startswith("text.")} == stored


@pytest.fixture(scope="module", params=TINIES.values(), ids=TINIES)
def exported(
    request: pytest.FixtureRequest, tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Bundle, Any]:
    checkpoint = tiny_checkpoint(request.param)
    return export_all(checkpoint, tmp_path_factory.mktemp("flops") / "bundle", ks=(3, 6)), size_of(checkpoint)


def executed_macs(bundle: Bundle, graph: str, folder: Path, dims: dict[str, int], slots: int = 0) -> int:
    """Multiply-accumulates of one run of a graph, from the shapes that onnxruntime's profiler writes down."""
    import onnxruntime as ort

    options = session_options(ort, THREADS)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
    session = ort.InferenceSession(str(bundle.path(graph)), options, providers=["CPUExecutionProvider"])
    session.run(None, {value.name: fed(value, dims, slots) for value in session.get_inputs()})
    events = read_json(Path(session.end_profiling()))
    nodes = [event["args"] for event in events if event["name"].endswith("_kernel_time")]
    return sum(node_macs(node["op_name"], node, slots) for node in nodes)


def fed(value: Any, dims: dict[str, int], slots: int) -> Any:
    shape = [dims.get(size, 0) if isinstance(size, str) else size for size in value.shape]
    dtype = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}[value.type]
    known = {"last_slot": slots - 1, "total_slots": slots}
    return np.full(shape, known.get(value.name, 0), dtype)


def node_macs(kind: str, node: dict[str, Any], slots: int) -> int:
    into = [shape for entry in node["input_type_shape"] for shape in entry.values()]
    out = [shape for entry in node["output_type_shape"] for shape in entry.values()]
    if kind in ("Gemm", "MatMul"):
        return int(np.prod(out[0])) * into[0][-1]
    if kind == "Conv":
        return int(np.prod(out[0])) * int(np.prod(into[1][1:]))
    if kind == "GroupQueryAttention":
        return 2 * int(np.prod(into[0])) * slots
    if kind == "MultiHeadAttention":
        return 2 * int(np.prod(into[0])) * into[1][1]
    assert "Attention" not in kind, kind
    return 0


def decoder_macs(bundle: Bundle, size: Decoder, folder: Path, rows: tuple[int, ...]) -> int:
    """All stages and the head, one chunk; every layer of a stage has the same rows."""
    found = 0
    for stage, graph in bundle.manifest.stage_files("ort"):
        [count] = set(rows[stage.first - 1 : stage.last])
        dims = {"batch": 1, "each": count, "tokens": count, "max_context": 256, "capacity": 128}
        found += executed_macs(bundle, graph, folder, dims, slots=count)
    return found + executed_macs(bundle, bundle.manifest.dialects["ort"].head, folder, {"tokens": 1})


@pytest.mark.sampled
@pytest.mark.parametrize("k", [None, 3, 6])
def test_prefill_flops_are_what_the_graphs_execute(exported: tuple[Bundle, Any], tmp_path: Path, k: int | None) -> None:
    bundle, model = exported
    size: Decoder = model.decoder
    rows = withdrawal_schedule(size.layers, k, text=7, vision=20)
    assert 2 * decoder_macs(bundle, size, tmp_path, rows) == prefill_flops(size, rows)
    without_head = prefill_flops(size, rows) - 2 * size.head_macs
    assert total_flops(size, rows) == without_head


@pytest.mark.sampled
@pytest.mark.parametrize("k", [None, 3, 6])
def test_decode_flops_are_what_the_graphs_execute(exported: tuple[Bundle, Any], tmp_path: Path, k: int | None) -> None:
    bundle, model = exported
    size: Decoder = model.decoder
    slots = withdrawal_schedule(size.layers, k, text=7, vision=20)
    found = executed_macs(bundle, bundle.manifest.dialects["ort"].head, tmp_path, {"tokens": 1})
    for stage, graph in bundle.manifest.stage_files("ort"):
        dims = {"batch": 1, "each": 1, "tokens": 1, "max_context": 256, "capacity": 128}
        found += executed_macs(bundle, graph, tmp_path, dims, slots=slots[stage.first - 1] + 1)
    assert 2 * found == decode_flops(size, slots)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("images", [1, 2])
def test_vision_flops_are_what_the_graph_executes(exported: tuple[Bundle, Any], tmp_path: Path, images: int) -> None:
    bundle, model = exported
    found = executed_macs(bundle, bundle.manifest.dialects["ort"].vision, tmp_path, {"images": images})
    assert 2 * found == encode_flops(model.vision, images)


def test_attention_counts_the_whole_square() -> None:
    assert attention_macs(SEVEN.decoder, 642, 642) == 2 * 642 * 642 * 4096


def test_merged_windows_save_all_layers_behind_the_first_and_the_projector() -> None:
    vision = SEVEN.vision
    assert vision is not None
    rows, merged = vision.tower_tokens - 8 * 40, 8 * 40
    saved = (vision.used - 1) * (vision.layer_macs - vision.tower.layer_macs(rows))
    saved += vision.projector_macs * merged
    assert encode_flops(vision, 2) - encode_flops(vision, 2, merged=merged) == 2 * 2 * saved
    h, ffn = vision.model.vision.hidden, vision.model.vision.ffn
    assert vision.tower.layer_macs(rows) == rows * (4 * h * h + 2 * h * ffn) + 2 * rows * rows * h
