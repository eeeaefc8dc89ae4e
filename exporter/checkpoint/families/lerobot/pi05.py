"""pi0.5 as LeRobot saves it: the state is text, and time enters by the expert's norms."""

from __future__ import annotations

from functools import partial

from vtx.exporter.checkpoint.families.lerobot.pi import PICTURES, layout, read_pi
from vtx.exporter.checkpoint.family import Family

# The first text is the instruction, the second the state's bins.
TEMPLATE = (
    "{%- if messages | length != 1 or messages[0]['role'] != 'user' -%}"
    "{{ raise_exception('this model takes one instruction, without a system prompt and earlier turns') }}"
    "{%- endif -%}"
    "{%- for part in messages[0]['content'] if part['type'] == 'image' -%}<image>{%- endfor -%}"
    "{{- bos_token -}}"
    "{%- for part in messages[0]['content'] if part['type'] == 'text' -%}"
    "{%- if loop.first -%}{{- 'Task: ' -}}{{- part['text'].strip().replace('_', ' ').replace('\\n', ' ') -}}"
    "{{- ', State: ' -}}"
    "{%- else -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}"
    "{{- ';\\nAction: ' -}}"
)

FAMILY = Family(
    model_type="lerobot.pi05",
    architecture="PI05Policy",
    policy="pi05",
    read=partial(read_pi, state_in="text", adaptive=True),
    processors=(PICTURES,),
    prompt=TEMPLATE,
    original=layout(TEMPLATE),
)
