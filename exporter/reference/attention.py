"""Where the model looks: attention of question and answer to system text, image, question and answer, by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.reference.model import Sample

KINDS = ("system", "vision", "question", "answer")


class AttentionMeter:
    """A hook for `Reference.hidden` that keeps shares of attention, mean over the heads (VTW Figures 4 and 5).

    Rows of two kinds ask: `question`, those after the last image up to the end of the prompt; and `answer`, the last
    row of the prompt and the answer's, which give the output tokens. Shares are in the order of `KINDS`.
    """

    def __init__(self, samples: Sequence[Sample], config: ModelConfig) -> None:
        self._groups = [_Groups(sample, config.image_token_id) for sample in samples]
        self._found: list[list[Tensor]] = [[] for _ in samples]  # a layer each, [rows after the image, KINDS]

    def __call__(self, layer: int, number: int, queries: Tensor, keys: Tensor) -> None:
        if number >= len(self._groups):
            return
        groups = self._groups[number]
        q, k = queries[0, :, groups.tail :], keys[0]
        scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        rows = torch.arange(groups.tail, k.shape[1])
        scores.masked_fill_(torch.arange(k.shape[1]) > rows[:, None], -torch.inf)
        self._found[number].append(scores.softmax(-1).mean(0) @ groups.kinds)

    def shares(self, number: int) -> dict[str, Any]:
        """`question` and `answer` [layers][KINDS], and `steps` [output tokens][KINDS], mean over the layers."""
        groups, found = self._groups[number], torch.stack(self._found[number]).double()
        answer = found[:, groups.prompt - groups.tail - 1 :]
        return {
            "question": found[:, : groups.prompt - groups.tail].mean(1).tolist(),
            "answer": answer.mean(1).tolist(),
            "steps": answer.mean(0).tolist(),
        }


class _Groups:
    """Where the parts of a sample begin: `tail` after the last image, `prompt` rows before the answer's."""

    def __init__(self, sample: Sample, image_token: int) -> None:
        vision = np.flatnonzero(sample.ids == image_token)
        self.prompt = len(sample.ids) - sample.last + 1
        self.tail = min(int(vision[-1]) + 1, self.prompt - 1)
        kind = np.full(len(sample.ids), KINDS.index("question"))
        kind[: vision[0]] = KINDS.index("system")
        kind[vision] = KINDS.index("vision")
        kind[self.prompt :] = KINDS.index("answer")
        self.kinds = torch.nn.functional.one_hot(torch.from_numpy(kind), len(KINDS)).float()
