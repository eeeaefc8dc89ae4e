"""vtx-bench: figures that agree with each other and with the formulas, bad input, interruption, what it loads."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from tests.support.bundles import EXPORT_ONLY, export
from tests.support.exported import THREADS
from tests.support.families.videos import NEXT_VIDEO
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json
from tests.support.near import assert_near
from tests.support.tiny import Tiny, random_image
from tests.support.video_files import write_video

import vtx
from vtx import cli
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.backends.engines import COMPUTE
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.precision import ARITHMETIC
from vtx.runtime.report.inspect import kv_bytes
from vtx.tools.bench.ceilings.ceilings import Ceilings
from vtx.tools.bench.ceilings.products import Kind, Product, make_graph
from vtx.tools.bench.series import Series, shown, spread
from vtx.tools.bench.stopwatch import split, timed
from vtx.tools.bench.work import WorkCount, WorkCounter, shares, weights_read
from vtx.tools.common.memory import resident
from vtx.tools.estimate.flops import attention_macs, encode_flops
from vtx.tools.estimate.sizes import bundle_size
from vtx.tools.estimate.vision import VisionSize

NEW, REPEATS = 4, 3


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny_checkpoint(), tmp_path_factory.mktemp("bench") / "bundle").folder


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "image.png"
    random_image(0).save(path)
    return path


def vtx_bench(bundle: Path, *words: str) -> Result:
    few = ("--new-tokens", str(NEW), "--repeats", str(REPEATS), "--threads", str(THREADS))
    return CliRunner().invoke(cli.bench, ["--bundle", str(bundle), *few, *words], prog_name="vtx-bench")


def rows_of(printed: str) -> list[str]:
    """The K of each row of the tables."""
    return re.findall(r"^ ?(none|\d+)  ", printed, re.MULTILINE)


@pytest.fixture(scope="module")
def report(bundle: Path, image: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target = tmp_path_factory.mktemp("report") / "out.json"
    done = vtx_bench(bundle, "--image", str(image), "--out", str(target))
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = read_json(target)
    return found


def test_work_is_counted_and_golden_vectors_are_judged_in_every_arithmetic(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    assert {compute for compute in COMPUTE if WorkCounter(opened, compute, 1).weights} == set(COMPUTE)
    assert ARITHMETIC.keys() == set(COMPUTE)


@pytest.mark.slow
def test_a_video_is_measured_and_the_work_of_its_frames_counted(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """LLaVA-NeXT-Video averages a frame's 16 patches to 4 before the projector."""
    pytest.importorskip("av", reason="the [video] extra is not installed")
    folder = export(tiny_checkpoint(NEXT_VIDEO), tmp_path / "bundle").folder
    clip = write_video(tmp_path / "clip.mp4", frames=9)
    done = vtx_bench(folder, "--video", str(clip), "--frames", "6", "--k", "none", "--repeats", "1", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["workload"]["vision_tokens"] == 6 * 4
    tower = bundle_size(Bundle.open(folder)).vision
    assert isinstance(tower, VisionSize)
    (depth,) = found["depths"]
    assert depth["vision_flops"] == encode_flops(replace(tower, view_tokens=4), 6)
    assert depth["ms"]["vision"]["median"] > 0
    for words in (("--video", str(clip), "--image", "x.png"), ("--frames", "6")):
        assert vtx_bench(folder, *words).exit_code == 2


# --- figures --------------------------------------------------------------------------------------


def test_the_report_has_these_fields_and_every_k(report: dict[str, Any]) -> None:
    assert set(report) == {
        "format", "machine", "model", "workload", "interrupted", "predicted_s", "load_ms", "loaded_bytes", "ceilings",
        "depths",
    }  # fmt: skip
    assert report["format"] == "vtx-bench-1"
    assert [depth["k"] for depth in report["depths"]] == [None, 3, 5]
    for depth in report["depths"]:
        assert set(depth) == {
            "k", "rest", "full_layers", "ms", "prefill_stages", "kv_bytes", "kv_slots", "steady_bytes", "peak_bytes",
            "vision_flops", "prefill_flops", "decode_bytes", "shares",
        }  # fmt: skip
        assert set(depth["ms"]) == {
            "preprocess", "vision", "prefill", "first_token", "second_question", "second_at_another_k",
            "decode_per_token",
        }  # fmt: skip
        assert [(s["first"], s["last"]) for s in depth["prefill_stages"]] == [(1, 2), (3, 4), (5, 8)]
    assert report["interrupted"] is False
    assert report["machine"]["versions"]["vtx-edge"] == vtx.__version__
    assert report["workload"]["new_tokens"] == NEW


def test_a_rest_stays_at_each_numbered_k_and_is_counted(bundle: Path, image: Path) -> None:
    done = vtx_bench(bundle, "--image", str(image), "--rest", "25%", "--repeats", "1", "--json")
    assert done.exit_code == 0, done.stderr
    full, *rested = json.loads(done.stdout)["depths"]
    assert (full["k"], full["rest"]) == (None, 0)
    for depth in rested:
        whole, last = depth["kv_slots"][0], depth["kv_slots"][-1]
        assert depth["rest"] == 4
        assert whole - last == 12, "of 16 image tokens"
        assert depth["prefill_flops"] < full["prefill_flops"]
    assert "3, rest 4 " in vtx_bench(bundle, "--image", str(image), "--k", "3", "--rest", "4", "--repeats", "1").stdout


def test_a_rest_without_a_k_or_that_is_none_is_refused(bundle: Path) -> None:
    done = vtx_bench(bundle, "--k", "none", "--rest", "10%")
    assert (done.exit_code, "--rest is what stays from K on" in done.stderr) == (2, True)
    done = vtx_bench(bundle, "--k", "3", "--rest", "ten")
    assert (done.exit_code, "rest is 'ten'; it must be a share" in done.stderr) == (1, True)


def test_every_series_counts_its_repeats_and_is_in_order(report: dict[str, Any]) -> None:
    for depth in report["depths"]:
        for series in [*depth["ms"].values(), *(stage["ms"] for stage in depth["prefill_stages"])]:
            assert series["n"] == REPEATS
            assert 0 <= series["min"] <= series["q1"] <= series["median"] <= series["q3"] <= series["max"]
    for ceiling, unit in (("gemm", "flops_per_s"), ("read", "bytes_per_s")):
        assert report["ceilings"][ceiling][unit]["n"] == REPEATS


def test_parts_are_not_longer_than_the_whole(report: dict[str, Any]) -> None:
    for depth in report["depths"]:
        ms = depth["ms"]
        assert sum(stage["ms"]["min"] for stage in depth["prefill_stages"]) <= ms["prefill"]["max"]
        assert ms["vision"]["min"] + ms["prefill"]["min"] <= ms["first_token"]["min"]
        assert ms["vision"]["min"] > 0
        assert ms["decode_per_token"]["min"] > 0


def test_caches_are_those_of_the_formulas(report: dict[str, Any], bundle: Path) -> None:
    manifest, work = Bundle.open(bundle).manifest, report["workload"]
    text = work["prompt_tokens"] - work["vision_tokens"]
    for depth in report["depths"]:
        assert depth["kv_bytes"] == kv_bytes(manifest, depth["k"], text=text, vision=work["vision_tokens"])
        assert depth["full_layers"] == depth["kv_slots"].count(work["prompt_tokens"])


def test_work_is_that_of_the_rows_that_must_run(report: dict[str, Any], bundle: Path) -> None:
    size = bundle_size(Bundle.open(bundle))
    decoder = size.decoder
    # float32, each read once a token
    weights = 4 * (decoder.layers * decoder.layer_macs + decoder.head_macs + decoder.small_parameters)
    for depth in report["depths"]:
        macs = decoder.head_macs
        for slots in depth["kv_slots"]:  # the prefix and the question in one run
            macs += slots * decoder.layer_macs + attention_macs(decoder, slots, slots)
        assert depth["prefill_flops"] == 2 * macs
        assert depth["vision_flops"] == encode_flops(size.vision, 1)
        slots = sum(depth["kv_slots"]) + decoder.layers * sum(range(1, NEW)) / (NEW - 1)
        assert depth["decode_bytes"] == weights + round(slots * Bundle.open(bundle).manifest.kv_slot_bytes())


def test_shares_are_work_over_time_over_the_ceiling(report: dict[str, Any]) -> None:
    gemm, read = report["ceilings"]["gemm"]["flops_per_s"], report["ceilings"]["read"]["bytes_per_s"]
    for depth in report["depths"]:
        rate = depth["prefill_flops"] / depth["ms"]["prefill"]["median"] * 1000
        assert depth["shares"]["prefill"] == pytest.approx(min(1, rate / gemm["max"]))
        rate = depth["decode_bytes"] / depth["ms"]["decode_per_token"]["median"] * 1000
        assert depth["shares"]["decode"] == pytest.approx(min(1, rate / read["max"]))


def test_a_phase_faster_than_the_ceiling_s_own_runs_reaches_all_of_it() -> None:
    rate = SimpleNamespace(max=100.0)
    ceilings: Any = SimpleNamespace(
        gemm=SimpleNamespace(flops_per_s=rate), vision_gemm=None, read=SimpleNamespace(bytes_per_s=rate)
    )
    ms = {"vision": None, "prefill": spread([1000.0]), "decode_per_token": spread([1000.0])}
    found = shares(WorkCount(1, 200, 50), ms, ceilings)
    assert (found.vision, found.prefill, found.decode) == (None, 1.0, 0.5)


def test_the_table_says_machine_model_workload_gains_and_ceilings(bundle: Path) -> None:
    done = vtx_bench(bundle, "--k", "none,3", "--repeats", "1", "--warmup", "0")
    assert done.exit_code == 0, done.stderr
    assert "predicted: about" in done.stderr
    for words in ("cores", "onnxruntime 1", "8 layers of", f"{NEW} new", "fp32 weights", "GFLOP/s"):
        assert words in " ".join(done.stdout.split()), words
    rows = rows_of(done.stdout)
    assert rows == ["none", "3"], "one table"
    assert re.search(r"^K = 3 against none: first token [\d.]+ times as fast, second ", done.stdout, re.MULTILINE)
    assert len(re.findall(r"^K = (none|3) reaches of the ceilings: \d+% in vision", done.stdout, re.MULTILINE)) == 2
    assert "Memory: at most " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("tokens", [100, 101])
def test_a_prompt_has_the_length_that_was_asked_for(bundle: Path, tmp_path: Path, tokens: int) -> None:
    target = tmp_path / "out.json"
    words = ("--k", "3", "--repeats", "1", "--warmup", "0", "--out", str(target))
    assert vtx_bench(bundle, "--prompt-tokens", str(tokens), *words).exit_code == 0
    found = read_json(target)
    assert found["workload"]["prompt_tokens"] == tokens
    assert found["depths"][0]["ms"]["second_at_another_k"] is None


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("device", "compute", "precision", "read_as", "products"),
    [
        ("cpu", "f32", "fp16", "fp32", {"gemm": "by onnxruntime, f32 arithmetic"}),
        ("cpu", "f32", "int4", "int4",
         {"gemm": "by onnxruntime, int4 weights, products of integers, f32", "vision_gemm": "int8 weights"}),
        ("openvino", "f32", "fp16", "fp32", {"gemm": "by OpenVINO, f32 arithmetic"}),
        ("openvino", "bf16", "fp32", "bf16", {"gemm": "by OpenVINO, bf16 arithmetic"}),
        ("openvino", "bf16", "int8", "int8", {"gemm": "by OpenVINO, int8 weights, products of integers, bf16"}),
    ],
)  # fmt: skip
def test_ceilings_are_measured_in_the_arithmetic_that_computes(
    tiny_checkpoint: Checkpoints, tmp_path: Path, device: str, compute: str, precision: str, read_as: str,
    products: dict[str, str], needs_arithmetic: Callable[[str], None],
) -> None:  # fmt: skip
    if device == "openvino":
        pytest.importorskip("openvino")
    needs_arithmetic(compute)
    made, target = export(tiny_checkpoint(), tmp_path / "bundle", precision=precision).folder, tmp_path / "out.json"
    words = ("--device", device, "--compute", compute, "--k", "none,3", "--repeats", "1", "--out", str(target))
    done = vtx_bench(made, *words)
    assert done.exit_code == 0, done.stderr
    assert f"on {device} (asked for) in {compute}; predicted" in done.stderr
    assert f"{precision} weights, on {device} in {compute} arithmetic" in " ".join(done.stdout.split())
    found = read_json(target)
    assert (found["model"]["device"], found["model"]["compute"]) == (device, compute)
    assert found["model"]["weights_read_as"] == read_as
    assert f"A token is counted as reading {read_as} weights" in " ".join(done.stdout.split())
    assert set(found["ceilings"]) == {*products, "read"}
    for name, words_of in products.items():
        assert words_of in found["ceilings"][name]["what"]
        assert words_of in done.stdout
    for depth in found["depths"]:
        ceiling = found["ceilings"].get("vision_gemm", found["ceilings"]["gemm"])["flops_per_s"]["max"]
        rate = depth["vision_flops"] / depth["ms"]["vision"]["median"] * 1000
        assert depth["shares"]["vision"] == pytest.approx(rate / ceiling)


def test_a_device_without_a_known_ceiling_gets_no_shares(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vtx.tools.bench.ceilings.products.DEVICES", ())
    target = tmp_path / "out.json"
    done = vtx_bench(bundle, "--k", "3", "--repeats", "1", "--out", str(target))
    assert done.exit_code == 0, done.stderr
    assert "no ceilings: they are measured for CPUs" in done.stderr
    assert "No ceilings were measured" in done.stdout
    assert read_json(target)["depths"][0]["shares"] is None


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("precision", "integers"), [("fp32", None), ("fp16", None), ("int8", 1), ("int4", 0.5)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_token_reads_integers_as_they_are_stored_and_floats_as_they_are_computed_with(
    tiny_checkpoint: Checkpoints, tmp_path: Path, precision: str, integers: float | None, tied: bool
) -> None:
    made = export(tiny_checkpoint(Tiny(tied=tied)), tmp_path / "bundle", precision=precision)
    size = bundle_size(made).decoder
    matrices, head = size.layers * size.layer_macs, size.head_macs
    outputs = size.head_dim * (size.heads + 2 * size.kv_heads) + 2 * size.hidden + 2 * size.ffn  # rows of a layer
    narrow, wide = weights_read(made, 2), weights_read(made, 4)
    if integers is None:
        everything = matrices + head + size.small_parameters
        assert (narrow, wide) == (2 * everything, 4 * everything)
    else:
        assert narrow > integers * matrices + 2 * size.small_parameters + head
        assert narrow < matrices * (integers + 0.25) + 2 * (head + size.small_parameters) + 8 * outputs
        assert 2 * size.small_parameters <= wide - narrow <= 2 * (head + size.small_parameters)


# --- the parts ------------------------------------------------------------------------------------


def test_a_stopwatch_changes_no_answer_and_sees_every_call(bundle: Path, image: Path) -> None:
    plain = load(bundle, threads=THREADS)
    backend, calls = timed(plain.backend)
    watched = Model(plain.bundle, backend, plain.loaded.load_ms)
    options = vtx.Options(max_new_tokens=NEW, ignore_eos=True)
    with plain.open(str(image)) as one, watched.open(str(image)) as other:
        want, got = (conversation.ask("what is it?", 3, options) for conversation in (one, other))
    assert got.token_ids == want.token_ids
    prefill, decode = split(calls)
    assert [call.name for call in decode] == ["embed", *["append"] * 3, "head"] * (NEW - 1)
    assert [call.tokens for call in decode if call.name == "append"] == [1] * 3 * (NEW - 1)
    assert sum(call.name == "vision" for call in prefill) == 1
    tokens, vision = got.stats.prompt_tokens, got.stats.vision_tokens
    rows = [sum(c.tokens for c in prefill if c.stage == stage) for stage in range(3)]
    assert rows == [tokens, tokens - vision, tokens - vision]
    assert watched.backend.device == plain.backend.device


KINDS = [
    Kind("cpu", "f32", "float"), Kind("cpu", "f32", "int8"), Kind("cpu", "f32", "int4"),
    Kind("openvino", "f32", "float"), Kind("openvino", "f32", "int8"), Kind("openvino", "f32", "int4"),
    Kind("openvino", "int8", "int8"), Kind("openvino", "int8", "int4"),
    Kind("openvino", "bf16", "float"), Kind("openvino", "bf16", "int8"), Kind("openvino", "bf16", "int4"),
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS, ids=Kind.in_words)
def test_a_product_is_a_sound_graph_and_computes_what_onnx_says_of_it(
    kind: Kind, needs_arithmetic: Callable[[str], None]
) -> None:
    import onnx
    from onnx.reference import ReferenceEvaluator

    if kind.device == "openvino":
        pytest.importorskip("openvino")
    needs_arithmetic(kind.compute)
    graph = onnx.load_model_from_string(make_graph(kind, 4, 256, 8))
    rows = np.random.default_rng(1).standard_normal((4, 256), np.float32)
    if graph.graph.node[0].op_type == "MatMulNBits":
        weights = {t.name: onnx.numpy_helper.to_array(t) for t in graph.graph.initializer}
        octets = weights["w"].reshape(8, -1)
        if kind.stored == "int4":
            octets = np.stack((octets & 15, octets >> 4), -1).reshape(8, -1)
        middle = 8 if kind.stored == "int4" else 128
        wanted = rows @ (np.repeat(weights["scales"], 64, 1) * (octets.astype(np.float32) - middle)).T
    else:
        onnx.checker.check_model(graph)
        wanted = ReferenceEvaluator(graph).run(None, {"x": rows})[0]
    product = Product(kind, 4, 256, 8, THREADS)
    assert product.flops == 2 * 4 * 256 * 8
    found = np.asarray(product())
    exact = (kind.compute, kind.stored) == ("f32", "float")
    assert_near(found, wanted, (1e-6 if exact else 0.03) * np.abs(wanted).max())
    assert np.abs(found - wanted).max() > 0 or exact, "it did not compute more narrowly"


def test_kinds_tell_apart_what_computes_otherwise_and_only_that() -> None:
    assert Kind.of("cpu", "f32", "fp16") == Kind.of("cpu", "f32", "fp32")
    assert Kind.of("openvino", "bf16", "fp32") != Kind.of("openvino", "f32", "fp32")
    assert Kind.of("cpu", "f32", "int8") != Kind.of("cpu", "f32", "int4")


@pytest.mark.slow
def test_ceilings_are_rates_of_products_and_of_memory() -> None:
    ceilings = Ceilings({"gemm": Kind("cpu", "f32", "float")}, 1, 8, 8, THREADS)
    ceilings.measure()
    found = ceilings.report()
    assert "[256, 1024] x [1024, 1024] by onnxruntime, f32 arithmetic" in found.gemm.what
    assert found.gemm.flops_per_s.median > 0
    assert found.read.bytes_per_s.median > 0


def test_no_ceilings_are_measured_where_memory_is_short(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vtx.tools.bench.ceilings.ceilings.available_memory", lambda: 1000)
    done = vtx_bench(bundle, "--k", "3", "--repeats", "1")
    assert done.exit_code == 0, done.stderr
    assert "no ceilings: measuring them takes" in done.stderr
    assert "3" in rows_of(done.stdout)


PEAKS = """
import numpy as np
from vtx.tools.common import memory
before = memory.peak()
block = np.ones(256 << 20, np.uint8)
high = memory.peak()
del block
memory.forget_peak()
print(high - before, high - memory.peak(), memory.peak() - memory.resident())
"""


@pytest.mark.skipif(resident() is None, reason="only Linux says how much memory a process held")
def test_the_peak_of_memory_starts_anew() -> None:
    """In a process of its own, so that what other tests held and freed has no part in it."""
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    risen, fallen, above_now = map(int, done.stdout.split())
    assert risen > 128 << 20
    assert fallen > 128 << 20
    assert above_now < 64 << 20


def test_a_spread_of_one_is_itself_and_few_figures_show_extremes() -> None:
    one = spread([3.0])
    assert one == Series(median=3.0, q1=3.0, q3=3.0, min=3.0, max=3.0, n=1)
    assert shown(spread([1.0, 2.0, 9.0]), 1) == "2.0 (1.0 to 9.0)"
    assert shown(spread([1.0, 2.0, 3.0, 4.0, 100.0]), 1) == "3.0 (1.5 to 52.0)"


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--k", "4"], 1, "K = 4 was not prebuilt, this bundle has 3, 5"),
        (["--k", "none,9"], 1, "K = 9 is outside 2..8"),
        (["--k", "auto"], 1, "--k auto needs gates and this bundle has none"),
        (["--k", "3,x"], 2, "'3,x' is not a number, none, auto or a list"),
        (["--image", "nowhere.jpg"], 1, "nowhere.jpg"),
        (["--image", __file__], 1, "image"),
        (["--prompt-tokens", "5"], 1, "--prompt-tokens is 5, and the nearest prompt"),
        (["--question", "what?", "--prompt-tokens", "90"], 2, "--question and --prompt-tokens are mutually exclusive"),
        (["--question", " "], 1, "question"),
        (["--prompt-tokens", "100000000000000"], 1, "do not fit a context of"),
        (["--new-tokens", "100000"], 1, "use fewer"),
        (["--new-tokens", "1"], 1, "--new-tokens is 1; it must be at least 2"),
        (["--repeats", "0"], 1, "--repeats is 0"),
        (["--warmup", "-1"], 1, "--warmup is -1"),
        (["--threads", "-1"], 1, "threads is -1"),
        (["--threads", "0"], 1, "threads is 0"),
        (["--device", "abacus"], 2, "device 'abacus' is not available in this version; it runs on: auto, cpu"),
        (["--device", "cpu", "--compute", "bf16"], 1, "cpu computes in f32, not bf16; that has: openvino"),
        (["--compute", "f8"], 2, "is not one of 'auto', 'f32'"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_measured(
    bundle: Path, tmp_path: Path, words: list[str], code: int, message: str
) -> None:
    done = vtx_bench(bundle, *words, "--out", str(tmp_path / "out.json"))
    assert done.exit_code == code
    assert message in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())
    if code == 1:
        assert len(done.stderr.splitlines()) == 1


def test_a_k_that_is_named_twice_is_measured_once(bundle: Path) -> None:
    done = vtx_bench(bundle, "--k", "3,3", "--repeats", "1")
    assert done.exit_code == 0, done.stderr
    assert set(rows_of(done.stdout)) == {"3"}
    assert len(rows_of(done.stdout)) == done.stdout.count(" K  ")  # one row a table


def test_no_bundle_is_an_error_that_names_it(tmp_path: Path) -> None:
    done = vtx_bench(tmp_path / "none")
    assert done.exit_code == 1
    assert "is not a directory" in done.stderr


def test_figures_that_cannot_be_written_are_still_printed(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("vtx.tools.common.files.os.replace", full)
    done = vtx_bench(bundle, "--k", "3", "--repeats", "1", "--out", str(tmp_path / "out.json"))
    assert done.exit_code == 1
    assert "cannot write" in done.stderr
    assert "3" in rows_of(done.stdout)


# --- interruption, plot, libraries ----------------------------------------------------------------


def interrupt_at(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the beginning of the round that counts as number `call`, from 1."""
    measure, calls = Ceilings.measure, list[None]()

    def stop(self: Ceilings) -> None:
        calls.append(None)
        if len(calls) == call:
            raise KeyboardInterrupt
        measure(self)

    monkeypatch.setattr(Ceilings, "measure", stop)


def test_an_interruption_keeps_what_was_measured(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(2, monkeypatch)
    done = vtx_bench(bundle, "--out", str(tmp_path / "out.json"))
    assert done.exit_code == 130
    assert "INTERRUPTED" in done.stdout
    found = read_json(tmp_path / "out.json")
    assert found["interrupted"] is True
    assert [depth["ms"]["prefill"]["n"] for depth in found["depths"]] == [1, 1, 1]


def test_an_interruption_before_the_first_figure_leaves_nothing(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(1, monkeypatch)
    done = vtx_bench(bundle, "--out", str(tmp_path / "out.json"))
    assert done.exit_code == 130
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


def test_measuring_needs_no_exporting_library(bundle: Path, tmp_path: Path) -> None:
    words = ["--bundle", str(bundle), "--repeats", "1", "--new-tokens", "2", "--out", str(tmp_path / "out.json")]
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({EXPORT_ONLY}))\n"
        f"from vtx.cli import bench; bench({words}, standalone_mode=False)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(read_json(tmp_path / "out.json")["depths"]) == 3
