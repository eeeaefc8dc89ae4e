"""Tokenizer, chat template and end tokens of a Hugging Face checkpoint, as transformers would use them.

A tokenizer and a template are a stranger's programs. They are loaded, tried and resolved in a confined process; what
comes back, and nothing else, goes into a bundle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from vtx.exporter.checkpoint.loader import checkpoint_files, read_settings
from vtx.runtime.bundle.spec.text_settings import MAX_ID, TextSettings
from vtx.runtime.errors import CheckpointError
from vtx.runtime.host.confined import ChildLimits, confine
from vtx.runtime.prompt.text import MAX_TEMPLATE_BYTES, MAX_TOKENIZER_BYTES, utf8
from vtx.runtime.strict import Strict

LIMITS = ChildLimits()
_CURE = "get the checkpoint from somebody you trust, or give another template with vtx-export --chat-template FILE"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_SMALL_FILES = ("special_tokens_map.json", "added_tokens.json")
# What a tokenizer's ids depend on. Whatever else stands in a tokenizer_config.json (auto_map, paths, templates) never
# reaches transformers.
_TOKENS = {
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
    "image_token",
    "video_token",
}
_FLAGS = {"tokenizer_class", "add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "fix_mistral_regex"}
_TOKENIZER_KEYS = _TOKENS | _FLAGS | {"additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"}


def read_text(
    folder: Path,
    image_token_id: int,
    text_config: Mapping[str, Any],
    top_config: Mapping[str, Any],
    template: str | None = None,
    limits: ChildLimits = LIMITS,
    *,
    original: bool = False,
    video_token_id: int | None = None,
    seg_token: str | None = None,
    end_ids: tuple[int, ...] | None = None,
) -> tuple[str, str, TextSettings]:
    """The tokenizer as tokenizer.json, the chat template, and the settings for `vtx.runtime.prompt.text.Text`.

    The tokenizer is the one transformers' AutoTokenizer makes of the checkpoint's data files, without any code of the
    checkpoint; `template` replaces the checkpoint's. A question about an image is tried, so that what cannot be asked
    is refused here. `original`: the tokenizer is a tokenizer.model without an image token, which gets one.
    `end_ids` end an answer, whatever the files say.

    Raises:
        CheckpointError: what is damaged, hostile, or does not fit together.
        TemplateError: a chat template that cannot be used.
        UnsupportedModelError: a tokenizer.model of another kind.

    """
    template = template if template is not None else read_template(folder)
    with TemporaryDirectory(prefix="vtx-tokenizer-") as name:
        try:
            _copy_data(folder, Path(name), text_config, top_config)
        except OSError as error:
            raise CheckpointError(
                f"cannot copy the tokenizer of {folder} to {gettempdir()} ({error.strerror}); free some space there"
            ) from error
        request = {
            "folder": name,
            "name": str(folder),
            "image_token_id": image_token_id,
            "video_token_id": video_token_id,
            "end_ids": _end_ids(folder, text_config, top_config) if end_ids is None else list(end_ids),
            "template": template,
            "original": original,
            "seg_token": seg_token,
        }
        resolved = _resolved(request, limits, f"the tokenizer or the chat template of {folder.name or folder}")
    return resolved["tokenizer"], template, Strict().read(TextSettings, resolved["settings"], "text")


def read_plain_tokenizer(folder: Path, model_type: str, vocab: int, limits: ChildLimits = LIMITS) -> str:
    """The tokenizer.json of an encoder of texts, without chat or image token, made and tried as by `read_text`.

    It gives ids below `vocab`, one at least. Raises `CheckpointError`.
    """
    with TemporaryDirectory(prefix="vtx-tokenizer-") as name:
        try:
            _copy_data(folder, Path(name), {"model_type": model_type}, {"model_type": model_type})
        except OSError as error:
            raise CheckpointError(
                f"cannot copy the tokenizer of {folder} to {gettempdir()} ({error.strerror}); free some space there"
            ) from error
        return str(
            confine(
                "vtx.exporter.checkpoint.resolving:resolve_plain",
                {"folder": name, "name": str(folder), "vocab": vocab},
                subject=f"the tokenizer of {folder.name or folder}",
                limits=limits,
                reads=[name],
            )
        )


RESOLVED: dict[str, Any] = {}  # by digest: an export that tries two precisions resolves the same files twice


def _resolved(request: dict[str, Any], limits: ChildLimits, subject: str) -> Any:
    files = sorted(Path(request["folder"]).iterdir())
    contents = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    key = hashlib.sha256(json.dumps([contents, {**request, "folder": "", "name": ""}]).encode()).hexdigest()
    if key not in RESOLVED:
        RESOLVED[key] = confine(
            "vtx.exporter.checkpoint.resolving:resolve",
            request,
            subject=subject,
            limits=limits,
            reads=[request["folder"]],
            cure=_CURE,
        )
    return RESOLVED[key]


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
    return utf8(files.read(name, MAX_TEMPLATE_BYTES), name, CheckpointError) if files.exists(name) else None


def _template_in(folder: Path, name: str) -> str | None:
    """The key "chat_template": a string, {name: template}, or [{"name": ..., "template": ...}]."""
    template = read_settings(folder, name).get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    if isinstance(template, dict):
        template = template.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{name}: chat_template must be text, not {type(template).__name__}")
    return template


def _copy_data(folder: Path, clean: Path, text_config: Mapping[str, Any], top_config: Mapping[str, Any]) -> None:
    files = checkpoint_files(folder)
    vocabularies = [name for name in _VOCABULARIES if files.exists(name)]
    if not {"tokenizer.json", "tokenizer.model", "vocab.json"} & set(vocabularies):
        raise CheckpointError(f"{folder} has no tokenizer.json, tokenizer.model, or vocab.json with merges.txt")
    for name in vocabularies:
        (clean / name).write_bytes(files.read(name, MAX_TOKENIZER_BYTES))
    for name in _SMALL_FILES:
        if files.exists(name):
            _write_json(clean / name, read_settings(folder, name))
    config = read_settings(folder, "tokenizer_config.json")
    _write_json(clean / "tokenizer_config.json", {key: config[key] for key in _TOKENIZER_KEYS & config.keys()})
    # The class of tokenizer hangs on these two of the model's settings. A LLaVA's own class reads no vocab.json.
    model = {key: top_config[key] for key in ("model_type", "transformers_version") if key in top_config}
    if not {"tokenizer.json", "tokenizer.model"} & set(vocabularies):
        model["model_type"] = text_config.get("model_type")
    _write_json(clean / "config.json", {key: value for key, value in model.items() if isinstance(value, str)})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _end_ids(folder: Path, text_config: Mapping[str, Any], top_config: Mapping[str, Any]) -> list[int] | None:
    """Where transformers' generate would stop: by generation_config.json, else the configs; None: by the tokenizer."""
    generation = read_settings(folder, "generation_config.json")
    sources = {"generation_config.json": generation, "config.json": top_config, "text_config": text_config}
    for name, config in sources.items():
        ids = config.get("eos_token_id")
        if ids is not None:
            return _ids(ids, name)
    return None


def _ids(value: Any, name: str) -> list[int]:
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(id, int) and not isinstance(id, bool) and 0 <= id <= MAX_ID for id in ids):
        raise CheckpointError(f"{name}: eos_token_id must be one token id or a list of them, not {str(value)[:99]}")
    return list(dict.fromkeys(ids))
