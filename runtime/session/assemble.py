"""A question's prompt: its text where image tokens are selected by it, and its ids once their number is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vtx.runtime.backends.backend import Backend
from vtx.runtime.policies import PromptText
from vtx.runtime.policies.policy import Policy
from vtx.runtime.session.prefix import ImageEncoders, Prompt
from vtx.runtime.session.result import Selection
from vtx.runtime.vision.tokens import HiddenStates, Ids, ImageTokens


def selecting_text(
    backend: Backend,
    ids: Ids,
    image_token_id: int,
    policy: Policy,
    after: Selection | None,
    embeddings: Callable[[], HiddenStates],
) -> PromptText | None:
    """The text by which a policy's entries select image tokens; None where none of them looks at it.

    `ids` [n] are the prompt's. In a chat it is the text of the first turn, `after`. `embeddings` gives the question's
    by the bundle's text tower; it is called where the policy needs that.
    """
    is_vision = ids == image_token_id
    if not is_vision.any() or not any(entry.uses_question for entry in policy.entries):
        return None
    end = int(np.flatnonzero(is_vision)[-1]) + 1
    before, question = ids[:end][~is_vision[:end]], ids[end:]
    if after is not None and after.policy == policy:
        question = np.array(after.ids, np.int64)
    text = np.concatenate([before, question])
    seen = embeddings() if policy.needs().text_tower else None
    return PromptText(text, backend.embed(text).hidden, np.arange(len(text)) >= len(before), seen)


def make_prompt(
    ids: Ids,
    image_token_id: int,
    encoders: ImageEncoders,
    policy: Policy,
    expand: Callable[[Sequence[int]], Ids],
    check: Callable[[], None] = lambda: None,
) -> Prompt:
    """The prompt of `ids` [n], which hold all tokens of every image, or of those ids that the policy's entries leave.

    How many tokens an image has after entries, only its pixels say: `expand` gives the ids for these numbers. `check`
    is called before every image and may raise, to stop there.
    """
    skipped = 0
    if policy.entries and encoders:
        images = list[ImageTokens]()
        for _, encode in encoders:
            check()
            images.append(encode())
        ids = expand([len(image) for image in images])
        skipped = max(0, sum(image.positions - len(image) for image in images))
    return Prompt(ids, ids == image_token_id, encoders, skipped)
