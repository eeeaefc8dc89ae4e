"""Chat templates with and without prompt forms, and conversations to try them with."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from tests.support.text import CHATML, MISTRAL, STRINGS, VICUNA, make_settings, make_tokenizer, with_forms
from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.prompt.messages import Message, Part

DEMO = Path(__file__).parents[2] / "exporter" / "demo_model" / "chat_template.jinja"
LLAMA2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' }}"
    "{% if loop.first and system %}<<SYS>>\n{{ system | trim }}\n<</SYS>>\n\n{% endif %}"
    "{{ m.content | trim }} [/INST]{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}{% for c in m.content if c.type == 'image' %}<image>{% endfor %}"
    "{% for c in m.content if c.type == 'text' %}\n{{ c.text }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('no system message here') }}{% endif %}"
    + MISTRAL.removeprefix("{{ bos_token }}{% for m in messages %}")
)
RIGHT = VICUNA.replace("c['text'] + ' '", "c['text'].rstrip() + ' '")
REGULAR = {
    "vicuna": VICUNA,
    "mistral": MISTRAL,
    "chatml": CHATML,
    "strings": STRINGS,
    "llama-2": LLAMA2,
    "default system": DEFAULT_SYSTEM,
    "alternating": ALTERNATING,
    "stripped on the right": RIGHT,
    "demo": DEMO.read_text(),
}
IRREGULAR = {
    "upper case": (VICUNA.replace("c['text'] + ' '", "c['text'] | upper"), "filter upper"),
    "numbered images": (VICUNA.replace("'<image>\n'", "loop.index ~ '<image>'"), "prints a number"),
    "a date": ("{{ strftime_now('%d %B') }}" + VICUNA, "prints the date"),
    "numbered turns": (VICUNA.replace("': ' }}", "': ' }}{{ loop.index }}"), "prints a number"),
    "a thought cut off": (
        CHATML.replace("{{- m.content }}", "{{ m.content }}").replace(
            "{{ c.text }}", "{{ c.text.split('</think>')[-1] }}"
        ),
        r"split\(\)",
    ),
    "a word that matters": (
        VICUNA + "{% if 'json' in messages[-1].content[-1].text %}{}{% endif %}",
        "compares or searches texts",
    ),
    "long texts": (VICUNA.replace("c['text'] + ' '", "c['text'][:1000] + ' '"), "picks items"),
    "texts in turn": (VICUNA.replace("{{ c['text'] + ' ' }}", "{{ c['text'] if loop.first else '' }}"), "part by part"),
    "white space between roles": (
        VICUNA.replace("': ' }}", "': ' }}{% if not loop.first and loop.index0 % 2 == 0 %} {% endif %}"),
        "varies between conversations",
    ),
    "a blank answer left out": (
        VICUNA.replace(
            "{% endfor %}{% endfor %}",
            "{% endfor %}{% if loop.previtem and not loop.previtem.content[0].text %}!{% endif %}{% endfor %}",
        ),
        "differ from the template",
    ),
}


def resolved(template: str) -> TextSettings:
    return with_forms(make_settings(make_tokenizer("first")), template)


SHREDS = (
    "x",
    " ",
    "\n",
    "\t",
    "\u3000",
    "猫",
    "USER:",
    "<<SYS>>",
    "[INST]",
    "image",
    "'",
    "{{",
    "}}",
    "%}",
    "\\n",
    "0",
    ":",
)
WORDS = st.lists(st.sampled_from(SHREDS) | st.text(max_size=3), max_size=8).map("".join)
TEXT_PART: st.SearchStrategy[Part] = WORDS.map(lambda text: {"type": "text", "text": text})
IMAGE_PART: st.SearchStrategy[Part] = st.just({"type": "image"})


def messages(role: str) -> st.SearchStrategy[Message]:
    parts = st.lists(TEXT_PART | IMAGE_PART if role == "user" else TEXT_PART, max_size=4)
    return st.one_of(WORDS, parts).map(lambda content: {"role": role, "content": content})


CONVERSATIONS = st.lists(st.sampled_from(("system", "user", "assistant")), min_size=1, max_size=6).flatmap(
    lambda roles: st.tuples(*map(messages, roles)).map(list)
)
CHATS = st.tuples(st.booleans(), st.integers(0, 2)).flatmap(
    lambda shape: st.tuples(
        *([messages("system")] if shape[0] else []),
        *(messages(role) for _ in range(shape[1]) for role in ("user", "assistant")),
        messages("user"),
    ).map(list)
)


EXPRESSIONS = st.recursive(
    st.sampled_from(
        ["messages", "'ab'", "3", "10**9", "range(9)", "none", "x", "namespace(a=1)", "raise_exception", "{}"]
    ),
    lambda e: st.one_of(
        st.tuples(e, st.sampled_from(["+", "*", "~", "%", "**", "==", "in", "and"]), e)
        .map(" ".join)
        .map("({})".format),
        st.tuples(e, st.sampled_from(["join", "list", "tojson", "length", "replace('a', 'bb')", "sort"])).map("|".join),
        st.tuples(e, st.sampled_from(["format('a')", "__class__", "items()", "upper()", "a", "pop()"])).map(".".join),
        st.tuples(e, e).map("[{0[0]}, {0[1]}]".format),
        st.tuples(e, e).map("{0[0]}[{0[1]}:]".format),
        e.map("({})".format),
    ),
    max_leaves=12,
)
