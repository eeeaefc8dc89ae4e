"""Judges of checkpoints in their authors' layout: prompts cut as the released code does, transformers' model of them.

Each piece of text between special tokens and images is encoded by the sentencepiece library, by itself.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tests.support.families.original import VICUNA
from tests.support.families.vila import stated
from tests.support.published import originals
from tests.support.published.build import dtype_of, random_weights, write_shards
from tests.support.published.places import read
from tests.support.tiny import write_json
from vtx.exporter.checkpoint.original.templates import INTERNVL_SYSTEMS

NAMES = {"llava-v1.5-7b": "llava_llama", "internvl2-8b": "internvl_chat", "vila1.5-3b": "vila"}
ODD = "naïve café — 猫が好き 🙂\u3000 two  blanks,\ttab\u00a0nbsp\n\n  end"
ASKED = (("What is on the table?", 1), ("Which one is red?", 2), ("What is the capital of France?", 0), (ODD, 1))


class Authors:
    """The ids of a question about images, and the logits of the first answered token."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        import sentencepiece
        from transformers import AutoModelForImageTextToText

        self.checkpoint, self.config = checkpoint, read(checkpoint / "config.json")
        self.layout = originals.layout_of(self.config)
        words = checkpoint / "llm" if self.layout == "vila" else checkpoint
        self.words = sentencepiece.SentencePieceProcessor(model_file=str(words / "tokenizer.model"))
        theirs = originals.counterpart(self.config)
        folder.mkdir()
        write_json(folder / "config.json", theirs)
        write_shards(folder, random_weights(theirs, dtype_of(self.config), 0))
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.model.train(False)

    @torch.inference_mode()
    def ask(self, question: str, images: list[Image.Image]) -> tuple[list[int], torch.Tensor]:
        """Ids of the prompt, image tokens as the checkpoint has them, and logits [vocab]."""
        if self.layout == "vila":
            ids, rows, _ = stated(self.model, self._processor(), self.checkpoint, images, question)
            return ids, self.model(inputs_embeds=rows).logits[0, -1]
        pixels = [self._pixels(image) for image in images]
        if self.layout == "llava_llama":
            pieces = VICUNA.format("<image>\n" * len(images), question).split("<image>")
            ids = [1, *self.words.encode(pieces[0])]
            for piece in pieces[1:]:
                ids += [0] * 576 + self.words.encode(piece)
        else:
            ids = self._internvl_ids(question, [len(tiles) for tiles in pixels])
        given = {"pixel_values": torch.cat(pixels)} if pixels else {}
        return ids, self.model(input_ids=torch.tensor([ids]), **given).logits[0, -1]

    def _internvl_ids(self, question: str, tiles: list[int]) -> list[int]:
        added = {token["content"]: int(id) for id, token in self._settings["added_tokens_decoder"].items()}
        given = "".join(f"<img>{'<IMG_CONTEXT>' * 256 * count}</img>\n" for count in tiles)
        system = f"<|im_start|>system\n{INTERNVL_SYSTEMS['internlm2-chat']}<|im_end|>"
        text = f"{system}<|im_start|>user\n{given}{question}<|im_end|><|im_start|>assistant\n"
        special = re.compile("(" + "|".join(map(re.escape, added)) + ")")
        pieces = [[added[piece]] if piece in added else self.words.encode(piece) for piece in special.split(text)]
        return [1, *(id for piece in pieces for id in piece)]

    @property
    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = read(self.checkpoint / "tokenizer_config.json")
        return settings

    def _pixels(self, image: Image.Image) -> torch.Tensor:
        processor = self._processor()
        how = {"crop_to_patches": True} if self.layout == "internvl_chat" else {}
        pixels: torch.Tensor = processor([image], return_tensors="pt", **how)["pixel_values"]
        return pixels

    def _processor(self) -> Any:
        from transformers import GotOcr2ImageProcessorPil, LlavaImageProcessorPil, SiglipImageProcessorPil

        if self.layout == "internvl_chat":
            side = {"height": 448, "width": 448}
            means = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
            return GotOcr2ImageProcessorPil(size=side, min_patches=1, max_patches=12, **means)
        if self.layout == "vila":
            return SiglipImageProcessorPil(**_settings_of(originals.SIGLIP_PROCESSOR))
        return LlavaImageProcessorPil(do_pad=True, **_settings_of(originals.CLIP_PROCESSOR))


def _settings_of(processor: dict[str, Any]) -> dict[str, Any]:
    names = ("size", "crop_size", "image_mean", "image_std", "resample")
    return {name: processor[name] for name in names if name in processor}
