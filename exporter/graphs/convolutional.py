"""The vision graph of FastViTHD (FastVLM): stages of convolutions, each of half the side of the one before.

The last two stages have blocks of attention. Names are timm's; several branches of a convolution in training are one
here, as published checkpoints store them.
"""

from __future__ import annotations

import onnx_ir as ir

from vtx.exporter.graphs.activations import activate
from vtx.exporter.graphs.builder import Builder, Heads
from vtx.tools.model.towers.convolutional import ATTENDING, BATCH_NORM, STEM
from vtx.tools.model.vision import VisionConfig


def build_convolutional(b: Builder, v: VisionConfig, pixels: ir.Value) -> ir.Value:
    """[images, 3, side, side] to the tower's states [images, tokens, hidden]."""
    x = pixels
    for number, stride in enumerate((2, 2, 1)):
        groups = v.stage_widths[0] if number == 1 else 1
        x = activate(b, _conv(b, x, f"vision.stem.{number}.reparam_conv", groups, stride), v.activation)
    for stage, (blocks, width) in enumerate(zip(v.stage_blocks, v.stage_widths, strict=True)):
        p = f"vision.stages.{stage}"
        if stage:
            x = _conv(b, x, f"{p}.downsample.proj.0.reparam_conv", v.stage_widths[stage - 1], 2)
            x = activate(b, x, v.activation)
            x = activate(b, _conv(b, x, f"{p}.downsample.proj.1.reparam_conv"), v.activation)
        attends = stage >= len(v.stage_blocks) - ATTENDING
        if attends:
            x = _conv(b, x, f"{p}.pos_emb.reparam_conv", width)
        for name in (f"{p}.blocks.{number}" for number in range(blocks)):
            if attends:
                x = _added(b, x, _attention(b, v, x, name, width, v.image // STEM >> stage), f"{name}.layer_scale_1")
            else:
                x = _conv(b, x, f"{name}.token_mixer.reparam_conv", width)
            y = _conv(b, x, f"{name}.mlp.conv.conv", width)
            scale = [b.weight(f"{name}.mlp.conv.bn.{part}") for part in BATCH_NORM]
            y = b.op("BatchNormalization", y, *scale, epsilon=v.eps)
            y = activate(b, _conv(b, y, f"{name}.mlp.fc1"), v.activation)
            y = _conv(b, y, f"{name}.mlp.fc2")
            x = _added(b, x, y, f"{name}.layer_scale{'_2' if attends else ''}")
    x = _conv(b, x, "vision.final_conv.reparam_conv", v.stage_widths[-1])
    gate = b.op("Relu", _conv(b, b.op("GlobalAveragePool", x), "vision.final_conv.se.fc1"))
    gate = b.op("Sigmoid", _conv(b, gate, "vision.final_conv.se.fc2"))
    x = activate(b, b.op("Mul", x, gate), v.activation)
    return b.transpose(b.reshape(x, 0, v.hidden, v.grid**2), 0, 2, 1)


def _conv(b: Builder, x: ir.Value, name: str, groups: int = 1, stride: int = 1) -> ir.Value:
    """A convolution that keeps the side, but for its stride; a batch norm follows where it has no bias."""
    kernel = b.location(f"{name}.weight").shape[-1]
    bias = [] if name.endswith(".conv.conv") else [b.weight(f"{name}.bias")]
    return b.op(
        "Conv",
        x,
        b.weight(f"{name}.weight"),
        *bias,
        kernel_shape=[kernel] * 2,
        strides=[stride] * 2,
        pads=[kernel // 2] * 4,
        group=groups,
    )


def _added(b: Builder, x: ir.Value, y: ir.Value, scale: str) -> ir.Value:
    return b.op("Add", x, b.op("Mul", y, b.weight(f"{scale}.gamma")))


def _attention(b: Builder, v: VisionConfig, x: ir.Value, name: str, width: int, side: int) -> ir.Value:
    """Attention of the places [images, width, side, side] to all of their image."""
    heads = width // (v.stage_widths[-1] // v.heads)
    tokens = b.transpose(b.reshape(x, 0, width, side**2), 0, 2, 1)
    normed = b.reshape(b.dialect.layer_norm(b, tokens, f"{name}.norm", v.eps), -1, width)
    together = b.reshape(b.linear(normed, f"{name}.token_mixer.qkv", bias=False), -1, side**2, 3 * width)
    q, k, w = (b.slice(together, start, start + width, 2) for start in range(0, 3 * width, width))
    y = b.reshape(b.dialect.tower_attention(b, q, k, w, Heads(heads, width // heads)), -1, width)
    y = b.reshape(b.linear(y, f"{name}.token_mixer.proj", bias=True), -1, side**2, width)
    return b.reshape(b.transpose(y, 0, 2, 1), 0, width, side, side)
