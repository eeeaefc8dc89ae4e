"""VILA 1.5 against transformers' parts of the same weights, and its projector stated patch by patch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.bundles import export
from tests.support.exported import Models, greedy, prompt
from tests.support.families.original import QUESTION, counterpart
from tests.support.families.vila import VILA, stated
from tests.support.fixtures import Checkpoints, References
from tests.support.near import assert_near
from tests.support.parity import assert_later_equal_fresh
from tests.support.tiny import prompt_messages, random_image, random_video
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.runtime.report.golden import check_golden
from vtx.runtime.vision.video import Video

sentencepiece = pytest.importorskip("sentencepiece", reason="the [export] extra is not installed in full")

STEPS, TOLERANCE = 6, 2e-5
WIDE, HIGH = (150, 60), (40, 90)


@pytest.mark.slow
@torch.inference_mode()
def test_a_bundle_answers_as_the_statement(models: Models, tiny_checkpoint: Checkpoints, reference: References) -> None:
    model, judge, folder = models(VILA, (3, 5)), reference(counterpart(VILA)), tiny_checkpoint(VILA)
    for shapes in ((WIDE,), (HIGH, WIDE)):
        images = [random_image(seed, shape) for seed, shape in enumerate(shapes)]
        ids, rows, vision = stated(judge.model, judge.processor.image_processor, folder, images)
        asked = prompt(model, prompt_messages(QUESTION, len(images)), images)
        assert asked.ids.tolist() == ids
        assert int(vision.sum()) == 9 * len(images)
        for k in (None, 3, 5):
            found, now, image = greedy(model, asked, k, STEPS), rows, vision
            for step in range(STEPS):
                logits = judge.last_logits(now, image, k)
                assert_near(found.logits[step], logits.numpy(), TOLERANCE)
                assert found.ids[step] == int(logits.argmax())
                answered = judge.model.model.language_model.embed_tokens(torch.tensor([[found.ids[step]]]))
                now, image = torch.cat([now, answered], 1), torch.cat([image, torch.tensor([False])])
    assert all(check.passed for check in check_golden(model))


def frames_of(video: np.ndarray, wanted: int) -> list[Image.Image]:
    """The released code's choice: evenly up to the frame before the last; black ones in front of a short video."""
    places = [int(n * (len(video) - 2) / (wanted - 1)) for n in range(wanted)]
    if len(video) < wanted:
        places = [*range(len(video))]
    black = [Image.new("RGB", video.shape[2:0:-1])] * (wanted - len(places))
    return [*black, *(Image.fromarray(video[place]) for place in places)]


@pytest.mark.parametrize("length", [30, 8, 5], ids=["long", "as many", "short"])
@torch.inference_mode()
def test_a_video_answers_as_its_frames_stated_as_images(
    models: Models, tiny_checkpoint: Checkpoints, reference: References, length: int
) -> None:
    model, judge, folder = models(VILA, (3, 5)), reference(counterpart(VILA)), tiny_checkpoint(VILA)
    video = random_video(0, length, (90, 60))
    ids, rows, vision = stated(judge.model, judge.processor.image_processor, folder, frames_of(video, 8))
    asked = prompt(model, prompt_messages(QUESTION, 0, 1), [video])
    assert asked.ids.tolist() == ids
    assert int(vision.sum()) == 8 * 9
    for k in (None, 5):
        found = greedy(model, asked, k, 1)
        assert_near(found.logits[0], judge.last_logits(rows, vision, k).numpy(), TOLERANCE)


def test_an_image_and_a_video_are_asked_about_together_and_later_questions_equal_fresh_runs(models: Models) -> None:
    model, video, image = models(VILA, (3, 5)), random_video(0, 12, (50, 70)), random_image(0)
    assert [picture.kind for picture in model.open([video, image]).images] == ["video", "image"]
    answer = model.open([video, image]).ask("red?", max_new_tokens=2)
    assert answer.stats.vision_tokens == 9 * 9
    assert model.open(Video(video, 3)).ask("red?", max_new_tokens=2).stats.vision_tokens == 27
    assert_later_equal_fresh(model, [video, image], 5)


@pytest.mark.parametrize("count", [0, 65, 8.0, True, "8"])
def test_a_number_of_frames_that_cannot_be_is_refused(count: object) -> None:
    config = {"architectures": ["LlavaLlamaModel"], "mm_vision_select_feature": "cls_patch", "llm_cfg": {}}
    config |= {"vision_tower_cfg": {"model_type": "siglip_vision_model"}, "num_video_frames": count}
    with pytest.raises(CheckpointError, match="num_video_frames is"):
        read_config(config | {"mm_projector_cfg": {"mm_projector_type": "mlp_downsample"}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"s2": True}, "s2 True is not supported"),
        ({"image_aspect_ratio": "dynamic"}, "image_aspect_ratio 'dynamic' is not supported in a VILA model"),
        ({"mm_vision_select_feature": "patch"}, "mm_vision_select_feature 'patch' is not supported"),
        ({"mm_projector_cfg": {"mm_projector_type": "mlp2x_gelu"}}, "vtx supports mlp_downsample"),
        ({"vision_tower_cfg": {"model_type": "radio"}}, "the vision tower 'radio' is not supported"),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    config = {"architectures": ["LlavaLlamaModel"], "mm_vision_select_feature": "cls_patch", "llm_cfg": {}}
    config |= {"vision_tower_cfg": {"model_type": "siglip_vision_model"}}
    config |= {"mm_projector_cfg": {"mm_projector_type": "mlp_downsample"}}
    parsed = read_config(config)
    assert parsed.view_tokens == 49  # of 14 x 14 patches, transformers' defaults
    assert parsed.video is not None
    assert (parsed.video.layout.frames, parsed.video.layout.tokens, parsed.frames) == (8, 49, None)
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(config | changes)


def test_what_looks_at_single_patches_is_refused(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"has no class token|2 x 2 patches"):
        export(tiny_checkpoint(VILA), tmp_path / "bundle", reductions=("cls",))
