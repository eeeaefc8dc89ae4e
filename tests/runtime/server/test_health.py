"""What the server says of its own life, whatever happens to the thread that computes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.clock import Clock
from tests.support.serving import WAIT, Served, asking, serving, until, user
from tests.support.tiny import random_image
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.server.limits import Limits
from vtx.runtime.session.encoded_images import PreparedImage
from vtx.runtime.vision.tokens import ImageTokens, PromptImage

GOOD = asking(user("red?"))
LIMITS = Limits(seconds=20, stall_seconds=600)


@pytest.fixture
def served(tiny_bundle: Path) -> Iterator[Served]:
    with serving({"tiny": tiny_bundle}, LIMITS, api_keys=["secret"]) as served:
        assert ask(served).status == 200
        yield served


def ask(served: Served) -> Any:
    return served.chat(GOOD, authorization="Bearer secret")


def health(served: Served) -> list[int]:
    """The statuses of /livez, /readyz and /health, which need no key."""
    return [served.request("GET", path).status for path in ("/livez", "/readyz", "/health")]


def test_a_finished_conversation_that_cannot_be_given_back_fails_its_request_only(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = served.engines.loaded[0].pool
    with monkeypatch.context() as patch:
        patch.setattr(pool, "give_back", lambda *_, **__: 1 / 0)
        response = ask(served)
    assert response.status == 500
    assert response.json["error"]["type"] == "server_error"
    assert ask(served).status == 200
    assert health(served) == [200, 200, 200]


def test_a_graph_that_does_not_return_is_told_by_silence(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, clock = served.engines.loaded[0], Clock()
    heartbeat, released = engine.scheduler.heartbeat, threading.Event()
    entered = threading.Event()
    head = engine.model.backend.head

    def wait(*args: Any) -> Any:
        entered.set()
        assert released.wait(WAIT), "never released"
        return head(*args)

    monkeypatch.setattr(engine.model.backend, "head", wait)
    with served.open_chat(GOOD, authorization="Bearer secret"):
        assert entered.wait(WAIT)
        monkeypatch.setattr(heartbeat, "clock", clock)
        monkeypatch.setattr(heartbeat, "last", clock())
        seen = []
        for seconds in (0, 299, 2, 298, 2):
            clock.now += seconds
            seen.append(health(served))
        said = served.request("GET", "/livez").json["status"]
        released.set()
    assert seen == [[200] * 3, [200] * 3, [200, 503, 503], [200, 503, 503], [503] * 3]
    assert said == "a thread that computes gave no sign of life for 601 s"
    until(lambda: health(served) == [200] * 3, "it computes again")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_ended_is_told_at_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.engines.loaded[0].pool, "lease", lambda *_, **__: sys.exit())
    assert ask(served).status == 503
    assert health(served) == [503, 503, 503]
    assert "has ended" in served.request("GET", "/livez").json["status"]
    assert ask(served).status == 503, "and not after the limit"


def test_a_long_prompt_gives_a_sign_of_life_at_every_view_stage_and_token(local: Model) -> None:
    beats: list[int] = []
    stages = len(local.manifest.stages)
    with local.open(random_image(1)) as image:
        stream = image.stream("red?", None, Options(max_new_tokens=3, ignore_eos=True), reduce="none")
        stream.on_progress(lambda: beats.append(1))
        stream.step()
        counts = [len(beats)]
        for _ in range(2):
            stream.step()
            counts.append(len(beats))
    assert counts[0] >= 1 + stages, "the image, and each stage"
    assert counts[1:] == [counts[0] + 1, counts[0] + 2], "the first token comes with the prompt"


def test_each_view_of_an_image_is_a_sign_of_life_of_its_own() -> None:
    beats: list[int] = []

    class Tower:
        def vision(self, pixels: Any, _: Any) -> Any:
            assert len(beats) == len(seen) + 1, "before each view"
            seen.append(pixels)
            return len(seen)

    seen: list[Any] = []
    views = np.zeros((5, 3, 2, 2), np.float32)
    tokens = ImageTokens(np.zeros((1, 4), np.float32), np.zeros(1, np.int64))
    image = PreparedImage(views, "key", PromptImage((5,)), (2, 2), lambda _: tokens)
    image.encode(Tower(), {}, lambda: beats.append(1))  # type: ignore[arg-type]
    assert len(beats) == 5
