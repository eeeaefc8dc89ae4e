"""Image tokens from the tower and the projector, which tuning does not change; kept up to a limit of bytes."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from vtx.exporter.reference.model import Reference
from vtx.exporter.reference.source import Source
from vtx.exporter.tuning.packing import image_key
from vtx.exporter.weights.tensors import CheckpointWeights
from vtx.runtime.bundle.safetensors import EVERY, RowIndex
from vtx.runtime.vision.image import ImageSource

KEPT_BYTES = 1 << 30  # of encoded images


class ResidentWeights(CheckpointWeights):
    """`WeightSource` that keeps weights that were read in full on a device, in float32."""

    def __init__(self, source: Source, device: torch.device) -> None:
        super().__init__(source.checkpoint)
        self._device, self._read = device, dict[str, Tensor]()

    def read(self, name: str, rows: RowIndex = EVERY) -> Tensor:
        if isinstance(rows, slice) and rows == EVERY:
            if name not in self._read:
                self._read[name] = super().read(name).to(self._device)
            return self._read[name]
        return super().read(name, rows).to(self._device)


class ImageEncoder:
    """Images to their tokens [tokens, hidden] float32, computed in float32."""

    def __init__(self, source: Source, device: torch.device) -> None:
        self._reference = Reference(source.checkpoint, source.config, ResidentWeights(source, device))
        self._settings, self._device = source.image, device
        self._kept: OrderedDict[tuple[object, ...], Tensor] = OrderedDict()
        self._bytes = 0

    @torch.no_grad()
    def __call__(self, images: tuple[ImageSource, ...]) -> Tensor:
        key = tuple(map(image_key, images))
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            with torch.autocast(self._device.type, enabled=False):
                tokens = self._reference.encode(images, self._settings).hidden
            self._kept[key] = tokens
            self._bytes += tokens.nbytes
            while self._bytes > KEPT_BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return self._kept[key].to(self._device)
