from __future__ import annotations

import copy
import dataclasses
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
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from vtx.exporter.checkpoint.resolving import control_tokens, resolve, with_forms
from vtx.exporter.checkpoint.text import read_template, read_text
from vtx.runtime.bundle.files import Folder
from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.errors import BundleError, CheckpointError, RequestError, TemplateError
from vtx.runtime.prompt.messages import MAX_TEXT, Message
from vtx.runtime.prompt.text import Text
from vtx.runtime.strict import Strict, plain

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
        "forms": None,
        "no_forms": "not derived",
    }
    settings = TextSettings(**{**values, **changes})
    return dataclasses.replace(settings, control_tokens=control_tokens(tokenizer, settings))


def make_text(kind: str = "first", template: str = VICUNA, *, forms: bool = True) -> Text:
    tokenizer = make_tokenizer(kind)
    settings = make_settings(tokenizer)
    return Text(tokenizer, template, with_forms(settings, template) if forms else settings)


KINDS = ["bytes", "words", "normalizer", "first", "always", "never"]
TEXTS = {(kind, name): make_text(kind, TEMPLATES[name]) for kind in KINDS for name in TEMPLATES}
BY_TEMPLATE = {(kind, name): make_text(kind, TEMPLATES[name], forms=False) for kind in KINDS for name in TEMPLATES}


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
    assert TEXTS[kind, name].settings.forms
    for messages in CHATS.values():
        for text in (TEXTS[kind, name], BY_TEMPLATE[kind, name]):
            ids = text.prompt(messages, ROWS)
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
        rendered = text._renderer.render(messages, add_generation_prompt=True)
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


SHREDS = st.sampled_from([*SPECIALS, "<", "s>", ">", " ", "a", "\ue000", "\ue001", "\U000f0000", "猫", "\0"])


@given(st.lists(SHREDS, max_size=12).map("".join))
@settings(max_examples=150, deadline=None)
def test_no_question_makes_control_tokens(question: str) -> None:
    for kind in ("bytes", "first"):
        text = TEXTS[kind, "chatml"]
        control = set(text.settings.control_tokens.values())
        try:
            ids = text.prompt([ask(None, "?" + question)], ROWS).tolist()
        except RequestError:
            continue
        plain = text.prompt([ask(None, "?")], ROWS).tolist()
        assert [i for i in ids if i in control] == [i for i in plain if i in control]


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
    assert Strict().read(TextSettings, json.loads(json.dumps(plain(settings))), "text") == settings


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
    values = plain(make_settings(make_tokenizer("first")))
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
        Text.load(reader(tmp_path), make_settings(make_tokenizer("first")))


def test_missing_oversized_and_foreign_files_are_a_broken_bundle(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("first")
    settings = make_settings(tokenizer)
    with pytest.raises(BundleError, match=r"tokenizer\.json is missing"):
        Text.load(reader(tmp_path), settings)
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(BundleError, match="limit"):
        Text.load(reader(tmp_path), settings)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(VICUNA)
    assert Text.load(reader(tmp_path), settings).prompt(CHATS["image"], ROWS).size
    with pytest.raises(BundleError, match="is not the added token"):
        Text.load(reader(tmp_path), make_settings(tokenizer, image_token_id=5))


# ---- from a checkpoint -----------------------------------------------------------------------------------------------


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


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolve here, where a test is about what is resolved and has many cases; a child takes two seconds."""
    monkeypatch.setattr("vtx.exporter.checkpoint.text.confine", lambda _, request, **__: resolve(request))


def read(folder: Path, top: dict[str, Any], **more: Any) -> tuple[str, str, TextSettings]:
    return read_text(folder, top["image_token_index"], {}, top, **more)


@pytest.mark.sampled(5)
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["llava", "llama", "unheard-of"])
@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "PreTrainedTokenizerFast", "MyOwnTokenizer", None])
def test_exported_ids_equal_autotokenizer_s(
    kind: str, model_type: str, tokenizer_class: str | None, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    if kind == "words" and (model_type, tokenizer_class) != ("llava", "PreTrainedTokenizerFast"):
        pytest.skip("a class made for BPE")
    config = {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
    top = write_checkpoint(tmp_path, kind, add_bos_token=True, **config) | {"model_type": model_type}
    write_json(tmp_path / "config.json", top)
    json_text, template, settings = read(tmp_path, top)
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ours = Tokenizer.from_str(json_text)
    for sentence in ("USER: <image>\nwhat is this?</s> the", " Hello", "<s>猫"):
        assert ours.encode(sentence).ids == theirs.encode(sentence)
    assert (settings.bos_token, settings.eos_token) == (theirs.bos_token, theirs.eos_token)
    assert Text(ours, template, settings).prompt(CHATS["image"], ROWS).size


def test_vocab_and_merges_are_converted(tmp_path: Path) -> None:
    top = write_checkpoint(tmp_path, "bytes", tokenizer_class="Qwen2Tokenizer")
    model = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").unlink()
    write_json(tmp_path / "vocab.json", model["model"]["vocab"])
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    added = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in model["added_tokens"]}
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "added_tokens_decoder": added}
    write_json(tmp_path / "tokenizer_config.json", config)
    write_json(tmp_path / "config.json", top)
    json_text, _, settings = read_text(tmp_path, top["image_token_index"], {"model_type": "qwen2"}, top, CHATML)
    assert settings.eos_token == "<|im_end|>"
    ids = Text(Tokenizer.from_str(json_text), CHATML, settings).prompt(CHATS["turns"], ROWS)
    assert ids.tolist() == TEXTS["bytes", "chatml"].prompt(CHATS["turns"], ROWS).tolist()


def test_nothing_of_the_checkpoint_is_executed(tmp_path: Path) -> None:
    auto_map = {"AutoTokenizer": ["mine.Slow", "mine.Fast"], "AutoConfig": "mine.Config"}
    top = write_checkpoint(tmp_path, tokenizer_class="MyOwnTokenizer", auto_map=auto_map) | {"auto_map": auto_map}
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Slow: pass\nclass Fast: pass")
    write_json(tmp_path / "config.json", top)
    assert read(tmp_path, top)
    assert not (tmp_path / "ran").exists()


def test_templates_are_found_in_transformers_order(tmp_path: Path) -> None:
    top = write_checkpoint(tmp_path, template=None)
    with pytest.raises(CheckpointError, match=r"no chat template in .*--chat-template FILE"):
        read(tmp_path, top)
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": [{"name": "default", "template": "1"}]})
    assert read_template(tmp_path) == "1"
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": "2"})
    assert read_template(tmp_path) == "2"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "default.jinja").write_text("3")
    assert read_template(tmp_path) == "3"
    (tmp_path / "chat_template.jinja").write_text("4")
    assert read_template(tmp_path) == "4"
    write_json(tmp_path / "chat_template.json", {"chat_template": "5"})
    assert read_template(tmp_path) == "5"
    write_json(tmp_path / "processor_config.json", {"chat_template": "6"})
    assert read_template(tmp_path) == "6"
    write_json(tmp_path / "processor_config.json", {"chat_template": 6})
    with pytest.raises(CheckpointError, match="must be text"):
        read_template(tmp_path)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("generation", "text", "top", "expected"),
    [
        ({"eos_token_id": [7, 2, 7]}, {"eos_token_id": 3}, {}, (7, 2)),
        ({}, {"eos_token_id": 3}, {}, (3,)),
        ({}, {"eos_token_id": 3}, {"eos_token_id": 4}, (4,)),
        (None, {}, {}, (2,)),
    ],
)
def test_end_ids_are_those_generate_would_stop_at(
    generation: Any, text: Any, top: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    top = write_checkpoint(tmp_path) | top
    if generation is not None:
        write_json(tmp_path / "generation_config.json", generation)
    assert read_text(tmp_path, top["image_token_index"], text, top)[2].end_ids == expected


@pytest.mark.usefixtures("in_process")
def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    top = write_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no added token 5"):
        read_text(tmp_path, 5, {}, top)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": ["x"]})
    with pytest.raises(CheckpointError, match="eos_token_id"):
        read(tmp_path, top)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not sound JSON"):
        read(tmp_path, top)
    (tmp_path / "generation_config.json").write_text(" " * (2 << 20))
    with pytest.raises(CheckpointError, match="the limit for such a file is 1,048,576"):
        read(tmp_path, top)
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(TemplateError):
        read(tmp_path, top, template="{{ ''.__class__ }}")
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": 5, "added_tokens_decoder": {"x": 1}})
    with pytest.raises(CheckpointError):
        read(tmp_path, top)
    for content in ("{", '{"added_tokens": []}', "[]"):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(CheckpointError):
            read(tmp_path, top)
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(CheckpointError, match="limit"):
        read(tmp_path, top)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        read(tmp_path, top)
