"""Videos: libvtx samples, words and answers about frames in memory and in folders as Python does."""

from __future__ import annotations

import ctypes as c
import json
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.bundles import export
from tests.support.cabi import (
    CONTEXT,
    IMAGE,
    REQUEST,
    RGB8,
    VIDEO,
    Frames,
    Loaded,
    VtxImage,
    images_of,
    options_of,
)
from tests.support.cpp import DEVICES, ask, expected, failure, needs_abi, needs_cpp, output, run, write_pictures
from tests.support.exported import Models, greedy, prompt
from tests.support.families.lfm3_vl import LFM3
from tests.support.families.llava_onevision import ONEVISION
from tests.support.families.qwen import QWEN2, QWEN3, QWEN25, QWEN35
from tests.support.families.smolvlm import SMOLVLM
from tests.support.families.videos import NEXT_VIDEO, VIDEO_LLAVA
from tests.support.families.vila import VILA
from tests.support.fixtures import Checkpoints
from tests.support.near import assert_near
from tests.support.old_pillow import needs_pillow_13
from tests.support.tiny import Tiny, prompt_messages, random_image, random_video
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.errors import ContextError, RequestError, VtxError
from vtx.runtime.vision.frame_sampling import SampledFrames
from vtx.runtime.vision.video import Video, video

pytestmark = [needs_cpp, needs_pillow_13, pytest.mark.dialects("ort", "plain")]

TINY = {
    "qwen2": QWEN2, "qwen2.5": QWEN25, "qwen3": QWEN3, "qwen3.5": QWEN35, "lfm3": LFM3,
    "smolvlm": replace(SMOLVLM, context=1024),
    "onevision": replace(ONEVISION, image=70), "next": NEXT_VIDEO, "video_llava": VIDEO_LLAVA, "vila": VILA,
}  # fmt: skip
PAIRS = ("qwen2", "qwen2.5", "qwen3", "qwen3.5", "lfm3")
SAME = 1e-4  # of logits, as a share of their largest magnitude
STEPS = 4
QUESTIONS = ("red?", "How many circle shapes are there?", "red?")
ODD = video(random_video(1, 9, (61, 43)), frames=5, fps=7.5)
WIDE = video(random_video(0, 30, (150, 50)), frames=6, fps=20)
ONE = video(random_video(2, 1, (64, 49)), frames=1)


def write_frames(folder: Path, given: Video) -> Path:
    """The frames as files, by their numbers."""
    folder.mkdir()
    for number, frame in enumerate(given.source):
        Image.fromarray(frame).save(folder / f"{number}.png")  # type: ignore[arg-type]
    return folder


def written(folder: Path, shown: Sequence[Any]) -> list[Path]:
    """Videos as folders and images as files."""
    folder.mkdir(exist_ok=True)
    out = list[Path]()
    for number, each in enumerate(shown):
        out.append(folder / (f"clip-{number}" if isinstance(each, Video) else f"{number}.png"))
        _ = write_frames(out[-1], each) if isinstance(each, Video) else each.save(out[-1])
    return out


def probed(
    model: Model, device: str, files: Sequence[Path], given: Video, question: str, k: int | None, reduce: str = "none"
) -> dict[str, Any]:
    """A question to libvtx with the logits of its answer."""
    about = (device, str(k or "none"), reduce, str(given.fps or 24), str(given.frames or 0), str(STEPS), question)
    found: dict[str, Any] = json.loads(output("probe", "ask", model.bundle.folder, *about, *files))
    return found


def assert_as_python(
    made: Model, device: str, folder: Path, shown: Sequence[Any], k: int | None, reduce: str = "none"
) -> None:
    """Pixels, ids of the prompt and the answer, and logits are those of Python on the same engine."""
    given = next(each for each in shown if isinstance(each, Video))
    files, question = written(folder, shown), "What is the colour?"
    with load(made.bundle.folder, device=device, threads=1, compute="f32") as model:
        found = probed(model, device, files, given, question, k, reduce)
        kinds = [{"type": "video" if isinstance(each, Video) else "image"} for each in shown]
        messages: list[Any] = [{"role": "user", "content": [*kinds, {"type": "text", "text": question}]}]
        prepared = model.loaded.images.prepare_all(shown, messages=messages)
        assert found["keys"] == [image.key[:64] for image in prepared]
        if reduce == "none":
            asked = prompt(model, messages, shown)
            wanted = greedy(model, asked, k, STEPS)
            assert found["ids"] == asked.ids.tolist()
            ids, logits = wanted.ids, wanted.logits
        else:
            with model.open(list(shown)) as conversation:
                answer = conversation.ask(question, k, Options(STEPS, ignore_eos=True, logprobs=True), reduce=reduce)
            ids = list(answer.token_ids)
            logits = np.array(found["logits"])
            rows = logits.copy()
            rows -= rows.max(-1, keepdims=True)
            chances = (rows - np.log(np.exp(rows).sum(-1, keepdims=True)))[range(len(ids)), ids]
            assert_near(chances, answer.logprobs or (), SAME)
            assert len(found["ids"]) == answer.stats.prompt_tokens
    assert found["tokens"] == ids
    assert_near(found["logits"], logits, SAME * float(np.abs(logits).max()))


@DEVICES
@pytest.mark.parametrize("k", [None, 5])
@pytest.mark.parametrize("name", TINY)
def test_a_video_beside_an_image_has_the_ids_and_logits_of_python(
    models: Models, tmp_path: Path, name: str, k: int | None, device: str
) -> None:
    shown = [ODD, random_image(0, (40, 60))] if k is None else [WIDE]
    if name == "qwen3.5" and k is not None:
        shown = [ODD]
    assert_as_python(models(TINY[name], (3, 5)), device, tmp_path / "shown", shown, k)


@pytest.mark.parametrize("name", ["qwen3", "smolvlm", "next", "vila"])  # pairs, marks, frames, tokens between frames
def test_a_video_of_one_frame_and_two_videos_have_the_ids_and_logits_of_python(
    models: Models, tmp_path: Path, name: str
) -> None:
    model = models(replace(TINY[name], context=1024), (3, 5))
    assert_as_python(model, "cpu", tmp_path / "one", [ONE], 3)
    both = [replace(ODD, frames=None), random_image(1, (50, 30)), replace(ONE, frames=None, fps=ODD.fps)]
    assert_as_python(model, "cpu", tmp_path / "two", both, None)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("qwen3", "fastv:k=2,ratio=0.5"), ("qwen3", "cdpruner:keep=0.3"), ("qwen3", "dart:keep=9,k=0,pivots=2"),
        ("qwen2.5", "cdpruner:keep=9"), ("qwen2.5", "random:keep=0.4+fastv:k=4"), ("next", "cdpruner:keep=0.3"),
        ("video_llava", "divprune:keep=0.2"), ("smolvlm", "fastv:k=2,ratio=0.5"),
        ("onevision", "dart:keep=20,k=3,pivots=2,text_pivots=2"),
    ],
)  # fmt: skip
def test_what_reductions_leave_of_a_video_is_answered_as_in_python(
    models: Models, tmp_path: Path, name: str, spec: str
) -> None:
    """A pair of Qwen3-VL that loses all its tokens keeps its time and takes no position."""
    model = models(TINY[name], (3, 5), reductions=(spec,))
    still = replace(WIDE, source=np.repeat(random_video(1, 2, (90, 60)), 10, 0), frames=6)
    assert_as_python(model, "cpu", tmp_path / "shown", [still], None, spec)


def layout_form(model: Model, count: int, rate: float, wanted: int, width: int, height: int) -> dict[str, Any]:
    layout = model.loaded.images.frames_layout()
    places = layout.sampling.numbers(count, rate, wanted or None)
    form = layout.prompt_image(SampledFrames(tuple(places), count, rate), width, height)
    return {"numbers": places, "spans": [*form.spans], "texts": [*form.texts], "span": form.span}


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("max_pixels", [0, 3000])
def test_any_video_is_sampled_sized_and_worded_as_in_python(models: Models, name: str, max_pixels: int) -> None:
    if max_pixels and name not in PAIRS:
        max_pixels = 0
    made, rng = models(TINY[name], (3, 5)), random.Random(7)
    cases = [(1, 24.0, 0, 20, 20), (2, 0.1, 0, 33, 61), (4000, 1.0, 0, 20, 20), (300, 0.04, 0, 64, 64)]
    for _ in range(300):
        rate = rng.choice((1.0, 24.0, 29.97, 0.5, 60.0, rng.uniform(0.2, 100)))
        cases.append((
            rng.choice((rng.randint(1, 12), rng.randint(1, 3000))), rate, rng.choice((0, 0, rng.randint(1, 64))),
            rng.randint(2, 400), rng.randint(2, 400),
        ))  # fmt: skip
    lines = "\n".join(" ".join(map(repr, case)) for case in cases).encode()
    found = output("probe", "clips", made.bundle.folder, str(max_pixels), stdin=lines).decode().splitlines()
    with load(made.bundle.folder, device="cpu", threads=1, max_pixels=max_pixels or None) as model:
        for case, line in zip(cases, found, strict=True):
            assert json.loads(line) == layout_form(model, *case), case


@needs_abi
@DEVICES
@pytest.mark.parametrize("name", ["qwen3", "qwen2.5", "smolvlm", "next", "onevision"])
def test_later_questions_windows_of_frames_and_copies_are_answered_as_by_python(
    models: Models, name: str, device: str
) -> None:
    """Frames in memory: other questions, K, the next window of a camera, an image beside it, a conversation's copy."""
    made, clip = models(replace(TINY[name], context=1024), (3, 5)), random_video(3, 24, (60, 45))
    windows = [video(clip[first : first + 6], frames=6, fps=4) for first in (0, 3, 3, 12)]
    picture, system = random_image(4, (50, 40)), None if name == "next" else "Be brief."
    options = {"max_new_tokens": 4, "ignore_eos": 1, "logprobs": 1}
    with (
        load(made.bundle.folder, device=device, threads=1) as model,
        closing(Loaded(made.bundle.folder, device)) as loaded,
        model.open(windows[0], system=system) as held,
        closing(Frames(loaded, [windows[0]], system)) as frames,
    ):
        for number, window in enumerate(windows):
            shown = [window, picture] if number == 3 else [window]
            if number:
                arrays = [each if isinstance(each, Video) else np.asarray(each) for each in shown]
                assert frames.replace(arrays) == (number != 2)
                if number != 2:
                    held.replace(shown)
            for question, k in zip(QUESTIONS, (None, 5, 5), strict=True):
                found = frames.ask(question, k=str(k or "none").encode(), **options)
                want = held.ask(question, k, Options(4, ignore_eos=True, logprobs=True))
                facts = want.to_dict()
                for key in ("token_ids", "k", "kv_slots", "vision_tokens", "vision_tokens_kept", "prompt_tokens"):
                    assert list(np.ravel(found[key])) == list(np.ravel(facts[key])), (number, key)
                np.testing.assert_allclose(found["logprobs"], facts["logprobs"], atol=2e-3 if device != "cpu" else SAME)
        with closing(frames.fork()) as copied:
            again = copied.ask(QUESTIONS[0], k=b"none", **options)
            assert again["token_ids"] == frames.ask(QUESTIONS[0], k=b"none", **options)["token_ids"]
            assert again["reused_image"]


@needs_abi
def test_frames_that_hardly_differ_are_reported_and_times_that_differ_are_not_taken_for_equal(models: Models) -> None:
    made, clip = models(TINY["qwen3"], (3, 5)), random_video(3, 6, (64, 64))
    darker = np.concatenate([clip[:5], clip[5:] - (clip[5:] > 9).astype(np.uint8) * 9])
    with (
        closing(Loaded(made.bundle.folder, "cpu")) as loaded,
        closing(Frames(loaded, [video(clip, frames=6, fps=4)])) as frames,
    ):
        assert not frames.replace([video(clip, frames=6, fps=4)])
        assert not frames.replace([video(darker, frames=6, fps=4)], near=0.05)
        assert frames.replace([video(darker, frames=6, fps=4)], near=0.001), "the last frame of a pair differs"
        assert frames.replace([video(darker, frames=6, fps=2)], near=0.9), "the prompt tells other times"
        assert frames.replace([np.asarray(random_image(0, (64, 64)))], near=0.9), "an image is no video"


@needs_abi
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_prompts_in_ids_hold_one_token_for_a_video(models: Models, name: str) -> None:
    made, clip = models(TINY[name], (3, 5)), ODD
    messages = prompt_messages("red?", 1, 1)
    settings, ids = made.manifest.text, made.loaded.text.prompt(messages, 1).tolist()
    assert settings.video_token_id is not None
    ids[ids.index(settings.image_token_id, ids.index(settings.image_token_id) + 1)] = settings.video_token_id
    picture = random_image(0, (40, 60))
    want = made.open([picture, clip]).ask("red?", None, Options(4, ignore_eos=True))
    with (
        closing(Loaded(made.bundle.folder, "cpu")) as loaded,
        closing(Frames(loaded, [np.asarray(picture), clip])) as frames,
    ):

        def asked(given: list[int]) -> tuple[int, dict[str, Any] | str]:
            answer, options = c.c_void_p(), options_of(loaded.library, max_new_tokens=4, ignore_eos=1, k=b"none")
            array = (c.c_int64 * len(given))(*given)
            status = loaded.library.vtx_ask_ids(frames.handle, array, len(given), c.byref(options), c.byref(answer))
            if status:
                return status, loaded.library.vtx_last_error().decode()
            return status, json.loads(loaded.library.vtx_answer_json(answer))

        status, facts = asked(ids)
        assert status == 0
        assert isinstance(facts, dict)
        assert facts["prompt_tokens"] == want.stats.prompt_tokens
        assert facts["token_ids"] == list(want.token_ids)
        for wrong in (
            [settings.image_token_id if id == settings.video_token_id else id for id in ids],
            [id for id in ids if id != settings.video_token_id],
        ):
            status, said = asked(wrong)
            assert status == REQUEST
            assert "one image token for each image and one video token for each video" in said


@needs_abi
@pytest.mark.parametrize(
    ("name", "given", "status"),
    [
        ("qwen3", replace(ODD, source=np.zeros((0, 8, 8, 3), np.uint8)), IMAGE),
        ("smolvlm", replace(ODD, source=np.zeros((0, 8, 8, 3), np.uint8)), IMAGE),
        ("qwen3", video(random_video(0, 4, (600, 2)), frames=2), IMAGE),
        ("single", ODD, REQUEST),
    ],
    ids=["none", "none of frames", "too long", "no videos"],
)
def test_what_is_no_video_is_refused_in_the_words_of_python(
    models: Models, name: str, given: Video, status: int
) -> None:
    made = models(TINY.get(name, Tiny()), (3, 5))
    with pytest.raises(VtxError) as refused:
        made.open(given)
    with closing(Loaded(made.bundle.folder, "cpu")) as loaded:
        assert opening(loaded, images_of(loaded.library, [given])) == (status, str(refused.value))


def opening(loaded: Loaded, images: Any) -> tuple[int, str]:
    """What is said of images that are refused."""
    handle = c.c_void_p()
    status = loaded.library.vtx_open(loaded.handle, images, len(images), None, c.byref(handle))
    return status, loaded.library.vtx_last_error().decode()


@needs_abi
def test_wrong_rates_numbers_and_frames_are_refused(models: Models) -> None:
    made, pictures = models(TINY["qwen3"], (3, 5)), [np.asarray(random_image(n, (60 + n, 40))) for n in (0, 1)]
    with closing(Loaded(made.bundle.folder, "cpu")) as loaded:
        for fields, status, message in (
            ({"fps": -1.0}, REQUEST, "fps is -1.0; give a number of frames a second up to 1000"),
            ({"fps": float("nan")}, REQUEST, "fps is nan; give a number of frames a second up to 1000"),
            ({"fps": 1001.0}, REQUEST, "fps is 1001.0; give a number of frames a second up to 1000"),
            ({"sampled": -3}, REQUEST, "frames is -3; it must be at least 1 and at most"),
            ({"sampled": 65}, REQUEST, "frames is 65, the limit is 64 of a video; use fewer"),
            ({"frames": None}, REQUEST, "the list of frames is NULL"),
        ):  # fmt: skip
            images = images_of(loaded.library, [ODD])
            for name, value in fields.items():
                setattr(images[0], name, value)
            found = opening(loaded, images)
            assert found[0] == status
            assert found[1].startswith(message)
        images, frames = images_of(loaded.library, [ODD]), images_of(loaded.library, pictures)
        images[0].frames, images[0].frame_count, images[0].sampled = c.addressof(frames), 2, 2
        changed = "the given video changes its size from 60x40 to 61x40 at frame 1; save it in one size"
        assert opening(loaded, images) == (IMAGE, changed)
        frames[1].format = VIDEO
        frames[1].width = 60
        assert opening(loaded, images)[1].startswith("the pixel format is 8")
        frames[1].format, frames[1].path = RGB8, b"/nothing/here.png"
        assert opening(loaded, images)[0] == IMAGE


@needs_abi
def test_programs_of_older_headers_open_images_as_before(models: Models) -> None:
    """Whose structs end before the fields of videos."""
    made, picture = models(TINY["qwen3"], (3, 5)), np.asarray(random_image(0, (60, 40)))
    want = made.open(Image.fromarray(picture)).ask("red?", None, Options(4))
    with closing(Loaded(made.bundle.folder, "cpu")) as loaded:
        images = images_of(loaded.library, [picture])
        images[0].size = VtxImage.frames.offset
        handle = c.c_void_p()
        loaded.check(loaded.library.vtx_open(loaded.handle, images, 1, None, c.byref(handle)))
        options = options_of(loaded.library, max_new_tokens=4)
        assert loaded.answer(loaded.library.vtx_ask, handle, "red?", options)["token_ids"] == list(want.token_ids)
        loaded.library.vtx_conversation_free(handle)


@pytest.mark.parametrize("name", ["qwen2.5", "video_llava", "smolvlm"])
def test_a_video_beyond_the_context_names_frames_and_pixels_that_fit_as_python_does(
    tiny_checkpoint: Checkpoints, tmp_path: Path, name: str
) -> None:
    context = {"qwen2.5": 120, "video_llava": 200, "smolvlm": 700}[name]
    folder = export(tiny_checkpoint(TINY[name]), tmp_path / "bundle", (), max_context=context).folder
    given = video(random_video(0, 40, (150, 90)), frames=40, fps=8)
    frames = write_frames(tmp_path / "frames", given)
    renamed = [path.rename(path.with_name(f"{int(path.stem):03d}.png")) for path in frames.iterdir()]
    assert len(renamed) == 40
    [picture] = write_pictures(tmp_path, [(30, 40)])
    options = ("--image", picture, "--frames", "40", "--fps", "8")
    fits = r"--frames \d+ \(frames=\d+\) of each video fits"
    with load(folder, device="cpu", threads=1) as model, pytest.raises(ContextError, match=fits) as refused:
        model.open([given, picture]).ask("red?")
    assert failure("run", "--bundle", folder, frames, "red?", *options) == f"Error: {refused.value}\n"
    with closing(Loaded(folder, "cpu")) as loaded, closing(Frames(loaded, [given])) as held:
        answer, asked = c.c_void_p(), options_of(loaded.library)
        assert loaded.library.vtx_ask(held.handle, b"red?", c.byref(asked), c.byref(answer)) == CONTEXT


def test_a_folder_of_frames_is_answered_by_the_command_as_in_python(models: Models, tmp_path: Path) -> None:
    model = models(TINY["qwen3"], (3, 5))
    folder, other = write_frames(tmp_path / "a", ODD), write_frames(tmp_path / "b", ONE)
    [picture] = write_pictures(tmp_path, [(30, 40)])
    more = ("--video", other, "--fps", "7.5", "--max-new-tokens", "4", "--k", "5")
    found = ask(model.bundle.folder, folder, *QUESTIONS, "--image", picture, *more)
    shown = [replace(ODD, frames=None), picture, video(ONE.source, fps=7.5)]
    with model.open(shown) as conversation:
        for question, facts in zip(QUESTIONS, found, strict=True):
            want = conversation.ask(question, 5, max_new_tokens=4).to_dict()
            assert expected(facts) == expected(want)
            assert facts["image"] == [str(folder), str(picture), str(other)]
    for words, message in (
        ((picture, "red?", "--frames", "3"), "--frames and --fps have no effect: there is no video; leave them out"),
        ((picture, "red?", "--video", "clip.mp4"), "clip.mp4 is not a folder; libvtx decodes no video files"),
        ((tmp_path / "none", "red?"), "the given video has no frames; give at least one"),
    ):  # fmt: skip
        (tmp_path / "none").mkdir(exist_ok=True)
        assert message in failure("run", "--bundle", model.bundle.folder, *words)


@pytest.mark.parametrize(
    ("name", "spec"),
    [("video_llava", "cls"), ("smolvlm", "cdpruner:keep=20"), ("vila", "divprune:keep=0.5")],
)  # fmt: skip
def test_reductions_that_videos_cannot_have_are_refused_as_in_python(
    models: Models, tmp_path: Path, name: str, spec: str
) -> None:
    model = models(TINY[name], (3, 5), reductions=() if name == "smolvlm" else (spec,))
    frames = write_frames(tmp_path / "frames", ODD)
    with model.open(replace(ODD, frames=None)) as conversation, pytest.raises(RequestError) as refused:
        conversation.ask("red?", None, reduce=spec)
    done = run("run", "--bundle", model.bundle.folder, frames, "red?", "--reduce", spec, "--fps", "7.5")
    assert done.stderr.decode() == f"Error: {refused.value}\n"
