"""A tuning from end to end on a tiny model: what it writes, resuming, merging, and everything that can go wrong."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from tests.support.bundles import ORT
from tests.support.exported import Models, greedy, prompt
from tests.support.families import qwen
from tests.support.faults import Disk, failing
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json
from tests.support.quantised import compressed_int8, make_quantised
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.calibration.source import open_source
from vtx.exporter.gates.fit import FitOptions
from vtx.exporter.graphs.gates import read_gates
from vtx.runtime.bundle.safetensors import read_header, read_tensor
from vtx.runtime.errors import CheckpointError, ExportError, RequestError
from vtx.tools.calibration.gates import THRESHOLDS, HeldOut
from vtx.tools.calibration.report import ItemResult, Measurement
from vtx.tools.data.items import Item
from vtx_tune import gates, train
from vtx_tune.command import tune as command
from vtx_tune.judge import Judging, gated, judge
from vtx_tune.options import Depths, Learning, LossWeights, Packing, Schedule, TuneOptions
from vtx_tune.packing import pack
from vtx_tune.tune import open_workspace, run

pytestmark = pytest.mark.skipif(
    not (importlib.util.find_spec("peft") and importlib.util.find_spec("accelerate")),
    reason='peft or accelerate is not installed; pip install "vtx-edge[tune]" ./plugins/tune',
)
TINY = Tiny(layers=4)
QUESTIONS = ("red?", "how many circle shapes are there?")
SCRIPT = """  # the installed command, which also tells a process's share of the layers' weights, and its shutdown
import atexit
import sys
from torch.distributed.tensor import DTensor
from vtx_tune.command import tune as command
from vtx_tune import tune
load = tune.load_text_model
def loading(*words):
    model = load(*words)
    weights = [(w.to_local().numel() if isinstance(w, DTensor) else w.numel(), w.numel())
               for w in model.model.layers.parameters()]
    print("held", sum(own for own, _ in weights) / sum(whole for _, whole in weights), file=sys.stderr)
    return model
tune.load_text_model = loading
atexit.register(print, "shut down", file=sys.stderr)
command()
"""
QUIET: Callable[..., None] = lambda *_: None  # noqa: E731 - a constant, not a function to call


def tune(options: TuneOptions, out: Path, report: Callable[..., None], say: Callable[[str], None]) -> dict[str, Any]:
    return run(open_workspace(options, out, say), options, out, report, say)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six pictures with two questions each, of which the first has an answer."""
    folder = tmp_path_factory.mktemp("data")
    lines = []
    for n in range(6):
        random_image(n).save(folder / f"{n}.png")
        lines += [{"image": f"{n}.png", "question": QUESTIONS[0], "answer": "the red square"}]
        lines += [{"image": f"{n}.png", "question": QUESTIONS[1]}]
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def small(data: Path, checkpoint: Path) -> TuneOptions:
    """Six steps of four rows on a model of four layers."""
    return TuneOptions(
        Depths.parse("2-3"), str(checkpoint), str(data), items=12, held_out=0,
        weights=LossWeights(hidden=0.1), learning=Learning(rank=4, alpha=8), packing=Packing(max_new_tokens=5),
        schedule=Schedule(lr=5e-3, epochs=4.0, batch=4, save_every=2),
    )  # fmt: skip


@pytest.fixture
def options(data: Path, tiny_checkpoint: Checkpoints) -> TuneOptions:
    return small(data, tiny_checkpoint(TINY))


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_a_student_that_sees_through_a_reduction_learns_something_else(
    options: TuneOptions, whole: Path, tmp_path: Path
) -> None:
    report = tune(replace(options, reduce="divprune:keep=0.25"), tmp_path, QUIET, QUIET)
    assert report["options"]["reduce"] == "divprune:keep=0.25"
    assert lines_of(tmp_path)[0] != lines_of(whole)[0]
    assert any(not np.array_equal(weight, weights(whole)[name]) for name, weight in weights(tmp_path).items())
    with pytest.raises(RequestError, match="another"):
        tune(options, tmp_path, QUIET, QUIET)


def test_qwen_vl_is_tuned_to_a_checkpoint_like_the_original(
    data: Path, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Its training forward is held to the bundle's logits, and its answers to the bundle's, in test_decoder.py."""
    checkpoint = tiny_checkpoint(replace(qwen.QWEN3, layers=4))
    tune(small(data, checkpoint), tmp_path, QUIET, QUIET)
    losses = [float(line["loss"]) for line in lines_of(tmp_path)]
    assert np.isfinite(losses).all()
    assert min(losses[1:]) < losses[0]
    original = read_header(checkpoint / "model.safetensors").tensors
    tuned = weights(tmp_path)
    assert tuned.keys() == original.keys()
    moved = {name for name, weight in tuned.items() if not np.array_equal(weight, read_tensor(original[name]))}
    assert moved
    assert all(".layers." in name and "visual" not in name for name in moved)
    assert open_source(str(tmp_path / "merged")).config == open_source(str(checkpoint)).config


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed; pip install bitsandbytes"
)
def test_qlora_holds_the_matrices_in_4_bits_and_adds_what_was_learnt_to_the_checkpoint_s(
    options: TuneOptions, tmp_path: Path
) -> None:
    wide = replace(options, schedule=replace(options.schedule, lr=1e-3))
    narrow = replace(wide, learning=replace(wide.learning, qlora=True))
    tune(wide, tmp_path / "wide", QUIET, QUIET)
    tune(narrow, tmp_path / "narrow", QUIET, QUIET)
    first, last = (float(lines_of(tmp_path / "narrow")[step]["loss"]) for step in (0, -1))
    assert last < first
    original = read_header(Path(options.model) / "model.safetensors").tensors
    for name, weight in weights(tmp_path / "narrow").items():
        before, learnt = read_tensor(original[name]), weights(tmp_path / "wide")[name]
        moved = np.abs(weight - before).max()
        assert moved < 0.1 * np.abs(before).max(), "4 bits below the adapters are not in the result"
        assert (moved > 0) == (np.abs(learnt - before).max() > 0)


def weights(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    header = read_header(folder / "merged" / "model.safetensors")
    return {name: read_tensor(info) for name, info in header.tensors.items()}


def lines_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "log.csv").open(encoding="utf-8") as file:
        return [{k: v for k, v in line.items() if k != "seconds"} for line in csv.DictReader(file)]


@pytest.fixture(scope="module")
def whole(data: Path, tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tuning that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole")
    tune(small(data, tiny_checkpoint(TINY)), out, QUIET, QUIET)
    return out


def test_training_brings_the_student_at_k_nearer_to_the_teacher(whole: Path) -> None:
    lines = lines_of(whole)
    assert [int(line["step"]) for line in lines] == list(range(1, 7))
    assert float(lines[-1]["loss"]) < 0.8 * float(lines[0]["loss"])
    assert all(float(line["kl"]) > 0 and float(line["ce"]) > 0 and float(line["hidden"]) > 0 for line in lines)


def test_a_resumed_training_equals_an_uninterrupted_one(whole: Path, options: TuneOptions, tmp_path: Path) -> None:
    def interrupted(phase: str, done: int, total: int) -> None:
        if (phase, done) == ("training", 3):  # a state was saved after 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(options, tmp_path, interrupted, QUIET)
    tune(options, tmp_path, QUIET, QUIET)
    assert lines_of(tmp_path) == lines_of(whole)
    ours, theirs = weights(tmp_path), weights(whole)
    assert all(np.array_equal(ours[name], tensor) for name, tensor in theirs.items())


def test_the_merged_checkpoint_is_the_original_but_for_the_matrices_that_were_adapted(
    whole: Path, options: TuneOptions
) -> None:
    original, merged = Path(options.model), whole / "merged"
    settings = {path.name for path in original.iterdir()}
    assert {path.name for path in merged.iterdir()} == settings | {"README.md"}
    for name in settings - {"model.safetensors"}:
        assert (merged / name).read_bytes() == (original / name).read_bytes()
    before = {name: read_tensor(info) for name, info in read_header(original / "model.safetensors").tensors.items()}
    after = weights(whole)
    changed = {name for name, tensor in after.items() if not np.array_equal(tensor, before[name])}
    assert changed == {name for name in before if ".layers." in name and "language_model" in name and "_proj" in name}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of peft
def test_bundle_transformers_and_adapters_agree_on_the_tuned_model(
    whole: Path, options: TuneOptions, tmp_path: Path, models: Models
) -> None:
    """The merged checkpoint exported and asked at K, and transformers with the adapters on the original."""
    from peft import PeftModel

    from tests.support.reference import Reference

    model = Models(tmp_path, lambda _: whole / "merged", ORT)(TINY, (2, 3))
    merged, adapted = Reference(whole / "merged"), Reference(Path(options.model))
    loaded = PeftModel.from_pretrained(adapted.model, str(whole / "adapter"))
    original = Reference(Path(options.model))
    adapted.model = loaded.get_base_model()
    messages, image = prompt_messages(QUESTIONS[1]), random_image(3)
    for k in (2, 3, None):
        logits = merged.logits(merged.inputs(messages, [image]), k).numpy()
        ours = greedy(model, prompt(model, messages, [image]), k, 1).logits[0]
        np.testing.assert_allclose(ours, logits, atol=1e-4)
        np.testing.assert_allclose(adapted.logits(adapted.inputs(messages, [image]), k), logits, atol=1e-4)
        assert np.abs(original.logits(original.inputs(messages, [image]), k).numpy() - logits).max() > 0.1


def launched(folder: Path, options: TuneOptions, *settings: str) -> str:
    """What two processes say that accelerate's launcher starts on CPUs, with `settings` of its own."""
    script = folder / "vtx-tune.py"
    script.write_text(SCRIPT, encoding="utf-8")
    words = [
        options.data, "--model", options.model, "--k", "2-3", "--items", "12", "--held-out", "0", "--batch", "4",
        "--epochs", "4", "--lr", "5e-3", "--rank", "4", "--alpha", "8", "--hidden-weight", "0.1", "--save-every", "2",
        "--max-new-tokens", "5", "--out", str(folder / "out"),
    ]  # fmt: skip
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num_machines", "1"]
    launch += ["--num_processes", "2", "--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"]
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *settings, str(script), *words], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    assert "6 steps on 2 x cpu" in done.stderr
    assert done.stderr.count("shut down\n") == 1, "only the main process may go through Python's shutdown"
    return done.stderr


@pytest.mark.slow
def test_two_processes_as_accelerate_s_launcher_starts_them_learn_what_one_learns(
    whole: Path, options: TuneOptions, tmp_path: Path
) -> None:
    assert launched(tmp_path, options, "--multi_gpu").count("held 1.0\n") == 2
    ours, theirs = weights(tmp_path / "out"), weights(whole)
    assert all(np.allclose(ours[name], tensor, atol=1e-4) for name, tensor in theirs.items())


@pytest.mark.slow
def test_two_processes_that_share_the_model_go_on_with_what_one_began_and_learn_what_one_learns(
    data: Path, options: TuneOptions, tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    full = data.with_name("full.jsonl")
    full.write_text("".join(json.dumps({"answer": "two", **line}) + "\n" for line in lines), encoding="utf-8")
    answered = replace(options, data=str(full))
    tune(answered, tmp_path / "one", QUIET, QUIET)

    def interrupted(phase: str, done: int, total: int) -> None:
        if (phase, done) == ("training", 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(answered, tmp_path / "out", interrupted, QUIET)
    assert read_header(tmp_path / "out" / "state.safetensors").metadata["step"] == "2"
    assert launched(tmp_path, answered, "--use_fsdp", "--fsdp_version", "2").count("held 0.5\n") == 2
    for part in ("adapter/adapter_model.safetensors", "merged/model.safetensors", "state.safetensors"):
        ours, theirs = (read_header(tmp_path / run / part).tensors for run in ("out", "one"))
        assert ours.keys() == theirs.keys()
        for name, info in theirs.items():
            np.testing.assert_allclose(read_tensor(ours[name]), read_tensor(info), atol=1e-4, err_msg=name)


def test_whole_layers_learn_in_bf16_and_no_weight_is_rounded_to_it(options: TuneOptions, tmp_path: Path) -> None:
    learning, schedule = Learning(full=True, layers=(2, 2)), Schedule(lr=1e-5, epochs=1, batch=6)
    short = replace(options, learning=learning, schedule=schedule, dtype="bf16")
    report = tune(short, tmp_path, QUIET, QUIET)
    original = Path(options.model) / "model.safetensors"
    before = {name: read_tensor(info) for name, info in read_header(original).tensors.items()}
    changed = {name for name, tensor in weights(tmp_path).items() if not np.array_equal(tensor, before[name])}
    assert changed == {name for name in before if "language_model" in name and ".layers.1." in name}
    assert list(report["changed_layers"]) == ["2"]
    assert 0 < report["changed_layers"]["2"] < 3e-4  # bf16 would have rounded by 1e-3
    assert not (tmp_path / "adapter").exists()


@pytest.mark.slow
def test_the_report_has_both_curves_and_the_card_says_what_was_done(
    data: Path, options: TuneOptions, tmp_path: Path
) -> None:
    words = [
        str(data), "--model", options.model, "--k", "2-3", "--items", "8", "--held-out", "4", "--batch", "2", "--json",
        "--max-new-tokens", "5", "--out", str(tmp_path), "--rank", "4", "--lr", "5e-3",
    ]  # fmt: skip
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == read_json(tmp_path / "report.json")
    assert "predicted, roughly" in done.stderr
    curve = report["judged"]["curve"]
    assert [point["k"] for point in curve] == [None, 2, 3, 4]
    assert curve[0]["before"]["right"]["count"] == report["judged"]["items"] == 4
    assert set(report["judged"]["earliest_k"]) == {"before", "after"}
    for point in curve:
        gained, shares = point["gained"], [point[name]["right"]["share"] for name in ("after", "before")]
        assert gained["low"] <= gained["mean"] <= gained["high"]
        assert gained["mean"] == pytest.approx(shares[0] - shares[1])
    card = (tmp_path / "merged" / "README.md").read_text(encoding="utf-8")
    assert "adapters of rank 4 on all layers" in card
    assert "2 to 3" in card
    assert "On 4 questions held out" in card
    again = CliRunner().invoke(command, words, catch_exceptions=False)
    assert again.exit_code == 0, again.stderr
    for part in ("judged", "training", "changed_layers"):
        assert json.loads(again.stdout)[part] == report[part]
    assert json.loads(again.stdout)["cost"]["seconds"] == report["cost"]["seconds"] > 0


def test_engines_judge_as_the_reference_does_and_again_from_what_was_measured(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    before, merged = open_source(str(tiny_checkpoint(TINY))), tiny_checkpoint(TINY, 1)
    items = [Item((random_image(n),), QUESTIONS[n % 2]) for n in range(3)]
    expected = judge(before, merged, items, Judging(4), tmp_path / "reference", QUIET)
    made = judge(before, merged, items, Judging(4, "fp32"), tmp_path / "engines", QUIET)
    for ours, truth in zip(made.curve, expected.curve, strict=True):
        assert (ours["k"], ours["gained"]) == (truth["k"], truth["gained"])
        for name in ("before", "after"):
            assert ours[name]["right"] == truth[name]["right"]
            assert ours[name]["kl"].mean == pytest.approx(truth[name]["kl"].mean, rel=1e-3, abs=1e-7)
    assert {path.name for path in (tmp_path / "engines").iterdir()} == {"own", "before", "after"}
    assert judge(before, merged, items, Judging(4, "fp32"), tmp_path / "engines", QUIET) == made


def test_an_item_held_out_that_cannot_be_asked_is_left_out(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    items = [Item((random_image(n),), QUESTIONS[0]) for n in range(5)] + [Item((random_image(5),), "x" * 300)]
    found = judge(open_source(str(tiny_checkpoint(TINY))), tiny_checkpoint(TINY, 1), items, Judging(2), tmp_path, QUIET)
    assert found.items == 5


def test_the_control_trains_without_withdrawal_on_answers_of_the_data(
    data: Path, options: TuneOptions, tmp_path: Path
) -> None:
    control = replace(options, full_share=1.0)
    assert {train.Order(6, control).k(n) for n in range(100)} == {None}
    with pytest.raises(RequestError, match="only the data's answers teach anything"):
        open_workspace(replace(control, weights=LossWeights(ce=0.0)), tmp_path, QUIET)
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    bare = data.with_name("bare.jsonl")
    bare.write_text("".join(json.dumps({**line, "answer": ""}) + "\n" for line in lines))
    with pytest.raises(RequestError, match="give data with answers"):
        open_workspace(replace(control, data=str(bare)), tmp_path, QUIET)
    report = tune(replace(control, held_out=0), tmp_path, QUIET, QUIET)
    assert report["changed_layers"]


# ---- gates in the loop -----------------------------------------------------------------------------------------------


def test_the_k_that_gates_choose_for_one_of_a_row_s_questions_is_taken_where_it_is_earlier() -> None:
    options = TuneOptions(Depths.parse("4-6"), full_share=0.25)
    plain = train.Order(2, options)
    order = replace(plain, chosen=[[3, 5], [None, 9]])
    seen: dict[int, set[int]] = {0: set(), 1: set()}
    for example in range(600):
        drawn, k, row = plain.k(example), order.k(example), order.row(example)
        assert (k is None) == (drawn is None), "the share that all layers see stays"
        if k is None or drawn is None:
            continue
        assert k in {min(drawn, own or drawn) for own in order.chosen[row]}
        seen[row].add(k)
    assert seen == {0: {3, 4, 5}, 1: {4, 5, 6}}


@pytest.mark.slow
def test_gates_choose_in_the_second_half_and_are_judged_with_the_tuned_model(
    options: TuneOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted while the gates are measured halfway: it ends as a run that nothing interrupted."""
    monkeypatch.setattr(gates, "FITTED", FitOptions(alpha=math.inf, width=16, epochs=30, lr=1e-2))
    looped = replace(options, items=8, held_out=4, gates=True, full_share=0.0)
    steps = train.Order(4, looped).steps
    phases = list[tuple[str, int]]()

    def interrupted(phase: str, done: int, total: int) -> None:
        if phase == "items" and done:
            raise KeyboardInterrupt
        phases.append((phase, done))

    with pytest.raises(KeyboardInterrupt):
        tune(looped, tmp_path / "cut", interrupted, QUIET)
    assert max(done for phase, done in phases if phase == "training") == steps // 2
    reports = {name: tune(looped, tmp_path / name, QUIET, QUIET) for name in ("cut", "whole")}
    assert lines_of(tmp_path / "cut") == lines_of(tmp_path / "whole")
    assert reports["cut"]["judged"] == reports["whole"]["judged"]
    out = tmp_path / "whole"
    assert [path.name for path in (out / "halfway").iterdir()] == ["chosen.json"]

    any_answer = dict.fromkeys(range(8), np.zeros(1, np.int64))
    rows = pack(open_workspace(looped, out, QUIET).questions, any_answer, 0, looped.packing, 256)
    ks = gates.chosen(out, 8)
    plain = train.Order(len(rows), looped)
    order = replace(plain, chosen=[[ks[n] for n in row.numbers] for row in rows])
    batch = looped.schedule.batch
    for step, line in enumerate(lines_of(out)):
        followed = order if step >= steps // 2 else plain
        depths = [followed.k(step * batch + n) for n in range(batch)]
        assert float(line["k"]) == pytest.approx(np.mean([depth or 0 for depth in depths]), rel=1e-5)

    merged = open_source(str(out / "merged"))
    made = read_gates(out / "gates.safetensors", merged.config.text, merged.fingerprint)
    assert tuple(made.by_k) == (2, 3, 4)
    judged = reports["whole"]["judged"]
    assert [found["threshold"] for found in judged["gates"]] == list(THRESHOLDS)
    full = judged["curve"][0]["before"]["right"]["share"]
    for found in judged["gates"]:
        assert 1 <= found["full_layers"] <= 4
        assert found["gained"]["mean"] == pytest.approx(found["right"]["share"] - full)
        assert found["gained"]["low"] <= found["gained"]["mean"] <= found["gained"]["high"]
    assert "Under its gates" in (out / "merged" / "README.md").read_text(encoding="utf-8")


def test_gates_are_judged_against_both_models_by_question_and_image() -> None:
    """Four images with five questions each; the gate of K = 2 fires for the first two images, which K = 2 keeps."""
    ks, images = (2, 3), [n // 5 for n in range(20)]
    odds = np.array([[0.9 if image < 2 else 0.1, 0.2] for image in images], np.float32)
    items = [Item((), f"question {n}", "yes") for n in range(20)]
    digests = tuple(item.digest() for item in items)

    def measured(right: Callable[[int], tuple[bool, ...]]) -> Measurement:
        results = [ItemResult(None, (0.0,) * 2, (0.0,) * 2, (True,) * 2, None, right(i), image=i) for i in images]
        return Measurement(ks, tuple(results), (), digests)

    before = measured(lambda image: (image != 3, False, False))  # without withdrawal three of four images are right
    after = measured(lambda image: (True, image < 2, image < 3))  # at none, K = 2, K = 3
    held = HeldOut(ks, odds, np.zeros((20, 3), bool), np.zeros((20, 3), np.uint8), np.zeros((20, 2), np.int64), images)
    found = gated(held, items, before, after)[0]
    assert (found.threshold, found.full_layers, found.right.share) == (0.5, 2.0, 1.0)
    assert found.right.low == pytest.approx(0.51, abs=0.01), "Wilson's interval of four images"
    assert (found.gained.mean, found.fixed, found.ahead.mean) == (0.25, "K = 3", 0.25)
    assert found.ahead.high == pytest.approx(0.75)
    assert gated(held, [Item((), "another", "yes")] * 20, before, after) == ()


# ---- what can go wrong -----------------------------------------------------------------------------------------------


def test_a_training_that_diverges_stops_and_keeps_the_last_good_state(
    options: TuneOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = train.losses, []

    def diverging(*words: Any) -> Any:
        calls.append(1)
        found = real(*words)
        return {**found, "total": found["total"] * float("nan")} if len(calls) > 12 else found

    monkeypatch.setattr(train, "losses", diverging)
    with pytest.raises(RequestError, match=r"diverged at step 4: the loss is nan.*last saved state is kept.*--lr"):
        tune(options, tmp_path, QUIET, QUIET)
    header = read_header(tmp_path / "state.safetensors")
    assert header.metadata["step"] == "2"
    assert all(np.isfinite(read_tensor(info)).all() for info in header.tensors.values())
    monkeypatch.setattr(train, "losses", real)
    tune(replace(options, schedule=replace(options.schedule, lr=1e-3)), tmp_path, QUIET, QUIET)
    assert len(lines_of(tmp_path)) == 6


def test_another_tuning_in_the_same_folder_is_refused(whole: Path, options: TuneOptions, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    with pytest.raises(RequestError, match="holds a tuning with another model, other data or other options"):
        tune(replace(options, full_share=0.5), tmp_path / "copy", QUIET, QUIET)


@pytest.mark.slow
def test_a_disk_that_fills_leaves_the_state_before_and_no_half_of_a_checkpoint(
    options: TuneOptions, tmp_path: Path
) -> None:
    short = replace(options, schedule=replace(options.schedule, epochs=1, batch=6, save_every=1))
    with failing(Disk(str(tmp_path))) as counted:
        tune(short, tmp_path / "first", QUIET, QUIET)
    writes = counted.counts["write"]
    for first in (writes // 3, writes - 8):
        out = tmp_path / str(first)
        with failing(Disk(str(tmp_path), "write", first)), pytest.raises(ExportError, match="cannot write"):
            tune(short, out, QUIET, QUIET)
        assert not (out / "merged").exists() or open_source(str(out / "merged"))
        assert not [path for path in out.iterdir() if path.name.endswith(".partial")]
        tune(short, out, QUIET, QUIET)
        assert all(np.array_equal(weights(out)[name], tensor) for name, tensor in weights(tmp_path / "first").items())


def test_a_quantised_checkpoint_is_refused(options: TuneOptions, tmp_path: Path) -> None:
    folder, _ = make_quantised(Path(options.model), tmp_path, compressed_int8())
    with pytest.raises(RequestError, match="is quantised, and vtx-tune trains floats; name the unquantised checkpoint"):
        open_workspace(replace(options, model=str(folder)), tmp_path / "t", QUIET)
    assert not (tmp_path / "t").exists()


def test_k_beyond_the_model_is_refused_before_anything_is_read(options: TuneOptions, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="K = 5 is beyond the model's 4 layers"):
        tune(replace(options, depths=Depths.parse("5")), tmp_path / "out", QUIET, QUIET)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"question": "what?"}, "it names no image"),
        ({"image": "torn.png", "question": "what?"}, "torn.png"),
        ({"image": "nowhere.png", "question": "what?"}, "nowhere.png"),
    ],
)
def test_data_without_readable_images_are_refused_in_one_line(
    line: dict[str, str], message: str, options: TuneOptions, tmp_path: Path
) -> None:
    (tmp_path / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"0" * 40)
    (tmp_path / "data.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    words = [str(tmp_path / "data.jsonl"), "--model", options.model, "--k", "3", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(command, words)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert message in done.stderr


def test_a_checkpoint_that_is_not_there_is_told(tmp_path: Path, data: Path) -> None:
    with pytest.raises(CheckpointError):
        tune(TuneOptions(Depths(2, 3), str(tmp_path / "no model here"), str(data)), tmp_path / "out", QUIET, QUIET)
