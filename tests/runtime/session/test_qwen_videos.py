"""Videos of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: pairs of frames, their times, and places in time.

`VTX_CONFIGURATIONS=30` sets how many random configurations are compared with transformers.
"""

from __future__ import annotations

import os
import random
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.bundles import export
from tests.support.clips import evs, vidcom2
from tests.support.exported import THREADS, Models, greedy
from tests.support.families.qwen import QWEN2, QWEN3, QWEN25, QWEN35
from tests.support.fixtures import Checkpoints, References
from tests.support.json_files import read_json, write_json
from tests.support.near import assert_near
from tests.support.parity import (
    STEPS,
    TOLERANCE,
    assert_later_equal_fresh,
    assert_parity,
    assert_same_on_openvino,
    video_prompts,
)
from tests.support.reduced import assert_prompt_as_stated, word
from tests.support.reference import Greedy, Inputs, Reference
from tests.support.statement import Method
from tests.support.tiny import Tiny, random_image, random_video
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import UNPRINTED, plan_export
from vtx.runtime.api.images import Picture
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.errors import CheckpointError, ContextError, ImageError, RequestError, UnsupportedModelError
from vtx.runtime.policies import make
from vtx.runtime.policies.methods import evs as evs_method
from vtx.runtime.session import encoded_images
from vtx.runtime.vision.video import Video, video

pytestmark = pytest.mark.dialects("ort", "plain")
QUESTION = "What is the colour of the square in the picture?"
FAMILIES = {"qwen2": QWEN2, "qwen2.5": QWEN25, "qwen3": QWEN3, "qwen3.5": QWEN35}
EXACT = {
    **dict.fromkeys(FAMILIES, TOLERANCE),
    "qwen2.5": 2 * TOLERANCE,  # one answer is 2.0e-5 from the model in float64 (run on an EPYC)
    "qwen3.5": 1e-4,  # in float32 the forms of its delta rule differ by more
}
WIDE = video(random_video(0, 30, (300, 50)), frames=5, fps=20)  # longer than its last pair's place in time
SMALL = video(random_video(1, 20, (90, 60)), frames=6, fps=30)
CLIPS = {"evs": evs, "vidcom2": vidcom2}
slow = pytest.mark.slow


def as_given(model: Model, given: Video) -> tuple[torch.Tensor, Any]:
    """A prepared video as the reference takes it: its pairs of frames, and which frames they are."""
    prepared = model.loaded.images.prepare_video(given)
    return torch.from_numpy(np.stack([*prepared.views])), prepared.arrange.keywords["clip"]  # type: ignore[attr-defined]


def both(model: Model, judge: Reference, pictures: list[Picture], question: str = QUESTION) -> tuple[Inputs, Any]:
    """The same prompt for transformers and for a session, images before videos."""
    return video_prompts(model, judge, pictures, question, lambda video: as_given(model, video))


def places(judge: Reference, inputs: Inputs, kept: list[int]) -> torch.Tensor:
    """The positions [3, 1, n] of the text and the `kept` tokens of a video, stated without transformers.

    Text goes on behind the largest position. A pair of Qwen3-VL's without tokens takes no position.
    """
    ids, (pairs, down, across) = inputs["input_ids"][0].tolist(), inputs["video_grid_thw"][0].tolist()
    down, across, at, number, out = down // 2, across // 2, 0, 0, list[list[int]]()
    each = float(inputs["second_per_grid_ts"][0]) if "second_per_grid_ts" in inputs else 1.0
    each *= getattr(judge.model.config.vision_config, "tokens_per_second", 1)
    ticks = [0] * pairs if judge.kind.startswith("qwen3") else [int(pair * each) for pair in range(pairs)]
    run = down * across * (1 if judge.kind.startswith("qwen3") else pairs)
    token = 0
    while token < len(ids):
        if ids[token] != judge.video_token:
            out.append([at] * 3)
            token, at = token + 1, at + 1
            continue
        grid = [
            [ticks[n // (down * across)], n % (down * across) // across, n % across]
            for n in range(number, number + run)
        ]
        own = [[at + part for part in grid[n - number]] for n in range(number, number + run) if n in kept]
        out += own
        at += max(map(max, grid)) + 1 if own else 0
        token, number = token + run, number + run
    return torch.tensor(out).T[:, None]


def stated(judge: Reference, inputs: Inputs, kept: list[int], k: int | None) -> Greedy:
    """The answer if only the `kept` tokens of the video entered."""
    rows, vision = judge.prompt(inputs)
    stays = torch.ones(len(vision), dtype=torch.bool)
    stays[vision] = torch.isin(torch.arange(int(vision.sum())), torch.tensor(kept))
    maps = [each[torch.tensor(kept)] for each in judge.maps(inputs)]
    return judge.answer(rows[:, stays], vision[stays], places(judge, inputs, kept), maps, k, STEPS)


def of_clip(model: Model, given: Video, method: str, keep: float) -> list[int]:
    """The tokens that a method of clips keeps, by its plain statement."""
    prepared = model.loaded.images.prepare_video(given)
    hidden = torch.from_numpy(prepared.encode(model.backend).hidden)
    return CLIPS[method](hidden.view(len(prepared.views), -1, hidden.shape[-1]), keep)


def assert_asked_as(
    model: Model, given: Video, wanted: Greedy, k: int | None, reduce: str | None, tolerance: float = TOLERANCE
) -> None:
    """Ids and probabilities of an answer about a video, and of the same question again."""
    chosen = [float(row[id]) for row, id in zip(wanted.logits.log_softmax(-1), wanted.ids, strict=True)]
    with model.open(given) as conversation:
        for again in (False, True):
            answer = conversation.ask(QUESTION, k, Options(STEPS, ignore_eos=True, logprobs=True), reduce=reduce)
            assert list(answer.token_ids) == wanted.ids
            assert_near(answer.logprobs or (), chosen, 2 * tolerance)
            assert answer.stats.reused_image == again


@pytest.mark.parametrize(
    "pictures", [[WIDE], pytest.param([random_image(0, (60, 90)), WIDE, SMALL], marks=slow)], ids=len
)
@pytest.mark.parametrize("name", FAMILIES)
def test_videos_are_answered_as_by_transformers_and_at_k_as_by_the_statement(
    models: Models, reference: References, name: str, pictures: list[Picture]
) -> None:
    tiny = FAMILIES[name] if len(pictures) == 1 else replace(FAMILIES[name], context=512)
    model, judge = models(tiny, (3, 5)), reference(tiny)
    inputs, asked = both(model, judge, pictures)
    assert_parity(model, judge, inputs, asked, EXACT[name])
    if len(pictures) == 1:
        every = [*range(int(inputs["video_grid_thw"].prod()) // 4)]
        assert torch.equal(places(judge, inputs, every), judge.positions(inputs))


@slow
@pytest.mark.parametrize("tiny", [QWEN2, QWEN25], ids=["qwen2", "qwen2.5"])
def test_text_goes_on_behind_the_last_place_in_time_of_a_video(
    models: Models, reference: References, tiny: Tiny
) -> None:
    """Where transformers 5.23 lets text and the last pairs share places; the first releases did not."""
    model, judge = models(tiny, (3, 5)), reference(tiny)
    inputs, asked = both(model, judge, [replace(SMALL, frames=16, fps=5)])
    every = [*range(int(inputs["video_grid_thw"].prod()) // 4)]
    assert places(judge, inputs, every).max() > judge.positions(inputs).max()
    for k in (None, 3, 5):
        wanted, found = stated(judge, inputs, every, k), greedy(model, asked, k, STEPS)
        assert found.ids == wanted.ids
        assert_near(found.logits, wanted.logits, 1e-4)


@pytest.mark.parametrize("k", [None, 5])
@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", pytest.param("qwen2.5", marks=slow)])
def test_later_questions_about_a_video_equal_fresh_runs(models: Models, name: str, k: int | None) -> None:
    model = models(FAMILIES[name], (3, 5))
    assert_later_equal_fresh(model, [SMALL, random_image(0, (60, 90))], k, tolerance=EXACT[name])


@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("method", CLIPS)
@pytest.mark.parametrize("name", ["qwen3", *(pytest.param(name, marks=slow) for name in FAMILIES if name != "qwen3")])
def test_what_stays_of_a_clip_is_answered_as_by_the_statement(
    models: Models, reference: References, name: str, method: str, k: int | None
) -> None:
    """EVS leaves nothing of pairs in which nothing changes: their times stay in the prompt."""
    model, judge = models(FAMILIES[name], (3, 5)), reference(FAMILIES[name])
    given = replace(SMALL, source=np.repeat(random_video(1, 2, (90, 60)), 10, 0), frames=8)
    inputs, _ = both(model, judge, [given])
    kept = of_clip(model, given, method, 0.3)
    each = int(inputs["video_grid_thw"][0, 1:].prod()) // 4
    assert len({token // each for token in kept}) < 4 or method != "evs", "every pair has a token"
    assert_asked_as(model, given, stated(judge, inputs, kept, k), k, f"{method}:keep=0.3", EXACT[name])


@pytest.mark.parametrize("spec", ["evs:keep=0.3", "vidcom2:keep=0.3,window=5"])
@pytest.mark.parametrize("tiny", [QWEN3, pytest.param(QWEN25, marks=slow)], ids=["qwen3", "qwen2.5"])
def test_pairs_of_a_long_video_that_are_chosen_in_windows_answer_as_all_in_memory(
    models: Models, tiny: Tiny, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = models(replace(tiny, context=1024), (3, 5)), list[Any]()
    monkeypatch.setattr(evs_method, "WINDOW", 4)
    for most in (64, 16):
        for module in (encoded_images, make):
            monkeypatch.setattr(module, "MAX_SAMPLED_FRAMES", most)
        with model.open(replace(SMALL, frames=19)) as conversation:
            for k in (None, 3):
                answer = conversation.ask("red?", k, Options(4, ignore_eos=True, logprobs=True), reduce=spec)
                assert answer.stats.reduced is not None
                found.append((answer.token_ids, answer.stats.vision_tokens, answer.stats.reduced.kept))
    assert found[:2] == found[2:]


@slow
@pytest.mark.parametrize("method", [Method(fastv=(2, 0.5)), Method(dart=(8, 2, 2, 2))], ids=["fastv", "dart"])
@pytest.mark.parametrize("name", FAMILIES)
def test_reductions_behind_a_layer_equal_the_statement(
    models: Models, reference: References, name: str, method: Method
) -> None:
    tiny = FAMILIES[name]
    model, judge = models(tiny, (), "fp32", (word(method),)), reference(tiny)
    inputs, asked = both(model, judge, [WIDE])
    ids = inputs["input_ids"]
    alike = inputs | {"input_ids": torch.where(ids == judge.video_token, judge.image_token, ids)}
    assert_prompt_as_stated(model, judge, alike, asked, method)


@slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shape", [(1, 1), (320, 20), (20, 320)], ids=str)
@pytest.mark.parametrize("frames", [1, 3])
def test_frames_of_extreme_shapes_one_frame_and_odd_numbers_are_answered_as_by_transformers(
    models: Models, reference: References, name: str, shape: tuple[int, int], frames: int
) -> None:
    model, judge = models(FAMILIES[name], (3, 5)), reference(FAMILIES[name])
    given = video(random_video(3, frames, shape), frames=frames, fps=60)
    inputs, asked = both(model, judge, [given])
    wanted, found = judge.greedy(inputs, None, STEPS), greedy(model, asked, None, STEPS)
    assert wanted.margin > 2 * EXACT[name]
    assert found.ids == wanted.ids
    assert_near(found.logits, wanted.logits, EXACT[name])


@slow
@pytest.mark.parametrize("name", FAMILIES)
def test_openvino_gives_the_same_answers_about_videos(models: Models, name: str) -> None:
    assert_same_on_openvino(models(FAMILIES[name], (3, 5)), [random_image(0, (60, 90)), WIDE], QUESTION)


def test_a_video_of_one_frame_is_seen_as_its_picture(models: Models) -> None:
    model, picture = models(QWEN3, (3, 5)), random_image(2, (64, 96))
    pair = model.loaded.images.prepare_video(video(np.asarray(picture)[None], frames=1))
    assert pair.views.shape == (1, 2, 3, 96, 64)  # type: ignore[union-attr]
    tokens, still = pair.encode(model.backend), model.loaded.images.prepare(picture).encode(model.backend)
    np.testing.assert_allclose(tokens.hidden, still.hidden, atol=1e-5)


def test_without_a_number_two_frames_a_second_are_sampled_and_the_prompt_tells_their_times(models: Models) -> None:
    model, frames = models(QWEN3, (3, 5)), random_video(0, 90, (64, 64))
    for fps, count, last in ((30, 6, "<2.7 seconds>"), (None, 7, "<3.7 seconds>"), (300, 4, "<0.2 seconds>")):
        prepared = model.loaded.images.prepare_video(video(frames, fps=fps))
        assert (prepared.frames, len(prepared.views)) == (count, -(-count // 2))
        assert last in prepared.in_prompt.texts[-2]


def test_a_video_beyond_the_context_names_frames_and_pixels_that_fit(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = export(tiny_checkpoint(QWEN25), tmp_path / "bundle", (), max_context=120).folder
    given = video(random_video(0, 64, (150, 90)), frames=64)
    with load(folder, device="cpu", threads=1) as model, model.open(given) as conversation:
        with pytest.raises(ContextError, match=r"--max-pixels (\d+) .*fits, or --frames (\d+) .*fits") as refused:
            conversation.ask("red?")
        pixels, frames = map(int, re.findall(r"--(?:max-pixels|frames) (\d+)", str(refused.value)))
        assert model.open(replace(given, frames=frames)).ask("red?", None, Options(2)).token_ids
        with pytest.raises(ContextError):
            model.open(replace(given, frames=frames + 1)).ask("red?")
    for more in (0, 784):
        with (
            load(folder, device="cpu", threads=1, max_pixels=pixels + more) as model,
            model.open(given) as conversation,
            nullcontext() if not more else pytest.raises(ContextError),
        ):
            assert conversation.ask("red?", None, Options(2)).stats.vision_tokens == 32 * 2


def test_what_is_no_video_for_these_models_is_refused(models: Models, tiny_checkpoint: Checkpoints) -> None:
    model = models(QWEN3, (3, 5))
    with pytest.raises(ImageError, match="its sides may differ at most 200-fold"):
        model.open(random_video(0, 4, (600, 2)))
    with pytest.raises(RequestError, match="fps is given for a video file"):
        video("clip.mp4", fps=2)
    for fps in (0, -1, 1001, float("nan"), True, "2"):
        with pytest.raises(RequestError, match="give a number of frames a second up to 1000"):
            video(random_video(0, 4), fps=fps)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="frames is 257, the limit is 256"):
        video(random_video(0, 4), frames=257)
    with pytest.raises(RequestError, match=r"has 130 sampled frames, and beyond 64 .* use evs"):
        model.open(replace(SMALL, frames=130)).ask("red?")
    with pytest.raises(RequestError, match="at native resolution"):
        model.open(SMALL, fit="pad")


def test_a_template_without_videos_and_settings_that_are_not_built_are_said_at_export(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    import shutil

    folder = Path(shutil.copytree(tiny_checkpoint(QWEN3), tmp_path / "checkpoint"))
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    images = "{% for m in messages %}{% for p in m['content'] %}{{ '<image>' if p['type'] == 'image' else p['text'] }}"
    plan = plan_export(ExportOptions(str(folder), (), "fp32", template=images + "{% endfor %}{% endfor %}"))
    assert plan.video is None
    assert UNPRINTED in plan.warnings
    assert "<|vision_start|><video><|vision_end|>" in template
    whole = plan_export(ExportOptions(str(folder), (), "fp32"))
    assert whole.video is not None
    assert "<|vision_start|><video><|vision_end|>" not in whole.template
    file = folder / "video_preprocessor_config.json"
    stated = read_json(file)
    write_json(file, stated | {"num_frames": 8})
    with pytest.raises(UnsupportedModelError, match="num_frames 8 is not supported; leave it out"):
        plan_export(ExportOptions(str(folder), (), "fp32"))
    for wrong in ({"fps": "2"}, {"max_frames": 2.5}, {"min_pixels": 0}, {"min_frames": 70}):
        write_json(file, stated | wrong)
        with pytest.raises(CheckpointError, match="processor's"):
            plan_export(ExportOptions(str(folder), (), "fp32"))
    write_json(file, stated | {"cap_pixels_per_frame": True})
    capped = plan_export(ExportOptions(str(folder), (), "fp32")).video
    assert capped is not None
    assert capped.layout.parameters["capped"] == 768


CONFIGURATIONS = int(os.environ.get("VTX_CONFIGURATIONS") or 1)


@slow
@pytest.mark.parametrize("seed", range(CONFIGURATIONS))
def test_random_models_answer_about_random_videos_as_transformers_and_the_statements(
    tiny_checkpoint: Checkpoints, tmp_path: Path, seed: int
) -> None:
    """None against transformers, three K, evs and vidcom2 with and without K against plain statements."""
    rng = random.Random(seed)
    base = (QWEN3, QWEN25, QWEN2, QWEN35)[seed % 4]
    heads, kv_heads = rng.choice(((4, 4), (4, 2), (4, 1), (2, 2)))
    layers, tower = rng.randint(6, 9), rng.randint(3, 6)
    tiny = replace(
        base, context=512, layers=layers, heads=heads, kv_heads=kv_heads, hidden=rng.choice((64, 96)),
        ffn=rng.choice((80, 160)),
        tied=rng.random() < 0.5, theta=rng.choice((1e4, 1e6)), names=rng.choice(("hub", "saved", "new")),
        vision_layers=tower, vision_hidden=rng.choice((32, 48)), vision_heads=2,
        maps=tuple(sorted(rng.sample(range(tower), rng.randint(0, 3)))),
    )  # fmt: skip
    if base == QWEN35:
        tiny = replace(tiny, maps=base.maps, attending=tuple(sorted(rng.sample(range(layers), rng.randint(1, 5)))))
    ks = tuple(sorted(rng.sample(range(2, layers + 1), 3)))
    checkpoint = tiny_checkpoint(tiny, seed)
    judge, keep = Reference(checkpoint), rng.choice((0.2, 0.3, 0.5))
    folder, worst = export(checkpoint, tmp_path / "bundle", ks, "fp32").folder, dict[str, float]()
    shape = rng.choice(((300, 50), (50, 300), (90, 60), (130, 110), (20, 320)))
    given = video(
        random_video(seed, rng.randint(6, 40), shape), frames=rng.randint(2, 9), fps=rng.choice((30, 60, 120))
    )
    with load(folder, device="cpu", threads=THREADS) as model:
        inputs, asked = both(model, judge, [given])
        every = [*range(int(inputs["video_grid_thw"].prod()) // 4)]
        alike = torch.equal(places(judge, inputs, every), judge.positions(inputs))
        for k in (None, *ks):
            wanted = stated(judge, inputs, every, k)
            found = greedy(model, asked, k, STEPS, forced=wanted.ids)
            worst[f"{k}"] = float(np.abs(found.logits - wanted.logits.numpy()).max())
            if k is None and alike:
                ids, logits = judge.generate_hf(inputs, STEPS)
                assert ids == wanted.ids or wanted.margin < 1e-4
                if ids == wanted.ids:
                    worst["transformers"] = float(np.abs(found.logits - logits.numpy()).max())
        for method in CLIPS:
            kept = of_clip(model, given, method, keep)
            for k in (None, ks[1]):
                wanted = stated(judge, inputs, kept, k)
                if wanted.margin > 1e-4:
                    exact = 1e-4 if base == QWEN35 else TOLERANCE
                    assert_asked_as(model, given, wanted, k, f"{method}:keep={keep}", exact)
    print(seed, tiny.family, "places alike" if alike else "places differ", {n: f"{v:.1e}" for n, v in worst.items()})
    assert max(worst.values()) < 1e-4
