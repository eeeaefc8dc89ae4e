"""Chat templates, and conversations to try them with."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import strategies as st

from tests.support.families import qwen
from tests.support.text import CHATML, MISTRAL, STRINGS, VICUNA
from vtx.exporter.checkpoint.original.templates import TEMPLATES as ORIGINAL
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
    "upper case": VICUNA.replace("c['text'] + ' '", "c['text'] | upper"),
    "numbered images": VICUNA.replace("'<image>\n'", "loop.index ~ '<image>'"),
    "a date": "{{ strftime_now('%d %B') }}" + VICUNA,
    "numbered turns": VICUNA.replace("': ' }}", "': ' }}{{ loop.index }}"),
    "a thought cut off": CHATML.replace("{{- m.content }}", "{{ m.content }}").replace(
        "{{ c.text }}", "{{ c.text.split('</think>')[-1] }}"
    ),
    "a word that matters": VICUNA + "{% if 'json' in messages[-1].content[-1].text %}{}{% endif %}",
    "long texts": VICUNA.replace("c['text'] + ' '", "c['text'][:1000] + ' '"),
    "texts in turn": VICUNA.replace("{{ c['text'] + ' ' }}", "{{ c['text'] if loop.first else '' }}"),
    "white space between roles": VICUNA.replace(
        "': ' }}", "': ' }}{% if not loop.first and loop.index0 % 2 == 0 %} {% endif %}"
    ),
    "a blank answer left out": VICUNA.replace(
        "{% endfor %}{% endfor %}",
        "{% endfor %}{% if loop.previtem and not loop.previtem.content[0].text %}!{% endif %}{% endfor %}",
    ),
}
LOOP = "{% for m in messages %}"
IMAGES = "m['content'] | selectattr('type', 'equalto', 'image') | list | length"


def inside(snippet: str, template: str = VICUNA) -> str:
    """A template with something more in its loop over messages."""
    found = re.search(r"\{%-? for m in messages %\}", template)
    assert found is not None
    return template[: found.end()] + snippet + template[found.end() :]


# What each of these prints differs from what a few short conversations show.
BEYOND = {
    "something at three images": inside("{% if " + IMAGES + " == 3 %}!{% endif %}"),
    "another text from the fourth turn on": inside("{% if loop.index > 6 %}!{% endif %}"),
    "the last seven messages": VICUNA.replace(LOOP, "{% for m in messages[-7:] %}"),
    "texts cut at 4,000 characters": VICUNA.replace("c['text'] + ' '", "c['text'][:4000] + ' '"),
}
FAMILIES = {
    **ORIGINAL,
    "qwen2_vl": qwen.TEMPLATE.replace("IMAGE", "<image>"),
    "strings": "{% for m in messages %}{% set text = '<|im_start|>' + m.role + '\n\n' + m.content | trim %}"
    "{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}{{ text }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}",
    "images, videos, texts": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    + "".join(
        "{% for c in m['content'] | selectattr('type', 'equalto', '"
        + kind
        + "') %}{{ '<"
        + kind
        + ">\n' }}{% endfor %}"
        for kind in ("image", "video")
    )
    + "{% if m['role'] != 'assistant' %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ c['text'] }}{% endfor %}{% else %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ c['text'] }}{% endgeneration %}{% endfor %}{% endif %}{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "tools": inside(
        "{% if tools %}{{ tools | tojson }}{{ messages | length }}{% endif %}"
        "{% if m.role == 'tool' %}{{ messages[loop.index0 - 3].content }}{% endif %}"
        "{% for call in m.tool_calls %}{{ loop.index }}{{ call.name }}{% endfor %}"
    ),
}
# What templates have in rare cases, for a loop over messages.
SNIPPETS = (
    "{{ loop.index }}",
    "{{ '%d' % loop.index }}",
    "{{ '%.1s' % m.content[0].text }}",
    "{% if loop.index0 == 9 %}!{% endif %}",
    "{% if loop.index0 % 7 == 0 %}!{% endif %}",
    "{% if (loop.index0 - 5) == 0 %}!{% endif %}",
    "{% if messages | length > 5 %}!{% endif %}",
    "{% if loop.revindex > 4 %}!{% endif %}",
    "{% if messages[5] is defined %}!{% endif %}",
    "{% if messages[loop.index0 - 4].role == 'user' %}!{% endif %}",
    "{% for x in messages[3:] %}!{% endfor %}",
    "{% for x in messages[1:][1:][1:] %}!{% endfor %}",
    "{% for x in range(3) %}{% if messages[x] is defined %}!{% endif %}{% endfor %}",
    "{% if m.content[0].text == 'secret' %}!{% endif %}",
    "{% if 'secret' in m.content[0].text %}!{% endif %}",
    "{% if 'q' in m.content[0] %}!{% endif %}",
    "{% if m == messages[0] %}!{% endif %}",
    "{% if m.content[0].text.isdigit() %}!{% endif %}",
    "{% if m.content[0].text.startswith('a') %}!{% endif %}",
    "{% if m.content[0].text | length > 1 %}!{% endif %}",
    "{% if m.content[0].text | int > 1 %}!{% endif %}",
    "{% set q = m.content[0].text %}{% if q[0] == 'a' %}!{% endif %}",
    "{% for x in messages | map(attribute='role') %}{{ x }}{% endfor %}",
    "{% for x in messages | sort(attribute='role') %}!{% endfor %}",
    "{% set n = namespace(i=0) %}{% set n.i = n.i + 1 %}{{ n.i }}",
    "{% set n = namespace(i=0) %}{% set o = n %}{% set o.i = 1 %}{{ n.i }}",
    "{% set n = namespace(a=false) %}{% for x in messages %}{% if n.a %}!{% endif %}{% set n.a = true %}{% endfor %}",
    "{% macro p(x) %}{{ x }}{% endmacro %}",
    "{% for x in messages %}{% break %}{% endfor %}",
    "{{ m.items() | list | length }}",
    "{{ m }}",
)

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


TEXTS: st.SearchStrategy[str] = st.one_of(
    st.sampled_from(("x", " x ", "", "\n", "a b\n", "123", "q")),
    st.integers(1, 5000).map(lambda length: ("0123456789" * 500)[:length]),
)
TEXT_PARTS: st.SearchStrategy[Part] = TEXTS.map(lambda text: {"type": "text", "text": text})


def message(role: str, most_images: int) -> st.SearchStrategy[Message]:
    images: list[Part] = [{"type": "image"}]
    parts = st.tuples(st.integers(0, most_images), st.lists(TEXT_PARTS, min_size=1, max_size=3), st.booleans())
    return parts.map(lambda p: {"role": role, "content": [*p[1], *images * p[0]] if p[2] else [*images * p[0], *p[1]]})


LONG_CHATS = st.tuples(st.booleans(), st.sampled_from((0, 1, 3, 5, 7))).flatmap(
    lambda shape: st.tuples(
        *([message("system", 0)] if shape[0] else []),
        *(message(role, 5 * (role == "user")) for _ in range(shape[1]) for role in ("user", "assistant")),
        message("user", 5),
    ).map(list)
)
NUMBERS = st.integers(0, 9).map(str)
COMPARED = st.tuples(
    st.sampled_from((IMAGES, "loop.index0", "loop.revindex", "messages | length", "m.content[0].text | length")),
    st.sampled_from(("==", "!=", ">", "<")),
    st.one_of(NUMBERS, st.just("1"), st.just("4000")),
).map(lambda words: f"({words[0]}) {words[1]} {words[2]}")
CONDITIONS = st.one_of(
    COMPARED,
    st.sampled_from(
        ("loop.first", "loop.last", "loop.index0 % 2 == 0", "messages[0].role == 'system'", "m.role == 'user'",
         "m.content[0].type == 'image'", "m.content[-1].type == 'text'", "m.content[0].text", "tools",
         "loop.previtem.content[0].type == 'image'", "messages[-1].content[0].type == 'image'",
         "messages[loop.index0 - 1].role == 'assistant'", "m.content | string | length > 3500",
         "'123' in (m.content | string)", "m.content[0].text == messages[0].content[0].text")
    ),
)  # fmt: skip


@st.composite
def templates(draw: st.DrawFn) -> str:
    """A template in use that prints something more under some condition, or prints less."""
    source = draw(st.sampled_from((VICUNA, MISTRAL, CHATML, DEFAULT_SYSTEM)))
    for number in range(draw(st.integers(1, 2))):
        condition = draw(CONDITIONS if number else COMPARED)
        if draw(st.booleans()):
            condition = f"({condition}) {draw(st.sampled_from(('and', 'or')))} ({draw(CONDITIONS)})"
        source = inside("{% if " + condition + " %}!{% endif %}", source)
    number = draw(st.integers(1, 9))
    match draw(st.integers(0, 5)):
        case 0:
            source = re.sub("in messages %", f"in messages[-{number}:] %", source, count=1)
        case 1:
            source = re.sub(r"(c\.text|c\['text'\])", rf"\1[:{number * 500}]", source)
    return source


def long_chat(turns: int, images: int = 1, text: str = "what?") -> list[Message]:
    question: list[Part] = [*([{"type": "image"}] * images), {"type": "text", "text": text}]
    answer: list[Part] = [{"type": "text", "text": "this"}]
    pairs: list[Message] = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return (pairs * turns)[:-1]
