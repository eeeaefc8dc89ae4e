"""What cannot fit is refused before it is tokenised, and what fits never is."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers

from tests.support.text import CHATML, KINDS, SPECIALS, VICUNA, WORDS, ask, make_settings, make_tokenizer
from vtx.exporter.checkpoint.tokenizer_spec import length_bound
from vtx.runtime.bundle.spec.text_settings import LengthBound
from vtx.runtime.errors import BundleError, ContextError, RequestError
from vtx.runtime.prompt.messages import Message
from vtx.runtime.prompt.text import Text

CONTEXT = 24


def bound_of(tokenizer: Tokenizer) -> LengthBound | None:
    control = make_settings(tokenizer).control_tokens
    return length_bound(json.loads(tokenizer.to_str()), control)


def make_text(tokenizer: Tokenizer, template: str = CHATML, context: int | None = CONTEXT) -> Text:
    made = make_settings(tokenizer, length_bound=bound_of(tokenizer))
    return Text(tokenizer, template, made, max_context=context, or_more_context=", or export")


def squeezing_tokenizer() -> Tokenizer:
    """As the demo's: runs of spaces become one, so that any number of them fits."""
    tokenizer = make_tokenizer("bytes")
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(Regex(" +"), " ")]
    )
    return tokenizer


TOKENIZERS = {kind: make_tokenizer(kind) for kind in KINDS} | {"squeezing": squeezing_tokenizer()}


@cache
def bounded(name: str) -> Text:
    return make_text(TOKENIZERS[name])


@cache
def unbounded(name: str) -> Text:
    return make_text(TOKENIZERS[name], context=None)


def test_the_bound_is_the_longest_token() -> None:
    longest = {name: max(map(len, tokenizer.get_vocab())) for name, tokenizer in TOKENIZERS.items()}
    for name in ("normalizer", "first", "always", "never"):
        assert bound_of(TOKENIZERS[name]) == LengthBound(longest[name], normalized=False)
    for name in ("bytes", "squeezing"):
        assert bound_of(TOKENIZERS[name]) == LengthBound(longest[name], normalized=True)


def test_there_is_no_bound_where_characters_vanish_or_share_a_token() -> None:
    assert bound_of(TOKENIZERS["words"]) is None
    swallowing = make_tokenizer("first")
    swallowing.add_special_tokens([AddedToken("<|user|>", rstrip=True, special=True)])
    assert bound_of(swallowing) is None
    typed = squeezing_tokenizer()
    typed.add_tokens([AddedToken("<tool>", special=False)])
    assert bound_of(typed) is None


@pytest.mark.sampled
@pytest.mark.parametrize("name", sorted(TOKENIZERS.keys() - {"words"}))
def test_long_text_is_refused_without_tokenising_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("tokenised")

    for module in ("text", "tokenizer"):
        monkeypatch.setattr(f"vtx.runtime.prompt.{module}.encode", never)
    message = r"^the prompt has 2,000,\d{3} characters, and at most \d+ can fit .* of 24 tokens; shorten it, or export$"
    with pytest.raises(ContextError, match=message):
        bounded(name).prompt([ask("x" * 2_000_000)], 4)


SHREDS = st.sampled_from(
    [*WORDS, *SPECIALS, " ", "  ", " " * 40, "\n", "猫", "e\u0301", "\u1f82", "ﬃ", "\ufdfa", "\u0345", "q"]
)


@pytest.mark.slow
@given(st.sampled_from(sorted(TOKENIZERS)), st.lists(SHREDS, max_size=60).map("".join))
@settings(max_examples=200, deadline=None)
def test_what_fits_is_never_refused(name: str, question: str) -> None:
    chat: list[Message] = [ask(None, "?" + question)]
    try:
        bounded(name).prompt(chat, 1)
    except ContextError:
        assert len(unbounded(name).prompt(chat, 1)) > CONTEXT - 1
    except RequestError:
        pass


def test_spaces_that_the_normalizer_takes_away_or_the_template_strips_do_not_count() -> None:
    assert bounded("squeezing").prompt([ask("a" + " " * 100_000 + "b")], 4).size < CONTEXT
    stripping = make_text(TOKENIZERS["bytes"], VICUNA.replace("c['text'] + ' '", "c['text'].strip() + ' '"))
    assert stripping.prompt([ask("a" + " " * 100_000)], 4).size < CONTEXT


def test_ids_beyond_the_model_s_vocabulary_are_refused() -> None:
    tokenizer = make_tokenizer("first")
    made, chat = make_settings(tokenizer), [ask("Hello world")]
    highest = int(max(Text(tokenizer, VICUNA, made).prompt(chat, 4)))
    assert Text(tokenizer, VICUNA, made, vocab=highest + 1).prompt(chat, 4).size
    with pytest.raises(
        BundleError, match=rf"gives token {highest} \('.*'\), the model has {highest} tokens.*export again"
    ):
        Text(tokenizer, VICUNA, made, vocab=highest).prompt(chat, 4)
