"""A conversation as text: by the bundle's prompt forms where they cover it, else by its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.prompt.forms import render_forms
from vtx.runtime.prompt.messages import Message

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
        """A text that has every character a prompt can have beside those of its messages."""
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
        """The template itself, whatever forms there are."""
        from vtx.runtime.prompt.shaping import ShapingTemplate  # jinja2 is heavy, and with forms not needed

        return ShapingTemplate(self._source, self._settings)
