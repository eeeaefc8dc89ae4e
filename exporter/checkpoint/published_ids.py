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
_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")
UNK_ID = 0  # of <unk>, which original LLaVA's image token replaces
_FIX = "use the files that belong to the model"


def token_settings(folder: Path) -> dict[str, Any]:
    """The settings of tokenizer_config.json, and of special_tokens_map.json those that it lacks."""
    return {**_read(folder, NAMED), **_read(folder, CONFIG)}


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The text of each special token by its name; several of one name are numbered."""
    named: dict[str, str] = {}
    for name, value in settings.items():
        if name in ("additional_special_tokens", "extra_special_tokens") and isinstance(value, list):
            named |= {f"{name} {number}": text for number, token in enumerate(value) if (text := _text(token))}
        elif name == "extra_special_tokens" and isinstance(value, Mapping):
            named |= {name: text for name, token in value.items() if (text := _text(token))}
        elif name.endswith("_token") and (text := _text(value)):
            named[name] = text
    return named


def published_tokens(folder: Path) -> dict[str, dict[str, Any]]:
    """The tokens to which the files give ids, in the form of tokenizer.json, by their text. Raises CheckpointError."""
    special = set(named_tokens(token_settings(folder)).values())
    tokens: dict[str, dict[str, Any]] = {}
    texts: dict[int, str] = {}
    for file, id, settings in _entries(folder):
        content = settings.get("content")
        if not isinstance(content, str) or not content:
            raise CheckpointError(f"{file}: token {id!r:.40} is {settings!r:.60}, which has no text; {_FIX}")
        if not str(id).isdecimal() or int(str(id)[:20]) > MAX_ID:
            raise CheckpointError(
                f"{file}: the id of token {content!r:.40} is {id!r:.40}; it must be a whole number from 0 to "
                f"{MAX_ID:,}; {_FIX}"
            )
        number = int(str(id))
        options = {name: settings.get(name) is True for name in _OPTIONS}
        options["special"] = settings.get("special", content in special) is True
        token = tokens.setdefault(content, {"id": number, "content": content, **options})
        other = texts.setdefault(number, content)
        if token["id"] != number:
            raise CheckpointError(f"{file}: token {content!r:.40} has the ids {token['id']} and {number}; {_FIX}")
        if other != content:
            raise CheckpointError(f"{file}: tokens {other!r:.40} and {content!r:.40} have the same id {number}; {_FIX}")
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
    for id, token in tokenizer.get_added_tokens_decoder().items():
        if id >= vocab and id not in pictures and not token.special:
            raise CheckpointError(
                f"the tokenizer's token {token.content!r:.40} has the id {id}, and the model has {vocab:,} tokens, "
                f"numbered from 0; {_FIX}"
            )
    for id in ends:
        if id >= vocab or tokenizer.id_to_token(id) is None:
            raise CheckpointError(
                f"eos_token_id is {id}; the model has {vocab:,} tokens, and the tokenizer "
                f"{tokenizer.get_vocab_size():,}, numbered from 0; {_FIX}"
            )


def _entries(folder: Path) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """The file, id and settings of each token that has an id."""
    listed = _read(folder, CONFIG).get("added_tokens_decoder") or {}
    if not isinstance(listed, Mapping):
        raise CheckpointError(f"{CONFIG}: added_tokens_decoder is a {type(listed).__name__}, not an object; {_FIX}")
    for id, settings in listed.items():
        yield CONFIG, id, settings if isinstance(settings, Mapping) else {"content": settings}
    for content, id in _read(folder, ADDED).items():
        yield ADDED, id, {"content": content}


def _text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) and text else None


def _read(folder: Path, name: str) -> dict[str, Any]:
    """The object in a file that the exporting process has checked, empty without the file."""
    path = folder / name
    content: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    return content
