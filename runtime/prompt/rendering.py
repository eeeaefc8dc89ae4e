"""A conversation as text: by the bundle's prompt forms, or by its chat template if they do not cover it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from vtx.runtime.bundle.spec.text_settings import END, REPLY, START, ContentForm, PromptForms, TextSettings
from vtx.runtime.prompt.messages import Message, Part, parts_of

if TYPE_CHECKING:
    from vtx.runtime.prompt.shaping import ShapingTemplate


class Renderer:
    """Renders conversations; safe for many threads. Raises `TemplateError` for a template that cannot be used.

    With forms, jinja2 is imported, and the template compiled, only for a conversation that they do not cover.
    """

    def __init__(self, source: str, settings: TextSettings) -> None:
        self._source, self._settings = source, settings
        if settings.forms is None:
            _ = self.template  # a template that cannot be used is refused now

    @property
    def literals(self) -> str:
        """A text with every character that a prompt can have in addition to those of its messages."""
        forms = self._settings.forms
        contents = [] if forms is None else forms.contents.values()
        pieces = [text for form in contents for text in (form.text_before, form.text_after, form.image or "")]
        return "".join([self._source, *pieces, *([] if forms is None else forms.joins.values())])

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The conversation as text. Raises `TemplateError`."""
        forms = self._settings.forms
        if forms is not None:
            text = render_forms(forms, messages, add_generation_prompt=add_generation_prompt)
            if text is not None:
                return text
        return self.template.render(messages, add_generation_prompt=add_generation_prompt)

    @cached_property
    def template(self) -> ShapingTemplate:
        """The chat template, with or without forms."""
        from vtx.runtime.prompt.shaping import ShapingTemplate  # jinja2 is heavy, and with forms not needed

        return ShapingTemplate(self._source, self._settings)


def render_forms(forms: PromptForms, messages: Sequence[Message], *, add_generation_prompt: bool) -> str | None:
    """The conversation as text, or None if the forms do not cover it."""
    pieces: list[str] = []
    before = START
    for message in messages:
        role = message["role"]
        join, form = forms.joins.get(f"{before}>{role}"), forms.contents.get(role)
        content = None if form is None else render_content(form, parts_of(message))
        if join is None or content is None:
            return None
        pieces += join, content
        before = role
    ending = forms.joins.get(f"{before}>{REPLY if add_generation_prompt else END}")
    return None if ending is None else "".join([*pieces, ending])


def render_content(form: ContentForm, parts: Sequence[Part]) -> str | None:
    """The parts of one message as text, or None if the form does not cover them."""
    images = [part for part in parts if part["type"] == "image"]
    texts = [part for part in parts if part["type"] == "text"]
    blank = not any(part["text"].strip() for part in texts)
    if len(images) + len(texts) < len(parts):  # forms do not cover videos
        return None
    if not texts or (images and form.image is None) or (blank and not form.blank):
        return None
    pieces = [
        form.image or ""
        if part["type"] == "image"
        else form.text_before + _strip(part["text"], form.strip_text) + form.text_after
        for part in ([*images, *texts] if form.images_first else parts)
    ]
    return _strip("".join(pieces), form.strip_content)


def _strip(text: str, side: str) -> str:
    text = text.lstrip() if side in ("left", "both") else text
    return text.rstrip() if side in ("right", "both") else text
