"""Gates: what a file may hold, and that a bundle decides and answers as plain PyTorch does with the same weights."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from numpy.typing import NDArray

from tests.support.exported import THREADS
from tests.support.fixtures import Checkpoints, References
from tests.support.gates import HIDDEN, KS, LAYERS, WIDTH, Pair, certain_gate, plan_with_gates, random_gate, write_gates
from tests.support.reference import Inputs, Reference
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx import cli
from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.exporter.graphs.gates import FEATURES, MAX_METADATA, Gates, read_gates
from vtx.runtime.api.answer import Answer
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.safetensors import write_safetensors
from vtx.runtime.errors import BundleError, CheckpointError, RequestError
from vtx.runtime.policies import Boundary
from vtx.runtime.policies.methods.gate import Gate

TINY = Tiny()
STEPS = 8
OPTIONS = Options(max_new_tokens=STEPS, ignore_eos=True)
QUESTIONS = ("red?", "How many circle shapes are there?", "What is the colour of the square?", "which is left")
IMAGE = random_image(1)


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoints) -> Callable[..., Model]:
    """`gated(pairs, ks)`: a bundle with these gates, loaded."""

    def make(pairs: Mapping[int, Pair], ks: Any = KS) -> Model:
        folder = tmp_path_factory.mktemp("gated")
        planned = plan_with_gates(tiny_checkpoint(TINY), write_gates(folder / "g.safetensors", pairs), ks)
        return load(run_export(planned, folder / "bundle", force=False, report=lambda *_: None).folder, threads=THREADS)

    return make


RANDOM = {k: random_gate(20 + k) for k in KS}


@pytest.fixture(scope="module")
def coins(gated: Callable[..., Model]) -> Model:
    return gated(RANDOM)


# ---- the plain statement ---------------------------------------------------------------------------------------------


class Stated(NamedTuple):
    """What plain PyTorch says: the K, the probabilities of the gates asked, and the ids."""

    k: int | None
    odds: list[float]
    ids: list[int]


def plain_odds(pair: Pair, rows: torch.Tensor) -> float:
    """The probability of withdrawal for the question's rows [n, hidden]."""
    mean = rows[:-1].mean(0) if len(rows) > 1 else torch.zeros_like(rows[0])
    first, second = map(torch.from_numpy, pair)
    hidden = F.gelu(torch.cat((mean, rows[-1])) @ first.T, approximate="none")
    return float((hidden @ second.T).softmax(-1)[1])


@torch.inference_mode()
def stated(judge: Reference, inputs: Inputs, pairs: Mapping[int, Pair], threshold: float = 0.5) -> Stated:
    rows, vision = judge.prompt(inputs)
    front = int(vision.nonzero()[-1]) + 1
    positions, odds, chosen = torch.arange(rows.shape[1])[None], list[float](), None
    for k in sorted(pairs):
        before = judge.run(judge.model.model.language_model.layers[: k - 1], rows, positions)
        odds.append(plain_odds(pairs[k], before[0, front:]))
        if odds[-1] > threshold:
            chosen = k
            break
    return Stated(chosen, odds, judge.greedy(inputs, chosen, STEPS).ids)


def check(answer: Answer, wanted: Stated) -> None:
    assert answer.stats.gate is not None
    assert answer.stats.k == wanted.k
    assert list(answer.token_ids) == wanted.ids
    np.testing.assert_allclose([d.probability for d in answer.stats.gate], wanted.odds, atol=1e-5)


# ---- the graph -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 40])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_graph_is_plain_pytorch(coins: Model, count: int, scale: float) -> None:
    rows = scale * np.random.default_rng(count).standard_normal((count, HIDDEN)).astype(np.float32)
    for k in KS:
        odds = coins.backend.gate(k, rows)
        assert odds.shape == (2,)
        np.testing.assert_allclose(odds[1], plain_odds(RANDOM[k], torch.from_numpy(rows)), atol=1e-5)
        assert odds.sum() == pytest.approx(1, abs=1e-6)


def test_the_graph_uses_the_exact_gelu(gated: Callable[..., Model]) -> None:
    # All channels read the same number, which is where the tanh approximation is furthest off.
    first, second = np.zeros((WIDTH, 2 * HIDDEN), np.float32), np.zeros((2, WIDTH), np.float32)
    first[:, -1], second[1] = 1, -1 / WIDTH
    rows = np.zeros((3, HIDDEN), np.float32)
    rows[-1, -1] = 2.3
    exact, near = (torch.sigmoid(-F.gelu(torch.tensor(2.3), approximate=kind)).item() for kind in ("none", "tanh"))
    assert abs(exact - near) > 2e-5
    assert gated({3: (first, second)}, (3,)).backend.gate(3, rows)[1] == pytest.approx(exact, abs=1e-6)


# ---- decisions and answers -------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", [*KS, None])
def test_the_first_gate_that_fires_decides_wherever_it_stands(
    gated: Callable[..., Model], reference: References, first: int | None
) -> None:
    pairs = {k: certain_gate(first is not None and k >= first) for k in KS}
    model, judge = gated(pairs), reference(TINY)
    for question in QUESTIONS[:2]:
        wanted = stated(judge, judge.inputs(prompt_messages(question), [IMAGE]), pairs)
        with model.open(IMAGE) as image:
            answer = image.ask(question, "auto", OPTIONS)
        check(answer, wanted)
        assert answer.stats.k == first
        assert answer.stats.full_layers == (first - 1 if first else LAYERS)
        assert [d.k for d in answer.stats.gate or ()] == [k for k in KS if first is None or k <= first]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(4))
def test_random_gates_decide_and_answer_as_plain_pytorch(
    gated: Callable[..., Model], reference: References, seed: int
) -> None:
    pairs = {k: random_gate(100 * seed + k) for k in KS}
    model, judge = gated(pairs), reference(TINY)
    for question, images in itertools.product(QUESTIONS, ([IMAGE], [IMAGE, random_image(2)])):
        wanted = stated(judge, judge.inputs(prompt_messages(question, len(images)), images), pairs)
        assert min(abs(p - 0.5) for p in wanted.odds) > 1e-4, "this question proves nothing: a gate is undecided"
        with model.open(images) as opened:
            check(opened.ask(question, "auto", OPTIONS), wanted)


def test_a_text_question_asks_no_gate(gated: Callable[..., Model]) -> None:
    model = gated({k: certain_gate(True) for k in KS})
    answer = model.ask("describe the shape", "auto", OPTIONS)
    assert (answer.stats.k, answer.stats.gate) == (None, ())
    assert answer.token_ids == model.ask("describe the shape", None, OPTIONS).token_ids


def test_the_threshold_moves_the_exit_as_in_the_statement(coins: Model, reference: References) -> None:
    judge, depths = reference(TINY), set()
    inputs = judge.inputs(prompt_messages(QUESTIONS[2]), [IMAGE])
    for threshold in (0.2, 0.4, 0.6, 0.8):
        wanted = stated(judge, inputs, RANDOM, threshold)
        with coins.open(IMAGE) as image:
            check(image.ask(QUESTIONS[2], "auto", Options(STEPS, ignore_eos=True, gate_threshold=threshold)), wanted)
        depths.add(wanted.k)
    assert len(depths) > 1


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan")])
def test_a_threshold_that_is_no_probability_is_refused(coins: Model, threshold: float) -> None:
    with coins.open(IMAGE) as image, pytest.raises(RequestError, match="from 0 to 1"):
        image.ask("red?", "auto", Options(2, gate_threshold=threshold))


def test_a_gate_that_gives_nan_is_an_error_and_no_decision() -> None:
    policy = Gate(lambda *_: np.full(2, np.nan, np.float32), (3,))
    with pytest.raises(BundleError, match="the gate before layer 3 gave nan"):
        policy.keep_mask(Boundary(3, np.zeros((2, 4), np.float32)))


def test_a_chat_keeps_the_depth_that_its_first_turn_chose(coins: Model) -> None:
    with coins.open(IMAGE) as image:
        chat = image.chat("auto")
        first, second = (chat.ask(question, OPTIONS).stats for question in QUESTIONS[:2])
    assert first.gate
    assert second.k == first.k


# ---- what an export takes --------------------------------------------------------------------------------------------


def test_auto_takes_every_layer_that_has_a_gate_and_lets_them_decide(gated: Callable[..., Model]) -> None:
    model = gated({3: certain_gate(False), 6: certain_gate(True), LAYERS + 1: certain_gate(True)}, "auto")
    assert (model.manifest.variants, model.manifest.default_k) == ((3, 6), "auto")
    with model.open(IMAGE) as image:
        assert image.ask("red?", options=OPTIONS).stats.k == 6


def test_named_depths_take_the_gates_they_have(gated: Callable[..., Model]) -> None:
    model = gated({5: certain_gate(True), 7: certain_gate(True)}, (3, 5))
    assert (model.manifest.variants, model.manifest.default_k) == ((3, 5), 3)
    with model.open(IMAGE) as image:
        fixed, auto = image.ask("red?", options=OPTIONS), image.ask("red?", "auto", OPTIONS)
    assert (fixed.stats.k, auto.stats.k) == (3, 5)
    assert [d.k for d in auto.stats.gate or ()] == [5]


def test_no_gate_at_any_named_depth_is_refused(tmp_path: Path, tiny_checkpoint: Checkpoints) -> None:
    gates = write_gates(tmp_path / "g.safetensors", {5: random_gate(0)})
    with pytest.raises(RequestError, match=r"no gate for K = \[3\]; the file has gates for K = \[5\]"):
        plan_with_gates(tiny_checkpoint(TINY), gates, (3,))


def test_a_bundle_without_gates_says_how_to_get_them(tmp_path: Path, tiny_checkpoint: Checkpoints) -> None:
    planned = plan_export(ExportOptions(str(tiny_checkpoint(TINY)), (3,), "fp32"))
    model = load(run_export(planned, tmp_path / "b", force=False, report=lambda *_: None).folder, threads=THREADS)
    with model.open(IMAGE) as image, pytest.raises(RequestError, match="vtx-train-gate"):
        image.ask("red?", "auto")


def test_half_precision_gates_are_widened_exactly(gated: Callable[..., Model]) -> None:
    first, second = (w.astype(np.float16) for w in RANDOM[3])
    model = gated({3: (first, second)}, (3,))
    rows = np.random.default_rng(0).standard_normal((5, HIDDEN)).astype(np.float32)
    wide = first.astype(np.float32), second.astype(np.float32)
    assert model.backend.gate(3, rows)[1] == pytest.approx(plain_odds(wide, torch.from_numpy(rows)), abs=1e-5)


def test_json_tells_of_gates_only_where_they_were_asked_for(coins: Model, tmp_path: Path) -> None:
    IMAGE.save(tmp_path / "a.png")
    base = [str(tmp_path / "a.png"), "red?", "--bundle", str(coins.bundle.folder), "--json", "--threads", str(THREADS)]
    auto, fixed = (CliRunner().invoke(cli.run, [*base, "--k", k, "--max-new-tokens", "2"]) for k in ("auto", "3"))
    assert (auto.exit_code, fixed.exit_code) == (0, 0), auto.output + fixed.output
    told = json.loads(auto.stdout)
    assert [set(decision) for decision in told["gate"]] == [{"k", "probability", "ms"}] * len(told["gate"])
    assert told["gate"][0]["k"] == 2
    assert "gate" not in json.loads(fixed.stdout)


def test_the_manifest_records_how_the_gates_were_trained(tmp_path: Path, tiny_checkpoint: Checkpoints) -> None:
    gates = write_gates(tmp_path / "g.safetensors", {3: random_gate(0)}, {"training": '{"items": 7}'})
    bundle = run_export(
        plan_with_gates(tiny_checkpoint(TINY), gates, (3,)), tmp_path / "b", force=False, report=lambda *_: None
    )
    assert bundle.manifest.record["gates"] == {"features": FEATURES, "training": '{"items": 7}'}


# ---- reading a file --------------------------------------------------------------------------------------------------


@pytest.fixture
def read(tiny_checkpoint: Checkpoints) -> Callable[[Path], Gates]:
    checkpoint = open_checkpoint(str(tiny_checkpoint(TINY)))
    text = read_config(checkpoint.config).text
    return lambda path: read_gates(path, text, checkpoint.fingerprint())


Read = Callable[[Path], Gates]


def test_a_file_without_metadata_is_read_with_a_warning(tmp_path: Path, read: Read) -> None:
    found = read(write_gates(tmp_path / "g.safetensors", {3: random_gate(3), 5: random_gate(5)}))
    assert list(found.by_k) == [3, 5]
    assert np.array_equal(found.by_k[5][0], random_gate(5)[0])
    (warning,) = found.warnings
    assert "does not name the model" in warning


def test_a_file_of_this_model_is_read_without_a_word(tmp_path: Path, read: Read, tiny_checkpoint: Checkpoints) -> None:
    fingerprint = open_checkpoint(str(tiny_checkpoint(TINY))).fingerprint()
    metadata = {"model_fingerprint": fingerprint, "features": FEATURES}
    assert read(write_gates(tmp_path / "g.safetensors", {3: random_gate(3)}, metadata)).warnings == ()


def test_a_gate_on_the_last_layer_means_no_withdrawal(tmp_path: Path, read: Read) -> None:
    assert list(
        read(write_gates(tmp_path / "g.safetensors", {4: random_gate(4), LAYERS + 1: random_gate(9)})).by_k
    ) == [4]
    with pytest.raises(CheckpointError, match="no gate on a layer before the last"):
        read(write_gates(tmp_path / "h.safetensors", {LAYERS + 1: random_gate(9)}))


def test_gates_of_another_model_or_of_other_inputs_are_refused(tmp_path: Path, read: Read) -> None:
    for metadata, match in (
        ({"model_fingerprint": "0" * 64}, "trained for another model"),
        ({"features": "mean of all text rows"}, "the gates read 'mean of all text rows'"),
        ({"note": "x" * (MAX_METADATA + 1)}, "characters of metadata"),
    ):
        with pytest.raises(CheckpointError, match=match):
            read(write_gates(tmp_path / "g.safetensors", {3: random_gate(3)}, metadata))


FIRST, SECOND = random_gate(3)
NAN = SECOND.copy()
NAN[0, 3] = np.nan
BAD: dict[str, tuple[dict[str, NDArray[Any]], str]] = {
    "of a wider model": ({"fc1": np.zeros((WIDTH, 4 * HIDDEN), np.float32), "fc2": SECOND}, "hidden size 64 needs"),
    "of two widths": ({"fc1": FIRST[:-1], "fc2": SECOND}, "needs"),
    "with three answers": ({"fc1": FIRST, "fc2": np.zeros((3, WIDTH), np.float32)}, "needs"),
    "of width nought": ({"fc1": FIRST[:0], "fc2": SECOND[:, :0]}, "needs|empty|no elements"),
    "flat": ({"fc1": FIRST.ravel(), "fc2": SECOND.ravel()}, "needs"),
    "without fc2": ({"fc1": FIRST}, "gate 1 lacks fc2"),
    "without fc1": ({"fc2": SECOND}, "gate 1 lacks fc1"),
    "with a NaN": ({"fc1": FIRST, "fc2": NAN}, "fc2.weight"),
    "of integers": ({"fc1": FIRST.astype(np.int32), "fc2": SECOND}, "I32"),
    "of doubles": ({"fc1": FIRST.astype(np.float64), "fc2": SECOND}, "F64"),
}


@pytest.mark.parametrize(("weights", "match"), BAD.values(), ids=list(BAD))
def test_a_gate_that_does_not_fit_is_refused(
    tmp_path: Path, read: Read, weights: dict[str, NDArray[Any]], match: str
) -> None:
    path = tmp_path / "g.safetensors"
    write_safetensors(path, {f"gate.1.{name}.weight": w for name, w in weights.items()})
    with pytest.raises(CheckpointError, match=match):
        read(path)


@pytest.mark.parametrize(
    "name", ["gate.01.fc1.weight", "gate.1.fc3.weight", "gate.1.fc1.bias", "lm_head.weight", "gate.-1.fc1.weight"]
)
def test_a_name_that_is_no_gates_is_refused(tmp_path: Path, read: Read, name: str) -> None:
    path = tmp_path / "g.safetensors"
    write_safetensors(path, {"gate.1.fc1.weight": FIRST, "gate.1.fc2.weight": SECOND, name: FIRST})
    with pytest.raises(CheckpointError, match="is not a gate's weight"):
        read(path)


def test_a_gate_beyond_the_model_is_refused(tmp_path: Path, read: Read) -> None:
    with pytest.raises(CheckpointError, match="gate 8 is beyond the 8 layers"):
        read(write_gates(tmp_path / "g.safetensors", {LAYERS + 2: random_gate(0)}))


def test_an_empty_file_and_no_file_are_refused(tmp_path: Path, read: Read) -> None:
    with pytest.raises(CheckpointError, match="no gate on a layer"):
        read(write_gates(tmp_path / "g.safetensors", {}))
    with pytest.raises(CheckpointError):
        read(tmp_path / "absent.safetensors")
