"""vtx-doctor: what it says of the machine and its devices, and whether it sees a bundle that was changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support import bundles
from vtx import load
from vtx.cli import doctor
from vtx.runtime.backends import openvino, ort, tensorrt
from vtx.runtime.host.device import Device
from vtx.runtime.host.gpu import Gpu
from vtx.runtime.report import doctor as report
from vtx.runtime.report.golden import QUESTION, golden_image
from vtx.runtime.vision import preprocess

CARD = Gpu("NVIDIA GeForce RTX 4090", (8, 9), 24 << 30, (13, 0))
SHARD = "weights/00001-of-00001.safetensors"


def invoke(*words: object) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(doctor, [str(word) for word in words], catch_exceptions=False)


def read(*words: object, code: int = 0) -> dict[str, Any]:
    """The JSON on stdout of a call that ends with `code`."""
    result = invoke(*words, "--json")
    assert result.exit_code == code, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    return value


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`machine(packages, gpus)`: from now on these packages alone are installed, and there are these GPUs."""

    def become(packages: set[str], *gpus: Gpu, profile: str | None = None) -> None:
        modules = {package.replace("-", "_") for package in packages} | ({"cuda"} & packages)
        for module in (report, ort.backend, ort.cuda, openvino.backend, tensorrt.backend):
            monkeypatch.setattr(module, "version", lambda name: "1.0" if name in packages else None)
        monkeypatch.setattr(tensorrt.backend, "find_spec", lambda name: name if name in modules else None)
        monkeypatch.setattr(report, "recognise", lambda: Device(None, gpus, profile))

    return become


# --- the machine ----------------------------------------------------------------------------------


def test_this_machine_is_described_with_every_device() -> None:
    result = invoke()
    assert result.exit_code == 0, result.output
    for word in ("Python", "processor", "memory", "onnxruntime", "openvino", "cuda", "tensorrt", "llava-1.5-7b"):
        assert word in result.stdout
    for unsupported in ("vila", "next", "video"):  # vtx-plan knows them, vtx-export does not
        assert unsupported not in result.stdout


@pytest.mark.slow
def test_json_has_the_same(machine: Callable[..., None]) -> None:
    machine({"onnxruntime"}, CARD, profile="rtx-4090")
    found = read()
    assert set(found) == {"machine", "profile", "devices", "problems", "fits"}
    assert found["profile"] == "rtx-4090"
    assert "RTX 4090 (sm89)" in found["machine"]["GPU"]
    assert {entry["device"]: entry["usable"] for entry in found["devices"]} == {
        "cpu": True, "openvino": False, "cuda": False, "tensorrt": False,
    }  # fmt: skip
    assert [entry["place"] for entry in found["fits"]] == [CARD.name, "this CPU with --device cpu"]


@pytest.mark.sampled
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "tensorrt", "tensorrt-rtx"])
def test_one_engine_is_enough(engine: str, machine: Callable[..., None]) -> None:
    machine({engine, "cuda"}, CARD)
    found = read()
    assert found["problems"] == []
    assert sum(entry["usable"] for entry in found["devices"]) == 1


def test_without_any_engine_it_says_how_to_install_one(machine: Callable[..., None]) -> None:
    machine(set(), CARD)
    result = invoke()
    assert result.exit_code == 1
    assert result.stderr.startswith("doctor: vtx cannot run here yet: no engine is installed: pip install")
    assert read(code=1)["problems"] != []


def test_two_onnxruntimes_are_a_problem(machine: Callable[..., None]) -> None:
    machine({"onnxruntime", "onnxruntime-gpu"})
    result = invoke()
    assert result.exit_code == 1
    assert "PROBLEM: both onnxruntime 1.0 and onnxruntime-gpu 1.0 are installed" in result.stdout
    assert "pip uninstall" in result.stderr


def test_an_old_onnxruntime_is_listed_with_what_it_lacks(machine: Callable[..., None]) -> None:
    machine({"onnxruntime"})
    (entry,) = [entry for entry in read()["devices"] if entry["device"] == "cpu"]
    assert entry["detail"] == "onnxruntime 1.0; K and V in int8 need 1.27; graphs of the dialect trt need 1.24"


def test_tensorrt_without_a_gpu_is_installed_and_cannot_answer(machine: Callable[..., None]) -> None:
    machine({"tensorrt-rtx", "cuda"})
    (entry,) = [entry for entry in read()["devices"] if entry["device"] == "tensorrt"]
    assert (entry["installed"], entry["usable"]) == (True, False)
    assert entry["detail"] == "TensorRT-RTX 1.0; no NVIDIA GPU was detected, so it cannot answer here"


@pytest.mark.slow
def test_memory_is_counted_for_the_engine_that_answers(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """7B weights in fp16 take 14 GB in OpenVINO and 28 GB in onnxruntime."""
    monkeypatch.setattr("vtx.tools.estimate.fits.available_memory", lambda: 20_000_000_000)
    answers = {}
    for packages in ({"onnxruntime"}, {"onnxruntime", "openvino"}):
        machine(packages)
        (place,) = read()["fits"]
        answers[place["place"]] = place["models"]["llava-1.5-7b"][0]["fits"]
    assert answers == {"this CPU with --device cpu": False, "this CPU with --device openvino": True}


# --- a bundle -------------------------------------------------------------------------------------


def test_a_sound_bundle_is_certified(bundle: Path) -> None:
    result = invoke(bundle)
    assert result.exit_code == 0, result.output
    for word in ("checksums: all", "logits at K = none", "logits at K = 5", "same top token", "ok"):
        assert word in result.stdout
    assert "FAILED" not in result.stdout


@pytest.mark.slow
def test_a_sound_bundle_says_its_arithmetic_and_the_time_of_a_question(bundle: Path) -> None:
    result = invoke(bundle, "--device", "cpu")
    assert "cpu in f32: asked for; processor: " in result.stdout
    report = json.loads(invoke(bundle, "--device", "cpu", "--json").stdout)
    expected = report["expected"]
    assert f"of {expected['prompt_tokens']} tokens ({expected['image_tokens']} of the picture) at K = " in result.stdout
    with load(bundle, device="cpu") as model, model.open(golden_image()) as image:
        stats = image.ask(QUESTION, max_new_tokens=1).stats
    assert (expected["k"], expected["prompt_tokens"]) == (stats.k, stats.prompt_tokens)
    assert 0 < expected["first_token_ms"] < 60_000


def test_a_question_beyond_the_context_is_told(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "QUESTION", "What is in the picture? " * 200)
    result = invoke(bundle)
    assert result.exit_code == 0, result.output
    assert "a question about a picture cannot be asked: " in result.stderr
    assert "OK: the bundle computes what its weights say" in result.stdout


def test_nothing_is_noted_of_its_own_pictures(bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    preprocess.noted.clear()
    try:
        assert invoke(bundle, "--device", "cpu").exit_code == 0
        assert "crop" not in caplog.text
        assert not preprocess.noted.is_set(), "the first picture of somebody else is noted"
    finally:
        preprocess.noted.set()


@pytest.mark.parametrize("words", [("--device", "cpu"), ("--compute", "f32"), ("--require-signature", "key.pem")])
def test_what_is_about_a_bundle_is_refused_without_one(words: tuple[str, str]) -> None:
    result = CliRunner().invoke(doctor, words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "need a BUNDLE" in result.stderr


def test_limits_are_shown_as_they_are(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vtx.runtime.report.golden.logits_limit", lambda *_: 0.15)
    shown = invoke(bundle, "--device", "cpu").stdout
    assert "1.5e-01" in shown
    assert "1e-01" not in shown


def test_json_of_a_bundle_has_every_check(bundle: Path) -> None:
    found = read(bundle, "--device", "cpu")
    assert (found["bundle"], found["device"], found["compute"], found["altered"]) == (str(bundle), "cpu", "f32", [])
    by_name = {check["name"]: check for check in found["checks"]}
    assert by_name["logits at K = 5"]["passed"]
    assert 0 < by_name["logits at K = 5"]["difference"] < by_name["logits at K = 5"]["limit"]


def test_every_altered_file_is_named(bundle: Path, tmp_path: Path) -> None:
    folder = bundles.copy(bundle, tmp_path / "b")
    bundles.flip(folder / "head.ort.onnx")
    (folder / "rope.safetensors").unlink()
    result = invoke(folder)
    assert result.exit_code == 1
    assert "head.ort.onnx was altered" in result.stderr
    assert "rope.safetensors is missing" in result.stderr
    assert "2 of " in result.stderr.splitlines()[-1]
    assert len(read(folder, code=1)["altered"]) == 2


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["golden.safetensors", SHARD])
def test_checksums_that_were_made_to_match_do_not_deceive_it(bundle: Path, tmp_path: Path, name: str) -> None:
    folder = bundles.copy(bundle, tmp_path / "b")
    content = (folder / name).read_bytes()
    half = len(content) // 2 // 4 * 4
    (folder / name).write_bytes(content[:half] + b"\0" * (len(content) - half))
    bundles.reseal(folder, name)
    result = invoke(folder)
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert "differ beyond the limit" in result.stderr.splitlines()[-1]
