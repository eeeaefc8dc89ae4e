"""Whatever is asked: no control token but the template's own, or one line."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support.fuzzing import fuzz, one_line
from tests.support.text import ROWS, SPECIALS, TEXTS, ask
from vtx.runtime.errors import VtxError
from vtx.runtime.prompt.text import Text

SHREDS = st.sampled_from(
    [*SPECIALS, "<", "s>", "</", "|im_", "\ue000", "\U000f0000", "\0", "\u202e", "\ud800", "猫", "e\u0301", " "]
)
QUESTIONS = st.lists(SHREDS | st.text(max_size=3), max_size=10).map("".join)


def ids(text: Text, chat: Any) -> list[int] | str:
    try:
        return [int(id) for id in text.prompt(chat, ROWS)]
    except VtxError as error:
        one_line(error)
        return type(error).__name__


@fuzz
@given(st.sampled_from(sorted(TEXTS)), QUESTIONS)
def test_no_question_writes_a_control_token(name: tuple[str, str], question: str) -> None:
    text = TEXTS[name]
    made = ids(text, [ask(None, "?" + question)])
    if isinstance(made, list):
        control = set(text.settings.control_tokens.values()) - {text.settings.control_tokens["<unk>"]}
        plain = ids(text, [ask(None, "?")])
        assert [id for id in made if id in control] == [id for id in plain if id in control]


@fuzz
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "user", "image"]), inner, max_size=4)
        ),
        max_leaves=8,
    )
)
def test_malformed_messages_are_refused(chat: Any) -> None:
    ids(TEXTS["bytes", "chatml"], chat if isinstance(chat, list) else [chat])
