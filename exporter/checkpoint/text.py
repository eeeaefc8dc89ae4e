"""Tokenizer, chat template and end tokens of a Hugging Face checkpoint, as transformers would use them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from tokenizers import Tokenizer

from vtx.exporter.checkpoint.loader import checkpoint_files, read_settings
from vtx.runtime.bundle.text_settings import TextSettings
from vtx.runtime.errors import CheckpointError
from vtx.runtime.prompt.template import MAX_SOURCE
from vtx.runtime.prompt.text import MAX_TOKENIZER_BYTES, Text, parse_tokenizer, utf8

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_SMALL_FILES = ("special_tokens_map.json", "added_tokens.json")
# What a tokenizer's ids depend on. Whatever else stands in a tokenizer_config.json (auto_map, paths, templates) never
# reaches transformers.
_TOKENS = {"bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token", "image_token"}
_FLAGS = {"tokenizer_class", "add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "fix_mistral_regex"}
_TOKENIZER_KEYS = _TOKENS | _FLAGS | {"additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"}


def read_text(
    folder: Path,
    image_token_id: int,
    text_config: Mapping[str, Any],
    top_config: Mapping[str, Any],
    template: str | None = None,
) -> tuple[str, str, TextSettings]:
    """The tokenizer as tokenizer.json, the chat template, and the settings for `vtx.runtime.prompt.text.Text`.

    The tokenizer is the one transformers' AutoTokenizer makes of the checkpoint's data files, without any code of the
    checkpoint; `template` replaces the checkpoint's. A question about an image is rendered once, so that what cannot
    be asked is refused here. Raises `CheckpointError`, `TemplateError`.
    """
    template = template if template is not None else read_template(folder)
    tokenizer = _load_tokenizer(folder, text_config, top_config)
    backend = parse_tokenizer(tokenizer.backend_tokenizer.to_str(), CheckpointError)
    settings = TextSettings(
        image_token=_image_token(backend, image_token_id),
        image_token_id=image_token_id,
        bos_token=_token(tokenizer, "bos_token"),
        eos_token=_token(tokenizer, "eos_token"),
        pad_token=_token(tokenizer, "pad_token"),
        unk_token=_token(tokenizer, "unk_token"),
        end_ids=_end_ids(folder, text_config, top_config, tokenizer),
        add_special_tokens=True,
    )
    text = Text(backend, template, settings)
    text.prompt([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}], 1)
    return backend.to_str(), template, settings


def read_template(folder: Path) -> str:
    """The checkpoint's chat template, looked for where transformers looks, in its order. Raises `CheckpointError`."""
    for read, name in (
        (_template_in, "processor_config.json"),
        (_template_in, "chat_template.json"),
        (_template_file, "chat_template.jinja"),
        (_template_file, "additional_chat_templates/default.jinja"),
        (_template_in, "tokenizer_config.json"),
    ):
        template = read(folder, name)
        if template is not None:
            return template
    raise CheckpointError(
        f"{folder} has no chat template in processor_config.json, chat_template.json, chat_template.jinja, "
        "additional_chat_templates/default.jinja or tokenizer_config.json; give one with --chat-template FILE"
    )


def _template_file(folder: Path, name: str) -> str | None:
    files = checkpoint_files(folder)
    return utf8(files.read(name, 4 * MAX_SOURCE), name, CheckpointError) if files.exists(name) else None


def _template_in(folder: Path, name: str) -> str | None:
    """The key "chat_template": a string, {name: template}, or [{"name": ..., "template": ...}]."""
    found = read_settings(folder, name).get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    if isinstance(found, dict):
        found = found.get("default")
    if found is not None and not isinstance(found, str):
        raise CheckpointError(f"{name}: chat_template must be text, not {type(found).__name__}")
    return found


def _load_tokenizer(folder: Path, text_config: Mapping[str, Any], top_config: Mapping[str, Any]) -> Any:
    """AutoTokenizer's tokenizer, made from copies of the data files in an otherwise empty folder."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    with TemporaryDirectory(prefix="vtx-tokenizer-") as name:
        clean = Path(name)
        try:
            _copy_data(folder, clean, text_config, top_config)
        except OSError as error:
            raise CheckpointError(
                f"cannot copy the tokenizer of {folder} to {gettempdir()} ({error.strerror}); free some space there"
            ) from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(clean, local_files_only=True, trust_remote_code=False)
        except BaseException as error:  # tokenizers' panics derive from BaseException
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"transformers cannot load the tokenizer of {folder}: {reason}; save it as a tokenizer.json "
                "(a tokenizer.model alone needs the sentencepiece package)"
            ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not hasattr(tokenizer, "backend_tokenizer"):
        raise CheckpointError(
            f"the tokenizer of {folder} is a {type(tokenizer).__name__}, which has no tokenizer.json form; "
            "save it as a fast tokenizer with transformers first"
        )
    return tokenizer


def _copy_data(folder: Path, clean: Path, text_config: Mapping[str, Any], top_config: Mapping[str, Any]) -> None:
    files = checkpoint_files(folder)
    found = [name for name in _VOCABULARIES if files.exists(name)]
    if not {"tokenizer.json", "tokenizer.model", "vocab.json"} & set(found):
        raise CheckpointError(f"{folder} has no tokenizer.json, tokenizer.model, or vocab.json with merges.txt")
    for name in found:
        (clean / name).write_bytes(files.read(name, MAX_TOKENIZER_BYTES))
    for name in _SMALL_FILES:
        if files.exists(name):
            _write_json(clean / name, read_settings(folder, name))
    config = read_settings(folder, "tokenizer_config.json")
    _write_json(clean / "tokenizer_config.json", {key: config[key] for key in _TOKENIZER_KEYS & config.keys()})
    # The class of tokenizer hangs on these two of the model's settings. A LLaVA's own class reads no vocab.json.
    model = {key: top_config[key] for key in ("model_type", "transformers_version") if key in top_config}
    if not {"tokenizer.json", "tokenizer.model"} & set(found):
        model["model_type"] = text_config.get("model_type")
    _write_json(clean / "config.json", {key: value for key, value in model.items() if isinstance(value, str)})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _token(tokenizer: Any, name: str) -> str | None:
    token = getattr(tokenizer, name, None)
    return None if token is None else str(token)


def _image_token(tokenizer: Tokenizer, image_token_id: int) -> str:
    token = tokenizer.get_added_tokens_decoder().get(image_token_id)
    if token is None:
        raise CheckpointError(
            f"the tokenizer has no added token {image_token_id}, which the config names as the image token; "
            "take the tokenizer that belongs to the model"
        )
    ids = tokenizer.encode(token.content, add_special_tokens=False).ids
    if ids != [image_token_id]:
        raise CheckpointError(f"the tokenizer makes {ids} of the image token {token.content!r}, not [{image_token_id}]")
    return str(token.content)


def _end_ids(
    folder: Path, text_config: Mapping[str, Any], top_config: Mapping[str, Any], tokenizer: Any
) -> tuple[int, ...]:
    """Where transformers' generate would stop: by generation_config.json, else the configs, else the tokenizer."""
    generation = read_settings(folder, "generation_config.json")
    places = {"generation_config.json": generation, "config.json": top_config, "text_config": text_config}
    for place, config in places.items():
        ids = config.get("eos_token_id")
        if ids is not None:
            return _ids(ids, place)
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


def _ids(value: Any, place: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(id, int) and not isinstance(id, bool) and 0 <= id < 1 << 31 for id in ids):
        raise CheckpointError(f"{place}: eos_token_id must be one token id or a list of them, not {str(value)[:99]}")
    return tuple(dict.fromkeys(ids))
