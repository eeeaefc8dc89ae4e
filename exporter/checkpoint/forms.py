"""From a chat template to prompt forms: derived from marked conversations, then held to the template on many others.

Only templates have forms whose syntax tree says that these conversations prove all others (`template_syntax.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise, product

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
    *(
        "",
        " ",
        "x",
        " x ",
        "\nx\n",
        "\tx\u3000",
        "x\n\ny",
        "\r\nx\r\n",
        "<>&\"'{}",
        "{{ x }} {% y %}",
        "12",
        "Aa bB",
        "#",
    ),
    *("À é ß ﬁ 猫 👩\u200d🚀", "e\u0301", "\ue000s>", "long " * 60),
)

_Content = tuple[str, str]  # a shape and a text
Render = Callable[[Sequence[Message], bool], str | None]


class IrregularError(Exception):
    """Why a template has no forms."""


def derive_forms(render: Callable[[Sequence[Message], bool], str], source: str) -> PromptForms:
    """The forms of a chat template.

    `render` takes messages and whether an answer is to follow. Raises `IrregularError` where the template has none, or
    other exceptions of `render` than `TemplateError`.
    """
    if "strftime_now" in source:
        raise IrregularError("the template prints the date")
    try:
        check_provable(source)
    except UnprovenError as reason:
        raise IrregularError(f"what the template prints cannot be proven for every conversation: {reason}") from reason
    tried = _refusing(render)
    joins = _joins(tried)
    contents = {role: _PLAIN for role in ROLES if any(role in key.split(">") for key in joins)}
    forms = PromptForms(contents, joins)
    for role in contents:
        forms = _with_content(forms, role, tried)
    for messages, reply in _battery(tuple(contents)):
        _hold(forms, tried, messages, reply)
    return forms


def _refusing(render: Callable[[Sequence[Message], bool], str]) -> Render:
    def tried(messages: Sequence[Message], reply: bool) -> str | None:
        try:
            return render(messages, reply)
        except TemplateError:
            return None

    return tried


def _turn(role: str, *parts: str | None) -> Message:
    """A message; None stands for an image."""
    return {"role": role, "content": [_IMAGE if part is None else {"type": "text", "text": part} for part in parts]}


def _joins(render: Render) -> dict[str, str]:
    """What stands between the texts of neighbours, in conversations of one text a message."""
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
            raise IrregularError(f"the texts of {', '.join(roles)} do not stand in the prompt once and in order")
        names = (START, *roles, REPLY if reply else END)
        for key, gap in zip((f"{a}>{b}" for a, b in pairwise(names)), gaps, strict=True):
            if joins.setdefault(key, gap) != gap:
                raise IrregularError(f"what stands at {key} is not always the same")
    if f"{START}>user" not in joins or f"user>{REPLY}" not in joins:
        raise IrregularError("the template refuses a single question")
    return joins


def _with_content(forms: PromptForms, role: str, render: Render) -> PromptForms:
    """The forms with the one for `role`'s contents that renders as the template does."""
    cases = [(messages, render(messages, True)) for messages in _contents(role)]
    for candidate in _candidates(forms, role, render):
        tried = _replaced(forms, role, candidate)
        if tried and all(_agrees(tried, case, True, text) for case, text in cases):
            return tried
    raise IrregularError(f"the content of a {role} message is not printed part by part, each as it is")


def _around(role: str, *parts: str | None) -> list[Message]:
    """A conversation around one message of `role`."""
    message = _turn(role, *parts)
    if role == "system":
        return [message, _turn("user", "y")]
    return [message] if role == "user" else [_turn("user", "y"), message, _turn("user", "z")]


def _contents(role: str) -> Iterator[list[Message]]:
    for text in _TEXTS:
        if text.strip() or role != "user":  # a last question of nothing is never asked
            yield _around(role, text)
    yield from (_around(role, *parts) for parts in (("x", "y"), (" x ", " y "), ("x", "", "y"), ("\n", "x\n")))
    if role == "user":
        for parts in (
            (None, "x"),
            (None, None, "x"),
            ("x", None),
            (" x", None, "y "),
            (None, " x\n", None, " "),
            (None, " x "),
        ):
            yield _around(role, *parts)


def _candidates(forms: PromptForms, role: str, render: Render) -> Iterator[ContentForm]:
    before, between, after = _split(render, role, _MARKS[0], _MARKS[1])
    if len(between) > MAX_SPLIT:
        raise IrregularError(f"{len(between)} characters stand between two texts of a {role} message")
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
    """What stands before, between and after the marks of a message's parts, from its neighbours on."""
    text = render(_around(role, *parts), True)
    gaps = re.split("|".join(mark for mark in parts if mark), text or "")
    if text is None or len(gaps) != sum(part is not None for part in parts) + 1:
        raise IrregularError(f"a {role} message of several parts is refused, or not printed part by part")
    return gaps


def _replaced(forms: PromptForms, role: str, form: ContentForm) -> PromptForms | None:
    """The forms with another one for `role`, what it prints around a text taken off the joins; None if absent."""
    joins = dict(forms.joins)
    for key, join in forms.joins.items():
        before, after = key.split(">")
        left = form.text_after if before == role else ""
        right = form.text_before if after == role else ""
        if len(join) < len(left) + len(right) or not (join.startswith(left) and join.endswith(right)):
            return None
        joins[key] = join[len(left) : len(join) - len(right)]
    return replace(forms, contents={**forms.contents, role: form}, joins=joins)


def _battery(roles: Sequence[str]) -> Iterator[tuple[list[Message], bool]]:
    """Conversations with all that templates accepted by `check_provable` can tell apart, and each text in each role."""
    yield from product(chain(_chats(), _part_chats(roles), _text_chats(roles)), (True, False))


def _chats() -> Iterator[list[Message]]:
    """Conversations of up to five turns that differ in the shape and the blankness of their contents.

    Three turns have a first one, a last one and one between; the fourth and the fifth go on as these began.
    """
    few, more, most = (
        [("string", _PADDED), *((shape, _PADDED) for shape in shapes)]
        for shapes in (("T", "IT", "TI"), ("T", "IT", "TI", "IITIT", "TTI"), _shapes(3))
    )
    system: list[_Content | None] = [None, *few[:2]]
    for shapes, turns, answers in ((most, 1, few[:2]), (most, 2, few[:2]), (more, 3, few[1:2])):
        for asked, answer, told in product(product(shapes, repeat=turns), answers, system):
            yield from _chat(asked, [answer] * turns, told)
    for asked, told in product((*product(few[1:3], repeat=4), *((shape,) * 5 for shape in few)), system[::2]):
        yield from _chat(asked, few[1:2] * len(asked), told)
    blanks = [(shape, text) for shape in ("T", "IT") for text in (_PADDED, "", " ")]
    system = [None, *blanks[:3]]
    for question, answer, told in product(blanks, blanks[:3], system):
        yield from _chat([question], [answer], told)
    for asked, answered, told in product(product(blanks[:3], repeat=2), product(blanks[:3], repeat=2), system):
        yield from _chat(asked, answered, told)


def _shapes(most: int) -> list[str]:
    """Every order of images and texts, of at most this many parts, one of them a text."""
    orders = (order for length in range(1, most + 1) for order in product("TI", repeat=length))
    return ["".join(order) for order in orders if "T" in order]


def _chat(asked: Sequence[_Content], answers: Sequence[_Content], told: _Content | None) -> Iterator[list[Message]]:
    """The conversation up to its last question, and up to the answer to it."""
    messages = [] if told is None else [_shaped("system", *told)]
    for question, answer in zip(asked, answers, strict=True):
        messages += _shaped("user", *question), _shaped("assistant", *answer)
    yield messages[:-1]
    yield messages


def _shaped(role: str, shape: str, text: str) -> Message:
    """A message whose content is a string, or has a part for each letter: I for an image, T for a text."""
    if shape == "string":
        return {"role": role, "content": text}
    return _turn(role, *(None if letter == "I" else text for letter in shape))


def _part_chats(roles: Sequence[str]) -> Iterator[list[Message]]:
    """Messages of up to five parts in every order, with blank texts among them, alone and after other turns."""
    texts = (_PADDED, "x", "", "\n")
    for role, shape in product(roles, _shapes(5)):
        for shift in range(len(texts) if len(shape) < 4 else 1):
            if role == "user" or "I" not in shape:
                parts = [None if letter == "I" else texts[(n + shift) % len(texts)] for n, letter in enumerate(shape)]
                yield _around(role, *parts)
                yield [_turn("user", "y"), _turn("assistant", "z"), *_around(role, *parts)][2 * (role == "system") :]


def _text_chats(roles: Sequence[str]) -> Iterator[list[Message]]:
    for text, role in product(_TEXTS, roles):
        chat = [_turn("user", None, "first"), _turn("assistant", "answer"), _turn("user", "last")]
        if role == "system":
            chat.insert(0, _turn(role, text))
        else:
            chat[ROLES.index(role) - 1] = _turn(role, *[None] * (role == "user"), text)
        yield chat
        yield [{"role": turn["role"], "content": text} if turn["role"] == role else turn for turn in chat]


def _hold(forms: PromptForms, render: Render, messages: Sequence[Message], reply: bool) -> None:
    made = render_forms(forms, messages, add_generation_prompt=reply)
    if made is not None and made != render(messages, reply):
        shown = " ".join(str(messages[-1]["content"]).split())[:80]
        raise IrregularError(f"the forms do not give what the template gives for {len(messages)} messages ({shown})")


def _agrees(forms: PromptForms, messages: Sequence[Message], reply: bool, text: str | None) -> bool:
    made = render_forms(forms, messages, add_generation_prompt=reply)
    return made is None or made == text
