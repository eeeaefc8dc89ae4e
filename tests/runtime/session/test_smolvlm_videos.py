"""Videos of SmolVLM2: transformers' processor samples, words and prints them, and prepares frames with Pillow.

`VTX_CONFIGURATIONS=30` sets how many random configurations are compared with transformers.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.bundles import ORT, export
from tests.support.drawn import smolvlm
from tests.support.exported import THREADS, Models, greedy, prompt
from tests.support.families.smolvlm import SMOLVLM
from tests.support.fixtures import Checkpoints, References
from tests.support.json_files import read_json, write_json
from tests.support.near import assert_near
from tests.support.parity import (
    STEPS,
    TOLERANCE,
    assert_as_drawn,
    assert_later_equal_fresh,
    assert_parity,
    assert_same_on_openvino,
)
from tests.support.reference import Inputs, Reference
from tests.support.tiny import make, prompt_messages, random_image, random_video
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import UNPRINTED, plan_export
from vtx.runtime.api.load import load
from vtx.runtime.errors import BundleError, CheckpointError, RequestError
from vtx.runtime.vision.layouts.frames import Frames, in_words
from vtx.runtime.vision.video import Video, video

pytestmark = pytest.mark.dialects("ort", "plain")
QUESTION = "What is the colour of the square in the picture?"
TINY = replace(SMOLVLM, context=1024)
WORDS = dict(
    enumerate(["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"], 1)
)  # as num2words has them
WIDE = video(random_video(0, 30, (90, 61)), fps=4)
HIGH = video(random_video(1, 9, (50, 170)), fps=3)
LONG = video(random_video(2, 1, (20, 20)).repeat(4000, 0), fps=1)  # over an hour
slow = pytest.mark.slow


def about(given: Video) -> Any:
    from transformers.video_utils import VideoMetadata

    frames, fps = len(given.source), float(given.fps or 24)  # type: ignore[arg-type]
    return VideoMetadata(frames, fps, duration=frames / fps)


class Prepared:
    """Transformers' part for videos without torchvision: it samples itself, and Pillow's image processor resizes."""

    def __init__(self, folder: Path, given: Video) -> None:
        from transformers import SmolVLMImageProcessorPil
        from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

        settings = read_json(folder / "processor_config.json")["image_processor"]
        self.given, self.sampler = given, SmolVLMVideoProcessor.from_dict(settings)
        self.num_frames, self.fps = self.sampler.num_frames, self.sampler.fps
        whole = settings | {"do_image_splitting": False}
        self.images = SmolVLMImageProcessorPil(**{key: whole[key] for key in whole if key != "image_processor_type"})

    def __call__(self, videos: list[np.ndarray], **_: Any) -> Inputs:
        (frames,), clip = videos, about(self.given)
        clip.frames_indices = self.sampler.sample_frames(clip, num_frames=self.given.frames).tolist()
        pictures = [Image.fromarray(frames[place]) for place in clip.frames_indices]
        return dict(self.images([pictures], return_tensors="pt")) | {"video_metadata": [clip]}


def asked_of(
    judge: Reference, folder: Path, messages: list[Any], given: Video, monkeypatch: pytest.MonkeyPatch
) -> Inputs:
    """The prompt and the frames as transformers' own processor makes them."""
    from transformers.models.smolvlm import processing_smolvlm

    monkeypatch.setattr(processing_smolvlm, "num2words", WORDS.__getitem__)

    class OnPillow(processing_smolvlm.SmolVLMProcessor):
        def check_argument_for_proper_class(self, name: str, value: Any) -> Any:
            return None

    own = judge.processor
    processor = OnPillow(own.image_processor, own.tokenizer, Prepared(folder, given), image_seq_len=own.image_seq_len)
    processor.chat_template = judge.template
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    monkeypatch.setattr(processor, "prepare_inputs_layout", lambda text, videos, **_: (None, [text], videos, None))
    found = processor(text=text, videos=[given.source], return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask", "pixel_values", "pixel_attention_mask")}


@pytest.mark.parametrize(
    "given",
    [HIGH, *(pytest.param(replace(WIDE, frames=frames), marks=slow) for frames in (None, 3, 1))],
    ids=["high", "wide", "three", "one"],
)
def test_videos_are_answered_as_by_transformers_and_at_k_as_by_the_statement(
    models: Models, reference: References, tiny_checkpoint: Checkpoints, given: Video,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model, judge, messages = models(TINY, (3, 5, 7)), reference(TINY), prompt_messages(QUESTION, 0, 1)
    inputs = asked_of(judge, tiny_checkpoint(TINY), messages, given, monkeypatch)
    asked = prompt(model, messages, [given])
    assert asked.ids.tolist() == inputs["input_ids"][0].tolist()
    views = model.loaded.images.prepare_video(given).views
    assert np.array_equal(np.stack([*views]), inputs["pixel_values"][0].numpy())
    assert_parity(model, judge, inputs, asked)
    found = greedy(model, asked, 7, STEPS)
    wanted = judge.greedy(inputs, 7, STEPS, guess=found.ids)
    assert found.ids == wanted.ids
    assert_near(found.logits, wanted.logits, TOLERANCE)


@pytest.mark.parametrize(
    ("count", "rate", "a_second", "most"),
    [(3000, 30, 1, 64), (9000, 30, 1, 64), (2100, 30, 1, 64), (1980, 30, 1, 64), (5, 30, 1, 64), (1, 24, 1, 64),
     (400, 0.5, 1, 64), (35, 1, 0.5, 64), (700, 10, 0.5, 30), (600, 10, 2.5, 8), (50, 23.976, 0.7, 8)],
)  # fmt: skip
def test_frames_are_those_that_transformers_samples(count: int, rate: float, a_second: float, most: int) -> None:
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
    from transformers.video_utils import VideoMetadata

    given = VideoMetadata(count, rate, duration=count / rate)
    wanted = SmolVLMVideoProcessor().sample_frames(given, num_frames=most, fps=a_second).tolist()
    frames = Frames(most, 1, a_second=a_second)
    assert frames.sampling.numbers(count, rate) == wanted


@pytest.mark.parametrize("k", [None, 5])
def test_later_questions_about_a_video_equal_fresh_runs(models: Models, k: int | None) -> None:
    assert_later_equal_fresh(models(TINY, (3, 5, 7)), [replace(WIDE, frames=3), random_image(0, (50, 50))], k)


def test_openvino_gives_the_same_answers_about_videos(models: Models) -> None:
    assert_same_on_openvino(models(TINY, (3, 5, 7)), [HIGH], QUESTION)


def test_a_prompt_tells_the_number_of_frames_the_duration_and_times_of_long_videos(models: Models) -> None:
    prepared = models(TINY, (3, 5, 7)).loaded.images.prepare_video(replace(LONG, frames=2))
    assert prepared.in_prompt.texts == (
        "You are provided the following series of two frames from a 1:06:40 [H:MM:SS] video.\n"
        "\nFrame from 00:01:<fake_token_around_image><global-img>",
        "<fake_token_around_image>\nFrame from 66:39:<fake_token_around_image><global-img>",
        "<fake_token_around_image>\n\n",
    )


def test_numbers_are_written_as_num2words_writes_them() -> None:
    numbers = {
        1: "one", 12: "twelve", 19: "nineteen", 20: "twenty", 64: "sixty-four", 90: "ninety", 100: "one hundred",
        101: "one hundred and one", 115: "one hundred and fifteen", 256: "two hundred and fifty-six",
    }  # fmt: skip
    assert {number: in_words(number) for number in numbers} == numbers


def test_methods_before_the_decoder_are_refused_and_others_work(models: Models) -> None:
    model = models(TINY, (), "fp32", ("fastv:k=2,ratio=0.5",))
    with pytest.raises(
        RequestError,
        match="drops tokens before the decoder, but this model has text between its tiles; use fastv, dart after",
    ):
        model.open(HIGH).ask("red?", reduce="evs")
    answer = model.open(HIGH).ask("red?", reduce="fastv:k=2,ratio=0.5", max_new_tokens=2)
    assert answer.stats.vision_tokens_kept[-1] == 6


def test_a_template_of_the_user_decides_about_videos_and_settings_are_read_as_by_transformers(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint(TINY), folder)
    images = "{% for m in messages %}{% for p in m['content'] %}{{ '<image>' if p['type'] == 'image' else p['text'] }}"
    plan = plan_export(ExportOptions(str(folder), (), "fp32", template=images + "{% endfor %}{% endfor %}"))
    assert plan.video is None
    assert UNPRINTED in plan.warnings
    file = folder / "processor_config.json"
    stated = read_json(file)

    def planned(**changes: Any) -> Any:
        write_json(file, stated | {"image_processor": stated["image_processor"] | changes})
        spec = plan_export(ExportOptions(str(folder), (), "fp32")).video
        assert spec is not None
        return [spec.layout.parameters[name] for name in ("frames", "a_second", "longer")]

    assert planned() == [64, 1, 2 * TINY.image]
    assert planned(video_sampling=None) == [64, 1, 2 * TINY.image]
    assert planned(video_sampling={"fps": 0.5, "max_frames": 8}) == [8, 0.5, 2 * TINY.image]
    for wrong in ({"fps": "1"}, {"fps": 0}, {"max_frames": 0}, 3):
        with pytest.raises(CheckpointError, match="the video processor"):
            planned(video_sampling=wrong)
    for bad in ({"a_second": 0.0}, {"longer": 0}, {"longer": 5000}):
        with pytest.raises(BundleError, match="export the bundle again"):
            Frames(8, 4, **bad)  # type: ignore[arg-type]


CONFIGURATIONS = int(os.environ.get("VTX_CONFIGURATIONS") or 1)


@slow
@pytest.mark.parametrize("seed", range(CONFIGURATIONS))
def test_random_models_answer_about_random_videos_as_transformers_and_the_statement(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(f"videos {seed}")
    tiny = replace(smolvlm(draw), names="saved")
    checkpoint = make(tmp_path / "checkpoint", tiny, seed)
    ks = sorted(draw.sample(range(2, tiny.layers + 1), 2))
    judge = Reference(checkpoint)
    count, fps, size = (
        draw.randint(1, 40),
        draw.choice([5, 7.5, 10, 24]),
        (draw.randint(20, 160), draw.randint(20, 160)),
    )
    fewer = draw.randint(1, max(1, round(count / fps)))  # transformers samples no more than one a second
    given = video(random_video(seed, count, size), fps=fps, frames=draw.choice([None, fewer]))
    messages = prompt_messages(QUESTION, 0, 1)
    inputs = asked_of(judge, checkpoint, messages, given, monkeypatch)
    folder = export(checkpoint, tmp_path / "bundle", ks, dialects=ORT).folder
    with load(folder, device="cpu", threads=THREADS) as model:
        asked = prompt(model, messages, [given])
        assert asked.ids.tolist() == inputs["input_ids"][0].tolist()
        worst = assert_as_drawn(model, judge, inputs, asked, ks, 1e-4)
    print(seed, f"{worst:.1e}", len(inputs["input_ids"][0]))
