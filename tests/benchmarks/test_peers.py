"""The comparison with other engines: with those that need no environment of their own, on a tiny checkpoint."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from benchmarks.peers import contenders, contract, results, summary, table, workload
from benchmarks.peers.contenders import Contender, PeerError, Places
from benchmarks.peers.rivals import openvino_cdpruner
from benchmarks.peers.rivals.llamacpp import gguf_files
from benchmarks.peers.worker import MARK

from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json
from tests.support.tiny import Tiny
from vtx import Options, load

ROOT = Path(__file__).resolve().parents[2]
TOKENS, NEW = 120, 6
TINY = Tiny()


def compare(folder: Path, checkpoint: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.peers", *words, "--checkpoint", checkpoint, "--work", folder / "work",
               "--rounds", "1", "--threads", "1", "--prompt-tokens", TOKENS, "--new-tokens", NEW,
               "--json", folder / "figures.json"]  # fmt: skip
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([*map(str, command)], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_vtx_and_transformers_give_the_same_ids_in_one_table(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    done = compare(tmp_path, tiny_checkpoint(TINY), "vtx:fp32", "vtx:fp32/3", "transformers:fp32")
    assert done.returncode == 0, done.stderr
    report = read_json(tmp_path / "figures.json")
    figures = report["contenders"]
    assert report["prebuilt"] == {"fp32": ["3"]}
    assert "which have a stage more for each of them: fp32: 3" in done.stdout
    withdrawn = [contract.Result.from_dict(found) for found in figures.pop("vtx fp32/3")]
    assert {result.ids for result in withdrawn} == {answer_at_3(tmp_path / "work", tiny_checkpoint(TINY))}
    results = [contract.Result.from_dict(found) for rounds in figures.values() for found in rounds]
    assert len(results) == 2
    assert {result.ids for result in results} == {results[0].ids}
    assert len(results[0].ids) == NEW
    for result in results:
        assert 0 < result.vision < result.first
        assert min(result.load, result.cold, result.decode, result.second, result.rss) > 0
    lines = [line for line in done.stdout.splitlines() if line.startswith(("| vtx fp32 ", "| transformers"))]
    assert [f"{NEW} of {NEW}" in line for line in lines] == [True, True]
    for heading in ("The best rival at each precision", "What withdrawal at K gives"):
        assert heading in done.stdout
    assert len([line for line in done.stdout.splitlines() if line.startswith("| fp32 ")]) == 2
    assert len([line for line in done.stdout.splitlines() if line.startswith("| fp32/3 ")]) == 1


def answer_at_3(folder: Path, checkpoint: Path) -> tuple[int, ...]:
    """What the bundle in `folder` answers at K = 3, asked here."""
    asked = workload.make(checkpoint, folder, TOKENS).first
    with load(folder / "vtx-fp32" / "bundle", device="cpu", threads=1).open(asked.image) as conversation:
        return conversation.ask(asked.asked, 3, Options(max_new_tokens=NEW, ignore_eos=True)).token_ids


@pytest.mark.slow
def test_a_rival_that_cannot_be_prepared_stands_in_the_table_with_its_reason(tmp_path: Path) -> None:
    nothing = tmp_path / "no-checkpoint"
    nothing.mkdir()
    us = Contender("vtx", "fp32")
    with pytest.raises(PeerError) as caught:
        contenders.prepare(us, nothing, Places(tmp_path, tmp_path, "torch"))
    assert "config.json" in str(caught.value)
    assert not (tmp_path / "vtx-fp32" / contenders.READY).exists()
    row = table.rows({}, {us: f"cannot be prepared: {caught.value}"})[1]
    assert row[0] == "vtx fp32"
    assert "config.json" in row[1]


def test_a_conversion_is_used_again_for_its_own_checkpoint_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(contenders, "call", lambda command, *_: asked.append(command[-2]) or "")
    us, places = Contender("vtx", "fp32"), Places(tmp_path, tmp_path / "work", "torch")
    for name in ("one", "one", "other"):
        contenders.prepare(us, tmp_path / name, places)
    assert asked == [str(tmp_path / "one"), str(tmp_path / "other")]


def test_a_bundle_is_made_again_for_a_k_that_it_lacks_and_serves_those_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(contenders, "call", lambda command, *_: asked.append(command[-3]) or "")
    at_9, places = Contender("vtx", "int8@openvino/9"), Places(tmp_path, tmp_path / "work", "torch")
    for contender, ks in ((at_9.whole, ()), (at_9, (9,)), (at_9.whole, ()), (at_9, (9, 5)), (at_9, (5,))):
        contenders.prepare(contender, tmp_path / "one", places, ks)
    assert asked == ["int8", "int8/9", "int8/5,9"]
    assert contenders.prebuilt(at_9, places) == ["5", "9"]


def test_questions_have_the_length_asked_for_and_share_the_image(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    made = workload.make(tiny_checkpoint(TINY), tmp_path, TOKENS)
    for question in (made.warm, made.first, made.second):
        assert TOKENS - 3 <= len(question.ids) <= TOKENS
        assert question.ids.count(question.image_token) == TINY.vision_tokens
        assert question.ids[question.front - 1] == question.image_token != question.ids[question.front]
        assert question.asked in question.text
    assert made.first.image == made.second.image != made.warm.image
    assert made.first.ids[: made.first.front] == made.second.ids[: made.second.front]
    assert made.first.ids != made.second.ids
    assert contract.Work.from_json(work(made).to_json()) == work(made)


def work(made: workload.Workload) -> contract.Work:
    return contract.Work("folder", "fp32", 1, NEW, made.warm, made.first, made.second)


def test_a_prompt_too_short_for_the_image_is_refused(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="10 tokens do not hold an image"):
        workload.make(tiny_checkpoint(TINY), tmp_path, 10)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("llamacpp:q5", "llamacpp:q5: not among"),
        ("llamacpp/9", "llamacpp/9: a K is a number, and only vtx has one"),
        ("vtx:fp32/x", "vtx:fp32/x: a K is a number"),
        ("vtx:fp32/", "vtx:fp32/: a K is a number"),
    ],
)
def test_an_unknown_contender_is_named(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        contenders.contenders(["vtx", word])


def test_a_k_goes_with_one_precision_or_with_all_of_them_beside_the_whole() -> None:
    one = contenders.contenders(["openvino:int8", "vtx:int8@openvino/9", "vtx:int8@openvino"])
    assert [c.name for c in one] == ["vtx int8@openvino", "vtx int8@openvino/9", "openvino int8"]
    assert {(c.stored, c.kind, c.k) for c in one} == {("int8", "int8", 9), ("int8", "int8", None)}
    every = [c for c in contenders.contenders([]) if c.rival == "vtx"]
    assert len(every) == 2 * len(Contender("vtx", "").module.PRECISIONS)
    assert [c.k for c in every] == [None, 9] * (len(every) // 2)


class Pipeline:
    """OpenVINO GenAI's, of a model that is pruned or not; what it was asked with."""

    def __init__(self, *, prunes: bool) -> None:
        self.prunes, self.asked = prunes, list[tuple[int, int]]()

    def ask(self, question: Any, new_tokens: int, pruning_ratio: int = 0) -> contract.Answer:
        self.asked.append((new_tokens, pruning_ratio))
        return contract.Answer((int(self.prunes and pruning_ratio > 0),) * new_tokens, (1.0,) * new_tokens)


def test_a_pruner_that_prunes_nothing_is_no_contender() -> None:
    idle = openvino_cdpruner.Loaded(Pipeline(prunes=False))
    with pytest.raises(ValueError, match="takes pruning_ratio=78 and prunes nothing of this model"):
        idle.ask(None, 2)  # type: ignore[arg-type]
    pipeline = Pipeline(prunes=True)
    able = openvino_cdpruner.Loaded(pipeline)
    assert [able.ask(None, count).ids for count in (2, 3)] == [(1, 1), (1, 1, 1)]  # type: ignore[arg-type]
    assert pipeline.asked == [(2, 78), (16, 78), (16, 0), (3, 78)]


def test_a_rival_with_other_settings_uses_the_conversion_of_the_first(tmp_path: Path) -> None:
    places = Places(tmp_path, tmp_path / "work", "torch")
    pair = [Contender(rival, "int8") for rival in ("openvino", "openvino_cdpruner")]
    assert len({places.model(c) for c in pair}) == len({places.python(c) for c in pair}) == 1


def test_every_rival_offers_the_interface() -> None:
    everybody = contenders.contenders([])
    assert {c.rival for c in everybody} == set(contenders.RIVALS)
    assert len(set(everybody)) == len(everybody)
    for contender in everybody:
        module: Any = contender.module
        assert module.PACKAGES
        assert callable(module.prepare)
        assert callable(module.load)


def test_as_installed_leaves_every_option_but_the_precision_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = contenders.contenders([*contenders.INSTALLED, "vtx@auto/9"])
    ours = [c for c in chosen if c.rival == "vtx"]
    assert [(c.stored, c.k) for c in ours[:4]] == [("fp32", None), ("fp32", 9), ("bf16", None), ("bf16", 9)]
    assert {c.rival for c in chosen} == set(contenders.RIVALS) - {"openvino_cdpruner"}
    assert all(c.installed for c in chosen)
    assert ours[0].module.engine_of(contract.Precision.parse("int8@auto")) == ("auto", None)
    asked: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: asked.append(command))
    ours[0].module.prepare(tmp_path / "c", "int8@auto/9", tmp_path)
    assert asked[0][1:] == ["--model", f"{tmp_path / 'c'}", "--k", "9", "--precision", "int8", "--out",
                            f"{tmp_path / 'bundle'}"]  # fmt: skip


def test_vtx_as_installed_answers_from_its_own_environment_and_is_exported_by_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    monkeypatch.setattr(contenders, "call", lambda command, *_: used.append(command[0]) or f"{MARK}{{}}")
    monkeypatch.setattr(contract.Result, "from_dict", lambda values: values)
    ours, places = Contender("vtx", "int8@auto"), Places(tmp_path, tmp_path / "work", "torch", tmp_path / "own/python")
    contenders.prepare(ours, tmp_path / "c", places)
    made = contract.Question("i", "a", "t", (1,), 1, 1)
    for contender in (ours, Contender("vtx", "int8")):
        contenders.run(contender, contract.Work("f", contender.precision, 1, 1, made, made, made), places)
    assert used == [sys.executable, str(tmp_path / "own/python"), sys.executable]
    assert places.model(ours).name == "vtx-int8-installed"


def test_results_become_tables_of_the_documentation_and_a_chart(tmp_path: Path) -> None:
    rounds = {
        Contender("vtx", "int8@auto"): [result(2000.0, (1,)), result(1000.0, (1,)), result(3000.0, (1,))],
        Contender("vtx", "int8@auto/9"): [result(500.0, (1,))] * 3,
        Contender("llamacpp", "q8_0@auto"): [result(4000.0, (1,))] * 3,
        Contender("ortgenai", "int4@auto"): [result(100.0, (1,))] * 3,
    }
    failed = {Contender("openvino", "int8@auto"): "cannot be run: no memory"}
    results.write(tmp_path / "r.jsonl", rounds, failed, "2 cores")
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = {name: [line["row"] for line in lines if line["table"] == name and "row" in line]
            for name in ("as-installed", "headline", "as-installed-withdrawn")}  # fmt: skip
    assert [row[:2] for row in rows["as-installed"]] == [
        ["vtx", "int8"], ["vtx, K = 9", "int8"], ["llama.cpp", "q8_0"], ["onnxruntime-genai†", "int4"],
        ["OpenVINO GenAI", "int8"],
    ]  # fmt: skip
    assert rows["as-installed"][0][7] == ["2000.0", "1000.0", "3000.0"]  # ms a token
    assert rows["as-installed"][4][2] == "failed: cannot be run: no memory"
    tokens = [row for row in rows["headline"] if row[0] == "per token, ms"]
    assert tokens == [["per token, ms", "int8", "2,000.0", "**500.0**", "", "4,000.0", "", "", ""]]
    assert rows["headline"][1][1:] == ["int4", "", "", "", "", "0.10†", "", ""]
    assert rows["as-installed-withdrawn"][0][0] == "int8, K = 9"
    columns = next(line["columns"] for line in lines if line["table"] == "as-installed")
    bars = runpy.run_path(str(ROOT / "docs/measurements/chart.py"))["bars"]
    drawn = bars(columns, rows["as-installed"], "int8")
    root = ElementTree.fromstring(drawn)
    assert len([bar for bar in root.iter() if bar.get("fill") in ("#1f6feb", "#a8b1bb")]) == 6
    assert "OpenVINO GenAI" not in drawn


def result(seconds: float, ids: tuple[int, ...]) -> contract.Result:
    return contract.Result(1.0, seconds, seconds, seconds, seconds, 1.0, None, ids)


def test_ratios_are_taken_round_by_round_to_vtx_of_the_same_kind() -> None:
    slow, fast = result(4.0, (1, 2, 3)), result(2.0, (1, 2, 3))
    rounds = {
        Contender("vtx", "fp32"): [fast, slow],
        Contender("vtx", "int8"): [fast, fast],
        Contender("llamacpp", "q8_0"): [slow, slow],
        Contender("transformers", "fp32"): [result(3.0, (1, 2, 4)), result(6.0, (1, 2, 3))],
        Contender("transformers", "bf16"): [fast, slow],
    }
    rounds[Contender("vtx", "fp32/9")] = [result(1.0, (1, 2, 5)), result(1.0, (1, 2, 5))]
    cells = {row[0]: row[-2:] for row in table.rows(rounds, {})[1:]}
    assert cells["vtx fp32/9"] == ["2 of 3", "0.38 / 0.38 / 0.38 (fp32)"]
    assert cells["llamacpp q8_0"] == ["3 of 3", "2.00 / 2.00 / 2.00 (int8)"]
    assert cells["transformers fp32"] == ["2 of 3", "1.50 / 1.50 / 1.50 (fp32)"]
    assert cells["transformers bf16"] == ["3 of 3", "1.00 / 1.00 / 1.00 (fp32)"]
    assert cells["vtx fp32"] == ["3 of 3", "-"]


def test_the_summary_takes_the_best_rival_of_each_figure_and_pairs_within_rounds() -> None:
    def made(first: float, decode: float, rss: float) -> contract.Result:
        return contract.Result(1, 1, first, decode, 1000, rss, 500, (1,))

    rounds = {
        Contender("vtx", "int4"): [made(2000, 20, 100), made(4000, 20, 100)],
        Contender("vtx", "int4/9"): [made(1000, 10, 80), made(2000, 20, 80)],
        Contender("llamacpp", "q4_0"): [made(4000, 10, 300), made(4000, 12, 300)],
        Contender("openvino", "int4"): [made(3000, 40, 200), made(3000, 40, 200)],
        Contender("ortgenai", "int4"): [made(1000, 5, 50), made(1000, 5, 50)],  # has no tower
        Contender("transformers", "bf16"): [made(1, 1, 1), made(1, 1, 1)],
    }
    [ours, at_9] = summary.best(rounds)[1:]
    assert ours[:2] == ["int4", "int4"]
    assert at_9[1] == "int4/9"
    shown = [cell.partition("; ")[2] for cell in ours[2:]]
    assert shown[0] == "openvino int4 3.00 (3.00 to 3.00): 1.12 (0.75 to 1.50)"
    assert shown[1] == "ortgenai int4 5.0 (5.0 to 5.0): 0.25 (0.25 to 0.25)"
    assert shown[3] == "openvino int4 200 (200 to 200): 2.00 (2.00 to 2.00)"
    assert summary.withdrawn(rounds)[1] == [
        "int4/9", "2.00 (2.00 to 2.00)", "2.67 (2.33 to 3.00)", "1.50 (1.00 to 2.00)", "1.00 (1.00 to 1.00)",
        "1.25 (1.25 to 1.25)",
    ]  # fmt: skip


def test_a_precision_without_a_rival_is_left_out_of_the_summary() -> None:
    assert summary.in_words({Contender("vtx", "fp32"): [result(1.0, (1,))]}) == ""


def test_rows_of_q_and_k_are_paired_for_rotation_side_by_side() -> None:
    np = pytest.importorskip("numpy")
    rows = np.arange(8)[:, None]  # two heads of four: halves (0, 1 | 2, 3) and (4, 5 | 6, 7)
    assert gguf_files.pairs_together(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_result_is_found_among_what_libraries_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = f"loading\n{MARK}{json.dumps(vars_of(result(1.0, (5,))))}\nbye\n"
    monkeypatch.setattr(contenders, "call", lambda *_: printed)
    made = contract.Question("i", "a", "t", (1,), 1, 1)
    found = contenders.run(Contender("vtx", "fp32"), contract.Work("f", "fp32", 1, 1, made, made, made),
                           Places(tmp_path, tmp_path, ""))  # fmt: skip
    assert found.ids == (5,)


def vars_of(found: contract.Result) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(found)
