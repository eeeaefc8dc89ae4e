"""FastViTHD (FastVLM): stages of convolutions, each of half the side of the one before, which count as one layer.

The last stages have blocks of attention. Names are timm's; several branches of a convolution in training are one here,
as published checkpoints store them.
"""

from __future__ import annotations

from vtx.tools.model.tensors import Placed, Shapes, convolution_tensors, linear_tensors, norm_tensors, products
from vtx.tools.model.towers.tower import Tower

STEM = 4  # the stride of the stem, and the stages with attention
ATTENDING = 2
WIDER = 4  # an MLP's width, its kernel, and the share that the last convolution's gate has
KERNEL = 7
SQUEEZED = 16
BATCH_NORM = ("weight", "bias", "running_mean", "running_var")


class ConvolutionalTower(Tower):
    """A picture's places are those of the first stage; `patches` are those of the last."""

    __slots__ = ()

    def tensors(self, *, last_attention: bool = False) -> Shapes:
        for _, tensors in self._placed():
            yield from tensors

    def _placed(self) -> Placed:
        v = self.vision
        places = (self.vision.image // STEM) ** 2
        first = v.stage_widths[0]
        yield 4 * places, convolution_tensors("vision.stem.0.reparam_conv", first, 3, 3)
        yield places, convolution_tensors("vision.stem.1.reparam_conv", first, 1, 3)
        yield places, convolution_tensors("vision.stem.2.reparam_conv", first, first, 1)
        for stage, (blocks, width) in enumerate(zip(v.stage_blocks, v.stage_widths, strict=True)):
            p = f"vision.stages.{stage}"
            places = (v.image // STEM >> stage) ** 2
            if stage:
                yield places, convolution_tensors(f"{p}.downsample.proj.0.reparam_conv", width, 1, KERNEL)
                yield places, convolution_tensors(f"{p}.downsample.proj.1.reparam_conv", width, width, 1)
            attends = stage >= len(v.stage_blocks) - ATTENDING
            if attends:
                yield places, convolution_tensors(f"{p}.pos_emb.reparam_conv", width, 1, KERNEL)
            for number in range(blocks):
                yield places, _block_tensors(f"{p}.blocks.{number}", width, attends)
        yield v.grid**2, convolution_tensors("vision.final_conv.reparam_conv", v.hidden, 1, 3)
        yield 1, convolution_tensors("vision.final_conv.se.fc1", v.hidden // SQUEEZED, v.hidden, 1)
        yield 1, convolution_tensors("vision.final_conv.se.fc2", v.hidden, v.hidden // SQUEEZED, 1)

    def layer_macs(self, tokens: int) -> int:
        v = self.vision
        attention = 0
        stages = len(self.vision.stage_blocks)
        for stage in range(stages - ATTENDING, stages):
            places = v.grid**2 << 2 * (stages - 1 - stage)
            attention += 2 * places**2 * v.stage_widths[stage] * v.stage_blocks[stage]
        return attention + sum(places * products(tensors) for places, tensors in self._placed())

    def patch_macs(self, patches: int) -> int:
        return 0

    def widest(self, patches: int) -> int:
        return (self.vision.image // STEM) ** 2 * self.vision.stage_widths[0] * (2 + 2 * WIDER)

    def apart(self, patches: int) -> int:
        return self.widest(patches)


def _block_tensors(name: str, width: int, attends: bool) -> Shapes:
    if attends:
        yield from norm_tensors(f"{name}.norm", width)
        yield from linear_tensors(f"{name}.token_mixer.qkv", 3 * width, width, bias=False)
        yield from linear_tensors(f"{name}.token_mixer.proj", width, width)
        yield f"{name}.layer_scale_1.gamma", (width, 1, 1)
    else:
        yield from convolution_tensors(f"{name}.token_mixer.reparam_conv", width, 1, 3)
    yield f"{name}.layer_scale{'_2' if attends else ''}.gamma", (width, 1, 1)
    yield from convolution_tensors(f"{name}.mlp.conv.conv", width, 1, KERNEL, bias=False)
    yield from ((f"{name}.mlp.conv.bn.{part}", (width,)) for part in BATCH_NORM)
    yield from convolution_tensors(f"{name}.mlp.fc1", WIDER * width, width, 1)
    yield from convolution_tensors(f"{name}.mlp.fc2", width, WIDER * width, 1)
