"""vtx-plan: sizes from names, configs and bundles; memory; estimates beside published figures; bad input."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.support.bundles import export_all
from tests.support.families.vila import VILA
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json, write_json
from tests.support.tiny import Tiny

from vtx import cli
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.exporter.checkpoint.spec import find_size, model_size
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import CheckpointError, RequestError
from vtx.runtime.host.profiles import Figure, load_profile
from vtx.runtime.precision import PRECISIONS
from vtx.runtime.report.inspect import kv_bytes
from vtx.tools.estimate.flops import attention_macs, encode_flops, full_schedule, total_flops, with_exit
from vtx.tools.estimate.plan import PlannedMethods, Workload, make_plan, spread_ks
from vtx.tools.estimate.sizes import KNOWN, ModelSize, bundle_size
from vtx.tools.estimate.weights import all_weights, precisions_by_name, precisions_of, resident, stored_bytes
from vtx.tools.tensorrt.support import engines_on

SEVEN = KNOWN["llava-1.5-7b"]
WORK = Workload(text=66, vision=576, new_tokens=256)
HALF = precisions_by_name(SEVEN, ["fp16"])


def vtx_plan(*words: str) -> Result:
    return CliRunner().invoke(cli.plan, words, prog_name="vtx-plan")


def planned(*words: str) -> dict[str, Any]:
    done = vtx_plan(*words, "--json")
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --- the command ----------------------------------------------------------------------------------


def test_the_papers_example_comes_out_of_the_command() -> None:
    found = planned("--model", "llava-1.5-7b", "--sequence", "642", "--text", "66", "--k", "17")
    [depth] = found["depths"]
    assert (depth["k"], depth["full_layers"]) == (17, 16)
    assert depth["calflops"] / 1e12 == pytest.approx(4.68, abs=0.005)
    assert depth["calflops_ratio"] == pytest.approx(0.5519, abs=0.001)
    assert depth["total_flops"] / 1e12 == pytest.approx(5.10, abs=0.005)
    assert depth["kv_slots"] == [642] * 16 + [66] * 16
    fp16 = depth["precisions"]["fp16"]
    assert fp16["kv_bytes"] == sum(fp16["kv_bytes_per_layer"]) == (642 + 66) * 16 * 16384
    assert list(depth["precisions"]) == list(PRECISIONS)
    assert "fits" not in fp16
    assert found["profile"] is found["estimate"] is None


@pytest.mark.parametrize(("rest", "count"), [("10%", 58), ("57", 57), ("0%", 0), ("1000", 576)])
def test_a_rest_stays_in_the_layers_from_k_on(rest: str, count: int) -> None:
    words = ("--model", "llava-1.5-7b", "--sequence", "642", "--text", "66", "--k", "none,17")
    full, rested = planned(*words, "--rest", rest)["depths"]
    assert (full["rest"], rested["rest"]) == (0, count)
    assert rested["kv_slots"] == [642] * 16 + [66 + count] * 16
    assert rested["precisions"]["fp16"]["kv_bytes"] == (642 + 66 + count) * 16 * 16384
    plain = planned(*words)["depths"]
    assert plain[1]["total_flops"] + (count > 0) <= rested["total_flops"] <= full["total_flops"]
    assert (rested["total_flops"] == full["total_flops"]) == (count == 576)
    assert plain[0] == full


def test_a_rest_counts_the_tokens_that_a_reduction_left() -> None:
    words = ("--model", "llava-1.5-7b", "--k", "17", "--reduce", "fastv:k=2,ratio=0.5", "--rest", "10%")
    [depth] = planned(*words)["depths"]
    assert depth["rest"] == 29
    assert depth["kv_slots"] == [640] * 2 + [64 + 288] * 14 + [64 + 29] * 16


def test_without_k_there_is_a_row_for_none_and_a_spread() -> None:
    found = planned("--model", "llava-1.5-7b")
    assert [depth["k"] for depth in found["depths"]] == [None, 29, 25, 21, 17, 13, 9, 5]
    assert found["sequence"] == 576 + 64
    for name in PRECISIONS:
        peaks = [depth["precisions"][name]["peak_bytes"] for depth in found["depths"]]
        assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 8, 24, 32, 40, 512])
def test_the_spread_stays_inside_the_model(layers: int) -> None:
    first, *others = spread_ks(layers)
    assert first is None
    assert all(k is not None and 2 <= k <= layers for k in others)
    assert len(set(others)) == len(others) <= 15


def test_the_tables_say_what_the_json_says() -> None:
    done = vtx_plan(
        "--model", "llava-1.5-7b", "--sequence", "642", "--text", "66", "--k", "none,17", "--precision", "int4"
    )
    assert done.exit_code == 0
    for piece in ("7.05 billion", "int4 4.15 GB", "8.48 T (100.0%)", "4.68 T (55.1%)", "337 MB", "186 MB"):
        assert piece in done.stdout
    assert "fits" not in done.stdout


def test_a_profile_adds_whether_it_fits_and_says_that_times_are_estimates() -> None:
    words = ("--model", "llava-1.5-7b", "--k", "none", "--profile", "orin-nano-8")
    found = planned(*words)["depths"][0]["precisions"]
    assert [found[name]["fits"] for name in PRECISIONS] == [False, False, False, False, True]
    assert found["int4"]["spare_bytes"] > 0 > found["fp16"]["spare_bytes"]
    assert found["int4"]["bound"]["decode_per_token"] == "memory"
    done = vtx_plan(*words)
    assert "an estimate, not a measurement" in done.stdout
    assert "MAXN SUPER" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--model", "gpt"],
            f"not a known model ({', '.join(KNOWN)})",
        ),
        (["--model", "vila-7b", "--profile", "toaster"], "no profile is called 'toaster'; there are agx-orin-32,"),
        (["--model", "vila-7b", "--k", "33"], "K = 33 is outside 2..32"),
        (["--model", "vila-7b", "--rest", "110%"], "at most 100%"),
        (["--model", "vila-7b", "--k", "1"], "K = 1 is outside 2..32"),
        (["--model", "vila-7b", "--text", "0"], "0 text"),
        (["--model", "vila-7b", "--sequence", "10", "--text", "20"], "-10 vision"),
        (["--model", "vila-7b", "--sequence", "99999999999"], "outside the limits"),
        (["--model", "vila-7b", "--max-new-tokens", "-1"], "-1 new tokens"),
    ],
)
def test_bad_input_is_one_line_and_exit_1(words: list[str], message: str) -> None:
    done = vtx_plan(*words)
    assert done.exit_code == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--model", "vila-7b", "--k", "many"],
        ["--model", "vila-7b", "--precision", "fp1"],
        ["--model", "vila-7b", "--k", "none", "--rest", "10%"],
    ],
)
def test_wrong_usage_is_exit_2(words: list[str]) -> None:
    assert vtx_plan(*words).exit_code == 2


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions", "image_tokens"),
    [
        ("llava-1.5-7b", 7.05, 576),
        ("llava-1.5-13b", 13.34, 576),
        ("llava-next-7b", 7.05, 2928),
        ("video-llava-7b", 7.34, 2056),
        ("vila-7b", 7.05, 576),
        ("qwen2-vl-2b", 2.209, 16_384),
        ("qwen2-vl-7b", 8.291, 16_384),
        ("qwen2.5-vl-3b", 3.755, 16_384),
        ("qwen2.5-vl-7b", 8.292, 16_384),
        ("qwen3-vl-2b", 2.128, 16_384),
        ("qwen3-vl-4b", 4.438, 16_384),
        ("qwen3-vl-8b", 8.767, 16_384),
        ("qwen3.5-9b", 9.410, 16_384),
        ("smolvlm2-500m", 0.507, 1088),
        ("gemma-3-4b", 4.3, 256),
        ("gemma-3-12b", 12.187, 256),
        ("gemma-4-e2b", 4.797, 1120),
        ("internvl2-8b", 8.08, 3328),
        ("lisa-13b", 13.31, 256),
    ],
)
def test_known_models_have_their_size(name: str, billions: float, image_tokens: int) -> None:
    model = KNOWN[name]
    assert model.parameters / 1e9 == pytest.approx(billions, abs=0.01)
    assert model.vision is not None
    assert model.vision.image_tokens == image_tokens


def test_views_count_whole_images() -> None:
    assert [SEVEN.views(tokens) for tokens in (0, 1, 576, 577, 1152)] == [0, 1, 1, 2, 2]
    assert KNOWN["llava-next-7b"].views(2108) == 5
    assert KNOWN["video-llava-7b"].views(2056) == 8
    assert KNOWN["qwen2-vl-2b"].views(2056) == 1


def test_images_at_their_own_resolution_cost_what_their_tokens_do() -> None:
    small, large = (KNOWN["qwen2-vl-2b"].seeing(tokens).vision for tokens in (256, 1024))
    windowed = [KNOWN["qwen2.5-vl-3b"].seeing(tokens).vision for tokens in (1024, 4096)]
    assert 4.3 * encode_flops(small, 1) < encode_flops(large, 1) < 6 * encode_flops(small, 1)  # attention is a square
    assert encode_flops(windowed[1], 1) < 7 * encode_flops(windowed[0], 1)  # within windows it is none
    plans = [
        make_plan(KNOWN["qwen2-vl-2b"], Workload(64, tokens, 32), PlannedMethods([None])) for tokens in (256, 1024)
    ]
    assert [plan.vision_flops for plan in plans] == [encode_flops(small, 1), encode_flops(large, 1)]


TINIES = {
    "hub": Tiny(),
    "whole-file": Tiny(names="hub", kv_heads=4, attention_bias=True, mlp_bias=True, feature_layer=(-2, -1)),
    "siglip-tied": Tiny(text="qwen2", vision="siglip", select="full", tied=True, tokenizer="bytes", names="new"),
    "sharded": Tiny(text="mistral", shards=3, names="saved", projector_bias=False, tokenizer="bytes"),
}


def test_a_checkpoint_of_several_files_is_planned_as_it_would_be_exported(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint(VILA)
    source = plan_export(ExportOptions(str(folder))).source()
    assert find_size(str(folder)) == model_size(source.config, folder.name)


def test_vila_s_configuration_alone_has_the_sizes_of_its_parts(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = tiny_checkpoint(VILA)
    config = read_json(folder / "config.json")
    for key, part in (("llm_cfg", "llm"), ("vision_tower_cfg", "vision_tower"), ("mm_projector_cfg", "mm_projector")):
        config[key] = read_json(folder / part / "config.json")
    write_json(tmp_path / "config.json", config)
    assert find_size(str(tmp_path)) == replace(find_size(str(folder)), name=tmp_path.name)


@pytest.mark.parametrize(("text", "tied"), [({}, False), ({"tie_word_embeddings": True}, True)])
def test_internvl_s_head_is_as_its_text_model_says_where_the_whole_model_says_nothing(
    tiny_checkpoint: Checkpoints, text: dict[str, bool], tied: bool
) -> None:
    """InternVL3-1B-hf has 0.938 billion parameters; with the default of transformers 5 it would have 0.802."""
    folder = tiny_checkpoint(Tiny(family="internvl", text="qwen2", tokenizer="bytes", names="saved"))
    config = read_json(folder / "config.json")
    config.pop("tie_word_embeddings", None)
    config["text_config"].pop("tie_word_embeddings", None)
    config["text_config"] |= text
    assert read_config(config).text.tied is tied
    assert read_config(config | {"tie_word_embeddings": not tied}).text.tied is not tied


@pytest.mark.sampled
@pytest.mark.parametrize("tiny", TINIES.values(), ids=TINIES)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_bundle_gives_the_sizes_of_its_checkpoint(
    tiny: Tiny, precision: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(tiny)
    config = find_size(str(checkpoint))
    assert config == replace(find_size(str(checkpoint / "config.json")), name=config.name)
    bundle = export_all(checkpoint, tmp_path / "bundle", precision=precision)
    found = bundle_size(bundle)
    assert found == find_size(str(tmp_path / "bundle"))
    assert config.vision is not None
    assert found.decoder == config.decoder
    assert found.vision == config.vision
    assert found.parameters == config.parameters


@pytest.mark.slow
def test_kv_bytes_are_those_that_inspect_shows(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    bundle = export_all(tiny_checkpoint(), tmp_path / "bundle", precision="fp16")
    size = bundle_size(bundle)
    found = make_plan(size, Workload(9, 16, 0), PlannedMethods([None, 3, 5]), precisions_by_name(size, ["fp16"]))
    for depth in found.depths:
        expected = kv_bytes(bundle.manifest, depth.k, text=9, vision=16)
        assert depth.precisions["fp16"].kv_bytes == expected


def test_sizes_come_from_the_manifest_alone(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    whole = export_all(tiny_checkpoint(), tmp_path / "bundle")
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in ("vtx.json", "vtx.json.sha256"):
        (folder / name).write_bytes((whole.folder / name).read_bytes())
    assert bundle_size(Bundle.open(folder, check=False)) == bundle_size(whole)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"null", b'{"model_type": "llava", "text_config": 3}', b"{" + b" " * (1 << 20) + b"}"]
)
def test_a_damaged_configuration_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError):
        find_size(str(tmp_path))


def test_a_directory_without_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"a directory with a config\.json"):
        find_size(str(tmp_path))


# --- memory and time ------------------------------------------------------------------------------


def weight_bytes(model: ModelSize, *parts: str) -> int:
    precisions = precisions_of(model, *parts)
    return stored_bytes(all_weights(model, precisions), precisions)


def test_bytes_per_precision_are_the_arithmetic_that_the_docs_state() -> None:
    size, tower = SEVEN.decoder, SEVEN.vision
    assert tower is not None
    layers, head = size.layers * size.layer_macs, size.head_macs
    matrices = head + tower.used * (4 * 1024 * 1024 + 2 * 1024 * 4096) + tower.projector_macs
    rows = 32064 + tower.used * (4 * 1024 + 4096 + 1024) + 2 * 4096  # each with a scale: of head, tower and projector
    beside = matrices + 2 * rows + 2 * (SEVEN.parameters - layers - matrices)
    assert weight_bytes(SEVEN, "fp32") == 4 * SEVEN.parameters
    assert weight_bytes(SEVEN, "fp16") == weight_bytes(SEVEN, "bf16") == 2 * SEVEN.parameters
    assert weight_bytes(SEVEN, "int8") == layers + 2 * 32 * (5 * 4096 + 2 * 11008) + beside
    assert weight_bytes(SEVEN, "int4") == layers // 2 + 2 * layers // 64 + beside
    assert weight_bytes(SEVEN, "int4", "fp16", "fp16") == layers * 17 // 32 + 2 * (SEVEN.parameters - layers)


def test_precisions_of_tower_and_head_are_options_with_the_exports_defaults() -> None:
    words = ("--model", "vila-7b", "--k", "none", "--precision", "int4")
    default, full = planned(*words), planned(*words, "--head-precision", "fp16", "--vision-precision", "fp16")
    assert default["parts"] == {
        "int4": {"decoder": "int4", "vision": "int8", "head": "int8", "kv": "fp16", "blocks": {}}
    }
    assert full["parts"] == {"int4": {"decoder": "int4", "vision": "fp16", "head": "fp16", "kv": "fp16", "blocks": {}}}
    tower = KNOWN["vila-7b"].vision
    assert tower is not None
    more = full["weights_bytes"]["int4"] - default["weights_bytes"]["int4"]
    assert more == pytest.approx(32000 * 4096 + tower.parameters, rel=0.01)


def written_bytes(options: ExportOptions) -> int:
    """Bytes of the weights' tensors that an export would write."""
    stored = plan_export(options).weights.stored.values()
    parts = (part for tensor in stored for part in (tensor, tensor.scales, tensor.zeros))
    return sum(part.nbytes for part in parts if part is not None)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("tied", "forms"),
    [
        (False, {"int4_block": 32, "bits": 6.3}),
        (True, {"int4_block": 32, "int8_block": 128, "bits": 6.7}),
        (True, {"bits": 4.3}),
        (False, {"int4_block": 128, "head_precision": "int4", "bits": 7.9}),
        (False, {"int4_block": 128, "int8_block": 64}),
    ],
)
def test_mixed_bits_and_blocks_are_planned_as_they_are_written(
    tiny_checkpoint: Checkpoints, tied: bool, forms: dict[str, Any]
) -> None:
    folder = tiny_checkpoint(Tiny(hidden=128, ffn=192, tied=tied, dtype="float16"))
    words = [word for name, value in forms.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    found = planned("--model", str(folder), "--k", "none", "--precision", "int4", *words)
    assert found["weights_bytes"]["int4"] == written_bytes(ExportOptions(str(folder), (), "int4", **forms))
    parts = found["parts"]["int4"]
    assert parts["blocks"] == {name.removesuffix("_block"): n for name, n in forms.items() if "block" in name}
    assert ("int8" in parts) == ("bits" in forms)


def test_bits_are_those_of_the_decoder_and_its_head_and_leave_other_precisions_alone() -> None:
    words = ("--model", "qwen2.5-vl-3b", "--k", "none", "--profile", "cpu", "--int4-block", "32")
    low, high = (planned(*words, "--bits", bits) for bits in ("5.1", "6.3"))
    plain = planned(*words)
    size = KNOWN["qwen2.5-vl-3b"].decoder
    weights = size.layers * size.layer_macs + size.head_macs
    more = high["weights_bytes"].pop("int4") - low["weights_bytes"].pop("int4")
    assert more == pytest.approx(weights * 1.2 / 8, rel=0.01)
    peaks = [plan["depths"][0]["precisions"]["int4"]["peak_bytes"] for plan in (low, high)]
    assert 0.5 * more < peaks[1] - peaks[0] < more, "scales take more in memory"
    assert high["weights_bytes"].items() <= plain["weights_bytes"].items()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--precision", "fp16", "--bits", "6"), "--bits is for an int4 decoder; add --precision int4"),
        (("--precision", "int8", "--int4-block", "32"), "--int4-block is for int4 weights; add --precision int4"),
        (("--bits", "9"), "--bits 9 is out of reach"),
        (("--bits", "nan"), "--bits nan is out of reach"),
    ],
)
def test_bits_and_blocks_that_nothing_has_are_refused(words: tuple[str, ...], message: str) -> None:
    done = vtx_plan("--model", "llava-1.5-7b", *words)
    assert done.exit_code
    assert message in " ".join(done.stderr.split())


def test_a_tied_head_in_other_floats_than_its_table_s_is_refused(tiny_checkpoint: Checkpoints) -> None:
    tied = "--model", str(tiny_checkpoint(TINIES["siglip-tied"])), "--precision", "int4", "--head-precision"
    done = vtx_plan(*tied, "fp32")
    assert done.exit_code == 1
    assert "would store a weight twice" in done.stderr
    assert vtx_plan(*tied, "bf16").exit_code == 0


def test_a_tied_head_counts_beside_its_table_if_it_is_quantised() -> None:
    model = KNOWN["qwen3-vl-2b"]
    apart, shared = (precisions_of(model, "int4", None, head) for head in (None, "bf16"))
    rows, width = model.decoder.vocab, model.decoder.hidden
    assert (apart.head, shared.head) == ("int8", "bf16")
    stored = [stored_bytes(all_weights(model, parts), parts) for parts in (apart, shared)]
    assert stored[0] - stored[1] == rows * (width + 2)
    assert resident(model, shared) - resident(model, apart) > 2 * rows * width


def test_a_cpu_widens_half_precision_and_not_quantised_matrices() -> None:
    found = make_plan(SEVEN, WORK, PlannedMethods([None]), profile=load_profile("cpu")).depths[0].precisions
    for name in ("fp16", "bf16"):
        assert found[name].resident_weights_bytes == found["fp32"].resident_weights_bytes
    assert found["int4"].resident_weights_bytes < found["fp32"].resident_weights_bytes / 4


def decode_ms(model: str, precision: str, profile: str, *, bandwidth: float | None = None) -> float:
    device = load_profile(profile)
    if bandwidth:
        device = replace(device, bandwidth=Figure(bandwidth, "another card of the same generation"))
    parts = precisions_by_name(KNOWN[model], [precision], "fp16", "fp16")
    found = make_plan(KNOWN[model], WORK, PlannedMethods([None]), parts, device)  # TinyChat's tower and head
    phases = found.depths[0].precisions[precision].phases
    assert phases is not None
    return phases["decode_per_token"].ms


@pytest.mark.parametrize(
    ("model", "precision", "profile", "published"),
    [
        ("vila-7b", "int4", "agx-orin-64", 28.09),
        ("vila-7b", "fp16", "agx-orin-64", 86.95),
        ("vila-7b", "int4", "rtx-4090", 5.95),
        ("vila-7b", "fp16", "rtx-4090", 17.09),
        ("llava-1.5-13b", "int4", "agx-orin-64", 57.14),  # VILA-13B, of the same sizes
        ("llava-1.5-13b", "int4", "rtx-4090", 10.01),
    ],
)
def test_decode_estimates_are_within_a_seventh_of_tinychats_figures(
    model: str, precision: str, profile: str, published: float
) -> None:
    assert decode_ms(model, precision, profile) == pytest.approx(published, rel=0.15)


def test_the_estimate_for_vila_7b_in_int4_on_agx_orin_is_close() -> None:
    assert decode_ms("vila-7b", "int4", "agx-orin-64") == pytest.approx(28.09, rel=0.05)


def test_decode_reads_weights_and_so_scales_with_the_bandwidth() -> None:
    one = decode_ms("vila-7b", "int4", "agx-orin-64", bandwidth=100)
    assert one == pytest.approx(2 * decode_ms("vila-7b", "int4", "agx-orin-64", bandwidth=200))


def test_withdrawal_shortens_prefill_in_proportion_and_leaves_vision_alone() -> None:
    found = make_plan(SEVEN, WORK, PlannedMethods([None, 17]), HALF, load_profile("agx-orin-64")).to_dict()["depths"]
    none, at_k = (depth["precisions"]["fp16"]["latency_ms"] for depth in found)
    assert at_k["vision"] == none["vision"]
    assert at_k["prefill"] / none["prefill"] == pytest.approx(0.55, abs=0.01)
    assert at_k["decode_per_token"] < none["decode_per_token"]


def test_a_text_prompt_costs_no_vision_time() -> None:
    found = make_plan(SEVEN, Workload(66, 0, 0), PlannedMethods([None]), HALF, load_profile("agx-orin-64")).to_dict()
    assert found["vision_flops"] == 0
    assert found["depths"][0]["precisions"]["fp16"]["latency_ms"]["vision"] == 0


@pytest.mark.slow
def test_planning_a_known_model_loads_no_exporting_library() -> None:
    import subprocess

    script = (
        "from vtx.cli import plan; import sys\n"
        "plan(['--model', 'vila-7b', '--profile', 'cpu', '--json'], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'onnx', 'onnx_ir', 'matplotlib', 'onnxruntime'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_layers_that_share_keys_and_values_hold_none_and_run_for_one_token() -> None:
    model = KNOWN["gemma-4-e2b"]
    none, first = make_plan(
        model, Workload(22, 266, 32), PlannedMethods([None, 14]), precisions_by_name(model, ["fp16"])
    ).depths
    assert none.kv_slots == (288,) * 15 + (0,) * 20
    assert first.kv_slots == (288,) * 13 + (22,) * 2 + (0,) * 20
    element = 2 * 2  # K and V, in fp16
    assert none.precisions["fp16"].kv_bytes == 288 * element * (12 * 256 + 3 * 512)
    every = full_schedule(35, text=22, vision=266)
    assert with_exit(model.decoder, every) == (288,) * 15 + (1,) * 20
    assert 0.31 < total_flops(model.decoder, with_exit(model.decoder, every)) / total_flops(model.decoder, every) < 0.32
    with pytest.raises(RequestError, match="K = 16 is behind layer 14: layers from 16 on"):
        make_plan(model, Workload(22, 266, 32), PlannedMethods([16]), precisions_by_name(model, ["fp16"]))


def test_a_layer_that_slides_attends_to_its_window() -> None:
    size = KNOWN["gemma-3-4b"].decoder
    assert [attention_macs(size, 1, 5000, layer) for layer in (5, 6)] == [2 * 1024 * 8 * 256, 2 * 5000 * 8 * 256]
    assert attention_macs(size, 1, 1000, 5) == attention_macs(size, 1, 1000, 6)


def test_models_that_slide_are_answered_by_tensorrt_but_not_by_onnxruntime_on_cuda() -> None:
    model = KNOWN["gemma-3-4b"]
    parts = {"fp16": precisions_of(model, "fp16")}
    found = {engine.software: engine for engine in engines_on(load_profile("agx-orin-64"), model, parts)}
    assert found["TensorRT 10.3 of JetPack 6.2"].answered == ["fp16"]
    reason = found["onnxruntime's CUDA provider"].obstacles["fp16"]
    assert reason is not None
    assert "sliding windows are not built for onnxruntime's CUDA provider" in reason
    (cpu, *others) = engines_on(load_profile("cpu"), model, parts)
    assert all(engine.answered for engine in (cpu, *others))
