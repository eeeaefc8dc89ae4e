"""Layers that keep a state on the GPU backends: on stand-ins, held against transformers and the CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tests.support import gpu_standin
from tests.support.bundles import export_with
from tests.support.engines import CARD, ORIN, read_together
from tests.support.exported import THREADS, answer, policy, prompt
from tests.support.families.lfm2_vl import LFM2
from tests.support.families.minicpm import MINICPM
from tests.support.families.qwen import QWEN35
from tests.support.fixtures import Checkpoints, References
from tests.support.gpu_standin import Gpu, build_all
from tests.support.near import assert_near
from tests.support.ort_standin import Ort
from tests.support.parity import (
    QUESTIONS,
    assert_changed_turns_go_back,
    assert_chat_as_reference,
    assert_later_equal_fresh,
    assert_rejected_tokens_leave_states,
)
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import MAX_DRAFT, Options
from vtx.runtime.api.stream import AnswerStream
from vtx.runtime.backends.device_history import DeviceStateHistory
from vtx.runtime.backends.ort import backend as ort_backend
from vtx.runtime.backends.ort import cuda as ort_cuda
from vtx.runtime.backends.slots import RECENT
from vtx.runtime.backends.tensorrt import backend as tensorrt
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import names
from vtx.runtime.errors import DeviceError
from vtx.runtime.report.compare import compare
from vtx.runtime.session.session import Session
from vtx.runtime.vision.tokens import TokenStates
from vtx.tools.tensorrt.releases import TENSORRT, Release

TOLERANCE = 1e-4  # as for the engines of the CPU
KS = (2, 3, 5, 8)  # 2 and 8 leave stages without attention
FAMILIES = {"lfm2_vl": LFM2, "qwen3_5": QWEN35, "minicpmv4_6": MINICPM}
LARGE = {"lfm2_vl": (150, 60), "qwen3_5": (150, 100), "minicpmv4_6": (150, 61)}
PATHS = {"rtx": "sm89", "jetpack-6": "jetson-orin", "cuda": None}
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The bundle of a family, in float32, with engines for the stand-ins; each is made once."""
    root = tmp_path_factory.mktemp("states")

    @cache
    def made(family: str) -> Path:
        checkpoint = str(tiny_checkpoint(FAMILIES[family]))
        options = ExportOptions(checkpoint, KS, "fp32", dialects=("ort", "ort-cuda", "trt", "trt10"))
        folder = export_with(options, root / family).folder
        build_all(folder)
        build_all(folder, "jetson-orin", Release(TENSORRT, (10, 3)), "trt10")
        return folder

    return made


def on(path: str, folder: Path, patch: pytest.MonkeyPatch) -> tuple[Model, Gpu]:
    """A bundle on the stand-in of a path."""
    bundle = Bundle.open(folder)
    if path == "cuda":
        machine = Ort(Gpu())
        for module in (ort_backend, ort_cuda):
            patch.setattr(module, "load_onnxruntime", lambda: machine)
        patch.setattr(ort_cuda, "load_driver", lambda: machine.gpu)
        return Model(bundle, ort_cuda.OrtCudaBackend(bundle, THREADS), 0.0, ""), machine.gpu
    gpu, made = Gpu(), gpu_standin.module
    patch.setattr(tensorrt, "load_driver", lambda: gpu)
    patch.setattr(tensorrt, "load_flavour", lambda flavour: made(gpu, gpu_standin.VERSION, flavour))
    patch.setattr(tensorrt, "find_gpu", lambda *_: CARD if path == "rtx" else ORIN)
    return Model(bundle, tensorrt.TensorrtBackend(bundle), 0.0), gpu


# Each family and each path once; answers alone are compared in each family on each path.
ONCE = [pytest.param(pair, id="-".join(pair)) for pair in zip(FAMILIES, PATHS, strict=True)]
OTHERS = [
    pytest.param((family, path), id=f"{family}-{path}", marks=pytest.mark.slow)
    for family, path in product(FAMILIES, PATHS)
    if (family, path) not in zip(FAMILIES, PATHS, strict=True)
]


@pytest.fixture(params=ONCE)
def opened(
    request: pytest.FixtureRequest, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Model, Gpu]]:
    family, path = request.param
    model, gpu = on(path, folders(family), monkeypatch)
    yield family, model, gpu
    model.close()


@pytest.fixture
def tiny(opened: tuple[str, Model, Gpu]) -> Tiny:
    return FAMILIES[opened[0]]


@pytest.mark.covering(1)
@pytest.mark.parametrize("opened", [*ONCE, *OTHERS], indirect=True)
@pytest.mark.parametrize("k", [None, *KS])
def test_answers_are_transformers_and_of_layers_fed_the_text_alone(
    k: int | None, opened: tuple[str, Model, Gpu], tiny: Tiny, reference: References
) -> None:
    family, model, _ = opened
    judge, images = reference(tiny), [random_image(0, LARGE[family]), random_image(1, (64, 64))]
    messages = prompt_messages(QUESTIONS[1], 2)
    inputs, asked = judge.inputs(messages, images), prompt(model, messages, images)
    assert asked.ids.tolist() == inputs["input_ids"][0].tolist()
    wanted = judge.greedy(inputs, k, 6)
    assert wanted.margin > 2 * TOLERANCE, "this prompt proves nothing: two tokens are too close"
    session = Session(model.backend, model.manifest)
    for _ in range(2):  # also with caches that hold another question's
        found = answer(session, asked, policy(k), 6)
        assert found.argmax(-1).tolist() == wanted.ids
        assert_near(found, wanted.logits, TOLERANCE)
        answer(session, prompt(model, prompt_messages("red?", 2), images), policy(None), 3)


@pytest.mark.parametrize("k", [None, 3])
def test_later_questions_and_turns_go_back_to_the_state_after_the_image(
    k: int | None, opened: tuple[str, Model, Gpu], tiny: Tiny, reference: References
) -> None:
    """Tokens one by one, as the device decodes them, and drafts of prompt lookup."""
    family, model, _ = opened
    images = [random_image(0, LARGE[family])]
    assert_later_equal_fresh(model, images, k, tolerance=TOLERANCE)
    assert_chat_as_reference(model, reference(tiny), images, k, TOLERANCE)


@pytest.mark.parametrize("right", [0, 2, MAX_DRAFT])
def test_rejected_tokens_of_a_draft_leave_the_states_as_they_were(right: int, opened: tuple[str, Model, Gpu]) -> None:
    family, model, _ = opened
    asked = prompt(model, prompt_messages("red?"), [random_image(0, LARGE[family])])
    assert_rejected_tokens_leave_states(model, asked, 3, right)


@pytest.mark.parametrize("back", [1, 3 * RECENT])
def test_a_turn_that_changes_an_earlier_one_goes_back_to_a_state_that_is_held(
    back: int, opened: tuple[str, Model, Gpu]
) -> None:
    family, model, _ = opened
    asked = prompt(model, prompt_messages("red?"), [random_image(0, LARGE[family])])
    assert_changed_turns_go_back(model, asked, back)


@pytest.mark.parametrize("k", ["none", 3])
def test_states_stay_on_the_device_and_the_next_picture_allocates_nothing(
    k: int | str, opened: tuple[str, Model, Gpu]
) -> None:
    """No copy between host and device is as large as a layer's state, at no token and no question."""
    family, model, gpu = opened
    options = Options(12, ignore_eos=True)
    pictures = [random_image(number, LARGE[family]) for number in range(3)]

    def frame(number: int) -> None:
        with model.open([pictures[number]]) as image:
            for question in QUESTIONS:
                image.ask(question, k, options)
        gc.collect()

    frame(0)
    allocated, held = gpu.calls["cuMemAlloc_v2"] + gpu.calls["cuMemHostAlloc"], gpu.used
    frame(1)
    assert gpu.calls["cuMemAlloc_v2"] + gpu.calls["cuMemHostAlloc"] == allocated
    frame(2)
    assert (gpu.calls["cuMemAlloc_v2"] + gpu.calls["cuMemHostAlloc"], gpu.used) == (allocated, held)
    m, per_question = model.manifest, list[dict[str, int]]()
    with model.open([pictures[0]]) as image:
        for count in (8, 9):
            image.ask(QUESTIONS[0], k, Options(count, ignore_eos=True))
            before, copies = gpu.calls.copy(), len(gpu.copies)
            image.ask(QUESTIONS[1], k, Options(count, ignore_eos=True))
            large = [n for way, n in gpu.copies[copies:] if n >= 4 * m.model.state_numbers]
            sides = [way for way, _ in gpu.copies[copies:]]
            found = {"within": gpu.calls["copy_rows"] - before["copy_rows"], "large": len(large)}
            per_question.append(found | {side: sides.count(side) for side in ("in", "out")})
    token = {name: per_question[1][name] - per_question[0][name] for name in per_question[0]}
    assert token["large"] == 0
    stages = len(m.stages)
    stateful = sum(bool(stage.stateful) for stage in m.stages)
    recorded = model.backend.device == "tensorrt" and gpu.graphs
    if model.backend.device == "cuda":
        assert token["within"] == 1 + stages  # hidden states alone: the state is read and written where it is held
    elif recorded:
        assert token["within"] == sum(bool(stage.cached) for stage in m.stages) + stateful
    assert token["out"] == (0 if recorded else 2)


def test_a_run_that_fails_leaves_no_state_behind(opened: tuple[str, Model, Gpu]) -> None:
    _, model, gpu = opened
    random = np.random.default_rng(0)
    rows = random.standard_normal((40, model.manifest.model.hidden)).astype(np.float32)
    cache, alone = (model.backend.stage(0, 64) for _ in range(2))
    for each in (cache, alone):
        each.append(TokenStates(rows[:5]), np.arange(5))
    gpu.errors["copy_rows"] = 719  # of the states that the run has given out
    with pytest.raises(DeviceError):
        cache.append(TokenStates(rows[5:30]), np.arange(5, 30))
    gpu.errors.clear()
    assert cache.length == 5
    found = cache.append(TokenStates(rows[30:]), np.arange(5, 15))
    np.testing.assert_allclose(found, alone.append(TokenStates(rows[30:]), np.arange(5, 15)), atol=TOLERANCE)
    history = cache.states  # type: ignore[attr-defined]
    assert isinstance(history, DeviceStateHistory)
    assert history.nearest(64) == 15, "a state of the run that failed"


def test_a_stage_takes_no_memory_for_states_before_its_first_token(opened: tuple[str, Model, Gpu]) -> None:
    _, model, gpu = opened
    before = gpu.used
    cache = model.backend.stage(0, 64)
    assert gpu.used == before
    assert cache.state_bytes == 0


@pytest.mark.parametrize("family", ["lfm2_vl", "qwen3_5"])
def test_graphs_are_compared_one_by_one_with_the_states_that_they_give_out(family: str, folders: Folders) -> None:
    found = list(compare(Bundle.open(folders(family)), "ort", "trt"))
    assert all(graph.worst.passed for graph in found)
    outputs = [output.tensor for graph in found for output in graph.outputs]
    assert outputs.count(names.STATE_OUT) == 4  # all stages but that of layer 2 have a layer with a state


@pytest.mark.parametrize("opened", [*ONCE, *OTHERS], indirect=True)
def test_conversations_that_decode_together_have_their_own_states(opened: tuple[str, Model, Gpu]) -> None:
    """Prompts of different lengths, images that leave at different K, and more conversations than a Jetson's lanes."""
    family, model, _ = opened

    def streams() -> list[AnswerStream]:
        options = Options(8, ignore_eos=True)
        images = [model.open([random_image(n, LARGE[family])]) for n in range(3)]
        return [image.stream(QUESTIONS[n % 2], (None, *KS)[2 * n], options) for n, image in enumerate(images)]

    alone = [stream.read().token_ids for stream in streams()]
    assert read_together(model, streams()) == alone
