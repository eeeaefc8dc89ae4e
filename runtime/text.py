"""From a conversation to token ids as the model's own processor makes them, and from ids back to text as it arrives."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from vtx.runtime.errors import BundleError, RequestError, TemplateError, VtxError
from vtx.runtime.template import MAX_SOURCE, ChatTemplate, LimitError

TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
MAX_TOKENIZER_BYTES = 64 << 20
MAX_TEXT = 2 << 20  # characters of one conversation
_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_PROBE = "vtx-probe-7f3a"
_TEMPLATE_CURE = "give one that prints it for content of type 'image' with vtx-export --chat-template FILE"


class Part(TypedDict, total=False):
    """One part of a message: an image, or text."""

    type: Literal["image", "text"]
    text: str


class Message(TypedDict):
    """One turn: role "system", "user" or "assistant"; content a string, or parts in the order they are to be read."""

    role: str
    content: str | Sequence[Part]


@dataclass(frozen=True, slots=True)
class TextSettings:
    """What the tokenizer file does not say; stands in the bundle's manifest. Raises `BundleError` on wrong values."""

    image_token: str
    image_token_id: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    end_ids: tuple[int, ...]
    """Every id that ends an answer."""
    add_special_tokens: bool
    """Whether the rendered prompt gets what the tokenizer adds (a BOS), unless the template printed the BOS itself."""

    def __post_init__(self) -> None:
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            _require(getattr(self, name) is None or isinstance(getattr(self, name), str), name, "a string or null")
        _require(isinstance(self.image_token, str) and self.image_token != "", "image_token", "a string")
        _require(_is_id(self.image_token_id), "image_token_id", "an id")
        _require(isinstance(self.end_ids, tuple) and all(map(_is_id, self.end_ids)), "end_ids", "a list of ids")
        _require(isinstance(self.add_special_tokens, bool), "add_special_tokens", "true or false")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TextSettings:
        """Settings as the manifest holds them. Raises `BundleError` on unknown, missing or wrong keys."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != names:
            found = set(values) if isinstance(values, Mapping) else set()
            raise BundleError(
                f"the manifest's text settings lack {sorted(names - found)} and have {sorted(map(str, found - names))} "
                "that this version does not know; export the bundle again"
            )
        ends = values["end_ids"]
        return cls(**{**values, "end_ids": tuple(ends) if isinstance(ends, (list, tuple)) else ends})

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON can hold them."""
        return {**asdict(self), "end_ids": list(self.end_ids)}

    def variables(self) -> dict[str, str]:
        """The special tokens by the names that templates use."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "image_token")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def _require(holds: bool, name: str, wanted: str) -> None:
    if not holds:
        raise BundleError(f"the manifest's text settings: {name} must be {wanted}; export the bundle again")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


class Text:
    """A tokenizer and a chat template; safe for many threads.

    Raises `BundleError` when tokenizer and settings do not fit together, `TemplateError` when the template is no good.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, settings: TextSettings) -> None:
        self.settings = settings
        self._tokenizer = tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()
        added = tokenizer.get_added_tokens_decoder()
        if getattr(added.get(settings.image_token_id), "content", None) != settings.image_token:
            raise BundleError(
                f"the tokenizer's special token {settings.image_token_id} is not {settings.image_token!r}; "
                "export the bundle again"
            )
        self._hidden = frozenset(id for id, token in added.items() if token.special)
        self._control = _control_tokens(tokenizer, settings)
        self._control_pattern = re.compile("|".join(re.escape(s) for s in sorted(self._control, key=len, reverse=True)))
        self._bytes = frozenset(tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self._source = template
        self._template = ChatTemplate(template)
        self._forms = {role: self._probe(role) for role in ("user", "system", "assistant")}

    @classmethod
    def load(cls, folder: Path, settings: TextSettings) -> Text:
        """Read tokenizer.json and chat_template.jinja from `folder`. Raises `BundleError`, `TemplateError`."""
        tokenizer = parse_tokenizer(_read(folder / TOKENIZER_FILE, MAX_TOKENIZER_BYTES), BundleError)
        return cls(tokenizer, _read(folder / TEMPLATE_FILE, 4 * MAX_SOURCE), settings)

    def prompt(
        self, messages: Sequence[Message], image_rows: int, *, add_generation_prompt: bool = True
    ) -> NDArray[np.int64]:
        """Token ids [tokens], int64, of the conversation, each image standing as `image_rows` image tokens.

        Special tokens that stand in the messages are text. Raises `RequestError` for messages that cannot be asked,
        `TemplateError` when the template fails or does not place every image once.
        """
        images = _check_messages(messages)
        messages, marks = self._mask(messages)
        rendered = self._render(messages, add_generation_prompt)
        ids = np.asarray(self._encode(rendered, marks), dtype=np.int64)
        is_image = ids == self.settings.image_token_id
        if is_image.sum() != images:
            raise TemplateError(
                f"the chat template prints {self.settings.image_token} {is_image.sum()} times for {images} images; "
                + _TEMPLATE_CURE
            )
        return np.repeat(ids, np.where(is_image, image_rows, 1))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return str(self._tokenizer.decode(list(map(int, ids)), skip_special_tokens=True))

    def stream(self) -> Detokenizer:
        """A new detokenizer for one answer."""
        return Detokenizer(self._tokenizer, hidden=self._hidden, byte_tokens=self._bytes)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        shaped = [{"role": message["role"], "content": self._shape(message)} for message in messages]
        variables = self.settings.variables()
        return self._template.render(shaped, variables, add_generation_prompt=add_generation_prompt)

    # Some templates read content as a string, some as parts, some both, and what they cannot read they drop or print
    # as Python. So each role is tried once in both forms, and messages are given in the form that works.

    def _probe(self, role: str) -> tuple[bool, bool]:
        """Whether the template reads parts, and whether it reads strings, in messages of this role."""
        image: list[Part] = [{"type": "image"}] if role == "user" else []
        parts = self._try(role, [*image, {"type": "text", "text": _PROBE}])
        reads_parts = _PROBE in parts and not re.search("""['"]type['"]""", parts)
        return reads_parts and parts.count(self.settings.image_token) == len(image), _PROBE in self._try(role, _PROBE)

    def _try(self, role: str, content: str | list[Part]) -> str:
        chat: list[dict[str, Any]] = [{"role": role, "content": content}]
        if role != "user":
            reads_parts = self._forms_of("user")[0]
            user = {"role": "user", "content": [{"type": "text", "text": "?"}] if reads_parts else "?"}
            chat.insert(0 if role == "assistant" else 1, user)
        try:
            return self._template.render(chat, self.settings.variables(), add_generation_prompt=False)
        except LimitError:
            raise
        except TemplateError:
            return ""

    def _forms_of(self, role: str) -> tuple[bool, bool]:
        return getattr(self, "_forms", {}).get(role, (True, True))

    def _shape(self, message: Message) -> str | list[dict[str, Any]]:
        content = message["content"]
        reads_parts, reads_strings = self._forms_of(message["role"])
        if isinstance(content, str):
            return content if reads_strings or not reads_parts else [{"type": "text", "text": content}]
        if reads_strings and not reads_parts:
            return "".join(part["text"] if part["type"] == "text" else self.settings.image_token + "\n" for part in content)
        return [dict(part) for part in content]
