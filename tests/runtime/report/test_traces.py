"""Conformance traces: OpenVINO meets those of onnxruntime, and a trace altered in any respect is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.bundles import export, export_with, write_gate
from tests.support.exported import THREADS
from tests.support.families.qwen import QWEN2, QWEN3
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json, write_json
from tests.support.tiny import Tiny
from vtx import cli
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.safetensors import write_safetensors
from vtx.runtime.errors import RequestError
from vtx.runtime.report.golden import Check, choice_limit, logits_limit
from vtx.runtime.report.traces.compare import compare_traces
from vtx.runtime.report.traces.files import read_index, read_tensors
from vtx.runtime.report.traces.record import write_traces

MUSTDROP = "mustdrop:gamma=0.05,alpha=1,tau=off,key=0.1,layers=2/4/6"
REDUCTIONS = ("lsm+fastv:k=2,ratio=0.5", MUSTDROP, "cdpruner:keep=5+dart:keep=3,k=2")
EVERY_KIND = (
    "lsm:tau=-1+fastv:k=2,ratio=0.5",
    MUSTDROP,
    "cls:keep=0.5+dart:keep=5,k=2",
    "cdpruner:keep=5",
    "dart:keep=5,k=0",
)
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Model:
    options = ExportOptions(str(tiny_checkpoint()), (3, 5), "fp32", dialects=("ort", "plain"), reductions=REDUCTIONS)
    out = tmp_path_factory.mktemp("traces") / "bundle"
    return load(export_with(options, out).folder, device="cpu", threads=THREADS)


@pytest.fixture(scope="module")
def traces(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "ort"
    write_traces(model, folder)
    return folder


def judged(model: Model, expected: Path, given: Path) -> list[Check]:
    return list(compare_traces(expected, given, logits_limit(model.manifest, "f32")))


def failures(model: Model, expected: Path, given: Path) -> list[str]:
    return [f"{check.name}: {check.note}" for check in judged(model, expected, given) if not check.passed]


def test_there_is_a_case_for_every_policy_that_the_bundle_offers(traces: Path) -> None:
    index = read_index(traces)
    assert {case.k for case in index.cases} == {"none", "3", "5"}
    specs = {case.reduce.replace(":", ",").split(",")[0] for case in index.cases if "+" not in case.reduce}
    assert specs == {"none", "lsm", "fastv", "mustdrop", "cdpruner", "dart"}
    assert sum("+" in case.reduce for case in index.cases) == 6
    names = ["first", "second", "chat, first turn", "chat, second turn", "third", "replaced image", "another image"]
    names += ["two images", "replaced second image", "text"]
    assert all([question.name for question in case.questions] == names for case in index.cases)


def test_slots_and_positions_follow_the_withdrawal(traces: Path) -> None:
    index = read_index(traces)
    case = next(case for case in index.cases if (case.k, case.reduce) == ("3", "none"))
    tensors = read_tensors(traces, case.file)
    positions = np.arange(len(tensors["0.ids"]))
    text = positions[tensors["0.is_vision"] == 0]
    for layer in range(1, index.layers + 1):
        assert tensors[f"0.positions.{layer}"].tolist() == (positions if layer < 3 else text).tolist()
        assert tensors[f"0.decoded.{layer}"].tolist() == [len(positions) + step for step in range(index.steps)]
    assert tensors["0.kept.0"].sum() == 0
    assert case.questions[0].cuts[0].layer == 3


def test_a_cache_that_shrinks_after_the_prompt_shows_its_survivors_only(traces: Path) -> None:
    index = read_index(traces)
    case = next(c for c in index.cases if c.reduce.startswith("mustdrop") and c.k == "none")
    tensors = read_tensors(traces, case.file)
    last = f"0.kept.{len(case.questions[0].cuts) - 1}"
    survivors = (tensors["0.is_vision"] == 0).nonzero()[0].size + int(tensors[last].sum())
    assert 0 < tensors[last].sum() < tensors["0.is_vision"].sum()
    assert [len(tensors[f"0.positions.{layer}"]) for layer in range(2, index.layers + 1)] == [survivors] * 7
    assert len(tensors["0.positions.1"]) == len(tensors["0.ids"])


@pytest.mark.slow
def test_traces_of_a_runtime_agree_with_themselves_written_again(model: Model, traces: Path, tmp_path: Path) -> None:
    write_traces(model, tmp_path / "again")
    checks = judged(model, traces, tmp_path / "again")
    assert len(checks) == 1 + 10 * len(read_index(traces).cases)
    assert max(check.difference for check in checks) == 0


def test_traces_that_end_half_way_leave_a_folder_that_can_be_named_again(model: Model, tmp_path: Path) -> None:
    def interrupt(step: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_traces(model, tmp_path / "traces", interrupt)
    assert not list((tmp_path / "traces").iterdir())


@pytest.mark.parametrize("tiny", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_positions_of_three_parts_are_traced(tiny_checkpoint: Checkpoints, tmp_path: Path, tiny: Tiny) -> None:
    tiny = replace(tiny, layers=2, maps=(0, 1))
    model = load(export(tiny_checkpoint(tiny), tmp_path / "bundle", (2,), dialects=("ort",)).folder, device="cpu")
    for name in ("once", "again"):
        write_traces(model, tmp_path / name)
    assert failures(model, tmp_path / "once", tmp_path / "again") == []
    tensors = read_tensors(tmp_path / "once", "case-00.safetensors")
    positions, image = tensors["0.positions.1"], tensors["0.is_vision"].astype(bool)
    assert positions.shape == (len(image), 3)
    assert (positions[~image] == positions[~image][:, :1]).all()
    assert len({tuple(position) for position in positions[image]}) == image.sum()


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gate before layer 3 that fires for some of the questions and not for others, and never by a narrow margin.

    Its probabilities are 0.13 or more from one half; at int4 the engines' differ by up to 0.03.
    """
    return write_gate(tmp_path_factory.mktemp("gates"), 266)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
def test_engines_meet_each_other_at_every_precision_and_for_every_kind_of_policy_at_int8(
    tiny_checkpoint: Checkpoints, gates: Path, tmp_path: Path, precision: str
) -> None:
    pytest.importorskip("openvino", reason='openvino is not installed; pip install "vtx-edge[openvino]"')
    kinds = EVERY_KIND if precision == "int8" else ()
    options = ExportOptions(
        str(tiny_checkpoint()), (3,), precision, gates=gates, dialects=("ort", "plain"), reductions=kinds
    )
    bundle = export_with(options, tmp_path / "bundle").folder
    for device in ("cpu", "openvino"):
        model = load(bundle, device=device, threads=THREADS)
        write_traces(model, tmp_path / device)
    cases = {(case.k, case.reduce): case for case in read_index(tmp_path / "cpu").cases}
    assert {question.k for question in cases["auto", "none"].questions} == {None, 3}, "the gate decides alike for all"
    limits = logits_limit(model.manifest, model.backend.compute), choice_limit(model.manifest)
    assert limits == {"fp32": (1e-4, 0), "fp16": (1e-2, 0)}.get(precision, (0.15, 0.25))
    for expected, given in (("cpu", "openvino"), ("openvino", "cpu")):
        checks = list(compare_traces(tmp_path / expected, tmp_path / given, *limits))
        assert [f"{check.name}: {check.note}" for check in checks if not check.passed] == []
        others = [check for check in checks if "chosen differently" in check.note]
        assert len(others) <= len(checks) // 10
        assert not others or limits[1]


@pytest.mark.slow
def test_another_choice_is_refused_on_the_same_engine_and_beyond_the_share(
    model: Model, traces: Path, tmp_path: Path
) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["0.kept.0"][:2] ^= 1

    other = altered(traces, tmp_path, change)
    assert "kept.0[0] is 1, expected 0" in failures(model, traces, other)[0]
    index = read_json(other / "traces.json")
    write_json(other / "traces.json", {**index, "device": "another"})

    def checked(choices: float) -> list[Check]:
        return [check for check in compare_traces(traces, other, 1e-4, choices) if check.difference or not check.passed]

    assert [check.note for check in checked(0.2)] == ["kept.0: 2 of 16 image tokens chosen differently"]
    assert [check.passed for check in (*checked(0.2), *checked(0.1), *checked(0.0))] == [True, False, False]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("name", ["ids", "is_vision", "kept.0", "positions.1", "positions.8", "decoded.8"])
def test_one_altered_whole_number_is_refused_by_name(
    model: Model, traces: Path, tmp_path: Path, name: str, number: int
) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors[f"{number}.{name}"].flat[-1] ^= 1

    found = failures(model, traces, altered(traces, tmp_path, change))
    assert len(found) == 1
    assert name in found[0]


def test_logits_beyond_the_limit_are_refused_and_those_within_are_not(
    model: Model, traces: Path, tmp_path: Path
) -> None:
    limit = logits_limit(model.manifest, "f32")

    def shift(share: float) -> Change:
        def change(tensors: dict[str, Any]) -> None:
            row = tensors["1.logits"][2]
            row[row.argmin()] -= share * limit * np.abs(row).max()

        return change

    assert failures(model, traces, altered(traces, tmp_path / "within", shift(0.5))) == []
    found = failures(model, traces, altered(traces, tmp_path / "beyond", shift(2)))
    assert len(found) == 1
    assert ": second" in found[0]


@pytest.mark.slow
def test_another_greedy_token_is_refused_unless_it_is_as_likely(model: Model, traces: Path, tmp_path: Path) -> None:
    def least(tensors: dict[str, Any]) -> None:
        tensors["0.tokens"][1] = tensors["0.logits"][1].argmin()

    assert "token 1 is" in failures(model, traces, altered(traces, tmp_path / "least", least))[0]

    def tied(tensors: dict[str, Any]) -> None:
        logits, tokens = tensors["0.logits"], tensors["0.tokens"]
        logits[1][(tokens[1] + 1) % logits.shape[1]] = logits[1][tokens[1]]

    expected = altered(traces, tmp_path / "tied", tied)

    def other(tensors: dict[str, Any]) -> None:
        tied(tensors)
        tensors["0.tokens"][1] = (tensors["0.tokens"][1] + 1) % tensors["0.logits"].shape[1]
        tensors["0.logits"][2:] = 0  # of another text, so not compared

    assert failures(model, expected, altered(traces, tmp_path / "other", other)) == []


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_refused(model: Model, traces: Path, tmp_path: Path, value: float) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["0.logits"][0, 0] = value

    assert len(failures(model, traces, altered(traces, tmp_path, change))) == 1


def test_a_missing_case_and_a_missing_question_are_refused(model: Model, traces: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(traces, tmp_path / "fewer"))
    index = read_json(folder / "traces.json")
    del index["cases"][1]
    del index["cases"][0]["questions"][-1]
    write_json(folder / "traces.json", index)
    found = failures(model, traces, folder)
    assert [line.rpartition(": ")[2] for line in found] == ["this question is missing", "this case is missing"]


@pytest.mark.parametrize(
    ("key", "value"), [("format", 1), ("format", "2"), ("steps", None), ("cases", {}), ("surprise", 1)]
)
def test_an_index_that_is_not_one_is_refused(traces: Path, tmp_path: Path, key: str, value: Any) -> None:
    index = {**read_json(traces / "traces.json"), key: value}
    write_json(tmp_path / "traces.json", index)
    with pytest.raises(RequestError, match="write the traces again"):
        read_index(tmp_path)


def test_traces_of_another_bundle_and_files_elsewhere_are_refused(model: Model, traces: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(traces, tmp_path / "other"))
    index = read_json(folder / "traces.json")
    write_json(folder / "traces.json", {**index, "manifest": "0" * 64})
    with pytest.raises(RequestError, match="of another bundle"):
        judged(model, traces, folder)
    index["cases"][0]["file"] = "../case-00.safetensors"
    write_json(folder / "traces.json", index)
    with pytest.raises(RequestError, match="not in its directory"):
        judged(model, traces, folder)


def test_doctor_writes_traces_and_judges_them(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    model = load(export(tiny_checkpoint(), tmp_path / "bundle", (5,)).folder, device="cpu", threads=THREADS)
    bundle, out = str(model.bundle.folder), tmp_path / "traces"
    done = CliRunner().invoke(cli.doctor, [bundle, "--device", "cpu", "--write-traces", str(out)])
    assert done.exit_code == 0, done.output
    assert "3 cases of 30 questions" in done.stdout
    good = CliRunner().invoke(cli.doctor, [bundle, "--device", "cpu", "--check-traces", str(out), "--json"])
    assert good.exit_code == 0, good.output
    assert len(json.loads(good.stdout)["checks"]) == 31
    tensors = read_tensors(out, "case-00.safetensors")
    tensors["0.ids"][0] += 1
    write_safetensors(out / "case-00.safetensors", tensors, None)
    bad = CliRunner().invoke(cli.doctor, [bundle, "--device", "cpu", "--check-traces", str(out)])
    assert bad.exit_code == 1
    assert "1 of 31 checks failed, first: K = none, none: first" in bad.output
    again = CliRunner().invoke(cli.doctor, [bundle, "--device", "cpu", "--write-traces", str(out)])
    assert again.exit_code == 1
    assert "not an empty directory" in again.output


def altered(traces: Path, folder: Path, change: Change) -> Path:
    """A copy with a change to the tensors of a case that has cuts."""
    target = Path(shutil.copytree(traces, folder / "altered"))
    case = next(case for case in read_index(traces).cases if (case.k, case.reduce) == ("5", "none"))
    tensors = read_tensors(target, case.file)
    change(tensors)
    write_safetensors(target / case.file, tensors, None)
    return target
