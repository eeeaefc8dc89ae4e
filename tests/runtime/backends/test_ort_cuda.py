"""onnxruntime on CUDA: the code that differs from the CPU's, run with the CPU as the device; on a GPU, as it is."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.support.bundles import export
from tests.support.exported import THREADS, greedy, prompt
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.backends import devices
from vtx.runtime.backends.devices import choose, open_backend
from vtx.runtime.backends.engines import ENGINES
from vtx.runtime.backends.ort import cuda as ort_cuda
from vtx.runtime.backends.ort.backend import OrtBackend
from vtx.runtime.backends.ort.cuda import OPTIONS, PROVIDER, OrtCudaBackend
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import DeviceError
from vtx.runtime.host.device import Device
from vtx.runtime.host.gpu import Gpu
from vtx.runtime.vision.tokens import TokenStates

QUESTIONS = ("red?", "How many circle shapes are there?")


class OnCpu(OrtCudaBackend):
    """The backend with its buffers in the host's memory, by the calls that put them into the GPU's."""

    def __init__(self, bundle: Bundle, threads: int) -> None:
        OrtBackend.__init__(self, bundle, threads)


@pytest.fixture(scope="module")
def folders(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("cuda")
    return {name: export(tiny_checkpoint(Tiny(layers=3)), root / name, (2,), name).folder for name in ("fp32", "fp16")}


def opened(folder: Path, kind: type[OrtCudaBackend] = OnCpu) -> Model:
    bundle = Bundle.open(folder)
    return Model(bundle, kind(bundle, THREADS), 0.0, "")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("k", [None, 2])
def test_answers_are_those_of_the_cpu(k: int | None, precision: str, folders: dict[str, Path]) -> None:
    ours, reference = opened(folders[precision]), load(folders[precision], device="cpu", threads=THREADS)
    for number, question in enumerate(QUESTIONS):
        images, messages = [random_image(number)], prompt_messages(question)
        want, got = (greedy(model, prompt(model, messages, images), k, 6) for model in (reference, ours))
        assert got.ids == want.ids
        np.testing.assert_allclose(got.logits, want.logits, atol=1e-6)


@pytest.mark.parametrize("slots", [[], [0], [1, 3, 4], list(range(5))])
def test_slots_set_aside_come_back_where_they_are_put(slots: list[int], folders: dict[str, Path]) -> None:
    ours, reference = opened(folders["fp32"]), load(folders["fp32"], device="cpu", threads=THREADS)
    random = np.random.default_rng(0)
    rows = random.standard_normal((5, ours.manifest.model.hidden)).astype(np.float32)
    after = []
    for model in (ours, reference):
        cache = model.backend.stage(1, 8)
        cache.append(TokenStates(rows), np.arange(5))
        kept = cache.read(np.array(slots, np.int64))
        cache.write(np.arange(len(slots)), kept, length=len(slots))
        after.append(cache.append(TokenStates(rows[:1]), np.array([7])).copy())
    np.testing.assert_allclose(after[0], after[1], atol=1e-6)


def test_an_onnxruntime_without_cuda_is_said_so(folders: dict[str, Path]) -> None:
    if ort_cuda.provider_obstacle() is None:
        pytest.skip("this onnxruntime has the CUDA provider")
    with pytest.raises(DeviceError, match=r"this onnxruntime has no CUDA provider; .*vtx-edge\[gpu\]"):
        choose(Bundle.open(folders["fp16"]), "cuda")


def test_float32_caches_are_refused_on_cuda(monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]) -> None:
    monkeypatch.setattr(ort_cuda, "provider_obstacle", lambda *_: None)
    with pytest.raises(
        DeviceError, match=r"attends in float16 on CUDA, .* are float32; export with --kv-precision fp16"
    ):
        choose(Bundle.open(folders["fp32"]), "cuda")
    assert choose(Bundle.open(folders["fp16"]), "cuda").device == "cuda"


class Ort:
    """An onnxruntime-gpu for CUDA 13: it lists the provider, and loads graphs on what `got` names."""

    __file__ = "/nowhere/onnxruntime/__init__.py"
    cuda_version = "13.0"
    SessionOptions = SimpleNamespace

    def __init__(self, got: Sequence[str] | Exception) -> None:
        self.got = got

    def get_available_providers(self) -> list[str]:
        return ["TensorrtExecutionProvider", PROVIDER, "CPUExecutionProvider"]

    def preload_dlls(self) -> None:
        print("Failed to load libcublas.so.13")

    def InferenceSession(self, *_: object, providers: list[str], enable_fallback: int) -> SimpleNamespace:
        assert not enable_fallback
        if isinstance(self.got, Exception):
            raise self.got
        return SimpleNamespace(get_providers=lambda: self.got)


def test_each_session_takes_what_it_asks_for_and_times_no_algorithms(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options of OrtCudaBackend's providers reach each session; CUDA's place is taken by the CPU's provider."""
    seen = []
    real = onnxruntime.InferenceSession

    def load(path: str, options: object, providers: list[tuple[str, dict[str, str]]], **_: object) -> object:
        seen.append(dict(providers)[PROVIDER])
        return real(path, options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(onnxruntime, "InferenceSession", load)
    monkeypatch.setattr(real, "get_providers", lambda _: [PROVIDER])
    in_host = property(lambda _: ("cpu", 0), lambda *_: None)
    monkeypatch.setattr(OrtCudaBackend, "memory", in_host)
    OrtCudaBackend(Bundle.open(next(iter(folders.values()))))
    assert len(seen) > 4
    wanted = {"arena_extend_strategy": "kSameAsRequested", "cudnn_conv_algo_search": "HEURISTIC", "device_id": "0"}
    assert all(options == wanted for options in seen)


MISSING = "libcublasLt.so.13: cannot open shared object file: No such file or directory"
NO_DRIVER = "libcuda.so.1: cannot open shared object file: No such file or directory"
BOTH = (PROVIDER, "CPUExecutionProvider")


@pytest.mark.skipif(sys.platform != "linux", reason="names of Linux's libraries")
@pytest.mark.parametrize(
    ("library", "driver", "got", "said"),
    [
        (MISSING, (13, 0), BOTH, rf"does not load: {MISSING}; pip install -U \"vtx-edge\[gpu\]\" installs CUDA"),
        (NO_DRIVER, (13, 0), BOTH, rf"does not load: {NO_DRIVER}; install NVIDIA's driver; in a container"),
        (None, (12, 4), BOTH, r"needs a driver for CUDA 13.0, the driver here supports CUDA 12.4; update the driver"),
        (None, (13, 0), ("CPUExecutionProvider",), r"cannot open the GPU; see what nvidia-smi says"),
        (None, (13, 0), RuntimeError("CUDA failure 999: unknown"), r"cannot open the GPU: CUDA failure 999: unknown; "),
        (None, (13, 0), BOTH, None),
    ],
    ids=["no-cuda", "no-driver", "old-driver", "silent-cpu", "refused", "answers"],
)
def test_a_provider_that_does_not_open_the_gpu_is_refused_and_auto_goes_on(
    library: str | None,
    driver: tuple[int, int],
    got: Sequence[str] | Exception,
    said: str | None,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def load_library(_: str) -> None:
        if library:
            raise OSError(library)

    gpu = Gpu("a GPU", (9, 0), 80 << 30, driver)
    monkeypatch.setattr(ort_cuda, "load_onnxruntime", lambda: Ort(got))
    monkeypatch.setattr(ort_cuda, "find_gpu", lambda *_: gpu)
    monkeypatch.setattr(ort_cuda, "version", lambda _: "1.31.1")
    monkeypatch.setattr(ort_cuda.ctypes, "CDLL", load_library)
    ort_cuda.provider_obstacle.cache_clear()
    bundle = Bundle.open(folders["fp16"])
    try:
        state = OrtCudaBackend.state(Device(None, (gpu,), None))
        if said is None:
            assert choose(bundle).device == choose(bundle, "cuda").device == "cuda"
            assert state.usable
        else:
            assert not ENGINES[choose(bundle).device].gpu
            with pytest.raises(DeviceError, match=said):
                choose(bundle, "cuda")
            assert not state.usable
            assert re.search(said, state.detail)
    finally:
        ort_cuda.provider_obstacle.cache_clear()
    assert capfd.readouterr() == ("", "")


def test_the_second_gpu_is_used_if_it_is_named(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (Gpu("a GPU", (9, 0), 80 << 30, (13, 0)),) * 2
    monkeypatch.setattr(devices, "find_gpus", lambda: gpus)
    monkeypatch.setattr(ort_cuda, "provider_obstacle", lambda number: None if number == 1 else "the wrong one")
    bundle = Bundle.open(folders["fp16"])
    chosen = choose(bundle, "cuda:1")
    assert (chosen.device, chosen.number) == ("cuda", 1)
    opened: list[Any] = []
    monkeypatch.setattr(OrtBackend, "__init__", lambda self, *_: opened.append((self.providers, self.memory)))
    open_backend(bundle, chosen, THREADS)
    assert opened == [({PROVIDER: {**OPTIONS, "device_id": "1"}, "CPUExecutionProvider": {}}, ("cuda", 1))]
    with pytest.raises(DeviceError, match=r"cuda:2 is not there: the NVIDIA driver shows 2 GPUs"):
        choose(bundle, "cuda:2")


@pytest.mark.filterwarnings("ignore:.*CUDAExecutionProvider.*not in available provider names")
def test_a_graph_that_is_loaded_without_the_provider_is_an_error(folders: dict[str, Path]) -> None:
    if ort_cuda.provider_obstacle() is None:
        pytest.skip("this onnxruntime has the CUDA provider")
    with pytest.raises(DeviceError, match=r"loaded .* without its CUDAExecutionProvider"):
        OrtCudaBackend(Bundle.open(folders["fp16"]), THREADS)


@pytest.mark.gpu
def test_answers_on_a_gpu_are_those_of_the_cpu(folders: dict[str, Path]) -> None:
    reason = ort_cuda.provider_obstacle()
    if reason is not None:
        pytest.skip(reason)
    ours, reference = opened(folders["fp16"], OrtCudaBackend), load(folders["fp16"], device="cpu", threads=THREADS)
    images, messages = [random_image(1)], prompt_messages(QUESTIONS[1])
    want, got = (greedy(model, prompt(model, messages, images), 2, 6) for model in (reference, ours))
    assert got.ids == want.ids
    np.testing.assert_allclose(got.logits, want.logits, atol=6e-2)
