"""The built-in demo model sees: its answers about drawn scenes are right, and transformers gives the same ids."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from tests.support.bundles import export
from tests.support.exported import THREADS
from tests.support.reference import Reference
from tests.support.tiny import prompt_messages
from vtx import cli
from vtx.exporter.bundling.options import DEMO
from vtx.exporter.bundling.prepare import demo_checkpoint
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.tools.data import scene_questions, scenes

SEED = 9_100_000_000  # far from the seeds that training and demo/evaluate.py draw from
ROOT = Path(__file__).resolve().parents[2]
PAIRS = 200
LENGTH = 8
MAX_BYTES = 10_000_000
LEAST_RIGHT = 0.95


class Asked(NamedTuple):
    image: Image.Image
    kind: str
    question: str
    answer: str


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    """Two questions of different kinds on each scene, all kinds equally often."""
    rng, found = random.Random(SEED), list[Asked]()
    kinds = list(scene_questions.KINDS)
    while len(found) < PAIRS:
        scene = scenes.random_scene(rng)
        image = scenes.photograph(scene, rng)
        items = [scene_questions.ask(scene, kinds[(len(found) + i) % len(kinds)], rng) for i in range(2)]
        if all(items):
            found += [Asked(image, item.kind, item.question, item.answer) for item in items]
    return found


@pytest.fixture(scope="module")
def judge() -> Reference:
    return Reference(demo_checkpoint(), attention="sdpa")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """The demo exported with K = 16, by precision."""
    folder = tmp_path_factory.mktemp("demo")
    bundles = {p: export(Path(DEMO), folder / p, (16,), p) for p in ("fp32", "fp16")}
    return {precision: load(bundle.folder, threads=THREADS) for precision, bundle in bundles.items()}


def answers(model: Model, asked: Sequence[Asked], k: int | None) -> list[tuple[list[int], str]]:
    """Token ids and text of each; questions about one picture share its conversation."""
    found, conversation, image = list[tuple[list[int], str]](), model.open(), None
    for pair in asked:
        if pair.image is not image:
            conversation, image = model.open(pair.image), pair.image
        answer = conversation.ask(pair.question, k, Options(max_new_tokens=LENGTH))
        found.append((list(answer.token_ids), answer.text))
    return found


@torch.inference_mode()
def transformers_ids(judge: Reference, asked: Sequence[Asked]) -> list[list[int]]:
    """Greedy ids of all questions in one batch, padded on the left, the end token included."""
    inputs = [judge.inputs(prompt_messages(pair.question), [pair.image]) for pair in asked]
    longest = max(each["input_ids"].shape[1] for each in inputs)
    ids = torch.full((len(inputs), longest), judge.tokenizer.pad_token_id)
    seen = torch.zeros_like(ids)
    for row, each in enumerate(inputs):
        own = each["input_ids"][0]
        ids[row, longest - len(own) :], seen[row, longest - len(own) :] = own, 1
    pixels: dict[str, Any] = {"pixel_values": torch.cat([each["pixel_values"] for each in inputs])}
    end = judge.tokenizer.eos_token_id
    done = judge.model.generate(
        input_ids=ids, attention_mask=seen, **pixels, max_new_tokens=LENGTH, do_sample=False, eos_token_id=end
    )
    rows: list[list[int]] = done[:, longest:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


@pytest.mark.slow
def test_ids_without_withdrawal_equal_those_of_transformers(
    models: dict[str, Model], judge: Reference, asked: list[Asked]
) -> None:
    found = [ids for ids, _ in answers(models["fp32"], asked, None)]
    assert len(found) == PAIRS
    assert found == transformers_ids(judge, asked)


@pytest.mark.slow
@pytest.mark.parametrize(("k", "precision"), [(None, "fp32"), (16, "fp16")])
def test_answers_about_new_scenes_are_right(
    models: dict[str, Model], asked: list[Asked], k: int | None, precision: str
) -> None:
    found = answers(models[precision], asked, k)
    wrong = [
        (pair.kind, pair.question, pair.answer, text)
        for pair, (_, text) in zip(asked, found, strict=True)
        if text != pair.answer
    ]
    assert len(wrong) <= (1 - LEAST_RIGHT) * PAIRS, wrong


@pytest.mark.slow
@pytest.mark.parametrize("k", [None, 16])
def test_every_kind_is_right_in_capitals_and_with_or_without_a_question_mark(
    models: dict[str, Model], asked: list[Asked], k: int | None
) -> None:
    """Eighty of the questions, each in five spellings: the answer does not depend on how it is typed."""
    spellings = (str.lower, str.upper, str.capitalize, lambda q: q.capitalize() + "?", lambda q: q.upper() + "?")
    right, chosen = [0] * len(spellings), asked[:80]
    typed = [pair._replace(question=spell(pair.question.rstrip("?"))) for pair in chosen for spell in spellings]
    for number, (pair, (_, text)) in enumerate(zip(typed, answers(models["fp16"], typed, k), strict=True)):
        right[number % len(spellings)] += text == pair.answer
    assert min(right) >= LEAST_RIGHT * len(chosen), right


def test_every_kind_is_asked(asked: list[Asked]) -> None:
    kinds = [pair.kind for pair in asked]
    assert {kind: kinds.count(kind) for kind in scene_questions.KINDS} == dict.fromkeys(
        scene_questions.KINDS, PAIRS // 8
    )


def test_the_model_is_a_whole_checkpoint_of_at_most_ten_megabytes() -> None:
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    folder = demo_checkpoint()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_BYTES
    load_model: Any = LlavaForConditionalGeneration.from_pretrained
    model, info = load_model(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert len(model.model.language_model.layers) >= 24
    processor: Any = AutoProcessor.from_pretrained(folder)  # type: ignore[no-untyped-call]
    assert processor.chat_template
    assert processor.image_processor.size


def test_a_question_outside_its_world_gets_an_answer_too(models: dict[str, Model], asked: list[Asked]) -> None:
    with models["fp16"].open(asked[0].image) as conversation:
        for question in ("Who painted this?", "¿Qué hay en la imagen?", "🙂", "Write a poem about the sea."):
            answer = conversation.ask(question, 16)
            assert answer.token_ids
            assert re.fullmatch(r"[^\ufffd]*", answer.text)


@pytest.mark.sampled
@pytest.mark.parametrize("words", [("--text-only", "hello"), (str(ROOT / "examples/scene-1.jpg"), "Who is that?")])
def test_whoever_asks_the_demo_is_told_what_it_knows(models: dict[str, Model], words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli.run, [*words, "--bundle", str(models["fp16"].bundle.folder)])
    assert done.exit_code == 0, done.stderr
    assert "knows only drawn scenes" in done.stderr
    assert "drawn" not in done.stdout
