"""Attention of the question and the answer to system text, image, question and answer, by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.reference.model import Sample
from vtx.tools.calibration.report import KINDS, AttentionShares


class AttentionMeter:
    """A hook for `Reference.hidden` that records shares of attention, mean over the heads (VTW Figures 4 and 5).

    Queries are of two kinds: `question`, the tokens after the last image up to the end of the prompt; and `answer`, the
    last token of the prompt and the answer's, whose outputs are the answer.
    """

    def __init__(self, samples: Sequence[Sample], config: ModelConfig) -> None:
        self._groups = [_Groups(sample, config.image_token_id) for sample in samples]
        self._text = config.text
        self._layers: list[list[Tensor]] = [[] for _ in samples]  # for each layer [tokens after the image, KINDS]

    def __call__(self, layer: int, number: int, queries: Tensor, keys: Tensor) -> None:
        if number >= len(self._groups):
            return
        groups = self._groups[number]
        q = queries[0, :, groups.suffix :]
        k = keys[0]
        scores = q @ k.transpose(1, 2) * self._text.scale(layer)
        back = torch.arange(groups.suffix, k.shape[1])[:, None] - torch.arange(k.shape[1])
        scores.masked_fill_(back < 0, -torch.inf)
        if self._text.sliding is not None and self._text.slides(layer):
            scores.masked_fill_(back >= self._text.sliding.window, -torch.inf)
        self._layers[number].append(scores.softmax(-1).mean(0) @ groups.kinds)

    def shares(self, number: int) -> AttentionShares:
        groups = self._groups[number]
        layers = torch.stack(self._layers[number]).double()
        answer = layers[:, groups.prompt - groups.suffix - 1 :]
        question = layers[:, : groups.prompt - groups.suffix]
        means = question.mean(1), answer.mean(1), answer.mean(0)
        return AttentionShares(*(tuple(map(tuple, mean.tolist())) for mean in means))


class _Groups:
    """The bounds of a sample's parts: `suffix` is the first token after the last image, `prompt` ends the prompt."""

    def __init__(self, sample: Sample, image_token: int) -> None:
        vision = np.flatnonzero(sample.ids == image_token)
        self.prompt = len(sample.ids) - sample.last + 1
        self.suffix = min(int(vision[-1]) + 1, self.prompt - 1)
        kind = np.full(len(sample.ids), KINDS.index("question"))
        kind[: vision[0]] = KINDS.index("system")
        kind[vision] = KINDS.index("vision")
        kind[self.prompt :] = KINDS.index("answer")
        self.kinds = torch.nn.functional.one_hot(torch.from_numpy(kind), len(KINDS)).float()
