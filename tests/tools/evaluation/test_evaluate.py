"""vtx-eval: figures that one's own count gives, costs of fresh answers, nothing asked twice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.support.exported import Models
from tests.support.families.llava_onevision import ONEVISION
from tests.support.json_files import read_json
from tests.support.tiny import random_image

from vtx.cli import evaluate
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.card import KINDS
from vtx.runtime.errors import RequestError
from vtx.tools.bench.methods import Method
from vtx.tools.data.kinds import kind_of
from vtx.tools.estimate.flops import encode_flops, make_schedule, prefill_flops
from vtx.tools.estimate.sizes import bundle_size
from vtx.tools.evaluation import ask
from vtx.tools.evaluation.ask import make_methods
from vtx.tools.evaluation.questions import TaskQuestion

TOKENS = 4
ASKED = ("red?", "how many?", "which shape?", "where is it?")


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models(reductions=("none", "fastv:k=2,ratio=0.5"))


@pytest.fixture
def data(model: Model, tmp_path: Path) -> Path:
    """Two questions about each of two images; the right answers are the model's own without withdrawal, but for one."""
    records = []
    for number, question in enumerate(ASKED):
        name = f"{number // 2}.png"
        random_image(number // 2).save(tmp_path / name)
        own = answer(model, tmp_path / name, question, None).text
        records.append({"image": name, "question": question, "answer": own if number else "something else"})
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def answer(model: Model, image: Path, question: str, k: int | None, reduce: str = "none") -> Any:
    with model.open(image) as opened:
        return opened.ask(question, k, reduce=reduce, max_new_tokens=TOKENS)


def run(model: Model, data: Path, *words: str) -> Any:
    done = CliRunner().invoke(
        evaluate,
        ["exact", str(data), "--bundle", str(model.bundle.folder), "--device", "cpu", "--threads", "1", "--json",
         "--max-new-tokens", str(TOKENS), "--out", str(data.parent / "out"), *words],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_accuracy_and_costs_are_those_of_fresh_answers(model: Model, data: Path) -> None:
    report = run(model, data, "--k", "none,3", "--reduce", "none", "--reduce", "fastv:k=2,ratio=0.5")
    records = [json.loads(line) for line in data.read_text().splitlines()]
    assert [method["name"] for method in report["methods"]] == [
        "none", "K = 3", "fastv:k=2,ratio=0.5", "fastv:k=2,ratio=0.5 + K = 3",
    ]  # fmt: skip
    assert report["methods"][0]["figures"]["accuracy"]["value"] == 0.75
    for method in report["methods"]:
        answers = [
            answer(model, data.parent / record["image"], record["question"], method["k"], method["reduce"])
            for record in records
        ]
        right = [
            a.text.strip().casefold() == r["answer"].strip().casefold() for a, r in zip(answers, records, strict=True)
        ]
        accuracy = method["figures"]["accuracy"]
        assert accuracy["value"] == sum(right) / 4
        assert accuracy["low"] < accuracy["value"] < accuracy["high"] or accuracy["value"] in (0, 1)
        assert method["kv_bytes"] == sum(a.stats.kv_bytes for a in answers) / 4
        assert method["first_token_ms"]["n"] == 4
    assert report["methods"][0]["difference"] is None
    assert (data.parent / "out" / "pareto.png").stat().st_size > 1000
    assert read_json(data.parent / "out" / "report.json") == report


def test_several_images_are_seen_as_in_one_prompt(models: Models, tmp_path: Path) -> None:
    """LLaVA-OneVision sees one image in tiles, and each of several in one tile."""
    model = models(ONEVISION, (3, 5))
    paths = (tmp_path / "wide.png", tmp_path / "high.png")
    for number, (path, size) in enumerate(zip(paths, ((150, 60), (40, 90)), strict=True)):
        random_image(number, size).save(path)
    asker = ask.Asker(model, Options(TOKENS, ignore_eos=True))
    cost = asker(TaskQuestion(paths, "red?", ("yes",), "both"), [Method(None)], 0)[Method(None)]
    wanted = model.open(list(paths)).ask("red?", None, max_new_tokens=TOKENS, ignore_eos=True)
    assert (cost.text, cost.vision_tokens) == (wanted.text, wanted.stats.vision_tokens)


def test_pictures_of_another_shape_fit_as_asked(model: Model, data: Path) -> None:
    path = data.parent / "0.png"
    random_image(7, (150, 40)).save(path)
    texts = {}
    for fit in ("crop", "pad"):
        with load(model.bundle.folder, device="cpu", threads=1, fit=fit) as loaded:
            asker = ask.Asker(loaded, Options(TOKENS, ignore_eos=True))
            cost = asker(TaskQuestion((path,), "red?", ("yes",), "wide"), [Method(None)], 0)[Method(None)]
            texts[fit] = cost.text
            assert cost.text == loaded.open(path).ask("red?", None, max_new_tokens=TOKENS, ignore_eos=True).text
    assert texts["crop"] != texts["pad"]
    run(model, data, "--k", "none", "--no-times")
    words = ["--bundle", str(model.bundle.folder), "--out", str(data.parent / "out"), "--k", "none", "--fit", "pad"]
    done = CliRunner().invoke(
        evaluate, ["exact", str(data), "--device", "cpu", "--max-new-tokens", str(TOKENS), *words]
    )
    assert done.exit_code == 1
    assert "another --fit" in done.stderr


def test_flops_are_those_of_the_tokens_in_each_layer(model: Model, data: Path) -> None:
    size = bundle_size(model.bundle)
    layers, vision = model.manifest.model.layers, model.manifest.layout.max_tokens
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]} for text in ASKED]
    texts = [len(model.loaded.text.prompt([turn], vision)) - vision for turn in turns]
    report = run(model, data, "--k", "none,3", "--reduce", "none", "--reduce", "fastv:k=2,ratio=0.5")
    flops = {(method["k"], method["reduce"]): method["flops"] for method in report["methods"]}
    [fastv] = {reduce for _, reduce in flops} - {"none"}
    half = vision // 2
    for method, kept in (
        ((None, "none"), [vision] * layers),
        ((3, "none"), [vision] * 2 + [0] * (layers - 2)),
        ((None, fastv), [vision] * 2 + [half] * (layers - 2)),
    ):
        prompts = [prefill_flops(size.decoder, make_schedule(kept, text=text)) for text in texts]
        assert flops[method] == pytest.approx(encode_flops(size.vision, 1) + sum(prompts) / len(prompts))


def test_what_is_answered_is_not_asked_again(model: Model, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int | None]] = []
    original: Callable[..., Any] = ask.Asker.__call__

    def counting(self: Any, question: Any, methods: Any, number: int) -> Any:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.extend((question.text, method.k) for method in methods)
        return original(self, question, methods, number)

    with monkeypatch.context() as patch:
        patch.setattr(ask.Asker, "__call__", counting)
        words = ["--bundle", str(model.bundle.folder), "--out", str(data.parent / "out"), "--k", "none"]
        common = ["exact", str(data), "--device", "cpu", "--max-new-tokens", str(TOKENS)]
        assert CliRunner().invoke(evaluate, [*common, *words]).exit_code != 0
    first = [*asked]
    asked.clear()

    def recording(self: Any, question: Any, methods: Any, number: int) -> Any:
        asked.extend((question.text, method.k) for method in methods)
        return original(self, question, methods, number)

    monkeypatch.setattr(ask.Asker, "__call__", recording)
    resumed = run(model, data, "--k", "none")
    assert first + asked == [(question, None) for question in ASKED]
    asked.clear()
    run(model, data, "--k", "none,3")
    assert asked == [(question, 3) for question in ASKED]
    asked.clear()
    assert run(model, data, "--k", "none")["methods"] == resumed["methods"]
    assert not asked


def test_a_method_that_the_bundle_lacks_is_refused_before_anything_is_asked(model: Model, data: Path) -> None:
    for words, named in ((["--k", "4"], "K = 4"), (["--reduce", "lsm"], "lsm"), (["--reduce", "x"], "called 'x'")):
        done = CliRunner().invoke(evaluate, ["exact", str(data), "--bundle", str(model.bundle.folder), *words])
        assert done.exit_code == 1
        assert named in done.stderr
        assert done.stderr.count("\n") == 1
    assert not (data.parent / "out").exists()


def test_times_can_be_left_out(model: Model, data: Path) -> None:
    report = run(model, data, "--k", "none,3", "--no-times")
    assert [method["first_token_ms"] for method in report["methods"]] == [None, None]
    assert set(report["front"]) == {"flops", "kv_bytes"}


def test_an_image_that_cannot_be_read_is_left_out_for_all_methods(model: Model, data: Path) -> None:
    (data.parent / "broken.png").write_bytes(b"no image")
    with data.open("a") as file:
        file.write(json.dumps({"image": "broken.png", "question": "red?", "answer": "x"}) + "\n")
    report = run(model, data, "--k", "none,3", "--no-times")
    assert report["task"]["questions"] == 4
    assert len(report["task"]["skipped"]) == 1


def test_each_rest_stands_beside_the_k_without_one(model: Model, data: Path) -> None:
    report = run(model, data, "--k", "none,3", "--rest", "40%", "--rest", "2")
    methods = {method["name"]: method for method in report["methods"]}
    assert list(methods) == ["none", "K = 3", "K = 3 + rest 40%", "K = 3 + rest 2"]
    records = [json.loads(line) for line in data.read_text().splitlines()]
    for rest in ("40%", "2"):
        costs = list[int]()
        for record in records:
            with model.open(data.parent / record["image"]) as image:
                costs.append(image.ask(record["question"], 3, rest=rest, max_new_tokens=TOKENS).stats.kv_bytes)
        assert methods[f"K = 3 + rest {rest}"]["kv_bytes"] == sum(costs) / len(costs)
    assert methods["K = 3"]["flops"] < methods["K = 3 + rest 2"]["flops"] < methods["none"]["flops"]


def test_a_rest_without_a_numbered_k_is_refused(model: Model, data: Path) -> None:
    for words in ([], ["--k", "none"]):
        done = CliRunner().invoke(evaluate, ["exact", str(data), *words, "--rest", "10%"])
        assert done.exit_code == 2
        assert "name one or more with --k" in done.output


def test_every_k_with_every_reduction_once() -> None:
    found = make_methods([None, 3, 3], ["none", "fastv:k=2,ratio=0.5"])
    assert [(method.k, method.reduce.partition(":")[0]) for method in found] == [
        (None, "none"), (3, "none"), (None, "fastv"), (3, "fastv"),
    ]  # fmt: skip
    with pytest.raises(RequestError, match="nothing"):
        make_methods([None], ["nothing"])


def test_the_main_figure_is_told_by_the_kind_of_the_right_answer_with_its_interval(model: Model, data: Path) -> None:
    """Two are answered yes, which is wrong, the others as the data have it."""
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    for line in lines[:2]:
        line["answer"] = "yes"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected = Counter(kind_of(line["answer"]) for line in lines)
    assert len(expected) > 1
    report = run(model, data, "--k", "none,3", "--rest", "25%", "--no-times")
    assert [method["rest"] for method in report["methods"]] == [None, None, "25%"]
    for method in report["methods"]:
        kinds = method["kinds"]
        assert {kind: of["questions"] for kind, of in kinds.items()} == expected
        assert list(kinds) == sorted(expected, key=KINDS.index)
        right = sum(of["value"] * of["questions"] for of in kinds.values()) / len(lines)
        assert right == pytest.approx(method["figures"]["accuracy"]["value"])
        for of in kinds.values():
            assert of["low"] <= of["value"] <= of["high"]
        assert kinds["yes or no"]["value"] == 0.0
    assert report["methods"][0]["figures"]["accuracy"]["value"] == 0.5
