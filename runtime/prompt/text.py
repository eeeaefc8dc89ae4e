"""From a conversation to token ids as the model's own processor makes them, and from ids back to text as it arrives."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, islice, takewhile
from operator import itemgetter
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from vtx.runtime.bundle.text_settings import TextSettings
from vtx.runtime.errors import BundleError, RequestError, TemplateError, VtxError
from vtx.runtime.prompt.template import MAX_SOURCE, ChatTemplate, LimitError

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


class Text:
    """A tokenizer and a chat template; safe for many threads.

    Raises `BundleError` when tokenizer and settings do not fit together, `TemplateError` when the template is no good.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, settings: TextSettings) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        added = tokenizer.get_added_tokens_decoder()
        if getattr(added.get(settings.image_token_id), "content", None) != settings.image_token:
            raise BundleError(
                f"token {settings.image_token_id} of the tokenizer is not the added token {settings.image_token!r}; "
                "export the bundle again"
            )
        self.settings = settings
        self._tokenizer = tokenizer
        self._hidden = frozenset(id for id, token in added.items() if token.special)
        self._bytes = frozenset(tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self._control = _control_tokens(tokenizer, settings)
        self._control_ids = frozenset(self._control.values())
        unk = getattr(tokenizer.model, "unk_token", None) or settings.unk_token
        self._unk_id = tokenizer.token_to_id(unk) if unk else None
        self._control_pattern = re.compile("|".join(map(re.escape, sorted(self._control, key=len, reverse=True))))
        self._source = template
        self._template = ChatTemplate(template)
        self._forms: dict[str, tuple[bool, bool]] = {}
        for role in ("user", "system", "assistant"):
            self._forms[role] = self._probe(role)

    @classmethod
    def load(cls, read: Callable[[str, int], bytes], settings: TextSettings) -> Text:
        """Read tokenizer.json and chat_template.jinja by `read(name, limit)`, which a bundle has.

        Raises `BundleError`, `TemplateError`.
        """
        tokenizer, template = (
            utf8(read(name, limit), name, BundleError)
            for name, limit in ((TOKENIZER_FILE, MAX_TOKENIZER_BYTES), (TEMPLATE_FILE, 4 * MAX_SOURCE))
        )
        return cls(parse_tokenizer(tokenizer, BundleError), template, settings)

    def prompt(
        self, messages: Sequence[Message], image_rows: int | Sequence[int], *, add_generation_prompt: bool = True
    ) -> NDArray[np.int64]:
        """Token ids [tokens], int64, of the conversation, each image standing as `image_rows` image tokens.

        One number goes for all images; several, one for each in turn.

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
        counts = np.ones(len(ids), np.int64)
        counts[is_image] = image_rows
        return np.repeat(ids, counts)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return _decode(self._tokenizer, list(map(int, ids)))

    def stream(self) -> Detokenizer:
        """A new detokenizer for one answer."""
        return Detokenizer(self._tokenizer, hidden=self._hidden, byte_tokens=self._bytes)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        shaped = [self._shape(message) for message in messages]
        return self._template.render(shaped, self.settings.variables(), add_generation_prompt=add_generation_prompt)

    # Some templates read content as a string, some as parts, some both, and what they cannot read they drop or print
    # as Python. So each role is tried once in both forms, and messages are given in the form that works.

    def _probe(self, role: str) -> tuple[bool, bool]:
        """Whether the template reads parts, and whether it reads strings, in messages of this role."""
        image: list[Part] = [{"type": "image"}] if role == "user" else []
        parts = self._try(role, [*image, {"type": "text", "text": _PROBE}])
        reads_parts = _PROBE in parts and not re.search("""['"]type['"]""", parts)
        return reads_parts and parts.count(self.settings.image_token) == len(image), _PROBE in self._try(role, _PROBE)

    def _try(self, role: str, content: str | Sequence[Part]) -> str:
        chat: list[Message] = [{"role": role, "content": content}]
        if role != "user":
            chat.insert(0 if role == "assistant" else 1, self._shape({"role": "user", "content": "?"}))
        try:
            return self._template.render(chat, self.settings.variables(), add_generation_prompt=False)
        except LimitError:
            raise
        except TemplateError:
            return ""

    def _shape(self, message: Message) -> Message:
        content = message["content"]
        reads_parts, reads_strings = self._forms.get(message["role"], (True, True))
        if isinstance(content, str) and reads_parts and not reads_strings:
            content = [{"type": "text", "text": content}]
        elif not isinstance(content, str) and reads_strings and not reads_parts:
            image = self.settings.image_token + "\n"
            content = "".join(part["text"] if part["type"] == "text" else image for part in content)
        return {"role": message["role"], "content": content}

    # Special tokens in the messages are masked: their first character becomes a private-use one that occurs nowhere
    # else, so that whatever the template does, the special tokens found in its output are its own.

    def _mask(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
        """The messages with special tokens masked, and the masking character of each character masked."""
        marks: dict[str, str] = {}
        free = self._free_characters(messages)
        masked: list[Message] = []
        for message in messages:
            role = self._mask_text(message["role"], marks, free)
            # A special token may stand across two parts, so a message is masked as one text and cut again.
            text = iter(self._mask_text("".join(_texts(message)), marks, free))
            content = message["content"]
            if isinstance(content, str):
                masked.append({"role": role, "content": "".join(text)})
            else:
                masked.append({"role": role, "content": [_refill(part, text) for part in content]})
        return masked, marks

    def _mask_text(self, text: str, marks: dict[str, str], free: Iterator[str]) -> str:
        while spots := self._find_special(text):
            characters = list(text)
            for spot in spots:
                character = characters[spot]
                if character not in marks:
                    marks[character] = "" if character in marks.values() else next(free, "")
                if not marks[character]:
                    raise RequestError(f"the special token at character {spot} cannot be kept as text; leave it out")
                characters[spot] = marks[character]
            text = "".join(characters)
        return text

    def _find_special(self, text: str) -> list[int]:
        """Where control tokens start in `text`, as written or as the tokenizer's normalizer would make them."""
        spots = [match.start() for match in self._control_pattern.finditer(text)]
        if spots or self._tokenizer.normalizer is None:
            return spots
        encoding = _encode(self._tokenizer, text)
        return [
            start
            for id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if start < end and id in self._control_ids and id != self._unk_id
        ]

    def _free_characters(self, messages: Sequence[Message]) -> Iterator[str]:
        taken = set(self._source).union(*self._control, *(text for m in messages for text in _texts(m)))
        return (char for code in chain(*_PRIVATE_USE) if (char := chr(code)) not in taken)

    def _encode(self, rendered: str, marks: Mapping[str, str]) -> list[int]:
        bos = self.settings.bos_token
        add = self.settings.add_special_tokens and not (bos and rendered.startswith(bos))
        encoding = _encode(self._tokenizer, rendered, add_special_tokens=add)
        return self._encode_masked(rendered, marks, encoding) if marks else list(encoding.ids)

    def _encode_masked(self, rendered: str, marks: Mapping[str, str], encoding: Encoding) -> list[int]:
        """The ids of the template's own control tokens, and of the text between them as plain text."""
        unmask = str.maketrans({mark: character for character, mark in marks.items()})
        at_start, elsewhere = self._plain
        tokens = list(zip(encoding.ids, encoding.offsets, encoding.special_tokens_mask, strict=True))
        ids = [id for id, _, _ in takewhile(itemgetter(2), tokens)]
        suffix = [id for id, _, _ in takewhile(itemgetter(2), reversed(tokens[len(ids) :]))]
        position = 0
        for id, (start, end), inserted in [*tokens, (None, (len(rendered), len(rendered)), 0)]:
            own = id is None or (
                id in self._control_ids and (id != self._unk_id or rendered[start:end] in self._control)
            )
            if inserted or not own:
                continue
            piece = rendered[position:start].translate(unmask)
            ids += _encode(elsewhere if position else at_start, piece).ids if piece else []
            ids += [] if id is None else [id]
            position = end
        return ids + suffix[::-1]

    @cached_property
    def _plain(self) -> tuple[Tokenizer, Tokenizer]:
        """The tokenizer without control tokens, for the start of a prompt and for text after a control token.

        They are renamed, not removed, so that all other ids stay: nobody can type the new names.
        """
        names = {token: f"\0{secrets.token_hex(16)}" for token in self._control}
        spec = json.loads(self._tokenizer.to_str())
        for token in spec["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        spec["post_processor"] = None
        _rename(spec["model"], names)
        text = json.dumps(spec)
        never = text.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
        return parse_tokenizer(text, BundleError), parse_tokenizer(never, BundleError)


class Detokenizer:
    """Text of one answer, token by token: never half a character, and together what `Text.decode` gives."""

    def __init__(self, tokenizer: Tokenizer, *, hidden: Set[int], byte_tokens: Set[int | None]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._bytes = byte_tokens
        # Ids since the last but one piece: the older ones give the decoder its context, `_shown` is their text.
        self._window: list[int] = []
        self._context = 0
        self._shown = ""

    def push(self, id: int) -> str:
        """The text that is certain with token `id`, maybe none."""
        if id in self._hidden or self._tokenizer.id_to_token(id) is None:
            return ""
        self._window.append(id)
        # Byte tokens in a row are decoded together: one wrong byte changes the characters before it.
        if id in self._bytes:
            return ""
        text = _decode(self._tokenizer, self._window)
        piece = text[len(self._shown) :]
        if not piece or text.endswith("\ufffd"):
            return ""
        del self._window[: self._context]
        self._context = len(self._window)
        self._shown = _decode(self._tokenizer, self._window)
        return piece

    def finish(self) -> str:
        """The rest, with U+FFFD where a character stayed incomplete."""
        piece = _decode(self._tokenizer, self._window)[len(self._shown) :]
        self._window, self._context, self._shown = [], 0, ""
        return piece


def utf8(content: bytes, name: str, error: type[VtxError]) -> str:
    """The text of the file `name`. Raises `error`."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise error(f"{name} cannot be read as UTF-8 text: {cause}") from cause


def parse_tokenizer(text: str, error: type[VtxError]) -> Tokenizer:
    """The tokenizer in a tokenizer.json. Raises `error`."""
    with _rust_errors(error, "the tokenizer.json is damaged"):
        tokenizer: Tokenizer = Tokenizer.from_str(text)
        return tokenizer


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> Encoding:
    with _rust_errors(RequestError, "the tokenizer cannot encode the conversation"):
        encoding: Encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return encoding


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    with _rust_errors(BundleError, "the tokenizer cannot decode the answer"):
        return str(tokenizer.decode(ids, skip_special_tokens=True))


@contextmanager
def _rust_errors(kind: type[VtxError], message: str) -> Iterator[None]:
    """`tokenizers` raises bare exceptions, and panics that derive from BaseException; both become `kind`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{message}: {' '.join(str(error).split())[:200]}") from error


def _control_tokens(tokenizer: Tokenizer, settings: TextSettings) -> dict[str, int]:
    """The tokens nobody may type, by their text: the special ones, and those that settings name."""
    added = tokenizer.get_added_tokens_decoder()
    control: dict[str, int | None] = {token.content: id for id, token in added.items() if token.special}
    named = [*settings.variables().values(), *map(tokenizer.id_to_token, settings.end_ids)]
    control |= {token: tokenizer.token_to_id(token) for token in named if token}
    return {token: id for token, id in control.items() if id is not None}


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Give tokens of a tokenizer.json's model new names, and drop the merges that would make them."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): id for token, id in vocab.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [[a, b] for a, b in pairs if names.keys().isdisjoint((a, b, a + b))]


def _texts(message: Message) -> list[str]:
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def _refill(part: Part, text: Iterator[str]) -> Part:
    if part["type"] == "image":
        return {"type": "image"}
    return {"type": "text", "text": "".join(islice(text, len(part["text"])))}


def _check_messages(messages: Sequence[Message]) -> int:
    """The number of images. Raises `RequestError` for what cannot be asked."""
    if not messages:
        raise RequestError("the conversation is empty; ask a question")
    for message in messages:
        _check_message(message)
    texts = ["".join(_texts(message)) for message in messages]
    length = sum(map(len, texts))
    if length > MAX_TEXT:
        raise RequestError(f"the conversation has {length} characters, the limit is {MAX_TEXT}; shorten it")
    questions = [text for message, text in zip(messages, texts, strict=True) if message["role"] == "user"]
    if not questions or not questions[-1].strip():
        raise RequestError("the question is empty; write at least one word")
    contents = (message["content"] for message in messages)
    return sum(part["type"] == "image" for content in contents if not isinstance(content, str) for part in content)


def _check_message(message: Message) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError("a message must be a dict with a role and content; got " + type(message).__name__)
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, (list, tuple)):
        raise RequestError(f"a message's content must be a string or a list of parts, not {type(content).__name__}")
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "image" and not (kind == "text" and isinstance(part.get("text"), str)):
            raise RequestError(
                'a part must be {"type": "image"} or {"type": "text", "text": ...}; got ' + repr(part)[:99]
            )
    for text in (message["role"], *_texts(message)):
        _check_unicode(text)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"character {error.start} of the text is half of a surrogate pair; remove it") from error
