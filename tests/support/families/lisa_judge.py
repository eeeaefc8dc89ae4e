"""Transformers' LLaVA of LISA's weights, and the prompts of the released code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tests.support.families.lisa import ADDED, OFTEN, QUESTION, make_projector
from tests.support.json_files import read_json
from tests.support.parity import STEPS
from tests.support.reference import Inputs, Reference
from tests.support.tiny import Tiny

PROMPT = (
    "A chat between a curious human and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the human's questions. USER: {}" + QUESTION + " ASSISTANT:"
)


class Judge(Reference):
    """Transformers' model with LISA's projector and its liking for [SEG]; it keeps what its head is given."""

    def __init__(self, theirs: Path, ours: Path, tiny: Tiny) -> None:
        import sentencepiece

        super().__init__(theirs)
        self.added: dict[str, int] = read_json(ours / "added_tokens.json")
        self.cut = sentencepiece.SentencePieceProcessor(model_file=str(ours / "tokenizer.model"))
        projector = torch.nn.Linear(tiny.vision_hidden, tiny.hidden)
        projector.load_state_dict({name.rpartition(".")[2]: w for name, w in make_projector(tiny).items()})
        self.model.model.multi_modal_projector = projector
        with torch.no_grad():
            self.model.lm_head.weight[self.added[ADDED[0]]] *= OFTEN
        self.given: list[torch.Tensor] = []
        self.model.lm_head.register_forward_hook(lambda _, given, __: self.given.append(given[0][0, -1]))

    def lisa_inputs(self, images: Sequence[Image.Image], tokens: int) -> Inputs:
        """The prompt cut at its images and added tokens, each piece tokenised alone."""
        ids = [1]
        text = PROMPT.format("<im_start><image><im_end>\n" * len(images))
        for piece in re.split("(<image>|<im_start>|<im_end>)", text):
            given = [self.image_token] * tokens if piece == "<image>" else self.cut.encode(piece)
            ids += [self.added[piece]] if piece in self.added else given
        pixels = self.processor.image_processor(list(images), return_tensors="pt")["pixel_values"]
        every = torch.tensor([ids])
        return {"input_ids": every, "attention_mask": torch.ones_like(every), "pixel_values": pixels}

    def states(self, inputs: Any, k: int | None) -> tuple[list[int], list[torch.Tensor]]:
        """The greedy answer, and the states that chose each [SEG]."""
        self.given.clear()
        self.answers.clear()  # the head is to be given each state anew
        ids = self.greedy(inputs, k, STEPS).ids
        return ids, [state for state, id in zip(self.given, ids, strict=True) if id == self.added[ADDED[0]]]
