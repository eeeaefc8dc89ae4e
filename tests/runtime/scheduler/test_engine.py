"""Many questions side by side: each answer as alone, an image's work once, an error for its own question."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.bundles import export_with
from tests.support.exported import THREADS, Models
from tests.support.families.llava_next import LLAVA_NEXT
from tests.support.gates import random_gate, write_gates
from tests.support.tiny import Tiny, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.answer import Answer
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options, Settings
from vtx.runtime.api.prompts import opening_parts
from vtx.runtime.errors import ImageError, RequestError
from vtx.runtime.prompt.messages import Message
from vtx.runtime.scheduler.conversations import ConversationPool, NoMemoryError
from vtx.runtime.scheduler.engine import AnswerRequest, Capacity, Engine
from vtx.runtime.scheduler.scheduler import ClosedError, Event
from vtx.runtime.session.sampling import Sampling
from vtx.runtime.session.session import Session
from vtx.runtime.vision.tokens import ImageTokens

FASTV, DIVPRUNE = "fastv:k=3", "divprune:keep=6"
METHODS: list[tuple[Any, str, float]] = [
    (None, "none", 0.0), (3, "none", 0.0), ("auto", "none", 0.0), (5, FASTV, 0.0), (None, DIVPRUNE, 0.0),
    (3, "none", 0.9), (None, FASTV, 1.2),
]  # fmt: skip
LARGE = 99  # the number of the large one
WORDS = ("red?", "how many are there?", "what is the shape?")


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Any, tmp_path_factory: Any) -> Path:
    checkpoint, made = tiny_checkpoint(Tiny(image=126, context=512)), tmp_path_factory.mktemp("engine")
    gates = write_gates(made / "gates.safetensors", {k: random_gate(k) for k in (3, 5)})
    options = ExportOptions(str(checkpoint), (3, 5), "fp32", 256, reductions=(FASTV, DIVPRUNE), gates=gates)
    return export_with(options, made / "bundle").folder


@pytest.fixture(scope="module", params=("cpu", "openvino"))
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[Model]:
    if request.param == "openvino":
        pytest.importorskip("openvino", reason="needs vtx-edge[openvino]")
    with load(folder, device=request.param, threads=THREADS) as model:
        yield model


def asked(model: Model, picture: int, words: str, k: Any, reduce: str, temperature: float) -> AnswerRequest:
    images = (model.loaded.images.prepare(random_image(picture, (126, 126))),)
    messages: list[Message] = [{"role": "user", "content": opening_parts(images, words)}]
    sampling = Sampling(temperature=temperature, seed=7)
    options = Options(12, ignore_eos=True, logprobs=True, sampling=sampling)
    return AnswerRequest.of(model.loaded, images, messages, Settings(k, options, reduce))


def alone(model: Model, request: AnswerRequest) -> Answer:
    return Conversation(model.loaded, request.images).stream_messages(request.messages, request.settings).read()


def test_answers_side_by_side_are_those_of_each_alone_and_an_image_is_encoded_once(model: Model) -> None:
    """At K none, fixed and auto, with reductions before and in the decoder, greedy and drawn."""
    requests = {
        (picture, words, number): asked(model, picture, words, *method)
        for picture in (4, 5) for number, method in enumerate(METHODS) for words in WORDS[:2]
    }  # fmt: skip
    wanted = {tag: alone(model, request) for tag, request in requests.items()}
    encoded: list[Any] = []
    original = type(model.backend).vision

    def vision(self: Any, *given: Any) -> ImageTokens:
        encoded.append(given)
        return original(self, *given)

    with (
        patch.object(type(model.backend), "vision", vision),
        Engine("test", model, Capacity(8, 8, kept=8)) as engine,
        closing(engine.answers((tag, [request]) for tag, request in requests.items())) as answers,
    ):
        found = dict(answers)
        assert engine.batching.obstacle is None
        assert engine.batching.tokens > 2 * engine.batching.passes
    assert found.keys() == wanted.keys()
    for tag, given in found.items():
        assert isinstance(given, list)
        (answer,) = given
        assert answer.token_ids == wanted[tag].token_ids, tag
        assert answer.logprobs == pytest.approx(wanted[tag].logprobs, abs=1e-4)
        assert (answer.text, answer.stats.kv_slots) == (wanted[tag].text, wanted[tag].stats.kv_slots)
    assert len(encoded) == 2


def test_what_is_wrong_with_a_question_stops_no_other_one(model: Model) -> None:
    """Known before it is asked, or only then; of a question that is asked several times, once."""
    good = asked(model, 4, "red?", 3, "none", 0.0)
    wrong = AnswerRequest(good.images, good.messages, good.ids, Settings(4, reduce="none"))
    requests = [("a", [good]), ("b", ImageError("broken")), ("c", [good, wrong, good]), ("d", [good, good])]
    with Engine("test", model, Capacity(8, 8)) as engine, closing(engine.answers(requests)) as answers:
        found: dict[str, Any] = dict(answers)
    wanted = alone(model, good)
    assert [one.token_ids for one in (*found["a"], *found["d"])] == [wanted.token_ids] * 3
    assert str(found["b"]) == "broken"
    assert "K = 4" in str(found["c"])


def test_questions_are_read_as_they_are_needed_and_no_more_are_held(model: Model) -> None:
    read, given = [0], 0
    good = asked(model, 4, "red?", 3, "none", 0.0)

    def requests() -> Iterator[tuple[int, list[AnswerRequest]]]:
        for number in range(40):
            assert number - given <= 3 + 2
            read[0] = number
            yield number, [good]

    with Engine("test", model, Capacity(3, 3, kept=2)) as engine, closing(engine.answers(requests())) as answers:
        for _ in answers:
            given += 1
        kept = engine.pool.kept_bytes
    assert (given, read[0]) == (40, 39)
    assert kept <= 2 * 2 * alone_bytes(model, good)


def alone_bytes(model: Model, request: AnswerRequest) -> int:
    conversation = Conversation(model.loaded, request.images)
    conversation.stream_messages(request.messages, request.settings).read()
    return conversation.cache_bytes


@pytest.mark.parametrize("k", [None, 3])
def test_answers_wait_for_room_for_their_k_and_v(k: int | None, model: Model) -> None:
    """With room for one conversation at a time they are computed in turn; at K = 3 there is room for several."""
    good, running = asked(model, 4, "red?", k, "none", 0.0), []
    room = int(1.5 * alone_bytes(model, asked(model, 4, "red?", None, "none", 0.0)))

    def watch(*_: Any) -> None:
        running.append(engine.scheduler.active)

    with Engine("test", model, Capacity(4, 4, kept=0, kv=room)) as engine:
        found = [*engine.answers(((n, [good]) for n in range(4)), watch)]
    assert (max(running) > 1) == (k == 3)
    assert {one.token_ids for _, given in found if isinstance(given, list) for one in given} == {
        alone(model, good).token_ids
    }


@pytest.mark.parametrize("k", [3, 5])
def test_an_answer_reserves_as_much_less_at_k_as_its_caches_lack(k: int, model: Model) -> None:
    requests = [asked(model, 4, "red?", depth, "none", 0.0) for depth in (None, k)]
    whole, less = (sum(alone(model, request).stats.kv_slots) for request in requests)
    with Engine("test", model, Capacity(1, 1, kept=0)) as engine, patch.object(engine.pool, "fits") as fits:
        for request in requests:
            engine.job(request, lambda _: None).fits()
        reserved = [call.args[0] for call in fits.call_args_list]
    assert reserved[0] - reserved[1] == model.backend.kv_slot_bytes * (whole - less)


def test_pictures_that_take_the_memory_of_ten_are_computed_alone_and_change_no_other_answer(models: Models) -> None:
    """Pictures in tiles among questions that need a tenth of their K and V, with room for just these or just them."""
    tiled = models(LLAVA_NEXT)
    settings = Settings(None, Options(6, ignore_eos=True), "none")

    def of(words: str, *pictures: Any) -> AnswerRequest:
        images = tiled.loaded.images.prepare_all(pictures)
        messages: list[Message] = [{"role": "user", "content": opening_parts(images, words)}]
        return AnswerRequest.of(tiled.loaded, images, messages, settings)

    large = of("red?", *(random_image(n, (300, 150)) for n in range(4)))
    requests = {n: large if n == LARGE else of(f"{n}?") for n in (0, 1, 2, LARGE, 3, 4, 5, 6, 7)}
    wanted = {n: alone(tiled, request) for n, request in requests.items()}
    kv = {n: tiled.backend.kv_slot_bytes * sum(answer.stats.kv_slots) for n, answer in wanted.items()}
    assert kv[LARGE] >= 10 * kv[0]
    running = dict[bool, list[int]]({True: [], False: []})

    def watch(tag: int, _: Any) -> None:
        running[tag == LARGE].append(engine.scheduler.active)

    tokens = settings.options.max_new_tokens * tiled.manifest.model.attending  # of an answer, in all layers
    room = kv[LARGE] + tiled.backend.kv_slot_bytes * tokens + kv[0] // 2
    with Engine("test", tiled, Capacity(8, 8, kept=0, kv=room, image_tokens=0)) as engine:
        found = dict(engine.answers(((n, [request]) for n, request in requests.items()), watch))
        assert engine.pool.fits(room), "no answer holds memory"
    assert {n: given[0].token_ids for n, given in found.items() if isinstance(given, list)} == {
        n: answer.token_ids for n, answer in wanted.items()
    }
    assert max(running[True]) == 1
    assert max(running[False]) > 1


def test_leaving_early_or_a_watcher_that_fails_ends_what_runs(model: Model) -> None:
    good = asked(model, 4, "red?", 3, "none", 0.0)
    with Engine("test", model, Capacity(4, 4)) as engine:
        with closing(engine.answers((n, [good]) for n in range(9))) as answers:
            next(answers)
        found = dict(engine.answers([("a", [good])], lambda *_: 1 / 0))  # type: ignore[arg-type, return-value]
        assert isinstance(found["a"], ZeroDivisionError)
        assert isinstance(dict(engine.answers([("b", [good])]))["b"], list)
    with pytest.raises(ClosedError):
        [*engine.answers([("c", [good])])]


def test_a_prompt_that_others_decode_beside_answers_as_alone(model: Model) -> None:
    """Between any two chunks of its prompt, whatever they took, the other answers have a token."""
    requests = [asked(model, 4 + n % 3, WORDS[n % 3], *METHODS[n % len(METHODS)]) for n in range(14)]
    clock = iter(range(10**9)).__next__  # a second between any two looks: each chunk takes long
    begun, inside = [0], [0]  # prompts so far, and the tokens of other answers within them
    first = dict[int, int]()
    with Engine("test", model, Capacity(6, 6, kept=3), clock=clock) as engine:
        lease = engine.pool.lease

        def leasing(*given: Any, **named: Any) -> Conversation:
            begun[0] += 1
            return lease(*given, **named)

        def watch(tag: int, _: Any) -> None:
            first.setdefault(tag, begun[0])
            inside[0] += begun[0] > len(first)  # one of those that have begun has no event yet

        with patch.object(engine.pool, "lease", leasing):
            found = dict(engine.answers(((n, [request]) for n, request in enumerate(requests)), watch))
    assert inside[0] > len(requests), "other answers went on within prompts"
    for number, request in enumerate(requests):
        (answer,) = found[number]  # type: ignore[misc]
        wanted = alone(model, request)
        assert answer.token_ids == wanted.token_ids
        assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


def test_a_pool_counts_what_is_in_use_and_what_it_will_come_to(model: Model) -> None:
    good = asked(model, 4, "red?", None, "none", 0.0)
    conversation = Conversation(model.loaded, good.images)
    conversation.stream_messages(good.messages, good.settings).read()
    kv, whole, empty = (
        conversation.kv_bytes,
        conversation.cache_bytes,
        Conversation(model.loaded, good.images).cache_bytes,
    )
    pool = ConversationPool(model.loaded, 3 * whole, 4)
    assert (pool.fits(3 * whole), pool.fits(3 * whole + 1)) == (True, False)
    leased = [pool.lease(good.images, good.ids, needed=kv) for _ in range(2)]
    room = 3 * whole - 2 * (empty + kv)
    assert (pool.fits(room), pool.fits(room + 1)) == (True, False), "before they have run"
    for each in leased:
        each.stream_messages(good.messages, good.settings).read()
    assert (pool.fits(whole), pool.fits(whole + 1)) == (True, False)
    for each in leased:
        pool.give_back(each, keep=False)
    assert pool.fits(3 * whole)


def test_threads_that_ask_at_once_get_the_answers_of_each_alone(model: Model) -> None:
    """As VLMEvalKit asks: a call a message, from several threads."""
    pictures = [random_image(number, (126, 126)) for number in (4, 5)]
    asked = [
        ([{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": words}]}], k)
        for picture in pictures for words in WORDS for k in (None, 3)
    ]  # fmt: skip
    options = Options(6, ignore_eos=True)
    alone = [model.generate(messages, k, options, reduce="none").token_ids for messages, k in asked]
    with Engine("test", model, Capacity(4, 4, kept=4)) as engine, ThreadPoolExecutor(4) as threads:

        def ask(one: tuple[Any, Any]) -> Answer:
            return engine.ask(AnswerRequest.of_chat(model.loaded, one[0], Settings(one[1], options, "none")))

        assert [answer.token_ids for answer in threads.map(ask, asked)] == alone
        with pytest.raises(RequestError, match="K = 4 was not prebuilt"):
            ask((asked[0][0], 4))


def test_a_request_waits_while_the_machine_has_no_memory_for_its_k_and_v(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept conversations leave for it; what those in use may yet take is not free."""
    good, pool = asked(model, 4, "red?", None, "none", 0.0), ConversationPool(model.loaded, 1 << 40, 8)
    kept, free = pool.lease(good.images, good.ids), 1000
    kept.stream_messages(good.messages, good.settings).read()
    pool.give_back(kept)
    assert pool.kept_bytes
    monkeypatch.setattr(
        "vtx.runtime.scheduler.conversations.available_memory", lambda: free if pool.kept_bytes else 2 * free
    )
    assert pool.fits(1000)
    assert pool.kept_bytes, "there was room beside it"
    assert (pool.fits(2000), pool.fits(2001)) == (True, False)
    assert not pool.kept_bytes
    pool.lease(good.images, good.ids, needed=500)
    assert (pool.fits(1500), pool.fits(1501)) == (True, False)
    with pytest.raises(NoMemoryError, match=r"need 2.5 kB, 2 kB of memory are free"):
        pool.lease(good.images, good.ids, needed=2500)


def test_the_first_token_of_a_prompt_does_not_wait_for_a_pass_of_others(model: Model) -> None:
    order, running = list[str](), threading.Event()

    def watch(name: str, _: Event) -> None:
        order.append(name)
        running.set()

    def questions() -> Iterator[tuple[str, list[AnswerRequest]]]:
        for number, name in enumerate(("running", "late")):
            request = asked(model, number, "red?", None, "none", 0.0)
            yield name, [replace(request, settings=Settings(None, Options(40, ignore_eos=True), "none"))]
            assert running.wait(60)

    def finish(session: Session, **named: Any) -> Any:
        order.append("prompt")
        return finished(session, **named)

    finished = Session.finish
    with Engine("test", model, Capacity(parallel=2)) as engine, patch.object(Session, "finish", finish):
        for _, found in engine.answers(questions(), watch):
            assert not isinstance(found, Exception)
    last = len(order) - 1 - order[::-1].index("prompt")
    assert order[last : last + 2] == ["prompt", "late"]
    assert order[last + 2 :].count("running") > 1, "the other one still ran"
