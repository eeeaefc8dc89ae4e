"""LISA against transformers' LLaVA of the same weights: ids, logits, and the states of its segmentation tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.exported import Models, prompt
from tests.support.families.lisa import ADDED, LISA, QUESTION
from tests.support.families.lisa_judge import Judge
from tests.support.families.original import counterpart
from tests.support.fixtures import Checkpoints
from tests.support.near import assert_near
from tests.support.parity import STEPS, TOLERANCE, assert_parity
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.checkpoint.resolving import resolve
from vtx.runtime.api.options import Options
from vtx.runtime.errors import CheckpointError

pytest.importorskip("sentencepiece", reason="the [export] extra is not installed in full")

SEG = ADDED[0]
SHAPES = [((150, 60),), ((40, 90), (150, 60))]
MULTI_HEAD = Tiny(family="lisa", context=512, kv_heads=4, pickled=True, shards=2)


@pytest.fixture(scope="module")
def judge(tiny_checkpoint: Checkpoints) -> Callable[[Tiny], Judge]:
    return lambda tiny: Judge(tiny_checkpoint(counterpart(tiny)), tiny_checkpoint(tiny), tiny)


@pytest.mark.slow
@pytest.mark.parametrize("tiny", [LISA, pytest.param(MULTI_HEAD, marks=pytest.mark.slow)], ids=["grouped", "multi"])
def test_ids_logits_and_the_states_of_segments_equal_transformers(
    models: Models, judge: Callable[[Tiny], Judge], tiny: Tiny
) -> None:
    model, judging, found = models(tiny, (3, 5)), judge(tiny), 0
    judging.model.double()  # in float32 it is itself 2.6e-5 away on processors with AVX2 alone
    for shapes in SHAPES:
        images = [random_image(seed, shape) for seed, shape in enumerate(shapes)]
        inputs = judging.lisa_inputs(images, tiny.vision_tokens)
        asked = prompt(model, prompt_messages(QUESTION, len(images)), images)
        assert asked.ids.tolist() == [0 if id == judging.image_token else id for id in inputs["input_ids"][0].tolist()]
        assert_parity(model, judging, inputs, asked)
        for k in (None, 3, 5):
            ids, states = judging.states(inputs, k)
            for lookup in (0, 3):
                with model.open(images) as conversation:
                    options = Options(STEPS, ignore_eos=True, prompt_lookup=lookup)
                    answer = conversation.ask(QUESTION, k, options)
                assert list(answer.token_ids) == ids
                assert answer.stats.seg_states is not None
                assert len(answer.stats.seg_states) == len(states)
                assert answer.to_dict()["seg_states"] == answer.stats.seg_states
                for given, wanted in zip(answer.stats.seg_states, states, strict=True):
                    np.testing.assert_allclose(given, wanted.numpy(), atol=TOLERANCE, rtol=2e-5)
            found += len(states)
    assert found or tiny is MULTI_HEAD, "no answer held a segment"  # that one's answers hold none


def test_later_questions_equal_fresh_runs(models: Models) -> None:
    model, options = models(LISA, (3, 5)), Options(STEPS, ignore_eos=True)
    image, questions = random_image(0, (150, 60)), ("red?", QUESTION, "red?")
    with model.open(image) as conversation:
        later = [conversation.ask(question, 5, options) for question in questions]
    for question, answer in zip(questions, later, strict=True):
        with model.open(image) as fresh:
            alone = fresh.ask(question, 5, options)
        assert answer.token_ids == alone.token_ids
        assert_near(answer.stats.seg_states or (), alone.stats.seg_states or (), TOLERANCE)


def test_models_without_such_a_token_say_nothing_of_it(models: Models) -> None:
    with models(Tiny(), (3, 5)).open(random_image(0)) as conversation:
        answer = conversation.ask("red?", options=Options(2))
    assert answer.stats.seg_states is None
    assert "seg_states" not in answer.to_dict()


def test_a_tokenizer_without_the_token_is_refused(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint(Tiny(family="llava_llama", context=512))
    request = {"folder": str(folder), "name": "x", "image_token_id": 0, "video_token_id": None, "end_ids": [2]}
    request |= {"stated": True, "vocab": 512}
    with pytest.raises(CheckpointError, match=r"has no token \[SEG\]"):
        resolve({**request, "original": True, "seg_token": SEG, "template": "{{ messages }}"})
