"""vtx-export and vtx-inspect: what they print, where, and how they end."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support import bundles
from tests.support.commands import fails, invoke, process
from tests.support.fixtures import Checkpoints
from tests.support.gated import WAIT
from tests.support.json_files import read_json, write_json
from tests.support.tiny import Tiny, random_image
from vtx import cli

pytestmark = pytest.mark.usefixtures("home")

QUESTION = "what is it?"


@pytest.mark.parametrize(
    ("command", "words", "fix"),
    [("run", ["--text-only", "q", "--k", 8], "--k 8"), ("bench", ["--k", "none,auto"], "--k auto --gates FILE")],
)
def test_no_demo_is_exported_for_a_k_that_it_will_not_have(
    command: str, words: list[str], fix: str, home: Path
) -> None:
    message = " ".join(fails(command, *words, code=2).split())
    assert "has only K = none and 16, not" in message
    assert f"vtx-export {fix}" in message
    assert not list(home.iterdir())


@pytest.mark.slow
def test_an_export_says_what_it_predicts_and_measures_and_nothing_on_stdout(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("export", "--model", tiny_checkpoint(), "--k", "3", "--precision", "fp16")
    assert result.exit_code == 0
    assert result.stdout == ""
    for word in ("predicted:", "measured:", "disk", "memory", "vtx-run", "weights", "reference"):
        assert word in result.stderr
    assert re.search(r"weights ━+ 100% [\d.]+ MB of [\d.]+ MB\s+0:00:\d\d 0:00:00", result.stderr)
    compared = re.search(r"measured:.*\n?.*\n?", result.stderr)
    assert compared
    assert len(re.findall(r"\(predicted [\d.]+ \w+, [+-]\d+%\)", compared[0])) == 2
    assert re.search(r"memory,\s[\d.]+ (s|min)\n", compared[0])
    (made,) = tmp_path.glob("vtx-*")
    assert made.name == f"vtx-{tiny_checkpoint().name}-k3-fp16"
    assert " ".join(result.stderr.split()).endswith(
        "without a card the image leaves at K = 3; for quoted text measure first: vtx-fit "
        f"{made.name} --questions questions.jsonl"
    )
    plain = invoke("export", "--model", tiny_checkpoint(), "--precision", "fp16")
    assert "quoted text" not in " ".join(plain.stderr.split())


@pytest.mark.slow
def test_an_export_gives_as_json_what_inspect_gives(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    out = tmp_path / "b"
    result = invoke("export", "--model", tiny_checkpoint(), "--k", "3", "--precision", "fp32", "--out", out, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == json.loads(invoke("inspect", out, "--json").stdout)


def test_a_check_of_graphs_gives_its_findings_as_json(bundle: Path) -> None:
    words = ["build", "--bundle", bundle, "--check", "--json", "--target", "jetson-orin"]
    assert json.loads(invoke(*words).stdout)["findings"] == {"jetson-orin": []}
    wrong = invoke(*words, "--dialect", "trt")  # which the Jetson's TensorRT 10.3 does not read
    assert wrong.exit_code == 1
    findings = json.loads(wrong.stdout)["findings"]["jetson-orin"]
    assert {"graph", "node", "rule", "problem"} <= set(findings[0])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--k", "1"], r"outside 2\.\.8"),
        (["--k", "3,99"], r"outside 2\.\.8"),
        (["--k", "3,3"], "twice"),
        (["--k", "auto"], "gates"),
        (["--max-context", "10000"], "256"),
        (["--max-context", "1"], "at least 2"),
        (["--chat-template", "missing.jinja"], r"missing\.jinja"),
        (["--model", "no such/dir ectory"], "no such"),
        (["--out", "taken"], "exists and is not a bundle, so nothing replaces it"),
        (["--out", "taken", "--force"], "exists and is not a bundle, so nothing replaces it"),
    ],
)
def test_an_export_that_cannot_be_done_is_one_line(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/thesis.txt").write_text("years of work")
    result = invoke("export", "--model", tiny_checkpoint(), *words)
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.search(named, result.stderr)
    errors = [line for line in result.stderr.splitlines() if line.startswith("export: ")]
    assert len(errors) == 1
    assert errors == result.stderr.splitlines()[-1:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "taken"]


@pytest.mark.slow
def test_what_transformers_has_to_say_about_a_model_stays_out_of_the_one_line(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = bundles.copy(tiny_checkpoint(), tmp_path / "ck")
    config = read_json(folder / "config.json")
    config["text_config"]["rope_scaling"] = {"rope_type": "linear", "factor": -1}
    write_json(folder / "config.json", config)
    environment = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
    done = process("export", "--model", folder, "--out", tmp_path / "b", env=environment)
    _, stderr = done.communicate(timeout=WAIT)
    assert done.returncode == 1
    loading, _, refusal = stderr.decode().partition("\n")
    assert loading == "loading PyTorch and the checkpoint"
    assert refusal.count("\n") == 1
    assert refusal.startswith("export: config.json: factor is -1, ")
    assert b"factor is -1" in stderr


@pytest.mark.parametrize(
    ("target", "message"), [(".", "it is a directory"), ("absent/tokens.png", "is not a directory")]
)
def test_a_picture_of_tokens_that_cannot_be_written_is_told_before_a_bundle_is_looked_for(
    tmp_path: Path, target: str, message: str
) -> None:
    random_image(1).save(tmp_path / "one.png")
    words = [str(tmp_path / "one.png"), "red?", "--reduce", "fastv", "--show-tokens", str(tmp_path / target)]
    done = CliRunner().invoke(cli.run, [*words, "--bundle", "no-such-bundle"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert message in done.stderr
    assert "no-such-bundle" not in done.stderr


def test_inspect_shows_stages_variants_and_kv_bytes(bundle: Path) -> None:
    shown = invoke("inspect", bundle).stdout
    for word in ("1..2", "3..4", "5..8", "stage-05-08.ort.onnx", "3 (default)", "none", "fp32", "256"):
        assert word in shown


@pytest.mark.slow
def test_export_and_inspect_say_which_backends_keep_k_and_v_in_8_bits(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vtx.runtime.backends.ort.library.onnxruntime_release", lambda: "1.26.0")
    model, out = tiny_checkpoint(), tmp_path / "b"
    said = invoke("export", "--model", model, "--kv-precision", "int8", "--out", out).stderr
    for words in ("float16 with TensorRT", "K and V in int8 need onnxruntime 1.27 or newer, this is 1.26.0"):
        assert 0 < said.index(words) < said.index("measured:"), "before it happens"
    assert "float16 with TensorRT" in invoke("inspect", out).stdout


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "seen"),
    [
        ("llava", "images: 56x56 pixels; other shapes: crop (--fit)"),
        ("llava_next", "images: up to 5 tiles of 56x56 pixels, the whole image in one of them (--max-tiles)"),
        ("qwen2_vl", "images: at native resolution, 3,136 to 31,360 pixels (--max-pixels)"),
    ],
)
def test_inspect_says_what_is_seen_of_an_image(
    tiny_checkpoint: Checkpoints, tmp_path: Path, family: Any, seen: str
) -> None:
    tiny = Tiny(family=family, text="qwen2" if family == "qwen2_vl" else "llama", layers=2)
    made = bundles.export(tiny_checkpoint(tiny), tmp_path / "bundle", ())
    assert seen in invoke("inspect", made.folder).stdout.splitlines()


def test_a_list_of_k_may_be_given_in_parts(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    made = ("--model", tiny_checkpoint(), "--out", tmp_path / "bundle", "--precision", "fp32", "--dialect", "ort")
    facts = json.loads(invoke("export", *made, "--k", "3", "--k", "5,2", "--json").stdout)
    assert (facts["default_k"], [v["k"] for v in facts["variants"]]) == (3, [None, 2, 3, 5])


def test_formats_may_stand_apart(bundle: Path, image: Path) -> None:
    told = invoke("run", image, QUESTION, "--bundle", bundle, "--image-formats", "ppm, png", "--max-new-tokens", "1")
    assert told.exit_code == 0, told.stderr


def test_inspect_gives_the_same_as_json(bundle: Path) -> None:
    result = invoke("inspect", bundle, "--json")
    facts = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert [(s["first"], s["last"]) for s in facts["stages"]] == [(1, 2), (3, 4), (5, 8)]
    slot = 2 * 2 * 16 * 4
    by_k = {v["k"]: v["kv_bytes_one_image"] for v in facts["variants"]}
    assert by_k == {
        None: slot * 8 * 80,
        3: slot * (2 * 80 + 6 * 64),
        5: slot * (4 * 80 + 4 * 64),
    }
    files = [path for path in bundle.rglob("*") if path.is_file() and not path.name.startswith("vtx.json")]
    assert facts["bytes"]["all"] == sum(path.stat().st_size for path in files)
