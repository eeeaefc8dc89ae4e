"""The memory that TensorRT's builder takes, and the graphs for which a device has it.

Measured with TensorRT-RTX 1.7 on engines from 130 MB to 2 GB of weights, and taken to hold for TensorRT: see
docs/how-to/tensorrt.md.
"""

from __future__ import annotations

from vtx.runtime.bundle.spec.stored import Precisions
from vtx.tools.estimate.sizes import ModelSize
from vtx.tools.estimate.weights import WeightGroup, stored_bytes

BUILDER_MEMORY = 500 << 20  # of the process, and of kernels
MEMORY_PER_BYTE = 3.5  # per byte of weights
MEMORY_PER_PROFILE = 1.5  # per byte of weights and additional profile
PROFILES = 2  # of a stage on a Jetson


def build_memory(weights: int, profiles: int) -> int:
    """Predicted peak memory in bytes of the build of a graph with that many bytes of weights."""
    return BUILDER_MEMORY + int((MEMORY_PER_BYTE + MEMORY_PER_PROFILE * (profiles - 1)) * weights)


def buildable_layers(model: ModelSize, precisions: Precisions, usable: int, int8: int = 1) -> int:
    """The most decoder layers of a graph that can be built in `usable` bytes; 0: not even one.

    `int8`: bytes that the engine holds an int8 weight in.
    """
    decoder = model.decoder
    sizes = [
        stored_bytes([WeightGroup(name, shape) for name, shape in decoder.layer_tensors(layer)], precisions, int8=int8)
        for layer in decoder.every
    ]
    layers = range(1, decoder.layers + 1)
    return max((count for count in layers if build_memory(count * max(sizes), PROFILES) <= usable), default=0)
