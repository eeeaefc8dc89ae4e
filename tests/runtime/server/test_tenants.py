"""Tenants: nothing of one API key shows in any number that another gets, unless they share; limits of each key."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.serving import Response, Served, asking, held, serving, until, user
from tests.support.tiny import random_image
from vtx.commands.serve import reload
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options, Settings
from vtx.runtime.errors import RequestError
from vtx.runtime.scheduler.conversations import ConversationPool
from vtx.runtime.server.keys import Keys, Tenant, read_keys, unnamed
from vtx.runtime.server.refusal import Refusal
from vtx.runtime.session.encoded_images import ImageCache

FILE = """# names of keys are for logs and metrics
alice   key-of-alice
bob     key-of-bob      share=team
carol   key-of-carol    share=team
busy    key-of-busy     requests=2
slow    key-of-slow     answers=1
monitor key-of-monitor  metrics
nameless
"""
SECRET = ("the code is 4 2", "red?")
IMAGE = random_image(7)
SETTINGS = Settings(None, Options(max_new_tokens=1), None)
# For each request; the work behind its times is compared by itself.
DRAWN = ("id", "created", "created_at", "timings_ms", "timings", "total_duration", "load_duration",
         "prompt_eval_duration", "eval_duration")  # fmt: skip
PATHS = ("/v1/models", "/metrics", "/slots", "/v1/usage", "/api/tags", "/api/ps", "/readyz")


@pytest.fixture(scope="module")
def served(tiny_bundle: Path) -> Iterator[Served]:
    with serving({"tiny": tiny_bundle}, api_keys=Keys(read_keys(FILE, "keys"))) as served:
        yield served


def chat(served: Served, key: str, body: Any, path: str = "/v1/chat/completions") -> Response:
    return served.request("POST", path, body if isinstance(body, bytes) else _json(body), **_headers(key))


def _json(body: Any) -> bytes:
    return json.dumps(body).encode()


def _headers(key: str) -> dict[str, str]:
    return {"content_type": "application/json", "authorization": f"Bearer key-of-{key}"}


def replied(connection: socket.socket) -> Any:
    """The object of the reply on a connection."""
    reply = b""
    while b'"usage"' not in reply:
        reply += connection.recv(1 << 16)
    return json.loads(reply.rpartition(b"\r\n")[2])


def messages(guess: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": guess}, user("red?", IMAGE)]


def numbers(reply: Response) -> Any:
    """The numbers and flags of a reply at any depth, without times and what is drawn for each request."""

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: kept(item) for name, item in value.items() if name not in DRAWN}
        return [kept(item) for item in value] if isinstance(value, list) else value

    return reply.status, kept(reply.json)


def test_no_number_tells_a_key_what_another_asked(tiny_bundle: Path) -> None:
    """Each guess gets what it gets from a server that never saw the secret: digit by digit, by any path."""
    guesses = ["the code is 1", "the code is 4", SECRET[0]]
    bodies = [asking(*messages(guess), logprobs=True, top_logprobs=3) for guess in guesses]
    replies = []
    for asked in (False, True):
        with serving({"tiny": tiny_bundle}, api_keys=Keys(read_keys(FILE, "keys"))) as served:
            if asked:
                assert chat(served, "alice", asking(*messages(SECRET[0]), max_tokens=20)).status == 200
            seen = [numbers(chat(served, "bob", body)) for body in bodies]
            seen.append(numbers(chat(served, "bob", bodies[-1] | {"stream": False, "reuse": True})))
            seen += [numbers(chat(served, "bob", body, path)) for path, body in elsewhere(bodies[-1]).items()]
            seen += [numbers(served.request("GET", path, **_headers("bob"))) for path in PATHS]
            replies.append(seen)
    assert replies[0] == replies[1]
    refused = [status for status, _ in replies[1] if status != 200]
    assert refused == [403, 403], "of /metrics and /slots"
    usages = [value["usage"] for _, value in replies[1][:4]]
    assert usages[3]["prompt_tokens_details"]["cached_tokens"] > 0, "its own are reused"
    assert not usages[0]["vtx"]["reused_image"]


def elsewhere(body: dict[str, Any]) -> dict[str, Any]:
    """Bodies with the secret text and picture for the other addresses."""
    picture = body["messages"][-1]["content"][0]["image_url"]["url"].partition(",")[2]
    turn = {"role": "user", "content": "red?", "images": [picture]}
    source = {"type": "base64", "media_type": "image/png", "data": picture}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "red?"}]
    message = {"model": "tiny", "max_tokens": 8, "system": SECRET[0], "messages": [{"role": "user", "content": blocks}]}
    scored = {"model": "tiny", "prompt": SECRET[0], "echo": True, "logprobs": 1}
    ollama = {"model": "tiny", "messages": [{"role": "system", "content": SECRET[0]}, turn], "stream": False}
    asked = {"model": "tiny", "messages": body["messages"]}
    return {
        "/v1/responses": {"model": "tiny", "input": SECRET[0]},
        "/v1/completions": scored,
        "/tokenize": asked,
        "/v1/chat/completions/input_tokens": asked,
        "/v1/messages": message,
        "/v1/messages/count_tokens": {name: value for name, value in message.items() if name != "max_tokens"},
        "/api/chat": ollama,
        "/v1/chat/completions": {**body, "prompt_logprobs": 1},
    }


def test_no_time_tells_a_key_what_another_asked(tiny_bundle: Path) -> None:
    """The time of the first token is that of the runs before it: as many, of as many tokens, as if nobody had asked."""
    work = []
    for asked in (False, True):
        with serving({"tiny": tiny_bundle}, api_keys=Keys(read_keys(FILE, "keys"))) as served:
            assert chat(served, "bob", asking(user("?"))).status == 200, "it is loaded"
            if asked:
                assert chat(served, "alice", asking(*messages(SECRET[0]), max_tokens=20)).status == 200
            work.append([runs(served, "bob", guess) for guess in ("the code is 1", SECRET[0], SECRET[0])])
    assert work[0] == work[1]
    first, second, third = work[1]
    assert "picture" in first
    assert "picture" not in second, "it has sent it itself"
    assert len(third) < len(second) or third != second, "what it asked itself is reused"


def runs(served: Served, key: str, guess: str) -> list[int | str]:
    """The runs of a request's tower and embeddings, the latter by their tokens, up to its one token."""
    seen = list[int | str]()
    backend = served.engines.loaded[0].model.backend
    embed = backend.embed
    vision = backend.vision

    def embedding(ids: Any) -> Any:
        seen.append(len(ids))
        return embed(ids)

    def seeing(*args: Any) -> Any:
        seen.append("picture")
        return vision(*args)

    with patch.object(backend, "embed", embedding), patch.object(backend, "vision", seeing):
        assert chat(served, key, asking(*messages(guess), max_tokens=1)).status == 200
    return seen


def test_keys_that_share_use_each_others_caches(served: Served) -> None:
    body = asking(*messages("shared system text"))
    first, second, stranger = (chat(served, key, body).json["usage"] for key in ("bob", "carol", "alice"))
    assert second["prompt_tokens_details"]["cached_tokens"] > first["prompt_tokens_details"]["cached_tokens"]
    assert second["vtx"]["reused_image"]
    assert stranger["prompt_tokens_details"]["cached_tokens"] == 0
    assert not stranger["vtx"]["reused_image"]


def test_concurrent_questions_of_two_keys_share_no_prefix(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}, api_keys=Keys(read_keys(FILE, "keys"))) as served:
        assert chat(served, "alice", asking(user("which?"))).status == 200
        body = asking(*messages("one"), max_tokens=100)
        with held(served) as stopped:
            bob = served.open_chat(body, Authorization="Bearer key-of-bob")
            until(stopped.is_set, "bob's is computed")
            assert served.engines.loaded[0].scheduler.active == 1
            alice = served.open_chat(body, Authorization="Bearer key-of-alice")
            until(lambda: served.engines.loaded[0].scheduler.waiting == 1, "alice's waits, to begin in the next round")
        with bob, alice as connection:
            usage = replied(connection)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_only_a_key_marked_for_it_reads_the_metrics_which_say_who(served: Served) -> None:
    assert chat(served, "alice", asking(user("red?"))).status == 200
    for key in ("alice", "bob", "busy"):
        refused = served.request("GET", "/metrics", **_headers(key))
        assert refused.status == 403
        assert b"vtx_" not in refused.body
    text = served.request("GET", "/metrics", **_headers("monitor")).body.decode()
    assert 'vtx_key_requests_total{key="alice",status="200"}' in text
    assert 'vtx_key_completion_tokens_total{key="alice"}' in text
    assert "key-of-" not in text


def test_the_only_key_reads_the_metrics(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}, api_keys=["key-of-one"]) as served:
        assert served.request("GET", "/metrics", **_headers("one")).status == 200


def test_of_two_keys_neither_reads_the_metrics_without_a_mark(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}, api_keys=["key-of-one", "key-of-two"]) as served:
        assert [served.request("GET", "/metrics", **_headers(key)).status for key in ("one", "two")] == [403, 403]


def test_requests_a_minute_and_concurrent_answers_of_a_key(served: Served) -> None:
    body = asking(user("red?"))
    assert [chat(served, "busy", body).status for _ in range(3)] == [200, 200, 429]
    refused = chat(served, "busy", body)
    assert refused.json["error"]["code"] == "rate_limit_exceeded"
    assert 50 <= int(refused.headers["retry-after"]) <= 60
    assert chat(served, "slow", {**body, "n": 2}).status == 429
    with held(served), served.open_chat({**body, "max_tokens": 100}, Authorization="Bearer key-of-slow"):
        until(lambda: served.engines.loaded[0].scheduler.active == 1, "the first is computed")
        assert chat(served, "slow", body).status == 429
    until(lambda: served.engines.loaded[0].scheduler.active == 0, "it has ended")
    until(lambda: chat(served, "slow", body).status == 200, "its place is free again")


def test_a_minute_later_requests_are_admitted_again() -> None:
    now, tenant = [0.0], Tenant("a", "a", requests=1)
    keys = Keys({"k": tenant}, lambda: now[0])
    keys.admit(tenant)
    with pytest.raises(Exception, match="try again in 31 s"):
        [now.__setitem__(0, 29.5), keys.admit(tenant)]
    now[0] = 60.0
    keys.admit(tenant)


def test_the_answers_of_a_request_count_and_end_together() -> None:
    tenant = Tenant("a", "a", answers=3)
    keys = Keys({"k": tenant})
    for _ in range(3):
        with keys.answering(tenant, 3), pytest.raises(Refusal, match="3 answers of this key"):
            keys.answering(tenant, 1).__enter__()


def test_no_key_loses_its_share_of_memory_to_another(local: Model) -> None:
    """Kept conversations and images of a key that has few outlive a flood of another's."""
    cache, image = ImageCache(1000), local.loaded.images.prepare(IMAGE)
    tokens = image.encode(local.backend)
    cache.limit_bytes = 4 * (tokens.hidden.nbytes + tokens.patches.indices.nbytes + 4096)
    cache.put("rare", tokens, "alice")
    for number in range(50):
        cache.put(number, tokens, "bob")
    assert cache.get("rare", "alice") is tokens
    assert cache.get("rare", "bob") is None
    pool = ConversationPool(local.loaded, 1 << 30, 4)
    prompts = [local.loaded.prompts.ids([{"role": "user", "content": f"red? {'x' * n}"}]) for n in range(21)]
    for number, ids in enumerate(prompts):
        conversation = pool.lease((), ids, tenant="bob" if number else "alice")
        list(conversation.stream_messages([{"role": "user", "content": f"red? {'x' * number}"}], SETTINGS))
        pool.give_back(conversation)
    hits = pool.hits
    pool.give_back(pool.lease((), prompts[0], tenant="alice"))
    assert pool.hits == hits + 1, "alice's is still there"
    pool.close()


def test_what_a_file_of_keys_says() -> None:
    tenants = read_keys(FILE, "keys")
    assert tenants["key-of-alice"] == Tenant("alice", "alice")
    assert tenants["key-of-carol"].share == "team"
    assert (tenants["key-of-busy"].requests, tenants["key-of-slow"].answers) == (2, 1)
    assert tenants["nameless"] == unnamed("nameless")
    assert unnamed("nameless").name != unnamed("other").name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no key"), ("# only a comment", "holds no key"), ("a key\nb key", "line 2 repeats"),
        ("a one\na two", "line 2 repeats"), ("a one shares=b", "line 1: write KEY"), ("a/b one", "line 1: write KEY"),
        ("a one requests=0", "from 1 to"), ("a one answers=x", "from 1 to"), ("a " + "k" * 5000, "at most 4096"),
    ],
)  # fmt: skip
def test_a_wrong_file_of_keys_is_refused_by_its_line(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        read_keys(text, "keys")
    assert "one" not in str(error.value).replace("one a line", "")


def test_keys_are_read_again_on_a_hangup_and_wrong_ones_change_nothing(tiny_bundle: Path, tmp_path: Path) -> None:
    file, keys = tmp_path / "keys", Keys(read_keys("alice key-of-alice", "keys"))
    with serving({"tiny": tiny_bundle}, api_keys=keys) as served:
        body = asking(user("red?"))
        file.write_text("bob key-of-bob\ncarol key-of-carol\n", encoding="utf-8-sig")
        reload(served.engines, keys, file)
        assert [chat(served, key, body).status for key in ("alice", "bob", "carol")] == [401, 200, 200]
        file.write_text("bob key-of-bob nonsense\n")
        reload(served.engines, keys, file)
        assert [chat(served, key, body).status for key in ("alice", "bob", "carol")] == [401, 200, 200]
    assert hasattr(signal, "SIGHUP")


def test_who_waits_for_what_is_shown_without_texts_to_those_who_may_see_all(served: Served) -> None:
    def slots(key: str) -> Response:
        return served.request("GET", "/slots", authorization=f"Bearer key-of-{key}")

    assert slots("monitor").json == []
    assert chat(served, "alice", asking(user("red?"))).status == 200
    until(lambda: slots("monitor").json == [], "nothing is computed")
    with held(served):
        body = asking(user("is it a secret?", IMAGE), k=3, reduce="none", deadline_ms=60_000)
        with served.open_chat(body, Authorization="Bearer key-of-alice"):
            until(lambda: [slot["state"] for slot in slots("monitor").json] == ["answer"], "it has begun")
            [slot] = slots("monitor").json
            assert (slot["key"], slot["model"], slot["k"], slot["deadline"]) == ("alice", "tiny", 3, True)
            assert (slot["tokens"], slot["max_tokens"]) == (1, 8)
            assert 0 < slot["seconds_left"] < 60
            assert "secret" not in slots("monitor").body.decode()
            assert slots("alice").status == 403
    until(lambda: slots("monitor").json == [], "it has ended")
