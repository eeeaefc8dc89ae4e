"""A model whose prompts and hidden states are measured: weights for the plain reference, text and images."""

from __future__ import annotations

from dataclasses import dataclass

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.loader import Checkpoint
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.prompt.text import Text


@dataclass(frozen=True, slots=True)
class Source:
    """A checked model. `fingerprint` is its checkpoint's, also for a bundle."""

    name: str
    fingerprint: str
    checkpoint: Checkpoint
    config: ModelConfig
    text: Text
    image: ImageSettings
    context: int

    def version(self) -> list[list[str | int]]:
        files = sorted({info.file for info in self.checkpoint.tensors.values()})
        return [[f.name, (s := f.stat()).st_size, s.st_mtime_ns] for f in files]
