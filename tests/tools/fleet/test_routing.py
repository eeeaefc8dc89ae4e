"""The server that gets a request: the one with its picture, within a bound, whichever servers come and go."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from vtx.runtime.errors import RequestError
from vtx.tools.fleet.arguments import Fleet
from vtx.tools.fleet.routing import order, request_key

DATA = "iVBORw0KGgo="
URL = f"data:image/png;base64,{DATA}"
KEYS = [f"picture {number}" for number in range(4000)]
NAMES = [f"replica-{number}" for number in range(8)]


def key(**fields: Any) -> str:
    return request_key(json.dumps({"model": "tiny", **fields}).encode())


def part(url: str = URL, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}, **fields}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "which?"}]}]


def test_a_picture_has_one_key_in_every_form_of_a_request() -> None:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
    keys = {
        key(messages=user(part())),
        key(messages=[{"role": "system", "content": "a"}, *user(part(), part("data:image/png;base64,AAAA"))]),
        key(messages=[*user(part()), {"role": "assistant", "content": "b"}, *user()]),
        key(messages=user({"type": "image_url", "image_url": URL})),
        key(messages=user(block), system="b"),
        key(messages=[{"role": "user", "content": "which?", "images": [DATA]}]),
        key(prompt="which?", images=[DATA]),
        key(input=user({"type": "input_image", "image_url": URL})),
    }
    assert len(keys) == 1
    assert key(messages=user(part("data:image/png;base64,BBBB"))) not in keys
    assert keys != {""}


def test_a_name_of_a_picture_stands_for_it() -> None:
    assert key(messages=user(part(uuid="door"))) == key(messages=user({"type": "image_url", "uuid": "door"}))
    assert key(messages=user(part(uuid="door"))) != key(messages=user(part(uuid="gate")))


def test_without_pictures_the_turns_of_a_chat_have_one_key_behind_common_instructions() -> None:
    system, first = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "red?"}
    later = [system, first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why?"}]
    assert key(messages=[system, first]) == key(messages=later)
    assert key(messages=[system, first]) != key(messages=[system, {"role": "user", "content": "blue?"}])


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b"5", b'{"messages": []}', b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}"]
)
def test_what_is_no_request_has_no_key(body: bytes) -> None:
    assert request_key(body) == ""


def home(key: str, names: list[str]) -> str:
    return order(key, dict.fromkeys(names, 0))[0]


def test_pictures_are_spread_and_stay_when_a_server_comes_or_goes() -> None:
    before = {key: home(key, NAMES) for key in KEYS}
    counts = Counter(before.values())
    assert max(counts.values()) < 1.3 * len(KEYS) / len(NAMES)
    without = {key: home(key, NAMES[:-1]) for key in KEYS}
    moved = [key for key in KEYS if without[key] != before[key]]
    assert moved == [key for key in KEYS if before[key] == NAMES[-1]]  # its own, and no others
    assert len({without[key] for key in moved}) == len(NAMES) - 1  # over all that are left


def test_no_server_gets_more_than_its_bound_and_the_next_is_the_same_each_time() -> None:
    loads = dict.fromkeys(NAMES, 0)
    taken = list[str]()
    for _ in range(400):  # one picture, of which everybody asks, and no answer ends
        name = order("popular", loads)[0]
        loads[name] += 1
        taken.append(name)
    assert max(loads.values()) <= 1.25 * 400 / len(NAMES) + 1
    first, second = order("popular", dict.fromkeys(NAMES, 0))[:2]
    assert order("popular", {**dict.fromkeys(NAMES, 0), first: 9})[0] == second


def test_a_server_takes_as_many_of_its_own_pictures_as_it_answers_at_a_time() -> None:
    loads = dict.fromkeys(NAMES, 0)
    first, second = order("a", loads)[:2]
    assert order("a", {**loads, first: 3}, least=4)[0] == first
    assert order("a", {**loads, first: 4}, least=4)[0] == second


def test_without_a_key_the_idlest_server_is_first() -> None:
    assert order("", {"a": 2, "b": 0, "c": 1}) == ["b", "c", "a"]
    assert order("x", {}) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "bundle=DIR"),
        ({"bundle": "a", "wrong": 1}, "no argument 'wrong'"),
        ({"bundle": "a", "cores": "x"}, "cores is 'x'"),
        ({"bundle": "a", "replicas": 3, "max_replicas": 2}, "must not be below"),
        ({"bundle": "a", "replicas": 0}, "at least 1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Fleet.read(arguments)


def test_arguments_of_a_command_line_are_read() -> None:
    fleet = Fleet.read({"bundle": "a=x/b,y/c", "replicas": "2", "parallel": "3", "kv_cache": "0.5"})
    assert (fleet.replicas, fleet.limits.parallel, fleet.limits.kv) == (2, 3, 500_000_000)
    assert {name: path.name for name, path in fleet.bundles.items()} == {"a": "b", "c": "c"}
    assert not fleet.keys()
