"""onnxruntime on CUDA: on a stand-in that computes on the CPU; on a GPU, as it is."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support import ort_standin
from tests.support.bundles import export_with
from tests.support.engines import read_together, stepped
from tests.support.exported import THREADS, greedy, policy, prompt
from tests.support.fixtures import Checkpoints
from tests.support.ort_standin import Ort
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.api.stream import AnswerStream
from vtx.runtime.backends import devices
from vtx.runtime.backends.devices import choose, open_backend
from vtx.runtime.backends.engines import ENGINES
from vtx.runtime.backends.ort import cuda as ort_cuda
from vtx.runtime.backends.ort import cuda_cache
from vtx.runtime.backends.ort.cuda import PROVIDER, OrtCudaBackend
from vtx.runtime.backends.slots import LANES
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import DeviceError
from vtx.runtime.host import gpu as host_gpu
from vtx.runtime.host.device import Device
from vtx.runtime.host.gpu import Gpu as Card
from vtx.runtime.host.gpu import find_gpu
from vtx.runtime.scheduler.batching import Batching
from vtx.runtime.session.session import Session
from vtx.runtime.vision.tokens import TokenStates

Folders = Callable[[str], Path]
QUESTIONS = ("red?", "How many circle shapes are there?")
WEIGHTS = {"fp32": 5e-3, "fp16": 2e-2, "int8": 0.1, "int4": 0.1}  # largest difference, by the largest logit
REDUCTIONS = ("fastv:k=2", "dart")


@pytest.fixture(scope="module")
def folders(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Bundles of a precision, of "reducing" for reductions, and with K and V in float32; each is made once."""
    root = tmp_path_factory.mktemp("cuda")

    @cache
    def made(name: str) -> Path:
        given: dict[str, Any] = {"precision": name, "kv_precision": "fp16"}
        given = {"reducing": {"reductions": REDUCTIONS}, "fp32-kv": {"precision": "fp32"}}.get(name, given)
        checkpoint = str(tiny_checkpoint(Tiny(layers=3)))
        return export_with(ExportOptions(checkpoint, (2,), dialects=("ort", "ort-cuda"), **given), root / name).folder

    return made


def opened(folder: Path) -> Model:
    bundle = Bundle.open(folder)
    return Model(bundle, OrtCudaBackend(bundle, THREADS), 0.0, "")


@pytest.mark.sampled
@pytest.mark.parametrize("precision", WEIGHTS)
@pytest.mark.parametrize("k", [None, 2])
def test_answers_are_those_of_the_cpu(k: int | None, precision: str, folders: Folders, machine: Ort) -> None:
    """With its own prompt, a second question and tokens one by one, in float16 but for float32 weights."""
    ours, reference = opened(folders(precision)), load(folders(precision), device="cpu", threads=THREADS)
    assert (ours.backend.compute, ours.backend.kv_slot_bytes) == (
        "f32" if precision == "fp32" else "f16",
        2 * 2 * 16 * 2,
    )
    for number, question in enumerate(QUESTIONS):
        images, messages = [random_image(number)], prompt_messages(question)
        want = greedy(reference, prompt(reference, messages, images), k, 40)
        got = greedy(ours, prompt(ours, messages, images), k, 40, forced=want.ids)
        largest = np.abs(want.logits).max()
        np.testing.assert_allclose(got.logits, want.logits, atol=WEIGHTS[precision] * largest)
        assert got.done.slots == want.done.slots


@pytest.mark.parametrize("word", REDUCTIONS)
def test_reductions_keep_what_they_keep_on_the_cpu(word: str, folders: Folders, machine: Ort) -> None:
    """Attention, keys and saved slots are read where they lie."""
    kept = []
    for model in (opened(folders("reducing")), load(folders("reducing"), device="cpu", threads=THREADS)):
        with model.open([random_image(1)]) as image:
            answers = [image.ask(question, "none", reduce=word, max_new_tokens=4) for question in QUESTIONS]
        kept.append([(answer.token_ids, answer.stats.kv_slots) for answer in answers])
    assert kept[0] == kept[1]


@pytest.mark.parametrize("slots", [[], [0], [1, 3, 4], list(range(5))])
def test_slots_set_aside_come_back_where_they_are_put(slots: list[int], folders: Folders, machine: Ort) -> None:
    ours, reference = opened(folders("fp32")), load(folders("fp32"), device="cpu", threads=THREADS)
    random = np.random.default_rng(0)
    rows = random.standard_normal((5, ours.manifest.model.hidden)).astype(np.float32)
    after = []
    for model in (ours, reference):
        cache = model.backend.stage(1, 64)
        cache.append(TokenStates(rows), np.arange(5))
        kept = cache.read(np.array(slots, np.int64))
        cache.write(np.arange(len(slots)), kept, length=len(slots))
        for position in range(30):  # beyond the slots that it had at first
            last = cache.append(TokenStates(rows[:1]), np.array([7 + position])).copy()
        after.append((last, cache.keys()))
    np.testing.assert_allclose(after[0][0], after[1][0], atol=1e-5)
    np.testing.assert_allclose(after[0][1], after[1][1], atol=1e-5)


def test_the_next_image_allocates_and_binds_nothing_for_its_tokens(folders: Folders, machine: Ort) -> None:
    model, gpu = opened(folders("fp16")), machine.gpu

    def ask(number: int) -> tuple[int, int]:
        with model.open([random_image(number)]) as image:
            image.ask("red?", 2, max_new_tokens=4, ignore_eos=True)
            gpu.calls.clear()
            machine.binds = 0
            image.ask("red?", 2, max_new_tokens=12, ignore_eos=True)
            return gpu.used, machine.binds

    ask(0)
    held, bound = ask(1)
    for number in range(2, 5):
        assert ask(number) == (held, bound)
        assert not gpu.calls["cuMemAlloc_v2"]
    session, stages = Session(model.backend, model.manifest), len(model.manifest.stages)
    session.prefill(prompt(model, prompt_messages("red?"), [random_image(0)]), policy(2))
    session.decode(1)
    gpu.calls.clear()
    machine.binds = 0
    session.decode(1)
    counted = {name: gpu.calls[name] for name in ("cuMemAlloc_v2", "copies", "run")}
    # ids in, of each stage positions and the last slot; the state, the best token and the logits out
    assert (counted, machine.binds) == ({"cuMemAlloc_v2": 0, "copies": 2 * stages + 4, "run": stages + 2}, 0)
    gpu.calls.clear()
    session.choose(1)
    assert (gpu.calls["copies"], gpu.calls["cuStreamSynchronize"]) == (2 * stages + 3, 1)


def test_the_work_of_a_token_is_that_of_one_client_whatever_the_number(folders: Folders, machine: Ort) -> None:
    """Lanes grow with the longest conversation; the answers are those of each alone."""
    model, gpu = opened(folders("fp16")), machine.gpu

    def streams() -> list[AnswerStream]:
        options = Options(40, ignore_eos=True)
        images = [model.open([random_image(number)]) for number in range(LANES)]
        return [image.stream(QUESTIONS[n % 2], (None, 2)[n % 3 > 0], options) for n, image in enumerate(images)]

    alone = [stream.read().token_ids for stream in streams()]
    batching = Batching(model, LANES, LANES)
    together = streams()
    for _ in range(3):  # so that lanes are taken
        batching.decode(together)
        assert all([stepped(stream) for stream in together])
    gpu.calls.clear()
    gpu.copies.clear()
    batching.decode(together)
    stages = len(model.manifest.stages)
    counted = {name: gpu.calls[name] for name in ("run on arrays", "run", "cuStreamSynchronize", "cuMemAlloc_v2")}
    assert counted == {"run on arrays": 1, "run": stages + 1, "cuStreamSynchronize": 2, "cuMemAlloc_v2": 0}
    hidden, vocab = model.manifest.model.hidden, model.manifest.model.vocab
    copied = {side: sum(nbytes for at, nbytes in gpu.copies if at == side) for side in ("in", "out")}
    assert copied["in"] == LANES * (8 + stages * (8 + 4) + 4 * hidden)  # an id, and positions and last slots
    assert copied["out"] == LANES * 4 * (2 * hidden + vocab)
    batching.decode(together)
    assert [stream.read().token_ids for stream in together] == alone
    assert read_together(model, streams()) == alone


def test_a_long_prompt_runs_in_parts(folders: Folders, machine: Ort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_cache, "PROMPT_RUN", 8)
    ours, reference = opened(folders("fp32")), load(folders("fp32"), device="cpu", threads=THREADS)
    asked = [prompt(m, prompt_messages("red?"), [random_image(1)]) for m in (ours, reference)]
    runs = machine.gpu.calls["run"]
    got, want = (greedy(m, p, 2, 6) for m, p in zip((ours, reference), asked, strict=True))
    assert got.ids == want.ids
    np.testing.assert_allclose(got.logits, want.logits, atol=WEIGHTS["fp32"] * np.abs(want.logits).max())
    stages, parts = len(ours.manifest.stages), -(-len(asked[0].ids) // 8)
    assert machine.gpu.calls["run"] - runs >= parts + 5 * (stages + 2)


def test_tokens_that_have_left_take_no_memory_behind_the_cut(folders: Folders, machine: Ort) -> None:
    model = opened(folders("fp16"))
    held = {}
    images = [random_image(number) for number in range(3)]
    for k in (2, None):  # memory of the second could serve the first
        session = Session(model.backend, model.manifest)
        session.prefill(prompt(model, prompt_messages("red?", 3), images), policy(k))
        held[k] = [cache.resident for cache in session.decoding_caches]
    assert held[None][1] > held[2][1]
    assert all(slots % 32 == 0 for slots in held[2])


@pytest.mark.parametrize("free", [3000, 30_000])
def test_memory_that_runs_out_says_for_what_and_the_conversation_goes_on(
    free: int, folders: Folders, machine: Ort
) -> None:
    model, gpu = opened(folders("fp16")), machine.gpu
    with model.open([random_image(0)]) as image:
        before = image.ask("red?", 2, max_new_tokens=4, ignore_eos=True)
        gpu.total = gpu.used + free
        with pytest.raises(
            DeviceError,
            match=r"(KV cache of layers \d to \d|states of \d+ tokens) needs .* of device memory, .* is free; end",
        ):
            image.ask("red " * 40, 2, max_new_tokens=4, ignore_eos=True)
        gpu.total = 1 << 32
        assert image.ask("red?", 2, max_new_tokens=4, ignore_eos=True).token_ids == before.token_ids


def test_a_run_that_finds_no_memory_is_one_error_and_the_next_question_is_answered(
    folders: Folders, machine: Ort
) -> None:
    model = opened(folders("fp16"))
    with model.open([random_image(0)]) as image:
        before = image.ask("red?", 2, max_new_tokens=4)
        machine.fails = RuntimeError(
            "[E:onnxruntime] BFCArena::AllocateRawInternal Failed to allocate memory for 16 MB"
        )
        with pytest.raises(DeviceError, match=r"not enough memory to run .*\.ort-cuda\.onnx \(.*\); end other"):
            image.ask("blue?", 2, max_new_tokens=4)
        machine.fails = None
        assert image.ask("red?", 2, max_new_tokens=4).token_ids == before.token_ids


def test_an_onnxruntime_without_cuda_is_said_so(folders: Folders) -> None:
    if ort_cuda.provider_obstacle() is None:
        pytest.skip("this onnxruntime has the CUDA provider")
    with pytest.raises(DeviceError, match=r"this onnxruntime has no CUDA provider; .*vtx-edge\[gpu\]"):
        choose(Bundle.open(folders("fp16")), "cuda")


def test_float32_caches_are_refused_on_cuda(monkeypatch: pytest.MonkeyPatch, folders: Folders) -> None:
    monkeypatch.setattr(ort_cuda, "provider_obstacle", lambda *_: None)
    with pytest.raises(
        DeviceError, match=r"attends in float16 on CUDA, .* are float32; export with --kv-precision fp16"
    ):
        choose(Bundle.open(folders("fp32-kv")), "cuda")
    assert choose(Bundle.open(folders("fp16")), "cuda").device == "cuda"


class Provided:
    """An onnxruntime-gpu for CUDA 13: it lists the provider, and loads graphs on what `got` names."""

    __file__ = "/nowhere/onnxruntime/__init__.py"
    cuda_version = "13.0"
    SessionOptions = SimpleNamespace

    def __init__(self, got: Sequence[str] | Exception, printed: str = "") -> None:
        self.got, self.printed = got, printed

    def get_available_providers(self) -> list[str]:
        return ["TensorrtExecutionProvider", PROVIDER, "CPUExecutionProvider"]

    def preload_dlls(self) -> None:
        print(self.printed)

    def InferenceSession(self, *_: object, providers: list[str], enable_fallback: int) -> SimpleNamespace:
        assert not enable_fallback
        if isinstance(self.got, Exception):
            raise self.got
        return SimpleNamespace(get_providers=lambda: self.got)


def test_each_session_takes_what_it_asks_for_and_times_no_algorithms(folders: Folders, machine: Ort) -> None:
    OrtCudaBackend(Bundle.open(folders("fp16")))
    assert len(machine.options) > 4
    wanted = {"arena_extend_strategy": "kSameAsRequested", "cudnn_conv_algo_search": "HEURISTIC", "device_id": "0"}
    assert all(options == {**wanted, "user_compute_stream": "7"} for options in machine.options)


MISSING = "libcublasLt.so.13: cannot open shared object file: No such file or directory"
NOT_LOADED = f"Failed to load libcublasLt.so.13: {MISSING}\nPlease follow the installation page to install CUDA."
CPU = "CPUExecutionProvider"
BOTH = (PROVIDER, CPU)
CARD = Card("a GPU", (9, 0), 80 << 30, (13, 0))
OLD_DRIVER = Card("a GPU", (9, 0), 80 << 30, (12, 4))


@pytest.mark.parametrize(
    ("printed", "gpu", "got", "said"),
    [
        (NOT_LOADED, CARD, (CPU,), rf"does not load: {MISSING}; pip install -U \"vtx-edge\[gpu\]\" installs CUDA"),
        ("", None, BOTH, r"driver is missing or shows no GPU 0; install NVIDIA's driver; in a container"),
        ("", OLD_DRIVER, BOTH, r"needs a driver for CUDA 13.0, the driver here supports CUDA 12.4; update the driver"),
        ("", CARD, (CPU,), r"cannot open the GPU; see what nvidia-smi says"),
        ("", CARD, RuntimeError("CUDA failure 999: unknown"), r"cannot open the GPU: CUDA failure 999: unknown; "),
        ("", CARD, BOTH, None),
        (NOT_LOADED, CARD, BOTH, None),
    ],
    ids=["no-cuda", "no-driver", "old-driver", "silent-cpu", "refused", "answers", "answers-all-the-same"],
)
def test_a_provider_that_does_not_open_the_gpu_is_refused_and_auto_goes_on(
    printed: str,
    gpu: Card | None,
    got: Sequence[str] | Exception,
    said: str | None,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ort_cuda, "load_onnxruntime", lambda: Provided(got, printed))
    for owner in (ort_cuda, host_gpu):
        monkeypatch.setattr(owner, "find_gpu", lambda *_: gpu)
    monkeypatch.setattr(ort_cuda, "version", lambda _: "1.31.1")
    ort_cuda.provider_obstacle.cache_clear()
    bundle = Bundle.open(folders("fp16"))
    try:
        state = OrtCudaBackend.state(Device(None, (CARD,), None))
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


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="builds Linux libraries with cc")
def test_the_providers_library_needs_symbols_of_onnxruntime_and_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in onnxruntime-gpu's wheels: the provider does not name the library that its host's symbol is in."""
    capi = tmp_path / "capi"
    capi.mkdir()
    sources = {"shared": "void *Provider_OnlyTheHostHas(void) { return 0; }", "cuda": CUDA_PROVIDER}
    for part, source in sources.items():
        (capi / f"{part}.c").write_text(source)
        library = capi / f"libonnxruntime_providers_{part}.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, capi / f"{part}.c"], check=True)
    with pytest.raises(OSError, match="undefined symbol: Provider_OnlyTheHostHas"):
        ctypes.CDLL(str(capi / "libonnxruntime_providers_cuda.so"))
    monkeypatch.setattr(Provided, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(ort_cuda, "load_onnxruntime", lambda: Provided(BOTH))
    monkeypatch.setattr(ort_cuda, "find_gpu", lambda *_: CARD)
    ort_cuda.provider_obstacle.cache_clear()
    try:
        assert ort_cuda.provider_obstacle() is None
    finally:
        ort_cuda.provider_obstacle.cache_clear()


CUDA_PROVIDER = "extern void *Provider_OnlyTheHostHas(void); void *(*host)(void) = Provider_OnlyTheHostHas;"


def test_the_second_gpu_is_used_if_it_is_named(folders: Folders, machine: Ort, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (Card("a GPU", (9, 0), 80 << 30, (13, 0)),) * 2
    monkeypatch.setattr(devices, "find_gpus", lambda: gpus)
    monkeypatch.setattr(ort_cuda, "provider_obstacle", lambda number: None if number == 1 else "the wrong one")
    bundle = Bundle.open(folders("fp16"))
    chosen = choose(bundle, "cuda:1")
    assert (chosen.device, chosen.number) == ("cuda", 1)
    machine.gpu.number = 1
    backend = open_backend(bundle, chosen, THREADS)
    assert {options["device_id"] for options in machine.options} == {"1"}
    backend.stage(0, 32).append(TokenStates(np.zeros((2, bundle.manifest.model.hidden), np.float32)), np.arange(2))
    with pytest.raises(DeviceError, match=r"cuda:2 is not there: the NVIDIA driver shows 2 GPUs"):
        choose(bundle, "cuda:2")


def test_a_graph_that_is_loaded_without_the_provider_is_an_error(
    folders: Folders, machine: Ort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort_standin.Session, "get_providers", lambda _: ["CPUExecutionProvider"])
    with pytest.raises(DeviceError, match=r"loaded .* without its CUDAExecutionProvider"):
        OrtCudaBackend(Bundle.open(folders("fp16")), THREADS)


@pytest.mark.gpu
def test_answers_on_a_gpu_are_those_of_the_cpu(folders: Folders) -> None:
    reason = ort_cuda.provider_obstacle()
    if reason is not None:
        assert find_gpu() is None, reason
        pytest.skip(reason)
    ours, reference = opened(folders("fp16")), load(folders("fp16"), device="cpu", threads=THREADS)
    images, messages = [random_image(1)], prompt_messages(QUESTIONS[1])
    want, got = (greedy(model, prompt(model, messages, images), 2, 6) for model in (reference, ours))
    assert got.ids == want.ids
    np.testing.assert_allclose(got.logits, want.logits, atol=6e-2)
