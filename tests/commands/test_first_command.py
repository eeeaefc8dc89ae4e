"""`vtx-run --model NAME photo.jpg "..."` for each model that the pages name, against a hub with its published files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from tests.support.hub import ask_here, serving_hub
from tests.support.published.build import build, reason_absent
from tests.support.published.places import ROOT, models, published
from vtx import cli
from vtx.tools.common import cache

PAGES = ("README.md", "docs/how-to/models.md")
PHOTO = ROOT / "examples" / "scene-1.jpg"
FILES = {  # the folder of published files that each name gets: its own, or one of the same model in another size
    "HuggingFaceTB/SmolVLM-256M-Instruct": "smolvlm-256m",
    "HuggingFaceTB/SmolVLM-500M-Instruct": "smolvlm-256m",
    "OpenGVLab/InternVL3-1B-hf": "internvl3-1b-hf",
    "Qwen/Qwen2-VL-2B-Instruct": "qwen2-vl-olmocr",
    "llava-hf/llava-1.5-7b-hf": "llava-1.5-7b-hf",
}
INT4 = ("Qwen/Qwen2-VL-2B-Instruct", "llava-hf/llava-1.5-7b-hf")  # as the pages run them
LISTED = r"`([\w-]+/[\w.-]+)`,? \(\d"  # a name with its size behind it
RECORD = ROOT / "build" / "published" / "first-command"


def named() -> set[str]:
    """The models that the pages run from the hub, and those of their tables."""
    pages = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    given = re.findall(r"vtx-(?:run|chat|serve) --model ([\w-]+/[\w.-]+)", pages)
    return {*given, *re.findall(r"^\| `([\w-]+/[\w.-]+)`", pages, re.MULTILINE), *re.findall(LISTED, pages)}


def run(model: str, *words: str) -> Result:
    precision = ("--precision", "int4") if model in INT4 else ()
    command = ["--model", model, *precision, str(PHOTO), "What is on the table?", "--max-new-tokens", "2", "--json"]
    return CliRunner().invoke(cli.run, [*command, *words], catch_exceptions=False)


def answer(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def lower_logits(checkpoint: Path) -> None:
    """Make the last norm a quarter: with 4 bits, an export refuses the far logits of random weights."""
    for file in checkpoint.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if re.search(r"(model|language_model)\.norm\.weight$", name):
                tensors[name] = tensors[name] / 4
        save_file(tensors, file, {"format": "pt"})


def test_the_models_of_the_pages_are_those_that_are_tried() -> None:
    assert named() == {*FILES}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_the_first_command_downloads_resumes_exports_answers_and_needs_no_hub_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = models().get(FILES[name])
    if source is None:
        pytest.skip(f"no {FILES[name]} in {published()}; name a folder of published files in PUBLISHED")
    if reason := reason_absent(source):
        pytest.skip(f"{FILES[name]}: {reason}")
    checkpoint = build(source, tmp_path / "checkpoint")
    if name in INT4:
        lower_logits(checkpoint)
    for variable in ("VTX_BUNDLE", "VTX_CACHE_LIMIT"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    with serving_hub({name: checkpoint}) as hub:
        ask_here(hub, monkeypatch, tmp_path / "hf")
        for status in (401, 403):
            hub.refused = status, "GatedRepo", "Access is restricted."
            gated = run(name)
            assert gated.exit_code == 1
            assert f"{name} is gated; ask for access on its page on the hub" in gated.stderr.splitlines()[-1]
            assert cache.entries() == []
        hub.refused, hub.cuts = None, 1
        started = perf_counter()
        first = answer(run(name))
        seconds = perf_counter() - started
        assert hub.cuts == 0, "the download was not interrupted"
        hub.refused = 500, "", ""
        assert answer(run(name))["token_ids"] == first["token_ids"]
    (entry,) = cache.entries()
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    facts = {
        "model": name, "seconds": round(seconds, 1), "checkpoint_bytes": sum(path.stat().st_size for path in files),
        "downloaded_bytes": hub.sent, "bundle_bytes": entry.bytes,
    }  # fmt: skip
    RECORD.mkdir(parents=True, exist_ok=True)
    (RECORD / f"{name.replace('/', '--')}.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
