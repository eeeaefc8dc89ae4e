"""The engines that graphs run on, by device: one row each, and beyond it the backend's own class.

An engine is a folder next to this file and a row here. Imports nothing heavy: the help of commands lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from vtx.runtime.errors import DeviceError
from vtx.runtime.precision import PRECISIONS

if TYPE_CHECKING:
    from vtx.runtime.backends.backend import EngineBackend
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.bundle.spec.manifest import Manifest

AUTO = "auto"
Merit = tuple[int, str]
Floats = Mapping[str, int]  # bytes in memory of a float of each of safetensors' types
# onnxruntime's CPU provider computes in float32 and expands narrower floats to it; OpenVINO packs them as they are, and
# all of them in bfloat16 if it computes in that.
EXPANDED: Floats = {"F32": 4, "F16": 4, "BF16": 4}
KEPT: Floats = {"F32": 4, "F16": 2, "BF16": 2}
NARROWED: Floats = {"F32": 2, "F16": 2, "BF16": 2}
# The same for products of integers: an int4 weight of a stage takes a byte more, in the form for many tokens.
INTEGERS: Floats = {**KEPT, "I4": 1}


@dataclass(frozen=True, slots=True)
class EngineCost:
    """An engine's use of memory for a model, as vtx-plan counts it.

    `floats`: bytes of a float weight there, by its stored type, None: all weights as stored, but for int8 ones of
    `int8` bytes. `wide`: arithmetic and activations are float32. `blocks`: K/V have whole blocks of slots, else as many
    as are filled; `passes`: times that a token reads or writes those that are filled. `reserved`: of images at native
    resolution, memory is taken at load for one of this many times the most pixels; 0: it is taken for the images that
    are asked about.

    `base`: bytes of the process before any weight: libraries, and what graphs take beside weights. `apart`: values of
    different sizes do not take the same memory one after another, and neither do the graphs: OpenVINO's graphs of free
    sizes keep what each took; onnxruntime frees it, and glibc's heap keeps it. `packing`: the floats of the head are
    there a second time while the engine packs them at load.
    """

    floats: Floats | None = None
    int8: int = 1
    wide: bool = False
    blocks: bool = False
    passes: int = 1
    reserved: int = 0
    base: int = 110 << 20
    apart: bool = False
    packing: bool = False
    note: str = "weights as stored, K/V grow with the tokens"


# Of an image at native resolution with the most pixels: the longer side by the shorter one. TensorRT's engines take any
# sides up to the longer one, and so as many times the most pixels.
WIDEST = 2
WIDEST_VIEW = 4  # the same of models that see large images in tiles or slices, whose views are small
WIDENED = "floats are widened to float32 and computed in it"
# Of TensorRT by its flavour: K/V are read, joined to the new token's in other memory, and read there.
TENSORRT_COSTS: Mapping[str, EngineCost] = {
    "tensorrt": EngineCost(
        int8=2,
        blocks=True,
        passes=3,
        reserved=WIDEST,
        note="int8 weights as float16, which TensorRT may hold them in (not measured), others as stored; K/V grow with "
        "the tokens",
    ),
    "tensorrt_rtx": EngineCost(blocks=True, passes=3, reserved=WIDEST),
}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine that computes on a device.

    `title`: its name in messages. `modules`: one of them must be importable, installed by `extra` in `package`.
    `dialect`: of the graphs that it reads. `compute`: its arithmetic, the default first, each with the bytes of a float
    in memory. `backend`: the class that runs a bundle there; `gpu`: in memory of its own. `costs`: by dialect.
    `fused`: attention with any mask is one operator, which holds no scores.
    `merit`: a rank for a bundle among the engines, and the reason for it; None if it is not to be tried.
    """

    title: str
    modules: tuple[str, ...]
    extra: str
    package: str
    dialect: str
    compute: Mapping[str, Floats]
    backend: str
    merit: Callable[[Bundle], Merit | None]
    costs: Mapping[str, EngineCost]
    gpu: bool = False
    fused: bool = True

    def load(self) -> type[EngineBackend]:
        """The backend's class; imports its module, and not yet the engine."""
        module, _, name = self.backend.partition(":")
        backend: type[EngineBackend] = getattr(import_module(f"vtx.runtime.backends.{module}"), name)
        return backend


def merit_on_cpu(manifest: Manifest, *, openvino: bool) -> Merit:
    """The merit of OpenVINO, or of onnxruntime, by measurements (docs/how-to/openvino.md)."""
    weights = manifest.precision
    hidden = manifest.model.hidden
    if openvino != (hidden >= PRECISIONS[weights].openvino_hidden):
        return 1, "what is possible here"
    return 2, f"faster on CPUs with {weights} weights at hidden size {hidden}"


def _merit_on_gpu(bundle: Bundle) -> Merit | None:
    from vtx.runtime.host.gpu import find_gpu

    possible = find_gpu() is not None and ENGINES["cuda"].load().obstacle(bundle) is None
    return (3, "there is a GPU") if possible else None


def _merit_of_built(bundle: Bundle) -> Merit | None:
    from vtx.runtime.bundle.fingerprint import targets

    return (4, "there are engines for this GPU") if targets(bundle) else None


ENGINES: Mapping[str, EngineSpec] = {  # of those on the CPU, the fastest at the sizes of known models is the last
    "cpu": EngineSpec(
        "onnxruntime", ("onnxruntime",), "cpu", "onnxruntime", "ort", {"f32": EXPANDED}, "ort.backend:OrtBackend",
        lambda bundle: merit_on_cpu(bundle.manifest, openvino=False),
        {"ort": EngineCost(EXPANDED, wide=True, apart=True, packing=True,
                           note=f"{WIDENED}, K/V grow with the tokens")},
        fused=False,
    ),
    "openvino": EngineSpec(
        "OpenVINO", ("openvino",), "openvino", "openvino", "plain",
        {"f32": KEPT, "bf16": NARROWED, "int8": INTEGERS}, "openvino.backend:OpenvinoBackend",
        lambda bundle: merit_on_cpu(bundle.manifest, openvino=True),
        # 105 MB of libraries, 115 to 130 of the graphs of two models of 42 and 52 layers
        {"plain": EngineCost(KEPT, wide=True, base=220 << 20, apart=True)},
    ),
    "cuda": EngineSpec(
        "onnxruntime's CUDA provider", ("onnxruntime",), "gpu", "onnxruntime-gpu", "ort-cuda",
        {"f16": KEPT, "f32": EXPANDED}, "ort.cuda:OrtCudaBackend", _merit_on_gpu,
        {"ort-cuda": EngineCost(blocks=True)}, gpu=True,
    ),
    "tensorrt": EngineSpec(
        "TensorRT", ("tensorrt", "tensorrt_rtx"), "rtx", "tensorrt", "trt", {"f16": KEPT, "f32": EXPANDED},
        "tensorrt.backend:TensorrtBackend", _merit_of_built,
        dict.fromkeys(("trt", "trt10"), TENSORRT_COSTS["tensorrt"]),
        gpu=True,
    ),
}  # fmt: skip
DEVICES = (AUTO, *ENGINES)
GPUS = tuple(name for name, engine in ENGINES.items() if engine.gpu)
# Flags of processors, as Linux names them, of which OpenVINO needs one to compute so. Without them it has no bfloat16
# (on Arm it never has), and adds products of bytes in 16 bits, which overflow.
INSTRUCTIONS: Mapping[str, Sequence[str]] = {
    "bf16": ("avx512_bf16", "amx_bf16", "avx_ne_convert"),
    "int8": ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"),
}
WIDENING = "amx_bf16"  # flag of processors on which OpenVINO widens matrices of 16 bits, unless it computes in bfloat16
COMPUTE = tuple(dict.fromkeys(kind for engine in ENGINES.values() for kind in engine.compute))


def floats_in_memory(device: str, compute: str, flags: Set[str]) -> Floats:
    """Bytes of a float of each type that an engine on the CPU holds, on a processor with these `flags`."""
    floats = ENGINES[device].compute[compute]
    widened = device == "openvino" and compute != "bf16" and WIDENING in flags
    return {**floats, **EXPANDED} if widened else floats


def split_device(device: str) -> tuple[str, int]:
    """The name of a device and the number of its GPU: "cuda:1" is the second one that the driver shows.

    Raises DeviceError if there is no such device, or if it takes no number.
    """
    name, colon, number = device.partition(":")
    if name not in DEVICES:
        raise DeviceError(f"device {device!r} is not available in this version; it runs on: {', '.join(DEVICES)}")
    if not colon:
        return name, 0
    if name not in GPUS or not (number.isascii() and number.isdigit() and len(number) < 4):
        raise DeviceError(f"device {device!r}: only a GPU has a number, from 0: {', '.join(f'{g}:1' for g in GPUS)}")
    return name, int(number)
