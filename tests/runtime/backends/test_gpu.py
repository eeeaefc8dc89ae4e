"""Engines built and run on this machine's own GPU; `make test-gpu`. Elsewhere every test is skipped in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.bundles import IGNORE, export_all
from tests.support.cpp import needs_cpp, run
from tests.support.exported import THREADS, greedy, prompt
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.host.gpu import find_gpu
from vtx.tools.tensorrt.build import build_engines, plan_engines
from vtx.tools.tensorrt.targets import find_target, load_tensorrt

pytestmark = pytest.mark.gpu
TOLERANCE = {"fp32": 1e-3, "fp16": 6e-2, "int8": 6e-2, "int4": 6e-2}
SHAPES = {  # heads as in published models; 3 x 64 halves are no multiple of the 256 bytes that TensorRT wants
    "64": Tiny(layers=4, hidden=384, heads=6, kv_heads=3, head_dim=64, ffn=512),
    "128": Tiny(layers=4, hidden=512, heads=4, kv_heads=2, head_dim=128, ffn=768),
}
CONTEXT = 233  # no multiple of anything
FRAMES = 200
FASTV = "fastv:k=2"


@pytest.fixture(scope="module", params=[f"{precision}-{shape}" for precision in TOLERANCE for shape in SHAPES])
def bundle(
    request: pytest.FixtureRequest, tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    """A tiny bundle with engines for this GPU."""
    if find_gpu() is None and "VTX_TEST_GPU" not in os.environ:
        pytest.skip("there is no NVIDIA GPU here")
    target = find_target("this")
    module, release = load_tensorrt(target)
    precision, shape = request.param.split("-")
    folder = tmp_path_factory.mktemp("gpu") / request.param
    made = export_all(
        tiny_checkpoint(SHAPES[shape]), folder, (2, 3), precision, max_context=CONTEXT, reductions=(FASTV,)
    )
    list(build_engines(plan_engines(made, target, release, module.__version__, release.dialect), IGNORE))
    return made


@pytest.mark.parametrize("k", [None, 2, 3])
def test_answers_are_those_of_onnxruntime_on_the_cpu(k: int | None, bundle: Bundle) -> None:
    ours, reference = (load(bundle.folder, device=device, threads=THREADS) for device in ("tensorrt", "cpu"))
    for number in range(3):
        images, messages = [random_image(number)], prompt_messages("How many circle shapes are there?")
        want = greedy(reference, prompt(reference, messages, images), k, 8)
        got = greedy(ours, prompt(ours, messages, images), k, 8, forced=want.ids)
        largest = np.abs(want.logits).max()
        np.testing.assert_allclose(got.logits, want.logits, atol=TOLERANCE[bundle.manifest.precision] * largest)


def test_a_second_question_on_the_image_is_answered_as_a_first_one(bundle: Bundle) -> None:
    model = load(bundle.folder, device="tensorrt", threads=THREADS)
    with model.open([random_image(1)]) as image:
        answers = [image.ask("red?", k, reduce="none").token_ids for k in ("none", 2, "none", 3, 2)]
    assert answers[0] == answers[2]
    assert answers[1] == answers[4]


def test_a_reduction_that_reads_attention_keeps_what_it_keeps_on_the_cpu(bundle: Bundle) -> None:
    kept = []
    for device in ("tensorrt", "cpu"):
        with load(bundle.folder, device=device, threads=THREADS).open([random_image(1)]) as image:
            kept.append(image.ask("red?", "none", reduce=FASTV, max_new_tokens=1).stats.kv_slots)
    assert kept[0] == kept[1]


def test_two_conversations_side_by_side_answer_as_one_after_the_other(bundle: Bundle) -> None:
    model, questions = (
        load(bundle.folder, device="tensorrt", threads=THREADS),
        ("red?", "How many circle shapes are there?"),
    )
    alone = []
    for number, question in enumerate(questions):
        with model.open([random_image(number)]) as image:
            alone.append(image.ask(question, 2, reduce="none", max_new_tokens=16, ignore_eos=True).token_ids)
    with model.open([random_image(0)]) as first, model.open([random_image(1)]) as second:
        for _ in range(2):
            for image, question, want in zip((first, second), questions, alone, strict=True):
                assert image.ask(question, 2, reduce="none", max_new_tokens=16, ignore_eos=True).token_ids == want


def test_memory_is_flat_over_frames_and_what_left_the_decoder_left_it(bundle: Bundle) -> None:
    model = load(bundle.folder, device="tensorrt", threads=THREADS)
    free = []
    for frame in range(FRAMES):
        with model.open([random_image(frame % 8)]) as image:
            whole = image.ask("red?", "none", reduce="none", max_new_tokens=4).stats
            cut = image.ask("red?", 2, reduce="none", max_new_tokens=4).stats
        free.append(model.backend.cuda.memory()[0])  # type: ignore[attr-defined]
    assert sum(cut.kv_slots) < sum(whole.kv_slots)
    assert free[FRAMES // 10] - free[-1] < 64 << 20  # of kernels that were compiled meanwhile


@needs_cpp
def test_libvtx_answers_as_python_does(bundle: Bundle, tmp_path: Path) -> None:
    random_image(1).save(tmp_path / "a.png")
    words = ("--k", "2", "--reduce", "none", "--max-new-tokens", "8", "--ignore-eos")
    done = run("run", "--bundle", bundle.folder, "--device", "tensorrt", "--json", tmp_path / "a.png", "red?", *words)
    if b"libvtx does not run engines of TensorRT-RTX" in done.stderr:
        pytest.skip(done.stderr.decode())
    assert done.returncode == 0, done.stderr
    with load(bundle.folder, device="tensorrt", threads=THREADS).open([random_image(1)]) as image:
        want = image.ask("red?", 2, reduce="none", max_new_tokens=8, ignore_eos=True)
    assert json.loads(done.stdout)["token_ids"] == list(want.token_ids)
