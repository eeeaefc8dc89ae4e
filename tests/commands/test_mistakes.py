"""Mistakes on the command line that used to pass, or to get another one's message."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.commands import invoke
from vtx import cli
from vtx.runtime.backends.failures import cache_failure, load_failure, run_failure
from vtx.runtime.host import machine
from vtx.runtime.terminal.last import remember

pytestmark = pytest.mark.usefixtures("home")

SCHEMA = '{"type": "object", "properties": {"names": {"type": "string", "minLength": 40}}, "required": ["names"]}'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.jpg", "b.jpg", "Which is red?"], "'b.jpg' is a picture, not a question; use --image b.jpg"),
        (["a.jpg", "Which is red?", "b.PNG"], "'b.PNG' is a picture, not a question; use --image b.PNG"),
        (["a.jpg", "clip.mp4"], "'clip.mp4' is a video, not a question; use --video clip.mp4"),
        (["Who are you?"], "'Who are you?' is not a picture; name one before it, or ask without one by --text-only"),
        (["a.jpg"], "no question given"),
    ],
)
def test_a_question_that_is_a_picture_or_a_picture_that_is_a_question_is_refused(
    arguments: list[str], message: str
) -> None:
    result = invoke("run", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_cut_form_ends_with_3_and_says_so(bundle: Path, image: Path, tmp_path: Path) -> None:
    asked = ("--bundle", str(bundle), "--json-schema", SCHEMA, "--max-new-tokens", "4", "--threads", "1")
    result = invoke("run", str(image), "what is it?", *asked, "--json")
    assert result.exit_code == 3, result.output
    assert json.loads(result.stdout)["incomplete"] is True
    assert "cut before its form was complete; raise --max-new-tokens, or bound" in result.stderr
    whole = invoke("run", str(image), "what is it?", *asked[:2], "--choices", "red,blue", "--json")
    assert whole.exit_code == 0, whole.output
    assert "incomplete" not in json.loads(whole.stdout)
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    shutil.copy(image, tmp_path / "a.png")
    lines = [{"image": "a.png", "question": question} for question in ("what is it?", "where is it?")]
    lines.append({"image": "a.png", "question": "which is it?", "regex": "a"})
    questions.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    batch = CliRunner().invoke(cli.batch, [str(questions), str(answers), *asked])
    assert batch.exit_code == 3, batch.output
    assert "2 were cut before their form was complete" in batch.stderr
    assert ["incomplete" in json.loads(line) for line in answers.read_text().splitlines()] == [True, True, False]


@pytest.mark.parametrize("command", ["inspect", "doctor"])
def test_a_bundle_is_named_with_or_without_the_option(command: str, bundle: Path) -> None:
    alone, named = invoke(command, str(bundle), "--json"), invoke(command, "--bundle", str(bundle), "--json")
    assert named.exit_code == alone.exit_code == 0, named.output
    assert json.loads(named.stdout).keys() == json.loads(alone.stdout).keys()
    both = invoke(command, str(bundle), "--bundle", str(bundle))
    assert both.exit_code == 2
    assert "BUNDLE and --bundle both name a bundle" in both.stderr


def test_other_machines_need_a_key_or_a_word(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("starlette", "uvicorn"):
        pytest.importorskip(package, reason="needs vtx-edge[serve]", exc_type=ModuleNotFoundError)
    monkeypatch.delenv("VTX_API_KEY", raising=False)
    refused = CliRunner().invoke(cli.serve, ["--bundle", str(bundle), "--host", "0.0.0.0"])
    assert refused.exit_code == 1
    assert "--host 0.0.0.0 lets other machines ask; set VTX_API_KEY" in refused.output
    served: list[str] = []
    monkeypatch.setattr("vtx.commands.serve.listening", lambda host, port: served.append(host) or _ended())
    CliRunner().invoke(cli.serve, ["--bundle", str(bundle), "--host", "0.0.0.0", "--no-auth"])
    assert served == ["0.0.0.0"]


def _ended() -> object:
    raise KeyboardInterrupt


@pytest.mark.parametrize("model", ["llava", "llava-1.5/7b/hf", "org/"])
def test_a_name_that_is_no_id_of_the_hub_is_told_without_the_hub(model: str, image: Path) -> None:
    result = invoke("run", str(image), "what is it?", "--model", model)
    assert result.exit_code != 0
    assert f"{model!r}: no such directory, and not a hub id (org/name" in result.stderr


@pytest.mark.slow
def test_a_name_of_the_hub_is_judged_before_pytorch_is_imported(image: Path) -> None:
    asked = (
        "import sys; from vtx.cli import main; sys.argv = ['vtx', *sys.argv[1:]]\n"
        "try: main()\nexcept SystemExit as e: print(e.code, 'torch' in sys.modules)"
    )
    for words in (["run", "--model", "llava", str(image), "what?"], ["export", "--model", "llava"]):
        done = subprocess.run([sys.executable, "-c", asked, *words], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["1", "False"], done.stderr
        assert "not a hub id" in done.stderr


def test_bundles_are_listed_with_the_default_first(bundle: Path, tmp_path: Path) -> None:
    assert "no bundles yet" in invoke("list_bundles").stderr
    remember(tmp_path / "gone")
    remember(bundle)
    [record] = json.loads(invoke("list_bundles", "--json").stdout)
    assert (record["bundle"], record["default"], record["card"]) == (str(bundle), True, None)
    copied = tmp_path / "other"
    shutil.copytree(bundle, copied)
    records = json.loads(invoke("list_bundles", str(copied), str(bundle), "--json").stdout)
    assert [(Path(record["bundle"]), record["default"]) for record in records] == [(bundle, True), (copied, False)]
    (copied / "vtx.json").write_text("{}")
    damaged = invoke("list_bundles", str(copied))
    assert damaged.exit_code == 0
    assert f"{bundle} (default)" in damaged.stdout
    assert str(copied) in damaged.stderr


def test_too_little_memory_is_told_with_what_is_free_and_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 3 << 20)
    monkeypatch.setattr("resource.getrlimit", lambda _: (400_000_000, 400_000_000))
    for error in (
        load_failure("onnxruntime", "stage-01.onnx", MemoryError()),
        run_failure("onnxruntime", "stage-01.onnx", MemoryError()),
        cache_failure(64),
    ):
        assert "(3.15 MB free, limit of this process 400 MB)" in str(error)
    monkeypatch.setattr(machine, "available_memory", lambda: None)
    monkeypatch.setattr("resource.getrlimit", lambda _: (-1, -1))
    assert "(free memory unknown)" in str(cache_failure(64))
