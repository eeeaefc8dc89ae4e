"""Ends of an answer that generation_config.json may lack, and its sampling, which is left to each request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from vtx.runtime.bundle.spec.text_settings import TextSettings
from vtx.runtime.errors import TemplateError
from vtx.runtime.prompt.messages import Message
from vtx.runtime.prompt.template import ShapingTemplate

FILE = "generation_config.json"
_ANSWER = "vtx-answer-5c21"
_SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p")
_PENALTY = "repetition_penalty"


def turn_ends(tokenizer: Tokenizer, template: str, settings: TextSettings) -> dict[str, int]:
    """The tokenizer's end token and the token that the chat template prints after an answer, with their ids."""
    added = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items()}
    turns: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        printed = ShapingTemplate(template, settings).render(turns, add_generation_prompt=False)
    except TemplateError:  # a template without answers
        printed = ""
    after = printed.partition(_ANSWER)[2].lstrip()
    closing = max((token for token in added if after.startswith(token)), key=len, default=None)
    ends = {settings.eos_token, closing} - {settings.bos_token, settings.image_token}
    return {token: added[token] for token in added if token in ends}


def generation_warnings(
    generation: Mapping[str, Any], tokenizer: Tokenizer, template: str, settings: TextSettings
) -> list[str]:
    """Warnings of ends that generation_config.json lacks, and of its sampling, which is left to each request."""
    warnings = [
        f"{token} ({id}) ends a turn or a text, and is not among eos_token_id of {FILE}, {list(settings.end_ids)}: "
        f"answers go on after it; add it there if they should not"
        for token, id in turn_ends(tokenizer, template, settings).items()
        if id not in settings.end_ids
    ]
    settings_of = [name for name in _SAMPLING if generation.get("do_sample") is True and generation.get("top_k") != 1]
    settings_of += [_PENALTY] * (generation.get(_PENALTY) != 1)
    texts = [f"{name} {generation[name]!r:.20}" for name in settings_of if generation.get(name) is not None]
    if texts:
        warnings.append(
            f"{FILE} asks for {', '.join(texts)}; vtx answers greedily and without a penalty unless a request sets them"
        )
    return warnings
