"""The ids that a checkpoint's small files give to tokens. They are compared with those of the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from vtx.runtime.bundle.spec.text_settings import MAX_ID
from vtx.runtime.errors import CheckpointError

CONFIG = "tokenizer_config.json"
ADDED = "added_tokens.json"
NAMED = "special_tokens_map.json"
UNK_ID = 0  # of <unk>, which original LLaVA's image token replaces
_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")
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


class PublishedToken(NamedTuple):
    """The id of a token, and the options of its AddedToken."""

    id: int
    options: Mapping[str, bool]


def published_tokens(folder: Path) -> dict[str, PublishedToken]:
    """The tokens to which the files give ids, by their text.

    Raises CheckpointError for ids and texts of wrong types, two ids of a token and two tokens of an id.
    """
    settings = token_settings(folder)
    special = set(texts_of([value for name, value in settings.items() if "_token" in name]))
    listed = settings.get("added_tokens_decoder") or {}
    if not isinstance(listed, Mapping):
        raise CheckpointError(f"{CONFIG}: added_tokens_decoder is a {type(listed).__name__}, not an object; {_FIX}")
    entries = [(CONFIG, id, token) for id, token in listed.items()]
    entries += [(ADDED, id, {"content": text, "special": text in special}) for text, id in _read(folder, ADDED).items()]
    tokens: dict[str, PublishedToken] = {}
    texts: dict[int, str] = {}
    for file, id, token in entries:
        text = token.get("content") if isinstance(token, Mapping) else token
        if not isinstance(text, str) or not text or not str(id).isdecimal() or int(str(id)[:20]) > MAX_ID:
            raise CheckpointError(
                f"{file}: the id of token {text!r:.40} is {id!r:.40}; a token must have a text and a whole number "
                f"from 0 to {MAX_ID:,}; {_FIX}"
            )
        number = int(str(id))
        options = {name: isinstance(token, Mapping) and token.get(name) is True for name in _OPTIONS}
        number_of = tokens.setdefault(text, PublishedToken(number, options)).id
        other = texts.setdefault(number, text)
        if (number_of, other) != (number, text):
            raise CheckpointError(
                f"{file} gives {text!r:.40} the id {number}, beside {other!r:.40} with the id {number_of}; {_FIX}"
            )
    return tokens


def check_ids(
    published: Mapping[str, PublishedToken],
    tokenizer: Tokenizer,
    vocab: int,
    pictures: Collection[int],
    ends: Collection[int],
) -> None:
    """Raise CheckpointError if the tokenizer has other ids than `published`, or text and ends may have others.

    The model's table has `vocab` tokens. Those of `pictures` may be beyond it, since their embeddings are never read,
    and so may special ones, which no text gives; those of the template are in the trial of a prompt.
    """
    for content, token in published.items():
        id = tokenizer.token_to_id(content)
        replaced = token.id == UNK_ID in pictures
        if id != token.id and not replaced:
            raise CheckpointError(
                f"{CONFIG} or {ADDED} gives {content!r:.40} the id {token.id}, and the tokenizer "
                f"{'has no such token' if id is None else id}; {_FIX}"
            )
    ordinary = [id for id, added in tokenizer.get_added_tokens_decoder().items() if not added.special]
    beyond = [id for id in (*ordinary, *ends) if id >= vocab and id not in pictures]
    if beyond:
        raise CheckpointError(
            f"an added token or eos_token_id has the id {beyond[0]} ({tokenizer.id_to_token(beyond[0])!r:.40}), and "
            f"the model has {vocab:,} tokens, numbered from 0; {_FIX}"
        )


def _read(folder: Path, name: str) -> dict[str, Any]:
    """The object in a file that the exporting process has checked, empty without the file."""
    path = folder / name
    content: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    return content
