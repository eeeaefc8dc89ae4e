"""Log probabilities: their tokens are the text's parts, also where a character takes several."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving import Served, asking, serving, user
from vtx.runtime.errors import RequestError
from vtx.runtime.prompt.tokenizer import TokenBytes, decode, parse_tokenizer

pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
# The tiny model writes bytes at random; these are characters of one to four of them.
FIELDS = {
    "logprobs": True,
    "max_tokens": 120,
    "temperature": 4.0,
    "ignore_eos": False,
    "guided_regex": "(red |\u00e9|\u20ac|\U0001f600){12}",
}


@pytest.fixture(scope="module")
def served(tiny_bundle: Path) -> Iterator[Served]:
    with serving({"tiny": tiny_bundle}) as served:
        yield served


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_join_to_the_content_by_their_bytes(served: Served, seed: int, stream: bool) -> None:
    reply = served.chat(asking(user("red?"), stream=stream, seed=seed, top_logprobs=2, **FIELDS))
    choices = [event["choices"][0] for event in reply.events] if stream else reply.json["choices"]
    content = reply.text if stream else choices[0]["message"]["content"]
    tokens = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
    assert b"".join(bytes(token["bytes"]) for token in tokens).decode() == content
    assert any("\ufffd" in token["token"] for token in tokens), "parts of characters"
    assert all(bytes(top["bytes"]).decode("utf-8", "replace") == top["token"] for token in tokens for top in
               [token, *token["top_logprobs"]])  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stream", [False, True])
def test_offsets_of_a_completion_are_those_of_its_text(served: Served, seed: int, stream: bool) -> None:
    fields = FIELDS | {"logprobs": 1, "seed": seed, "stream": stream}
    body = json.dumps({"model": "tiny", "prompt": "red", **fields}).encode()
    reply = served.request("POST", "/v1/completions", body, content_type="application/json")
    choices = [event["choices"][0] for event in reply.events] if stream else reply.json["choices"]
    text = "".join(choice["text"] for choice in choices)
    known = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    offsets = [offset for one in known for offset in one["text_offset"]]
    tokens = [token for one in known for token in one["tokens"]]
    assert len(offsets) == len(tokens)
    assert "\ufffd" not in text
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    for token, offset in zip(tokens, offsets, strict=True):
        whole = token.rstrip("\ufffd")
        assert token.startswith("\ufffd") or text.startswith(whole, offset), (token, offset)


def test_a_completion_has_the_chosen_token_among_the_likely_ones(served: Served) -> None:
    body = json.dumps({"model": "tiny", "prompt": "red", "max_tokens": 4, "logprobs": 0}).encode()
    known = served.request("POST", "/v1/completions", body, content_type="application/json").json["choices"][0]
    chosen = zip(known["logprobs"]["tokens"], known["logprobs"]["token_logprobs"], strict=True)
    assert known["logprobs"]["top_logprobs"] == [{token: value} for token, value in chosen]


BYTES = {
    "byte level": {"decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
    "byte tokens": {"decoder": {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]}},
}  # fmt: skip


@pytest.mark.parametrize("kind", BYTES)
def test_bytes_of_tokens_of_both_kinds_join_to_what_the_tokenizer_decodes(kind: str) -> None:
    pieces = {
        "byte level": ["\u00f0\u0141", "\u013a", "\u0122", "\u0120a", "\u00c3\u00a9", "b"],
        "byte tokens": ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "\u2581a", "\u00e9"],
    }[kind]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": kind == "byte tokens"}
    text = json.dumps({"version": "1.0", "added_tokens": [], "model": model, **BYTES[kind]})
    tokenizer = parse_tokenizer(text, RequestError)
    bytes_of, ids = TokenBytes(tokenizer), [*range(len(pieces))]
    assert b"".join(map(bytes_of, ids)).decode() == decode(tokenizer, ids)
