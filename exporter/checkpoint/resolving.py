"""What is done in the confined process: load a tokenizer, try it and the chat template, and resolve both into data."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from vtx.exporter.checkpoint.forms import IrregularError, derive_forms
from vtx.exporter.checkpoint.length_bound import length_bound
from vtx.exporter.checkpoint.original.tokenizer import FILE as SENTENCEPIECE
from vtx.exporter.checkpoint.original.tokenizer import UNK_ID, original_tokenizer
from vtx.exporter.checkpoint.tokenizer_limits import check_bytes, check_spec
from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.errors import CheckpointError
from vtx.runtime.prompt.messages import PICTURES, Part
from vtx.runtime.prompt.shaping import ShapingTemplate
from vtx.runtime.prompt.text import Text
from vtx.runtime.prompt.tokenizer import encode, parse_tokenizer, rust_errors
from vtx.runtime.strict import json_value

MAX_ADDED_IDS = 16  # that a tokenizer adds around a prompt
_QUESTION = "What is this? {} 123 {}"


def resolve(request: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer.json and the text settings of a checkpoint's copied files.

    `folder` holds the files, `name` is what messages call it; `end_ids` None: where the tokenizer says.
    Raises `CheckpointError`, `TemplateError`.
    """
    folder, image = Path(request["folder"]), request["image_token_id"]
    if request.get("original") and (image == UNK_ID or (folder / SENTENCEPIECE).exists()):
        loaded = original_tokenizer(folder, request["name"], own_image_token=image != UNK_ID)
    else:
        loaded = _load(folder, request["name"])
    text = loaded.backend_tokenizer.to_str()
    spec = json.loads(text)
    check_spec(spec)
    check_bytes(spec, request["name"])
    tokenizer = parse_tokenizer(text, CheckpointError)
    ends = request["end_ids"]
    if ends is None:
        ends = [] if loaded.eos_token_id is None else [int(loaded.eos_token_id)]
    before, after = _added_ids(tokenizer)
    video = request["video_token_id"]
    settings = TextSettings(
        image_token=_added_token(tokenizer, request["image_token_id"], "image"),
        image_token_id=request["image_token_id"],
        bos_token=_token(loaded, "bos_token"),
        eos_token=_token(loaded, "eos_token"),
        pad_token=_token(loaded, "pad_token"),
        unk_token=_token(loaded, "unk_token"),
        end_ids=tuple(ends),
        add_special_tokens=True,
        ids_before=before,
        ids_after=after,
        control_tokens={},
        length_bound=None,
        forms=None,
        no_forms="not derived yet",
        video_token=None if video is None else _added_token(tokenizer, video, "video"),
        video_token_id=video,
        seg_token_id=_seg_token(tokenizer, request.get("seg_token")),
    )
    control = control_tokens(tokenizer, settings)
    settings = replace(settings, control_tokens=control, length_bound=length_bound(spec, control))
    settings = with_forms(settings, request["template"])
    _try(Text(tokenizer, request["template"], settings))
    return {"tokenizer": tokenizer.to_str(), "settings": json_value(settings)}


def resolve_plain(request: dict[str, Any]) -> str:
    """The tokenizer.json of `folder`, which `name` is called in messages, tried; ids are below `vocab`.

    Raises `CheckpointError`.
    """
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
                f"{request['vocab']:,} tokens; take the tokenizer that belongs to the model"
            )
    return str(tokenizer.to_str())


def with_forms(settings: TextSettings, template: str) -> TextSettings:
    """The settings with the template's forms, or with the reason why there are none. Raises `TemplateError`."""
    shaping = ShapingTemplate(template, settings)

    def render(messages: Any, reply: bool) -> str:
        return shaping.render(messages, add_generation_prompt=reply)

    try:
        forms = derive_forms(render, template)
    except IrregularError as reason:
        return replace(settings, forms=None, no_forms=str(reason))
    return replace(settings, forms=forms, no_forms=None)


def control_tokens(tokenizer: Tokenizer, settings: TextSettings) -> dict[str, int]:
    """The tokens nobody may type, by their text: the special ones, and those that settings name."""
    added = tokenizer.get_added_tokens_decoder()
    control: dict[str, int | None] = {token.content: id for id, token in added.items() if token.special}
    named = [*settings.variables().values(), *map(tokenizer.id_to_token, settings.end_ids)]
    control |= {token: tokenizer.token_to_id(token) for token in named if token}
    return {token: id for token, id in control.items() if id is not None}


def _load(folder: Path, name: str) -> Any:
    """AutoTokenizer's tokenizer, made from copies of the data files in an otherwise empty folder."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if (folder / "tokenizer.json").exists():
        try:
            check_spec(json.loads((folder / "tokenizer.json").read_bytes()))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"tokenizer.json of {name} is not sound JSON ({error}); download it again") from error
    cure = "save it as a tokenizer.json (a tokenizer.model alone needs the sentencepiece package)"
    with rust_errors(CheckpointError, f"transformers cannot load the tokenizer of {name}; {cure}"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not hasattr(tokenizer, "backend_tokenizer"):
        raise CheckpointError(
            f"the tokenizer of {name} is a {type(tokenizer).__name__}, which has no tokenizer.json form; "
            "save it as a fast tokenizer with transformers first"
        )
    return tokenizer


def _token(tokenizer: Any, name: str) -> str | None:
    token = getattr(tokenizer, name, None)
    return None if token is None else str(token)


def _added_token(tokenizer: Tokenizer, id: int, kind: str) -> str:
    """The token that stands for an image or a video."""
    token = tokenizer.get_added_tokens_decoder().get(id)
    if token is None:
        raise CheckpointError(
            f"the tokenizer has no added token {id}, which the config names as the {kind} token; "
            "take the tokenizer that belongs to the model"
        )
    ids = encode(tokenizer, token.content).ids
    if ids != [id]:
        raise CheckpointError(f"the tokenizer makes {ids} of the {kind} token {token.content!r}, not [{id}]")
    return str(token.content)


def _seg_token(tokenizer: Tokenizer, token: str | None) -> int | None:
    """The id of the token that stands for a segment, where the family has one."""
    if token is None:
        return None
    id = tokenizer.token_to_id(token)
    if id is None or encode(tokenizer, token).ids != [id]:
        raise CheckpointError(f"the tokenizer has no token {token}; take the tokenizer that belongs to the model")
    return int(id)


def _added_ids(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the tokenizer puts before and after a text."""
    encoding = encode(tokenizer, "a", add_special_tokens=True)
    marks = encoding.special_tokens_mask
    start = marks.index(0) if 0 in marks else len(marks)
    end = len(marks) - marks[::-1].index(0) if 0 in marks else len(marks)
    if start + len(marks) - end > MAX_ADDED_IDS:
        raise CheckpointError(
            f"the tokenizer adds {start + len(marks) - end} tokens to every prompt, the limit is {MAX_ADDED_IDS}; "
            "take the tokenizer that belongs to the model"
        )
    return tuple(encoding.ids[:start]), tuple(encoding.ids[end:])


def _try(text: Text) -> None:
    """Ask a question about an image, or a video, one that holds special tokens as text, and decode it."""
    kinds = PICTURES if text.settings.video_token_id is not None else PICTURES[:1]
    for typed, kind in product(("", "".join(text.settings.control_tokens)), kinds):
        picture: Part = {"type": "video"} if kind == "video" else {"type": "image"}
        words: Part = {"type": "text", "text": _QUESTION.format("猫", typed)}
        text.decode(text.prompt([{"role": "user", "content": [picture, words]}], 1))
