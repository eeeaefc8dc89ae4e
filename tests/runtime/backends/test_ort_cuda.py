"""onnxruntime on CUDA: the code that differs from the CPU's, run with the CPU as the device; on a GPU, as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.bundles import export
from tests.support.exported import THREADS, greedy, prompt
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.backends.devices import choose
from vtx.runtime.backends.ort import cuda as ort_cuda
from vtx.runtime.backends.ort.cuda import PROVIDER, OrtCudaBackend
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import DeviceError
from vtx.runtime.vision.tokens import TokenStates

QUESTIONS = ("red?", "How many circle shapes are there?")


class OnCpu(OrtCudaBackend):
    """The backend with its buffers in the host's memory, by the calls that put them into the GPU's."""

    providers = ("CPUExecutionProvider",)
    memory = "cpu"


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
    if ort_cuda.obstacle("float16") is None:
        pytest.skip("this onnxruntime has the CUDA provider")
    with pytest.raises(DeviceError, match=r"this onnxruntime has no CUDA provider; .*vtx-edge\[gpu\]"):
        choose(Bundle.open(folders["fp16"]), "cuda")


def test_float32_caches_are_refused_on_cuda(monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]) -> None:
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [PROVIDER])
    with pytest.raises(
        DeviceError, match=r"attends in float16 on CUDA, .* are float32; export with --kv-precision fp16"
    ):
        choose(Bundle.open(folders["fp32"]), "cuda")
    assert choose(Bundle.open(folders["fp16"]), "cuda").device == "cuda"


@pytest.mark.gpu
def test_answers_on_a_gpu_are_those_of_the_cpu(folders: dict[str, Path]) -> None:
    reason = ort_cuda.obstacle("float16")
    if reason is not None:
        pytest.skip(reason)
    ours, reference = opened(folders["fp16"], OrtCudaBackend), load(folders["fp16"], device="cpu", threads=THREADS)
    images, messages = [random_image(1)], prompt_messages(QUESTIONS[1])
    want, got = (greedy(model, prompt(model, messages, images), 2, 6) for model in (reference, ours))
    assert got.ids == want.ids
    np.testing.assert_allclose(got.logits, want.logits, atol=6e-2)
