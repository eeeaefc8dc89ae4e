"""What clients of other servers expect: several answers, biases, clamped limits, leniency, origins, sockets, keys."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.calling import tool
from tests.support.serving import Served, asking, serving, until, user
from tests.support.tiny import random_image
from vtx.cli import serve
from vtx.runtime.api.model import Model
from vtx.runtime.server.limits import Limits

QUESTION = user("red?", random_image(1))
NONE = {"k": "none", "reduce": "none"}


@pytest.fixture(scope="module")
def served(tiny_bundle: Path) -> Iterator[Served]:
    with serving({"tiny": tiny_bundle}, Limits(comment_seconds=0.001, new_tokens=500)) as served:
        yield served


def test_several_answers_have_seeds_of_their_own(served: Served) -> None:
    fields = {**NONE, "temperature": 1.5, "logprobs": True}
    alone = [served.chat(asking(QUESTION, seed=seed, **fields)).json for seed in (7, 8, 9)]
    done = served.chat(asking(QUESTION, seed=7, n=3, **fields)).json
    assert [choice["index"] for choice in done["choices"]] == [0, 1, 2]
    assert [choice["message"] for choice in done["choices"]] == [one["choices"][0]["message"] for one in alone]
    ids = [answer["token_ids"] for answer in done["usage"]["vtx"]["answers"]]
    assert ids == [one["usage"]["vtx"]["token_ids"] for one in alone]
    assert len({tuple(one) for one in ids}) > 1
    assert done["usage"]["completion_tokens"] == 24
    body = asking(QUESTION, seed=7, n=3, stream=True, stream_options={"include_usage": True}, **fields)
    events = [line[6:] for line in served.chat(body).body.decode().split("\n\n") if line.startswith("data: {")]
    texts = {0: "", 1: "", 2: ""}
    for event in map(json.loads, events):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert list(texts.values()) == [choice["message"]["content"] for choice in done["choices"]]
    assert json.loads(events[-1])["usage"]["completion_tokens"] == 24


def test_biases_and_penalties_act_on_the_logits(served: Served) -> None:
    def ids(**fields: Any) -> list[int]:
        done = served.chat(asking(QUESTION, **NONE, **fields)).json
        found: list[int] = done["usage"]["vtx"]["token_ids"]
        return found

    usual = ids()
    assert ids(logit_bias={"40": 100}) == [40] * 8
    assert usual[0] not in ids(logit_bias={str(usual[0]): -100})
    assert ids(logit_bias={"40": 50, "41": 50}, presence_penalty=2)[:2] in ([40, 41], [41, 40])
    assert ids(logit_bias={"40": 99.5, "41": 99}, frequency_penalty=0.4, max_tokens=3).count(40) <= 3
    assert ids(min_p=1, temperature=2, seed=1) == usual, "only the most likely token is left in"


@pytest.mark.slow
def test_more_tokens_than_there_is_room_for_are_clamped_and_the_reply_says_so(served: Served, local: Model) -> None:
    for asked in (501, 10_000_000):
        done = served.chat(asking(QUESTION, **NONE, max_tokens=asked)).json
        room = local.manifest.max_context - done["usage"]["prompt_tokens"]
        assert done["usage"]["vtx"]["max_tokens"] == min(500, room)
        assert done["choices"][0]["finish_reason"] == "length"
    assert "max_tokens" not in served.chat(asking(QUESTION, **NONE, max_tokens=3)).json["usage"]["vtx"]


def test_an_assistant_s_message_at_the_end_is_continued(served: Served) -> None:
    whole = served.chat(asking(QUESTION, **NONE)).json
    begun = {"role": "assistant", "content": "the picture is"}
    done = served.chat(asking(QUESTION, begun, **NONE)).json
    assert done["usage"]["prompt_tokens"] > whole["usage"]["prompt_tokens"]
    again = {"role": "assistant", "content": "the picture is" + done["choices"][0]["message"]["content"][:0]}
    assert served.chat(asking(QUESTION, again, **NONE)).json["choices"] == done["choices"]
    bad = served.chat(asking({"role": "assistant", "content": "a"}))
    assert bad.status == 400


def test_a_stream_without_events_gets_comments(served: Served) -> None:
    lines = served.chat(asking(QUESTION, **NONE, stream=True, reuse=False)).body.decode().split("\n\n")
    assert ": computing" in lines
    assert lines[-2:] == ["data: [DONE]", ""]
    late = served.chat(asking(QUESTION, **NONE, stream=True, logit_bias={"99999999": 1})).body.decode()
    assert "names token 99999999" in late


def test_the_tokens_of_a_prompt_are_counted(served: Served, local: Model) -> None:
    body = json.dumps(asking(QUESTION)).encode()
    counted = served.request("POST", "/tokenize", body, content_type="application/json").json
    assert counted["count"] == len(counted["tokens"]) == served.chat(asking(QUESTION)).json["usage"]["prompt_tokens"]
    assert counted["max_model_len"] == local.manifest.max_context
    wrong = json.dumps(asking(user("  "))).encode()
    assert served.request("POST", "/tokenize", wrong, content_type="application/json").status == 400


def test_one_model_is_described(served: Served) -> None:
    listed = served.request("GET", "/v1/models").json["data"][0]
    assert served.request("GET", "/v1/models/tiny").json == listed
    missing = served.request("GET", "/v1/models/other")
    assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")


def test_a_lenient_server_ignores_what_it_does_not_support_and_says_so(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}, lenient=True) as served:
        body = asking(QUESTION, temprature=1, tools=[tool("draw")], modalities=["audio"], ignore_eos=False)
        done = served.chat(body)
        assert done.status == 200
        assert done.json["usage"]["vtx"]["ignored"] == ["modalities", "'temprature'", "tools"]
        assert served.chat(asking(QUESTION, temperature="hot")).status == 400, "what is supported is still checked"


def test_pages_of_an_allowed_origin_may_ask(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}, api_keys=["a", "b"], origins=["http://localhost:3000"]) as served:
        asked = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
        allowed = served.request("OPTIONS", "/v1/chat/completions", **asked)
        assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (200, "http://localhost:3000")
        other = served.request("OPTIONS", "/v1/chat/completions", **{**asked, "Origin": "http://example.org"})
        assert other.status == 400
        for key, status in (("a", 200), ("b", 200), ("c", 401)):
            reply = served.request("GET", "/v1/models", Authorization=f"Bearer {key}", Origin="http://localhost:3000")
            assert reply.status == status
            assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def reaches(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as at:
        return at.connect_ex(str(path)) == 0


@pytest.mark.slow
def test_the_command_listens_at_a_unix_socket_with_keys_of_a_file(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# two\nfirst\n\nsecond\n")
    words = ["--bundle", f"tiny={tiny_bundle}", "--unix-socket", tmp_path / "at", "--api-keys", tmp_path / "keys"]
    code = "import sys; from vtx.cli import serve; sys.argv[0] = 'vtx-serve'; serve()"
    for _ in range(2):  # the second time in place of the socket that the first one left
        process = subprocess.Popen([sys.executable, "-c", code, *map(str, words), "--device", "cpu"])
        try:
            until(lambda: reaches(tmp_path / "at"), "nothing listens at the socket")
            refused = CliRunner().invoke(serve, ["--bundle", str(tiny_bundle), "--unix-socket", str(tmp_path / "at")])
            assert "cannot listen at" in refused.stderr
            for key, status in (("second", 200), ("third", 401)):
                connection = _UnixConnection(tmp_path / "at")
                connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
                assert connection.getresponse().status == status
                connection.close()
        finally:
            process.terminate()
            process.wait()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--allow-origin", "localhost:3000"], "is not an origin"),
        (["--api-keys", "empty"], "holds no key"),
        (["--api-keys", "nothing"], "nothing"),
        (["--unix-socket", "missing/at"], "cannot listen at missing/at"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("# none\n")
    done = CliRunner().invoke(serve, ["--bundle", str(tiny_bundle), "--device", "cpu", *words])
    assert done.exit_code == 1
    assert said in done.stderr
