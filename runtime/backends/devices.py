"""Where a bundle can be answered: what its graphs are written for, what is installed, and which of it is best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from vtx.runtime.backends.backend import Backend
from vtx.runtime.backends.engines import AUTO, COMPUTE, DEVICES, ENGINES
from vtx.runtime.backends.memory import EXPANDED, PACKED
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.fingerprint import targets
from vtx.runtime.errors import DeviceError, VtxError
from vtx.runtime.host.gpu import find_gpu
from vtx.runtime.precision import PRECISIONS

GPU_DEVICES = ("cuda", "tensorrt")  # weights in memory of their own


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Where a bundle is answered, in which arithmetic, and why there."""

    device: str
    compute: str
    why: str


def choose(bundle: Bundle, device: str = AUTO, compute: str | None = None) -> DeviceChoice:
    """The device that was asked for, or with "auto" the best of those that are possible.

    Raises:
        DeviceError: no such device, or it lacks its package, its graphs in this bundle, or the arithmetic asked for.

    """
    if device not in DEVICES:
        raise DeviceError(f"device {device!r} is not available in this version; it runs on: {', '.join(DEVICES)}")
    if compute is not None and compute not in COMPUTE:
        raise DeviceError(f"no device computes in {compute!r}; there are: {', '.join(COMPUTE)}")
    if device != AUTO:
        obstacle = _obstacle(bundle, device, compute)
        if obstacle:
            raise DeviceError(obstacle)
        return DeviceChoice(device, compute or ENGINES[device].compute[0], "asked for")
    obstacles: dict[str, str] = {}
    for name, why in _by_merit(bundle):
        obstacle = _obstacle(bundle, name, compute)
        if not obstacle:
            return DeviceChoice(name, compute or ENGINES[name].compute[0], "; ".join([why, *obstacles.values()]))
        obstacles[name] = obstacle
    able = {name: obstacle for name, obstacle in obstacles.items() if compute in (None, *ENGINES[name].compute)}
    first, obstacle = next(iter((able or obstacles).items()))
    cpu = [able[name] for name in able if name not in GPU_DEVICES]
    if first in GPU_DEVICES and cpu and find_gpu() is None:  # no package makes a GPU
        raise DeviceError(f"{cpu[0]} (this bundle's engines need an NVIDIA GPU, and there is none here)")
    raise DeviceError(obstacle)


def _by_merit(bundle: Bundle) -> list[tuple[str, str]]:
    """Devices, the best first by what was measured (docs/openvino.md), each with why it would be taken."""
    gpu = [("tensorrt", "there are engines for this GPU")] if targets(bundle) else []
    gpu += [("cuda", "there is a GPU")] if find_gpu() is not None and _no_cuda(bundle) is None else []
    weights, hidden = bundle.manifest.precision, bundle.manifest.model.hidden
    faster, other = ("openvino", "cpu") if hidden >= PRECISIONS[weights].openvino_hidden else ("cpu", "openvino")
    why = f"the faster to a short answer with {weights} weights at hidden {hidden}"
    return [*gpu, (faster, why), (other, "what is possible here")]


def _obstacle(bundle: Bundle, name: str, compute: str | None) -> str | None:
    """Why this device cannot answer, and the cure; None where it can."""
    engine = ENGINES[name]
    if compute is not None and compute not in engine.compute:
        able = [other for other, d in ENGINES.items() if compute in d.compute]
        return f"{name} computes in {', '.join(engine.compute)}, not {compute}; that has: {', '.join(able)}"
    weights = bundle.manifest.precision
    if compute == "int8" and not PRECISIONS[weights].bits:
        return f"--compute int8 multiplies weights of int8 and int4; this bundle's are {weights}, so leave it out"
    if engine.dialect not in bundle.manifest.dialects:
        return (
            f"{name} reads graphs of the {engine.dialect!r} dialect and this bundle holds none; "
            f"export it with --dialect ort,{engine.dialect}"
        )
    if find_spec(engine.module) is None:
        return f'{engine.module} is not installed; pip install "vtx-edge[{engine.extra}]"'
    return _FURTHER[name](bundle) if name in _FURTHER else None


def _no_engines(bundle: Bundle) -> str | None:
    """Why the bundle's engines do not run here: what they were built for, what this machine has, and the fix."""
    from vtx.runtime.backends.tensorrt.backend import find_engines

    try:
        find_engines(bundle, find_gpu())
    except VtxError as e:
        return str(e)
    return None


def _no_cuda(bundle: Bundle) -> str | None:
    """Why onnxruntime does not run this bundle on a GPU here."""
    from vtx.runtime.backends.ort.cuda import obstacle

    return obstacle(bundle.manifest.kv_dtype)


_FURTHER = {"tensorrt": _no_engines, "cuda": _no_cuda}


def float_bytes(chosen: DeviceChoice) -> Mapping[str, int]:
    """Bytes that a weight of each type of float takes in memory there."""
    return PACKED[chosen.compute] if chosen.device == "openvino" else EXPANDED


def open_backend(bundle: Bundle, chosen: DeviceChoice, threads: int | None) -> Backend:
    """Load the bundle's graphs on a device that `choose` gave."""
    if chosen.device == "openvino":
        from vtx.runtime.backends.openvino.backend import OpenvinoBackend

        return OpenvinoBackend(bundle, threads, chosen.compute)
    if chosen.device == "tensorrt":
        from vtx.runtime.backends.tensorrt.backend import TensorrtBackend

        return TensorrtBackend(bundle)
    if chosen.device == "cuda":
        from vtx.runtime.backends.ort.cuda import OrtCudaBackend

        return OrtCudaBackend(bundle, threads)
    from vtx.runtime.backends.ort.backend import OrtBackend

    return OrtBackend(bundle, threads)
