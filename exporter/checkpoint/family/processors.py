"""Image processors of transformers with the defaults that their files leave out; those that several families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_OPENAI_MEAN = [0.48145466, 0.4578275, 0.40821073]
_OPENAI_STD = [0.26862954, 0.26130258, 0.27577711]
_COMMON = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "resample": 3}
CLIP_DEFAULTS: Mapping[str, Any] = {
    **_COMMON,
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "image_mean": _OPENAI_MEAN,
    "image_std": _OPENAI_STD,
}
SIGLIP_DEFAULTS: Mapping[str, Any] = {
    **_COMMON,
    "size": {"height": 224, "width": 224},
    "do_center_crop": False,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """A class of transformers, without its backend: `defaults` hold for keys that its file lacks.

    `own_size`: pictures keep their own resolution, which the image layout rounds. `tiled`: its size is that of a tile,
    which neither resizing nor cropping may change. `pads`: `do_pad` makes each picture square on the mean colour, and
    not just those of a batch alike. `size` is the key of the size.
    """

    name: str
    defaults: Mapping[str, Any]
    tiled: bool = False
    pads: bool = False
    own_size: bool = False
    size: str = "size"


CLIP = ImageProcessor("CLIPImageProcessor", CLIP_DEFAULTS)
SIGLIP = ImageProcessor("SiglipImageProcessor", SIGLIP_DEFAULTS)
LLAVA = ImageProcessor("LlavaImageProcessor", CLIP_DEFAULTS, pads=True)
ONE_PIECE = (CLIP, SIGLIP, LLAVA)
