"""The loop of vtx-watch on a tiny model: which frame is asked what, when an answer stands, and what cannot stop it."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image
from tests.support.calling import THINKING, Scripted, calling_bundle
from tests.support.clock import Clock
from tests.support.exported import Models
from tests.support.families.internvl import INTERNVL
from tests.support.tiny import Tiny, random_image

from vtx.runtime.api import answering
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.seal import PublicKey
from vtx.runtime.errors import ImageError, RequestError
from vtx.runtime.scheduler.engine import Engine
from vtx.runtime.server.delivery import Output
from vtx.tools.watch.config import ReferencePart, SourceConfig, StandingQuestion, WatchConfig, When
from vtx.tools.watch.sources import FrameSource
from vtx.tools.watch.watch import Watcher, capacity, check_questions

WAIT = 60.0
FIRST = StandingQuestion("first", "How many shapes are there?", max_new_tokens=4)


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models(Tiny(context=512), (3,))


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    with Engine("watch", model, capacity(model.loaded, 4)) as engine:
        yield engine


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources read nothing by themselves; tests put their frames."""
    monkeypatch.setattr(FrameSource, "start", lambda source: setattr(source, "state", "open"))


class Told(Output):
    """An output that keeps events."""

    def __init__(self) -> None:
        self.events = list[dict[str, Any]]()
        super().__init__("told", lambda _: None)

    def put(self, line: bytes) -> None:
        self.events.append(json.loads(line))


class Run:
    """A watcher by hand, with a clock that only tests move."""

    def __init__(
        self, engine: Engine, *sources: SourceConfig, parallel: int = 4, others: Sequence[Output] = ()
    ) -> None:
        self.told, self.clock = Told(), Clock()
        self.config = WatchConfig(tuple(sources), status=1e6)
        outputs: list[Output] = [self.told, *others]
        self.watcher = Watcher(engine, self.config, parallel=parallel, clock=self.clock, outputs=lambda _: outputs)

    def put(self, image: Any, name: str = "s") -> None:
        self.watcher.watched[name].newest.put(lambda: image)

    def settle(self) -> list[dict[str, Any]]:
        """Step until nothing is computed; the events since the last time."""
        while True:
            self.watcher.wake.clear()
            self.watcher.step()
            if not any(watched.look for watched in self.watcher.watched.values()):
                break
            assert self.watcher.wake.wait(WAIT)
        self.told.events, events = [], self.told.events
        return events

    def show(self, image: Any, name: str = "s", seconds: float = 1.0) -> list[dict[str, Any]]:
        self.clock.now += seconds
        self.put(image, name)
        return self.settle()


def source(*questions: StandingQuestion, name: str = "s", **more: Any) -> SourceConfig:
    return SourceConfig(name, questions or (FIRST,), folder="/nowhere", **more)


def picture(seed: int) -> Image.Image:
    return random_image(seed, (60, 60))


def count(function: Any) -> tuple[list[None], Callable[..., Any]]:
    calls = list[None]()

    def counted(*given: Any, **named: Any) -> Any:
        calls.append(None)
        return function(*given, **named)

    return calls, counted


def test_each_answer_is_that_of_a_fresh_question_and_a_frame_is_encoded_once(engine: Engine, model: Model) -> None:
    second = StandingQuestion("second", "red?", max_new_tokens=6, k=3)
    run = Run(engine, source(FIRST, second))
    calls, counted = count(type(model.backend).vision)
    with patch.object(type(model.backend), "vision", counted):
        events = [event for seed in range(3) for event in run.show(picture(seed))]
    assert len(calls) == 3
    for number, event in enumerate(events):
        question = (FIRST, second)[event["question"] == "second"]
        with model.open(picture(number // 2)) as image:
            wanted = image.ask(question.ask, question.settings.k, question.settings.options)
        assert (event["event"], event["answer"], event["reused"]) == ("answer", wanted.text, False)
        assert event["frame"] == number // 2 + 1
    assert {event["question"] for event in events[:2]} == {"first", "second"}


def test_of_frames_that_come_while_one_is_asked_about_only_the_newest_is_asked(engine: Engine) -> None:
    run = Run(engine, source())
    run.put(picture(0))
    run.watcher.step()
    for seed in range(1, 101):
        run.put(picture(seed))
        run.watcher.step()
    events = run.settle() + run.settle()
    frames = [event["frame"] for event in events]
    assert frames[0] == 1
    assert frames[-1] == 101
    newest = run.watcher.watched["s"].newest
    assert newest.frames == newest.dropped + len(frames)


def test_schedules_by_time_by_change_and_by_another_answer(engine: Engine) -> None:
    every = StandingQuestion("every", "red?", every=10.0, max_new_tokens=2)
    change = StandingQuestion("change", "blue?", changed=0.3, max_new_tokens=2)
    after = StandingQuestion("after", "where?", when=When("change", contains=""), max_new_tokens=2)
    never = StandingQuestion("never", "where?", when=When("change", equals="no such answer"), max_new_tokens=2)
    run = Run(engine, source(every, change, after, never))
    white, grey = Image.new("RGB", (64, 64), "white"), Image.new("RGB", (64, 64), (200, 200, 200))
    spot = white.copy()
    spot.paste((0, 0, 0), (30, 30, 32, 32))  # 2x2 of 64x64 pixels

    def asked(image: Image.Image, seconds: float) -> set[str]:
        return {event["question"] for event in run.show(image, seconds=seconds)}

    assert asked(white, 0) == {"every", "change", "after"}
    assert asked(white, 5) == set()
    assert asked(grey, 1) == set()  # by 0.22
    assert asked(spot, 1) == {"change", "after"}
    assert asked(spot, 2) == set()
    assert asked(white, 1) == {"every", "change", "after"}
    assert asked(white.resize((32, 32)), 1) == {"change", "after"}, "a camera that changes its size"


def test_a_rate_bounds_the_frames_that_are_looked_at(engine: Engine) -> None:
    run = Run(engine, source(rate=2))
    asked = sum(len(run.show(picture(seed), seconds=0.125)) for seed in range(16))
    assert asked == 4


def test_an_equal_frame_is_not_run_and_its_answers_stand(engine: Engine, model: Model) -> None:
    run = Run(engine, source(FIRST, StandingQuestion("second", "red?", max_new_tokens=3)))
    first = {event["question"]: event for event in run.show(picture(1))}
    almost = np.array(picture(1))
    almost[0, 0, 0] ^= 1
    with (
        patch.object(type(model.backend), "vision", side_effect=AssertionError),
        patch.object(Engine, "job", side_effect=AssertionError),
    ):
        again = {event["question"]: event for event in run.show(picture(1).copy())}
    assert run.watcher.reused == 2
    for name, event in again.items():
        assert (event["reused"], event["answer"], event["frame"]) == (True, first[name]["answer"], 2)
        assert "change" not in event
    assert [event["reused"] for event in run.show(Image.fromarray(almost))] == [False, False]
    assert [event["reused"] for event in run.show(picture(1))] == [False, False], "only the last answer stands"


def test_reuse_can_be_switched_off(engine: Engine) -> None:
    run = Run(engine, source(reuse="none"))
    assert [run.show(picture(1))[0]["reused"] for _ in range(2)] == [False, False]


def test_near_frames_are_reused_by_choice_and_slow_drift_is_not(engine: Engine) -> None:
    run = Run(engine, source(reuse="near", near=0.05))
    shades = [Image.new("RGB", (64, 64), (level,) * 3) for level in range(100, 160, 5)]  # 0.0196 each
    events = [event for shade in shades for event in run.show(shade)]
    assert [event["reused"] for event in events] == [False, True, True] * 4
    assert events[2]["change"] == pytest.approx(10 / 255, abs=1e-3)
    assert events[1]["answer"] == events[0]["answer"]


def test_answers_stand_while_no_image_token_of_the_answered_frame_has_moved_by_more_and_the_decoder_is_spared(
    engine: Engine, model: Model
) -> None:
    frames = [Image.blend(picture(1), picture(2), part) for part in np.linspace(0, 1, 12)]
    seen = [model.loaded.images.prepare(frame).encode(model.backend).hidden for frame in frames]

    def moved(now: np.ndarray, before: np.ndarray) -> float:
        return max(1 - float(a @ b) / float(np.sqrt(a @ a) * np.sqrt(b @ b)) for a, b in zip(now, before, strict=True))

    threshold = 1.5 * float(np.median([moved(a, b) for b, a in pairwise(seen)]))
    run = Run(engine, source(FIRST, StandingQuestion("second", "red?"), reuse="embedding", moved=threshold))
    runs, encoding = count(type(model.backend).vision)
    asked, answering = count(Conversation.stream_messages)
    last, answers, fresh = None, dict[str, str](), 0
    with (
        patch.object(type(model.backend), "vision", encoding),
        patch.object(Conversation, "stream_messages", answering),
    ):
        for number, frame in enumerate(frames):
            events = run.show(frame)
            stands = last is not None and moved(seen[number], seen[last]) <= threshold
            assert [event["reused"] for event in events] == [stands, stands]
            assert len(runs) == number + 1, "the tower runs once a frame"
            for event in events if stands else ():
                assert event["moved"] == pytest.approx(moved(seen[number], seen[last or 0]), abs=1e-3)
                assert event["answer"] == answers[event["question"]]
            if not stands:
                last, fresh = number, fresh + 1
                answers = {event["question"]: event["answer"] for event in events}
        assert len(asked) == 2 * fresh
    assert 2 <= fresh <= len(frames) - 2
    assert run.watcher.reused == 2 * (len(frames) - fresh)
    with model.open(frames[last or 0]) as image:
        assert answers["first"] == image.ask(FIRST.ask, options=FIRST.settings.options).text


def test_a_frame_of_another_number_of_image_tokens_is_asked_about_and_equal_ones_run_nothing(
    models: Models,
) -> None:
    tiled = models(INTERNVL)
    with Engine("watch", tiled, capacity(tiled.loaded, 4)) as engine:
        run = Run(engine, source(reuse="embedding", moved=2))
        shown = [run.show(random_image(1, size)) for size in ((60, 60), (60, 60), (160, 60), (60, 60))]
    assert [event["reused"] for (event,) in shown] == [False, True, False, False]
    assert "moved" not in shown[1][0]


def test_a_source_has_a_limit_of_tokens(models: Models) -> None:
    tiled = models(INTERNVL)
    wide = random_image(1, (160, 60))
    with Engine("watch", tiled, capacity(tiled.loaded, 4)) as engine:
        counts = []
        for limit in (None, 16):
            run = Run(engine, source(image_tokens=limit))
            [event] = run.show(wide)
            counts.append(run.watcher.watched["s"].asked[-1].tokens)
            with tiled.open(wide, image_tokens=limit) as image:
                assert event["answer"] == image.ask(FIRST.ask, options=FIRST.settings.options).text
        assert counts[1] <= 16 < counts[0]
    plain = models()
    refused = pytest.raises(RequestError, match="source s: image_tokens has no effect")
    with Engine("watch", plain, capacity(plain.loaded, 4)) as engine, refused:
        Run(engine, source(image_tokens=16))


def test_only_changes_are_told_where_that_is_asked_for(engine: Engine, model: Model) -> None:
    run = Run(engine, source(replace(FIRST, report="changes"), reuse="none"))
    texts = list[str]()
    for seed in (1, 1, 2, 2, 1):
        with model.open(picture(seed)) as image:
            texts.append(image.ask(FIRST.ask, options=FIRST.settings.options).text)
    changes = [text for before, text in zip([None, *texts], texts, strict=False) if text != before]
    assert [event["answer"] for seed in (1, 1, 2, 2, 1) for event in run.show(picture(seed))] == changes


def test_forms_of_answers_reach_the_event(engine: Engine) -> None:
    pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
    choice = StandingQuestion("choice", "red?", choices=("yes", "no"))
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = StandingQuestion("form", "how many?", schema=schema)
    after = StandingQuestion("after", "where?", when=When("choice", contains=""), max_new_tokens=2)
    events = {event["question"]: event for event in Run(engine, source(choice, form, after)).show(picture(3))}
    assert events["choice"]["answer"] in ("yes", "no")
    assert 0.5 <= events["choice"]["probability"] <= 1
    assert events["form"]["json"]["n"] in (1, 2)
    assert set(events) == {"choice", "form", "after"}


def test_a_broken_frame_is_counted_and_the_next_is_asked(engine: Engine) -> None:
    def broken() -> Any:
        raise ImageError("cut off")

    run = Run(engine, source())
    run.watcher.watched["s"].newest.put(broken)
    assert run.settle() == []
    assert run.show(b"not a picture") == []
    assert run.watcher.watched["s"].source.corrupt == 2
    assert len(run.show(picture(1))) == 1
    assert not run.watcher.watched["s"].source.error, "that of an earlier frame"


def test_a_question_that_fails_says_so_and_stops_nothing(engine: Engine) -> None:
    long = StandingQuestion("long", "red " * 600)
    with pytest.raises(RequestError, match="source s, question long: "):
        Run(engine, source(long, FIRST))
    run = Run(engine, source(StandingQuestion("late", "red?", timeout=1e-6), FIRST))
    for _ in range(2):
        events = {event["question"]: event for event in run.show(picture(1))}
        assert events["late"]["stopped"] == "timeout"
        assert not events["late"]["reused"], "what was cut off stands for nothing"
        assert events["first"]["stopped"] in ("end", "length")
    with patch.object(Engine, "job", side_effect=RequestError("no room")):
        assert [event["event"] for event in run.show(picture(2))] == ["error", "error"]
        assert run.show(picture(4)) == [], "the same error is told once"
    assert run.watcher.errors == 4
    assert [event["reused"] for event in run.show(picture(1))] == [False, False], "what stood before the error is gone"


def test_a_source_that_is_a_thousand_times_as_fast_as_the_model_costs_its_newest_frame_alone(
    engine: Engine, model: Model
) -> None:
    run = Run(engine, source())
    busy, free, vision = threading.Event(), threading.Event(), type(model.backend).vision
    reads, frames = list[int](), list[weakref.ref[Image.Image]]()

    def held(*given: Any, **named: Any) -> Any:
        busy.set()
        assert free.wait(WAIT)
        return vision(*given, **named)

    def show(number: int) -> None:
        image = picture(number)
        frames.append(weakref.ref(image))

        def read() -> Image.Image:
            reads.append(number)
            return image

        run.watcher.watched["s"].newest.put(read)
        run.watcher.step()

    with patch.object(type(model.backend), "vision", held):
        show(0)
        assert busy.wait(WAIT)
        for number in range(1, 1001):
            show(number)
        gc.collect()
        assert sum(frame() is not None for frame in frames) <= 2, "the one that is asked about, and the newest"
        free.set()
        events = run.settle()
    assert [event["frame"] for event in events] == [1, 1001]
    assert reads == [0, 1000], "the others were never prepared"
    newest = run.watcher.watched["s"].newest
    assert (newest.frames, newest.dropped) == (1001, 999)


def test_a_webhook_that_hangs_and_a_disk_that_is_full_hold_up_no_answer(engine: Engine) -> None:
    hanging, free = threading.Event(), threading.Event()

    def hang(_: bytes) -> None:
        hanging.set()
        free.wait(WAIT)

    def full(_: bytes) -> None:
        raise OSError(28, "No space left on device")

    hook, disk = Output("hook", hang, most=2), Output("disk", full)
    run = Run(engine, source(reuse="none"), others=(hook, disk))
    assert len(run.show(picture(0))) == 1
    assert hanging.wait(WAIT)
    for number in range(1, 10):
        assert len(run.show(picture(number))) == 1, "answers go on"
    free.set()
    hook.close(WAIT)
    disk.close(WAIT)
    assert (hook.sent, hook.dropped) == (3, 7)
    assert (disk.sent, disk.failed, disk.dropped) == (0, 10, 0)


def test_fifty_sources_take_turns_on_one_model(engine: Engine) -> None:
    short = replace(FIRST, max_new_tokens=1)
    run = Run(engine, *(source(short, name=f"s{number}") for number in range(50)), parallel=4)
    asked = list[str]()
    for round_ in range(3):
        for number in range(50):
            run.put(picture(round_), f"s{number}")  # each is a hundred times as fast as the model
        run.watcher.step()
    while len(asked) < 100:
        for number in range(50):
            run.put(picture(len(asked)), f"s{number}")
        asked += [event["source"] for event in run.told.events if event["event"] == "answer"]
        run.told.events = []
        run.watcher.step()
        run.watcher.wake.wait(0.01)
    assert len(set(asked[:54])) == 50, "five are asked about at once, and end in any order"
    assert max(asked.count(name) for name in set(asked)) <= 3
    looks = sum(watched.look is not None for watched in run.watcher.watched.values())
    assert looks <= 5, "frames are prepared when the model has time for them"
    run.watcher.close()


def test_a_new_configuration_is_taken_over_while_sources_go_on_and_a_wrong_one_changes_nothing(engine: Engine) -> None:
    run = Run(engine, source(name="a"), source(name="b"))
    run.show(picture(1), "a")
    reader = run.watcher.watched["a"].source

    def wrong() -> WatchConfig:
        raise RequestError("watch.toml is not TOML")

    run.watcher.reload(wrong)
    assert [(e["event"], e["state"], e["error"]) for e in run.settle()] == [
        ("config", "refused", "watch.toml is not TOML")
    ]
    more = StandingQuestion("more", "red?", max_new_tokens=2)
    changed = WatchConfig((source(FIRST, more, name="a"), source(name="c")), status=1e6)
    run.watcher.reload(lambda: changed)
    assert [event["state"] for event in run.settle()] == ["reloaded"]
    assert run.watcher.watched.keys() == {"a", "c"}
    assert run.watcher.watched["a"].source is reader
    events = {event["question"]: event["reused"] for event in run.show(picture(1), "a")}
    assert events == {"first": True, "more": False}


def test_a_camera_that_gives_no_frames_is_told_once(engine: Engine) -> None:
    run = Run(engine, SourceConfig("s", (FIRST,), stream="rtsp://camera/", silent_after=5))
    run.show(picture(1))
    run.clock.now += 6
    told = [(event["state"], event["silent_s"]) for _ in range(3) for event in run.settle()]
    assert told == [("silent", 6.0)]
    assert [event.get("state") for event in run.show(picture(2), seconds=0.5)] == ["open", None]


def test_the_status_counts_frames_and_outputs(engine: Engine) -> None:
    run = Run(engine, source())
    run.show(picture(1))
    run.clock.now += 2e6
    (status,) = run.settle()
    assert status["sources"]["s"] == {"state": "open", "frames": 1, "dropped": 0, "corrupt": 0}
    assert (status["answers"], status["reused"], status["errors"]) == (1, 0, 0)
    assert [output["output"] for output in status["outputs"]] == ["told"]


def test_it_ends_with_its_sources(engine: Engine) -> None:
    run = Run(engine, source())
    run.put(picture(1))
    run.watcher.watched["s"].source.state = "ended"
    alive = list[None]()
    run.watcher.run(lambda: alive.append(None))
    assert alive
    assert [event["event"] for event in run.told.events] == ["answer"]


def test_it_ends_when_nobody_reads_stdout(engine: Engine) -> None:
    run = Run(engine, source())
    run.told.gone = True
    run.watcher.run()


def test_a_wall_clock_that_jumps_changes_only_the_time_that_is_told(engine: Engine) -> None:
    run = Run(engine, source(replace(FIRST, every=10.0)))
    with patch("time.time", lambda: 10.0):
        assert run.show(picture(1))[0]["time"].startswith("1970-01-01T00:00:10")
    with patch("time.time", lambda: 4e9):
        assert run.show(picture(2), seconds=1) == []
    with patch("time.time", lambda: 1.0):
        assert run.show(picture(2), seconds=9.5)[0]["time"].startswith("1970-01-01T00:00:01")


def test_a_frame_takes_over_the_caches_of_the_one_before(engine: Engine, model: Model) -> None:
    run, kept = Run(engine, source(system="Be brief.")), list[int]()
    for seed in range(4):
        (event,) = run.show(picture(seed))
        with model.open(picture(seed), system="Be brief.") as fresh:
            assert event["answer"] == fresh.ask(FIRST.ask, max_new_tokens=4).text
        kept.append(engine.pool.kept_bytes)
    assert max(kept) < 2 * kept[0]  # one conversation


def test_references_stand_before_each_frame_and_their_caches_are_kept_in_a_file(model: Model, tmp_path: Path) -> None:
    picture(50).save(tmp_path / "empty.png")
    given = ReferencePart("This is the empty shelf.", str(tmp_path / "empty.png"))
    watched = source(system="Be brief.", reference=(given,), prefix_file=str(tmp_path / "shelf.safetensors"))
    parts: list[Any] = [
        {"type": "text", "text": given.text}, {"type": "image", "image": picture(50)},
        {"type": "image", "image": picture(1)}, {"type": "text", "text": FIRST.ask},
    ]  # fmt: skip
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    wanted = model.generate(messages, max_new_tokens=4).text
    written = set[int]()
    for _ in range(2):
        with Engine("watch", model, capacity(model.loaded, 4)) as engine:
            (event,) = Run(engine, watched).show(picture(1))
            assert event["answer"] == wanted
            written.add((tmp_path / "shelf.safetensors").stat().st_mtime_ns)
    assert len(written) == 1


def test_a_prefix_file_that_must_be_signed_and_is_not_is_told_by_a_check(
    engine: Engine, model: Model, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    (tmp_path / "shelf").write_bytes(b"x")
    signed = replace(model.bundle, key=PublicKey.load(keys[1]))
    with patch.object(model.loaded, "bundle", signed):
        for name, said in (("shelf", "shelf is not signed, and a signature by"), ("absent", "absent cannot be read")):
            with pytest.raises(RequestError, match=f"source s: {said}"):
                Run(engine, source(system="Be brief.", prefix_file=str(tmp_path / name)))


def test_a_reference_that_is_gone_at_a_reload_changes_nothing(engine: Engine, model: Model, tmp_path: Path) -> None:
    run, absent = Run(engine, source()), ReferencePart(image=str(tmp_path / "absent.png"))
    run.watcher.reload(lambda: WatchConfig((source(reference=(absent,)),), status=1e6))
    (event,) = run.settle()
    assert (event["event"], event["state"]) == ("config", "refused")
    assert "absent.png" in event["error"]
    (event,) = run.show(picture(1))
    assert event["answer"] == model.open(picture(1)).ask(FIRST.ask, max_new_tokens=4).text


def test_an_answer_that_ran_out_of_time_does_not_stand_for_an_equal_frame(engine: Engine, model: Model) -> None:
    run, now = Run(engine, source()), iter(range(0, 10_000, 100))
    with patch("vtx.runtime.api.turns.monotonic", lambda: float(next(now))):
        (event,) = run.show(picture(1))
    assert event["stopped"] == "timeout"
    (event,) = run.show(picture(1))
    assert (event["reused"], event["stopped"] != "timeout") == (False, True)
    assert event["answer"] == model.open(picture(1)).ask(FIRST.ask, max_new_tokens=4).text


def test_what_is_kept_of_frames_that_are_gone_is_bounded(engine: Engine) -> None:
    run = Run(engine, source())
    kept = [(len(run.show(picture(seed))), engine.images.bytes, engine.pool.kept_bytes) for seed in range(40)]
    assert [asked for asked, _, _ in kept] == [1] * 40
    for number in (1, 2):
        values = [each[number] for each in kept[-20:]]
        assert max(values) == min(values) > 0


def test_thoughts_are_switched_by_question_and_reach_the_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    thinking = replace(FIRST, thinking=True, max_thinking_tokens=3, max_new_tokens=40)
    with pytest.raises(RequestError, match=r"question first: this model's chat template has no switch for thoughts"):
        check_questions(model.loaded, WatchConfig((source(thinking),)))
    with load(calling_bundle(tmp_path, THINKING), device="cpu", threads=1) as thinker:
        check_questions(thinker.loaded, WatchConfig((source(thinking, replace(FIRST, name="second", thinking=False)),)))
        ids: list[int] = thinker.loaded.text.tokenizer.encode("It is.", add_special_tokens=False).ids
        monkeypatch.setattr(answering, "Sampler", lambda *_: Scripted(ids))
        with Engine("watch", thinker, capacity(thinker.loaded, 4)) as engine:
            run = Run(engine, source(thinking, replace(FIRST, name="second", thinking=False)))
            first, second = run.show(picture(1))
    assert (first["question"], first["thought"]) == ("first", thinker.loaded.text.decode(ids[:3]).strip())
    assert second["question"] == "second"
    assert "thought" not in second
