"""Transformers' own answer to a checkpoint's files: its processor on Pillow, its model in float32."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.support.families.lfm2_vl import PillowProcessor
from tests.support.families.minicpm import processor_of
from tests.support.families.pixtral import processor_of as pixtral_processor
from tests.support.published.places import read
from tests.support.reference import Reference

Pixels = NDArray[np.float32]


class Judge(Reference):
    """As `Reference`, with the processor that transformers loads from the same files."""

    def _processor(self, folder: Path) -> Any:
        processor, config = load_processor(folder), self.model.config
        if getattr(processor, "patch_size", 0) is None:  # releases that did not need it wrote none
            processor.patch_size = config.vision_config.patch_size
            processor.vision_feature_select_strategy = config.vision_feature_select_strategy
            processor.num_additional_image_tokens = int(config.vision_config.model_type.startswith("clip"))
        return processor

    def ids(self, messages: list[dict[str, Any]], images: list[Image.Image]) -> list[int]:
        """The ids of a prompt, those of its images included."""
        if self.kind == "gemma4":  # whose template prints a system prompt as it comes
            messages = [
                {**message, "content": message["content"][0]["text"]} if message["role"] == "system" else message
                for message in messages
            ]
        ids: list[int] = self.inputs(messages, images)["input_ids"][0].tolist()
        return ids

    def pixels(self, inputs: dict[str, Any]) -> Pixels:
        """All pixel values of one image in ascending order, padding left out and no moment twice."""
        values = inputs["pixel_values"]
        if self.kind.startswith("qwen"):  # two moments of each patch: colours, moments, pixels
            patch = self.model.config.vision_config.patch_size
            values = values.reshape(len(values), 3, 2, patch**2)[:, :, 0]
        elif self.kind == "gemma4":
            values = values[(inputs["image_position_ids"] >= 0).all(-1)]
        elif self.kind == "lfm2_vl":
            values = values[inputs["pixel_attention_mask"].bool()]
        return np.sort(values.float().numpy(), axis=None)


class _Parts:
    """What transformers looks a processor's parts up in, without those for videos and sound."""

    def __init__(self, parts: Any) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> Any:
        if name in ("video_processor", "feature_extractor"):
            return SimpleNamespace(from_pretrained=lambda *_, **__: None)
        return self._parts[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parts, name)


def image_settings(folder: Path) -> dict[str, Any]:
    """What the files say of the image processor, in one of their own or with the processor."""
    settings: dict[str, Any] = read(folder / "processor_config.json").get("image_processor", {})
    return settings or read(folder / "preprocessor_config.json")


def load_processor(folder: Path) -> Any:
    """What `AutoProcessor` makes of the files on Pillow, spared of what needs torchvision.

    Where transformers has torchvision alone, its own functions are run on Pillow: tests/support/families.
    """
    from transformers import AutoProcessor, processing_utils
    from transformers.models.smolvlm import processing_smolvlm

    config = read(folder / "config.json")
    if config.get("vision_config", {}).get("model_type") == "pixtral":
        return pixtral_processor(folder)
    kind = config["model_type"]
    if kind in ("minicpmv4_6", "lfm2_vl"):
        return processor_of(folder) if kind == "minicpmv4_6" else _lfm2_processor(folder)
    mixin = processing_utils.ProcessorMixin
    check = mixin.check_argument_for_proper_class

    def tolerant(self: Any, name: str, value: Any) -> Any:
        return None if value is None else check(self, name, value)

    with pytest.MonkeyPatch.context() as patch:
        parts = _Parts(processing_utils.MODALITY_TO_AUTOPROCESSOR_MAPPING)
        patch.setattr(processing_utils, "MODALITY_TO_AUTOPROCESSOR_MAPPING", parts)
        patch.setattr(mixin, "check_argument_for_proper_class", tolerant)
        patch.setattr(processing_smolvlm, "num2words", str)
        processor: Any = AutoProcessor.from_pretrained(folder, backend="pil", local_files_only=True)  # type: ignore[no-untyped-call]
    if kind == "smolvlm":  # which asks its part for videos for their default, whether there is one or not
        processor.video_processor = SimpleNamespace(num_frames=1, fps=1)
    return processor


def _lfm2_processor(folder: Path) -> Any:
    from transformers import AutoTokenizer
    from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

    class OnPillow(Lfm2VlProcessor):
        def check_argument_for_proper_class(self, name: str, value: Any) -> Any:
            return None

    settings = read(folder / "processor_config.json").get("image_processor") or read(
        folder / "preprocessor_config.json"
    )
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return OnPillow(PillowProcessor(settings), tokenizer, chat_template=template)
