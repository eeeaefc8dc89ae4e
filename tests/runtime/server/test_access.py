"""The access log: a line for each request, whatever became of it, with the id that its reply has."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.support.serving import asking, held, serving, until, user
from vtx.runtime.server.access import AccessLog


def test_each_request_has_a_line_and_an_id(tiny_bundle: Path) -> None:
    lines: list[str] = []
    with serving({"tiny": tiny_bundle}, access=lines.append, access_json=True, api_keys=["key"]) as served:
        body, key = asking(user("red?"), max_tokens=2, ignore_eos=True), {"authorization": "Bearer key"}
        replies = [
            served.chat(body, **key, x_request_id="mine-7.a:b"), served.chat({**body, "stream": True}, **key),
            served.chat(body), served.chat({"model": "tiny"}, **key, x_request_id="two words"),
            served.request("GET", "/%1b[31m%20x" + 300 * "y", **key),
        ]  # fmt: skip
        with held(served):
            connection = served.open_chat(asking(user("red?"), max_tokens=200), Authorization="Bearer key")
            until(lambda: served.engines.loaded[0].scheduler.active == 1, "it runs")
            connection.close()
            until(lambda: len(lines) == 6, "every request has its line")
    told = [json.loads(line) for line in lines]
    assert [one["status"] for one in told] == [200, 200, 401, 400, 404, 499]
    assert [reply.headers["x-request-id"] for reply in replies] == [one["id"] for one in told[:5]]
    assert told[0]["id"] == "mine-7.a:b"
    assert "two words" not in lines[3]
    assert len({one["id"] for one in told}) == 6
    for reply, one in zip(replies, told, strict=False):
        assert one["bytes"] == len(reply.body)
        assert one["client"] == "127.0.0.1"
    assert [one["method"] for one in told] == ["POST"] * 4 + ["GET", "POST"]
    assert told[4]["path"].startswith("/%1B%5B31m%20xyyy")
    assert len(told[4]["path"]) <= 3 * 200
    assert not any("red?" in line for line in lines)


def test_lines_of_text_and_none(tiny_bundle: Path) -> None:
    lines: list[str] = []
    with serving({"tiny": tiny_bundle}, access=lines.append) as served:
        reply = served.request("GET", "/livez")
    (line,) = lines
    time, client, id, method, path, status, sent, ms = line.split()
    assert (client, id) == ("127.0.0.1", reply.headers["x-request-id"])
    assert (method, path, status, sent) == ("GET", "/livez", "200", str(len(reply.body)))
    assert time.startswith("20")
    assert float(ms) >= 0
    with serving({"tiny": tiny_bundle}) as served:
        assert served.request("GET", "/livez").headers["x-request-id"]


def test_the_address_of_a_client_is_escaped_in_a_line(tiny_bundle: Path) -> None:
    """A trusted proxy may pass on whatever its client wrote."""
    lines: list[str] = []

    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def send(message: Any) -> None:
            pass

        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": ("\x1b[31m a\nb", 0)}
        await AccessLog(app, lines.append)(scope, send, send)

    asyncio.run(test())
    assert lines[0].split()[1] == "%1B[31m%20a%0Ab"
    assert lines[0].isprintable()
