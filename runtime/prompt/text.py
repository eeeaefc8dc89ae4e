"""From a conversation to token ids as the model's own processor makes them, and from ids back to text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from vtx.runtime.bundle.spec.manifest import TEMPLATE, TOKENIZER
from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.errors import BundleError, ContextError, RequestError, TemplateError, VtxError
from vtx.runtime.prompt.messages import Message, check_messages, extras_of, texts_of
from vtx.runtime.prompt.template import ShapingTemplate
from vtx.runtime.prompt.thoughts import ThoughtDivider, ThoughtLimit, thought_form
from vtx.runtime.prompt.tokenizer import Detokenizer, Masking, TokenBytes, decode, encode, parse_tokenizer, rust_errors
from vtx.runtime.prompt.tools import CallForm
from vtx.runtime.vision.tokens import PromptImage

MAX_TOKENIZER_BYTES = 64 << 20
MAX_TEMPLATE_BYTES = 512 << 10
PROMPT_END = 16  # tokens in which a mark that ends a prompt stands
_TEMPLATE_CURE = "give one that prints it for content of type '{}' with vtx-export --chat-template FILE"


class Text:
    """A tokenizer and a chat template; safe for many threads.

    Prompts that cannot fit into `max_context` slots are refused before they are tokenised, in a message that ends with
    `or_more_context`, and ids beyond a model's `vocab` before they enter a graph; None: no such check.

    Raises `BundleError` when tokenizer and settings do not fit together, `TemplateError` for an unusable template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        settings: TextSettings,
        *,
        max_context: int | None = None,
        or_more_context: str = "",
        vocab: int | None = None,
    ) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        added = tokenizer.get_added_tokens_decoder()
        for id, token in (
            (settings.image_token_id, settings.image_token),
            (settings.video_token_id, settings.video_token),
        ):
            if id is not None and getattr(added.get(id), "content", None) != token:
                raise BundleError(
                    f"token {id} of the tokenizer is not the added token {token!r}; export the bundle again"
                )
        self.settings = settings
        self.tokenizer, self._max_context, self._vocab = tokenizer, max_context, vocab
        self._or_more_context, self._most_characters = or_more_context, None
        if settings.length_bound is not None and max_context is not None:
            self._most_characters = settings.length_bound.characters_per_token * (max_context - 1)
        video = settings.video_token_id
        self._pictures = [settings.image_token_id, *([] if video is None else [video])]  # ids
        self._hidden = frozenset(id for id, token in added.items() if token.special)
        self._bytes = frozenset(tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self._token_bytes = TokenBytes(tokenizer)
        self._template = ShapingTemplate(template, settings)
        self.thought_form = form = thought_form(template)  # None: answers have no thoughts of their own
        marks = "" if form is None else form.begin + form.end
        special = {id: added[id].content for id in self._hidden}
        self._marks = {id: token for id, token in special.items() if token and token in marks}  # of thoughts
        self._masking = Masking(tokenizer, settings.control_tokens, settings.unk_token, template)

    def prompt(
        self,
        messages: Sequence[Message],
        images: int | Sequence[int | PromptImage],
        *,
        add_generation_prompt: bool = True,
    ) -> NDArray[np.int64]:
        """Token ids [tokens], int64, of the conversation, each image and video as image tokens.

        `images`: the number of tokens of every image, or the numbers or forms of all images, in the order of `order`.

        Special tokens in the messages are text. Raises `RequestError` for messages that cannot be asked,
        `ContextError` for those that cannot fit, `TemplateError` when the template fails or does not print every image
        once, `BundleError` when the tokenizer gives a token that the model does not have.
        """
        kinds, length = check_messages(messages)
        if any(extras_of(message).keys() - {"thinking", "reasoning_content"} for message in messages):
            _ = self.call_form  # else the template would leave out tools and calls without a word
        if self._most_characters is not None and length > self._most_characters:
            self._check_length(messages, add_generation_prompt, self._most_characters)
        ids = self._ids(messages, add_generation_prompt)
        self._check_printed(ids, kinds)
        forms, spans, texts = list[PromptImage](), list[int](), list[str]()
        for image in [images] * len(kinds) if isinstance(images, int) else images:
            forms.append(PromptImage((image,)) if isinstance(image, int) else image)
            spans += forms[-1].spans
            texts += forms[-1].texts
        if any(texts):
            ids = self._ids(messages, add_generation_prompt, forms)
        is_image = np.isin(ids, self._pictures)
        ids[is_image] = self.settings.image_token_id
        counts = np.ones(len(ids), np.int64)
        counts[is_image] = spans
        return np.repeat(ids, counts)

    def size(self, image: PromptImage) -> int:
        """Tokens of an image in a prompt, including those of its text."""
        if not any(image.texts):
            return image.tokens
        return image.tokens - len(image.spans) + len(encode(self.tokenizer, image.text(self.settings.image_token)))

    def order(self, messages: Sequence[Message]) -> list[int]:
        """The order in which the template prints the images and videos of messages: their numbers there, from 0.

        Raises as `prompt` does.
        """
        kinds, _ = check_messages(messages)
        if len({*kinds}) < 2 or len({*self._pictures}) < 2:
            return [*range(len(kinds))]
        ids = self._ids(messages, add_generation_prompt=True)
        self._check_printed(ids, kinds)
        left = {kind: iter([n for n, own in enumerate(kinds) if own == kind]) for kind in kinds}
        printed = ids[np.isin(ids, self._pictures)]
        return [next(left["image" if id == self.settings.image_token_id else "video"]) for id in printed.tolist()]

    def _ids(
        self, messages: Sequence[Message], add_generation_prompt: bool, images: Sequence[PromptImage] = ()
    ) -> NDArray[np.int64]:
        """The ids of messages, one for each image and video; with `images` one for each span of theirs."""
        masks: Mapping[str, str] = {}
        if messages and messages[0]["role"] == "prompt":
            rendered = "".join(texts_of(messages[0]))
        else:
            masked, masks = self._masking.mask(messages)
            rendered = self._template.render(masked, add_generation_prompt=add_generation_prompt)
        if images:
            tokens = sorted({self.settings.image_token, self.settings.video_token or ""} - {""}, key=len, reverse=True)
            first, *parts = re.split(f"({'|'.join(map(re.escape, tokens))})", rendered)
            before = (parts[: 2 * at : 2].count(token) for at, token in enumerate(parts[::2]))  # of the same kind
            numbered = zip(images, parts[::2], before, strict=True)
            printed = (image.text(token, number) for image, token, number in numbered)
            rendered = first + "".join(image + text for image, text in zip(printed, parts[1::2], strict=True))
        bos = self.settings.bos_token
        add = self.settings.add_special_tokens and not (bos and rendered.startswith(bos))
        encoding = encode(self.tokenizer, rendered, add_special_tokens=add)
        ids = np.asarray(self._masking.encode(rendered, masks, encoding) if masks else encoding.ids, dtype=np.int64)
        highest = int(ids.max(initial=0))
        if self._vocab is not None and highest >= self._vocab:
            raise BundleError(
                f"the tokenizer gives token {highest} ({self.tokenizer.id_to_token(highest)!r}), the model has "
                f"{self._vocab:,} tokens, numbered from 0; export again with the tokenizer that belongs to the model"
            )
        return ids

    def _check_printed(self, ids: NDArray[np.int64], kinds: Sequence[str]) -> None:
        settings = self.settings
        if settings.video_token_id is None and "video" in kinds:
            raise RequestError("this model takes no videos; leave the video out, or give its frames as images")
        shared = settings.video_token_id == settings.image_token_id
        for kind, token, id in (
            ("image", settings.image_token, settings.image_token_id),
            ("video", settings.video_token, None if shared else settings.video_token_id),
        ):
            printed = int((ids == id).sum()) if id is not None else 0
            wanted = len(kinds) if shared and kind == "image" else 0 if shared else kinds.count(kind)
            if printed != wanted:
                raise TemplateError(
                    f"the chat template prints {token} {printed} times for {wanted} {kind}s; "
                    + _TEMPLATE_CURE.format(kind)
                )

    def asked(self, messages: Sequence[Message], images: int | Sequence[int | PromptImage]) -> NDArray[np.int64]:
        """As `prompt`; an assistant's message at the end is the beginning of the answer, which continues it.

        One message of the role "prompt" is a whole prompt, which no template prints, with its control tokens.
        """
        begun = self.begun(messages)
        if messages and messages[0]["role"] == "prompt":
            return np.array(begun, np.int64)
        prompt = self.prompt(messages[:-1] if begun else messages, images)
        return np.concatenate([prompt, np.array(begun, np.int64)]) if begun else prompt

    def begun(self, messages: Sequence[Message]) -> list[int]:
        """The ids of an answer that the last message begins; none if that is a question."""
        last = messages[-1] if messages else None
        if last and last["role"] == "prompt":
            ids = self._raw_ids(last)
            if np.isin(ids, self._pictures).any():
                raise RequestError(f"the prompt holds {self.settings.image_token}; ask about images by messages")
            return list(map(int, ids))
        return self.answer_ids("".join(texts_of(last))) if last and last["role"] == "assistant" else []

    def _raw_ids(self, prompt: Message) -> NDArray[np.int64]:
        """The ids of a whole prompt, which is a text or has ids."""
        if "ids" not in prompt:
            check_messages([{"role": "user", "content": "".join(texts_of(prompt))}])
            return self._ids([prompt], add_generation_prompt=False)
        if not prompt["ids"]:
            raise RequestError("the prompt has no tokens; send at least one")
        self._check_ids(prompt["ids"])
        return np.array(prompt["ids"], np.int64)

    @cached_property
    def _before_answer(self) -> tuple[str, str]:
        """The end of a prompt as text, and the space or nothing that the template prints between it and an answer."""
        question: Message = {"role": "user", "content": "?"}
        try:
            before = self._template.render([question], add_generation_prompt=True)
            after = self._template.render(
                [question, {"role": "assistant", "content": "x"}], add_generation_prompt=False
            )
        except TemplateError:
            return "", ""
        return before, " " if after.startswith(f"{before} ") else ""

    @property
    def may_begin_with_space(self) -> bool:
        """True if answers usually begin with a space, which the template prints or the tokenizer adds."""
        written = encode(self.tokenizer, "x").tokens
        return self._before_answer[1] == " " or (bool(written) and written[0].startswith("\u2581"))

    def answer_ids(self, answer: str) -> list[int]:
        """Token ids of an answer behind a prompt, as the template prints earlier ones, without an end token."""
        before, space = self._before_answer
        return self._masking.continuation(before, space + answer) if answer else []

    @property
    def call_form(self) -> CallForm:
        """The form of calls of tools. Raises `RequestError` if the chat template knows none, or another one."""
        return self._template.call_form

    @property
    def switches_thinking(self) -> bool:
        """True if the chat template has a switch for thoughts before an answer."""
        return self._template.switches_thinking

    def raw(self, ids: Sequence[int]) -> str:
        """The text of the ids of a prompt, with its special tokens. Raises `RequestError` for unknown ids."""
        self._check_ids(ids)
        with rust_errors(RequestError, "these tokens are no text"):
            return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def _check_ids(self, ids: Sequence[int]) -> None:
        size = self.tokenizer.get_vocab_size() if self._vocab is None else self._vocab
        if not all(0 <= id < size for id in ids):
            raise RequestError(f"one of the tokens is unknown; those of this model are numbered from 0 to {size - 1}")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return decode(self.tokenizer, list(map(int, ids)))

    def bytes_of(self, id: int) -> bytes:
        """The bytes that a token adds to a text: none of a special one, a part of a character maybe."""
        return b"" if id in self._hidden else self._token_bytes(id)

    def stream(self, *, marks: bool = False) -> Detokenizer:
        """A new detokenizer for one answer; `marks`: those of thoughts have a text."""
        shown = self._marks if marks else {}
        return Detokenizer(self.tokenizer, hidden=self._hidden, byte_tokens=self._bytes, marks=shown)

    def thoughts(self, messages: Sequence[Message], ids: NDArray[np.int64]) -> ThoughtDivider | None:
        """The divider of the answer to messages, whose prompt is `ids`; None if it can have no thought of its own.

        An answer to a whole prompt, or one that the last message begins, has none.
        """
        form = self.thought_form
        if form is None or messages[-1]["role"] in ("prompt", "assistant"):
            return None
        end = self.tokenizer.decode(ids[-PROMPT_END:].tolist(), skip_special_tokens=False)
        return ThoughtDivider(form, [*self._marks.values()], inside=end.rstrip().endswith(form.begin.rstrip()))

    def thought_limit(self, divider: ThoughtDivider, most: int | None) -> ThoughtLimit:
        """The end of a thought after `most` tokens."""
        assert self.thought_form is not None, "there are dividers only with a form"
        return ThoughtLimit(divider, encode(self.tokenizer, self.thought_form.end).ids, most)

    def _check_length(self, messages: Sequence[Message], add_generation_prompt: bool, limit: int) -> None:
        """Refuse messages with too many characters for the context, without tokenising them."""
        text, bound = (
            self._template.render(messages, add_generation_prompt=add_generation_prompt),
            self.settings.length_bound,
        )
        if bound is not None and bound.normalized and self.tokenizer.normalizer is not None:
            with rust_errors(BundleError, "the tokenizer's normalizer fails"):
                text = self.tokenizer.normalizer.normalize_str(text)
        if len(text) > limit:
            raise ContextError(
                f"the prompt has {len(text):,} characters, and at most {limit:,} can fit into this bundle's context of "
                f"{self._max_context:,} tokens; shorten it{self._or_more_context}"
            )


def text_files(read: Callable[[str, int], bytes]) -> tuple[Tokenizer, str]:
    """The tokenizer and the chat template, from their files by `read(name, limit)`, which a bundle has.

    Raises `BundleError`.
    """
    tokenizer = utf8(read(TOKENIZER, MAX_TOKENIZER_BYTES), TOKENIZER, BundleError)
    return parse_tokenizer(tokenizer, BundleError), utf8(read(TEMPLATE, MAX_TEMPLATE_BYTES), TEMPLATE, BundleError)


def utf8(content: bytes, name: str, error: type[VtxError]) -> str:
    """The text of the file `name`. Raises `error`."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise error(f"{name} cannot be read as UTF-8 text: {cause}") from cause
