"""Training gates: what is measured is the plain statement's, nothing is lost or done twice, and the verdict is true."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from numpy.typing import NDArray

from tests.support.bundles import ORT, export
from tests.support.fixtures import Checkpoints, References
from tests.support.json_files import read_json
from tests.support.reference import Reference
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx import cli
from vtx.exporter.calibration.source import OpenedModel, open_source
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.exporter.checkpoint.spec import model_size
from vtx.exporter.gates.fit import FitOptions, fit_gate, fit_gates, gate_odds, labels
from vtx.exporter.gates.measure import Measurer, gate_input, measure
from vtx.exporter.gates.train import GateTraining, TrainOptions, train_gates
from vtx.exporter.gates.workdir import MeasureOptions, WorkDirectory, make_shards
from vtx.exporter.graphs.gates import FEATURES, read_gates
from vtx.runtime.bundle.safetensors import read_header, read_tensor
from vtx.runtime.errors import RequestError
from vtx.tools.calibration.gates import FixedRival, HeldOut, judge
from vtx.tools.common.loading import Loading
from vtx.tools.data.items import Item

TINY = Tiny()
LAYERS, HIDDEN, TOKENS = 8, 64, 4
KS = tuple(range(2, LAYERS + 1))
QUESTIONS = ("red?", "How many circle shapes are there?", "What is the colour of the square?", "which is left")
QUIET: Callable[..., None] = lambda *_: None  # noqa: E731 - a constant
MEASURE = MeasureOptions(max_new_tokens=TOKENS, batch=3)
FIT = FitOptions(width=16, epochs=3)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def source(tiny_checkpoint: Checkpoints) -> OpenedModel:
    return open_source(str(tiny_checkpoint(TINY)))


def items(count: int) -> list[Item]:
    answers = ("red", "two", "blue", None)
    return [Item((random_image(n),), QUESTIONS[n % 4], answers[n % 4]) for n in range(count)]


def shard_of(some: Sequence[Item], *, held_out: bool = False) -> Any:
    return make_shards(some, len(some), held_out=held_out)[0]


# ---- one item --------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def along(judge: Reference, item: Item, ids: Sequence[int], k: int | None) -> torch.Tensor:
    """Teacher-forced logits [tokens, vocab] over an answer, everything computed anew for every token."""
    rows, vision = judge.prompt(judge.inputs(prompt_messages(item.question), list(item.images)))  # type: ignore[arg-type]
    logits = []
    for token in ids:
        logits.append(judge.last_logits(rows, vision, k))
        rows = torch.cat([rows, judge.model.model.language_model.embed_tokens(torch.tensor([[token]]))], 1)
        vision = torch.cat([vision, torch.tensor([False])])
    return torch.stack(logits)


def own_answer(judge: Reference, item: Item) -> list[int]:
    inputs = judge.inputs(prompt_messages(item.question), list(item.images))  # type: ignore[arg-type]
    ids = judge.greedy(inputs, None, TOKENS).ids
    return ids[: ids.index(2) + 1] if 2 in ids else ids


def test_own_answers_agreement_and_losses_are_the_plain_statements(source: OpenedModel, reference: References) -> None:
    plain, some = reference(TINY), items(4)
    tensors, skipped = Measurer(source, MEASURE)(shard_of(some))
    assert not skipped
    for number, item in enumerate(some):
        own = own_answer(plain, item)
        for column, k in enumerate([*KS, None]):
            logits, wanted = along(plain, item, own, k), torch.tensor(own)
            hits = (logits.argmax(-1) == wanted).float().mean()
            assert tensors["agreement"][number, column] == pytest.approx(float(hits))
            loss = float(F.cross_entropy(logits, wanted))
            assert tensors["cross_entropy"][number, column] == pytest.approx(loss, rel=1e-3, abs=1e-5)
    assert (tensors["agreement"][:, -1] == 1).all()


@torch.inference_mode()
def test_gate_inputs_are_the_plain_statements_of_every_layer(source: OpenedModel, reference: References) -> None:
    plain, some = reference(TINY), items(2)
    tensors, _ = Measurer(source, MEASURE)(shard_of(some))
    for number, item in enumerate(some):
        rows, vision = plain.prompt(plain.inputs(prompt_messages(item.question), list(item.images)))  # type: ignore[arg-type]
        front, positions = int(vision.nonzero()[-1]) + 1, torch.arange(rows.shape[1])[None]
        assert tensors["rows"][number].tolist() == [int((~vision).sum()), int(vision.sum())]
        for k in KS:
            tail = plain.run(plain.model.model.language_model.layers[: k - 1], rows, positions)[0, front:]
            wanted = torch.cat((tail[:-1].mean(0), tail[-1])).numpy()
            np.testing.assert_allclose(tensors[f"inputs.{k - 2}"][number], wanted, atol=2e-4)


def test_the_mean_of_a_prompt_of_one_row_is_nought() -> None:
    rows = torch.arange(6.0).reshape(3, 2)
    assert gate_input(rows, 2).tolist() == [0, 0, 4, 5]
    assert gate_input(rows, 0).tolist() == [1, 2, 4, 5]


def test_reference_answers_are_followed_to_their_end_token(source: OpenedModel, reference: References) -> None:
    plain, item = reference(TINY), items(1)[0]
    tensors, _ = Measurer(source, MeasureOptions("reference", TOKENS))(shard_of([item]))
    ids = source.text.tokenizer.encode(" red", add_special_tokens=False).ids
    told = source.text.prompt(
        [*prompt_messages(item.question), {"role": "assistant", "content": [{"type": "text", "text": "red"}]}],
        16,
        add_generation_prompt=False,
    )
    answer = told[-(len(told) - len(source.text.prompt(prompt_messages(item.question), 16))) :].tolist()
    assert answer[-1] == 2
    assert set(answer[:-1]) & set(ids)
    for column, k in ((0, 2), (len(KS), None)):
        loss = float(F.cross_entropy(along(plain, item, answer, k), torch.tensor(answer)))
        assert tensors["cross_entropy"][0, column] == pytest.approx(loss, rel=1e-3)


def test_held_out_items_tell_which_k_keeps_the_answer_and_which_is_right(
    source: OpenedModel, reference: References
) -> None:
    plain, first = reference(TINY), items(1)[0]
    own = own_answer(plain, first)
    said = source.text.decode(own)
    some = [Item(first.images, first.question, said), Item(first.images, first.question), items(1)[0]]
    tensors, _ = Measurer(source, MEASURE)(shard_of(some, held_out=True))
    same = [plain.greedy(plain.inputs(prompt_messages(first.question), list(first.images)), k, len(own)).ids == own
            for k in [*KS, None]]  # type: ignore[arg-type]  # fmt: skip
    assert tensors["same"].astype(bool).tolist() == [same] * 3
    assert tensors["right"][0, -1] == 1, "the answer that the model gives is right by its text"
    assert all(tensors["right"][0][np.array(same)] == 1)
    assert set(tensors["right"][1]) == {2}
    assert tensors["right"][2, -1] == 0


def test_a_label_needs_agreement_and_no_higher_loss() -> None:
    agreement = np.array([[1.0, 0.98, 1.0, 1.0, 1.0]], np.float32)
    losses = np.array([[1.02, 0.5, 1.04, 1.0, 1.0]], np.float32)
    assert labels(agreement, losses, 1.03).tolist() == [[1, 0, 0, 1]]
    losses[:, -1] = 0
    assert labels(agreement, losses, 1.03).tolist() == [[0, 0, 0, 0]]
    assert labels(agreement, losses, float("inf")).tolist() == [[1, 0, 1, 1]]


def test_measuring_alone_or_together_gives_the_same(source: OpenedModel) -> None:
    some, measurer = items(3), Measurer(source, MEASURE)
    together, _ = measurer(shard_of(some))
    for number, item in enumerate(some):
        alone, _ = measurer(shard_of([item]))
        assert all(np.array_equal(alone[name][0], together[name][number]) for name in together if name != "item")


# ---- the folder ------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def test_an_engine_measures_what_the_reference_does(
    tmp_path: Path, tiny_checkpoint: Checkpoints, source: OpenedModel
) -> None:
    some = items(3)
    made = export(tiny_checkpoint(TINY), tmp_path / "every", tuple(range(2, 9)), dialects=ORT)
    deployed = open_source("", made.folder, engine=Loading("cpu"))
    for held_out in (False, True):
        expected, _ = Measurer(source, MEASURE)(shard_of(some, held_out=held_out))
        tensors, skipped = Measurer(deployed, MEASURE)(shard_of(some, held_out=held_out))
        assert not skipped
        assert list(tensors) == list(expected)
        for name, values in expected.items():
            np.testing.assert_allclose(tensors[name], values, rtol=1e-4, atol=1e-4, err_msg=name)
    few = export(tiny_checkpoint(TINY), tmp_path / "few", (3, 5), dialects=ORT)
    with pytest.raises(RequestError, match=r"cut at 2 of 7 K, .* --k 2,3,4,5,6,7,8"):
        Measurer(open_source("", few.folder, engine=Loading("cpu")), MEASURE)


def make_work(
    folder: Path, source: OpenedModel, some: Sequence[Item], options: MeasureOptions = MEASURE
) -> WorkDirectory:
    shards = [
        *make_shards(some[:-2], options.batch, held_out=False),
        *make_shards(some[-2:], options.batch, held_out=True, first=len(some) - 2),
    ]
    return WorkDirectory(folder, source, options, shards)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def test_an_interrupted_measurement_goes_on_and_ends_the_same(tmp_path: Path, source: OpenedModel) -> None:
    some = items(9)
    whole = make_work(tmp_path / "whole", source, some)
    measure(Measurer(source, MEASURE), whole, QUIET)
    done = []

    def stop(count: int) -> None:
        done.append(count)
        if len(done) == 2:
            raise Stop

    with pytest.raises(Stop):
        measure(Measurer(source, MEASURE), make_work(tmp_path / "cut", source, some), stop)
    assert len(content(tmp_path / "cut")) == 2
    torn = tmp_path / "cut" / "train-00000.safetensors"
    torn.write_bytes(torn.read_bytes()[:-5])
    again = make_work(tmp_path / "cut", source, some)
    assert [shard.name for shard in again.missing()] == [
        "train-00000.safetensors", "train-00002.safetensors", "held-out-00000.safetensors"
    ]  # fmt: skip
    measure(Measurer(source, MEASURE), again, QUIET)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert again.read("item", held_out=False).tolist() == list(range(7))
    assert again.read("item", held_out=True).tolist() == [7, 8]


def test_a_folder_of_another_measurement_is_refused_by_what_differs(
    tmp_path: Path, source: OpenedModel, tiny_checkpoint: Checkpoints
) -> None:
    make_work(tmp_path, source, items(4))
    make_work(tmp_path, source, items(4))
    with pytest.raises(RequestError, match="differ in data;"):
        make_work(tmp_path, source, items(5))
    with pytest.raises(RequestError, match="differ in options;"):
        make_work(tmp_path, source, items(4), MeasureOptions("reference", TOKENS, 3))
    with pytest.raises(RequestError, match="differ in model;"):
        make_work(tmp_path, open_source(str(tiny_checkpoint(TINY, 1))), items(4))
    (tmp_path / "work.json").write_text("{", encoding="utf-8")
    with pytest.raises(RequestError, match="name another --work"):
        make_work(tmp_path, source, items(4))


def test_items_that_cannot_be_measured_are_named_and_too_many_stop(tmp_path: Path, source: OpenedModel) -> None:
    good, text, gone = items(8), Item((), "who are you"), Item((tmp_path / "gone.png",), "red?")
    (tmp_path / "gone.png").write_bytes(b"")
    long = Item((random_image(0),), "x" * 300, "red")
    work = make_work(tmp_path / "w", source, [text, *good[:4], long, *good[4:]])
    measure(Measurer(source, MEASURE), work, QUIET)
    first, second = make_work(tmp_path / "w", source, [text, *good[:4], long, *good[4:]]), work
    assert not first.missing()
    assert first.all_skipped == second.all_skipped
    assert [line.partition(":")[0] for line in work.all_skipped] == ["item 1", "item 6"]
    assert "no image" in work.all_skipped[0]
    assert "the model's context is 256" in work.all_skipped[1]
    assert work.read("item", held_out=False).tolist() == [1, 2, 3, 4, 6, 7]
    with pytest.raises(RequestError, match=r"2 of 6 items cannot be measured, the limit is 20%"):
        measure(Measurer(source, MEASURE), make_work(tmp_path / "v", source, [text, gone, *good[:4]]), QUIET)


def test_items_without_an_answer_are_skipped_where_it_labels(source: OpenedModel) -> None:
    tensors, skipped = Measurer(source, MeasureOptions("reference", TOKENS))(shard_of(items(4)))
    assert tensors["item"].tolist() == [0, 1, 2]
    assert skipped == ["item 4: it has no answer after its prompt; use --answers own, or add an answer"]


# ---- fitting ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_gate_learns_what_can_be_learnt_and_the_same_way_every_time() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 8)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    options = FitOptions(width=32, lr=3e-3, epochs=20)
    first, second = (fit_gate(x, y, options, seed=1) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not np.array_equal(first[0], fit_gate(x, y, options, seed=2)[0])
    assert ((gate_odds(x, first) > 0.5) == y).mean() > 0.97


def test_the_odds_are_what_two_layers_without_bias_give() -> None:
    rng = np.random.default_rng(0)
    x, first, second = (rng.standard_normal(s).astype(np.float32) for s in ((5, 6), (7, 6), (2, 7)))
    plain = (F.gelu(torch.from_numpy(x @ first.T)) @ torch.from_numpy(second.T)).softmax(-1)[:, 1]
    np.testing.assert_allclose(gate_odds(x, (first, second)), plain.numpy(), atol=1e-6)


@pytest.mark.parametrize(("count", "epochs"), [(50, 160), (200, 40), (1000, 8), (6650, 1), (100_000, 1)])
def test_few_items_are_shown_more_often(count: int, epochs: int) -> None:
    assert FitOptions().epochs_for(count) == epochs
    assert FitOptions(epochs=3).epochs_for(count) == 3


def test_fitting_goes_on_where_it_stopped_and_starts_anew_with_other_options(
    tmp_path: Path, source: OpenedModel
) -> None:
    work = make_work(tmp_path, source, items(6))
    measure(Measurer(source, MEASURE), work, QUIET)
    whole = fit_gates(work, KS, FIT, QUIET)
    for path in sorted(tmp_path.glob("gate-*"))[3:]:
        path.unlink()
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("gate-*")}
    again = fit_gates(work, KS, FIT, QUIET)
    assert all(path.stat().st_mtime_ns == at for path, at in kept.items())
    assert all(np.array_equal(a, b) for k in KS for a, b in zip(whole[k], again[k], strict=True))
    other = fit_gates(work, KS, FitOptions(width=16, epochs=3, seed=1), QUIET)
    assert not np.array_equal(other[2][0], whole[2][0])


@pytest.mark.parametrize(
    "wrong", [{"alpha": 0.0}, {"alpha": float("nan")}, {"lr": 0.0}, {"width": 0}, {"epochs": 0}, {"seed": -1}]
)
def test_options_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=str(next(iter(wrong.values())))):
        FitOptions(**wrong)


# ---- the verdict -----------------------------------------------------------------------------------------------------


def held(
    fires_at: Sequence[int | None], same_from: Sequence[int], known: bool = True, per_image: int = 1
) -> HeldOut:  # fmt: skip
    """Items whose gates fire first at that K, and whose answer is the full model's from that K on."""
    odds = np.array([[0.9 if k == at else 0.1 for k in KS] for at in fires_at], np.float32)
    same = np.array([[k >= at for k in KS] + [True] for at in same_from])
    right = same.astype(np.uint8) if known else np.full(same.shape, 2, np.uint8)
    images = [n // per_image for n in range(len(same))]
    return HeldOut(KS, odds, same, right, np.tile([20, 16], (len(same), 1)), images)


@pytest.fixture(scope="module")
def size(tiny_checkpoint: Checkpoints) -> Any:
    return model_size(read_config(open_checkpoint(str(tiny_checkpoint(TINY))).config), "tiny")


def test_gates_that_know_the_question_win(size: Any) -> None:
    found = judge(held([2, 8] * 50, [2, 8] * 50), size)
    assert found.gates[0].full_layers == 4.0
    assert found.gates[0].agreement == 1.0
    assert found.gates[0].fixed_at_equal_cost.agreement == 0.5
    assert found.verdict.endswith("the gates are better here.")
    assert found.gates[0].exits == {"2": 50, **dict.fromkeys(map(str, KS[1:-1]), 0), "8": 50, "none": 0}


def test_questions_about_one_image_are_not_taken_as_independent(size: Any) -> None:
    """Ten questions an image, kept from K = 2 or only from 8: a win over ten images is not one over a hundred."""
    leave = [2] * 60 + [8] * 40
    alone, together = (judge(held(leave, leave, per_image=count), size).gates[0] for count in (1, 10))
    assert (alone.agreement, alone.difference) == (together.agreement, together.difference) == (1.0, 0.4)
    assert alone.agreement_interval == pytest.approx((0.963, 1.0), abs=1e-3)
    assert together.agreement_interval == pytest.approx((0.722, 1.0), abs=1e-3), "Wilson's interval of 10 in 10"
    narrow, wide = (high - low for low, high in (alone.difference_interval, together.difference_interval))
    assert 2.5 * narrow < wide < 4 * narrow


def test_gates_that_guess_lose_to_a_fixed_k(size: Any) -> None:
    found = judge(held([2, 8] * 50, [5] * 100), size)
    assert found.gates[0].agreement == 0.5
    assert found.gates[0].fixed_at_equal_cost == FixedRival("K = 5", 1.0)
    assert found.verdict.endswith("a fixed K is better here.")


def test_gates_that_do_what_a_fixed_k_does_are_not_called_better(size: Any) -> None:
    found = judge(held([5] * 100, [4, 6] * 50), size)
    assert (found.gates[0].difference, found.gates[0].difference_interval) == (0.0, (0.0, 0.0))
    assert "a fixed K needs no gates" in found.verdict


def test_between_two_depths_their_mixture_at_the_same_cost_is_the_rival(size: Any) -> None:
    # A quarter leaves at K = 6, the others at 5: 4.25 full layers. K = 5 keeps 50%, K = 6 keeps 100%.
    found = judge(held([5, 5, 5, 6] * 25, [5, 6] * 50), size)
    assert found.gates[0].full_layers == 4.25
    assert found.gates[0].fixed_at_equal_cost == FixedRival("K = 5 and K = 6 in turn", 0.625)


def test_a_cheaper_fixed_k_that_keeps_more_is_the_rival(size: Any) -> None:
    data = held([6] * 10, [3] * 10)
    data.same[:, KS.index(6)] = data.same[:, KS.index(5)] = False
    assert judge(data, size).gates[0].fixed_at_equal_cost == FixedRival("K = 4", 1.0)


def test_gates_that_never_fire_cost_all_layers(size: Any) -> None:
    found = judge(held([None] * 10, [9] * 10), size)
    assert (found.gates[0].full_layers, found.gates[0].exits["none"]) == (LAYERS, 10)
    assert found.gates[0].total_flops == found.fixed[-1].total_flops
    assert found.fixed[-1].k is None
    assert "a fixed K needs no gates" in found.verdict


def test_without_known_answers_there_is_no_accuracy(size: Any) -> None:
    found = judge(held([5] * 4, [5] * 4, known=False), size)
    assert found.gates[0].accuracy is None
    assert judge(held([5] * 4, [5] * 4), size).gates[0].accuracy == 1.0


# ---- end to end ------------------------------------------------------------------------------------------------------


def write_data(folder: Path, count: int) -> Path:
    lines = []
    for n in range(count):
        random_image(n).save(folder / f"{n}.png")
        lines.append(json.dumps({"image": f"{n}.png", "question": QUESTIONS[n % 4], "answer": "red"}))
    (folder / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder / "data.jsonl"


def test_trained_gates_are_taken_by_the_export_of_their_model(tmp_path: Path, tiny_checkpoint: Checkpoints) -> None:
    checkpoint = tiny_checkpoint(TINY)
    options = TrainOptions(str(checkpoint), str(write_data(tmp_path, 12)), None, 8, 4, GateTraining(MEASURE, FIT))
    out = tmp_path / "g.safetensors"
    report = train_gates(options, out, tmp_path / "work", QUIET)
    opened = open_checkpoint(str(checkpoint))
    gates = read_gates(out, read_config(opened.config).text, opened.fingerprint())
    assert gates.warnings == ()
    assert tuple(gates.by_k) == KS
    training = json.loads(gates.metadata["training"])
    assert gates.metadata["features"] == FEATURES
    assert {"items", "seed", "lr", "alpha", "epochs", "width", "versions", "verdict"} <= set(training)
    assert (training["items"], training["epochs"]) == (8, 3)
    assert read_json(tmp_path / "g.json")["verdict"] == report.judgement.verdict
    assert (tmp_path / "g.png").stat().st_size > 1000
    before = out.read_bytes()
    train_gates(options, out, tmp_path / "work-2", QUIET)
    assert out.read_bytes() == before


def test_a_directory_in_the_place_of_the_gates_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    options = TrainOptions("no checkpoint", "no data", None, 8, 4, GateTraining(MEASURE, FIT))
    with pytest.raises(RequestError, match="which is a directory; name a file with --out"):
        train_gates(options, tmp_path, tmp_path / "work", lambda *_: None)


def test_the_command_trains_and_says_who_wins(tmp_path: Path, tiny_checkpoint: Checkpoints) -> None:
    data, out = write_data(tmp_path, 6), tmp_path / "g.safetensors"
    base = [str(data), "--model", str(tiny_checkpoint(TINY)), "--items", "4", "--held-out", "2", "--width", "8"]
    base += ["--epochs", "1", "--max-new-tokens", "3", "--out", str(out)]
    told = CliRunner().invoke(cli.train_gate, base)
    assert told.exit_code == 0, told.output
    assert "full layers on average the gates agree" in " ".join(told.stdout.split())
    as_json = CliRunner().invoke(cli.train_gate, [*base, "--json"])
    assert json.loads(as_json.stdout)["items"] == 2
    assert (tmp_path / "g.work").is_dir()


@pytest.mark.parametrize("wrong", [["--items", "0"], ["--held-out", "0"], ["--lr", "7"], ["--batch", "0"]])
def test_the_command_refuses_what_makes_no_sense_in_one_line(wrong: list[str]) -> None:
    told = CliRunner().invoke(cli.train_gate, wrong)
    assert told.exit_code == 1
    assert len(told.stderr.strip().splitlines()) == 1


def test_a_shard_holds_what_it_says(tmp_path: Path, source: OpenedModel) -> None:
    work = make_work(tmp_path, source, items(5))
    measure(Measurer(source, MEASURE), work, QUIET)
    tensors = read_header(tmp_path / "train-00000.safetensors").tensors
    wanted = {"item", "rows", "agreement", "cross_entropy", *(f"inputs.{layer}" for layer in range(LAYERS - 1))}
    assert set(tensors) == wanted
    found: NDArray[Any] = read_tensor(tensors["inputs.0"])
    assert (found.shape, found.dtype) == ((3, 2 * HIDDEN), np.dtype(np.float32))
