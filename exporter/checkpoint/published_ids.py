"""The ids that a checkpoint's small files give to tokens. They are compared with those of the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from vtx.runtime.bundle.spec.text_settings import MAX_ID
from vtx.runtime.errors import CheckpointError

CONFIG, ADDED, NAMED = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
UNK_ID = 0  # of <unk>, which original LLaVA's image token replaces
_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized")
_FIX = "use the files that belong to the model"


def token_settings(folder: Path) -> dict[str, Any]:
    """The settings of tokenizer_config.json, and of special_tokens_map.json those that it lacks."""
    return {**_read(folder, NAMED), **_read(folder, CONFIG)}


def texts_of(value: Any) -> Iterator[str]:
    """The texts of one or several special tokens in a setting, which are strings or objects with their `content`."""
    if isinstance(value, Mapping):
        value = value["content"] if "content" in value else list(value.values())
    if isinstance(value, str) and value:
        yield value
    for item in value if isinstance(value, list) else ():
        yield from texts_of(item)


def published_tokens(folder: Path) -> dict[str, dict[str, Any]]:
    """The tokens to which the files give ids, by their text: `id` and the options of an AddedToken.

    Raises CheckpointError for ids and texts of wrong types, two ids of a token and two tokens of an id.
    """
    settings = token_settings(folder)
    special = set(texts_of([value for name, value in settings.items() if "_token" in name]))
    listed = settings.get("added_tokens_decoder") or {}
    if not isinstance(listed, Mapping):
        raise CheckpointError(f"{CONFIG}: added_tokens_decoder is a {type(listed).__name__}, not an object; {_FIX}")
    entries = [
        (CONFIG, id, token if isinstance(token, Mapping) else {"content": token}) for id, token in listed.items()
    ]
    entries += [(ADDED, id, {"content": text, "special": text in special}) for text, id in _read(folder, ADDED).items()]
    tokens: dict[str, dict[str, Any]] = {}
    texts: dict[int, str] = {}
    for file, id, token in entries:
        text = token.get("content")
        if not isinstance(text, str) or not text:
            raise CheckpointError(f"{file}: token {id!r:.40} is {token!r:.60}, which has no text; {_FIX}")
        if not str(id).isdecimal() or int(str(id)[:20]) > MAX_ID:
            raise CheckpointError(
                f"{file}: the id of token {text!r:.40} is {id!r:.40}; it must be a whole number from 0 to "
                f"{MAX_ID:,}; {_FIX}"
            )
        options = {name: token.get(name) is True for name in (*_OPTIONS, "special")}
        known = tokens.setdefault(text, {"id": int(str(id)), **options})["id"]
        other = texts.setdefault(int(str(id)), text)
        if known != int(str(id)):
            raise CheckpointError(f"{file}: token {text!r:.40} has the ids {known} and {id}; {_FIX}")
        if other != text:
            raise CheckpointError(f"{file}: tokens {other!r:.40} and {text!r:.40} have the same id {id}; {_FIX}")
    return tokens


def check_ids(
    published: Mapping[str, Mapping[str, Any]], tokenizer: Tokenizer, vocab: int, pictures: Collection[int],
    ends: Collection[int],
) -> None:  # fmt: skip
    """Raise CheckpointError if the tokenizer has other ids than `published`, or text and ends may have others.

    The model's table has `vocab` tokens. Those of `pictures` may be beyond it, since their embeddings are never read,
    and so may special ones, which no text gives; those of the template are in the trial of a prompt.
    """
    for content, token in published.items():
        id = tokenizer.token_to_id(content)
        replaced = token["id"] == UNK_ID in pictures
        if id != token["id"] and not replaced:
            raise CheckpointError(
                f"{CONFIG} or {ADDED} gives {content!r:.40} the id {token['id']}, and the tokenizer "
                f"{'has no such token' if id is None else id}; {_FIX}"
            )
    for id, added in tokenizer.get_added_tokens_decoder().items():
        if id >= vocab and id not in pictures and not added.special:
            raise CheckpointError(
                f"the tokenizer's token {added.content!r:.40} has the id {id}, and the model has {vocab:,} tokens, "
                f"numbered from 0; {_FIX}"
            )
    if beyond := [id for id in ends if id >= vocab]:
        raise CheckpointError(
            f"eos_token_id is {beyond[0]}, and the model has {vocab:,} tokens, numbered from 0; {_FIX}"
        )


def _read(folder: Path, name: str) -> dict[str, Any]:
    """The object in a file that the exporting process has checked, empty without the file."""
    path = folder / name
    content: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    return content
