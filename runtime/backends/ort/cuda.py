"""onnxruntime's CUDA provider: graphs that state the type of their arithmetic, K and V in the GPU's memory."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.backend import NOTHING, DeviceState
from vtx.runtime.backends.cuda import Buffer, Cuda, MemoryPool, SavedSlots, aligned, load_cuda, runs
from vtx.runtime.backends.failures import reason_of
from vtx.runtime.backends.ort.backend import OrtBackend
from vtx.runtime.backends.ort.cache import OrtCacheContext, OrtStage, OrtStageCache
from vtx.runtime.backends.ort.graph import OrtGraph
from vtx.runtime.backends.ort.library import FATAL, load_onnxruntime
from vtx.runtime.backends.slots import BLOCK, SlotCounter
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.bundle.tensors import float16_overflow
from vtx.runtime.errors import DeviceError
from vtx.runtime.host.device import Device
from vtx.runtime.host.gpu import find_gpu
from vtx.runtime.host.machine import version
from vtx.runtime.precision import PRECISIONS
from vtx.runtime.vision.tokens import HiddenStates, Ids, TokenStates

PROVIDER = "CUDAExecutionProvider"
WINDOWS = "sliding windows are not built for onnxruntime's CUDA provider"
DRIVER = "libcuda.so.1"
# Each session has an arena of its own, which by default doubles; and by default every algorithm of cuDNN is timed, with
# the scratch memory that the largest of them wants.
OPTIONS = {"arena_extend_strategy": "kSameAsRequested", "cudnn_conv_algo_search": "HEURISTIC"}
# A graph y = Relu(x) of one float, serialized: loading it makes the provider open the GPU.
RELU = (
    b'\x08\x08:3\n\x0c\n\x01x\x12\x01y"\x04Relu\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x11"
)


@cache
def provider_obstacle(number: int = 0) -> str | None:
    """The reason why onnxruntime's CUDA provider cannot open a GPU here, and the fix; None once it has.

    onnxruntime lists the provider although its libraries may not load, and goes on without it when they do not. So
    CUDA and cuDNN are loaded first, from the packages of the extra `gpu`, then the provider's own library, which names
    the one that is missing, and then one small graph.
    """
    ort = load_onnxruntime()
    if PROVIDER not in ort.get_available_providers():
        return (
            "this onnxruntime has no CUDA provider; pip uninstall -y onnxruntime, then "
            'pip install "vtx-edge[gpu]", on a machine with an NVIDIA driver'
        )
    with redirect_stdout(StringIO()):  # it prints what it does not find
        ort.preload_dlls()
    if sys.platform == "linux":
        folder = Path(ort.__file__).parent / "capi"
        try:
            for part in ("shared", "cuda"):
                ctypes.CDLL(os.fspath(folder / f"libonnxruntime_providers_{part}.so"))
        except OSError as e:
            reason = str(e)
            if DRIVER in reason:
                fix = "install NVIDIA's driver; in a container, pass the GPU through (docker run --gpus all)"
            else:
                fix = 'pip install -U "vtx-edge[gpu]" installs CUDA and cuDNN with it'
            return f"onnxruntime's CUDA provider does not load: {reason}; {fix}"
    built, gpu = getattr(ort, "cuda_version", None), find_gpu(number)
    if gpu and built and gpu.cuda[0] < int(built.split(".")[0]):
        return (
            f"this onnxruntime-gpu needs a driver for CUDA {built}, the driver here supports CUDA "
            f"{gpu.cuda[0]}.{gpu.cuda[1]}; update the driver, or install an onnxruntime-gpu for CUDA {gpu.cuda[0]}"
        )
    options = ort.SessionOptions()
    options.log_severity_level = FATAL
    try:
        with redirect_stdout(StringIO()):  # older releases print that they go on without it
            session = ort.InferenceSession(
                RELU, options, providers=[(PROVIDER, {"device_id": str(number)})], enable_fallback=0
            )
    except Exception as e:  # onnxruntime's own, without a type
        return f"onnxruntime's CUDA provider cannot open the GPU: {reason_of(e)}; see what nvidia-smi says of it"
    if PROVIDER not in session.get_providers():
        return "onnxruntime's CUDA provider cannot open the GPU; see what nvidia-smi says of it"
    return None


class OrtCudaBackend(OrtBackend):
    """`Backend` on onnxruntime's CUDA provider. Operators that it lacks run on the CPU."""

    device, dialect = "cuda", "ort-cuda"
    loads_in_parallel = False  # `is_roomy` looks at the host's memory

    def __init__(self, bundle: Bundle, threads: int | None = None, compute: str = "f16", number: int = 0) -> None:
        self.cuda = cuda = Cuda(load_cuda(), number)
        own = {"device_id": str(number), "user_compute_stream": str(cuda.stream)}
        self.providers = {PROVIDER: {**OPTIONS, **own}, "CPUExecutionProvider": {}}
        self.memory = ("cuda", number)
        self._pool = MemoryPool()
        self.compute = "f32" if PRECISIONS[bundle.manifest.precision].arithmetic == "float32" else "f16"
        super().__init__(bundle, threads, compute)

    @staticmethod
    def merit(bundle: Bundle) -> tuple[int, str] | None:
        possible = find_gpu() is not None and OrtCudaBackend.obstacle(bundle) is None
        return (3, "there is a GPU") if possible else None

    @staticmethod
    def obstacle(bundle: Bundle, number: int = 0) -> str | None:
        if bundle.manifest.model.sliding is not None:
            return f"{WINDOWS}; use --device cpu or openvino"
        if bundle.manifest.action is not None:
            return "actions are not built for onnxruntime's CUDA provider; use --device cpu or openvino"
        refusal = OrtCudaBackend.refusal(bundle.manifest.kv_dtype, jetson=False)
        return refusal or float16_overflow(bundle) or provider_obstacle(number)

    @staticmethod
    def refusal(kv_dtype: str, *, jetson: bool) -> str | None:
        if jetson:
            return "onnxruntime-gpu is published for x86-64 only, a Jetson is aarch64"
        if kv_dtype != "float32":
            return None
        return (
            f"onnxruntime attends in float16 on CUDA, the K and V of this bundle are {kv_dtype}; "
            "export with --kv-precision fp16"
        )

    @staticmethod
    def state(machine: Device) -> DeviceState:
        number = version("onnxruntime-gpu")
        if not number:
            missing = 'onnxruntime-gpu is not installed: pip install "vtx-edge[gpu]"'
            return DeviceState("cuda", False, False, missing if machine.gpus else "there is no NVIDIA GPU here")
        reason = provider_obstacle()
        if reason:
            return DeviceState("cuda", True, False, f"onnxruntime-gpu {number}; {reason}")
        return DeviceState.on_gpu("cuda", f"onnxruntime-gpu {number}", machine)

    def share_caches(self, conversations: int) -> None:
        raise DeviceError("cuda computes one conversation at a time")

    def stage(self, index: int, capacity: int, sources: Mapping[int, Any] = NOTHING) -> OrtCudaCache:
        assert not sources, "refused for this engine"
        stage = self._stages[index]
        assert isinstance(stage, OrtCudaStage)
        return OrtCudaCache(stage, capacity)

    def _new_stage(self, context: OrtCacheContext, graph: OrtGraph, spec: StageSpec) -> OrtCudaStage:
        return OrtCudaStage(context, graph, spec, self.cuda, self._pool)

    def close(self) -> None:
        super().close()
        with suppress(DeviceError), self.cuda:  # the device may be gone
            self._pool.unused.clear()


class OrtCudaStage(OrtStage):
    """A stage whose K and V are in the GPU's memory, bound by their addresses."""

    def __init__(
        self, context: OrtCacheContext, graph: OrtGraph, spec: StageSpec, cuda: Cuda, pool: MemoryPool
    ) -> None:
        super().__init__(context, graph, spec)
        self.cuda, self.pool, self.kv_type = cuda, pool, np.dtype(context.kv_dtype)
        self.slot_bytes = context.model.head_dim * self.kv_type.itemsize  # of one slot of one head, K or V
        self.unsynchronised = load_onnxruntime().RunOptions()
        self.unsynchronised.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def shape(self, slots: int) -> tuple[int, int, int, int]:
        return 1, self.context.model.kv_heads, slots, self.context.model.head_dim

    def bind_kv(self, binding: Any, kv: Sequence[OrtDeviceSlots]) -> None:
        (held,) = kv
        place = (*self.context.memory, self.kv_type, self.shape(held.capacity))
        for number, (past, present) in enumerate(self.kv_names):
            address = held.address(number)
            binding.bind_input(past, *place, address)
            binding.bind_output(present, *place, address)


class OrtDeviceSlots:
    """K and V of a stage for `capacity` slots, each [kv_heads, capacity, head_dim], and one token's run over them."""

    def __init__(self, stage: OrtCudaStage, row: Mapping[str, NDArray[Any]], capacity: int) -> None:
        cuda, memory = stage.cuda, stage.context.memory
        self.stage, self.capacity = stage, capacity
        self.part = aligned(stage.context.model.kv_heads * capacity * stage.slot_bytes)
        purpose = f"the KV cache of layers {stage.spec.first} to {stage.spec.last}"
        self.kv = Buffer(cuda, self.part * len(stage.kv_names), purpose)
        self.row = {name: Buffer(cuda, array.nbytes, "one token") for name, array in row.items()}
        self.total = np.zeros(1, np.int32)  # stays in the host's memory, where the operator reads it
        self.binding = stage.bind({names.TOTAL_SLOTS: self.total}, {}, [self])
        for name, array in row.items():
            bind = self.binding.bind_output if name == names.HIDDEN_OUT else self.binding.bind_input
            bind(name, *memory, array.dtype, array.shape, self.row[name].address)
        self.clear()

    def address(self, part: int) -> int:
        """The address of a layer's K or V, in the order of `OrtStage.kv_names`."""
        return self.kv.address + part * self.part

    def clear(self) -> None:
        self.stage.cuda.zero(self.kv)  # masked slots must still be numbers
        self.stage.cuda.wait()


class OrtCudaCache(OrtStageCache):
    """`StageCache` in the GPU's memory, for the slots that the conversation needs; longer memory takes its place.

    Longer prompts are bound as arrays of the host, which onnxruntime copies; one token through arrays that stay bound.
    """

    stage: OrtCudaStage

    def __init__(self, stage: OrtCudaStage, capacity: int) -> None:
        super().__init__(stage, capacity)
        self._given: dict[str, NDArray[Any]] = {**self._row, names.POSITIONS: self._row_position, **self._row_seen}
        self._given[names.LAST_SLOT] = self._last
        self._held: list[OrtDeviceSlots] = []
        stage.pool.give_back_with(self, stage.spec.first, self._held)

    def buffers_at(self, number: int | None) -> tuple[list[NDArray[Any]], list[Any], Any]:
        return [], [], None  # a conversation has none before its first token

    def _make_room(self, slots: int) -> None:
        """Have memory for `slots` slots. If there is not enough, the cache stays as it is."""
        stage = self.stage
        if self._held and self._held[0].capacity >= slots:
            return
        capacity = min(self.capacity, -(-slots // BLOCK) * BLOCK)
        row = {**self._given, names.HIDDEN_OUT: self._row_out}
        longer = stage.pool.borrow(stage.spec.first, capacity, lambda count: OrtDeviceSlots(stage, row, count))
        if self._held and self.length:
            for part in range(len(stage.kv_names)):
                to, source = ((each.address(part), each.capacity) for each in (longer, self._held[0]))
                self._copy_heads(to, source, self.length)
            stage.cuda.wait()
        self._held[:] = self.buffers[:] = [longer]
        self._resident = longer.capacity

    def append(
        self, tokens: TokenStates, positions: Ids, *, query: bool = False, outputs: Ids | None = None
    ) -> HiddenStates:
        with self.stage.cuda:
            self._make_room(self.length + len(tokens))
            return super().append(tokens, positions, query=query, outputs=outputs)

    def _run_row(self) -> None:
        cuda, held = self.stage.cuda, self._held[0]
        for name, array in self._given.items():
            cuda.copy_in(held.row[name].address, array)
        held.total[:] = self._total
        self.stage.graph.run_bound(held.binding, self.stage.unsynchronised)
        cuda.copy_out(self._row_out, held.row[names.HIDDEN_OUT].address)
        cuda.wait()

    def _bind_keys(self, binding: Any) -> None:
        held, stage = self._held[0], self.stage
        place = (*stage.context.memory, stage.kv_type, stage.shape(held.capacity))
        binding.bind_input(names.KEY, *place, held.address(len(stage.kv_names) - 2))

    def keys(self) -> NDArray[np.float32]:
        stage, held = self.stage, self._held[0]
        keys = np.empty(stage.shape(self.length)[1:], stage.kv_type)
        with stage.cuda:
            packed = Buffer(stage.cuda, max(1, keys.nbytes), "keys")
            key = (held.address(len(stage.kv_names) - 2), held.capacity)
            self._copy_heads((packed.address, self.length), key, self.length)
            stage.cuda.copy_out(keys, packed.address)
            stage.cuda.wait()
        return keys.astype(np.float32)

    def _read(self, slots: Ids) -> SavedSlots:  # type: ignore[override]
        stage = self.stage
        with stage.cuda:
            kv_heads = stage.context.model.kv_heads
            nbytes = max(1, len(stage.kv_names) * kv_heads * len(slots) * stage.slot_bytes)
            kept = SavedSlots(Buffer(stage.cuda, nbytes, "K/V set aside"), len(slots))
            self._move(slots, kept, out=True)
        return kept

    def _write(self, slots: Ids, kv: SavedSlots, length: int) -> None:  # type: ignore[override]
        assert len(slots) == kv.count
        with self.stage.cuda:
            self._make_room(length)
            self._move(slots, kv, out=False)

    def _move(self, slots: Ids, kept: SavedSlots, *, out: bool) -> None:
        """Copy runs of neighbouring slots between the cache and a packed buffer of `kept.count` slots."""
        stage, held = self.stage, self._held[0]
        unit, packed = stage.slot_bytes, stage.context.model.kv_heads * kept.count * stage.slot_bytes
        for start, first, count in runs(slots):
            for part in range(len(stage.kv_names)):
                saved = (kept.buffer.address + part * packed + start * unit, kept.count)
                cache = (held.address(part) + first * unit, held.capacity)
                self._copy_heads(*((saved, cache) if out else (cache, saved)), count)
        stage.cuda.wait()

    def _copy(self, other: OrtStageCache, length: int) -> None:
        SlotCounter._copy(self, other, length)  # K and V are not on the host

    def _copy_heads(self, to: tuple[int, int], source: tuple[int, int], slots: int) -> None:
        """Queue a copy of some slots of every head; each end is an address and the slots from one head to the next."""
        unit, heads = self.stage.slot_bytes, self.stage.context.model.kv_heads
        self.stage.cuda.copy_rows(to[0], to[1] * unit, source[0], source[1] * unit, slots * unit, heads)
