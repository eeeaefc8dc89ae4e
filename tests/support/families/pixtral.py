"""Small random checkpoints with Pixtral's tower: Pixtral in LLaVA's classes, Mistral 3, Ministral 3, LightOnOCR."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.json_files import read_json
from tests.support.tiny import (
    ARCHITECTURES,
    PROCESSORS,
    Tiny,
    _config,
    _hub_config,
    _new_config,
    _weights,
    write_json,
    write_weights,
)

PIXTRAL = Tiny(
    text="mistral", vision="pixtral", image=64, patch=8, select="full", feature_layer=-1, tokenizer="bytes",
    context=512,
)  # fmt: skip
MISTRAL3 = replace(PIXTRAL, family="mistral3", image=96, projector_bias=False)
MINISTRAL3 = replace(MISTRAL3, text="ministral3", rope="yarn", names="saved", tied=True)
LIGHTON = replace(MISTRAL3, family="lighton_ocr", text="qwen3", tied=True)
PUBLISHED = replace(PIXTRAL, image=1024, patch=16)
# Turns in the brackets of Mistral's templates, a system prompt in the last of them.
TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' -%}{%- set rules = messages[0]['content'] -%}"
    "{%- set turns = messages[1:] -%}{%- else -%}{%- set turns = messages -%}{%- endif -%}{{- bos_token -}}"
    "{%- for m in turns -%}{%- if m['role'] == 'user' -%}{{- '[INST]' -}}"
    "{%- if rules is defined and loop.last -%}{%- for part in rules if part['type'] == 'text' -%}"
    "{{- part['text'] + '\n\n' -}}{%- endfor -%}{%- endif -%}"
    "{%- for part in m['content'] -%}{{- part['text'] if part['type'] == 'text' else '[IMG]' -}}{%- endfor -%}"
    "{{- '[/INST]' -}}{%- else -%}{%- for part in m['content'] -%}{{- part['text'] -}}{%- endfor -%}"
    "{{- eos_token -}}{%- endif -%}{%- endfor -%}"
)
MERGE = 2  # of Mistral 3: patches a side of a token's square


def merge_of(tiny: Tiny) -> int:
    return 1 if tiny.family == "llava" else MERGE


def make_pixtral(folder: Path, tiny: Tiny, seed: int, image_token: int) -> Path:
    config = _config(tiny, image_token)
    written = _hub_config(tiny, image_token) if tiny.names == "hub" else _new_config(config, tiny)
    write_json(folder / "config.json", written | {"architectures": [ARCHITECTURES[tiny.family]]})
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3})
    write_json(folder / "preprocessor_config.json", image_settings(tiny))
    write_json(folder / "processor_config.json", processor_settings(tiny))
    (folder / "chat_template.jinja").write_text(tiny.template, encoding="utf-8")
    write_weights(folder, tiny, _weights(config, tiny, seed))
    return folder


def image_settings(tiny: Tiny) -> dict[str, Any]:
    """The image processor's file; its patch is what Pixtral's processor multiplies itself."""
    return {
        "image_processor_type": "PixtralImageProcessor", "do_convert_rgb": True, "do_normalize": True,
        "do_rescale": True, "do_resize": True, "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711], "rescale_factor": 1 / 255, "resample": 3,
        "patch_size": {"height": tiny.patch, "width": tiny.patch}, "size": {"longest_edge": tiny.image},
    }  # fmt: skip


def processor_settings(tiny: Tiny) -> dict[str, Any]:
    """The processor's file."""
    return {
        "processor_class": "PixtralProcessor" if tiny.family == "llava" else PROCESSORS[tiny.family],
        "patch_size": tiny.patch, "spatial_merge_size": merge_of(tiny),
        "image_token": tiny.image_token, "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]",
    }  # fmt: skip


def processor_of(folder: Path) -> Any:
    """Transformers' processor on Pillow: its module imports a function of sizes from a file that needs torchvision."""
    from transformers import AutoTokenizer, LightOnOcrProcessor, PixtralImageProcessorPil
    from transformers.models.pixtral import image_processing_pil_pixtral

    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", image_processing_pil_pixtral)
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    settings = read_json(folder / "processor_config.json")
    of_pages = settings["processor_class"] == "LightOnOcrProcessor"
    kind: Any = LightOnOcrProcessor if of_pages else PixtralProcessor
    return kind(
        PixtralImageProcessorPil.from_pretrained(folder, local_files_only=True),
        AutoTokenizer.from_pretrained(folder, local_files_only=True),
        chat_template=(folder / "chat_template.jinja").read_text(encoding="utf-8"),
        **{name: settings[name] for name in ("patch_size", "spatial_merge_size")},
    )
