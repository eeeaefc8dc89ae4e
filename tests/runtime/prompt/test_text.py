"""Prompts as token ids, which are those of transformers, and answers as a stream of text."""

from __future__ import annotations

import copy
import importlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import AddedToken, normalizers

from tests.support.text import (
    CHATS,
    KINDS,
    ROWS,
    STRINGS,
    TEMPLATES,
    TEXTS,
    VICUNA,
    ask,
    make_settings,
    make_text,
    make_tokenizer,
)
from vtx.runtime.bundle.files import Folder
from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.errors import BundleError, RequestError, TemplateError
from vtx.runtime.prompt.messages import MAX_TEXT, Message
from vtx.runtime.prompt.text import Text, text_files
from vtx.runtime.strict import Strict, json_value


def reference_ids(kind: str, template: str, messages: list[Message]) -> list[int]:
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(kind), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    square = {"height": 28, "width": 28}
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=square),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="full",
        chat_template=template,
    )
    image = Image.new("RGB", (28, 28))
    chat: Any = copy.deepcopy(messages)
    for part in (part for message in chat for part in message["content"] if part["type"] == "image"):
        part["image"] = image
    out = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
    return [int(i) for i in np.ravel(out["input_ids"])]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_the_processor_s(kind: str, name: str) -> None:
    for messages in CHATS.values():
        ids = TEXTS[kind, name].prompt(messages, ROWS)
        assert ids.dtype == np.int64
        assert ids.tolist() == reference_ids(kind, TEMPLATES[name], messages)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "words"])
@pytest.mark.parametrize("typed", ["</s>", "<image>", "<s>", "<|im_end|>", "<unk>", "a<s></s><image><image>", "<<s>s>"])
def test_special_tokens_in_a_question_are_text(kind: str, name: str, typed: str) -> None:
    text = TEXTS[kind, name]
    question = f"what is {typed} this?"
    ids = text.prompt([ask(None, question)], ROWS).tolist()
    plain = text.prompt([ask(None, "what is QQ this?")], ROWS).tolist()
    control = set(text.settings.control_tokens.values())
    assert [i for i in ids if i in control] == [i for i in plain if i in control]
    assert question in text.decode(ids)


@pytest.mark.parametrize("typed", ["</s>", "<image>", "<s>", "<|im_end|>"])
def test_a_word_tokenizer_does_not_know_typed_special_tokens(typed: str) -> None:
    text = make_text("words")
    ids = text.prompt([ask(None, f"what is {typed} this")], ROWS).tolist()
    assert ids == text.prompt([ask(None, "what is never-seen this")], ROWS).tolist()


@pytest.mark.parametrize(("kind", "name"), TEXTS)
def test_the_way_of_masked_prompts_gives_ordinary_prompts_the_same_ids(kind: str, name: str) -> None:
    text = TEXTS[kind, name]
    for messages in CHATS.values():
        rendered = text._template.render(messages, add_generation_prompt=True)
        for add in (True, False):
            encoding = text.tokenizer.encode(rendered, add_special_tokens=add)
            assert text._masking.encode(rendered, {"<": "\ue000"}, encoding) == encoding.ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_token_spread_over_two_parts_is_text(kind: str) -> None:
    text = TEXTS[kind, "mistral"]
    ids = text.prompt([ask(None, "what <ima", "ge> is", "</", "s>")], ROWS).tolist()
    assert ids.count(text.settings.image_token_id) == ROWS
    assert text.settings.end_ids[0] not in ids


def test_a_special_token_that_the_normalizer_would_make_is_text() -> None:
    tokenizer = make_tokenizer("words")
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_special_tokens([AddedToken("<eot>", special=True, normalized=True)])
    text = Text(tokenizer, VICUNA, make_settings(tokenizer))
    wide = "＜eot＞"  # noqa: RUF001, NFKC makes it <eot>
    assert tokenizer.token_to_id("<eot>") in tokenizer.encode(wide).ids
    assert tokenizer.token_to_id("<eot>") not in text.prompt([ask(f"what {wide} is")], ROWS)


def test_special_tokens_in_several_turns_are_text() -> None:
    chat = [ask("</s>", role="system"), ask(None, "<s> a"), ask("</s>", role="assistant"), ask("what <image>")]
    for text in TEXTS.values():
        ids = text.prompt(chat, ROWS).tolist()
        assert ids.count(text.settings.image_token_id) == ROWS
    assert "what <image>" in TEXTS["first", "chatml"].decode(TEXTS["first", "chatml"].prompt(chat, ROWS))


def test_a_bos_the_user_types_does_not_replace_the_model_s() -> None:
    text = make_text("first", "{% for m in messages %}{{ m.content }}{% endfor %}")
    ids = text.prompt([{"role": "user", "content": "<s>what"}], ROWS).tolist()
    assert ids.count(1) == 1
    assert ids[0] == 1


def test_a_bos_that_the_template_prints_is_not_doubled() -> None:
    ids = TEXTS["first", "mistral"].prompt([ask(None, "what")], ROWS).tolist()
    assert ids[:2].count(1) == 1


def test_content_as_a_string_equals_content_as_one_part() -> None:
    for kind, name in TEXTS:
        text = TEXTS[kind, name]
        as_string: list[Message] = [
            {"role": "system", "content": "Hello"},
            {"role": "user", "content": "what is this?"},
        ]
        as_parts = [ask("Hello", role="system"), ask("what is this?")]
        assert text.prompt(as_string, ROWS).tolist() == text.prompt(as_parts, ROWS).tolist()


def test_a_template_for_strings_gets_the_image_token_in_front_of_the_question() -> None:
    text = make_text("bytes", STRINGS)
    ids = text.prompt([ask("Hello", role="system"), ask(None, "what is this?")], ROWS).tolist()
    plain = make_tokenizer("bytes").encode(
        "system: Hello\nuser: <image>\nwhat is this?\nassistant: ", add_special_tokens=False
    )
    assert [i for i in ids if i != text.settings.image_token_id] == [
        i for i in plain.ids if i != text.settings.image_token_id
    ]
    assert ids.count(text.settings.image_token_id) == ROWS


def test_a_template_that_leaves_the_image_out_is_refused_with_the_cure() -> None:
    text = make_text("bytes", "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}")
    with pytest.raises(TemplateError, match=r"0 times for 1 images.*--chat-template FILE"):
        text.prompt([ask(None, "what")], ROWS)


def test_a_template_that_prints_the_image_twice_is_refused() -> None:
    text = make_text("bytes", VICUNA + "<image>")
    with pytest.raises(TemplateError, match="2 times for 1 images"):
        text.prompt([ask(None, "what")], ROWS)


@pytest.mark.parametrize("question", ["", "  \n\t"])
def test_an_empty_question_is_refused(question: str) -> None:
    with pytest.raises(RequestError, match="empty"):
        TEXTS["first", "vicuna"].prompt([ask(None, question)], ROWS)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [ask("Hello", role="assistant")],
        ["what"],
        [{"role": "user"}],
        [{"role": 1, "content": "what"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": ["what"]}],
        [{"role": "user", "content": [{"type": "video"}]}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"role": "user", "content": "what \ud800 is"}],
        [{"role": "user", "content": "what " * MAX_TEXT}],
    ],
)
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError):
        TEXTS["bytes", "chatml"].prompt(messages, ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "first"])
def test_odd_and_huge_questions_are_answered(kind: str) -> None:
    text = TEXTS[kind, "chatml"]
    assert "\0" in text.decode(text.prompt([ask("what\0is")], ROWS))
    assert len(text.prompt([ask("what is this " * 80_000)], ROWS)) > 80_000
    assert len(text.prompt([ask("a" * 1_000_000 + "</s>")], ROWS)) > 1000


def test_threads_share_one_text() -> None:
    text = TEXTS["first", "chatml"]
    chats = [[ask(None, "what is </s> this?")], CHATS["turns"], [ask("Hello <image>")]]
    expected = [text.prompt(chat, ROWS).tolist() for chat in chats]
    wrong: list[int] = []

    def work(i: int) -> None:
        wrong.extend(i for _ in range(30) if text.prompt(chats[i % 3], ROWS).tolist() != expected[i % 3])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


SENTENCES = st.text(st.characters(codec="utf-8") | st.sampled_from("猫é\u0301🇩🇪👩\u200d🚀 \ufffd"), max_size=20)


@given(SENTENCES)
@settings(max_examples=200, deadline=None)
def test_streamed_text_is_the_decoded_text(sentence: str) -> None:
    for kind in ("bytes", "first", "words"):
        text = TEXTS[kind, "vicuna"]
        ids = text.tokenizer.encode(sentence).ids
        stream = text.stream()
        pieces = [stream.push(id) for id in ids]
        if "\ufffd" not in sentence:
            assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + stream.finish() == text.decode(ids)


@given(st.lists(st.integers(0, 700), max_size=30))
@settings(max_examples=300, deadline=None)
def test_any_ids_stream_as_they_decode(ids: list[int]) -> None:
    for kind in ("bytes", "first", "always", "words"):
        text = TEXTS[kind, "vicuna"]
        stream = text.stream()
        assert "".join(map(stream.push, ids)) + stream.finish() == text.decode(ids)


@pytest.mark.parametrize("kind", ["bytes", "first"])
def test_a_stream_shows_words_as_they_come(kind: str) -> None:
    text = TEXTS[kind, "vicuna"]
    ids = text.tokenizer.encode(" Hello world", add_special_tokens=False).ids[-2:]
    stream = text.stream()
    assert [stream.push(id).strip() for id in ids] == ["Hello", "world"]
    assert stream.finish() == ""


def test_half_a_character_shows_only_at_the_end() -> None:
    text = TEXTS["bytes", "vicuna"]
    ids = text.tokenizer.encode("a猫", add_special_tokens=False).ids
    stream = text.stream()
    assert [stream.push(id) for id in ids[:-1]] == ["a", "", ""]
    assert stream.finish() == "\ufffd"


def test_settings_survive_the_manifest() -> None:
    settings = make_settings(make_tokenizer("first"), end_ids=(2, 7))
    assert Strict().read(TextSettings, json.loads(json.dumps(json_value(settings))), "text") == settings


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1},
        {"image_token": ""},
        {"image_token_id": -1},
        {"image_token_id": True},
        {"end_ids": [1, "2"]},
        {"end_ids": 2},
        {"bos_token": 1},
        {"add_special_tokens": None},
    ],
)
def test_wrong_settings_are_refused(change: dict[str, Any]) -> None:
    values = json_value(make_settings(make_tokenizer("first")))
    with pytest.raises(BundleError, match=r"export (the bundle )?again"):
        Strict().read(TextSettings, {**values, **change}, "text")
    with pytest.raises(BundleError, match="is missing"):
        Strict().read(TextSettings, {"image_token": "<image>"}, "text")


BROKEN = {
    "not JSON": b"{",
    "wrong types": b'{"version": "1.0", "model": 5}',
    "no model": b"{}",
    "not UTF-8": b"\xff\xfe",
    "deep": b"[" * 100_000,
    "bad merges": b'{"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{"a":0},"merges":["a b"]}}',
    "unigram": b'{"version":"1.0","added_tokens":[],"model":{"type":"Unigram","unk_id":9,"vocab":[["a",0.0]]}}',
    "charsmap": b'{"version":"1.0","added_tokens":[],"normalizer":{"type":"Precompiled","precompiled_charsmap":"AAAA"},'
    b'"model":{"type":"BPE","vocab":{},"merges":[]}}',
}


def reader(folder: Path) -> Callable[[str, int], bytes]:
    return Folder(folder, "bundle", BundleError, "export it again").read


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tokenizer_is_a_broken_bundle(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(BROKEN[name])
    (tmp_path / "chat_template.jinja").write_text(VICUNA)
    with pytest.raises(BundleError):
        Text(*text_files(reader(tmp_path)), make_settings(make_tokenizer("first")))


def test_missing_oversized_and_foreign_files_are_a_broken_bundle(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("first")
    settings = make_settings(tokenizer)
    with pytest.raises(BundleError, match=r"tokenizer\.json is missing"):
        Text(*text_files(reader(tmp_path)), settings)
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(BundleError, match="limit"):
        Text(*text_files(reader(tmp_path)), settings)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(VICUNA)
    assert Text(*text_files(reader(tmp_path)), settings).prompt(CHATS["image"], ROWS).size
    with pytest.raises(BundleError, match="is not the added token"):
        Text(*text_files(reader(tmp_path)), make_settings(tokenizer, image_token_id=5))
