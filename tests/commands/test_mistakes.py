"""Mistakes on the command line that used to pass, or to get another one's message."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.commands import invoke
from vtx import cli

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
    assert "cut before its form was complete; raise --max-new-tokens" in result.stderr
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
