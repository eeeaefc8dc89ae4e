"""onnxruntime's CUDA provider: the same graphs as on the CPU, K and V in the GPU's memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.backend import DeviceState
from vtx.runtime.backends.ort.backend import OrtBackend
from vtx.runtime.backends.ort.cache import OrtStageCache
from vtx.runtime.backends.ort.library import load_onnxruntime
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import DeviceError
from vtx.runtime.host.device import Device
from vtx.runtime.host.gpu import find_gpu
from vtx.runtime.host.machine import version
from vtx.runtime.vision.tokens import Ids

PROVIDER = "CUDAExecutionProvider"


def obstacle(kv_dtype: str) -> str | None:
    """The reason why onnxruntime cannot answer on a GPU here, and the fix; None if it can."""
    if PROVIDER not in load_onnxruntime().get_available_providers():
        return (
            "this onnxruntime has no CUDA provider; pip uninstall -y onnxruntime, then "
            'pip install "vtx-edge[gpu]", on a machine with an NVIDIA driver'
        )
    return kv_obstacle(kv_dtype)


def kv_obstacle(kv_dtype: str) -> str | None:
    """The reason why onnxruntime cannot attend to K and V of this type on any GPU; None if it can."""
    if kv_dtype == "float16":
        return None
    return (
        f"onnxruntime attends in float16 on CUDA, the K and V of this bundle are {kv_dtype}; "
        "export with --kv-precision fp16"
    )


class OrtCudaBackend(OrtBackend):
    """`Backend` on onnxruntime's CUDA provider. Operators that it lacks run on the CPU."""

    device = "cuda"
    providers = (PROVIDER, "CPUExecutionProvider")
    memory = "cuda"
    loads_in_parallel = False  # `is_roomy` looks at the host's memory

    @staticmethod
    def merit(bundle: Bundle) -> tuple[int, str] | None:
        possible = find_gpu() is not None and OrtCudaBackend.obstacle(bundle) is None
        return (3, "there is a GPU") if possible else None

    @staticmethod
    def obstacle(bundle: Bundle) -> str | None:
        return obstacle(bundle.manifest.kv_dtype)

    @staticmethod
    def state(machine: Device) -> DeviceState:
        number = version("onnxruntime-gpu")
        if not number:
            return DeviceState("cuda", False, False, 'onnxruntime-gpu is not installed: pip install "vtx-edge[gpu]"')
        return DeviceState.on_gpu("cuda", f"onnxruntime-gpu {number}", machine)

    def share_caches(self, conversations: int) -> None:
        raise DeviceError("cuda computes one conversation at a time")

    def stage(self, index: int, capacity: int) -> OrtCudaCache:
        try:
            return OrtCudaCache(self._context, self._stages[index], self._manifest.stages[index], capacity)
        except Exception as e:  # onnxruntime's own, without a type
            raise DeviceError(
                f"no KV cache of {capacity} slots on the GPU ({type(e).__name__}: {str(e)[:200]}); end other programs "
                "on it, or export a smaller --max-context"
            ) from e


class OrtCudaCache(OrtStageCache):
    """`StageCache` whose buffers are on the GPU; slots are saved and restored through the host.

    Binding an input copies it to the GPU at once, so every run is bound anew.
    """

    bound_once = False

    def _allocate(
        self, shape: tuple[int, ...], kv_type: np.dtype[Any], number: int | None
    ) -> tuple[NDArray[Any], Iterable[tuple[Any, Any]]]:
        memory, make = self._context.memory, self._context.ort.OrtValue.ortvalue_from_numpy

        def buffer() -> Any:
            return make(np.zeros(shape[2:], kv_type), memory, 0)

        return np.zeros(0, kv_type), [(buffer(), buffer()) for _ in range(shape[0])]

    def keys(self) -> NDArray[np.float32]:
        return self._scaled(self.buffers[-2][2].numpy()[0, :, : self.length])

    def read(self, slots: Ids) -> NDArray[Any]:
        return np.stack([np.take(buffer.numpy(), slots, axis=-2) for _, _, buffer in self.buffers])

    def write(self, slots: Ids, kv: NDArray[Any], *, length: int) -> None:
        for (_, _, buffer), part in zip(self.buffers, kv, strict=True):
            content = buffer.numpy()
            content[..., slots, :] = part
            buffer.update_inplace(content)
        self.length = length
