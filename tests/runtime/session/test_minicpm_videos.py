"""Videos of MiniCPM-V 4.6: transformers' processor samples frames and prints the prompt, on pixels that Pillow resizes.

`VTX_CONFIGURATIONS=30` sets how many random configurations are compared with transformers.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.support.bundles import ORT, export
from tests.support.drawn import minicpm
from tests.support.exported import DEVICES, THREADS, Models
from tests.support.families.minicpm import MINICPM
from tests.support.fixtures import Checkpoints, References
from tests.support.near import assert_near
from tests.support.parity import (
    STEPS,
    assert_as_drawn,
    assert_later_equal_fresh,
    assert_parity,
    assert_same_on_openvino,
    video_prompts,
)
from tests.support.reduced import assert_prompt_as_stated, word
from tests.support.reference import Inputs, Reference
from tests.support.statement import Method
from tests.support.tiny import Tiny, edited, make, random_image, random_video
from tests.support.video_files import write_video
from vtx import cli
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import UNPRINTED, plan_export
from vtx.runtime.api.images import Picture
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.spec.manifest import LayoutSpec
from vtx.runtime.errors import BundleError, CheckpointError, ContextError, RequestError, UnsupportedModelError
from vtx.runtime.strict import json_value
from vtx.runtime.vision import frames as prepared_frames
from vtx.runtime.vision.frame_file import FrameFile
from vtx.runtime.vision.frame_sampling import SampledFrames
from vtx.runtime.vision.layouts import read_frames, spec_of
from vtx.runtime.vision.layouts.sliced_frames import SlicedFrames
from vtx.runtime.vision.layouts.slices import Slices
from vtx.runtime.vision.video import Video, video

pytestmark = pytest.mark.dialects("ort", "plain")
TOLERANCE = 1e-4  # as of Qwen3.5
QUESTION = "What is the colour of the square in the picture?"
FINE = replace(MINICPM, downsample="4x", numbered=False, video_slices=4)
WIDE = video(random_video(0, 30, (150, 61)), fps=12)  # three frames, with slices side by side
HIGH = video(random_video(1, 7, (50, 110)), fps=4)  # two, with slices one over the other
SMALL = video(random_video(2, 9, (40, 40)), fps=2)  # five, without
ONE = video(random_video(3, 1, (70, 60)))
LONG = replace(SMALL, frames=3)  # of 4.5 seconds: at tenths of seconds
GIVEN = {"wide": WIDE, "high": HIGH, "small": SMALL, "one": ONE, "long": LONG}
slow = pytest.mark.slow


def both(model: Model, judge: Reference, pictures: list[Picture], question: str = QUESTION) -> tuple[Inputs, Any]:
    """The same prompt for transformers and for a session, images before videos."""
    return video_prompts(model, judge, pictures, question, lambda video: video)


@pytest.mark.parametrize("name", ["wide", *(pytest.param(name, marks=slow) for name in GIVEN if name != "wide")])
@pytest.mark.parametrize("tiny", [MINICPM, pytest.param(FINE, marks=slow)], ids=["16x", "4x"])
def test_videos_are_answered_as_by_transformers_and_at_k_as_by_the_statement(
    models: Models, reference: References, tiny: Tiny, name: str
) -> None:
    model, judge = models(tiny, (3, 5)), reference(tiny)
    inputs, asked = both(model, judge, [GIVEN[name]])
    assert_parity(model, judge, inputs, asked, TOLERANCE)


@pytest.mark.parametrize("name", GIVEN)
def test_frames_their_slices_and_their_pixels_are_those_of_transformers(
    models: Models, reference: References, name: str
) -> None:
    model, judge = models(MINICPM, (3, 5)), reference(MINICPM)
    inputs, _ = both(model, judge, [GIVEN[name]])
    views, patch, at = model.loaded.images.prepare_video(GIVEN[name]).views, MINICPM.patch, 0
    pixels = inputs["pixel_values_videos"][0].numpy()
    sizes = [[view.shape[1] // patch, view.shape[2] // patch] for view in views]
    assert sizes == inputs["target_sizes_videos"].tolist()
    for view, (rows, columns) in zip(views, sizes, strict=True):
        own = pixels[:, :, at : at + rows * columns * patch]
        at += rows * columns * patch
        wanted = own.reshape(3, patch, rows, columns, patch).transpose(0, 2, 1, 3, 4).reshape(view.shape)
        assert_near(view, wanted, 1e-6)
    assert at == pixels.shape[-1]


@slow
def test_images_and_videos_in_one_prompt_are_numbered_each_by_themselves(models: Models, reference: References) -> None:
    tiny = replace(MINICPM, context=1024)
    model, judge = models(tiny, (3, 5)), reference(tiny)
    inputs, asked = both(model, judge, [random_image(0, (90, 70)), random_image(1, (30, 40)), HIGH, SMALL])
    assert_parity(model, judge, inputs, asked, TOLERANCE)
    forms = [model.loaded.images.prepare_video(given).in_prompt for given in (HIGH, SMALL)]
    text = "<image_id>0</image_id><image>v</image><slice>v</slice>\n<slice>v</slice>" + "<image>v</image>"
    assert forms[0].text("v").startswith(text)
    assert forms[1].text("v", 1) == "<image_id>1</image_id>" + "<image>v</image>" * 5


@pytest.mark.slow
def test_frames_are_those_that_transformers_samples() -> None:
    from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor
    from transformers.video_utils import VideoMetadata

    draw, theirs = random.Random(0), MiniCPMV4_6VideoProcessor()
    cases = [(1, 24.0, 64), (90, 30.0, 64), (91, 30.0, 3), (90, 30.0, 3), (1920, 30.0, 64), (1921, 30.0, 64)]
    cases += [
        (
            draw.randint(1, 4000),
            draw.choice([0.5, 1.0, 7.3, 23.976, 24.0, 30000 / 1001, 30.0, 60.0]),
            draw.randint(1, 64),
        )
        for _ in range(120)
    ]
    for count, rate, most in cases:
        given = VideoMetadata(count, rate, duration=count / rate)
        wanted = theirs.sample_frames(given, max_num_frames=most)
        sampling = SlicedFrames(Slices(16, 4, 448, 9, True), most).sampling
        assert sampling.numbers(count, rate) == wanted, (count, rate, most)
        if count / rate > most:
            assert replace(sampling, most=64).numbers(count, rate, most) == wanted
    assert sampling.numbers(60, 30.0, 6) == [0, 11, 23, 35, 47, 59]  # more than seconds


@pytest.mark.parametrize("k", [None, 5])
def test_later_questions_about_a_video_equal_fresh_runs(models: Models, k: int | None) -> None:
    assert_later_equal_fresh(models(MINICPM, (3, 5)), [WIDE, random_image(0, (60, 90))], k, tolerance=TOLERANCE)


def test_views_of_a_video_that_wait_in_a_file_answer_as_those_in_memory(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found, options = models(MINICPM, (3, 5)), list[Any](), Options(STEPS, ignore_eos=True, logprobs=True)
    for held in (100, 4):
        monkeypatch.setattr(prepared_frames, "MAX_HELD_FRAMES", held)
        prepared = model.loaded.images.prepare_video(WIDE)
        assert isinstance(prepared.views, FrameFile) == (held == 4)
        assert prepared.nbytes == sum(view.nbytes for view in prepared.views)
        with model.open(WIDE) as conversation:
            answer = conversation.ask(QUESTION, None, options)
        found.append((answer.token_ids, answer.logprobs, prepared.key, len(prepared.views)))
    assert found[0] == found[1]
    assert found[0][3] == 9


@slow
def test_a_replaced_video_and_another_rate_are_answered_as_in_a_fresh_conversation(models: Models) -> None:
    model, options = models(MINICPM, (3, 5)), Options(4, ignore_eos=True, logprobs=True)
    faster = replace(WIDE, fps=20)
    with model.open([WIDE]) as conversation:
        conversation.ask("red?", 5, options)
        for given in (HIGH, faster, WIDE):
            conversation.replace([given])
            found = conversation.ask("red?", 5, options)
            with model.open([given]) as fresh:
                assert found.token_ids == fresh.ask("red?", 5, options).token_ids


@slow
@pytest.mark.parametrize("device", DEVICES)
def test_reductions_after_a_layer_with_attention_equal_the_statement(
    tiny_checkpoint: Checkpoints, reference: References, tmp_path: Path, device: str
) -> None:
    methods = (Method(fastv=(2, 0.75), k=5), Method(dart=(8, 2, 2, 2)))
    words, judge = tuple(word(replace(method, k=None)) for method in methods), reference(MINICPM)
    folder = export(tiny_checkpoint(MINICPM), tmp_path / "bundle", (5,), "fp32", reductions=words).folder
    with load(folder, device=device, threads=THREADS) as model:
        inputs, asked = both(model, judge, [HIGH])
        ids = inputs["input_ids"]
        images = {  # the tower of images sees the same
            "input_ids": torch.where(ids == judge.video_token, judge.image_token, ids),
            "pixel_values": inputs["pixel_values_videos"], "target_sizes": inputs["target_sizes_videos"],
        }  # fmt: skip
        for method in methods:
            assert_prompt_as_stated(model, judge, images, asked, method)


@slow
def test_openvino_gives_the_same_answers_about_videos(models: Models) -> None:
    assert_same_on_openvino(models(MINICPM, (3, 5)), [random_image(0, (60, 90)), WIDE], QUESTION)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("evs", "drops tokens before the decoder, but this model has text between its tiles"),
        ("vidcom2", "drops tokens before the decoder, but this model has text between its tiles"),
        ("divprune:keep=8", "drops tokens before the decoder"),
        ("fastv:k=3", "reads the attention of layer 3, which has the gated delta rule"),
    ],
)
def test_reductions_without_a_meaning_for_these_videos_are_refused_by_name(
    models: Models, tiny_checkpoint: Checkpoints, spec: str, reason: str
) -> None:
    with pytest.raises((UnsupportedModelError, RequestError), match=reason):
        plan_export(ExportOptions(str(tiny_checkpoint(MINICPM)), (3,), "fp32", reductions=(spec,)))
    if "fastv" not in spec:
        with pytest.raises(RequestError, match=reason):
            models(MINICPM, (3, 5)).open(HIGH).ask("red?", reduce=spec)


def test_what_is_no_video_for_these_models_is_refused(models: Models) -> None:
    model = models(MINICPM, (3, 5))
    with pytest.raises(RequestError, match=r"has 130 sampled frames, and beyond 64 "):
        model.open(replace(SMALL, frames=130)).ask("red?")
    with pytest.raises(RequestError, match="at native resolution; leave it out"):
        model.open(SMALL, fit="pad")
    with pytest.raises(RequestError, match="max_pixels has no effect here: this model sees large images in slices"):
        load(model.bundle.folder, device="cpu", max_pixels=10_000)


def test_fewer_views_hold_for_frames_too_and_a_video_beyond_the_context_names_those_that_fit(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(replace(MINICPM, video_slices=4))
    folder = export(checkpoint, tmp_path / "bundle", (), max_context=100, dialects=ORT).folder
    given = video(random_video(0, 12, (200, 200)), fps=4)
    with load(folder, device="cpu", threads=THREADS) as model, model.open(given) as conversation:
        with pytest.raises(ContextError, match=r"--max-tiles (\d) .*fits, or --frames (\d) .*fits") as refused:
            conversation.ask("red?")
        assert "--max-tiles 4 (max_tiles=4)" in str(refused.value)
        assert "--frames 2 (frames=2)" in str(refused.value)
        assert model.open(replace(given, frames=2)).ask("red?", None, Options(2)).token_ids
    for tiles, views in ((4, 3), (1, 1)):
        with load(folder, device="cpu", threads=THREADS, max_tiles=tiles) as model:
            assert len(model.loaded.images.prepare_video(given).views) == 3 * views
            assert model.open(given).ask("red?", None, Options(2)).token_ids


def test_the_command_answers_about_a_video_file(models: Models, tmp_path: Path) -> None:
    pytest.importorskip("av", reason="the [video] extra is not installed")
    model, clip = models(MINICPM, (3, 5)), write_video(tmp_path / "clip.mp4")  # of three seconds
    command = [str(clip), QUESTION, "--bundle", str(model.bundle.folder), "--max-new-tokens", "3", "--json"]
    done = CliRunner().invoke(cli.run, [*command, "--k", "5", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    prepared = model.loaded.images.prepare_video(Video(str(clip)))
    assert (prepared.frames, prepared.in_prompt.spans) == (3, (4, 4, 4))
    assert '"vision_tokens": 12' in done.output


def test_settings_of_the_video_processor_are_read_and_those_that_are_not_built_refused(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    count = iter(range(100))

    def planned(file: str = "video_preprocessor_config.json", **changes: Any) -> Any:
        place = edited(tiny_checkpoint(MINICPM), tmp_path / str(next(count)), file, changes)
        spec = plan_export(ExportOptions(str(place), (), "fp32")).video
        return None if spec is None else read_frames(spec.layout)

    usual = planned()
    assert usual == SlicedFrames(Slices(8, 4, 64, 2, True), 64)
    assert planned(max_num_frames=8).frames == 8
    assert planned(max_num_frames=500).frames == 64
    assert planned(slice_mode=False).slices.most == planned(max_slice_nums=1).slices.most == 1
    assert planned(scale_resolution=96).slices.side == 96
    # transformers' processor numbers videos as the image processor says
    assert planned(use_image_id=False) == usual
    assert not planned("preprocessor_config.json", use_image_id=False).slices.numbered
    assert planned("config.json", video_token_id=None) is None
    for changes, reason in (
        ({"stack_frames": 5}, "stack_frames 5 is not supported: vtx shows each frame by itself; set it to 1"),
        ({"do_sample_frames": False}, "do_sample_frames must be true"),
        ({"max_num_frames": 0}, "max_num_frames is 0, not a number from 1"),
        ({"max_num_frames": "8"}, "max_num_frames is '8', not a number from 1"),
        ({"max_slice_nums": 65}, "the video processor's scale_resolution and max_slice_nums"),
        ({"slice_mode": 1}, "the video processor's slice_mode is 1; it must be true or false"),
        ({"downsample_mode": "4x"}, "the video processor's downsample_mode is '4x', the tower's is 16x"),
        ({"patch_size": 16}, "the video processor's patch_size is 16, the tower's is 8"),
        ({"do_resize": False}, "MiniCPMV4_6VideoProcessor without do_resize"),
        ({"video_processor_type": "Qwen3VLVideoProcessor"}, "video processor 'Qwen3VLVideoProcessor' is not supported"),
    ):
        with pytest.raises((CheckpointError, UnsupportedModelError), match=reason):
            planned(**changes)


def test_without_a_file_of_videos_the_settings_of_images_count_as_in_transformers(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    place = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint(MINICPM), place)
    (place / "video_preprocessor_config.json").unlink()
    spec = plan_export(ExportOptions(str(place), (), "fp32")).video
    assert spec is not None
    assert read_frames(spec.layout) == SlicedFrames(Slices(8, 4, 64, MINICPM.slices, True), 64)
    assert Reference(place).processor.video_processor.max_slice_nums == MINICPM.slices


def test_the_export_chooses_the_patches_of_a_frame_s_token_too(tiny_checkpoint: Checkpoints) -> None:
    plan = plan_export(ExportOptions(str(tiny_checkpoint(MINICPM)), (), "fp32", downsample="4x"))
    assert plan.video is not None
    assert plan.video.layout.parameters["slices"]["merge"] == 2


def test_a_template_without_videos_makes_a_bundle_without_them(tiny_checkpoint: Checkpoints) -> None:
    images = "{% for m in messages %}{% for p in m['content'] %}{{ 'I' if p['type'] == 'image' else p['text'] }}"
    template = images.replace("'I'", f"'{MINICPM.image_token}'") + "{% endfor %}{% endfor %}"
    plan = plan_export(ExportOptions(str(tiny_checkpoint(MINICPM)), (), "fp32", template=template))
    assert plan.video is None
    assert UNPRINTED in plan.warnings


def test_a_layout_of_sliced_frames_is_written_and_read_and_bounds_its_tokens() -> None:
    layout = SlicedFrames(Slices(16, 4, 448, 9, True), 64)
    spec = spec_of(layout)
    assert spec == LayoutSpec("sliced_frames", 64 * layout.slices.max_tokens, json_value(layout))
    assert read_frames(spec) == layout
    clip = SampledFrames(tuple(range(64)), 64, 1.0)
    for size in ((448, 448), (1920, 1080), (3000, 15), (30, 4000)):
        assert layout.prompt_image(clip, *size).tokens <= layout.max_tokens
    for frames in (0, 65):
        with pytest.raises(BundleError, match=f"layout 'sliced_frames' has {frames} frames; it needs 1 to 64"):
            replace(layout, frames=frames)


CONFIGURATIONS = int(os.environ.get("VTX_CONFIGURATIONS") or 1)


@slow
@pytest.mark.parametrize("seed", range(CONFIGURATIONS))
def test_random_models_answer_about_random_videos_as_transformers_and_the_statement(tmp_path: Path, seed: int) -> None:
    draw = random.Random(f"videos {seed}")
    tiny = replace(minicpm(draw), context=2048, video_slices=draw.choice([1, 2, 4, 9]))
    checkpoint = make(tmp_path / "checkpoint", tiny, seed)
    ks = sorted(draw.sample(range(2, tiny.layers + 1), 2))
    judge = Reference(checkpoint)
    size = draw.randint(20, 160), draw.randint(20, 160)
    count, fps = draw.randint(1, 40), draw.choice([2, 7.5, 10, 24])
    given = video(random_video(seed, count, size), fps=fps)
    given = given if count / fps <= 5 else replace(given, frames=draw.randint(1, 5))
    folder = export(checkpoint, tmp_path / "bundle", ks, dialects=ORT).folder
    with load(folder, device="cpu", threads=THREADS) as model:
        pictures = [random_image(seed, (60, 80)), given] if draw.random() < 0.3 else [given]
        inputs, asked = both(model, judge, pictures)
        worst = assert_as_drawn(model, judge, inputs, asked, ks, TOLERANCE)
    print(seed, f"{worst:.1e}", len(inputs["input_ids"][0]))
