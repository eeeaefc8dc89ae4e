"""The page of vtx-watch: newest pictures as JPEG, answers as server-sent events, for those who have its key."""

from __future__ import annotations

import http.client
import io
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from PIL import Image
from tests.support.browser import launched
from tests.support.serving import until

from vtx.runtime.errors import ImageError
from vtx.runtime.server.delivery import Output
from vtx.runtime.server.refusal import Refusal
from vtx.tools.watch.config import SourceConfig, StandingQuestion
from vtx.tools.watch.live_page import STREAMS_PER_CLIENT
from vtx.tools.watch.sources import FrameSource, Newest
from vtx.tools.watch.watch import Watched

live_page = pytest.importorskip(
    "vtx.tools.watch.live_page", reason="needs vtx-edge[serve]", exc_type=ModuleNotFoundError
)
Page, serving, RECENT, SIDE = live_page.Page, live_page.serving, live_page.RECENT, live_page.SIDE
TITLES = "titles => titles.map(title => title.firstChild.textContent)"
TEXTS = "shown => shown.map(text => text.textContent)"
WAIT = 60.0  # seconds for what should happen at once, on a busy machine


def watched(name: str) -> Watched:
    config = SourceConfig(name, (StandingQuestion("q", "What <b>is</b> it?"),), folder="/nowhere")
    newest = Newest(None, lambda: None, lambda: 1.0)
    return Watched(config, FrameSource(config, newest, lambda *_: None), newest, ())


@pytest.fixture
def page() -> Page:
    made = Page(("PNG",))
    made.watched = {"door": watched("door"), "shelf": watched("shelf")}
    return made


def answer(text: str, source: str = "door") -> bytes:
    return json.dumps({"event": "answer", "source": source, "question": "q", "answer": text}).encode()


@contextmanager
def served(page: Page, *keys: str, local_hosts: bool = True) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as at, serving(page, at, keys, local_hosts=local_hosts):
        yield at.getsockname()[1]


def get(port: int, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


class Reader:
    """A page that reads the events."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
        self.connection.request("GET", "/events")
        self.response = self.connection.getresponse()

    def close(self) -> None:
        self.response.close()
        self.connection.close()

    def event(self) -> Any:
        while True:
            line = self.response.readline()
            assert line, "the stream ended"
            if line.startswith(b"data: "):
                return json.loads(line[6:])


def test_the_page_is_complete_and_takes_nothing_from_elsewhere(page: Page) -> None:
    with served(page) as port:
        for path in ("/", "/live.js", "/live.css", "/page.css"):
            status, headers, body = get(port, path)
            assert (status, headers["x-content-type-options"]) == (200, "nosniff")
            assert "default-src 'none'" in headers["content-security-policy"]
            assert body.strip()
            assert b"http://" not in body
            assert b"https://" not in body
            assert b"innerHTML" not in body, "names and answers are text"


def test_a_source_shows_its_newest_frame_also_after_it_was_asked_about(page: Page) -> None:
    newest = page.watched["door"].newest
    with served(page) as port:
        assert get(port, "/pictures/door")[0] == 204, "no frame yet"
        tags = list[str]()
        for level, size in ((40, (64, 48)), (200, (2 * SIDE, 300))):
            newest.put(lambda level=level, size=size: Image.new("RGB", size, (level,) * 3))  # type: ignore[misc]
            newest.take()
            status, headers, body = get(port, "/pictures/door")
            assert (status, headers["content-type"]) == (200, "image/jpeg")
            shown = Image.open(io.BytesIO(body))
            assert shown.size == (size if max(size) <= SIDE else (SIDE, 150))
            assert abs(shown.getpixel((5, 5))[0] - level) < 4  # type: ignore[index, operator]
            assert get(port, "/pictures/door", if_none_match=headers["etag"])[0] == 304
            tags.append(headers["etag"])
        assert tags[0] != tags[1]
        status, _, body = get(port, "/pictures/none")
        assert (status, json.loads(body)["error"]["message"]) == (
            404,
            "there is no source 'none'; there is door, shelf",
        )


def test_idle_connections_and_open_streams_of_one_client_shut_nobody_out(page: Page) -> None:
    with served(page) as port, ExitStack() as closing:
        for _ in range(STREAMS_PER_CLIENT):
            connection = closing.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in connection.recv(100)
        assert get(port, "/events")[0] == 503
        for _ in range(64):
            closing.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert get(port, "/")[0] == 200


def test_a_picture_is_made_once_a_frame_and_one_that_cannot_be_read_is_told(page: Page) -> None:
    reads = list[None]()

    def read() -> Image.Image:
        reads.append(None)
        return Image.new("RGB", (8, 8))

    def broken() -> Image.Image:
        raise ImageError("/srv/pictures/door.jpg is cut off")

    newest = page.watched["door"].newest
    newest.put(read)
    assert page.picture("door") == page.picture("door")
    assert len(reads) == 1
    newest.put(read)
    page.picture("door")
    assert len(reads) == 2
    newest.put(broken)
    with served(page) as port:
        status, _, body = get(port, "/pictures/door")
        assert status == 503
        assert "cannot be read" in json.loads(body)["error"]["message"]
        assert b"/srv" not in body
    page.watched = {"shelf": page.watched["shelf"]}
    with pytest.raises(Refusal, match="no source 'door'"):
        page.picture("door")


def test_every_reader_gets_sources_and_last_answers_first_and_then_events_as_they_come(page: Page) -> None:
    output = Output("page", page.tell)
    page.tell(answer("one"))
    page.tell(answer("two"))
    page.tell(answer("gone", "a source that is no longer watched"))
    with served(page) as port:
        readers = [Reader(port), Reader(port)]
        for reader in readers:
            first = reader.event()
            assert first["event"] == "watched"
            assert [source["name"] for source in first["sources"]] == ["door", "shelf"]
            assert first["sources"][0]["questions"] == [{"name": "q", "ask": "What <b>is</b> it?"}]
            assert "/nowhere" not in json.dumps(first), "addresses are not shown"
            assert [last["answer"] for last in first["answers"]] == ["two"]
        output.put(answer("three"))
        assert [reader.event()["answer"] for reader in readers] == ["three"] * 2
        readers[0].close()  # one leaves
        output.put(answer("four"))
        assert readers[1].event()["answer"] == "four"
    assert readers[1].response.read().strip() == b"", "a stream ends with the page"
    readers[1].close()
    output.close(WAIT)
    assert (output.sent, output.failed) == (2, 0)


STATUS = {
    "event": "status", "time": "2026-01-01T00:00:00Z", "answers": 4, "reused": 1, "errors": 2,
    "sources": {"door": {"state": "open", "frames": 9, "dropped": 3, "corrupt": 1}}, "outputs": [],
}  # fmt: skip


def test_a_reader_gets_the_last_status_behind_the_sources(page: Page) -> None:
    for answers in (1, 4):
        page.tell(json.dumps({**STATUS, "answers": answers}).encode())
    _, (first, second) = page.since(None)
    assert (first["event"], second) == ("watched", STATUS)
    for count in range(3 * RECENT):
        page.tell(answer(str(count)))
    assert page.since(0)[1][1] == STATUS


def test_what_is_kept_of_events_is_bounded_and_a_late_reader_begins_again(page: Page) -> None:
    number, (first,) = page.since(None)
    assert (number, first["event"]) == (0, "watched")
    for count in range(3 * RECENT):
        page.tell(answer(str(count)))
        if count == RECENT - 1:
            assert len(page.since(0)[1]) == RECENT
    number, (again,) = page.since(0)
    assert (number, again["event"], again["answers"][0]["answer"]) == (3 * RECENT, "watched", str(3 * RECENT - 1))
    assert page.since(number) == (number, [])
    assert [event["answer"] for event in page.since(number - 2)[1]] == [str(3 * RECENT - 2), str(3 * RECENT - 1)]
    page.watched = {"shelf": page.watched["shelf"]}
    page.tell(json.dumps({"event": "config", "state": "reloaded"}).encode())
    assert page.since(None)[1][0]["answers"] == []


def test_without_its_key_there_are_neither_pictures_nor_events_and_no_other_hosts(page: Page) -> None:
    page.watched["door"].newest.put(lambda: Image.new("RGB", (8, 8)))
    with served(page, "secret") as port:
        assert get(port, "/")[0] == 200
        for path in ("/pictures/door", "/events"):
            assert get(port, path)[0] == 401
            assert get(port, path, authorization="Bearer wrong")[0] == 401
        assert get(port, "/pictures/door", authorization="Bearer secret")[0] == 200
        assert get(port, "/pictures/door", authorization="Bearer secret", host="attacker.example.org")[0] == 421


def test_a_quiet_stream_gets_comments(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "QUIET_SECONDS", 0.0)
    with served(page) as port:
        reader = Reader(port)
        assert reader.event()["event"] == "watched"
        lines = [reader.response.readline() for _ in range(4)]
        assert b": no event\n" in lines
        reader.close()


def test_a_browser_asks_for_the_key_shows_pictures_and_answers_and_follows_a_reload(page: Page) -> None:
    page.watched["door"].newest.put(lambda: Image.new("RGB", (64, 48), (200, 0, 0)))
    page.tell(answer("a <b>red</b> one"))
    with launched() as browser, served(page, "secret") as port:
        opened, complaints = browser.new_page(), list[str]()
        opened.set_default_timeout(1000 * WAIT)
        opened.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.goto(f"http://127.0.0.1:{port}/")
        opened.wait_for_selector("#key-field:not([hidden])")
        assert opened.locator("article").count() == 0
        opened.locator("#key").fill("secret")
        opened.locator("#key").press("Enter")
        until(lambda: opened.evaluate("document.querySelector('article img')?.naturalWidth === 64"), "its picture")
        assert opened.locator("article h2").evaluate_all(TITLES) == ["door", "shelf"]
        assert opened.locator("article dd").evaluate_all(TEXTS) == ["a <b>red</b> one", "-"]
        page.watched["door"].newest.put(lambda: Image.new("RGB", (32, 48)))
        page.tell(json.dumps({**json.loads(answer("none")), "probability": 0.975, "latency_ms": 12.5}).encode())
        page.tell(json.dumps(STATUS).encode())
        until(lambda: opened.locator("#errors").text_content() == "2 errors", "the errors")
        assert opened.locator("article p").first.text_content() == "9 frames, 3 dropped, 1 corrupt"
        assert opened.locator("article dt span").first.text_content() == "97.5%, 12.5 ms"
        until(lambda: opened.evaluate("document.querySelector('article img').naturalWidth === 32"), "the next picture")
        until(lambda: opened.evaluate("document.querySelector('article dd').textContent === 'none'"), "the next answer")
        page.watched = {"shelf": page.watched["shelf"], "yard": watched("yard")}
        page.tell(json.dumps({"event": "config", "state": "reloaded", "time": "2026-01-01T00:00:00Z"}).encode())
        until(
            lambda: opened.evaluate(f"({TITLES})([...document.querySelectorAll('h2')]).join() === 'shelf,yard'"),
            "the other sources",
        )
        expected = ("status of 401", "status of 404")  # without the key, and of the source that has just gone
        assert not [told for told in complaints if not any(each in told for each in expected)]
