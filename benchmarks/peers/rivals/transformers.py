"""Hugging Face transformers on PyTorch, sdpa attention; a second question rewinds the cache to the image's end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.peers.contract import Answer, Precision, Question
from benchmarks.peers.picture import pixels

PRECISIONS = ("fp32", "bf16")
REQUIREMENTS: tuple[tuple[str, ...], ...] = ()
PACKAGES = ("transformers", "torch")
NOTE = ""
CHECKPOINT = "checkpoint"


def prepare(checkpoint: Path, precision: str, folder: Path) -> None:
    """Nothing is converted: the dtype is changed while loading."""
    (folder / CHECKPOINT).symlink_to(checkpoint.resolve())


def load(folder: Path, precision: str, threads: int) -> Loaded:
    import torch
    from transformers import LlavaForConditionalGeneration

    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[Precision.parse(precision).stored]
    source = folder / CHECKPOINT
    model = LlavaForConditionalGeneration.from_pretrained(source, dtype=dtype, attn_implementation="sdpa").eval()
    return Loaded(model, source)


class Loaded:
    def __init__(self, model: Any, checkpoint: Path) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._known: tuple[str, tuple[int, ...]] | None = None
        self._cache: Any = None
        self._vision: list[float] = []
        inner = model.model
        inner.vision_tower.register_forward_pre_hook(lambda *_: self._vision.append(time.perf_counter()))
        inner.multi_modal_projector.register_forward_hook(lambda *_: self._vision.append(time.perf_counter()))

    def ask(self, question: Question, new_tokens: int) -> Answer:
        import torch

        start = time.perf_counter()
        self._vision.clear()
        with torch.inference_mode():
            logits = self._prefill(question)
            ids = []
            moments = []
            while True:
                ids.append(int(logits.argmax()))
                moments.append(time.perf_counter() - start)
                if len(ids) == new_tokens:
                    break
                logits = self._step(torch.tensor([ids[-1:]]))
        vision = self._vision[-1] - self._vision[0] if self._vision else None
        return Answer(tuple(ids), tuple(moments), vision)

    def _prefill(self, question: Question) -> Any:
        import torch
        from transformers import DynamicCache

        front = (question.image, question.ids[: question.front])
        if front == self._known:
            self._cache.crop(question.front - self._cache.get_seq_length())  # negative: that many tokens fewer
            return self._step(torch.tensor([question.ids[question.front :]]))
        self._cache = DynamicCache(config=self._model.config.get_text_config())
        self._known = front
        values = torch.from_numpy(pixels(Path(question.image), self._checkpoint)).to(self._model.dtype)
        return self._step(torch.tensor([question.ids]), pixel_values=values)

    def _step(self, ids: Any, **more: Any) -> Any:
        out = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1, **more)
        return out.logits[0, -1]
