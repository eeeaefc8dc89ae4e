"""libvtx meets the conformance traces of the Python runtime: ids, kept tokens, slots, positions and logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.bundles import export_with, write_gate
from tests.support.cabi import Loaded
from tests.support.cpp import DEVICES, needs_cpp, needs_openvino, write_pictures
from tests.support.exported import THREADS
from tests.support.families.paligemma import PALIGEMMA
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny
from tests.support.traces import REDUCTIONS, meets
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.report.traces.compare import compare_traces
from vtx.runtime.report.traces.files import read_index
from vtx.runtime.report.traces.record import write_traces

pytestmark = needs_cpp


SAME = 1e-4  # of logits, as a share of their largest magnitude, where both runtimes compute alike
FEW = REDUCTIONS[0], REDUCTIONS[2]  # where another engine or precision is in question, not the methods


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gate before layer 3 that fires for some of the questions and not for others."""
    return write_gate(tmp_path_factory.mktemp("gates"), 168)


def test_every_policy_meets_its_traces(tiny_checkpoint: Checkpoints, gates: Path, tmp_path: Path) -> None:
    assert meets(tiny_checkpoint(), tmp_path, "fp32", ks=(3,), gates=gates) > 100
    cases = {(case.k, case.reduce): case for case in read_index(tmp_path / "cpp").cases}
    assert {question.k for question in cases["auto", "none"].questions} == {None, 3}, "the gate decides alike for all"


def test_gates_are_told_where_python_tells_them(tiny_checkpoint: Checkpoints, gates: Path, tmp_path: Path) -> None:
    """Not again in a turn that had to run the chat's first question again, after another question."""
    options = ExportOptions(str(tiny_checkpoint()), (3,), "fp32", gates=gates)
    bundle = export_with(options, tmp_path / "bundle").folder
    [picture] = write_pictures(tmp_path, [(60, 60)])
    questions, turns = ("red?", "What is it?", "Where is it?", "And now?"), (0, 1, 3)
    library = Loaded(bundle, "cpu")
    found = library.ask([picture], questions, ["auto"] * 4, turns, max_new_tokens=4)
    library.close()
    with load(bundle, device="cpu", threads=THREADS) as model, model.open(picture) as conversation:
        chat = conversation.chat("auto")
        for number, (question, answer) in enumerate(zip(questions, found, strict=True)):
            if number in turns:
                want = chat.ask(question, max_new_tokens=4)
            else:
                want = conversation.ask(question, "auto", max_new_tokens=4)
            assert answer["token_ids"] == list(want.token_ids), question
            assert len(answer["gate"]) == len(want.stats.gate or ()) == (number in (0, 2)), question


@DEVICES
def test_prompts_that_see_themselves_both_ways_meet_their_traces(
    tiny_checkpoint: Checkpoints, tmp_path: Path, device: str
) -> None:
    reductions = ("divprune:keep=0.3",)
    checkpoint = tiny_checkpoint(PALIGEMMA)
    assert meets(checkpoint, tmp_path, "fp32", device=device, reductions=reductions, limit=SAME) > 30


@pytest.mark.slow
@DEVICES
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_prompts_that_see_themselves_both_ways_meet_their_traces_at_other_precisions(
    tiny_checkpoint: Checkpoints, tmp_path: Path, precision: str, device: str
) -> None:
    kv = "int8" if precision == "int8" else None
    assert meets(tiny_checkpoint(PALIGEMMA), tmp_path, precision, kv=kv, device=device, reductions=()) > 10


@pytest.mark.slow
@needs_openvino
def test_policies_meet_their_traces_on_openvino(tiny_checkpoint: Checkpoints, gates: Path, tmp_path: Path) -> None:
    """Every third of them, for what they choose does not depend on engines."""
    checkpoint = tiny_checkpoint(Tiny(kv_heads=4, tokenizer="bytes"))
    assert meets(checkpoint, tmp_path, "fp32", ks=(3,), device="openvino", reductions=REDUCTIONS[::3], gates=gates) > 50


@pytest.mark.slow
@needs_openvino
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_products_of_integers_meet_their_traces(
    tiny_checkpoint: Checkpoints, gates: Path, tmp_path: Path, precision: str,
    needs_arithmetic: Callable[[str], None],
) -> None:  # fmt: skip
    """Much closer than arithmetic in float32 would: both runtimes round the same hidden states."""
    needs_arithmetic("int8")
    checkpoint = tiny_checkpoint(Tiny(kv_heads=4, tokenizer="bytes"))
    asked = meets(
        checkpoint, tmp_path, precision, ks=(3,), device="openvino", reductions=FEW, gates=gates, compute="int8",
        limit=SAME,
    )  # fmt: skip
    assert asked > 50
    plain = load(tmp_path / "bundle", device="openvino", compute="f32", threads=THREADS)
    write_traces(plain, tmp_path / "f32")
    checks = list(compare_traces(tmp_path / "python", tmp_path / "f32", SAME))
    assert not all(check.passed for check in checks), "the arithmetic cannot be told"


@pytest.mark.slow
@DEVICES
def test_int8_caches_meet_their_traces(tiny_checkpoint: Checkpoints, tmp_path: Path, device: str) -> None:
    assert meets(tiny_checkpoint(), tmp_path, "fp16", kv="int8", device=device, reductions=FEW) > 50
