"""pi0 as LeRobot saves it."""

from __future__ import annotations

from functools import partial

from vtx.exporter.checkpoint.families.lerobot.pi import PICTURES, layout, read_pi
from vtx.exporter.checkpoint.families.paligemma import PROMPT
from vtx.exporter.checkpoint.family import Family

# A line break ends the instruction, and there is no second one.
_END = "{{- '\\n' -}}"
_TEXT = "{{- part['text'] -}}"
_LINE = "{{- part['text'] -}}{%- if not part['text'].endswith('\\n') -%}{{- '\\n' -}}{%- endif -%}"
TEMPLATE = PROMPT.removesuffix(_END).replace(_TEXT, _LINE)

FAMILY = Family(
    model_type="lerobot.pi0",
    architecture="PI0Policy",
    policy="pi0",
    read=partial(read_pi, state_in="expert"),
    processors=(PICTURES,),
    prompt=TEMPLATE,
    original=layout(TEMPLATE),
)
