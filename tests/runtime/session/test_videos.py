"""Videos: Video-LLaVA, LLaVA-NeXT-Video and LLaVA-OneVision against transformers, at K against the plain statement."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.clips import evs, vidcom2
from tests.support.exported import Models, prompt
from tests.support.families.internvl import INTERNVL
from tests.support.families.smolvlm import IDEFICS
from tests.support.families.videos import NEXT_VIDEO, VIDEO_LLAVA
from tests.support.families.vila import VILA
from tests.support.fixtures import Checkpoints, References
from tests.support.parity import assert_later_equal_fresh, assert_parity, assert_same_on_openvino, video_prompts
from tests.support.tiny import Tiny, prompt_messages, random_image, random_video
from tests.support.video_files import write_video
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.errors import ContextError, ImageError, RequestError, UnsupportedModelError
from vtx.runtime.policies import make
from vtx.runtime.policies.methods.evs import WINDOW
from vtx.runtime.session import encoded_images
from vtx.runtime.session.encoded_images import ImageCache
from vtx.runtime.vision import frame_file
from vtx.runtime.vision import frames as prepared_frames
from vtx.runtime.vision.frame_file import FrameFile
from vtx.runtime.vision.frame_sampling import FrameSampling, evenly
from vtx.runtime.vision.limits import MAX_CHOSEN_FRAMES
from vtx.runtime.vision.plan import ImagePlan
from vtx.runtime.vision.tokens import PromptImage
from vtx.runtime.vision.video import Video, load_frames, video

pytestmark = pytest.mark.dialects("ort", "plain")
GET_FRAME = FrameFile.__getitem__
PIXELS = ImagePlan.pixels

QUESTION = "What is the colour of the square in the picture?"
ONEVISION = Tiny(
    family="llava_onevision", vision="siglip", text="qwen2", tokenizer="bytes", feature_layer=-1, select="full",
    vision_head=False, context=512, image=70,
)  # fmt: skip
VARIANTS = {
    "video_llava, grouped": VIDEO_LLAVA,
    "video_llava, multi-head": replace(VIDEO_LLAVA, kv_heads=4, names="saved", shards=2),
    "llava_next_video, grouped": NEXT_VIDEO,
    "llava_next_video, multi-head": replace(NEXT_VIDEO, kv_heads=4, names="new", text="mistral"),
    "llava_onevision": ONEVISION,
}
FAMILIES = [VIDEO_LLAVA, NEXT_VIDEO, ONEVISION]
WIDE, HIGH = random_video(0, size=(90, 60)), random_video(1, 12, (50, 70))
slow = pytest.mark.slow


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("tiny", "images", "videos"),
    [
        pytest.param(VIDEO_LLAVA, 0, [WIDE], id="video_llava, one", marks=slow),
        *(pytest.param(tiny, 0, [HIGH, WIDE], id=f"{tiny.family}, two", marks=slow) for tiny in FAMILIES),
        *(
            pytest.param(tiny, 1, [HIGH], id=f"{name}, image and video", marks=slow if "multi-head" in name else ())
            for name, tiny in VARIANTS.items()
        ),
    ],
)
def test_a_bundle_answers_about_videos_as_transformers_and_at_k_as_the_statement(
    models: Models, reference: References, tiny: Tiny, images: int, videos: list[np.ndarray]
) -> None:
    model, judge = models(tiny, (3, 5)), reference(tiny)
    pictures = [random_image(0, (40, 60))] * images + videos
    inputs, asked = video_prompts(
        model,
        judge,
        pictures,
        QUESTION,
        lambda video: torch.from_numpy(model.loaded.images.prepare_video(Video(video)).views),
    )
    assert_parity(model, judge, inputs, asked)


@pytest.mark.parametrize("tiny", [ONEVISION, pytest.param(VIDEO_LLAVA, marks=slow)], ids=lambda tiny: tiny.family)
def test_three_turns_about_an_image_and_then_a_video_equal_transformers_and_at_k_the_statement(
    models: Models, reference: References, tiny: Tiny
) -> None:
    model, judge, image = models(tiny, (3, 5)), reference(tiny), random_image(0, (40, 60))
    said = [{"role": "assistant", "content": [{"type": "text", "text": text}]} for text in ("a circle", "it is red")]
    asked = [prompt_messages("what shape?"), prompt_messages("and here?", 0, 1), prompt_messages("how many?", 0)]
    messages = [*asked[0], said[0], *asked[1], said[1], *asked[2]]
    inputs = judge.inputs(messages, [image], [torch.from_numpy(model.loaded.images.prepare_video(Video(HIGH)).views)])
    ours, ids = prompt(model, messages, [image, HIGH]), inputs["input_ids"][0]
    assert ours.ids.tolist() == torch.where(ids == judge.video_token, judge.image_token, ids).tolist()
    assert_parity(model, judge, inputs, ours)


@pytest.mark.parametrize("k", [None, 5])
def test_later_questions_about_a_video_equal_fresh_runs(models: Models, k: int | None) -> None:
    assert_later_equal_fresh(models(VIDEO_LLAVA, (3, 5)), [HIGH, random_image(0)], k)


def test_each_picture_has_its_own_span_in_the_order_that_the_template_prints(models: Models) -> None:
    model, image = models(VIDEO_LLAVA, (3, 5)), random_image(0)
    assert [picture.kind for picture in model.open([HIGH, image, WIDE]).images] == ["image", "video", "video"]
    content = [{"type": "video", "video": HIGH}, {"type": "image", "image": image}, {"type": "text", "text": "red?"}]
    asked = model.generate([{"role": "user", "content": content}], 5, max_new_tokens=4, ignore_eos=True)
    alone = model.open([image, HIGH]).ask("red?", 5, max_new_tokens=4, ignore_eos=True)
    assert asked.token_ids == alone.token_ids
    assert asked.stats.vision_tokens == 16 + 8 * 17
    assert asked.stats.vision_tokens_kept[-1] == 0


def test_a_video_of_one_frame_and_its_picture_are_not_taken_for_each_other(models: Models) -> None:
    """Their pixels are equal, and their towers and tokens are not."""
    model, picture = models(VIDEO_LLAVA, (3, 5)), random_image(3, (56, 56))
    frame = Video(np.asarray(picture)[None], 1)
    assert np.array_equal(model.loaded.images.prepare(picture).views, model.loaded.images.prepare_video(frame).views)
    fresh = [model.open(given).ask(QUESTION, None, max_new_tokens=4).token_ids for given in (picture, frame)]
    model.loaded.caches.images = ImageCache(1 << 20)
    try:
        shared = [model.open(given).ask(QUESTION, None, max_new_tokens=4).token_ids for given in (picture, frame)]
    finally:
        model.loaded.caches.images = None
    assert shared == fresh


def test_frames_are_sampled_from_the_first_to_the_last() -> None:
    assert evenly(8, 0, 29) == [0, 4, 8, 12, 16, 20, 24, 29]
    assert evenly(1, 0, 99) == [0]
    assert evenly(8, 0, 2) == [0, 0, 0, 0, 1, 1, 1, 2]
    assert evenly(8, 0, 29, padded=True) == [0, 4, 8, 12, 16, 20, 24, 28]
    assert evenly(8, 0, 7, padded=True) == [0, 0, 1, 2, 3, 4, 5, 6]
    assert evenly(5, 0, 2, padded=True) == [-1, -1, 0, 1, 2]
    assert evenly(1, 0, 0, padded=True) == [0]
    taken = load_frames(Video(WIDE), FrameSampling(8), np.asarray)
    assert all((frame == WIDE[place]).all() for frame, place in zip(taken, evenly(8, 0, 29), strict=True))


class Held:
    """Counts arrays whose memory is not freed, that of views included: `most` of them at the same time."""

    def __init__(self) -> None:
        self._arrays, self.most = list[weakref.ref[np.ndarray]](), 0

    def of(self, make: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def counted(*given: Any) -> np.ndarray:
            array = make(*given)
            owner = array if array.base is None else array.base
            self._arrays = [known for known in self._arrays if known() is not None] + [weakref.ref(owner)]
            self.most = max(self.most, len(self._arrays))
            return array

        return counted


@pytest.mark.parametrize("source", ["array", "file"])
def test_a_long_video_is_read_and_encoded_frame_by_frame_and_answered_as_one_in_memory(
    models: Models, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, frames = models(NEXT_VIDEO, (3, 5)), 24
    given = Video(random_video(2, 40), frames)
    if source == "file":
        pytest.importorskip("av", reason="needs vtx-edge[video]")
        given = Video(write_video(tmp_path / "clip.mp4"), frames)
    found = list[Any]()
    for held_frames, most in ((64, frames), (4, 2)):
        monkeypatch.setattr(prepared_frames, "MAX_HELD_FRAMES", held_frames)
        prepared, encoded = Held(), Held()
        monkeypatch.setattr(ImagePlan, "pixels", prepared.of(PIXELS))
        monkeypatch.setattr(FrameFile, "__getitem__", encoded.of(GET_FRAME))
        with model.open(given) as conversation:
            (image,) = conversation.images
            answers = [conversation.ask("red?", k, reduce="evs", max_new_tokens=4).token_ids for k in (None, 3)]
            found.append((image.key, image.nbytes, len(image.views), answers))
        assert prepared.most <= most
        assert (prepared.most == frames) == (held_frames == 64), "all in memory, or none that waits"
        assert encoded.most == (0 if held_frames == 64 else 2), "the frame before is free once the next is encoded"
    assert found[0] == found[1]


@pytest.mark.parametrize("spec", ["evs:keep=0.3", "vidcom2:keep=0.3,window=5", "evs:keep=0.5+random:keep=0.5"])
@pytest.mark.parametrize(
    "tiny", [NEXT_VIDEO, pytest.param(ONEVISION, marks=slow), pytest.param(VIDEO_LLAVA, marks=slow)]
)
def test_a_video_in_windows_is_answered_as_whole_with_the_tokens_of_one_window_in_memory(
    models: Models, tiny: Tiny, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, frames, found = models(tiny, (3, 5)), 19, list[Any]()
    for most in (64, 16):
        for module in (encoded_images, make):
            monkeypatch.setattr(module, "MAX_SAMPLED_FRAMES", most)
        encoded = Held()
        run = type(model.backend).video

        def video_tokens(backend: Any, pixels: np.ndarray, encoded: Held = encoded, run: Any = run) -> Any:
            tokens = run(backend, pixels)
            return replace(tokens, hidden=encoded.of(np.copy)(tokens.hidden))

        with monkeypatch.context() as spied, model.open(video(random_video(2, 40), frames=frames)) as conversation:
            spied.setattr(type(model.backend), "video", video_tokens)
            for k in (None, 3):
                answer = conversation.ask("red?", k, reduce=spec, max_new_tokens=4, ignore_eos=True)
                assert answer.stats.reduced is not None
                found.append((answer.token_ids, answer.stats.vision_tokens, answer.stats.reduced.kept))
        window = 5 if "window" in spec else WINDOW
        assert encoded.most == (frames if most == 64 else window)
    assert found[:2] == found[2:]


def test_a_video_of_more_frames_than_may_be_in_memory_is_answered_in_windows_alone(models: Models) -> None:
    model = models(NEXT_VIDEO, (3, 5))
    with model.open(video(random_video(2, 40), frames=MAX_CHOSEN_FRAMES)) as conversation:
        answer = conversation.ask("red?", reduce="evs:keep=0.1", max_new_tokens=4)
        assert answer.stats.vision_tokens == int(0.1 * 4 * MAX_CHOSEN_FRAMES)
        for spec in ("none", "vidcom2:keep=0.1", "random:keep=0.1"):
            with pytest.raises(
                RequestError, match=r"256 sampled frames, and beyond 64 .* in windows; use evs, or vidc"
            ):
                conversation.ask("red?", reduce=spec)


def test_frames_that_do_not_fit_on_the_disk_are_told_with_their_bytes(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def write(self, _: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    model = models(NEXT_VIDEO, (3, 5))
    monkeypatch.setattr(frame_file.tempfile, "TemporaryFile", lambda **_: Full())
    with pytest.raises(ImageError, match=r"1 frames of a video, [\d,]+ bytes each, do not fit into .*No space left"):
        model.open(video(WIDE, frames=17))


def test_pixels_of_frames_are_near_those_of_transformers_video_processors(models: Models) -> None:
    """Which resize uint8 tensors, cut out the centre and normalise; Pillow differs by a level at most."""
    model = models(VIDEO_LLAVA, (3, 5))
    assert model.manifest.video is not None
    settings = model.manifest.video.image
    frames = torch.from_numpy(np.stack([WIDE[place] for place in evenly(8, 0, len(WIDE) - 1)])).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(frames, (56, 84), mode="bicubic", antialias=True)
    cropped = resized[..., 14:70] / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (settings.mean, settings.std))
    found = model.loaded.images.prepare_video(Video(WIDE)).views
    np.testing.assert_allclose(found, ((cropped - mean) / std).numpy(), atol=1.01 / 255 / min(settings.std))


@pytest.mark.parametrize("frames", [1, 3, 12])
def test_another_number_of_frames_may_be_asked_for(models: Models, frames: int) -> None:
    answer = models(NEXT_VIDEO, (3, 5)).open(video(WIDE, frames=frames)).ask("red?", max_new_tokens=2)
    assert answer.stats.vision_tokens == 4 * frames


def test_frames_that_do_not_fit_say_which_number_would(models: Models) -> None:
    model = models(VIDEO_LLAVA, (3, 5))
    with pytest.raises(ContextError, match=r"--frames 4[0-9] \(frames=4[0-9]\) of each video fits"):
        model.open(video(WIDE, frames=64)).ask("red?")


@pytest.mark.parametrize("frames", [0, 257, 2.5, True])
def test_a_number_of_frames_that_is_none_is_refused(frames: int) -> None:
    with pytest.raises(RequestError, match="frames is"):
        video(WIDE, frames=frames)


def test_what_takes_no_videos_says_so(models: Models) -> None:
    model = models(Tiny(), (3, 5))
    with pytest.raises(RequestError, match="takes no videos"):
        model.open(WIDE)
    with pytest.raises(RequestError, match="takes no videos"):
        model.loaded.text.prompt(prompt_messages("red?", 0, 1), 1)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (WIDE[..., :2], "is not a video"),
        (WIDE[:0], "the given video has no frames; give at least one"),
        (WIDE.astype(np.float32), "is not a video"),
    ],
    ids=["2 colours", "none", "float"],
)
def test_an_array_that_is_no_video_is_refused(models: Models, array: np.ndarray, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        models(VIDEO_LLAVA, (3, 5)).open(array)


@pytest.mark.slow
def test_reductions_rank_the_tokens_of_frames_or_are_refused(models: Models) -> None:
    model = models(VIDEO_LLAVA, (3, 5), "fp32", ("fastv", "cls", "cdpruner:keep=20", "dart:keep=24,k=0"))
    with model.open(HIGH) as conversation:
        for spec, left in (("fastv", 68), ("cdpruner:keep=20", 20), ("dart:keep=24,k=0", 24)):
            answer = conversation.ask("red?", None, reduce=spec, max_new_tokens=2)
            assert answer.stats.vision_tokens_kept[-1] == left
        with pytest.raises(RequestError, match="does not support video frames; use fastv"):
            conversation.ask("red?", None, reduce="cls")
    assert model.open(random_image(0)).ask("red?", None, reduce="cls").stats.vision_tokens_kept[-1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("tiny", FAMILIES, ids=lambda tiny: tiny.family)
def test_openvino_gives_the_same_answers_about_videos(models: Models, tiny: Tiny) -> None:
    assert_same_on_openvino(models(tiny, (3, 5)), [random_image(0), HIGH], QUESTION, (5,))


@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("method", ["evs", "vidcom2"])
@pytest.mark.parametrize("tiny", [ONEVISION, pytest.param(VIDEO_LLAVA, marks=slow)], ids=lambda tiny: tiny.family)
def test_tokens_of_a_clip_that_stay_are_those_of_the_statement_and_answers_follow(
    models: Models, monkeypatch: pytest.MonkeyPatch, tiny: Tiny, method: str, k: int | None
) -> None:
    """An image beside the clip enters whole, and a later question runs no token of either."""
    model, image, spec = models(tiny, (3, 5)), random_image(0), f"{method}:keep=0.4"
    frames = model.loaded.images.prepare_video(Video(HIGH))
    arranged = frames.encode(model.backend)
    count = len(arranged) // len(frames.views)  # of a frame; a newline may follow
    clip = torch.tensor(arranged.hidden[: count * len(frames.views)]).view(len(frames.views), count, -1)
    wanted = [*{"evs": evs, "vidcom2": vidcom2}[method](clip, 0.4), *range(clip[..., 0].numel(), len(arranged))]
    with model.open([HIGH, image]) as conversation:
        answer, again = (conversation.ask(QUESTION, k, reduce=spec, max_new_tokens=4) for _ in range(2))
    assert answer.stats.reduced is not None
    if tiny == ONEVISION:  # whose frames are shrunk; class tokens have no number
        assert np.unique(arranged.patches.indices).size == len(arranged)
    kinds = [picture.kind for picture in conversation.images]
    patches = dict(zip(kinds, answer.stats.reduced.kept[0].patches, strict=True))
    assert [*patches["video"]] == sorted(arranged.patches.indices[wanted].tolist())
    assert answer.stats.vision_tokens == len(wanted) + len(patches["image"])
    assert answer.stats.vision_tokens_kept[-1] == (0 if k else answer.stats.vision_tokens)
    assert (again.token_ids, again.stats.reused_image) == (answer.token_ids, True)
    # The same as an answer about a clip of these tokens alone.
    chosen = replace(
        frames, key="chosen", in_prompt=PromptImage((len(wanted),)), arrange=lambda _: arranged.take(np.array(wanted))
    )
    monkeypatch.setattr(type(model.loaded.images), "prepare_video", lambda *_: chosen)
    assert model.open([HIGH, image]).ask(QUESTION, k, max_new_tokens=4).token_ids == answer.token_ids


def test_methods_of_clips_are_refused_by_models_without_videos_and_others_by_clips_with_text_between_frames(
    models: Models, tiny_checkpoint: Checkpoints
) -> None:
    for spec in ("evs", "vidcom2:keep=0.5+fastv:k=2"):
        with pytest.raises(RequestError, match="chooses from the frames of videos, and this model takes none; use"):
            models(Tiny(), (3, 5)).open(random_image(0)).ask("red?", reduce=spec)
    with pytest.raises(UnsupportedModelError, match="evs chooses from the frames of videos, and this model takes none"):
        plan_export(ExportOptions(str(tiny_checkpoint()), (), "fp32", reductions=("evs",)))
    marked = models(VILA, (3, 5))
    for spec in ("evs", "divprune", "cdpruner:keep=0.5"):
        with pytest.raises(RequestError, match="this model's videos have text between frames; use fastv, dart after"):
            marked.open(HIGH).ask("red?", reduce=spec)
    assert marked.open(random_image(0)).ask("red?", reduce="divprune:keep=4", max_new_tokens=1).stats.vision_tokens == 4


@pytest.mark.parametrize("tiny", [INTERNVL, IDEFICS], ids=lambda tiny: tiny.family)
def test_models_whose_videos_vtx_does_not_take_are_refused_methods_of_clips_by_name(
    tiny: Tiny, tiny_checkpoint: Checkpoints
) -> None:
    folder = tiny_checkpoint(tiny)
    for spec in ("evs", "vidcom2"):
        with pytest.raises(UnsupportedModelError, match=f"{spec} chooses from the frames of videos, and this model"):
            plan_export(ExportOptions(str(folder), (), "fp32", reductions=(spec,)))
