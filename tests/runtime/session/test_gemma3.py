"""Gemma 3: the tokens of an image see each other both ways, sliding windows, and a tower whose states are averaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.bundles import ORT, export
from tests.support.exported import DEVICES, THREADS, greedy, prompt
from tests.support.families.gemma import GEMMA3, gemma3_logits, settings3
from tests.support.fixtures import Checkpoints, References
from tests.support.near import assert_near
from tests.support.parity import QUESTIONS, STEPS
from tests.support.reduced import Talk, word
from tests.support.reference import Reference
from tests.support.statement import Method
from tests.support.tiny import prompt_messages, random_image
from vtx.exporter.checkpoint.families.gemma.gemma3 import FAMILY, PROCESSOR
from vtx.exporter.checkpoint.processor import image_settings
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.api.stream import AnswerStream
from vtx.runtime.backends.openvino import cache as openvino_cache
from vtx.runtime.bundle.spec import names
from vtx.runtime.errors import BundleError, CheckpointError, RequestError, UnsupportedModelError
from vtx.runtime.scheduler.batching import Batching
from vtx.runtime.session.prefix import Key, Prefix, Remaining
from vtx.runtime.vision.layouts.crops import Crops

KS = (2, 4, 6)
METHODS = (Method(fastv=(3, 0.5)), Method(divprune=6), Method(dart=(6, 4, 2, 2)))
TOLERANCE, TOKENS = 1e-4, 16


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny_checkpoint(GEMMA3), tmp_path_factory.mktemp("gemma3") / "bundle", KS).folder


@pytest.fixture(scope="module", params=DEVICES)
def reduced(
    request: pytest.FixtureRequest, tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    place, words = tmp_path_factory.mktemp("reduced") / "bundle", tuple(map(word, METHODS))
    made = export(tiny_checkpoint(GEMMA3), place, (6,), reductions=words).folder
    with load(made, device=request.param, threads=THREADS) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def judge(reference: References) -> Reference:
    return reference(GEMMA3)


@pytest.mark.parametrize("method", METHODS, ids=word)
@pytest.mark.parametrize("k", [None, 6])
def test_tokens_that_a_reduction_keeps_still_see_each_other(
    reduced: Model, judge: Reference, method: Method, k: int | None
) -> None:
    """The statement is told which tokens stay; which ones a method chooses is tested with other families."""
    images, messages = [random_image(0)], prompt_messages(QUESTIONS[1])
    done = Talk(reduced).ask(messages, images, replace(method, k=k), 1).done
    with torch.inference_mode():
        rows, vision = judge.prompt(judge.inputs(messages, images))
        enters = torch.ones(len(vision), dtype=torch.bool)
        enters[vision] = torch.isin(torch.arange(TOKENS), torch.from_numpy(done.images[0].indices))
        rows, vision = rows[:, enters], vision[enters]
        leaves = {}
        for cut in done.cuts:
            leaves[cut.layer] = ~vision
            leaves[cut.layer][vision] = torch.from_numpy(cut.kept)
        wanted = gemma3_logits(judge.model, rows, vision, leaves)
    assert int(vision.sum()) == (6 if method.divprune else TOKENS)
    assert [cut.layer for cut in done.cuts] == [n for n in (method.fastv and 4, method.dart and 5, k) if n]
    assert all(0 < cut.kept.sum() < len(cut.kept) for cut in done.cuts if cut.layer != k)
    assert_near(done.logits, wanted.numpy(), TOLERANCE)


def test_windows_over_gaps_within_an_image_are_refused_on_openvino(reduced: Model) -> None:
    """Half of the first image leaves, and tokens of the second one look back as far as there."""
    images, messages = [random_image(0), random_image(1)], prompt_messages(QUESTIONS[1], 2)
    if reduced.backend.device == "cpu":
        assert Talk(reduced).ask(messages, images, METHODS[0], 1).ids
    else:
        with pytest.raises(RequestError, match="different numbers of slots"):
            Talk(reduced).ask(messages, images, METHODS[0], 1)
    assert Talk(reduced).ask(messages, images, Method(), 1).ids


@pytest.mark.dialects("plain")
def test_a_question_behind_a_withdrawn_image_goes_in_few_runs_on_openvino(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its tokens sees another number of slots in layers that slide: the image left its slots behind."""
    pytest.importorskip("openvino")
    runs = Counter[str]()
    for name in ("run_row", "run_request"):
        run = getattr(openvino_cache, name)
        monkeypatch.setattr(openvino_cache, name, lambda *given, run=run: (runs.update(["run"]), run(*given))[1])
    with load(folder, device="openvino", threads=THREADS) as model, model.open(random_image(0)) as conversation:
        conversation.ask(QUESTIONS[0], 2, Options(1))
        runs.clear()
        conversation.ask(QUESTIONS[1], 2, Options(1))
        stages = len(model.manifest.stages)
    assert 0 < runs["run"] <= 4 * stages


@pytest.mark.parametrize("k", [None, 4])
def test_an_image_before_the_one_that_changes_is_not_run_again(model: Model, k: int | None) -> None:
    first, options = random_image(1), Options(STEPS, ignore_eos=True, logprobs=True)
    with model.open([first, random_image(2)]) as held, model.open([first, random_image(3)]) as fresh:
        held.ask(QUESTIONS[1], k, options)
        held.replace([first, random_image(3)])
        found, wanted = (conversation.ask(QUESTIONS[1], k, options) for conversation in (held, fresh))
    assert found.token_ids == wanted.token_ids
    assert_near(found.logprobs or (), wanted.logprobs or (), TOLERANCE)
    assert found.stats.reused_tokens >= TOKENS


def test_images_that_begin_alike_are_not_cut_in_two() -> None:
    """What two prefixes have in common ends before the image in which they differ."""
    vision, groups = np.array([0, 1, 1, 1, 0, 1, 1, 1]) > 0, np.array([-1, 1, 1, 1, -1, 2, 2, 2], np.float32)

    def remaining(last: float) -> Remaining:
        hidden = np.arange(8, dtype=np.float32)[:, None]
        hidden[7] = last
        return Remaining.of(Prefix(Key(), vision, (), np.arange(8), 8, hidden, {names.GROUP: groups[:, None]}))

    assert remaining(0).prefix.agreement(remaining(1).prefix) == 7
    assert remaining(0).agreement(remaining(1)) == 5


def test_a_long_prompt_runs_in_parts_none_of_which_ends_within_an_image(
    folder: Path, judge: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vtx.runtime.backends.ort.cache.MASKED", 10)
    messages, pictures = prompt_messages(QUESTIONS[1], 2), [random_image(0), random_image(1)]
    wanted = judge.greedy(judge.inputs(messages, pictures), None, 1)
    with load(folder, device="cpu", threads=THREADS) as model:
        found = greedy(model, prompt(model, messages, pictures), None, 1)
    assert_near(found.logits, wanted.logits, TOLERANCE)


def test_answers_decoded_together_are_those_of_each_alone(folder: Path, model: Model) -> None:
    """Some are within the window, some beyond it."""
    options, ks = Options(8, ignore_eos=True, logprobs=True), (None, *KS)

    def goes_on(stream: AnswerStream) -> bool:
        try:
            stream.step()
        except StopIteration:
            return False
        return True

    with load(folder, device=model.backend.device, threads=THREADS) as shared:
        batching = Batching(shared, 4, 16)
        streams = [shared.open(random_image(n)).stream("red?" * (1 + n), ks[n], options) for n in range(4)]
        running = [stream for stream in streams if goes_on(stream)]
        while running:
            batching.decode(running)
            running = [stream for stream in running if goes_on(stream)]
        assert batching.obstacle is None
        assert batching.tokens > 2 * batching.passes
    for number, stream in enumerate(streams):
        with model.open(random_image(number)) as conversation:
            alone = conversation.ask("red?" * (1 + number), ks[number], options)
        assert stream.answer.token_ids == alone.token_ids
        assert_near(stream.answer.logprobs or (), alone.logprobs or (), TOLERANCE)


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("text_config", {"sliding_window": 15}, UnsupportedModelError, "sliding_window is 15, and an image has 16 tokens"),
    ("text_config", {"sliding_window": None}, CheckpointError, "sliding_window is None"),
    ("text_config", {"layer_types": ["full_attention"]}, CheckpointError, "layer_types"),
    ("text_config", {"layer_types": ["linear_attention"] * 8}, CheckpointError, "linear_attention"),
    ("text_config", {"use_bidirectional_attention": True}, UnsupportedModelError, "use_bidirectional_attention"),
    ("text_config", {"query_pre_attn_scalar": 0}, CheckpointError, "query_pre_attn_scalar"),
    ("text_config", {"head_dim": 12}, UnsupportedModelError, "head_dim 12"),
    ("", {"mm_tokens_per_image": 15}, CheckpointError, "mm_tokens_per_image is 15"),
    ("", {"mm_tokens_per_image": 9}, CheckpointError, "mm_tokens_per_image is 9"),
    ("", {"image_token_index": 320}, CheckpointError, "320 is not a token id"),
    ("vision_config", {"model_type": "clip_vision_model"}, UnsupportedModelError, "clip_vision_model"),
]


@pytest.mark.parametrize(("part", "changes", "error", "message"), BAD, ids=lambda value: str(value)[:40])
def test_what_is_not_built_or_does_not_fit_is_refused_by_name(
    part: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = settings3(GEMMA3, 319)
    (config[part] if part else config).update(changes)
    with pytest.raises(error, match=message):
        FAMILY.read(config)


def test_a_window_longer_than_the_context_hides_nothing(tiny_checkpoint: Checkpoints) -> None:
    config = settings3(replace(GEMMA3, sliding_window=100_000), 319)
    assert FAMILY.read(config).text.sliding.window == 100_000  # type: ignore[union-attr]


@pytest.mark.parametrize("k", [None, 4])
def test_crops_follow_an_image_whose_sides_differ(
    tiny_checkpoint: Checkpoints, reference: References, tmp_path: Path, k: int | None
) -> None:
    tiny = replace(GEMMA3, crops=3, context=512)
    folder, judge = export(tiny_checkpoint(tiny), tmp_path / "bundle", (4,), dialects=ORT).folder, reference(tiny)
    judge.processor.images_kwargs = {**judge.processor.images_kwargs, **crops_of(judge)}
    messages, pictures = prompt_messages(QUESTIONS[1], 2), [random_image(0, (70, 30)), random_image(1, (40, 90))]
    inputs = judge.inputs(messages, pictures)
    with load(folder, device="cpu", threads=THREADS) as model:
        asked, wanted = prompt(model, messages, pictures), judge.greedy(inputs, k, STEPS)
        assert asked.ids.tolist() == inputs["input_ids"][0].tolist()
        found = greedy(model, asked, k, STEPS, forced=wanted.ids)
        assert found.done.vision_tokens == 6 * TOKENS
        assert_near(found.logits, wanted.logits, TOLERANCE)
    with load(folder, device="cpu", threads=THREADS, max_tiles=1) as model:
        assert prompt(model, messages, pictures).is_vision.sum() == 2 * TOKENS


def crops_of(judge: Reference) -> dict[str, Any]:
    """The image processor's own settings, which its processor would replace by pan and scan left off."""
    given = judge.processor.image_processor.to_dict()
    return {name: value for name, value in given.items() if "pan_and_scan" in name}


@pytest.mark.parametrize("size", [(30, 30), (36, 30), (37, 30), (70, 30), (30, 70), (400, 25), (25, 101), (640, 19)])
def test_crops_are_those_of_transformers(size: tuple[int, int]) -> None:
    from transformers import Gemma3ImageProcessorPil

    image, layout = random_image(1, size), Crops(28, 4, 20, 4, 1.2)
    theirs = Gemma3ImageProcessorPil(
        do_pan_and_scan=True, pan_and_scan_min_crop_size=20, pan_and_scan_max_num_crops=4,
        pan_and_scan_min_ratio_to_activate=1.2, size={"height": 28, "width": 28},
    )  # fmt: skip
    wanted = theirs([image], return_tensors="np")
    views = layout.views(image, image_settings({"size": {"height": 28, "width": 28}}, [PROCESSOR]))
    assert_near(views, wanted["pixel_values"], 1e-5)
    assert layout.passes(*size) == 1 + wanted["num_crops"][0] == len(layout.prompt_image(*size).spans)


@pytest.mark.parametrize("changes", [{"side": 0}, {"most": 65}, {"most": 5}, {"ratio": 0.5}, {"tokens": 0}], ids=str)
def test_crops_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BundleError, match="layout 'crops' has up to"):
        Crops(**{"tile": 28, "tokens": 4, "side": 4, "most": 4, "ratio": 1.2} | changes)


@pytest.mark.parametrize("value", ["many", 1.5, True, 100], ids=str)
def test_settings_of_crops_that_are_no_numbers_are_refused(value: Any) -> None:
    assert FAMILY.adjust is not None
    with pytest.raises(CheckpointError, match="pan_and_scan"):
        FAMILY.adjust(
            FAMILY.read(settings3(GEMMA3, 319)), {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": value}
        )


def test_text_around_an_image_stands_in_the_template_within_strings_and_without() -> None:
    config = FAMILY.read(settings3(GEMMA3, 319))
    assert FAMILY.template is not None
    around = "\\n\\n<start_of_image><image_soft_token><end_of_image>\\n\\n"
    assert FAMILY.template("a{{ '<start_of_image>' }}b", config) == f"a{{{{ '{around}' }}}}b"
    assert (
        FAMILY.template("{% if x %}<start_of_image>{% endif %}", config)
        == f"{{% if x %}}{{{{ '{around}' }}}}{{% endif %}}"
    )
