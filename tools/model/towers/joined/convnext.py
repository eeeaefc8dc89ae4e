"""ConvNeXt: its stages, without the norm and the head behind them."""

from __future__ import annotations

from vtx.tools.model.tensors import Placed, Shapes, convolution_tensors, linear_tensors, norm_tensors
from vtx.tools.model.vision import VisionConfig

CONVNEXT = "vision.convnext"
STEM = 4  # sides of its stem and of its convolutions, and an MLP's width
KERNEL = 7
WIDER = 4


def placed(v: VisionConfig) -> Placed:
    before = v.stage_widths[0]
    yield _places(v, 0), convolution_tensors(f"{CONVNEXT}.stem.0", before, 3, STEM)
    yield 0, norm_tensors(f"{CONVNEXT}.stem.1", before)
    for stage, (blocks, width) in enumerate(zip(v.stage_blocks, v.stage_widths, strict=True)):
        p = f"{CONVNEXT}.stages.{stage}"
        places = _places(v, stage)
        if stage:
            yield 0, norm_tensors(f"{p}.downsample.0", before)
            yield places, convolution_tensors(f"{p}.downsample.1", width, before, 2)
        for number in range(blocks):
            yield places, _block_tensors(f"{p}.blocks.{number}", width)
        before = width


def _block_tensors(name: str, width: int) -> Shapes:
    yield f"{name}.weight", (width,)
    yield from convolution_tensors(f"{name}.conv_dw", width, 1, KERNEL)
    yield from norm_tensors(f"{name}.norm", width)
    yield from linear_tensors(f"{name}.mlp.fc1", WIDER * width, width)
    yield from linear_tensors(f"{name}.mlp.fc2", width, WIDER * width)


def _places(v: VisionConfig, stage: int) -> int:
    return v.grid**2 << 2 * (len(v.stage_widths) - 1 - stage)


def widest(v: VisionConfig) -> int:
    """Numbers that a layer of the first stage holds."""
    return _places(v, 0) * v.stage_widths[0] * (2 + 2 * WIDER)
