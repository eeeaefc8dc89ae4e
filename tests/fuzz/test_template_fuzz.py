"""Whatever a chat template says: it is rendered, or refused with one line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fuzzing import cases, damaged, fuzz
from tests.support.templates import CHATS, EXPRESSIONS, IRREGULAR, REGULAR
from tests.support.text import make_settings, make_tokenizer
from vtx.runtime.errors import CheckpointError
from vtx.runtime.host.confined import ChildLimits, ChildTask, Subject, confine
from vtx.runtime.strict import json_value

BATCH = 20  # templates a child
LIMITS = ChildLimits(memory=2 << 30, cpu_seconds=60)
SETTINGS = json_value(make_settings(make_tokenizer("first")))
SOURCES = sorted([*REGULAR.values(), *IRREGULAR.values()])
SNIPPETS = (
    *(
        "{% if loop.first %}F{% endif %}",
        "{{ loop.index }}",
        "{{ m.role }}",
        "{% if loop.last %}L{% endif %}",
        "{{ bos_token }}",
    ),
    *(
        "{% if messages | length > 2 %}!{% endif %}",
        "{{ messages[0].content }}",
        "<image>",
        "\n",
        " ",
        "{%- if true -%}",
    ),
    *(
        "{% endif %}",
        "{{ m.content | length }}",
        "{% set x = m.content | string | trim %}{{ x }}",
        "{{ '%s' % m.content }}",
    ),
    *(
        "{% if 'USER' in (m.content | string) %}U{% endif %}",
        "{{ m.content[0] }}",
        "{% for c in m.content %}{{ c }}{% endfor %}",
    ),
)


@st.composite
def templates(draw: st.DrawFn) -> str:
    """A template in use with something put in, or damaged, or an expression around a real one."""
    source = draw(st.sampled_from(SOURCES))
    match draw(st.integers(0, 3)):
        case 0:
            return draw(damaged(source.encode())).decode("utf-8", "replace")
        case 1:
            return "{% for i in [1, 2] %}{{ " + draw(EXPRESSIONS) + " }}{% endfor %}" + source
        case _:
            for _ in range(draw(st.integers(1, 3))):
                spots = [i for i in range(len(source) + 1) if source[i : i + 2] in ("{%", "{{") or i == len(source)]
                spot = draw(st.sampled_from(spots))
                source = source[:spot] + draw(st.sampled_from(SNIPPETS)) + source[spot:]
            return source


def attack(sources: list[str], chats: list[Any]) -> list[str]:
    request = {"templates": sources, "chats": chats, "settings": SETTINGS}
    try:
        outcomes: list[str] = confine(
            ChildTask("tests.support.confined:hold_templates", request, LIMITS), Subject("the templates")
        )
    except CheckpointError as error:
        outcomes = [f"CheckpointError: {error}"]
    for outcome in outcomes:
        assert outcome.isprintable(), outcome
        assert "cannot be read" not in outcome, outcome  # an error that nobody foresaw
    return outcomes


@pytest.mark.parametrize("case", cases("template"), ids=lambda case: case.name)
def test_what_was_found_before(case: Any) -> None:
    attack([case.read_text(encoding="utf-8")], [[{"role": "user", "content": "x"}]])


@pytest.mark.slow
@settings(fuzz, max_examples=max(1, fuzz.max_examples // BATCH))
@given(st.lists(templates(), min_size=BATCH, max_size=BATCH), st.lists(CHATS, min_size=8, max_size=8))
def test_templates_are_rendered_or_refused(sources: list[str], chats: list[Any]) -> None:
    attack(sources, chats)
