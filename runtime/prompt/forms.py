"""A conversation as text by the manifest's prompt forms, without a template engine."""

from __future__ import annotations

from collections.abc import Sequence

from vtx.runtime.bundle.spec.text_settings import END, REPLY, START, ContentForm, PromptForms
from vtx.runtime.prompt.messages import Message, Part, parts_of


def render_forms(forms: PromptForms, messages: Sequence[Message], *, add_generation_prompt: bool) -> str | None:
    """The conversation as text, None where the forms do not cover it."""
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
    """The parts of one message as text, None where the form does not cover them."""
    images = [part for part in parts if part["type"] == "image"]
    texts = [part for part in parts if part["type"] == "text"]
    blank = not any(part["text"].strip() for part in texts)
    if len(images) + len(texts) < len(parts):  # the forms say nothing of videos
        return None
    if not texts or (images and form.image is None) or (blank and not form.blank):
        return None
    ordered = [*images, *texts] if form.images_first else parts
    return _strip("".join(_part(form, part) for part in ordered), form.strip_content)


def _part(form: ContentForm, part: Part) -> str:
    if part["type"] == "image":
        return form.image or ""
    return form.text_before + _strip(part["text"], form.strip_text) + form.text_after


def _strip(text: str, side: str) -> str:
    text = text.lstrip() if side in ("left", "both") else text
    return text.rstrip() if side in ("right", "both") else text
