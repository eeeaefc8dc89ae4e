"""CDPruner by CLIP's text tower in libvtx: its tokenizer, its segments, and the answers of Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.bundles import export_with
from tests.support.clip import make_clip
from tests.support.cpp import ask, expected, needs_cpp, output, run
from tests.support.exported import THREADS, Models
from tests.support.fixtures import Checkpoints, References
from tests.support.tiny import Tiny, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model

pytestmark = needs_cpp

SPEC = "cdpruner:keep=20,text=tower"
QUESTIONS = (
    "red?",
    "How many RED shapes are there, and what is the colour of the square in the picture? It's 2024!!",
    "Caf\u00e9  \u0130stanbul\t\u5927\u304d\u3044 \U0001f642 don't <|endoftext|> we'LL <|STARTOFTEXT|>",
)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Checkpoints, reference: References, tmp_path_factory: pytest.TempPathFactory) -> Model:
    tiny, folder = Tiny(image=126, context=768), tmp_path_factory.mktemp("tower")
    clip = make_clip(folder / "clip", reference(tiny))
    options = ExportOptions(
        str(tiny_checkpoint(tiny)), (3,), "fp32", dialects=("ort",), reductions=("none", SPEC), text_tower=str(clip)
    )
    bundle = export_with(options, folder / "b")
    return load(bundle.folder, device="cpu", threads=THREADS)


def test_its_tokenizer_gives_the_ids_of_the_tokenizers_library(model: Model) -> None:
    from tokenizers import Tokenizer

    assert model.manifest.text_tower is not None
    path = model.bundle.folder / model.manifest.text_tower.tokenizer
    theirs, texts = Tokenizer.from_file(str(path)), [*QUESTIONS, "", " ", "a  b\n\nc", "''s", "x'S y", "\u0301a"]
    lines = "\n".join(map(json.dumps, texts)).encode()
    for text, line in zip(texts, output("probe", "tokenize", path, stdin=lines).decode().splitlines(), strict=True):
        assert json.loads(line)["ids"] == theirs.encode(text, add_special_tokens=False).ids, text


def test_answers_selected_by_the_tower_are_those_of_python(model: Model, tmp_path: Path) -> None:
    random_image(3).save(tmp_path / "a.png")
    found = ask(model.bundle.folder, tmp_path / "a.png", *QUESTIONS, "--reduce", SPEC, "--max-new-tokens", "5")
    options = ("--reduce", SPEC, "--max-new-tokens", "5", "--about", "the red circle")
    about = ask(model.bundle.folder, tmp_path / "a.png", *QUESTIONS, *options)
    chat = ask(model.bundle.folder, tmp_path / "a.png", *QUESTIONS, "--chat", "--reduce", SPEC, "--max-new-tokens", "5")
    with model.open(tmp_path / "a.png") as conversation:
        for question, answer in zip(QUESTIONS, found, strict=True):
            want = conversation.ask(question, reduce=SPEC, max_new_tokens=5)
            assert expected(answer) == expected(want.to_dict()), question
    with model.open(tmp_path / "a.png") as conversation:
        for question, answer in zip(QUESTIONS, about, strict=True):
            want = conversation.ask(question, reduce=SPEC, about="the red circle", max_new_tokens=5)
            assert expected(answer) == expected(want.to_dict()), question
    assert [a["kept"] for a in about] == [about[0]["kept"]] * 3 != [a["kept"] for a in found]
    with model.open(tmp_path / "a.png") as conversation:
        turns = conversation.chat(reduce=SPEC)
        for question, answer in zip(QUESTIONS, chat, strict=True):
            assert expected(answer) == expected(turns.ask(question, max_new_tokens=5).to_dict())


def test_tiles_are_selected_by_the_tower_as_in_python(
    tiny_checkpoint: Checkpoints, reference: References, tmp_path: Path
) -> None:
    tiny, spec = Tiny(family="llava_next"), "cdpruner:keep=5,text=tower"
    clip = make_clip(tmp_path / "clip", reference(tiny))
    options = ExportOptions(
        str(tiny_checkpoint(tiny)), (3,), "fp32", dialects=("ort",), reductions=("none", spec), text_tower=str(clip)
    )
    folder = export_with(options, tmp_path / "b").folder
    random_image(3, (150, 60)).save(tmp_path / "a.png")
    found = ask(folder, tmp_path / "a.png", *QUESTIONS, "--reduce", spec, "--max-new-tokens", "5")
    with load(folder, device="cpu", threads=THREADS) as python, python.open(tmp_path / "a.png") as conversation:
        views = len(conversation.images[0].views)
        for question, answer in zip(QUESTIONS, found, strict=True):
            want = conversation.ask(question, reduce=spec, max_new_tokens=5)
            assert expected(answer) == expected(want.to_dict()), question
            assert want.stats.vision_tokens == 5 * views > 10


def test_a_bundle_without_the_tower_says_how_to_export_it(models: Models, tmp_path: Path) -> None:
    random_image(3).save(tmp_path / "a.png")
    done = run("run", "--bundle", models().bundle.folder, tmp_path / "a.png", "red?", "--reduce", SPEC)
    assert b"it lacks CLIP's text tower; export it with" in done.stderr
    assert b"--text-tower CLIP, or use text=embedding" in done.stderr
