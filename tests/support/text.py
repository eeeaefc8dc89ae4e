"""Tokenizers and templates of every kind, conversations, and checkpoints that hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.support.json_files import write_json
from vtx.exporter.checkpoint.resolving import control_tokens
from vtx.exporter.checkpoint.text import LIMITS, TextOptions, read_text
from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.host.confined import ChildLimits
from vtx.runtime.prompt.messages import Message
from vtx.runtime.prompt.text import Text

ROWS = 4  # what a 28 x 28 picture in 14 x 14 patches gives
SENTENCE = "what is this the a cat picture of Hello world USER ASSISTANT system user assistant"
WORDS = SENTENCE.split()

VICUNA = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'] | upper + ': ' }}{% endif %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ c['text'] + ' ' }}{% endgeneration %}"
    "{% else %}{{ c['text'] + ' ' }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% for c in m.content %}{% if c.type == 'image' %}<image>\n{% else %}{{ c.text }}{% endif %}{% endfor %} [/INST]"
    "{% else %}{% for c in m.content %}{{ c.text }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)
CHATML = """{%- for m in messages %}
    {{- '<|im_start|>' ~ m.role ~ '\n' }}
    {%- if m.content is string %}
        {{- m.content }}
    {%- else %}
        {%- for c in m.content %}
            {%- if c.type == 'image' or 'image' in c %}<image>{% elif 'text' in c %}{{ c.text }}{% endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
STRINGS = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'].strip() + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEMPLATES = {"vicuna": VICUNA, "mistral": MISTRAL, "chatml": CHATML}
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<image>"]


def make_tokenizer(kind: str) -> Tokenizer:
    tokenizer = {"bytes": bytes_tokenizer, "words": words_tokenizer}.get(kind, lambda: spaces_tokenizer(kind))()
    if kind != "bytes":
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return tokenizer


def bytes_tokenizer() -> Tokenizer:
    """As Qwen2's: byte-level BPE, NFC, the special tokens behind the vocabulary, no BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = word_merges("Ġ")
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(alphabet + ["".join(pair) for pair in merges]))}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    add_specials(tokenizer)
    return tokenizer


def spaces_tokenizer(kind: str) -> Tokenizer:
    """As Llama's: BPE over ▁ with byte fallback; `kind` says how the first ▁ is put there."""
    base = ["▁", *(chr(c) for c in range(33, 127)), *(f"<0x{b:02X}>" for b in range(256))]
    merges = word_merges("▁")
    pieces = dict.fromkeys([*SPECIALS[:3], *base, *("".join(pair) for pair in merges)])
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if kind == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", kind, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    add_specials(tokenizer)
    return tokenizer


def words_tokenizer() -> Tokenizer:
    words = [*SPECIALS, *WORDS, "USER:", "ASSISTANT:", "?", ":", "\n"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    add_specials(tokenizer)
    return tokenizer


def add_specials(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])


def word_merges(space: str) -> list[tuple[str, str]]:
    return list(dict.fromkeys((w[:i], w[i]) for w in (space + word for word in WORDS) for i in range(1, len(w))))


def make_settings(tokenizer: Tokenizer, **changes: Any) -> TextSettings:
    values: dict[str, Any] = {
        "image_token": "<image>",
        "image_token_id": tokenizer.token_to_id("<image>"),
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": None,
        "unk_token": "<unk>",
        "end_ids": (tokenizer.token_to_id("</s>"),),
        "add_special_tokens": True,
        "ids_before": (),
        "ids_after": (),
        "control_tokens": {},
        "length_bound": None,
        "examples": (),
    }
    settings = TextSettings(**{**values, **changes})
    return dataclasses.replace(settings, control_tokens=control_tokens(tokenizer, settings))


def make_text(kind: str = "first", template: str = VICUNA) -> Text:
    tokenizer = make_tokenizer(kind)
    return Text(tokenizer, template, make_settings(tokenizer))


KINDS = ["bytes", "words", "normalizer", "first", "always", "never"]


class Texts(Mapping[tuple[str, str], Text]):
    """By kind of tokenizer and name of template; each is made when it is first asked for."""

    def __init__(self) -> None:
        self._get = cache(lambda kind, name: make_text(kind, TEMPLATES[name]))

    def __getitem__(self, key: tuple[str, str]) -> Text:
        return self._get(*key)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((kind, name) for kind in KINDS for name in TEMPLATES)

    def __len__(self) -> int:
        return len(KINDS) * len(TEMPLATES)


TEXTS = Texts()


def ask(*parts: str | None, role: str = "user") -> Message:
    """A message; None stands for an image."""
    return {
        "role": role,
        "content": [{"type": "text", "text": p} if p is not None else {"type": "image"} for p in parts],
    }


CHATS: dict[str, list[Message]] = {
    "text": [ask("what is this?")],
    "image": [ask(None, "what is  this?\nthe cat")],
    "two images": [ask(None, None, "what is the picture of? \U0001f63a 猫")],
    "turns": [
        ask("a picture of Hello", role="system"),
        ask(None, "what is this?"),
        ask("the cat", role="assistant"),
        ask("Hello", None, " world"),
    ],
}


def write_checkpoint(folder: Path, kind: str = "first", template: str | None = VICUNA, **config: Any) -> dict[str, Any]:
    """Files of a checkpoint that concern text; returns its config.json."""
    tokenizer = make_tokenizer(kind)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_json(folder / "tokenizer_config.json", values | config)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    top = {"model_type": "llava", "image_token_index": tokenizer.token_to_id("<image>")}
    write_json(folder / "config.json", top)
    return top


def read(
    folder: Path, top: dict[str, Any], limits: ChildLimits = LIMITS, **options: Any
) -> tuple[str, str, TextSettings]:
    return read_text(folder, top["image_token_index"], {}, top, TextOptions(**options), limits)
