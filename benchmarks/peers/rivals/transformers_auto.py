"""Hugging Face transformers on PyTorch, whichever vision-language model it is; every question is read anew.

A checkpoint in bf16 is computed in f32 where PyTorch has no fast products in bf16 for the processor.
"""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.contract import Answer, Precision, Question
from benchmarks.peers.rivals import transformers

PRECISIONS = transformers.PRECISIONS
REQUIREMENTS = transformers.REQUIREMENTS
PACKAGES = transformers.PACKAGES
NOTE = ""
prepare = transformers.prepare


def load(folder: Path, precision: str, threads: int) -> Loaded:
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    half = Precision.parse(precision).stored == "bf16" and torch.backends.cpu.get_cpu_capability() == "AVX512"
    dtype = torch.bfloat16 if half else torch.float32
    source = folder / transformers.CHECKPOINT
    images = AutoImageProcessor.from_pretrained(source, backend="pil")
    return Loaded(AutoModelForImageTextToText.from_pretrained(source, dtype=dtype).eval(), images)


class _Moments:
    """The moments at which `generate` has each token; it puts the prompt first."""

    def __init__(self) -> None:
        self.all: list[float] = []

    def put(self, _: Any) -> None:
        self.all.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


class Loaded:
    def __init__(self, model: Any, images: Any) -> None:
        self._model = model
        self._images = images
        self.how = f"torch in {'bf16' if model.dtype.itemsize == 2 else 'f32'}"

    def ask(self, question: Question, new_tokens: int) -> Answer:
        import torch
        from PIL import Image

        start = time.perf_counter()
        ids = torch.tensor([question.ids])
        inputs = dict(self._images(images=[Image.open(question.image).convert("RGB")], return_tensors="pt"))
        inputs["pixel_values"] = inputs["pixel_values"].to(self._model.dtype)
        kinds = {"mm_token_type_ids": (ids == question.image_token).int()}
        inputs |= kinds if "mm_token_type_ids" in inspect.signature(self._model.forward).parameters else {}
        moments = _Moments()
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                **inputs,
                streamer=moments,
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
            )
        answer = out[0, len(question.ids) :].tolist()
        return Answer(tuple(answer), tuple(moment - start for moment in moments.all[1:]))
