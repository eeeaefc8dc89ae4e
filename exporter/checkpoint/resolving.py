"""Resolving a tokenizer and a chat template into data. Runs in the confined process."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from vtx.exporter.checkpoint.examples import with_examples
from vtx.exporter.checkpoint.generation import turn_ends
from vtx.exporter.checkpoint.original.tokenizer import FILE as SENTENCEPIECE
from vtx.exporter.checkpoint.original.tokenizer import original_tokenizer, sentencepiece_tokenizer
from vtx.exporter.checkpoint.published_ids import UNK_ID, check_ids, published_tokens
from vtx.exporter.checkpoint.tokenizer_spec import check_bytes, check_spec, length_bound
from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.errors import CheckpointError
from vtx.runtime.prompt.messages import PICTURES, Part
from vtx.runtime.prompt.text import Text
from vtx.runtime.prompt.tokenizer import encode, parse_tokenizer, rust_errors
from vtx.runtime.strict import json_value

MAX_ADDED_IDS = 16  # that a tokenizer adds around a prompt
IMAGE = "<image>"  # of PaliGemma and pi0
_QUESTION = "What is this? {} 123 {}"


def resolve(request: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer.json and text settings of the files in `folder`; `name` is for messages, `end_ids` may be None."""
    image = request["image_token_id"]
    published = published_tokens(Path(request["folder"]))  # refuses wrong types before transformers fails on them
    loaded = _loaded(request)
    spec = json.loads(loaded.backend_tokenizer.to_str())
    check_spec(spec)
    check_bytes(spec, request["name"])
    tokenizer = parse_tokenizer(loaded.backend_tokenizer.to_str(), CheckpointError)
    ends = request["end_ids"]
    if ends is None:
        ends = [] if loaded.eos_token_id is None else [int(loaded.eos_token_id)]
    video = request["video_token_id"]
    seg = request.get("seg_token")
    check_ids(published, tokenizer, request["vocab"], {image, video}, ends)
    adds = not request.get("whole")
    before, after = _ids_around(tokenizer, adds=adds)
    tokens = {
        name: None if getattr(loaded, name, None) is None else str(getattr(loaded, name))
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
    }
    seg_id = None if seg is None else tokenizer.token_to_id(seg)
    if seg is not None and (seg_id is None or encode(tokenizer, seg).ids != [seg_id]):
        raise CheckpointError(f"the tokenizer has no token {seg}; use the tokenizer that belongs to the model")
    image_token = _added_token(tokenizer, image, "image")
    if getattr(loaded, "image_token", None) not in (None, image_token):
        raise CheckpointError(
            f"the tokenizer's image_token is {str(loaded.image_token)!r:.40}, and the config's, {image}, is "
            f"{image_token!r:.40}; use the tokenizer that belongs to the model"
        )
    settings = TextSettings(
        image_token=image_token,
        image_token_id=image,
        **tokens,
        end_ids=tuple(ends),
        add_special_tokens=adds,
        ids_before=before,
        ids_after=after,
        control_tokens={},
        length_bound=None,
        examples=(),
        video_token=None if video is None else _added_token(tokenizer, video, "video"),
        video_token_id=video,
        seg_token_id=seg_id,
        boxes=None,
    )
    if not request["stated"]:
        turns = [id for id in turn_ends(tokenizer, request["template"], settings).values() if id not in ends]
        settings = replace(settings, end_ids=(*ends, *turns))
    control = control_tokens(tokenizer, settings)
    settings = replace(settings, control_tokens=control, length_bound=length_bound(spec, control))
    settings = with_examples(settings, request["template"])
    _try(Text(tokenizer, request["template"], settings, vocab=max(request["vocab"], image + 1)), "".join(control))
    return {"tokenizer": tokenizer.to_str(), "settings": json_value(settings)}


def _loaded(request: dict[str, Any]) -> Any:
    """Transformers' tokenizer of the folder, with the image token that the family's processor adds."""
    folder = Path(request["folder"])
    image = request["image_token_id"]
    if request.get("original") and (image == UNK_ID or (folder / SENTENCEPIECE).exists()):
        loaded = original_tokenizer(folder, request["name"], own_image_token=image != UNK_ID)
    else:
        loaded = _load(folder, request["name"], fix_mistral_regex=bool(request.get("fix_mistral_regex")))
    if request.get("whole") and image == len(loaded):
        loaded.add_tokens(AddedToken(IMAGE, normalized=False, special=True), special_tokens=True)
    return loaded


def _ids_around(tokenizer: Tokenizer, *, adds: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the tokenizer puts before and behind a prompt, none unless it `adds` them."""
    encoding = encode(tokenizer, "a", add_special_tokens=adds)
    added = encoding.special_tokens_mask
    start = end = len(added)
    if 0 in added:
        start = added.index(0)
        end -= added[::-1].index(0)
    if start + len(added) - end > MAX_ADDED_IDS:
        raise CheckpointError(
            f"the tokenizer adds {start + len(added) - end} tokens to every prompt, the limit is {MAX_ADDED_IDS}; "
            "use the tokenizer that belongs to the model"
        )
    return tuple(encoding.ids[:start]), tuple(encoding.ids[end:])


def _try(text: Text, control: str) -> None:
    """Ask about an image, or a video, with control tokens as text in it, and decode the prompt."""
    for typed, kind in product(("", control), PICTURES if text.settings.video_token_id is not None else PICTURES[:1]):
        picture: Part = {"type": "video"} if kind == "video" else {"type": "image"}
        words: Part = {"type": "text", "text": _QUESTION.format("猫", typed)}
        text.decode(text.prompt([{"role": "user", "content": [picture, words]}], 1))


def resolve_plain(request: dict[str, Any]) -> str:
    """The tokenizer.json of `folder`, called `name` in messages, after a trial; ids are below `vocab`."""
    text: str = _load(Path(request["folder"]), request["name"]).backend_tokenizer.to_str()
    check_spec(json.loads(text))
    tokenizer = parse_tokenizer(text, CheckpointError)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    for words in ("", _QUESTION.format("猫", "")):
        ids = list(encode(tokenizer, words, add_special_tokens=True).ids)
        if not ids or max(ids) >= request["vocab"]:
            raise CheckpointError(
                f"the tokenizer of {request['name']} gives the ids {ids[:8]} for {words!r}, and the model has "
                f"{request['vocab']:,} tokens; use the tokenizer that belongs to the model"
            )
    return str(tokenizer.to_str())


def control_tokens(tokenizer: Tokenizer, settings: TextSettings) -> dict[str, int]:
    """Tokens that no text may give, by their text: the special ones, and those in the settings."""
    added = tokenizer.get_added_tokens_decoder()
    control: dict[str, int | None] = {token.content: id for id, token in added.items() if token.special}
    named = [*settings.variables().values(), *map(tokenizer.id_to_token, settings.end_ids)]
    control |= {token: tokenizer.token_to_id(token) for token in named if token}
    return {token: id for token, id in control.items() if id is not None}


def _load(folder: Path, name: str, *, fix_mistral_regex: bool = False) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if (folder / "tokenizer.json").exists():
        try:
            check_spec(json.loads((folder / "tokenizer.json").read_bytes()))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"tokenizer.json of {name} is not valid JSON ({error}); download it again") from error
    elif (folder / SENTENCEPIECE).exists():
        return sentencepiece_tokenizer(folder, name)
    fix = "save it as a tokenizer.json"
    with rust_errors(CheckpointError, f"transformers cannot load the tokenizer of {name}; {fix}"):
        options = {"fix_mistral_regex": True} if fix_mistral_regex else {}
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not hasattr(tokenizer, "backend_tokenizer"):
        raise CheckpointError(
            f"the tokenizer of {name} is a {type(tokenizer).__name__}, which has no tokenizer.json form; "
            "save it as a fast tokenizer with transformers first"
        )
    return tokenizer


def _added_token(tokenizer: Tokenizer, id: int, kind: str) -> str:
    token = tokenizer.get_added_tokens_decoder().get(id)
    if token is None:
        raise CheckpointError(
            f"the tokenizer has no added token {id}, which the config names as the {kind} token; "
            "use the tokenizer that belongs to the model"
        )
    ids = encode(tokenizer, token.content).ids
    if ids != [id]:
        raise CheckpointError(f"the tokenizer encodes the {kind} token {token.content!r} as {ids}, not [{id}]")
    return str(token.content)
