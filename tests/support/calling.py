"""Tools, and chat templates that know them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.bundles import export
from tests.support.published.places import models
from tests.support.tiny import Tiny, make

_TURNS = """{%- if tools %}
    {{- '<|im_start|>system\\nYou may call:\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' ~ m.role ~ '\\n' }}
    {%- if m.content is string %}{{- m.content }}
    {%- else %}
        {%- for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}
    {%- endif %}
    {%- for call in m.tool_calls or [] %}{{- CALL }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
HERMES = _TURNS.replace(
    "CALL",
    """'\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' """
    "~ (call.function.arguments | tojson) ~ '}\\n</tool_call>'",
)
LLAMA = _TURNS.replace(
    "CALL",
    """'{"name": "' ~ call.function.name ~ '", "parameters": ' ~ (call.function.arguments | tojson) ~ '}'""",
)
STRANGE = _TURNS.replace("CALL", "'CALL ' ~ call.function.name")
PARAMETERS: dict[str, Any] = {
    "type": "object", "properties": {"count": {"type": "integer", "maximum": 99}, "shape": {"$ref": "#/$defs/Shape"}},
    "required": ["count", "shape"], "additionalProperties": False,
    "$defs": {"Shape": {"enum": ["circle", "square"]}},
}  # fmt: skip


def tool(name: str, parameters: Any = PARAMETERS) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    return {"type": "function", "function": {"name": name, "description": "Draw shapes.", "parameters": parameters}}


TOOLS = [tool("draw"), tool("erase")]


def calling_bundle(folder: Path, template: str = HERMES) -> Path:
    """A bundle of a tiny random model whose chat template is `template`."""
    checkpoint = make(folder / "checkpoint", Tiny(tokenizer="bytes", context=1024))
    (checkpoint / "chat_template.jinja").write_text(template, encoding="utf-8")
    return export(checkpoint, folder / "bundle", (3, 5), dialects=("ort",)).folder


_END = "<|im_start|>assistant\\n' }}{%- endif %}"
_OPENED = "<|im_start|>assistant\\n' }}{{- '<think>\\n' if enable_thinking else '<think></think>\\n' }}{%- endif %}"
# Templates with a switch for thoughts: Qwen3.5's kind, whose prompt opens the thought, and Gemma 4's, whose model does.
THINKING = HERMES.replace(_END, _OPENED)
CHANNEL = "{%- if enable_thinking %}<|think|>\n{% endif %}" + HERMES.replace(
    "{{ c.text }}", "{{ c.text.split('<channel|>')[-1] }}"
)


class Scripted:
    """In place of a `Sampler`: the tokens of a text that a test wrote, then those of the largest logit."""

    greedy = False

    def __init__(self, ids: list[int]) -> None:
        self._ids = list(ids)

    def __call__(self, logits: Any) -> int:
        return self._ids.pop(0) if self._ids else int(logits.argmax())


# Published models whose templates have the switch, too.
PUBLISHED = ["gemma4-e2b", "minicpm-v-4.6", "qwen3.5-0.8b"]
SWITCHED = ["thinking", "channel", *PUBLISHED]


def switched_template(name: str) -> tuple[str, str]:
    """A template of `SWITCHED`, and its placeholder of an image; a skip where its published file is absent."""
    sources = {"thinking": THINKING, "channel": CHANNEL}
    if name in PUBLISHED:
        folder = models().get(name)
        if folder is None:
            pytest.skip(f"no {name} among the published files; name their folder in PUBLISHED")
        sources[name] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    source = sources[name]
    return source, next(token for token in ("<|image_pad|>", "<|image|>", "<image>") if token in source)
