"""The TensorRT backend on machines that do not fit, and the choice of the device, over stand-ins."""

from __future__ import annotations

import gc
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import gpu_standin
from tests.support.bundles import copy
from tests.support.engines import CARD, ORIN, open_model, rewrite
from tests.support.exported import QUESTIONS, THREADS, greedy, prompt
from tests.support.gpu_standin import Gpu, build_all
from tests.support.tiny import prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.backends import cuda
from vtx.runtime.backends.devices import choose
from vtx.runtime.backends.tensorrt import backend as tensorrt
from vtx.runtime.backends.tensorrt.backend import TensorrtBackend
from vtx.runtime.bundle import fingerprint
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.seal import write_sealed
from vtx.runtime.errors import BundleError, ContextError, DeviceError
from vtx.runtime.report.compare import compare, first_difference
from vtx.runtime.units import size
from vtx.runtime.vision.tokens import TokenStates
from vtx.tools.tensorrt.releases import RTX, TENSORRT

# --- what does not fit ----------------------------------------------------------------------------


@pytest.fixture
def bundle(with_engines: Path, tmp_path: Path) -> Path:
    folder = copy(with_engines, tmp_path / "bundle")
    build_all(folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"version": "1.6.0"},
            r"built for TensorRT-RTX 1\.6\.0 and compute capability 8\.9; here is TensorRT-RTX 1\.7\.1",
        ),
        ({"capability": (12, 0)}, r"built for .* compute capability 12\.0; here is .* 8\.9 \(RTX 4090\)"),
    ],
    ids=["version", "card"],
)
def test_engines_of_another_machine_are_named_with_the_command_that_fixes_it(
    changes: dict[str, Any], said: str, bundle: Path, device: Gpu
) -> None:
    rewrite(bundle, **changes)
    with pytest.raises(DeviceError, match=said + rf".*vtx-build --bundle {bundle} --target this"):
        open_model(bundle)


def test_engines_of_a_flavour_that_is_not_installed_say_what_to_install(
    bundle: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, TENSORRT, None)
    rewrite(bundle, flavour=TENSORRT)
    with pytest.raises(DeviceError, match=r'TensorRT is not installed; pip install "vtx-edge\[tensorrt\]"'):
        TensorrtBackend(Bundle.open(bundle), gpu=CARD)


def test_a_bundle_without_engines_says_how_to_build_them(with_engines: Path, tmp_path: Path, device: Gpu) -> None:
    import shutil

    folder = copy(with_engines, tmp_path / "bundle")
    shutil.rmtree(folder / "engines")
    with pytest.raises(BundleError, match=rf"holds no engines; build them with: vtx-build --bundle {folder} --target"):
        open_model(folder)


def test_a_machine_without_a_gpu_says_so(bundle: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "find_gpu", lambda *_: None)
    with pytest.raises(DeviceError, match="no NVIDIA GPU answers here: its driver is not installed"):
        open_model(bundle)


OLDER = r"is for CUDA 13, NVIDIA's driver here supports CUDA 12\.\d; install driver 580 or newer"
EITHER = r"; or remove tensorrt-cu13 and tensorrt-cu12, then .*pip install .*tensorrt-cu12$"


@pytest.mark.parametrize(
    ("cuda", "wheels", "said"),
    [
        ((12, 2), ["tensorrt-rtx-cu13"], f"this TensorRT-RTX {OLDER}$"),
        ((12, 8), ["tensorrt-rtx-cu13"], f"this TensorRT-RTX {OLDER}$"),
        ((12, 8), ["tensorrt-cu13"], f"this TensorRT {OLDER}{EITHER}"),
        ((12, 8), ["tensorrt-cu12", "tensorrt-cu13"], f"this TensorRT {OLDER}{EITHER}"),
        ((12, 8), ["tensorrt-cu12"], None),
        ((13, 0), ["tensorrt-cu12", "tensorrt-cu13"], None),
        ((13, 0), ["tensorrt-rtx-cu13"], None),
    ],
    ids=["535", "570", "570-tensorrt", "570-two-releases", "570-cuda-12", "580-two-releases", "580"],
)
def test_a_driver_older_than_the_cuda_of_tensorrt_is_one_error(
    cuda: tuple[int, int],
    wheels: list[str],
    said: str | None,
    bundle: Path,
    device: Gpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensorrt, "find_gpu", lambda *_: replace(CARD, cuda=cuda))
    monkeypatch.setattr(tensorrt, "version", lambda name: "1.7.1" if name in wheels else None)
    rewrite(bundle, flavour=RTX if "rtx" in wheels[0] else TENSORRT)
    with nullcontext() if said is None else pytest.raises(DeviceError, match=said):
        open_model(bundle)


def test_an_engine_cut_short_is_named(bundle: Path, device: Gpu) -> None:
    path = bundle / "engines/sm89/head.trt.engine"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(BundleError, match=r"head\.trt\.engine holds .* bytes of .*, it is cut short; build them with"):
        open_model(bundle)


def test_an_engine_that_tensorrt_refuses_is_named_with_its_reason(bundle: Path, device: Gpu) -> None:
    path = bundle / "engines/sm89/head.trt.engine"
    path.write_bytes(b"not an engine")
    found = fingerprint.read_engines(Bundle.open(bundle), "sm89")
    record = replace(found.engines["head.trt.onnx"], bytes=13, sha256=_sha256(path))
    rewrite(bundle, engines={**found.engines, "head.trt.onnx": record})
    with pytest.raises(BundleError, match=r"does not take head\.trt\.engine: .*stdArchiveReader failed; build them"):
        open_model(bundle)


def test_ids_outside_the_vocabulary_reach_no_engine(with_engines: Path, device: Gpu) -> None:
    bundle = Bundle.open(with_engines)
    backend = TensorrtBackend(bundle)
    for wrong in (-1, bundle.manifest.model.vocab):
        with pytest.raises(BundleError, match=f"token {wrong} does not exist"):
            backend.embed(np.array([1, wrong]))


def _sha256(path: Path) -> str:
    from vtx.runtime.bundle.bundle import sha256

    return sha256(path)


def test_engines_of_another_bundle_are_named(bundle: Path, device: Gpu) -> None:
    found = fingerprint.read_engines(Bundle.open(bundle), "sm89")
    graph = "embed.trt.onnx"
    record = replace(found.engines[graph], sources={**found.engines[graph].sources, graph: "0" * 64})
    rewrite(bundle, engines={**found.engines, graph: record})
    with pytest.raises(BundleError, match=r"was built from another embed\.trt\.onnx than this bundle's"):
        open_model(bundle)


def test_a_prompt_longer_than_the_profile_says_the_longest_that_fits(bundle: Path, device: Gpu) -> None:
    found = fingerprint.read_engines(Bundle.open(bundle), "sm89")
    changed = {}
    for graph, record in found.engines.items():
        profiles = tuple({k: (1, 1, 7) if k == "tokens" else v for k, v in p.items()} for p in record.profiles)
        changed[graph] = replace(record, profiles=profiles)
    rewrite(bundle, engines=changed)
    model = open_model(bundle)
    with pytest.raises(ContextError, match=r"takes \d+ tokens at once, the engine of .* was built for at most 7"):
        greedy(model, prompt(model, prompt_messages(QUESTIONS[2]), [random_image(1)]), None, 1)


def test_too_little_device_memory_says_how_much_and_what_would_fit(bundle: Path, device: Gpu) -> None:
    device.total = 10
    with pytest.raises(
        DeviceError,
        match=r"the engines take .* and K/V of one image and a question, \d+ slots, .*; 10 B of 10 B .*is free",
    ):
        open_model(bundle)


def test_memory_that_others_use_on_the_gpu_is_not_free(bundle: Path, device: Gpu) -> None:
    """A GPU that is large enough, but another program leaves less than the caches need."""
    manifest = Bundle.open(bundle).manifest
    caches = manifest.model.layers * manifest.max_context * manifest.kv_slot_bytes()
    device.total = 4 * caches
    device.device[1] = bytearray(device.total - caches // 20)
    with pytest.raises(DeviceError, match=rf"{size(caches // 20)} of {size(device.total)} of the device is free"):
        open_model(bundle)


def test_the_page_cache_in_memory_that_gpu_and_host_share_is_free(
    bundle: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Jetson just after a bundle was copied: CUDA reports next to nothing as free."""
    device.page_cache = device.total - device.used - 1000
    monkeypatch.setattr(cuda, "available_memory", lambda: 2000)
    with pytest.raises(DeviceError, match=rf"2 kB of {size(device.total)} of the device is free"):
        open_model(bundle)
    monkeypatch.setattr(cuda, "available_memory", lambda: 10 * device.total)
    assert open_model(bundle).backend.cuda.memory() == (device.total, device.total)


def test_memory_that_runs_out_later_says_for_what(bundle: Path, device: Gpu) -> None:
    model = open_model(bundle)
    device.total = device.used
    with pytest.raises(DeviceError, match=r"the KV cache of layers 1 to 1 needs .* of device memory, 0 B? ?.*is free"):
        model.backend.stage(0, 16).append(
            TokenStates(np.zeros((2, model.manifest.model.hidden), np.float32)), np.arange(2)
        )


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"format": 1}', '{"format": true}', "{" * 100],
    ids=["empty", "list", "nothing", "half", "bool", "deep"],
)
def test_a_damaged_record_is_said_so(content: str, bundle: Path) -> None:
    write_sealed(bundle / "engines/sm89/engines.json", content.encode())
    with pytest.raises(BundleError, match=r"engines\.json"):
        fingerprint.read_engines(Bundle.open(bundle), "sm89")


def test_an_engine_outside_of_the_bundle_is_refused(bundle: Path) -> None:
    found = fingerprint.read_engines(Bundle.open(bundle), "sm89")
    graph = "embed.trt.onnx"
    rewrite(bundle, engines={**found.engines, graph: replace(found.engines[graph], file="../../../x")})
    with pytest.raises(BundleError, match="leaves the bundle"):
        fingerprint.read_engines(Bundle.open(bundle), "sm89")
    outside = bundle.parent / "outside"
    outside.write_bytes(b"x")
    path = bundle / "engines/sm89" / found.engines[graph].file
    path.unlink()
    path.symlink_to(outside)
    with pytest.raises(BundleError, match="is a link that leaves the bundle"):
        fingerprint.open_engine(Bundle.open(bundle), found, found.engines[graph])


# --- the stand-in itself --------------------------------------------------------------------------


def test_the_stand_in_sees_a_second_binding_and_memory_that_is_gone(with_engines: Path, device: Gpu) -> None:
    backend = TensorrtBackend(Bundle.open(with_engines))
    backend.embed(np.array([1, 2]))
    engines = backend.engines
    context = engines.context("embed.trt.onnx", 0).execution
    with pytest.raises(AssertionError, match="hidden is bound twice"):
        context.set_tensor_address("hidden", engines.address("hidden"))
    device.cuMemFree_v2(engines.address("hidden"))
    with pytest.raises(AssertionError, match="are not device memory"):
        backend.cuda.copy_out(np.zeros(1, np.float32), engines.address("hidden"))
    engines.buffers["hidden"].free.detach()


# --- the choice of the device ---------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["tensorrt", "auto"])
def test_a_bundle_with_engines_for_this_machine_is_answered_there(
    asked: str, with_engines: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vtx.runtime.backends.devices.find_gpu", lambda *_: CARD)
    model = load(with_engines, device=asked, threads=THREADS)
    assert (model.backend.device, model.backend.compute) == ("tensorrt", "f32")
    with model.open([random_image(1)]) as image:
        assert image.ask(QUESTIONS[0]).stats.device == "tensorrt"


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ({"cuStreamCreate": 100}, r"no NVIDIA GPU is visible; see nvidia-smi"),
        ({"cuMemcpyHtoDAsync_v2": 719}, r"does not answer this process any more; start it again"),
        (20_000, r"the engines take .* of the device is free; export with a smaller --precision"),
        (270_000, r"needs .* of device memory, .* is free; end other programs on the GPU"),
    ],
    ids=["hidden", "gone", "small", "shared"],
)
def test_auto_goes_on_where_a_load_fails_on_the_gpu(
    failure: dict[str, int] | int, said: str, with_engines: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vtx.runtime.backends.devices.find_gpu", lambda *_: CARD)
    if isinstance(failure, int):
        device.total = failure
    else:
        device.errors = failure
    with pytest.raises(DeviceError, match=said):
        load(with_engines, device="tensorrt", threads=THREADS)
    with load(with_engines, threads=THREADS) as model:
        assert model.backend.device in ("cpu", "openvino")
        assert re.search(said, model.loaded.why)
    device.errors.clear()
    gc.collect()
    assert not device.device


def test_a_device_that_falls_away_in_an_answer_is_one_error_each_time(bundle: Path, device: Gpu) -> None:
    model = open_model(bundle)
    with model.open([random_image(1)]) as image:
        stream = image.stream(QUESTIONS[0], max_new_tokens=20, ignore_eos=True)
        next(stream)
        device.lost = 719
        said = r"the GPU does not answer this process any more; start it again, and see nvidia-smi and dmesg"
        with pytest.raises(DeviceError, match=said):
            list(stream)
        with pytest.raises(DeviceError, match=said):
            image.ask(QUESTIONS[0])
    model.close()


def test_memory_that_runs_out_in_an_answer_leaves_the_conversation_usable(bundle: Path, device: Gpu) -> None:
    model = open_model(bundle)
    with model.open([random_image(1)]) as image:
        before = image.ask(QUESTIONS[0], 2, max_new_tokens=4, ignore_eos=True)
        device.total = device.used  # another process takes the rest
        refused = r"(KV cache of layers .* needs .* of device memory, .* is free|makes no context for .*); end other"
        with pytest.raises(DeviceError, match=refused):
            image.ask(QUESTIONS[0], 2, max_new_tokens=90, ignore_eos=True)
        device.total = 1 << 32
        assert image.ask(QUESTIONS[0], 2, max_new_tokens=4, ignore_eos=True).token_ids == before.token_ids


def test_the_second_gpu_is_used_if_it_is_named(
    with_engines: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in refuses every call for another device; the application's own stays the first."""
    device.number = 1
    monkeypatch.setattr("vtx.runtime.backends.devices.find_gpus", lambda: (ORIN, CARD))
    monkeypatch.setattr(tensorrt, "find_gpu", lambda number: (ORIN, CARD)[number])
    device.current = 0
    model = load(with_engines, device="tensorrt:1", threads=THREADS)
    with model.open([random_image(1)]) as image:
        assert image.ask(QUESTIONS[0]).text
    assert device.current == 0
    with pytest.raises(DeviceError, match="tensorrt:2 is not there: the NVIDIA driver shows 2 GPUs"):
        load(with_engines, device="tensorrt:2", threads=THREADS)


@pytest.mark.parametrize(
    "name", ["cpu:0", "openvino:1", "auto:1", "cuda:", "cuda:-1", "cuda:x", "tensorrt:9999", "gpu:1"]
)
def test_only_a_gpu_has_a_number(name: str, with_engines: Path) -> None:
    with pytest.raises(DeviceError, match=re.escape(repr(name))):
        choose(Bundle.open(with_engines), name)


def test_engines_are_compared_with_onnxruntime_graph_by_graph(
    reducing: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vtx.runtime.backends.devices.find_gpu", lambda *_: CARD)
    graphs = list(compare(Bundle.open(reducing), "ort", "tensorrt"))
    assert first_difference(graphs) is None
    stages = Bundle.open(reducing).manifest.dialects["trt"].stages
    assert {"vision.trt.onnx", "embed.trt.onnx", *stages, "head.trt.onnx"} < {graph.graph for graph in graphs}
    assert max(graph.worst.difference for graph in graphs) > 0


def test_engines_that_do_not_fit_are_told_of_when_asked_for_and_passed_over_otherwise(
    with_engines: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt, "find_gpu", lambda *_: None)
    with pytest.raises(DeviceError, match="no NVIDIA GPU answers here"):
        load(with_engines, device="tensorrt", threads=THREADS)
    model = load(with_engines, threads=THREADS)
    assert model.backend.device == "cpu"
    assert "no NVIDIA GPU answers here" in model.loaded.why


def test_where_nothing_is_installed_the_package_is_named_that_answers_here(
    with_engines: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages for engines help where there is a GPU, and nowhere else."""
    bundle = Bundle.open(with_engines)
    monkeypatch.setattr("vtx.runtime.backends.devices.find_spec", lambda _: None)
    monkeypatch.setattr("vtx.runtime.backends.devices.find_gpu", lambda *_: None)
    with pytest.raises(DeviceError, match=r'onnxruntime is not installed; pip install "vtx-edge\[cpu\]"') as refused:
        choose(bundle)
    assert "rtx" not in str(refused.value)
    assert "there is none here" in str(refused.value)
    monkeypatch.setattr("vtx.runtime.backends.devices.find_gpu", lambda *_: CARD)
    with pytest.raises(DeviceError, match=r'pip install "vtx-edge\[rtx\]"'):
        choose(bundle)


def test_a_context_that_finds_no_memory_says_so_and_unused_memory_makes_room_for_it(
    with_engines: Path, device: Gpu
) -> None:
    model = open_model(with_engines)
    rows = TokenStates(np.zeros((2, model.manifest.model.hidden), np.float32))
    caches = [model.backend.stage(0, 32) for _ in range(2)]
    for cache in caches:
        cache.append(rows, np.arange(2))
    room = caches[0].memory.kv.nbytes + gpu_standin.CONTEXT  # type: ignore[attr-defined]
    device.total = device.used + room - 1
    third = model.backend.stage(0, 32)
    with pytest.raises(DeviceError, match=r"no context for .*: cannot allocate the memory of a context; end other"):
        third.append(rows, np.arange(2))
    assert third.length == 0
    del caches, cache
    third.append(rows, np.arange(2))
    assert third.length == 2
