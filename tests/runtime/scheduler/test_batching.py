"""Answers decoded together: the ids and log probabilities of each alone, whatever stands beside it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from tests.support.bundles import export_with
from tests.support.engines import on_standin
from tests.support.exported import THREADS, Models
from tests.support.families.gemma import GEMMA4
from tests.support.families.lfm2_vl import LFM2
from tests.support.families.lfm3_vl import LFM3
from tests.support.families.minicpm import MINICPM
from tests.support.families.qwen import QWEN3, QWEN25, QWEN35
from tests.support.families.smolvlm import SMOLVLM
from tests.support.gpu_standin import build_all
from tests.support.serving import asking, serving, user
from tests.support.tiny import Tiny, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.answer import Answer
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options, Settings
from vtx.runtime.api.stream import AnswerStream
from vtx.runtime.errors import DeviceError
from vtx.runtime.scheduler.batching import FAILURES, Batching
from vtx.runtime.scheduler.conversations import ConversationPool
from vtx.runtime.session.sampling import Sampling

LISA = Tiny(family="lisa", context=512)
DUAL = "mustdrop:gamma=0.011,alpha=1,layers=2/4/6"
TOLERANCE = 1e-4
ENGINES = ("cpu", "openvino", "tensorrt")
OTHERS = QWEN25, QWEN3, QWEN35, MINICPM, SMOLVLM, LFM2, LFM3, GEMMA4


class Case(NamedTuple):
    """One conversation: its question, K and reductions, and in which round it joins."""

    question: str
    k: int | None
    reduce: str
    tokens: int
    joins: int = 0
    image: int = 4
    temperature: float = 0.0


CASES = (
    Case("red?", None, "none", 24),
    Case("How many circle shapes are there?", 3, "none", 9),
    Case("What is the colour of the square in the picture?", 5, "none", 30, image=5, temperature=0.9),
    Case("red?", None, "fastv:k=3", 14, joins=3),
    Case("blue?", None, DUAL, 20, joins=5),
    Case("How many?", 5, f"{DUAL},positions=renumber", 12, joins=9, image=5),
    Case("What is it?", 3, "none", 16, joins=12, temperature=1.3),
)


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Any, tmp_path_factory: Any) -> Path:
    checkpoint = tiny_checkpoint(Tiny(image=126, context=512))
    options = ExportOptions(str(checkpoint), (3, 5), "fp32", 256, reductions=("fastv:k=3", DUAL))
    return export_with(options, tmp_path_factory.mktemp("batched") / "bundle").folder


@pytest.fixture(scope="module", params=ENGINES)
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[Model]:
    if request.param == "openvino":
        pytest.importorskip("openvino", reason="needs vtx-edge[openvino]")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tensorrt":
            build_all(folder)
            on_standin(patch)
        with load(folder, device=request.param, threads=THREADS) as model:
            yield model


@pytest.fixture(scope="module")
def batching(model: Model) -> Batching:
    made = Batching(model, 4, 16)
    assert made.obstacle is None
    return made


def start(model: Model, case: Case) -> AnswerStream:
    sampling = Sampling(temperature=case.temperature, seed=len(case.question))
    options = Options(max_new_tokens=case.tokens, ignore_eos=True, logprobs=True, sampling=sampling)
    image = model.open(random_image(case.image, (126, 126)))
    return image.stream(case.question, case.k, options, reduce=case.reduce)


def run(batching: Batching, streams: Sequence[tuple[AnswerStream, int]]) -> list[Answer]:
    """Rounds as the scheduler makes them, until all have ended; a stream joins in its round."""
    running: list[AnswerStream] = []
    waiting = [*streams]
    number = 0
    while running or waiting:
        batching.decode(running)
        running = [stream for stream in running if stepped(stream)]
        joining = [stream for stream, joins in waiting if joins <= number]
        waiting = [(stream, joins) for stream, joins in waiting if joins > number]
        running += [stream for stream in joining if stepped(stream)]
        number += 1
    return [stream.answer for stream, _ in streams]


def stepped(stream: AnswerStream) -> bool:
    try:
        stream.step()
    except StopIteration:
        return False
    return True


def same(answer: Answer, alone: Answer) -> None:
    assert answer.token_ids == alone.token_ids
    assert answer.logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE)
    assert (answer.text, answer.stopped) == (alone.text, alone.stopped)


@pytest.fixture(scope="module")
def alone(model: Model) -> list[Answer]:
    return [start(model, case).read() for case in CASES]


@pytest.mark.sampled
def test_conversations_of_any_k_and_reduction_that_join_and_leave_answer_as_alone(
    model: Model, batching: Batching, alone: list[Answer]
) -> None:
    before = batching.tokens, batching.passes
    answers = run(batching, [(start(model, case), case.joins) for case in CASES])
    for answer, expected in zip(answers, alone, strict=True):
        same(answer, expected)
    tokens, passes = batching.tokens - before[0], batching.passes - before[1]
    decoded = sum(case.tokens - 1 for case in CASES)
    assert decoded - 30 < tokens < decoded, "all but those of the last one that was left, and remainders of one"
    assert tokens / passes > 2.5


@pytest.mark.parametrize(
    "tiny",
    [LISA, *(pytest.param(tiny, marks=pytest.mark.slow) for tiny in OTHERS)],
    ids=lambda tiny: tiny.family,
)  # fmt: skip
def test_answers_of_other_families_decoded_together_are_those_of_each_alone(models: Models, tiny: Tiny) -> None:
    """Those of LISA with the states of their own segments."""
    options = Options(max_new_tokens=12, ignore_eos=True, logprobs=True)
    with load(models(tiny, (3, 5)).bundle.folder, device="cpu", threads=THREADS) as model:

        def started(number: int) -> AnswerStream:
            image = random_image(number, (150, 60) if number % 2 else (40, 90))
            return model.open(image).stream("red?" * (1 + number), (None, 3, 5)[number % 3], options)

        alone = [started(number).read() for number in range(4)]
        batching = Batching(model, 4, 16)
        answers = run(batching, [(started(number), number) for number in range(4)])
        assert batching.tokens > 2 * batching.passes
    for answer, wanted in zip(answers, alone, strict=True):
        same(answer, wanted)
        for given, state in zip(answer.stats.seg_states or (), wanted.stats.seg_states or (), strict=True):
            assert given == pytest.approx(state, abs=TOLERANCE)
    assert tiny is not LISA or sum(bool(answer.stats.seg_states) for answer in alone) > 1, "too few segments"


def test_an_answer_that_is_cancelled_or_stopped_leaves_the_others_alone(
    model: Model, batching: Batching, alone: list[Answer]
) -> None:
    streams = [start(model, CASES[number]) for number in (0, 1, 2)]
    for _ in range(4):
        batching.decode(streams)
        assert all([stepped(stream) for stream in streams])
    batching.decode(streams)
    streams[0].cancel()
    assert not stepped(streams[0])
    answers = run(batching, [(stream, 0) for stream in streams])
    assert answers[0].stopped == "cancelled"
    assert answers[0].token_ids == alone[0].token_ids[: len(answers[0].token_ids)]
    for answer, number in zip(answers[1:], (1, 2), strict=True):
        same(answer, alone[number])


def test_a_conversation_goes_on_after_a_token_that_ran_ahead_for_nothing(model: Model, batching: Batching) -> None:
    image, options = model.open(random_image(4, (126, 126))), Options(max_new_tokens=8, ignore_eos=True, logprobs=True)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "red?"}]}]
    streams = [image.stream_messages(chat, Settings(3, options, "none"), resume=True), start(model, CASES[1])]
    for _ in range(4):
        batching.decode(streams)
        assert all([stepped(stream) for stream in streams])
    batching.decode(streams)
    streams[0].cancel()
    same(
        image.stream_messages(chat, Settings(3, options, "none"), resume=True).read(), image_alone(model, chat, options)
    )
    streams[1].cancel()


def image_alone(model: Model, chat: Any, options: Options) -> Answer:
    return (
        model.open(random_image(4, (126, 126))).stream_messages(chat, Settings(3, options, "none"), resume=True).read()
    )


def test_where_a_pass_fails_each_answer_is_computed_by_itself(
    model: Model, batching: Batching, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = type(model.backend).append_each, [0]  # type: ignore[attr-defined]

    def failing(self: Any, number: int, *rest: Any) -> Any:
        calls[0] += 1
        done = real(self, number, *rest)
        if number == 1 and calls[0] % 3:
            raise DeviceError("out of luck")
        return done

    monkeypatch.setattr(type(model.backend), "append_each", failing)
    for answer, number in zip(run(batching, [(start(model, CASES[n]), 0) for n in (0, 1, 4)]), (0, 1, 4), strict=True):
        same(answer, alone[number])
    assert calls[0] > 10


def test_after_passes_that_fail_in_a_row_no_more_are_tried(
    model: Model, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def failing(*_: Any) -> Any:
        calls.append(1)
        raise DeviceError("out of luck")

    batching = Batching(model, 4, 16)
    monkeypatch.setattr(type(model.backend), "append_each", failing)
    answers = run(batching, [(start(model, CASES[number]), 0) for number in (0, 2)])
    for answer, number in zip(answers, (0, 2), strict=True):
        same(answer, alone[number])
    assert len(calls) == FAILURES
    assert batching.obstacle == f"{FAILURES} passes in a row failed: out of luck"


def test_passes_that_fail_now_and_then_do_not_end_decoding_together(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each second pass fails, more of them than may fail in a row."""
    real, calls = type(model.backend).append_each, [0]  # type: ignore[attr-defined]

    def failing(self: Any, number: int, *rest: Any) -> Any:
        if number == 0:
            calls[0] += 1
        if calls[0] % 2:
            raise DeviceError("out of luck")
        return real(self, number, *rest)

    batching = Batching(model, 4, 16)
    monkeypatch.setattr(type(model.backend), "append_each", failing)
    streams = [model.open().stream(question, max_new_tokens=60, ignore_eos=True) for question in ("red?", "blue?")]
    for stream in streams:
        stream.step()
    while calls[0] < 3 * FAILURES:
        batching.decode(streams)
        for stream in streams:
            stream.step()
    for stream in streams:
        stream.cancel()
    assert (batching.obstacle, batching.passes) == (None, calls[0] // 2)


@pytest.mark.sampled
def test_a_server_decodes_its_clients_together_and_says_so(model: Model) -> None:
    pytest.importorskip("uvicorn", reason="needs vtx-edge[serve]", exc_type=ModuleNotFoundError)
    with (
        serving({"tiny": model.bundle.folder}, device=model.backend.device) as served,
        ThreadPoolExecutor(4) as clients,
    ):
        fields = {"reduce": "none", "max_tokens": 40, "temperature": 0.8, "seed": 3}
        bodies = [asking(user(f"red {n}?", random_image(4)), k=(None, 3)[n % 2] or "none", **fields) for n in range(4)]
        together = [response.json for response in clients.map(served.chat, bodies)]
        passes = served.metrics()["vtx_batched_passes_total"]
        alone = [served.chat(body).json for body in bodies]
        (told,) = served.request("GET", "/v1/models").json["data"]
        assert served.metrics()["vtx_batched_passes_total"] == passes > 10
    gc.collect()  # its memory goes now, not within a copy of the next one
    assert told["vtx"]["batch"] == {"most": 4}
    assert [one["usage"]["vtx"]["token_ids"] for one in together] == [o["usage"]["vtx"]["token_ids"] for o in alone]


def test_a_model_that_cannot_says_why() -> None:
    class Backend:
        device = "abacus"

    class Calculator:
        backend = Backend()

    assert Batching(cast("Model", Calculator()), 8, 4).obstacle == "abacus computes one conversation at a time"
    assert Batching(cast("Model", Calculator()), 1, 4).obstacle == "--max-batch is 1"


SETTINGS = [(None, "none"), (3, "none"), (5, "fastv:k=3"), (None, DUAL), (3, "random:keep=5")]


@pytest.mark.sampled
@pytest.mark.covering(2)
@pytest.mark.parametrize("first", SETTINGS)
@pytest.mark.parametrize("second", SETTINGS)
def test_questions_about_a_picture_in_use_share_its_prefix(
    first: tuple[int | None, str], second: tuple[int | None, str], model: Model
) -> None:
    """Each begins while those before it decode, and answers as alone; with equal settings the picture runs once."""
    pool, images = (
        ConversationPool(model.loaded, 1 << 30, 8),
        [model.loaded.images.prepare(random_image(4, (126, 126)))],
    )

    def stream(conversation: Conversation | None, words: str, settings: tuple[int | None, str]) -> AnswerStream:
        messages: Any = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": words}]}]
        conversation = conversation or pool.lease(images, model.loaded.prompts.ids(messages, images))
        options = Options(6, ignore_eos=True, logprobs=True)
        return conversation.stream_messages(messages, Settings(settings[0], options, settings[1]), resume=True)

    asked = [("red?", first), ("what is the shape?", second), ("how many?", first)]
    streams = []
    for words, settings in asked:
        streams.append(stream(None, words, settings))
        streams[-1].step()
    answers = [each.read() for each in streams]
    assert pool.misses == 3, "each has a conversation of its own"
    for (words, settings), answer in zip(asked, answers, strict=True):
        alone = stream(Conversation(model.loaded, tuple(images)), words, settings).read()
        same(answer, alone)
        assert answer.stats.kv_slots == alone.stats.kv_slots
    if first == second and first[1] != DUAL:  # whose caches have shrunk by then
        assert all(answer.stats.reused_image for answer in answers[1:])
        assert answers[1].stats.reused_layers == answers[2].stats.reused_layers > 0


@pytest.mark.sampled
@pytest.mark.parametrize("settings", [SETTINGS[:2], SETTINGS[1::-1], SETTINGS[2:4], SETTINGS[:1] + SETTINGS[4:]])
def test_a_prefix_that_is_held_in_two_ways_is_shared_in_both(
    settings: list[tuple[int | None, str]], model: Model
) -> None:
    """With all image tokens, and after some have left, by earlier questions of the conversation that has it."""
    images, options = (
        (model.loaded.images.prepare(random_image(6, (126, 126))),),
        Options(4, ignore_eos=True, logprobs=True),
    )
    held = Conversation(model.loaded, images)
    for k, reduce in settings:
        held.ask("red?", k, options, reduce=reduce)
    for k, reduce in [*settings, (5, "none"), (None, "none")]:
        shared = Conversation(model.loaded, images)
        shared.share_prefix(held)
        alone = Conversation(model.loaded, images)
        for words in ("what is it?", "how many?"):
            same(shared.ask(words, k, options, reduce=reduce), alone.ask(words, k, options, reduce=reduce))


@pytest.mark.sampled
@pytest.mark.covering(2)
@pytest.mark.parametrize("settings", [(None, "none"), (3, "none"), (3, "random:keep=5"), (None, "fastv:k=3")])
@pytest.mark.parametrize("fails", [False, True])
def test_the_ends_of_prompts_about_one_picture_run_in_one_pass(
    settings: tuple[int | None, str], fails: bool, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a token of an answer that runs. Where the question decides what stays, or the pass fails, each by itself.

    So on onnxruntime, which takes one token of each.
    """
    batching = Batching(model, 8, 16)
    assert batching.joins_prompts
    images = [model.loaded.images.prepare(random_image(4, (126, 126)))]
    pool, options = ConversationPool(model.loaded, 1 << 30, 8), Options(6, ignore_eos=True, logprobs=True)

    def stream(conversation: Conversation | None, words: str) -> AnswerStream:
        messages: Any = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": words}]}]
        conversation = conversation or pool.lease(images, model.loaded.prompts.ids(messages, images))
        return conversation.stream_messages(messages, Settings(settings[0], options, settings[1]), resume=True)

    asked = ["red?", "what is the shape?", "how many are there?", "blue?"]
    alone = [stream(Conversation(model.loaded, tuple(images)), words).read() for words in asked]
    streams = []
    for words in asked:
        streams.append(stream(None, words))
        streams[-1].join_prompts()
        streams[-1].step()
        if words == asked[0]:  # runs whole, and its answer begins
            assert not streams[0].waiting
    waits, one_pass = settings[1] != "fastv:k=3", model.backend.device == "openvino" and not fails
    assert [bool(each.waiting) for each in streams] == [False, *[waits] * 3]
    if fails:
        monkeypatch.setattr(type(model.backend), "append_each", raising)
    batching.decode(streams)
    assert [bool(each.waiting) for each in streams] == [False, *[waits and not one_pass] * 3]
    decoded = not fails and not waits  # they all have their first tokens
    assert (batching.passes, batching.tokens) == ((1, 4) if one_pass or decoded else (0, 0))
    for each, wanted in zip(streams, alone, strict=True):
        answer = each.read()
        same(answer, wanted)
        assert answer.stats.kv_slots == wanted.stats.kv_slots


def raising(*_: Any) -> Any:
    raise DeviceError("out of luck")


def test_a_prompt_whose_end_waits_can_be_cancelled_and_asked_again(model: Model, batching: Batching) -> None:
    conversation, options = model.open(random_image(4, (126, 126))), Options(6, ignore_eos=True, logprobs=True)
    wanted = [conversation.ask(words, 3, options, reduce="none") for words in ("red?", "how many?")]
    cancelled = conversation.stream("how many?", 3, options, reduce="none")
    cancelled.join_prompts()
    cancelled.step()
    assert cancelled.waiting
    cancelled.cancel()
    batching.decode([cancelled, start(model, CASES[0])])
    assert cancelled.answer.stopped == "cancelled"
    for words, answer in zip(("red?", "how many?"), wanted, strict=True):
        same(conversation.ask(words, 3, options, reduce="none"), answer)
