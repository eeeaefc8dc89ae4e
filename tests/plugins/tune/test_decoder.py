"""The training forward is the runtime's: the exported bundle's logits at K, packed or alone, and its greedy answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.exported import Models, greedy, prompt
from tests.support.families import qwen
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.calibration.source import open_source
from vtx.exporter.reference.prompts import Source
from vtx.runtime.errors import RequestError, UnsupportedModelError
from vtx.tools.data.items import Item
from vtx_tune.decoder import WithdrawingDecoder, load_text_model, tensors_of
from vtx_tune.options import Depths, Learning, Packing, TuneOptions
from vtx_tune.packing import Row, pack, read_questions
from vtx_tune.train import ImageEncoder, selected
from vtx_tune.tune import open_workspace

GQA, MHA = Tiny(layers=4), Tiny(layers=4, kv_heads=4)
QWEN2 = Tiny(layers=4, text="qwen2", tied=True, rope="yarn")
QWEN3 = Tiny(layers=4, text="qwen3")
VL25, VL3 = replace(qwen.QWEN25, layers=4), replace(qwen.QWEN3, layers=4)
CPU = torch.device("cpu")
QUESTIONS = ("red?", "how many circle shapes are there?", "describe the left square")
ANSWER = "the red square"
PACKING = Packing(max_new_tokens=6)


def trained(source: Source, *, checkpointing: bool = True, **learning: object) -> WithdrawingDecoder:
    how = Learning(full=True, **learning)  # type: ignore[arg-type]
    model = load_text_model(source, torch.float32, CPU, how)
    return WithdrawingDecoder(source.config.text, model, how, seed=0, checkpointing=checkpointing)


def rows_of(source: Source, answer: str | None = ANSWER, count: int = 3, packing: Packing = PACKING) -> list[Row]:
    image = random_image(1)
    items = [Item((image,), question, answer) for question in QUESTIONS[:count]]
    questions, skipped = read_questions(source, items, packing)
    assert not skipped
    return pack(questions, {}, source.config.image_token_id, packing, source.context)


def entered(source: Source, row: Row) -> tuple[dict[str, Any], torch.Tensor]:
    """A row's tensors and the tokens of its images."""
    encoded = ImageEncoder(source, CPU)(row.images)
    return tensors_of(row, encoded, CPU), encoded.hidden


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "tiny", [GQA, MHA, QWEN2, QWEN3, VL25, VL3], ids=["gqa", "mha", "qwen2", "qwen3", "qwen2.5-vl", "qwen3-vl"]
)
def test_the_training_forward_gives_the_bundle_s_logits_at_k(
    tiny: Tiny, models: Models, tiny_checkpoint: Checkpoints
) -> None:
    """Three questions packed behind one image, against a fresh session for each, along the same answer."""
    source, model = open_source(str(tiny_checkpoint(tiny))), models(tiny, (2, 4))
    decoder, (row,) = trained(source), rows_of(source)
    tensors, features = entered(source, row)
    asked = [prompt(model, prompt_messages(question), [random_image(1)]) for question in QUESTIONS]
    answers = row.targets.reshape(3, -1).tolist()
    for k in (2, 4, None):
        with torch.no_grad():
            logits = decoder.head(decoder(tensors, features, k)).reshape(3, len(answers[0]), -1).numpy()
        for ours, question, ids in zip(logits, asked, answers, strict=True):
            theirs = greedy(model, question, k, len(ids), ids).logits
            np.testing.assert_allclose(ours, theirs, atol=2e-4)
            assert (ours.argmax(-1) == theirs.argmax(-1)).all()


def test_gradients_do_not_depend_on_checkpointing_and_reach_layers_on_both_sides_of_k(
    tiny_checkpoint: Checkpoints,
) -> None:
    source = open_source(str(tiny_checkpoint(GQA)))
    gradients = []
    for checkpointing in (False, True):
        decoder, (row,) = trained(source, checkpointing=checkpointing), rows_of(source)
        decoder.head(decoder(*entered(source, row), 3)).square().mean().backward()
        gradients.append({name: p.grad for name, p in decoder.learning_parameters().items()})
    assert all(torch.equal(gradients[0][name], g) for name, g in gradients[1].items())
    assert all(float(g.abs().max()) > 0 for g in gradients[0].values())


def test_the_teacher_is_the_model_as_it_was_whatever_has_been_learnt(tiny_checkpoint: Checkpoints) -> None:
    source = open_source(str(tiny_checkpoint(GQA)))
    decoder, (row,) = trained(source, layers=(2, 3)), rows_of(source)
    tensors, features = entered(source, row)
    with torch.no_grad():
        before = decoder(tensors, features, None)
        for parameter in decoder.learning_parameters().values():
            parameter.mul_(1.1)
        assert torch.equal(decoder.teach(tensors, features), before)
        assert not torch.allclose(decoder(tensors, features, None), before, atol=1e-3)
    assert {name.split(".")[3] for name in decoder.learning_parameters()} == {"1", "2"}


@pytest.mark.parametrize("tiny", [GQA, VL25, VL3], ids=["gqa", "qwen2.5-vl", "qwen3-vl"])
def test_the_teacher_s_greedy_answers_are_the_bundle_s(
    tiny: Tiny, models: Models, tiny_checkpoint: Checkpoints
) -> None:
    source, model = open_source(str(tiny_checkpoint(tiny))), models(tiny, (2, 4))
    questions, _ = read_questions(source, [Item((random_image(1),), text) for text in QUESTIONS], PACKING)
    prefix = torch.from_numpy(questions[0].prefix)
    ours = trained(source).greedy(
        prefix, prefix == source.config.image_token_id, ImageEncoder(source, CPU)((random_image(1),)),
        [torch.from_numpy(q.suffix) for q in questions], source.text.settings.end_ids, 5,
    )  # fmt: skip
    for answer, text in zip(ours, QUESTIONS, strict=True):
        theirs = greedy(model, prompt(model, prompt_messages(text), [random_image(1)]), None, len(answer)).ids
        assert answer == theirs


def test_questions_about_one_image_share_a_row_as_far_as_they_fit(tiny_checkpoint: Checkpoints) -> None:
    source = open_source(str(tiny_checkpoint(GQA)))
    assert [int(row.blocks.max()) for row in rows_of(source)] == [3]
    assert [int(row.blocks.max()) for row in rows_of(source, packing=Packing(2, max_new_tokens=6))] == [2, 1]
    (longest,) = rows_of(source)
    tight = Packing(max_tokens=len(longest) - 1, max_new_tokens=6)
    assert [int(row.blocks.max()) for row in rows_of(source, packing=tight)] == [2, 1]


def test_a_question_that_does_not_fit_or_has_no_text_is_reported(tiny_checkpoint: Checkpoints) -> None:
    source = open_source(str(tiny_checkpoint(GQA)))
    items = [Item((random_image(1),), "red?"), Item((random_image(2),), "circle " * 300)]
    questions, skipped = read_questions(source, items, PACKING)
    assert len(questions) == 1
    assert "question 2" in skipped[0]
    assert "the limit is 256" in skipped[0]


@pytest.mark.parametrize("reduce", ["divprune:keep=0.5", "random:keep=5"])
def test_what_the_student_sees_through_a_reduction_is_what_the_bundle_sees(
    reduce: str, models: Models, tiny_checkpoint: Checkpoints
) -> None:
    source, model = open_source(str(tiny_checkpoint(GQA))), models(GQA, (2, 4))
    entry = TuneOptions(Depths(2, 4), reduce=reduce).entry(source.config)
    decoder, picture = trained(source), random_image(1)
    with model.open(picture) as image:
        asked = [image.ask(q, 4, reduce=reduce, max_new_tokens=5, logprobs=True) for q in QUESTIONS]
    answers = [list(answer.token_ids) for answer in asked]
    questions, _ = read_questions(source, [Item((picture,), question) for question in QUESTIONS], PACKING)
    own = {n: np.array(ids) for n, ids in enumerate(answers)}
    (row,) = pack(questions, own, source.config.image_token_id, PACKING, source.context)
    encoded = ImageEncoder(source, CPU, entry)((picture,))
    assert encoded.kept is not None
    tensors, features = selected(tensors_of(row, encoded, CPU), encoded.hidden, encoded.kept)
    assert len(features) < len(encoded.hidden)
    with torch.no_grad():
        found = decoder.head(decoder(tensors, features, 4)).log_softmax(-1)
    ours = found[torch.arange(len(found)), row.targets].split([len(ids) for ids in answers])
    for logs, answer in zip(ours, asked, strict=True):
        np.testing.assert_allclose(logs.numpy(), answer.logprobs, atol=2e-4)


@pytest.mark.parametrize(
    ("tiny", "reduce", "words"),
    [
        (GQA, "fastv:k=2,ratio=0.5", "reads more than an image's tokens"),
        (GQA, "cls:keep=0.5", "reads more than an image's tokens"),
        (VL25, "divprune", "three-part positions"),
    ],
)
def test_a_reduction_that_is_not_trained_with_is_refused(
    tiny: Tiny, reduce: str, words: str, tiny_checkpoint: Checkpoints
) -> None:
    config = open_source(str(tiny_checkpoint(tiny))).config
    with pytest.raises(RequestError, match=words):
        TuneOptions(Depths(2, 4), reduce=reduce).entry(config)


@pytest.mark.parametrize(
    ("tiny", "words"),
    [
        (qwen.QWEN35, r"a text model \(qwen3_5\) with its own multipliers or norms"),
        (Tiny(family="llava_llama", layers=4), "in its authors' layout"),
    ],
    ids=["qwen3_5", "original"],
)
def test_a_model_that_is_not_tuned_is_refused(
    tiny: Tiny, words: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    options = TuneOptions(Depths(2, 3), str(tiny_checkpoint(tiny)))
    with pytest.raises(UnsupportedModelError, match=words):
        open_workspace(options, tmp_path / "out", print)
    assert not (tmp_path / "out").exists()
