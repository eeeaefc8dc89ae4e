"""vtx-bench --methods: what each method answers and costs, the rival at its cost, the verdict, bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from tests.support.bundles import EXPORT_ONLY, export, export_with
from tests.support.dialects import DialectBackend
from tests.support.exported import THREADS, Models
from tests.support.families.smolvlm import SMOLVLM
from tests.support.gates import certain_gate, write_gates
from tests.support.tiny import Tiny, random_image

from vtx import cli
from vtx.commands import bench as commands
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.api.loaded import LoadedBundle
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.policies import parse
from vtx.runtime.report.inspect import kv_bytes
from vtx.runtime.terminal.console import WideTable
from vtx.tools.bench.compare import BETTER, EQUAL, WORSE, Comparison, make_comparison
from vtx.tools.bench.methods import Method, MethodAnswer, find_methods, short
from vtx.tools.bench.stopwatch import timed
from vtx.tools.bench.tables import comparison_tables
from vtx.tools.estimate.flops import encode_flops, make_schedule, prefill_flops
from vtx.tools.estimate.sizes import bundle_size

TINY = Tiny(image=84)  # 6 x 6 patches, so four windows
V, MERGED = 36, 4 * 8
KS = (5, 3)  # the first is the one behind reductions
WORDS = ("none", "lsm:tau=-1", "cls:keep=0.25", "fastv:k=2,ratio=0.5", "mustdrop:192,layers=3/5")
QUESTIONS = ("what is it?", "how many shapes are there?", "where is the red one?")
NAMES = [
    "none", "K = 3", "K = 5",
    "lsm:tau=-1", "cls:keep=0.25", "fastv:k=2,ratio=0.5", "mustdrop:192,layers=3/5",
    "lsm:tau=-1 + K = 5", "cls:keep=0.25 + K = 5", "fastv:k=2,ratio=0.5 + K = 5", "mustdrop:192,layers=3/5 + K = 5",
    "random:keep=0.25", "random:keep=0.5",
]  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = ExportOptions(str(tiny_checkpoint(TINY)), KS, "fp32", dialects=DIALECTS, reductions=WORDS)
    folder = tmp_path_factory.mktemp("methods") / "bundle"
    return export_with(options, folder).folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data file: one answer is known and wrong, the others are not known."""
    folder = tmp_path_factory.mktemp("data")
    lines = []
    for number, question in enumerate(QUESTIONS):
        random_image(number).save(folder / f"{number}.png")
        answer = {"answer": "a sentence that no random model says"} if not number else {}
        lines.append(json.dumps({"image": f"{number}.png", "question": question, **answer}))
    (folder / "questions.jsonl").write_text("\n".join(lines))
    return folder / "questions.jsonl"


def vtx_bench(*words: str) -> Result:
    few = ("--methods", "--new-tokens", "3", "--threads", str(THREADS))
    return CliRunner().invoke(cli.bench, [*few, *words], prog_name="vtx-bench")


@pytest.fixture(scope="module")
def report(bundle: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target = tmp_path_factory.mktemp("report") / "out.json"
    done = vtx_bench("--bundle", str(bundle), "--data", str(data), "--out", str(target))
    assert done.exit_code == 0, done.stderr
    assert "13 methods on 3 questions of questions.jsonl; predicted: about" in done.stderr
    assert "mustdrop:192,layers=3/5 +" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    found: dict[str, Any] = json.loads(target.read_text())
    return found


@pytest.fixture(scope="module")
def methods(report: dict[str, Any]) -> dict[str, Any]:
    return {method["name"]: method for method in report["methods"]}


# --- what is measured -----------------------------------------------------------------------------


def test_every_method_of_the_bundle_and_one_withdrawal_behind_each_is_asked(report: dict[str, Any]) -> None:
    assert [method["name"] for method in report["methods"]] == NAMES
    assert report["format"] == "vtx-methods-2"
    assert [one["method"] for one in report["compared"]] == NAMES[3:]
    assert report["data"] == {"source": "questions.jsonl", "items": 3, "skipped": []}
    for method in report["methods"]:
        assert method["ms"]["first_token"]["n"] == method["ms"]["second_question"]["n"] == 3
        assert method["ms"]["vision"]["median"] + method["ms"]["prefill"]["min"] <= method["ms"]["first_token"]["max"]


def test_rows_left_are_those_that_each_method_says(methods: dict[str, Any]) -> None:
    layers, fewer = 8, V - MERGED
    assert methods["none"]["vision_rows"] == V
    assert methods["K = 5"]["vision_rows"] == pytest.approx(V * 3 / layers)  # they leave layers 1 to 3
    assert methods["lsm:tau=-1"]["vision_rows"] == fewer
    assert methods["lsm:tau=-1 + K = 5"]["vision_rows"] == pytest.approx(fewer * 3 / layers)
    assert methods["cls:keep=0.25"]["vision_rows"] == V / 4
    assert methods["fastv:k=2,ratio=0.5"]["vision_rows"] == pytest.approx((V + V / 2 * 7) / layers)
    assert methods["cls:keep=0.25"]["full_layers"] == methods["none"]["full_layers"] == layers
    assert methods["cls:keep=0.25 + K = 5"]["full_layers"] == 4


@pytest.mark.parametrize("dialect", ["plain", "trt"])
def test_rows_of_merged_windows_that_a_graph_computes_all_the_same_are_counted(bundle: Path, dialect: str) -> None:
    backend, calls = timed(DialectBackend(Bundle.open(bundle), dialect))
    assert len(backend.vision(np.zeros((1, 3, 84, 84), np.float32), {"tau": np.float32([-1])})) == V - MERGED
    assert calls[0].tokens == V


def test_arithmetic_is_that_of_the_rows_of_each_layer(bundle: Path, methods: dict[str, Any], texts: list[int]) -> None:
    size = bundle_size(Bundle.open(bundle))

    def flops(kept: Sequence[int], merged: int = 0) -> float:
        prompts = [prefill_flops(size.decoder, make_schedule(kept, text=text)) for text in texts]
        return encode_flops(size.vision, 1, merged=merged) + sum(prompts) / len(prompts)

    assert methods["none"]["flops"] == pytest.approx(flops([V] * 8))
    assert methods["K = 3"]["flops"] == pytest.approx(flops([V] * 2 + [0] * 6))
    assert methods["lsm:tau=-1"]["flops"] == pytest.approx(flops([V - MERGED] * 8, MERGED))
    assert methods["fastv:k=2,ratio=0.5"]["flops"] == pytest.approx(flops([V] * 2 + [V // 2] * 6))
    for method in methods.values():
        assert method["flops_ratio"] == pytest.approx(method["flops"] / methods["none"]["flops"])


@pytest.fixture(scope="module")
def texts(bundle: Path) -> list[int]:
    """Tokens of each question's prompt that are not of the image."""
    text = load(bundle, threads=THREADS).loaded.text
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": q}]} for q in QUESTIONS]
    return [len(text.prompt([turn], V)) - V for turn in turns]


def test_caches_are_those_of_the_formula(bundle: Path, methods: dict[str, Any], texts: list[int]) -> None:
    manifest = Bundle.open(bundle).manifest
    for name, k, vision in (("none", None, V), ("K = 5", 5, V), ("cls:keep=0.25 + K = 5", 5, V // 4)):
        want = [kv_bytes(manifest, k, text=text, vision=vision) for text in texts]
        assert methods[name]["kv_bytes"] == pytest.approx(sum(want) / len(want))


def test_answers_are_compared_with_the_data_and_with_no_method(methods: dict[str, Any]) -> None:
    assert methods["none"]["same"]["share"] == 1
    assert methods["none"]["same"]["count"] == 3
    assert {(method["right"]["share"], method["right"]["count"]) for method in methods.values()} == {(0, 1)}


def test_answers_are_those_of_the_model_asked_alone(bundle: Path, report: dict[str, Any], data: Path) -> None:
    from vtx.runtime.api.options import Options

    model, options = load(bundle, threads=THREADS), Options(max_new_tokens=3)
    for method in report["methods"]:
        same = 0
        for number, question in enumerate(QUESTIONS):
            with model.open(str(data.parent / f"{number}.png")) as one:
                answers = [one.ask(question, k, options, reduce=word).token_ids for k, word in
                           ((None, None), (method["k"], method["reduce"]))]  # fmt: skip
            same += answers[0] == answers[1]
        assert method["same"]["share"] == same / 3, method["name"]


def test_the_demo_answers_right_and_a_small_k_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(commands, "DEMO_KS", (6, 2))
    monkeypatch.setattr(commands, "DEMO_REDUCTIONS", ("none", "cls:keep=0.25"))
    monkeypatch.delenv("VTX_BUNDLE", raising=False)
    target = tmp_path / "out.json"
    done = vtx_bench("--samples", "12", "--out", str(target))
    assert done.exit_code == 0, done.stderr
    assert "exporting the built-in demo model with every method" in done.stderr
    found = {method["name"]: method["right"]["share"] for method in json.loads(target.read_text())["methods"]}
    assert found["none"] >= 0.9
    assert found["K = 6"] >= 0.9
    assert found["K = 2"] < 0.9
    assert "exporting" not in vtx_bench("--samples", "1").stderr


@pytest.fixture(scope="module", params=[True, False], ids=["fires", "never"])
def gated(
    request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[bool, Path]:
    """Whether the gate before layer 3 fires for every question, and the bundle."""
    folder = tmp_path_factory.mktemp("gated")
    gates = write_gates(folder / "gates.safetensors", {3: certain_gate(request.param)})
    options = ExportOptions(str(tiny_checkpoint()), (3,), "fp32", gates=gates, dialects=("ort",))
    made = export_with(options, folder / "bundle")
    return request.param, made.folder


@pytest.mark.sampled(2)
def test_gates_are_asked_where_there_are_any(gated: tuple[bool, Path], data: Path, tmp_path: Path) -> None:
    fires, folder = gated
    done = vtx_bench("--bundle", str(folder), "--data", str(data), "--out", str(tmp_path / "out.json"))
    assert done.exit_code == 0, done.stderr
    found = {method["name"]: method for method in json.loads((tmp_path / "out.json").read_text())["methods"]}
    assert list(found) == ["none", "K = 3", "gates", "random:keep=0.25", "random:keep=0.5"]
    same = found["K = 3" if fires else "none"]
    for figure in ("full_layers", "vision_rows", "flops", "kv_bytes"):
        assert found["gates"][figure] == same[figure]


@pytest.mark.sampled(2)
def test_the_time_with_gates_is_measured_as_well(gated: tuple[bool, Path], tmp_path: Path) -> None:
    fires, folder = gated
    words = ["--bundle", str(folder), "--repeats", "1", "--threads", str(THREADS), "--out", str(tmp_path / "out.json")]
    done = CliRunner().invoke(cli.bench, [*words, "--new-tokens", "3"], prog_name="vtx-bench")
    assert done.exit_code == 0, done.stderr
    depths = json.loads((tmp_path / "out.json").read_text())["depths"]
    assert [depth["k"] for depth in depths] == [None, 3, "auto"]
    assert depths[2]["full_layers"] == (2 if fires else 8)
    assert depths[2]["prefill_flops"] == depths[1 if fires else 0]["prefill_flops"]


def test_layers_whose_image_a_second_question_reuses_are_counted(methods: dict[str, Any]) -> None:
    reused = {name: method["reused_layers"] for name, method in methods.items()}
    assert [reused[name] for name in ("none", "K = 3", "K = 5", "lsm:tau=-1", "cls:keep=0.25")] == [8, 2, 4, 8, 8]
    assert reused["fastv:k=2,ratio=0.5"] == 2  # what goes on from layer 3 is the question's choice
    assert reused["cls:keep=0.25 + K = 5"] == 4


def test_a_ladder_of_settings_within_budgets(bundle: Path, data: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) | {"answer": ""} for line in data.read_text().splitlines()]
    (tmp_path / "open.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    asked = ("--data", str(tmp_path / "open.jsonl"), "--images", str(data.parent), "--budgets", "100,80")
    words = ("--bundle", str(bundle), *asked, "--out", str(out), "--plot", str(plot))
    done = vtx_bench(*words)
    assert done.exit_code == 0, done.stderr
    assert (
        "left out, since the bundle was not exported for them: visionzip, hiprune, cdpruner, text=tower, dart, "
        in done.stderr
    )
    report = json.loads(out.read_text())
    named = {method["name"] for method in report["methods"]}
    assert {"none", "K = 3", "cls:keep=0.125", "cdpruner:keep=0.25,text=none", "fastv:k=2,ratio=0.9"} < named
    assert "cls:keep=0.5 + K = 3" in report["families"]["cls + withdrawal"]
    assert set(report["budgets"]) == {"flops", "first_token"}
    for row in report["budgets"]["flops"]:
        assert row["cost"] <= row["budget"]
        assert row["method"] in report["families"][row["family"]]
    assert {row["budget"] for row in report["budgets"]["flops"]} == {1.0, 0.8}
    assert "best setting within a share of the arithmetic" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("mustdrop:192", "mustdrop:192"),
        ("mustdrop:64,key=0", "mustdrop:64,key=0"),
        ("mustdrop:gamma=0.5", "mustdrop:gamma=0.5,alpha=0.001,tau=0.8,key=0.08"),
        ("lsm", "lsm:tau=0.8"),
        ("lsm:order=merged-first", "lsm:tau=0.8,order=merged-first"),
        ("cls", "cls:keep=0.25"),
    ],
)
def test_a_name_is_short_and_tells_methods_apart(word: str, name: str) -> None:
    assert [short(part) for part in parse(word)] == [name]


def only(model: Model, *reductions: str) -> Any:
    """A manifest with these reductions and no default K."""
    return SimpleNamespace(
        reductions=reductions, default_k=None, layout=model.manifest.layout, model=model.manifest.model
    )


def test_without_a_fixed_k_nothing_stands_behind_a_reduction(models: Models) -> None:
    manifest = only(models(), "cls:keep=0.25")
    assert [method.kind for method in find_methods(manifest, (None,))] == ["withdrawal", *["pruning"] * 3]
    assert [method.name for method in find_methods(manifest, ("auto", 4))] == [
        "none", "gates", "K = 4", "cls:keep=0.25", "cls:keep=0.25 + K = 4", "random:keep=0.25", "random:keep=0.5",
    ]  # fmt: skip
    own = only(models(), "random:keep=0.75")
    assert [method.name for method in find_methods(own, (None,))] == ["none", "random:keep=0.75"]


def test_random_tokens_stand_beside_withdrawal_too_unless_text_is_among_an_images_tokens(models: Models) -> None:
    assert [method.name for method in find_methods(only(models()), (4,))] == [
        "none", "K = 4", "random:keep=0.25", "random:keep=0.5",
    ]  # fmt: skip
    assert [method.name for method in find_methods(only(models()), (None,))] == ["none"]
    marked = only(models(SMOLVLM), "fastv:k=2,ratio=0.5")
    assert [method.name for method in find_methods(marked, (None,))] == ["none", "fastv:k=2,ratio=0.5"]


# --- the verdict ----------------------------------------------------------------------------------


def comparison(
    rights: Mapping[Method, Sequence[bool | None]], flops: Mapping[Method, int], images: Sequence[int] | None = None
) -> Comparison:
    """A comparison of answers made up: per method, whether each of the questions was answered right."""
    ms = {"vision": 1.0, "prefill": 2.0, "first_token": 3.0, "second_question": 2.0, "decode_per_token": 0.0}
    count = len(next(iter(rights.values())))
    answers = [
        {m: MethodAnswer(r[n], bool(r[n]), flops[m], 100, 5.0, 8, 0, ms) for m, r in rights.items()}
        for n in range(count)
    ]
    spec, layout = SimpleNamespace(name="made-up", layers=8), SimpleNamespace(max_tokens=V)
    model: Any = SimpleNamespace(
        manifest=SimpleNamespace(model=spec, layout=layout, precision="fp32"),
        backend=SimpleNamespace(device="cpu", compute="f32"),
    )
    data = SimpleNamespace(source="nowhere")
    trial: Any = SimpleNamespace(
        methods=tuple(rights),
        answers=answers,
        images=[*range(count)] if images is None else images,
        model=model,
        data=data,
        skipped=[],
        interrupted=False,
        predicted_s=1.0,
        threads=1,
    )
    return make_comparison(trial)


FULL, HALF, QUARTER = Method(None), Method(5), Method(3)
CLS = Method(None, "cls:keep=0.25")


def test_ten_questions_about_an_image_are_not_ten_images() -> None:
    right = {FULL: [True] * 40, HALF: [False] * 10 + [True] * 30, CLS: [True] * 40}
    alone, together = (
        comparison(right, {FULL: 100, HALF: 52, CLS: 48}, images) for images in (None, [n // 10 for n in range(40)])
    )
    assert alone.compared[0].verdict == BETTER
    assert together.compared[0].verdict == EQUAL, "one image of four shows nothing"
    shares = [found.methods[1].right for found in (alone, together)]
    assert shares[0].share == shares[1].share == 0.75
    assert shares[1].low < shares[0].low - 0.1


@pytest.mark.parametrize(
    ("cls", "verdict"), [([True] * 40, BETTER), ([False] * 40, WORSE), ([True, False] * 20, EQUAL)]
)
def test_a_method_stands_beside_the_withdrawal_of_nearest_arithmetic(cls: list[bool], verdict: str) -> None:
    found = comparison(
        {FULL: [True] * 40, HALF: [False, True] * 20, QUARTER: [False] * 40, CLS: cls},
        {FULL: 100, HALF: 52, QUARTER: 25, CLS: 48},
    )
    [one] = found.compared
    assert one.withdrawal == "K = 5"
    assert one.flops_ratio == pytest.approx(52 / 48)
    assert one.verdict == verdict
    assert one.difference.mean == pytest.approx(sum(cls) / 40 - 0.5)
    assert one.difference.low <= one.difference.mean <= one.difference.high
    said = {BETTER: "1 answer better, 0 worse", WORSE: "0 answer better, 1 worse", EQUAL: "and 1 without a difference"}
    assert said[verdict] in found.verdict[0]
    assert said[verdict] in comparison_tables(found)[-1]
    equal = {BETTER: ("none", 100 / 48), WORSE: ("K = 3", 25 / 48), EQUAL: ("K = 5", 52 / 48)}[verdict]
    assert one.as_accurate == {"withdrawal": equal[0], "flops_ratio": pytest.approx(equal[1])}


def test_the_cheapest_ways_that_answer_as_well_are_named() -> None:
    found = comparison(
        {FULL: [True] * 200, HALF: [True] * 199 + [False], QUARTER: [True] * 190 + [False] * 10, CLS: [True] * 200},
        {FULL: 100, HALF: 50, QUARTER: 25, CLS: 40},
    )
    assert found.verdict[1:] == (
        "The cheapest method that loses at most 1 point is cls:keep=0.25: 40% of the arithmetic without any.",
        "The cheapest withdrawal that loses at most 1 point is K = 5: 50% of the arithmetic without any.",
    )


def test_a_method_that_no_withdrawal_equals_is_said_to_be_such() -> None:
    found = comparison({FULL: [False] * 9, CLS: [True] * 9}, {FULL: 100, CLS: 40})
    assert found.compared[0].as_accurate is None
    assert any(isinstance(part, WideTable) and "none of them" in part.rows[0] for part in comparison_tables(found))


def test_where_nothing_is_answered_right_nothing_is_decided() -> None:
    found = comparison({FULL: [False] * 9, HALF: [False] * 9, CLS: [False] * 9}, {FULL: 100, HALF: 50, CLS: 40})
    assert found.verdict == ("No method answers any of the 9 questions right, so accuracy decides nothing here.",)


def test_without_known_answers_those_of_no_method_count() -> None:
    found = comparison({FULL: [None] * 5, CLS: [None] * 5}, {FULL: 100, CLS: 40})
    assert found.score == "same"
    assert found.methods[0].right is None


def test_questions_without_a_known_answer_do_not_count_where_others_have_one() -> None:
    found = comparison({FULL: [True, None], CLS: [False, None]}, {FULL: 100, CLS: 40})
    assert found.methods[0].right is not None
    assert found.methods[0].right.count == 1
    assert found.compared[0].difference.mean == -1


# --- bad input, interruption, plot, libraries -----------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--methods", "--data", "none.jsonl"], 1, "none.jsonl"),
        (["--methods", "--samples", "0"], 1, "--samples is 0"),
        (["--methods", "--new-tokens", "0"], 1, "max_new_tokens is 0"),
        (["--methods", "--k", "4", "--samples", "1"], 1, "K = 4 was not prebuilt"),
        (["--methods", "--image", "a.jpg"], 2, "--methods asks the questions of --data"),
        (["--methods", "--prompt-tokens", "100"], 2, "--methods asks the questions of --data"),
        (["--methods", "--budgets", "200"], 1, "--budgets is '200'; each must be above 0 and at most 100"),
        (["--data", "a.jsonl"], 2, "--data, --images, --samples and --budgets go with --methods"),
        (["--budgets", "50"], 2, "--data, --images, --samples and --budgets go with --methods"),
        (["--samples", "200"], 2, "--data, --images, --samples and --budgets go with --methods"),
        (["--methods", "--repeats", "5"], 2, "leave out --repeats and --warmup"),
        (["--plot", "none/plot.png"], 1, "cannot write none/plot.png: none is not a directory"),
    ],
)
def test_bad_input_is_refused_before_anything_is_asked(
    bundle: Path, tmp_path: Path, words: list[str], code: int, message: str
) -> None:
    target = str(tmp_path / "out.json")
    words = [*words, "--bundle", str(bundle), "--threads", str(THREADS), "--out", target]
    done = CliRunner().invoke(cli.bench, words, prog_name="vtx-bench")
    assert done.exit_code == code
    assert message in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


def test_questions_that_do_not_fit_are_skipped_and_many_are_an_error(bundle: Path, data: Path, tmp_path: Path) -> None:
    lines, image = [], str(data.parent / "0.png")
    for number in range(6):
        question = "word " * 400 if number == 0 else QUESTIONS[number % 3]
        lines.append(json.dumps({"image": image, "question": question}))
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    (tmp_path / "most.jsonl").write_text("\n".join(lines[:2]))
    words = ("--bundle", str(bundle), "--images", str(data.parent), "--k", "none,3", "--out", str(tmp_path / "o.json"))
    done = vtx_bench(*words, "--data", str(tmp_path / "some.jsonl"))
    assert done.exit_code == 0, done.stderr
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["data"]["items"] == 5
    assert "word word" in found["data"]["skipped"][0]
    done = vtx_bench(*words, "--data", str(tmp_path / "most.jsonl"))
    assert done.exit_code == 1
    assert "1 of 2 items of most.jsonl cannot be used" in done.stderr


@pytest.mark.parametrize("after", [0, 1])
def test_an_interruption_keeps_the_questions_that_every_method_answered(
    bundle: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    picture, calls = LoadedBundle.prepare, list[None]()

    def stop(self: LoadedBundle, source: Any, *rest: Any, **how: Any) -> Any:
        calls.append(None)
        if len(calls) == 2 + after:  # the first belongs to the forecast
            raise KeyboardInterrupt
        return picture(self, source, *rest, **how)

    monkeypatch.setattr(LoadedBundle, "prepare", stop)
    target = tmp_path / "out.json"
    done = vtx_bench("--bundle", str(bundle), "--data", str(data), "--k", "none", "--out", str(target))
    assert done.exit_code == 130
    assert target.exists() == bool(after)
    if after:
        found = json.loads(target.read_text())
        assert found["interrupted"] is True
        assert found["data"]["items"] == 1
        assert "INTERRUPTED" in done.stdout


def test_a_bundle_without_reductions_says_so_and_compares_what_it_has(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, data: Path
) -> None:
    plain = export(tiny_checkpoint(), tmp_path / "bundle").folder
    done = vtx_bench("--bundle", str(plain), "--data", str(data), "--plot", str(tmp_path / "out.png"))
    assert done.exit_code == 0, done.stderr
    assert "export it with --reduce" in done.stderr
    assert "K = 3 " in done.stdout
    assert "beside the withdrawal" not in done.stdout
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_is_written(bundle: Path, data: Path, tmp_path: Path) -> None:
    words = ("--bundle", str(bundle), "--data", str(data), "--samples", "1", "--plot", str(tmp_path / "out.png"))
    done = vtx_bench(*words)
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_comparing_needs_no_exporting_library(bundle: Path, data: Path) -> None:
    words = ["--methods", "--bundle", str(bundle), "--data", str(data), "--samples", "1", "--new-tokens", "2"]
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({EXPORT_ONLY}))\n"
        f"from vtx.cli import bench; bench({words}, standalone_mode=False)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fastv:k=2,ratio=0.5 + K =" in done.stdout
