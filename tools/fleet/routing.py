"""The choice of one of several servers: the one that has a request's picture, unless that has too many already.

Rendezvous hashing: a server that comes takes its share of the pictures and no others, and those of one that goes are
spread over the rest. The bound on a server's requests is that of consistent hashing with bounded loads.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from vtx.runtime.bundle.safetensors import parse_json
from vtx.runtime.errors import RequestError

FACTOR = 1.25  # of the mean load, above which a server gets no more of its own
PICTURES = ("image_url", "image", "source", "images", "video_url")  # fields of all addresses' forms
INSTRUCTIONS = ("system", "developer")  # roles


def request_key(body: bytes | bytearray) -> str:
    """A hash of the first picture of a request, else of its first words: those with the same belong to one server.

    Empty for a body that is no request, which any server refuses.
    """
    try:
        fields = parse_json(body, "the body", error=RequestError)
        if not isinstance(fields, dict):
            return ""
        asked = next((fields[name] for name in ("messages", "input", "prompt") if fields.get(name)), "")
        picture = _first_picture(fields.get("images"), inside=True) or _first_picture(asked)
        text = picture or _first_words(asked)
    except (RequestError, RecursionError):
        return ""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest() if text else ""


def order(key: str, loads: Mapping[str, int], *, least: int = 1, factor: float = FACTOR) -> list[str]:
    """The servers, by name with the requests that each has, in the order in which this one is offered to them.

    The first has this key's picture, as long as it has fewer than `least` requests, or than `factor` times the mean
    with this one. Without a key: those with the fewest requests first.
    """
    if not key:
        return sorted(loads, key=lambda name: (loads[name], name))
    bound = max(least, math.ceil(factor * (sum(loads.values()) + 1) / max(1, len(loads))))
    ranked = sorted(loads, key=lambda name: _weight(key, name), reverse=True)
    return sorted(ranked, key=lambda name: loads[name] >= bound)  # those within the bound first


def _weight(key: str, name: str) -> bytes:
    return hashlib.blake2b(f"{key} {name}".encode(), digest_size=8).digest()


def _first_picture(value: Any, *, inside: bool = False) -> str:
    """The name or the data of the first picture within a value of a request; empty if there is none.

    `inside`: a text is a picture.
    """
    if isinstance(value, str):
        return value.partition(",")[2] or value if inside else ""
    if isinstance(value, Mapping):
        if isinstance(value.get("uuid"), str):
            return str(value["uuid"])
        parts: Sequence[tuple[Any, bool]]
        parts = [(item, name in PICTURES or (inside and name in ("url", "data"))) for name, item in value.items()]
    else:
        parts = [(item, inside) for item in value] if isinstance(value, list) else []
    return next(filter(None, (_first_picture(item, inside=picture) for item, picture in parts)), "")


def _first_words(asked: Any) -> str:
    """The first turn, without what all requests of a program begin with."""
    turns = asked if isinstance(asked, list) else [asked]
    told = (turn for turn in turns if not (isinstance(turn, Mapping) and turn.get("role") in INSTRUCTIONS))
    return str(next(told, ""))
