"""Prompt forms of a chat template: derived from marked conversations, then checked against the template on many others.

A template has forms only if its syntax tree shows that these conversations prove all others (`template_syntax.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product

from vtx.exporter.checkpoint.template_syntax import UnprovenError, check_provable
from vtx.runtime.bundle.spec.text_settings import END, REPLY, ROLES, SIDES, START, ContentForm, PromptForms
from vtx.runtime.errors import TemplateError
from vtx.runtime.prompt.messages import Message, Part
from vtx.runtime.prompt.rendering import render_forms

MAX_SPLIT = 200  # characters between two texts of a message
_MARKS = ("vTx0aQ", "vTx1bQ", "vTx2cQ", "vTx3dQ", "vTx4eQ", "vTx5fQ")
_PADDED = " \n a\tb \u3000"
_IMAGE: Part = {"type": "image"}
_PLAIN = ContentForm("", "", None, images_first=False, strip_text="none", strip_content="none", blank=True)
_STRIPS = [(text, content) for text, content in product(SIDES, SIDES) if "none" in (text, content)]
_TURNS = (
    ("user",),
    ("user", "assistant", "user"),
    ("user", "assistant", "user", "assistant", "user"),
    ("user", "assistant"),
    ("user", "assistant", "user", "assistant"),
)
_SEQUENCES = tuple(roles for turns in _TURNS for roles in (turns, ("system", *turns)))
_TEXTS = (
    "", " ", "x", " x ", "\nx\n", "\tx\u3000", "x\n\ny", "\r\nx\r\n", "<>&\"'{}", "{{ x }} {% y %}", "12", "Aa bB", "#",
    "À é ß ﬁ 猫 👩\u200d🚀", "e\u0301", "\ue000s>", "long " * 60,
)  # fmt: skip

_Content = tuple[str, str]  # a shape and a text
Render = Callable[[Sequence[Message], bool], str | None]


class IrregularError(Exception):
    """The reason why a template has no forms."""


def derive_forms(render: Callable[[Sequence[Message], bool], str], source: str) -> PromptForms:
    """The forms of a chat template.

    `render` gets messages and True if an answer is to follow. Raises `IrregularError` if the template has no forms, and
    exceptions of `render` other than `TemplateError`.
    """
    if "strftime_now" in source:
        raise IrregularError("the template prints the date")
    try:
        check_provable(source)
    except UnprovenError as reason:
        raise IrregularError(f"its prompts cannot be proven for every conversation: {reason}") from reason

    def tried(messages: Sequence[Message], reply: bool) -> str | None:
        try:
            return render(messages, reply)
        except TemplateError:
            return None

    joins = _joins(tried)
    contents = {role: _PLAIN for role in ROLES if any(role in key.split(">") for key in joins)}
    forms = PromptForms(contents, joins)
    for role in contents:
        forms = _with_content(forms, role, tried)
    for messages, reply in product(_battery(tuple(contents)), (True, False)):
        made = render_forms(forms, messages, add_generation_prompt=reply)
        if made is not None and made != tried(messages, reply):
            shown = " ".join(str(messages[-1]["content"]).split())[:80]
            raise IrregularError(f"the forms differ from the template for {len(messages)} messages ({shown})")
    return forms


def _turn(role: str, *parts: str | None) -> Message:
    """A message; None stands for an image."""
    return {"role": role, "content": [_IMAGE if part is None else {"type": "text", "text": part} for part in parts]}


def _joins(render: Render) -> dict[str, str]:
    """The text between neighbouring texts, in conversations of one text a message."""
    joins: dict[str, str] = {}
    for roles, reply in product(_SEQUENCES, (True, False)):
        if reply and roles[-1] != "user":
            continue
        marks = _MARKS[: len(roles)]
        text = render([_turn(role, mark) for role, mark in zip(roles, marks, strict=True)], reply)
        if text is None:
            continue
        gaps = re.split("|".join(marks), text)
        if len(gaps) != len(roles) + 1 or [*re.findall("|".join(marks), text)] != [*marks]:
            raise IrregularError(f"the texts of {', '.join(roles)} must appear in the prompt exactly once, in order")
        names = (START, *roles, REPLY if reply else END)
        for key, gap in zip((f"{a}>{b}" for a, b in pairwise(names)), gaps, strict=True):
            if joins.setdefault(key, gap) != gap:
                raise IrregularError(f"{key} varies between conversations")
    if f"{START}>user" not in joins or f"user>{REPLY}" not in joins:
        raise IrregularError("the template refuses a single question")
    return joins


def _with_content(forms: PromptForms, role: str, render: Render) -> PromptForms:
    """The forms with the one for `role`'s contents that renders as the template does."""
    shapes: list[tuple[str | None, ...]] = [("x", "y"), (" x ", " y "), ("x", "", "y"), ("\n", "x\n")]
    shapes += [(text,) for text in _TEXTS if text.strip() or role != "user"]  # a last question is never blank
    if role == "user":
        shapes += [
            (None, "x"), (None, None, "x"), ("x", None), (" x", None, "y "), (None, " x\n", None, " "), (None, " x "),
        ]  # fmt: skip
    cases = [(messages, render(messages, True)) for messages in (_around(role, *parts) for parts in shapes)]
    for form in _candidates(role, render):
        joins = dict(forms.joins)  # without the candidate's text before and after a content
        for key, join in forms.joins.items():
            before, after = key.split(">")
            left = form.text_after if before == role else ""
            right = form.text_before if after == role else ""
            if len(join) < len(left) + len(right) or not (join.startswith(left) and join.endswith(right)):
                break
            joins[key] = join[len(left) : len(join) - len(right)]
        else:
            tried = replace(forms, contents={**forms.contents, role: form}, joins=joins)
            made = ((render_forms(tried, case, add_generation_prompt=True), text) for case, text in cases)
            if all(own is None or own == text for own, text in made):
                return tried
    raise IrregularError(f"the content of a {role} message is not printed part by part, unchanged")


def _around(role: str, *parts: str | None) -> list[Message]:
    """A conversation around one message of `role`."""
    message = _turn(role, *parts)
    if role == "system":
        return [message, _turn("user", "y")]
    return [message] if role == "user" else [_turn("user", "y"), message, _turn("user", "z")]


def _candidates(role: str, render: Render) -> Iterator[ContentForm]:
    before, between, after = _split(render, role, _MARKS[0], _MARKS[1])
    if len(between) > MAX_SPLIT:
        raise IrregularError(f"two texts of a {role} message are {len(between)} characters apart")
    image_before = _split(render, role, None, _MARKS[0])[0] if role == "user" else None
    cuts = range(len(between) + 1)
    for blank, (text, content), first, cut in product((True, False), _STRIPS, (True, False), cuts):
        text_after, text_before = between[:cut], between[cut:]
        if not (before.endswith(text_before) and after.startswith(text_after)):
            continue
        image = None
        if image_before is not None:
            left = before.removesuffix(text_before)
            if not (image_before.startswith(left) and image_before.endswith(text_before)):
                continue
            image = image_before[len(left) : len(image_before) - len(text_before)]
        yield ContentForm(text_before, text_after, image, first and image is not None, text, content, blank)


def _split(render: Render, role: str, *parts: str | None) -> list[str]:
    """The text before, between and after the marks of a message's parts, up to its neighbours."""
    text = render(_around(role, *parts), True)
    gaps = re.split("|".join(mark for mark in parts if mark), text or "")
    if text is None or len(gaps) != sum(part is not None for part in parts) + 1:
        raise IrregularError(f"a {role} message of several parts is refused or not printed part by part")
    return gaps


def _battery(roles: Sequence[str]) -> Iterator[list[Message]]:
    """Conversations that tell apart all templates accepted by `check_provable`, and each text in each role."""
    yield from _chats()
    texts = (_PADDED, "x", "", "\n")
    for role, shape in product(roles, _shapes(5)):  # up to five parts in every order, alone and after other turns
        for shift in range(len(texts) if len(shape) < 4 else 1):
            if role == "user" or "I" not in shape:
                parts = [None if letter == "I" else texts[(n + shift) % len(texts)] for n, letter in enumerate(shape)]
                yield _around(role, *parts)
                yield [_turn("user", "y"), _turn("assistant", "z"), *_around(role, *parts)][2 * (role == "system") :]
    for text, role in product(_TEXTS, roles):
        chat = [_turn("user", None, "first"), _turn("assistant", "answer"), _turn("user", "last")]
        if role == "system":
            chat.insert(0, _turn(role, text))
        else:
            chat[ROLES.index(role) - 1] = _turn(role, *[None] * (role == "user"), text)
        yield chat
        yield [{"role": turn["role"], "content": text} if turn["role"] == role else turn for turn in chat]


def _chats() -> Iterator[list[Message]]:
    """Conversations of up to five turns that differ in the shape and the blankness of their contents.

    Three turns have a first one, a last one and one between; the fourth and the fifth continue their pattern.
    """
    few, more, most = (
        [("string", _PADDED), *((shape, _PADDED) for shape in shapes)]
        for shapes in (("T", "IT", "TI"), ("T", "IT", "TI", "IITIT", "TTI"), _shapes(3))
    )
    system: list[_Content | None] = [None, *few[:2]]
    for shapes, turns, answers in ((most, 1, few[:2]), (most, 2, few[:2]), (more, 3, few[1:2])):
        for asked, answer, given in product(product(shapes, repeat=turns), answers, system):
            yield from _chat(asked, [answer] * turns, given)
    for asked, given in product((*product(few[1:3], repeat=4), *((shape,) * 5 for shape in few)), system[::2]):
        yield from _chat(asked, few[1:2] * len(asked), given)
    blanks = [(shape, text) for shape in ("T", "IT") for text in (_PADDED, "", " ")]
    system = [None, *blanks[:3]]
    for question, answer, given in product(blanks, blanks[:3], system):
        yield from _chat([question], [answer], given)
    for asked, answered, given in product(product(blanks[:3], repeat=2), product(blanks[:3], repeat=2), system):
        yield from _chat(asked, answered, given)


def _shapes(most: int) -> list[str]:
    """Every order of at most `most` images and texts, at least one of them a text."""
    orders = (order for length in range(1, most + 1) for order in product("TI", repeat=length))
    return ["".join(order) for order in orders if "T" in order]


def _chat(asked: Sequence[_Content], answers: Sequence[_Content], given: _Content | None) -> Iterator[list[Message]]:
    """The conversation up to its last question, and up to its answer."""
    messages = [] if given is None else [_shaped("system", *given)]
    for question, answer in zip(asked, answers, strict=True):
        messages += _shaped("user", *question), _shaped("assistant", *answer)
    yield messages[:-1]
    yield messages


def _shaped(role: str, shape: str, text: str) -> Message:
    """A message whose content is a string, or has a part a letter: I for an image, T for a text."""
    if shape == "string":
        return {"role": role, "content": text}
    return _turn(role, *(None if letter == "I" else text for letter in shape))
