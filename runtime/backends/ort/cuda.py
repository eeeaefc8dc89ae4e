"""onnxruntime's CUDA provider: graphs that state the type of their arithmetic, K and V in the GPU's memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import cache
from io import StringIO
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends import contract
from vtx.runtime.backends.backend import NOTHING, DeviceState, StageCache, Step
from vtx.runtime.backends.cuda import ALIGNMENT, Cuda, MemoryPool
from vtx.runtime.backends.device_states import FLOAT, DeviceStates, StatesPool
from vtx.runtime.backends.driver import load_driver
from vtx.runtime.backends.failures import reason_of
from vtx.runtime.backends.ort.backend import OrtBackend
from vtx.runtime.backends.ort.cache import OrtCacheContext
from vtx.runtime.backends.ort.cuda_batch import OrtCudaStageBatch
from vtx.runtime.backends.ort.cuda_cache import OrtCudaCache, OrtCudaStage
from vtx.runtime.backends.ort.cuda_step import OrtCudaSteps
from vtx.runtime.backends.ort.graph import OrtGraph
from vtx.runtime.backends.ort.library import load_onnxruntime, log_severity
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.bundle.tensors import float16_overflow
from vtx.runtime.errors import DeviceError
from vtx.runtime.host.device import Device
from vtx.runtime.host.gpu import find_gpu
from vtx.runtime.host.machine import version
from vtx.runtime.installing import install
from vtx.runtime.precision import PRECISIONS
from vtx.runtime.vision.tokens import HiddenStates, Ids, TokenStates

PROVIDER = "CUDAExecutionProvider"
WINDOWS = "sliding windows are not built for onnxruntime's CUDA provider"
UNLOADED = re.compile(
    r"^Failed to load (?:[^:\n]*: )?(.+)$", re.MULTILINE
)  # a line of `preload_dlls`, up to its reason
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
    CUDA and cuDNN are loaded first, from the packages of the extra `gpu`, and then one small graph. The provider's own
    library is never opened here: it needs symbols that only onnxruntime gives it.
    """
    ort = load_onnxruntime()
    if PROVIDER not in ort.get_available_providers():
        return (
            "this onnxruntime has no CUDA provider; pip uninstall -y onnxruntime, then "
            f"{install('gpu')}, on a machine with an NVIDIA driver"
        )
    printed = StringIO()
    with redirect_stdout(printed):  # it prints what it does not find
        ort.preload_dlls()
    return _driver_obstacle(ort, number) or _session_obstacle(ort, number, printed.getvalue())


def _driver_obstacle(ort: Any, number: int) -> str | None:
    """The reason why NVIDIA's driver does not serve this onnxruntime, or None."""
    gpu = find_gpu(number)
    if gpu is None:
        return (
            f"NVIDIA's driver is missing or shows no GPU {number}; install NVIDIA's driver; in a container, pass the "
            "GPU through (docker run --gpus all)"
        )
    built = getattr(ort, "cuda_version", None)
    if built and gpu.cuda[0] < int(built.split(".")[0]):
        return (
            f"this onnxruntime-gpu needs a driver for CUDA {built}, the driver here supports CUDA "
            f"{gpu.cuda[0]}.{gpu.cuda[1]}; update the driver, or install an onnxruntime-gpu for CUDA {gpu.cuda[0]}"
        )
    return None


def _session_obstacle(ort: Any, number: int, printed: str) -> str | None:
    """The reason why a small graph does not load on the GPU, or None; `printed` is the output of `preload_dlls`."""
    options = ort.SessionOptions()
    options.log_severity_level = log_severity()
    reason = None
    try:
        with redirect_stdout(StringIO()):  # older releases print that they go on without it
            session = ort.InferenceSession(
                RELU, options, providers=[(PROVIDER, {"device_id": str(number)})], enable_fallback=0
            )
        if PROVIDER in session.get_providers():
            return None
    except Exception as e:  # onnxruntime's own, without a type
        reason = reason_of(e)
    unloaded = UNLOADED.search(printed)
    if unloaded:
        return (
            f"onnxruntime's CUDA provider does not load: {unloaded[1]}; {install('gpu', '-U ')} installs CUDA "
            "and cuDNN with it"
        )
    cause = f": {reason}" if reason else ""
    return f"onnxruntime's CUDA provider cannot open the GPU{cause}; see what nvidia-smi says of it"


class OrtCudaBackend(OrtBackend):
    """`Backend` on onnxruntime's CUDA provider. Operators that it lacks run on the CPU."""

    device, dialect = "cuda", "ort-cuda"
    loads_in_parallel = False  # `is_roomy` looks at the host's memory
    _batches: Sequence[OrtCudaStageBatch]  # type: ignore[assignment]

    def __init__(self, bundle: Bundle, threads: int | None = None, compute: str = "f16", number: int = 0) -> None:
        self.cuda = cuda = Cuda(load_driver(), number)
        settings = {"device_id": str(number), "user_compute_stream": str(cuda.stream)}
        self.providers = {PROVIDER: {**OPTIONS, **settings}, "CPUExecutionProvider": {}}
        self.memory = ("cuda", number)
        self._states = StatesPool(cuda, bundle.manifest.model.hidden, MemoryPool(cuda))
        self._steps: OrtCudaSteps | None = None  # once a token was decoded
        self.compute = "f32" if PRECISIONS[bundle.manifest.precision].arithmetic == "float32" else "f16"
        super().__init__(bundle, threads, compute)

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
            missing = f"onnxruntime-gpu is not installed: {install('gpu')}"
            return DeviceState("cuda", False, False, missing if machine.gpus else "there is no NVIDIA GPU here")
        reason = provider_obstacle()
        if reason:
            return DeviceState("cuda", True, False, f"onnxruntime-gpu {number}; {reason}")
        return DeviceState.on_gpu("cuda", f"onnxruntime-gpu {number}", machine)

    def share_caches(self, conversations: int) -> None:
        self._check_batches()
        longest = self._manifest.max_context
        self._batches = [OrtCudaStageBatch(cast(OrtCudaStage, stage), longest) for stage in self._stages]

    def reaches(self, caches: Sequence[StageCache]) -> bool:
        return bool(self._batches)

    def append_each(
        self, index: int, caches: Sequence[Any], tokens: TokenStates, positions: Ids, counts: Sequence[int]
    ) -> HiddenStates:
        assert max(counts) == 1, "a run is of one token of each"
        with self.cuda:
            return self._batches[index].append_parts(caches, tokens, positions)

    def stage(self, index: int, capacity: int, sources: Mapping[int, Any] = NOTHING) -> OrtCudaCache:
        assert not sources, "refused for this engine"
        stage = self._stages[index]
        assert isinstance(stage, OrtCudaStage)
        return OrtCudaCache(stage, capacity)

    def _new_stage(self, context: OrtCacheContext, graph: OrtGraph, spec: StageSpec) -> OrtCudaStage:
        options = self._ort.RunOptions()
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return OrtCudaStage(context, graph, spec, self._states, options)

    def head(self, hidden: HiddenStates) -> NDArray[np.float32]:
        states = cast(Any, hidden)
        graph = cast(OrtGraph, self._head)
        if not isinstance(states, DeviceStates):
            return super().head(hidden)
        if states.row(0) % ALIGNMENT:
            states = states.copy()
        with self.cuda:
            binding = graph.session.io_binding()
            binding.bind_input(names.HIDDEN, *self.memory, FLOAT, states.shape, states.row(0))
            binding.bind_output(names.LOGITS, "cpu")
            graph.run_bound(binding)
        logits: NDArray[np.float32] = binding.copy_outputs_to_cpu()[0]
        return contract.of_each(graph.name, logits, len(states))

    def step(self, caches: Sequence[OrtCudaCache], token: int, positions: Sequence[int], *, logits: bool) -> Step:
        contract.embeddable(self._manifest, np.array([token]))
        embed = self._embed
        head = self._head
        assert isinstance(embed, OrtGraph)
        assert isinstance(head, OrtGraph)
        with self.cuda:
            for cache in caches:
                cache.make_room(cache.length + 1)
            if self._steps is None:
                context = caches[0].stage.context
                vocab = self._manifest.model.vocab
                self._steps = OrtCudaSteps(context, self.cuda, embed, head, vocab)
            done = self._steps.run(caches, token, positions, logits=logits)
        for cache in caches:
            cache.fill(cache.length + 1)
        return done

    def close(self) -> None:
        self._steps = None
        with suppress(DeviceError), self.cuda:  # the device may be gone
            self.cuda.wait()  # an error may have left work behind that runs in the sessions
            self._states.memory.unused.clear()
        super().close()
