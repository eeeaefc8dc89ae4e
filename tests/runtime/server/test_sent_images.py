"""Images under the names that their clients gave them: sent once, each key's own, within a bound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import Response, Served, asking, data_url, serving
from tests.support.tiny import random_image
from vtx.runtime.server.keys import Keys, read_keys
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.refusal import Refusal
from vtx.runtime.server.sent import NamedImage, SentImages

KEYS = "alice key-of-alice\nbob key-of-bob share=team\ncarol key-of-carol share=team\n"
URL, OTHER = data_url(random_image(1)), data_url(random_image(2))


def named(question: str, uuid: str, url: str | None) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": None if url is None else {"url": url}, "uuid": uuid}
    return {"role": "user", "content": [part, {"type": "text", "text": question}]}


def ask(served: Served, key: str, *messages: dict[str, Any]) -> Response:
    return served.chat(asking(*messages, k="none", reduce="none"), authorization=f"Bearer key-of-{key}")


@pytest.mark.slow
def test_a_chat_sends_its_picture_once_and_no_other_key_has_it(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}, api_keys=Keys(read_keys(KEYS, "keys"))) as served:
        first = ask(served, "bob", named("red?", "a", URL))
        said = first.json["choices"][0]["message"]
        turns = said, {"role": "user", "content": "why?"}
        whole = ask(served, "alice", named("red?", "b", URL), *turns).json["usage"]["vtx"]
        for key in ("bob", "carol"):  # who share
            reply = ask(served, key, named("red?", "a", None), *turns).json["usage"]["vtx"]
            assert reply["token_ids"] == whole["token_ids"]
        assert len(json.dumps(asking(named("red?", "a", None), *turns))) < 1000
        strange = ask(served, "alice", named("red?", "a", None))
        assert (strange.status, strange.json["error"]["code"]) == (404, "image_not_found")
        assert (
            ask(served, "bob", named("red?", "a", OTHER)).json["usage"]["vtx"]["token_ids"]
            == (ask(served, "bob", named("red?", "a", None)).json["usage"]["vtx"]["token_ids"])
        )
        assert ask(served, "bob", named("red?", "", None)).status == 400
        assert ask(served, "bob", named("red?", "x" * 129, URL)).status == 400


def test_a_server_may_keep_none(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}, Limits(sent=0)) as served:
        assert served.chat(asking(named("red?", "a", URL))).status == 200
        assert served.chat(asking(named("red?", "a", None))).status == 404
        assert served.metrics()["vtx_sent_image_bytes"] == 0


def test_the_tenant_that_has_most_loses_its_least_recently_used_image() -> None:
    sent = SentImages(100)
    sent.url(NamedImage("a", "x" * 20), "alice")
    for number in range(6):
        sent.url(NamedImage(str(number), "y" * 20), "bob")
        if number > 1:
            sent.url(NamedImage("1", None), "bob")
    assert sent.bytes == 100
    assert sent.url(NamedImage("a", None), "alice") == "x" * 20
    assert sent.url(NamedImage("1", None), "bob") == "y" * 20
    with pytest.raises(Refusal, match="no image has the uuid '0'"):
        sent.url(NamedImage("0", None), "bob")
