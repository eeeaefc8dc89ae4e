"""OpenVINO GenAI with its CDPruner switched on: the environment and the conversion of `openvino`, other settings.

A release may take the setting and prune nothing, as it does of models that it does not prune. So the first question is
asked once more without it, and a pipeline that answers alike is no contender.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.contract import Answer, Question
from benchmarks.peers.rivals import openvino

SAME_AS = "openvino"
PRECISIONS = ("int8", "int4")
REQUIREMENTS = openvino.REQUIREMENTS
PACKAGES = openvino.PACKAGES
NOTE = ""
prepare = openvino.prepare
PERCENT = 78  # of the image's tokens leave: 127 of 576 stay
TRIED = 16  # tokens of the answers that must differ


def load(folder: Path, precision: str, threads: int) -> Loaded:
    return Loaded(openvino.load(folder, precision, threads))


class Loaded:
    """The pipeline, which has to show that it prunes before a figure of it counts."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._shown = False

    def ask(self, question: Question, new_tokens: int) -> Answer:
        """Raises ValueError where the setting changes nothing."""
        answer: Answer = self._pipeline.ask(question, new_tokens, pruning_ratio=PERCENT)
        if not self._shown:
            pruned = self._pipeline.ask(question, TRIED, pruning_ratio=PERCENT)
            if pruned.ids == self._pipeline.ask(question, TRIED).ids:
                raise ValueError(
                    f"OpenVINO GenAI takes pruning_ratio={PERCENT} and prunes nothing of this model: "
                    f"{TRIED} tokens are those without it"
                )
            self._shown = True
        return answer
