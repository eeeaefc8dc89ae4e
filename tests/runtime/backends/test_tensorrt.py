"""The TensorRT backend over stand-ins that watch every call: its numbers, and its failures."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import gpu_standin
from tests.support.bundles import copy, export_all
from tests.support.engines import DUAL, build_for, open_model, shorten
from tests.support.exported import QUESTIONS, THREADS, greedy, prompt
from tests.support.families.qwen import QWEN2, QWEN3, QWEN25
from tests.support.fixtures import Checkpoints
from tests.support.gpu_standin import Gpu, build_all
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.backends.tensorrt import backend as tensorrt
from vtx.runtime.backends.tensorrt.backend import TensorrtBackend
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import BundleError, DeviceError
from vtx.runtime.host import gpu
from vtx.runtime.vision.tokens import TokenStates
from vtx.tools.tensorrt.releases import TENSORRT, Release

WORDS = [
    "fastv:k=2",
    f"{DUAL},key=0",
    f"{DUAL},key=0,positions=renumber",
    f"{DUAL},key=0.2",
    "cls:keep=0.5",
    "lsm:tau=-1",
    "mustdrop:192,layers=1/2",
    "dart:keep=8",
    "dart:keep=5,k=0",
    "cdpruner:keep=5",
]
STEPS = 6


def engines_of(jetpack: int | None, folder: Path, place: Path, patch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A copy of a bundle whose engines are the card's or JetPack 6's, and the name of their target."""
    made = copy(folder, place / "bundle")
    if jetpack:
        build_for("trt10", made, patch)
    return made, "jetson-orin" if jetpack else "sm89"


JETPACKS = pytest.mark.parametrize("jetpack", [None, 6])


@pytest.mark.sampled
@JETPACKS
@pytest.mark.parametrize("k", [None, 2, 3])
def test_answers_are_those_of_onnxruntime(
    k: int | None, jetpack: int | None, with_engines: Path, request: pytest.FixtureRequest, device: Gpu
) -> None:
    folder = request.getfixturevalue("on_jetpack_6") if jetpack else with_engines
    ours, reference = open_model(folder), load(folder, device="cpu", threads=THREADS)
    for number, question in enumerate(QUESTIONS):
        images = [random_image(number)]
        want = greedy(reference, prompt(reference, prompt_messages(question), images), k, STEPS)
        got = greedy(ours, prompt(ours, prompt_messages(question), images), k, STEPS)
        assert got.ids == want.ids
        np.testing.assert_allclose(got.logits, want.logits, atol=1e-4)


@pytest.mark.parametrize("dialect", ["trt", "trt10"])
@pytest.mark.parametrize("tiny", [QWEN2, QWEN25, QWEN3], ids=lambda tiny: tiny.family)
def test_images_at_their_own_resolution_are_answered_as_on_onnxruntime(
    tiny: Tiny,
    dialect: str,
    tiny_checkpoint: Checkpoints,
    tmp_path: Path,
    device: Gpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "bundle"
    export_all(tiny_checkpoint(tiny), folder, (2,))
    build_for(dialect, folder, monkeypatch)
    ours, reference = open_model(folder), load(folder, device="cpu", threads=THREADS)
    for number, (width, height) in enumerate([(40, 40), (200, 130), (90, 150), (300, 160)]):
        images, k = [random_image(number).resize((width, height))], (None, 2)[number % 2]
        want, got = (greedy(m, prompt(m, prompt_messages("red?"), images), k, STEPS) for m in (reference, ours))
        assert got.ids == want.ids
        np.testing.assert_allclose(got.logits, want.logits, atol=1e-4)
    with (
        ours.open([random_image(5).resize((300, 30))]) as image,
        pytest.raises(DeviceError, match=r"and this engine takes .* a side; use a smaller --max-pixels, --device"),
    ):
        image.ask("red?", "none")


def same_answers(ours: Model, reference: Model, word: str) -> None:
    with ours.open([random_image(5)]) as mine, reference.open([random_image(5)]) as theirs:
        for k in (None, 2, 3):
            for question in QUESTIONS:
                got, want = (talk.ask(question, k, Options(STEPS), reduce=word) for talk in (mine, theirs))
                assert got.token_ids == want.token_ids
                assert got.stats.reduced == want.stats.reduced
                assert got.stats.kv_slots == want.stats.kv_slots


@pytest.mark.sampled(3)
@JETPACKS
@pytest.mark.parametrize("word", WORDS)
def test_reductions_keep_and_answer_as_on_onnxruntime(
    word: str, jetpack: int | None, reducing: Path, tmp_path: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = engines_of(jetpack, reducing, tmp_path, monkeypatch)
    same_answers(open_model(folder), load(folder, device="cpu", threads=THREADS), word)


@JETPACKS
def test_a_rest_is_kept_and_answered_as_on_onnxruntime(
    jetpack: int | None, with_engines: Path, tmp_path: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where prompts run in parts, of which the last holds the token that chooses."""
    folder, target = engines_of(jetpack, with_engines, tmp_path, monkeypatch)
    reference = load(folder, device="cpu", threads=THREADS)
    for part in (None, 4):
        if part is not None:
            shorten(folder, target, part)
        images = [random_image(5)]
        with open_model(folder) as model, model.open(images) as mine, reference.open(images) as theirs:
            for k, rest in ((2, "25%"), (3, "2"), (3, "40%"), (2, "2")):
                for question in QUESTIONS:
                    got, want = (talk.ask(question, k, Options(STEPS, rest=rest)) for talk in (mine, theirs))
                    assert got.token_ids == want.token_ids
                    assert got.stats.reduced == want.stats.reduced
                    assert got.stats.kv_slots == want.stats.kv_slots
                    assert got.stats.rest == want.stats.rest > 0
        del model, mine
        gc.collect()  # its memory goes now, not within a copy of the next one


def test_a_profile_for_decoding_and_one_for_prompts_answer_the_same(
    with_engines: Path, tmp_path: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(with_engines, tmp_path / "bundle")
    build_all(folder, "jetson-thor", Release(TENSORRT, (10, 16)))
    monkeypatch.setattr(tensorrt, "find_gpu", lambda *_: gpu.Gpu("Thor", (11, 0), 1 << 37, (13, 0)))
    ours, reference = open_model(folder), load(with_engines, device="cpu", threads=THREADS)
    assert {len(r.profiles) for g, r in ours.backend.engine_set.engines.items() if g.startswith("stage")} == {2}
    images, messages = [random_image(3)], prompt_messages(QUESTIONS[1])
    want, got = (greedy(m, prompt(m, messages, images), 3, STEPS) for m in (reference, ours))
    assert got.ids == want.ids
    np.testing.assert_allclose(got.logits, want.logits, atol=1e-4)


@pytest.mark.parametrize("query", [False, True])
def test_one_token_takes_the_profile_of_one(
    query: bool, reducing: Path, tmp_path: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a question of one token does; the other profile of the engine begins at two."""
    folder, _ = engines_of(6, reducing, tmp_path, monkeypatch)
    ours, reference = open_model(folder), load(folder, device="cpu", threads=THREADS)
    rows = np.random.default_rng(0).standard_normal((5, ours.manifest.model.hidden)).astype(np.float32)
    number = next(n for n, stage in enumerate(ours.manifest.stages) if stage.query)
    found = []
    for model in (ours, reference):
        cache = model.backend.stage(number, 16)
        cache.append(TokenStates(rows[:4]), np.arange(4))
        last = np.array(cache.append(TokenStates(rows[4:]), np.arange(4, 5), query=query))
        found.append([last, cache.keys(), *(np.array(each) for each in (cache.attention() if query else ()))])
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.slow
def test_one_conversation_goes_on_with_what_it_has(with_engines: Path, device: Gpu) -> None:
    ours, reference = open_model(with_engines), load(with_engines, device="cpu", threads=THREADS)
    with ours.open([random_image(5)]) as mine, reference.open([random_image(5)]) as theirs:
        for k, most in (("none", 20), (2, 20), (3, 20), ("none", 256), (2, 20)):
            for question in QUESTIONS:
                ours_ids, ids = (talk.ask(question, k, max_new_tokens=most).token_ids for talk in (mine, theirs))
                assert ours_ids == ids


def test_logits_that_are_not_finite_are_an_error_and_the_next_question_is_answered(
    with_engines: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(with_engines)
    with model.open([random_image(1)]) as image:
        want = image.ask(QUESTIONS[0], 3, Options(STEPS))
        ran = gpu_standin.Context.run

        def poisoned(context: Any, shapes: Any, addresses: dict[str, int]) -> None:
            if "logits" in addresses and shapes["hidden"][0] == 1 and device.calls["captured enqueue"]:
                gpu_standin.view(addresses["hidden"], shapes["hidden"], np.float32)[...] = np.nan
            ran(context, shapes, addresses)

        with monkeypatch.context() as patch:
            patch.setattr(gpu_standin.Context, "run", poisoned)
            with pytest.raises(BundleError, match="the logits of this answer are not finite numbers; export with"):
                image.ask(QUESTIONS[1], 3, Options(STEPS, ignore_eos=True))
        assert image.ask(QUESTIONS[0], 3, Options(STEPS)).token_ids == want.token_ids


@pytest.mark.parametrize("slots", [[], [0], [0, 1, 2], [1, 3, 4, 8], list(range(9))])
def test_saved_slots_come_back_where_they_are_put(slots: list[int], with_engines: Path, device: Gpu) -> None:
    model = open_model(with_engines)
    random = np.random.default_rng(0)
    first, other = random.standard_normal((2, 9, model.manifest.model.hidden)).astype(np.float32)
    cache = model.backend.stage(1, 16)
    cache.append(TokenStates(first), np.arange(9))
    before = _content(cache, model.manifest)
    saved = cache.read(np.array(slots, np.int64))
    cache.keep(0)
    cache.append(TokenStates(other), np.arange(9))
    expected = _content(cache, model.manifest)
    assert not np.isclose(before[..., :9, :], expected[..., :9, :]).all(-1).any()  # no slot holds what it held
    cache.write(np.arange(len(slots)), saved, length=9)
    expected[..., : len(slots), :] = before[..., slots, :]
    np.testing.assert_array_equal(_content(cache, model.manifest), expected)


def _content(cache: Any, m: Manifest) -> Any:
    shape = (m.stages[1].layers, 2, cache.memory.capacity, m.model.kv_heads, m.model.head_dim)
    return gpu_standin.view(cache.memory.kv.address, shape, np.float32).swapaxes(2, 3).copy()


def test_an_application_may_use_another_gpu(with_engines: Path, device: Gpu) -> None:
    ours, reference = open_model(with_engines), load(with_engines, device="cpu", threads=THREADS)
    device.current = 1
    with ours.open([random_image(5)]) as mine, reference.open([random_image(5)]) as theirs:
        for question in QUESTIONS[:2]:
            assert mine.ask(question, 3).token_ids == theirs.ask(question, 3).token_ids
            assert device.current == 1
    del ours, mine
    gc.collect()
    assert device.current == 1
    assert not device.device


@pytest.mark.parametrize("dialect", ["trt", "trt10"])
def test_addresses_are_aligned_whatever_the_number_of_slots(
    dialect: str, tiny_checkpoint: Checkpoints, tmp_path: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bundle"
    export_all(tiny_checkpoint(Tiny(kv_heads=1)), folder, (2,), max_context=233)
    build_for(dialect, folder, monkeypatch)
    ours, reference = open_model(folder), load(folder, device="cpu", threads=THREADS)
    with ours.open([random_image(5)]) as mine, reference.open([random_image(5)]) as theirs:
        for k in (None, 2):
            for question in QUESTIONS[:2]:
                assert mine.ask(question, k or "none").token_ids == theirs.ask(question, k or "none").token_ids


@JETPACKS
def test_a_prompt_longer_than_the_profile_of_a_stage_runs_in_parts(
    jetpack: int | None, reducing: Path, tmp_path: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, target = engines_of(jetpack, reducing, tmp_path, monkeypatch)
    shorten(folder, target, 4)
    ours, reference = open_model(folder), load(folder, device="cpu", threads=THREADS)
    for word in ("none", "fastv:k=2", f"{DUAL},key=0", "dart:keep=8"):
        same_answers(ours, reference, word)


def test_a_failure_says_what_tensorrt_said(with_engines: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TensorrtBackend(Bundle.open(with_engines))

    def fails(context: Any, stream: int) -> bool:
        threads = [threading.Thread(target=context.engine.logger.log, args=(1, f"reason\n{i}")) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return False

    monkeypatch.setattr(gpu_standin.Context, "execute_async_v3", fails)
    with pytest.raises(
        DeviceError, match=r"cannot run embed\.trt\.engine: reason \d: reason \d: reason \d; run vtx-doctor"
    ):
        backend.embed(np.array([1, 2]))
    backend.cuda.wait()


def test_every_message_of_tensorrt_is_shown_on_demand(
    with_engines: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VTX_TENSORRT_LOG", "1")
    backend = TensorrtBackend(Bundle.open(with_engines))
    backend.engines.runtime.logger.log(4, "Loaded a kernel")
    assert "TensorRT: Loaded a kernel" in capsys.readouterr().err
