"""Mistral Small 3.1 and 3.2, and Ministral 3: Pixtral's tower with merged patches, a mistral or ministral3 decoder."""

from __future__ import annotations

from vtx.exporter.checkpoint.families.pixtral import PROCESSOR, adjust_pixtral, read_pixtral
from vtx.exporter.checkpoint.family import Family

FAMILY = Family(
    model_type="mistral3",
    architecture="Mistral3ForConditionalGeneration",
    read=lambda config: read_pixtral(config, "Mistral3Config"),
    processors=(PROCESSOR,),
    adjust=adjust_pixtral,
    fix_mistral_regex=True,
)
