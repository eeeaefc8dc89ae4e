"""vtx-serve's addresses on Ray Serve: the answers of one server, from the replica that has the picture."""

from __future__ import annotations

import http.client
import importlib.util
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.fleet import PORT, deployed, replicas
from tests.support.serving import Response, Served, asking, until, user
from tests.support.tiny import random_image

from vtx.runtime.api.load import load
from vtx.runtime.errors import BundleError
from vtx.tools.fleet.arguments import Fleet

pytestmark = [
    pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason='ray is not installed; pip install "vtx-edge[ray]"'
    ),
]  # fmt: skip
PLAIN = {"k": "none", "reduce": "none"}


@pytest.fixture(scope="module")
def fleet(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("alice key-of-alice\n")
    arguments = {"bundle": f"tiny={bundle}", "replicas": "2", "cores": "1", "device": "cpu", "api_keys": str(keys)}
    with deployed(arguments) as served:
        yield served


def ask(fleet: Served, body: Any, path: str = "/v1/chat/completions") -> Response:
    return fleet.request("POST", path, json.dumps(body).encode(), content_type="application/json", **KEY)


KEY = {"x_api_key": "key-of-alice"}


def test_answers_are_those_of_one_server_whole_and_streamed(fleet: Served, bundle: Path) -> None:
    image = random_image(1)
    with load(bundle, device="cpu", threads=1) as model:
        expected = model.open(image).ask("red?", "none", reduce=None, max_new_tokens=8, ignore_eos=True)
    body = asking(user("red?", image), **PLAIN)
    whole = ask(fleet, body).json
    assert whole["usage"]["vtx"]["token_ids"] == list(expected.token_ids)
    stream = ask(fleet, {**body, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.text == whole["choices"][0]["message"]["content"]
    assert [model["id"] for model in fleet.request("GET", "/v1/models", **KEY).json["data"]] == ["tiny"]


def test_a_picture_is_asked_about_where_its_caches_are(fleet: Served) -> None:
    hits = 0
    for seed in range(20, 26):
        asked = [ask(fleet, asking(user(text, random_image(seed)), **PLAIN)).json for text in ("red?", "blue?", "why?")]
        cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in asked]
        assert cached[0] == 0
        hits += sum(map(bool, cached[1:]))
    assert hits == 12


def test_refusals_are_those_of_one_server(fleet: Served) -> None:
    assert fleet.request("GET", "/v1/models").status == 401
    assert fleet.chat(asking(user("red?"))).status == 401
    assert ask(fleet, asking(user("red?"), wrong=5)).json["error"]["param"] == "wrong"
    assert ask(fleet, {"messages": []}, "/v1/messages").json["type"] == "error"
    assert fleet.request("POST", "/v1/chat/completions", b"{}", origin="null", **KEY).status == 415
    assert fleet.request("GET", "/readyz").json == {"status": "ok"}


def test_figures_are_those_of_all_replicas(fleet: Served) -> None:
    def tokens() -> int:
        return int(fleet.request("GET", "/v1/usage", **KEY).json["completion_tokens"])

    def series() -> dict[str, str]:
        lines = fleet.request("GET", "/metrics", **KEY).body.decode().splitlines()
        return dict(line.rpartition(" ")[::2] for line in lines)  # type: ignore[misc]

    before, counted = tokens(), float(series()["vtx_completion_tokens_total"])
    for seed in range(70, 76):
        ask(fleet, asking(user("red?", random_image(seed)), **PLAIN))
    assert tokens() == before + 48
    assert float(series()["vtx_completion_tokens_total"]) == counted + 48
    assert series()["vtx_models_loaded"] == "2"
    assert fleet.request("GET", "/slots", **KEY).json == []
    assert fleet.request("GET", "/v1/usage").status == 401


def test_a_client_that_leaves_frees_its_replica(fleet: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    body = {**asking(user("red?", random_image(3)), **PLAIN), "max_tokens": 150, "stream": True}
    head = {"content-type": "application/json", "x-api-key": KEY["x_api_key"]}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), head)
    assert connection.getresponse().read(1)
    connection.close()
    assert ask(fleet, asking(user("red?", random_image(3)), **PLAIN)).status == 200


def test_a_replica_that_dies_costs_its_own_answers_and_is_replaced(fleet: Served) -> None:
    """Of answers that run, those of the other replica end whole."""
    assert len(replicas()) == 2
    before = {process.pid for process in replicas()}
    begun = threading.Barrier(9)

    def read(seed: int) -> bool:
        """True if the answer came whole; else its stream broke off, or it was refused."""
        connection = http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=120)
        body = {**asking(user("red?", random_image(seed)), **PLAIN), "max_tokens": 180, "stream": True}
        head = {"content-type": "application/json", "x-api-key": KEY["x_api_key"]}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), head)
        response = connection.getresponse()
        first = response.read(1)
        begun.wait(120)
        assert first
        with suppress(http.client.IncompleteRead, ConnectionError):
            return b"[DONE]" in response.read()
        return False

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(read, seed) for seed in range(100, 108)]
        begun.wait(120)
        replicas()[0].kill()
        whole = [answer.result() for answer in answers]
    assert any(whole), "those of the other"
    assert not all(whole), "it had some"
    statuses = [ask(fleet, asking(user("red?", random_image(seed)), **PLAIN)).status for seed in range(40, 60)]
    assert set(statuses) <= {200, 503}
    assert statuses[-5:] == [200] * 5
    until(lambda: len({process.pid for process in replicas()} - before) == 1, "another one takes its place")


def test_a_machine_with_another_bundle_is_refused(bundle: Path) -> None:
    from vtx.tools.fleet.application import Replica

    with pytest.raises(BundleError, match="another bundle"):
        Replica(Fleet(f"tiny={bundle}"), {"tiny": "0"})
