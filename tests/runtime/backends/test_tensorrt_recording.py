"""Work of a GPU for a token under the TensorRT backend: recorded once, by vtx or TensorRT-RTX, and then launched."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import gpu_standin
from tests.support.bundles import copy
from tests.support.engines import open_model
from tests.support.exported import QUESTIONS, THREADS, greedy, policy, prompt
from tests.support.gpu_standin import Gpu
from tests.support.tiny import prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.options import Options
from vtx.runtime.backends.cuda import Buffer, Cuda
from vtx.runtime.backends.tensorrt import engine
from vtx.runtime.backends.tensorrt.backend import TensorrtBackend
from vtx.runtime.backends.tensorrt.loaded import LoadedEngines
from vtx.runtime.bundle import fingerprint
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.session.session import Session
from vtx.tools.bench.stopwatch import timed

UNCOUNTED = ("cuCtxGetCurrent", "cuCtxSetCurrent", "copies", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "enqueue")
STEPS = 6


def test_decoding_is_recorded_once_and_launched_from_then_on(on_jetpack_6: Path, device: Gpu) -> None:
    model = open_model(on_jetpack_6)
    asked = prompt(model, prompt_messages(QUESTIONS[0]), [random_image(1)])
    greedy(model, asked, None, 10)
    assert device.calls["cuStreamBeginCapture_v2"] == 1
    assert device.calls["cuGraphLaunch"] == 9 - 1  # all steps but the first


def test_tensorrt_rtx_records_tokens_by_itself(with_engines: Path, device: Gpu) -> None:
    model = open_model(with_engines)
    greedy(model, prompt(model, prompt_messages(QUESTIONS[0]), [random_image(1)]), None, 10)
    assert device.calls["cuStreamBeginCapture_v2"] == 0
    assert device.calls["captured enqueue"] == (2 + len(model.manifest.stages)) * 9  # the embedding and the head too


@pytest.mark.parametrize("jetpack", [None, 6])
def test_a_greedy_token_is_chosen_on_the_device_with_one_wait(
    jetpack: int | None, with_engines: Path, request: pytest.FixtureRequest, device: Gpu
) -> None:
    folder = request.getfixturevalue("on_jetpack_6") if jetpack else with_engines
    ours, reference = open_model(folder), load(folder, device="cpu", threads=THREADS)
    counts = []
    for options in (Options(STEPS), Options(STEPS), Options(STEPS + 3), Options(STEPS, logprobs=True)):
        with ours.open([random_image(5)]) as mine, reference.open([random_image(5)]) as theirs:
            for chat in (mine, theirs):  # what follows runs over memory that has been recorded
                chat.ask(QUESTIONS[1], 3, Options(3, ignore_eos=True))
            device.calls.clear()
            got, want = (chat.ask(QUESTIONS[0], 3, replace(options, ignore_eos=True)) for chat in (mine, theirs))
        assert got.token_ids == want.token_ids
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
        counts.append(device.calls.copy())
    _, few, more, with_logits = counts  # the first takes memory that the others take again
    stages = len(ours.manifest.stages)
    launches = {"captured enqueue": 3 * (stages + 2)} if jetpack is None else {"cuGraphLaunch": 3}
    more.subtract(few)
    further = {name: n for name, n in more.items() if n and name not in UNCOUNTED}
    # K and V of each stage, and without a recording of its own each stage's state, go to the next place on the device
    copies = 3 * (stages if jetpack else 2 * stages)
    assert further == {**launches, "copy_rows": copies, "cuStreamSynchronize": 3}
    assert with_logits["copies"] == few["copies"] + STEPS - 1  # the logits of each step


REFUSALS = ("cuStreamBeginCapture_v2", "execute", "cuStreamEndCapture", "cuGraphInstantiateWithFlags")


@pytest.mark.parametrize("refused", REFUSALS)
def test_what_cannot_be_recorded_is_queued_until_the_next_conversation(
    refused: str, on_jetpack_6: Path, device: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    device.refused = refused
    ours, reference = open_model(on_jetpack_6), load(on_jetpack_6, device="cpu", threads=THREADS)
    for tried in (1, 2):
        with ours.open([random_image(5)]) as mine, reference.open([random_image(5)]) as theirs:
            got, want = (talk.ask(QUESTIONS[0], 3, Options(8, ignore_eos=True)) for talk in (mine, theirs))
            assert got.token_ids == want.token_ids
        assert device.calls["cuStreamBeginCapture_v2"] == tried
        assert (device.calls["cuGraphLaunch"] > 0) == (tried == 2)
        assert caplog.text.count("cannot be recorded into a CUDA graph; this conversation's tokens are queued") == 1
        device.refused = None
        gc.collect()


def test_memory_that_is_freed_while_work_is_recorded_goes_right_after_it(with_engines: Path, device: Gpu) -> None:
    cuda = TensorrtBackend(Bundle.open(with_engines)).cuda
    held = [Buffer(cuda, 64, "a test"), Buffer(cuda, 64, "a test")]
    stays, goes = (each.address for each in held)

    def work() -> None:
        cuda.zero(held[0])
        held.pop()

    with cuda:
        graph = cuda.record(work)
    assert graph is not None
    assert stays in device.device
    assert goes not in device.device


def test_the_collector_rests_while_work_is_recorded(with_engines: Path, device: Gpu) -> None:
    """It may find a context of TensorRT, whose end frees memory of TensorRT's own."""
    cuda = TensorrtBackend(Bundle.open(with_engines)).cuda
    buffer = Buffer(cuda, 64, "a test")
    running = []

    def work() -> None:
        cuda.zero(buffer)
        running.append(gc.isenabled())

    with cuda:
        assert cuda.record(work) is not None
    assert running == [False]
    assert gc.isenabled()


def test_a_timed_backend_lists_the_work_of_each_token(with_engines: Path, device: Gpu) -> None:
    model = open_model(with_engines)
    backend, calls = timed(model.backend)
    session = Session(backend, model.manifest)
    logits = session.prefill(prompt(model, prompt_messages(QUESTIONS[0]), [random_image(1)]), policy(3)).logits
    calls.clear()
    token = session.choose(int(logits.argmax()))
    assert token is not None
    stages = len(model.manifest.stages)
    assert [(call.name, call.stage, call.tokens) for call in calls] == [
        *(("append", number, 1) for number in range(stages)),
        ("head", None, 0),
    ]
    assert [call.filled for call in calls[:-1]] == [cache.length - 1 for cache in session.decoding_caches]


def kernels_of(folder: Path) -> Path:
    """The file of a bundle's compiled kernels, without those of other tests."""
    kernels = folder / "engines/sm89" / fingerprint.KERNELS
    kernels.unlink(missing_ok=True)
    return kernels


def compiled_by(device: Gpu, folder: Path) -> int:
    """The number of kernels that are compiled for a question."""
    device.calls.clear()
    with load(folder, device="tensorrt") as model, model.open([random_image(1)]) as image:
        image.ask("red?", 2, reduce="none", max_new_tokens=4)
    return device.calls["compile"]


def test_tensorrt_rtx_compiles_its_kernels_once_for_a_card(
    with_engines: Path, tmp_path: Path, device: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy(with_engines, tmp_path / "bundle")
    kernels = kernels_of(folder)
    compiled = partial(compiled_by, device, folder)
    first = compiled()
    assert first > 4
    content = kernels.read_bytes()
    assert compiled() == 0
    assert kernels.read_bytes() == content
    caplog.set_level("INFO")
    device.driver = 570  # an older one, under which they are compiled anew
    assert compiled() == first
    assert "is of another GPU, driver or release: kernels are compiled anew" in caplog.text
    assert kernels.read_bytes() != content
    device.driver = 580
    assert compiled() == first
    assert kernels.read_bytes() == content
    kernels.write_bytes(b"damaged")
    assert compiled() == first
    assert not [path for path in kernels.parent.iterdir() if path.name.startswith(".")]
    kernels.unlink()
    kernels.mkdir()  # as a folder that cannot be written
    assert compiled() == first
    assert "compiled kernels are not kept" in caplog.text


def test_more_kernels_than_are_read_are_not_kept(
    with_engines: Path, tmp_path: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(with_engines, tmp_path / "bundle")
    kernels = kernels_of(folder)
    monkeypatch.setattr(engine, "MAX_KERNELS", 10)
    assert compiled_by(device, folder)
    assert not kernels.exists()


def test_kernels_are_not_taken_from_an_unsigned_file_where_a_signature_is_required(
    with_engines: Path, tmp_path: Path, device: Gpu
) -> None:
    folder = copy(with_engines, tmp_path / "bundle")
    kernels = folder / "engines/sm89" / fingerprint.KERNELS
    kernels.write_bytes(b"not signed")
    key: Any = object()
    opened, cuda = Bundle.open(folder), Cuda(device)
    engines = fingerprint.read_engines(opened, "sm89")
    LoadedEngines(replace(opened, key=key), engines, gpu_standin.module(device), cuda).close()
    assert kernels.read_bytes() == b"not signed"
