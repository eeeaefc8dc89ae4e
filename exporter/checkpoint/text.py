"""Tokenizer, chat template and end tokens of a Hugging Face checkpoint, as transformers would use them.

A tokenizer and a template are untrusted programs. They are loaded, tried and resolved in a confined process; only its
result goes into a bundle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from vtx.exporter.checkpoint.generation import FILE as GENERATION
from vtx.exporter.checkpoint.hub import checkpoint_files
from vtx.exporter.checkpoint.settings import read_settings
from vtx.runtime.bundle.spec.text_settings import MAX_ID, TextSettings
from vtx.runtime.errors import CheckpointError
from vtx.runtime.host.confined import ChildLimits, ChildTask, Subject, confine
from vtx.runtime.prompt.text import MAX_TEMPLATE_BYTES, MAX_TOKENIZER_BYTES, utf8
from vtx.runtime.strict import Strict

LIMITS = ChildLimits()
_FIX = "get the checkpoint from a source you trust, or give another template with vtx-export --chat-template FILE"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_TEMPLATES = (
    "processor_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/default.jinja",
    "tokenizer_config.json",
)
_SMALL_FILES = ("special_tokens_map.json", "added_tokens.json")
# The keys that a tokenizer's ids depend on. Others (auto_map, paths, templates) never reach transformers.
_TOKENIZER_KEYS = {
    "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token", "image_token",
    "video_token", "tokenizer_class", "add_bos_token", "add_eos_token", "add_prefix_space", "legacy",
    "fix_mistral_regex", "additional_special_tokens", "extra_special_tokens", "added_tokens_decoder",
}  # fmt: skip
RESOLVED: dict[str, Any] = {}  # by digest: an export that tries two precisions resolves the same files twice


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The reading of a checkpoint's tokenizer and template.

    `template` replaces the checkpoint's. `original`: the tokenizer is a tokenizer.model without an image token, which
    gets one. `end_ids` end an answer, whatever the files say; if neither they nor generation_config.json are given, the
    tokenizer's end token and the template's end of a turn are added. `whole`: the template prints all of a prompt, to
    which the tokenizer adds nothing. `vocab` is the number of the model's tokens. `fix_mistral_regex` as in `Family`.
    """

    template: str | None = None
    original: bool = False
    video_token_id: int | None = None
    seg_token: str | None = None
    end_ids: tuple[int, ...] | None = None
    whole: bool = False
    vocab: int = MAX_ID + 1
    fix_mistral_regex: bool = False


def read_text(
    folder: Path,
    image_token_id: int,
    text_config: Mapping[str, Any],
    top_config: Mapping[str, Any],
    options: TextOptions = TextOptions(),
    limits: ChildLimits = LIMITS,
) -> tuple[str, str, TextSettings]:
    """The tokenizer as tokenizer.json, the chat template, and the settings for `vtx.runtime.prompt.text.Text`.

    The tokenizer is the one that transformers' AutoTokenizer makes of the checkpoint's data files, without any code of
    the checkpoint. A question about an image is tried, so that models without a usable prompt are refused here. Raises
    CheckpointError, TemplateError, UnsupportedModelError.
    """
    template = options.template if options.template is not None else read_template(folder)
    end_ids = options.end_ids
    from_file = end_ids is not None or read_settings(folder, GENERATION).get("eos_token_id") is not None
    if end_ids is None:
        end_ids = _end_ids(folder, text_config, top_config)
    with _copied(folder, text_config, top_config) as copy:
        request = {
            **asdict(options),
            "folder": str(copy),
            "name": str(folder),
            "image_token_id": image_token_id,
            "end_ids": None if end_ids is None else list(end_ids),
            "template": template,
            "stated": from_file,
        }
        files = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in sorted(copy.iterdir())]
        key = hashlib.sha256(json.dumps([files, {**request, "folder": "", "name": ""}]).encode()).hexdigest()
        if key not in RESOLVED:
            RESOLVED[key] = confine(
                ChildTask("vtx.exporter.checkpoint.resolving:resolve", request, limits, reads=(str(copy),)),
                Subject(f"the tokenizer or the chat template of {folder.name or folder}", cure=_FIX),
            )
    resolved = RESOLVED[key]
    return resolved["tokenizer"], template, Strict().read(TextSettings, resolved["settings"], "text")


def read_plain_tokenizer(folder: Path, model_type: str, vocab: int, limits: ChildLimits = LIMITS) -> str:
    """The tokenizer.json of a text encoder, without chat or image token: it gives an id at least, all below `vocab`."""
    with _copied(folder, {"model_type": model_type}, {"model_type": model_type}) as copy:
        request = {"folder": str(copy), "name": str(folder), "vocab": vocab}
        task = ChildTask("vtx.exporter.checkpoint.resolving:resolve_plain", request, limits, reads=(str(copy),))
        return str(confine(task, Subject(f"the tokenizer of {folder.name or folder}")))


def read_template(folder: Path) -> str:
    """The checkpoint's chat template, from the files and in the order of transformers. Raises `CheckpointError`."""
    files = checkpoint_files(folder)
    for name in _TEMPLATES:
        template: Any
        if not name.endswith(".json"):
            template = utf8(files.read(name, MAX_TEMPLATE_BYTES), name, CheckpointError) if files.exists(name) else None
        else:  # a string, {name: template}, or [{"name": ..., "template": ...}]
            template = read_settings(folder, name).get("chat_template")
            if isinstance(template, list):
                template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            if isinstance(template, dict):
                template = template.get("default")
            if template is not None and not isinstance(template, str):
                raise CheckpointError(f"{name}: chat_template must be text, not {type(template).__name__}")
        if template is not None:
            return str(template)
    raise CheckpointError(
        f"{folder} has no chat template in {', '.join(_TEMPLATES[:-1])} or {_TEMPLATES[-1]}; give one with "
        "--chat-template FILE"
    )


@contextmanager
def _copied(folder: Path, text_config: Mapping[str, Any], top_config: Mapping[str, Any]) -> Iterator[Path]:
    """A temporary folder with the tokenizer's data files of `folder`, and nothing else."""
    files = checkpoint_files(folder)
    contents = {name: files.read(name, MAX_TOKENIZER_BYTES) for name in _VOCABULARIES if files.exists(name)}
    if not {"tokenizer.json", "tokenizer.model", "vocab.json"} & contents.keys():
        raise CheckpointError(f"{folder} has no tokenizer.json, tokenizer.model, or vocab.json with merges.txt")
    settings = {name: read_settings(folder, name) for name in _SMALL_FILES if files.exists(name)}
    config = read_settings(folder, "tokenizer_config.json")
    settings["tokenizer_config.json"] = {key: config[key] for key in _TOKENIZER_KEYS & config.keys()}
    # The tokenizer's class depends on these two of the model's settings. A LLaVA's own class reads no vocab.json.
    model = {key: top_config[key] for key in ("model_type", "transformers_version") if key in top_config}
    if not {"tokenizer.json", "tokenizer.model"} & contents.keys():
        model["model_type"] = text_config.get("model_type")
    settings["config.json"] = {key: value for key, value in model.items() if isinstance(value, str)}
    contents |= {name: json.dumps(value).encode() for name, value in settings.items()}
    with TemporaryDirectory(prefix="vtx-tokenizer-") as name:
        try:
            for file, content in contents.items():
                (Path(name) / file).write_bytes(content)
        except OSError as error:
            raise CheckpointError(
                f"cannot copy the tokenizer of {folder} to {gettempdir()} ({error.strerror}); free some space there"
            ) from error
        yield Path(name)


def _end_ids(folder: Path, text_config: Mapping[str, Any], top_config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The end tokens of transformers' generate: generation_config.json's, else the configs'; None: the tokenizer's."""
    generation = read_settings(folder, GENERATION)
    sources = {GENERATION: generation, "config.json": top_config, "text_config": text_config}
    name = next((name for name, config in sources.items() if config.get("eos_token_id") is not None), None)
    if name is None:
        return None
    value = sources[name]["eos_token_id"]
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(id, int) and not isinstance(id, bool) and 0 <= id <= MAX_ID for id in ids):
        raise CheckpointError(f"{name}: eos_token_id must be one token id or a list of them, not {str(value)[:99]}")
    return tuple(dict.fromkeys(ids))
