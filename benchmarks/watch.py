"""What does vtx-watch find in a film of drawn shapes, when, and what does reuse between frames save and cost?

Two standing questions are asked about every frame, in ways that take turns frame by frame: a new conversation a frame,
the watcher without reuse, with reuse of equal frames, of near ones by their pictures or by their image tokens, and only
after a change. `--live` shows a film at its own rate instead, so that frames are dropped, and measures the time from a
frame to its event; `--memory` feeds many frames and reads the size of the process. SIGINT ends early, with the figures
so far.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from common import bundle_parser, report
from film import QUESTIONS, Shot, film, judge
from PIL import Image

import vtx
from vtx.runtime.api.model import Model
from vtx.runtime.scheduler.engine import Engine
from vtx.tools.watch.config import ReferencePart, SourceConfig, StandingQuestion, WatchConfig
from vtx.tools.watch.outputs import Output
from vtx.tools.watch.watch import Watcher, capacity

NEAR = 0.06  # about twice what a noise of 3 of 255 changes in these small pictures
MOVED = 0.1  # a noise of 3 of 255 moves image tokens of the demo by 0.0001, a shape that comes or goes by 0.6 and more
ANSWER = 4  # tokens
WAYS: dict[str, dict[str, Any]] = {
    "without reuse": {"reuse": "none"},
    "equal": {"reuse": "equal"},
    "near": {"reuse": "near", "near": NEAR},
    "embedding": {"reuse": "embedding", "moved": MOVED},
    "changed": {"reuse": "equal", "changed": NEAR},
}
MIB = 1 << 20
ending = threading.Event()


class Kept(Output):
    """Keeps the answers of a watcher, with the time that each took."""

    def __init__(self) -> None:
        self.events = list[dict[str, Any]]()
        super().__init__("kept", lambda _: None)

    def put(self, line: bytes) -> None:
        event = json.loads(line)
        if event["event"] == "answer":
            self.events.append(event)
        elif event["event"] == "error":
            raise SystemExit(event["error"])


class Watching:
    """A watcher over one source whose frames are put by hand."""

    def __init__(
        self, model: Model, *, reuse: str, near: float | None = None, moved: float | None = None,
        changed: float | None = None, reference: Image.Image | None = None,
    ) -> None:  # fmt: skip
        self.kept, self._closing = Kept(), ExitStack()
        folder = self._closing.enter_context(tempfile.TemporaryDirectory())
        before = list[ReferencePart]()
        if reference is not None:
            reference.save(path := f"{folder}/reference.png")
            before.append(ReferencePart(image=path))
        questions = tuple(
            StandingQuestion(name, text, changed=changed, max_new_tokens=ANSWER, timeout=1e6)
            for name, text in QUESTIONS.items()
        )
        source = SourceConfig(
            "film", questions, folder=folder, reference=tuple(before), reuse=reuse, near=near, moved=moved,  # type: ignore[arg-type]
        )  # fmt: skip
        engine = self._closing.enter_context(Engine("watch", model, capacity(model.loaded, 4)))
        self.watcher = Watcher(engine, WatchConfig((source,), status=1e6), outputs=lambda _: [self.kept])
        self._closing.callback(self.watcher.close)

    def put(self, shot: Shot) -> None:
        self.watcher.watched["film"].newest.put(lambda: shot.image)

    def settle(self) -> list[dict[str, Any]]:
        """Work until nothing is computed; the answers since the last time."""
        while True:
            self.watcher.wake.clear()
            self.watcher.step()
            if self.watcher.watched["film"].look is None:
                break
            self.watcher.wake.wait()
        self.kept.events, events = [], self.kept.events
        return events

    def close(self) -> None:
        self._closing.close()


def quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else 0.0


def compared(args: argparse.Namespace) -> tuple[dict[str, Any], list[list[str]]]:
    """Every frame asked in each way in turn; the answers that are reused exactly compared with fresh ones."""
    texts: dict[str, list[tuple[int, str, str, bool]]] = {name: [] for name in ("fresh", *WAYS)}
    spent = dict.fromkeys(texts, 0.0)
    computed: dict[str, list[float]] = {name: [] for name in texts}  # ms of processor time from a frame to its events
    truths, different = list[dict[str, str]](), 0
    with ExitStack() as held:
        models = {
            name: held.enter_context(vtx.load(args.bundle, device=args.device, threads=args.threads)) for name in texts
        }
        first = next(film(args.seconds, args.rate, args.seed, args.noise)).image if args.reference else None
        references = [] if first is None else [first]
        ways = {name: Watching(models[name], **WAYS[name], reference=first) for name in WAYS}
        for way in ways.values():
            held.callback(way.close)
        for shot in film(args.seconds, args.rate, args.seed, args.noise):
            truths.append(shot.truth)
            before, fresh = time.process_time(), dict[str, str]()
            with models["fresh"].open([*references, shot.image]) as image:
                for name, question in QUESTIONS.items():
                    fresh[name] = image.ask(question, max_new_tokens=ANSWER).text
            spent["fresh"] += (took := time.process_time() - before)
            computed["fresh"].append(1000 * took)
            texts["fresh"] += [(shot.number, name, text, False) for name, text in fresh.items()]
            for name, way in ways.items():
                before = time.process_time()
                way.put(shot)
                events = way.settle()
                spent[name] += (took := time.process_time() - before)
                if any(not event["reused"] for event in events):
                    computed[name].append(1000 * took)
                for event in events:
                    texts[name].append((shot.number, event["question"], event["answer"], event["reused"]))
                    if name in ("without reuse", "equal") and event["answer"] != fresh[event["question"]]:
                        different += 1
                        with models["fresh"].open([*references, shot.image]) as image:
                            again = {n: image.ask(q, max_new_tokens=ANSWER).text for n, q in QUESTIONS.items()}
                        told = f"frame {shot.number} differs: {name}, {event}, fresh {fresh}, again {again}"
                        print(told, file=sys.stderr, flush=True)
            if ending.is_set():
                break
            if shot.number % 1000 == 0:
                print(f"{shot.number} frames, {different} answers differ", file=sys.stderr, flush=True)
    rows, figures = [HEAD], dict[str, Any]()
    for name, given in texts.items():
        result = judge(truths, given, args.rate)
        minute = spent[name] * 60 * args.rate / len(truths)
        figures[name] = {**vars(result), "seconds_a_minute": minute, "computed_ms": computed[name]}
        changes = f"{result.found} of {result.found + result.missed}"
        rows.append([
            name, f"{minute:.1f}", f"{spent['fresh'] / spent[name]:.1f}", f"{result.answers:,}",
            f"{100 * result.reused / result.answers:.1f}%", f"{100 * result.right / result.answers:.1f}%", changes,
            f"{result.false}", f"{quantile(computed[name], 0.5):.1f}", f"{quantile(computed[name], 0.99):.1f}",
        ])  # fmt: skip
    about = {"frames": len(truths), "compared": 2 * 2 * len(truths), "different": different}
    print(f"{len(truths):,} frames; of {about['compared']:,} answers compared with fresh ones {different} differ")
    return {**about, "ways": figures}, rows


HEAD = [
    "mode", "CPU s per minute", "speed-up", "answers", "reused", "right", "changes found", "false",
    "frame to events p50, ms", "p99, ms",
]  # fmt: skip


def live(args: argparse.Namespace) -> tuple[dict[str, Any], list[list[str]]]:
    """The film at its own rate, in each way for itself: frames are dropped, and time passes."""
    rows = [["mode", "frames", "dropped", "answers", "changes found", "false", "latency p50, ms", "p99, ms", "busy"]]
    figures = dict[str, Any]()
    shots = list(film(args.seconds, args.rate, args.seed, args.noise))
    for name, way in WAYS.items():
        with vtx.load(args.bundle, device=args.device, threads=args.threads) as model:
            watching, ended = Watching(model, **way), threading.Event()

            def play(watching: Watching = watching, ended: threading.Event = ended) -> None:
                begun = time.monotonic()
                for shot in shots:
                    time.sleep(max(0.0, begun + shot.seconds - time.monotonic()))
                    watching.put(shot)
                ended.set()

            watching.put(shots[0])
            watching.settle()  # the first answer warms up
            frames, busy = watching.watcher.watched["film"].newest.frames, time.process_time()
            threading.Thread(target=play, daemon=True).start()
            while not ended.is_set():
                watching.watcher.wake.wait(watching.watcher.step())
                watching.watcher.wake.clear()
            events = watching.settle()
            busy = time.process_time() - busy
            newest = watching.watcher.watched["film"].newest
            watching.close()
        given = [(e["frame"] - frames - 1, e["question"], e["answer"], e["reused"]) for e in events]
        result = judge([shot.truth for shot in shots], given, args.rate)
        latencies = [event["latency_ms"] for event in events]
        p50, p99 = quantile(latencies, 0.5), quantile(latencies, 0.99)
        figures[name] = {**vars(result), "p50_ms": p50, "p99_ms": p99, "dropped": newest.dropped, "busy_s": busy}
        rows.append([
            name, f"{newest.frames - frames:,}", f"{newest.dropped:,}", f"{result.answers:,}",
            f"{result.found} of {result.found + result.missed}", f"{result.false}", f"{p50:.1f}", f"{p99:.1f}",
            f"{100 * busy / args.seconds:.0f}%",
        ])  # fmt: skip
    return figures, rows


def memory(args: argparse.Namespace) -> tuple[dict[str, Any], list[list[str]]]:
    """The size of the process over many frames, of which each 20th differs from the one before."""
    from vtx.tools.data.scenes import draw, random_scene

    process, curve = psutil.Process(), list[tuple[int, float]]()
    steps = max(1, args.memory // 20)
    with vtx.load(args.bundle, device=args.device, threads=args.threads) as model:
        watching = Watching(model, reuse="equal")
        rng = random.Random(args.seed)
        for number in range(args.memory):
            if number % 20 == 0:
                image = draw(random_scene(rng), 72, rng)
            watching.put(Shot(number, 0.0, image, {}))
            watching.settle()
            if ending.is_set():
                break
            if (number + 1) % steps == 0:
                curve.append((number + 1, process.memory_info().rss / MIB))
                print(f"{number + 1:,} frames: {curve[-1][1]:.0f} MiB", file=sys.stderr, flush=True)
        answers, reused = watching.watcher.answers, watching.watcher.reused
        watching.close()
    rows = [["frames", "MiB"], *([f"{frames:,}", f"{mib:.1f}"] for frames, mib in curve)]
    half = [mib for frames, mib in curve if frames > curve[-1][0] // 2]
    print(f"{answers:,} answers computed, {reused:,} reused; the second half grows by {half[-1] - half[0]:.1f} MiB")
    return {"curve": curve, "answers": answers, "reused": reused, "median": statistics.median(half)}, rows


def main() -> None:
    args = bundle_parser(__doc__ or "")
    args.add_argument("--seconds", type=float, default=60.0, help="of the film")
    args.add_argument("--rate", type=float, default=30.0, help="frames a second")
    args.add_argument("--noise", type=float, default=0.0, help="of the sensor, of 255")
    args.add_argument("--reference", action="store_true", help="the first frame stands before each, to compare with")
    args.add_argument("--live", action="store_true")
    args.add_argument("--memory", type=int, metavar="FRAMES")
    given = args.parse_args()
    signal.signal(signal.SIGINT, lambda *_: threading.Thread(target=ending.set).start())
    figures, rows = memory(given) if given.memory else live(given) if given.live else compared(given)
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    report({"options": options, **figures}, rows, given.json)


if __name__ == "__main__":
    main()
