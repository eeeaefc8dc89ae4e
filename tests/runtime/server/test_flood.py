"""More clients than a server can hold: none is lost, none answered twice, and memory comes back."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.serving import asking, held, serving, until, user
from tests.support.tiny import random_image
from vtx.runtime.api.model import Model
from vtx.runtime.server.limits import Limits

CLIENTS, ROOM = 200, 4 << 20
QUESTIONS = ("red?", "how many circle shapes?", "what is the colour?", "which is left?")
IMAGES = [random_image(seed) for seed in range(3)]


def received(connection: socket.socket) -> tuple[int, Any]:
    """Status and object of the reply; the server closes the connection behind it."""
    reply = b""
    while part := connection.recv(1 << 16):
        reply += part
    head, _, body = reply.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 100"):
        head, _, body = body.partition(b"\r\n\r\n")
    assert reply.count(b"HTTP/1.1 200") <= 1, "answered twice"
    return int(head.split()[1]), json.loads(body)


@pytest.mark.slow
def test_of_a_flood_of_clients_half_of_whom_leave_the_others_get_their_own_answer_once(
    tiny_bundle: Path, local: Model
) -> None:
    bodies = [asking(user(question, image), k=3) for question in QUESTIONS for image in IMAGES]
    wanted = [list(local.generate(body["messages"], 3, max_new_tokens=8, ignore_eos=True).token_ids) for body in bodies]
    with serving(
        {"tiny": tiny_bundle}, Limits(queue=CLIENTS, kv=ROOM, uploads=CLIENTS, client_uploads=CLIENTS)
    ) as served:
        with held(served):
            engine = served.engines.loaded[0]
            begun = engine.pool.hits + engine.pool.misses
            connections = [
                served.open_chat(bodies[number % len(bodies)], Connection="close") for number in range(CLIENTS)
            ]
            until(lambda: served.metrics()["vtx_requests_waiting"] >= CLIENTS - 4, "all wait")
            assert [served.request("GET", path).status for path in ("/livez", "/readyz")] == [200, 200]
            for connection in connections[::2]:
                connection.close()
            until(lambda: served.metrics()["vtx_cancelled_total"] >= CLIENTS // 2 - 4, "the server knows it")
        for number in range(1, CLIENTS, 2):
            with connections[number] as connection:
                status, reply = received(connection)
            assert status == 200, reply
            assert reply["usage"]["vtx"]["token_ids"] == wanted[number % len(bodies)], number
        served.until_active(0, "all have ended")
        figures = served.metrics()
        assert figures["vtx_requests_waiting"] == 0
        assert figures["vtx_kv_kept_bytes"] <= ROOM
        assert engine.pool.hits + engine.pool.misses - begun <= CLIENTS // 2 + 4, "nothing is computed for who has left"
        until(lambda: engine.pool.fits(ROOM), "no answer holds memory")
        assert served.chat(bodies[0]).json["usage"]["vtx"]["token_ids"] == wanted[0]


def test_a_request_waits_while_its_memory_would_exceed_the_limit_next_to_those_in_use(
    tiny_bundle: Path, local: Model
) -> None:
    """A picture that needs more than there is room for is answered when nothing else is."""
    body = asking(user("red?", IMAGES[0]))
    wanted = list(local.generate(body["messages"], max_new_tokens=8, ignore_eos=True).token_ids)
    with serving({"tiny": tiny_bundle}, Limits(kv=1)) as served:
        with held(served):
            first = served.open_chat(asking(user("how many?")), Connection="close")
            served.until_active(1, "the first is computed")
            second = served.open_chat(body, Connection="close")
            until(lambda: served.metrics()["vtx_requests_waiting"] == 1, "the second waits")
        for connection in (first, second):
            with connection:
                status, reply = received(connection)
            assert status == 200
        assert reply["usage"]["vtx"]["token_ids"] == wanted


@pytest.mark.slow
def test_a_request_for_which_there_is_no_memory_is_refused_in_openais_form(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once where nothing else is computed, else after its deadline; the next one is answered once there is some."""
    body, free = asking(user("red?", IMAGES[0])), [0]
    with serving({"tiny": tiny_bundle}) as served:
        assert served.chat(body).status == 200
        monkeypatch.setattr("vtx.runtime.scheduler.conversations.available_memory", lambda: free[0])
        refused = [served.chat(body), served.chat({**body, "stream": True})]
        backend = served.engines.loaded[0].model.backend
        slow, head = threading.Event(), backend.head

        def wait(*given: Any) -> Any:
            slow.wait(0.05)  # of each token, so that an answer is computed all the while
            return head(*given)

        free[0] = 1 << 40
        with patch.object(backend, "head", wait):
            running = served.open_chat(asking(user("how many?"), max_tokens=200))
            served.until_active(1, "another one is computed")
            free[0] = 0
            refused.append(served.chat({**body, "deadline_ms": 1500}))
            running.close()
            slow.set()
        for response in refused:
            assert response.status == 503
            assert int(response.headers["retry-after"]) > 0
            error = response.json["error"]
            assert (error["type"], error["code"], error["param"]) == ("server_error", "no_memory", None)
        assert "of memory are free; ask again later" in refused[0].json["error"]["message"]
        assert "within 1.5 s" in refused[-1].json["error"]["message"]
        free[0] = 1 << 40
        served.until_active(0, "the other one has ended")
        assert served.chat(body).status == 200
