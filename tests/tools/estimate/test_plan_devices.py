"""What a plan says of a device's engines, and which picture it plans with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.support.bundles import export_all
from tests.support.engines import on_standin, open_model
from tests.support.families.qwen import QWEN2, QWEN3
from tests.support.fixtures import Checkpoints
from tests.support.gpu_standin import build_all
from tests.support.tiny import Tiny

from vtx import cli
from vtx.runtime.backends.engines import WIDEST_VIEW
from vtx.runtime.backends.ort.cuda import WINDOWS as OF_CUDA
from vtx.runtime.backends.tensorrt.backend import NO_FRAMES, TensorrtBackend
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import names
from vtx.runtime.host.profiles import load_profile, profile_names
from vtx.runtime.vision.layouts.native import Native
from vtx.tools.estimate.plan import largest_view
from vtx.tools.estimate.sizes import KNOWN, bundle_size

ORINS = [name for name in profile_names() if load_profile(name).kind == "jetson" and "orin" in name]


def planned(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(cli.plan, [*words, "--json"])
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --- engines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ORINS)
def test_what_no_engine_answers_on_a_device_is_refused_with_each_reason(device: str) -> None:
    model = "video-llava-7b"
    done = CliRunner().invoke(cli.plan, ["--model", model, "--profile", device, "--json"], prog_name="vtx-plan")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"no engine of vtx answers {model} on the GPU of {load_profile(device).name}: " in done.stderr
    for reason in ("TensorRT 10.3 of JetPack 6.2, ", NO_FRAMES, "a Jetson is aarch64"):
        assert reason in done.stderr


@pytest.mark.parametrize("device", ["tensorrt", "cuda"])
@pytest.mark.parametrize("model", ["llava-1.5-7b", "qwen3.5-9b"])
def test_conversations_that_decode_together_have_lanes_beside_the_memory_of_a_prompt(model: str, device: str) -> None:
    words = ("--model", model, "--profile", "rtx-4090", "--device", device, "--precision", "int4", "--k", "none")
    alone, together = (planned(*words, *more)["depths"][0]["precisions"]["int4"] for more in ((), ("--batch", "8")))
    size = KNOWN[model].decoder
    states = len(size.conv_layers) * 2 * size.state_numbers
    assert bool(states) == (model == "qwen3.5-9b")
    lanes = 8 * (alone["kv_held_bytes"] + 4 * (states + 2 * size.hidden + size.vocab))
    assert together["kv_held_bytes"] - alone["kv_held_bytes"] == lanes
    assert together["peak_bytes"] - alone["peak_bytes"] == lanes


def test_a_batch_is_planned_for_a_gpu_alone() -> None:
    for words in ((), ("--profile", "cpu")):
        done = CliRunner().invoke(cli.plan, ["--model", "llava-1.5-7b", "--batch", "2", *words])
        assert done.exit_code == 2
        assert "--batch is for a GPU" in done.stderr


@pytest.mark.parametrize("profile", [*ORINS, "rtx-4090"])
@pytest.mark.parametrize("model", ["gemma-4-e2b", "gemma-3-4b"])
def test_models_with_windows_are_answered_by_tensorrt_alone(model: str, profile: str) -> None:
    engines = planned("--model", model, "--profile", profile, "--precision", "int4")["engines"]
    assert {engine["device"] for engine in engines if engine["precisions"]} == {"tensorrt"}
    assert next(engine for engine in engines if engine["device"] == "cuda")["obstacles"]["int4"] == OF_CUDA


def test_a_jetson_names_the_tensorrt_of_each_jetpack() -> None:
    engines = planned("--model", "llava-1.5-7b", "--profile", "orin-nano-8", "--precision", "int4")["engines"]
    assert [(engine["device"], engine["software"], engine["dialect"], engine["precisions"]) for engine in engines] == [
        ("tensorrt", "TensorRT 8.5 of JetPack 5.1", None, []),
        ("tensorrt", "TensorRT 10.3 of JetPack 6.2", "trt10", ["int4"]),
        ("tensorrt", "TensorRT 10.16 of JetPack 7.2", "trt", ["int4"]),
        ("cuda", "onnxruntime's CUDA provider", "ort-cuda", []),
    ]
    assert "TensorRT 8.5 is not supported" in engines[0]["obstacles"]["int4"]
    shown = CliRunner().invoke(cli.plan, ["--model", "llava-1.5-7b", "--profile", "orin-nano-8"]).stdout
    assert "answers with --device tensorrt: TensorRT 10.3 of JetPack 6.2, trt10 graphs\n" in shown
    counted = (
        "counted below for TensorRT 10.16 of JetPack 7.2: int8 weights as float16, which TensorRT may hold them in"
    )
    assert f"{counted} (not measured), others as stored" in " ".join(shown.split())
    assert "not tensorrt with TensorRT 8.5 of JetPack 5.1: " in shown


@pytest.mark.parametrize(("device", "int8_bytes"), [("agx-orin-64", 2), ("agx-thor", 2), ("rtx-4090", 1)])
def test_int8_weights_are_counted_as_float16_where_tensorrt_may_widen_them(device: str, int8_bytes: int) -> None:
    """LLaVA-1.5-7B: of an int4 bundle all matrices of tower, projector and head, of an int8 one those of layers too."""
    layers = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    tower = 23 * (4 * 1024**2 + 2 * 1024 * 4096)
    others = tower + 1024 * 4096 + 4096**2 + 32064 * 4096
    words = "--model", "llava-1.5-7b", "--profile", device, "--precision", "int8", "--precision", "int4", "--k", "none"
    plan = planned(*words)
    of_int8, of_int4 = (plan["depths"][0]["precisions"][name] for name in ("int8", "int4"))
    for cost, name, weights in ((of_int8, "int8", layers + others), (of_int4, "int4", others)):
        assert cost["resident_weights_bytes"] - plan["weights_bytes"][name] == (int8_bytes - 1) * weights
    if int8_bytes == 2:
        half = planned(*words[:5], "fp16", *words[8:])["depths"][0]["precisions"]["fp16"]
        for phase, ms in half["latency_ms"].items():
            assert of_int8["latency_ms"][phase] == pytest.approx(ms, rel=0.01)


@pytest.mark.parametrize("model", ["qwen2-vl-2b", "qwen2.5-vl-3b", "qwen3-vl-4b"])
def test_tensorrt_takes_the_memory_of_the_largest_image_whichever_is_asked_about(model: str) -> None:
    def activations(device: str, image: str) -> int:
        words = ("--model", model, "--profile", "rtx-4090", "--device", device, "--image-size", image, "--precision")
        return int(planned(*words, "fp16", "--k", "none")["depths"][0]["precisions"]["fp16"]["activation_bytes"])

    of_tensorrt, of_cuda = ([activations(d, image) for image in ("280x280", "1400x1400")] for d in ("tensorrt", "cuda"))
    assert of_tensorrt[0] == of_tensorrt[1]
    assert of_cuda[0] < of_cuda[1] < of_tensorrt[0]
    tower, vocab = KNOWN[model].vision, KNOWN[model].decoder.vocab
    assert tower is not None
    vision = tower.model.vision
    side = 2 * tower.patches  # of patches: engines take sides of up to the root of that
    pixels, tokens = 4 * 3 * 2 * side * vision.patch**2, 4 * (1 + len(vision.maps)) * side // 4 * tower.out
    layer = 2 * side * (2 * vision.hidden + max(4 * vision.hidden, 2 * vision.ffn))
    assert of_tensorrt[0] == layer + pixels + tokens + 4 * vocab


@pytest.mark.parametrize(
    ("model", "side", "device", "k", "measured"),
    [  # peaks of a process that answers; OpenVINO in bf16, without pages of the tower
        ("lfm2-vl-1.6b", 512, "openvino", None, 1782e6),
        ("lfm2-vl-1.6b", 512, "cpu", None, 2377e6),
        ("lfm2-vl-1.6b", 512, "cpu", 6, 2199e6),
        ("qwen3-vl-2b", 768, "openvino", None, 2636e6),
        ("qwen3-vl-2b", 768, "cpu", None, 3818e6),
        ("qwen3-vl-2b", 768, "cpu", 10, 3794e6),
    ],
)
def test_peak_memory_on_a_cpu_is_within_15_percent_of_measurements(
    model: str, side: int, device: str, k: int | None, measured: float
) -> None:
    words = ("--model", model, "--precision", "int4", "--profile", "cpu", "--device", device, "--k", str(k or "none"))
    words += "--head-precision", "bf16"  # bundles from before a tied head in int8 beside its table
    found = planned(*words, "--text", "96", "--max-new-tokens", "32", "--image-size", f"{side}x{side}")
    assert found["depths"][0]["precisions"]["int4"]["peak_bytes"] == pytest.approx(measured, rel=0.15)


@pytest.mark.sampled
@pytest.mark.parametrize("tiny", [QWEN2, QWEN3], ids=lambda tiny: tiny.family)
def test_the_pixels_that_are_counted_are_those_that_tensorrt_takes_memory_for(
    tiny: Tiny, tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_all(tiny_checkpoint(tiny), tmp_path / "bundle", (2,))
    build_all(tmp_path / "bundle")
    on_standin(monkeypatch)
    backend, size = open_model(tmp_path / "bundle").backend, bundle_size(Bundle.open(tmp_path / "bundle"))
    tower = size.vision
    assert isinstance(backend, TensorrtBackend)
    assert tower is not None
    assert isinstance(size.layout, Native)
    patch, largest = tower.model.vision.patch, largest_view(size, 2)
    assert largest is not None
    side, unit, each = backend.engines.longest_side, 2 * patch, 4 * 3 * 2  # bytes of a pixel of two moments
    counted = each * largest.patches * patch**2
    assert backend.engines.buffers[names.PIXELS].nbytes == each * side**2
    assert each * side**2 <= counted < each * (side + unit) ** 2  # sides are whole tokens


def test_a_card_has_the_engines_that_the_family_has_there() -> None:
    def devices(model: str, profile: str) -> dict[str, list[str]]:
        return {e["device"]: e["precisions"] for e in planned("--model", model, "--profile", profile)["engines"]}

    every, halves = ["fp32", "fp16", "bf16", "int8", "int4"], ["fp16", "bf16", "int8", "int4"]
    assert devices("llava-1.5-7b", "rtx-4090") == {"tensorrt": every, "cuda": halves}
    assert devices("qwen2.5-vl-3b", "rtx-4090") == {"tensorrt": every, "cuda": halves}
    assert devices("video-llava-7b", "rtx-4090") == {"tensorrt": [], "cuda": halves}
    assert devices("qwen2.5-vl-3b", "cpu") == {"cpu": every, "openvino": every}
    frames = planned("--model", "video-llava-7b", "--profile", "rtx-4090")["engines"][0]
    assert frames["obstacles"]["fp16"] == NO_FRAMES


@pytest.mark.parametrize("profile", ["rtx-4090", "orin-nano-8"])
def test_models_with_states_are_answered_on_a_gpu(profile: str) -> None:
    engines = planned("--model", "lfm2-vl-1.6b", "--profile", profile, "--precision", "int4")["engines"]
    found = [engine["precisions"] for engine in engines if engine["device"] == "tensorrt" and engine["dialect"]]
    assert found == [["int4"]] * (1 if profile == "rtx-4090" else 2)


def test_tensorrt_takes_memory_for_the_longest_view_of_tiles_of_any_shape() -> None:
    words = ["--model", "lfm2-vl-1.6b", "--profile", "rtx-4090", "--precision", "int4", "--k", "none"]
    on = {device: planned(*words, "--device", device)["depths"][0] for device in ("tensorrt", "cuda")}
    taken = {device: depth["precisions"]["int4"]["activation_bytes"] for device, depth in on.items()}
    view = KNOWN["lfm2-vl-1.6b"].vision
    assert view is not None
    longest = view.stretched(WIDEST_VIEW * view.patches)
    assert (longest.patches, longest.view_tokens) == (4 * 1024, 4 * 256)
    assert taken["tensorrt"] == 2 * longest.widest + 4 * (longest.ends + KNOWN["lfm2-vl-1.6b"].decoder.vocab)
    assert taken["tensorrt"] > taken["cuda"]


def test_a_precision_without_an_engine_has_no_times() -> None:
    shown = CliRunner().invoke(
        cli.plan,
        ["--model", "video-llava-7b", "--profile", "rtx-4090", "--k", "none", "--precision", "fp32"],
    )
    assert shown.exit_code == 1
    both = ["--model", "video-llava-7b", "--profile", "rtx-4090", "--k", "none", "--precision", "fp32"]
    table = CliRunner().invoke(cli.plan, [*both, "--precision", "int4"]).stdout
    fp32 = next(line for line in table.splitlines() if line.startswith(" none") and "fp32" in line)
    assert " no " in fp32
    assert "ms" not in fp32
    assert "not fp32 with onnxruntime's CUDA provider: onnxruntime attends in float16 on CUDA" in table


def test_memory_and_times_are_those_of_the_engine() -> None:
    """K and V grow by 256 slots; engines of JetPack 6 and graphs on CUDA compute in half precision too."""
    words = ["--model", "llava-1.5-7b", "--profile", "agx-orin-64", "--precision", "fp16", "--k", "none,9"]

    def at(*more: str) -> tuple[dict[str, Any], dict[str, Any]]:
        none, nine = (depth["precisions"]["fp16"] for depth in planned(*words, *more)["depths"])
        return none, nine

    slot = 2 * 32 * 32 * 128 * 2  # K and V of 32 layers and heads, in bytes
    newest, older = at(), at("--jetpack", "6.2")
    whole, text = 1024, 512  # 896 and 320
    assert [cost["kv_held_bytes"] * 32 for cost in newest] == [32 * whole * slot, (8 * whole + 24 * text) * slot]
    assert newest[0]["latency_ms"]["decode_per_token"] > newest[1]["latency_ms"]["decode_per_token"]
    shorter = at("--text", "65", "--max-new-tokens", "64")  # 705 and 129 slots
    assert [cost["kv_held_bytes"] * 32 for cost in shorter] == [32 * 768 * slot, (8 * 768 + 24 * 256) * slot]
    assert older == newest
    words[3] = "rtx-4090"
    on_cuda, on_engines = at("--device", "cuda"), at()
    for ours, theirs in zip(on_cuda, on_engines, strict=True):
        for name in ("kv_held_bytes", "resident_weights_bytes"):
            assert ours[name] == theirs[name]
        assert (
            ours["latency_ms"]["decode_per_token"] < theirs["latency_ms"]["decode_per_token"]
        )  # K and V are not joined


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--profile", "orin-nx-16", "--jetpack", "9.9"], "no engine for --jetpack 9.9 answers this model there"),
        (["--profile", "orin-nx-16", "--device", "cuda"], "--device tensorrt: TensorRT 10.16 of JetPack 7.2"),
        (["--jetpack", "6.2"], "--device and --jetpack need --profile"),
    ],
)
def test_an_engine_that_does_not_answer_is_refused_with_those_that_do(words: list[str], message: str) -> None:
    done = CliRunner().invoke(cli.plan, ["--model", "llava-1.5-7b", *words], prog_name="vtx-plan")
    assert done.exit_code != 0
    assert message in done.stderr


# --- the picture ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "tokens", "views"),
    [
        ("qwen2.5-vl-3b", 46 * 26, 1),  # 1280 / 28 and 720 / 28, rounded
        ("qwen2-vl-7b", 46 * 26, 1),
        ("llava-1.5-7b", 576, 1),
        ("vila1.5-13b", 196, 1),
        ("llava-next-7b", 576 + 28 * 49, 5),  # of 48 rows those that are not padding, a newline each
        ("internvl2-8b", 256 * 9, 9),  # 4 x 2 tiles and the whole
        ("smolvlm2-500m", 64 * 13, 13),  # 4 x 3 tiles and the whole
        ("video-llava-7b", 2056, 8),
    ],
)
def test_a_plan_is_for_a_picture_that_a_user_has(model: str, tokens: int, views: int) -> None:
    found = planned("--model", model, "--k", "none")
    assert (found["vision_tokens"], found["vision_views"]) == (tokens, views)
    assert found["image_size"] == (None if model == "video-llava-7b" else [1280, 720])


def test_the_picture_is_said_and_can_be_changed() -> None:
    words = ["--model", "qwen2.5-vl-3b", "--k", "none", "--precision", "int4"]
    assert planned(*words, "--image-size", "640x480")["vision_tokens"] == 23 * 17
    shown = CliRunner().invoke(cli.plan, words).stdout
    assert "an image of 1280x720 pixels (--image-size); the largest takes 16,384" in shown
    long = planned(*words, "--sequence", "16448")
    assert (long["vision_tokens"], long["image_size"]) == (16_384, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--image-size", "640"], "'640' is not a size in pixels such as 1280x720"),
        (["--image-size", "0x480"], "is not a size in pixels"),
        (["--image-size", "640x480", "--sequence", "700"], "are mutually exclusive"),
    ],
)
def test_a_wrong_size_is_wrong_usage(words: list[str], message: str) -> None:
    done = CliRunner().invoke(cli.plan, ["--model", "vila-7b", *words])
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_the_largest_image_of_a_layout_is_the_one_in_the_table(name: str) -> None:
    model = KNOWN[name]
    assert model.vision is not None
    if model.layout is not None:
        assert (model.layout.max_tokens, model.layout.max_views) == (model.vision.image_tokens, model.vision.views)
