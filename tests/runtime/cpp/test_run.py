"""vtx-cpp-run answers as the Python runtime does: ids, text, slots, kept tokens and their report."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.bundles import copy, cut_output, export, export_with, write_gate
from tests.support.cpp import DEVICES, ask, expected, needs_cpp, needs_openvino, run
from tests.support.exported import THREADS, Models
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.spec.names import HIDDEN_OUT, QUERY
from vtx.runtime.errors import BundleError, ContextError, VtxError

pytestmark = needs_cpp

QUESTIONS = (
    "red?",
    "How many circle shapes are there?",
    "What is it </s> <image> really, in the picture?",
    "Größe? 大きい🙂",
)
REDUCTIONS = (
    "cdpruner:keep=0.5",
    "cls:keep=0.5+dart:keep=0.5,k=3,pivots=2,text_pivots=1",
    "dart:keep=12,k=0",
    "divprune:keep=0.3",
    "fastv:k=4",
    "random:seed=7",
    "visionzip:dominant=5,contextual=3",
    "hiprune:alpha=0.6,layer=1",
    "pyramiddrop:ratio=0.7,layers=1/2/4,positions=renumber",
)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Model:
    options = ExportOptions(str(tiny_checkpoint()), (3, 5), "fp32", dialects=("ort", "plain"), reductions=REDUCTIONS)
    out = tmp_path_factory.mktemp("cpp") / "bundle"
    return load(export_with(options, out).folder, device="cpu", threads=THREADS)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(3)
    sizes = ((60, 60), (97, 61), (40, 120))
    images = [Image.fromarray(random.integers(0, 256, (h, w, 3), np.uint8)) for w, h in sizes]
    paths = [folder / f"{number}.png" for number in range(len(images))]
    for image, path in zip(images, paths, strict=True):
        image.save(path)
    images[1].save(folder / "1.jpg", quality=88)
    return [*paths, folder / "1.jpg"]


@pytest.mark.sampled
@pytest.mark.parametrize("k", ["none", "3", "5"])
@pytest.mark.parametrize("reduce", ["none", *REDUCTIONS])
def test_answers_are_those_of_python(model: Model, pictures: list[Path], k: str, reduce: str) -> None:
    depth: int | str = int(k) if k.isdigit() else k
    for picture in pictures:
        found = ask(model.bundle.folder, picture, *QUESTIONS, "--k", k, "--reduce", reduce, "--max-new-tokens", "6")
        with model.open(picture) as conversation:
            for question, answer in zip(QUESTIONS, found, strict=True):
                want = conversation.ask(question, depth, reduce=reduce, max_new_tokens=6)
                assert expected(answer) == expected(want.to_dict()), (picture.name, question)
                assert answer["stopped"] == want.stopped


def test_a_template_that_counts_images_is_rendered(
    pictures: list[Path], tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = copy(tiny_checkpoint(), tmp_path / "checkpoint")
    template = checkpoint / "chat_template.jinja"
    counting = (
        "{% for m in messages %}{% if m.content | selectattr('type', 'equalto', 'image') | list | length == 3 %}!"
    )
    template.write_text(counting + "{% endif %}{% endfor %}" + template.read_text(encoding="utf-8"), encoding="utf-8")
    bundle = export(checkpoint, tmp_path / "bundle", dialects=("ort",)).folder
    [found] = ask(bundle, *pictures[:1], "red?", *(word for path in pictures[1:3] for word in ("--image", path)),
                  "--max-new-tokens", "6")  # fmt: skip
    with load(bundle, device="cpu", threads=THREADS) as python, python.open(pictures[:3]) as conversation:
        assert expected(found) == expected(conversation.ask("red?", max_new_tokens=6).to_dict())


@pytest.mark.parametrize("chat", [(), ("--chat",)])
def test_tokens_are_chosen_by_about_as_in_python(model: Model, pictures: list[Path], chat: tuple[str, ...]) -> None:
    spec = "cdpruner:keep=0.5"
    for about in ("the dog", "大きい犬 </s>", "الكلب الأحمر", "🐶🟥 红色", "word " * 40):
        options = ("--reduce", spec, "--about", about, "--max-new-tokens", "4", *chat)
        found = ask(model.bundle.folder, pictures[0], *QUESTIONS, *options)
        with model.open(pictures[0]) as conversation:
            turns = conversation.chat(reduce=spec)
            for question, answer in zip(QUESTIONS, found, strict=True):
                want = (turns.ask(question, about=about, max_new_tokens=4) if chat else
                        conversation.ask(question, reduce=spec, about=about, max_new_tokens=4))  # fmt: skip
                assert expected(answer) == expected(want.to_dict())


@pytest.mark.parametrize(("about", "reduce"), [("", "cdpruner"), (" \t", "cdpruner"), ("a dog", "none"),
                                               ("a dog", "random"), ("x" * 10_001, "cdpruner"),
                                               ("x" * 10_000, "cdpruner")])  # fmt: skip
def test_an_about_that_python_refuses_is_refused_in_its_words(
    model: Model, pictures: list[Path], about: str, reduce: str
) -> None:
    with model.open(pictures[0]) as conversation, pytest.raises(VtxError) as refused:
        conversation.ask("red?", reduce=reduce, about=about)
    done = run("run", "--bundle", model.bundle.folder, pictures[0], "red?", "--reduce", reduce, "--about", about)
    assert done.stderr.decode() == f"Error: {refused.value}\n"


def test_several_images_and_none_are_asked_about_as_in_python(model: Model, pictures: list[Path]) -> None:
    two = ask(model.bundle.folder, pictures[0], "--image", pictures[1], "Alike?", "--max-new-tokens", "6")
    with model.open(pictures[:2]) as conversation:
        assert expected(two[0]) == expected(conversation.ask("Alike?", max_new_tokens=6).to_dict())
    [none] = ask(model.bundle.folder, "--text-only", "Who are you?", "--max-new-tokens", "6")
    assert expected(none) == expected(model.ask("Who are you?", max_new_tokens=6).to_dict())


@pytest.mark.parametrize("seed", [0, 7, 1 << 53])
@pytest.mark.parametrize("drawn", [{}, {"top_k": 9}, {"top_p": 0.6}, {"top_k": 50, "top_p": 0.9}])
def test_a_seed_draws_the_tokens_that_it_draws_in_python(
    model: Model, pictures: list[Path], seed: int, drawn: dict[str, Any]
) -> None:
    flags = [f for key, value in drawn.items() for f in (f"--{key.replace('_', '-')}", str(value))]
    more = ["--temperature", "0.9", "--seed", str(seed), "--ignore-eos", "--max-new-tokens", "24"]
    found = ask(model.bundle.folder, pictures[0], QUESTIONS[0], QUESTIONS[1], *flags, *more)
    with model.open(pictures[0]) as conversation:
        for question, answer in zip(QUESTIONS, found, strict=False):
            want = conversation.ask(question, temperature=0.9, seed=seed, ignore_eos=True, max_new_tokens=24, **drawn)
            assert answer["token_ids"] == list(want.token_ids)
            assert answer["text"] == want.text


@pytest.mark.parametrize("fit", ["crop", "pad", "squash"])
def test_pictures_of_another_shape_fit_as_in_python(model: Model, pictures: list[Path], fit: str) -> None:
    [found] = ask(model.bundle.folder, pictures[2], "red?", "--fit", fit, "--max-new-tokens", "6")
    with model.open(pictures[2], fit=fit) as conversation:
        assert expected(found) == expected(conversation.ask("red?", max_new_tokens=6).to_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "4"], "K = 4 was not prebuilt, this bundle has 3, 5"),
        (["--k", "auto"], "needs gates"),
        (["--reduce", "nothing"], "no reduction is called 'nothing'"),
        (["--reduce", "fastv:k=6"], "not exported for fastv"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "nan"], "temperature is nan; it must be 0"),
        (["--timeless"], "there is no option --timeless"),
        (["--chat=no"], "--chat takes no value"),
        (["--json-schema", "{}"], "guided answers need llguidance, 1.7 or newer, which was not found"),
        (["--regex", "a" * 5000], "regex has 5,000 bytes, the limit is 4,096"),
        (["--seed", "18446744073709551616"], "--seed takes a whole number from 0 to 18446744073709551615"),
        (["--max-new-tokens", "1.5"], "--max-new-tokens takes a whole number"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0; it must be at least 1 and at most 9007199254740992"),
        (["--threads", "1025"], "threads is 1025; it must be at least 1 and at most 1024"),
        (["--k", "99999999999"], "K = 99999999999 is outside 2..8"),
        (["--fit", "wide"], "fit is 'wide'"),
        (["--device", "toaster"], "device 'toaster'"),
        (["--compute", "f8"], "no device computes in 'f8'; there are: f32, bf16, int8"),
        (["--library", "/nowhere/libonnxruntime.so"], "onnxruntime was not found (/nowhere"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_an_exit_code(
    model: Model, pictures: list[Path], arguments: list[str], message: str
) -> None:
    done = run("run", "--bundle", model.bundle.folder, pictures[0], "red?", *arguments)
    assert done.returncode == (2 if "vtx-cpp-run --help" in done.stderr.decode() else 1)
    assert done.stdout == b""
    [line] = done.stderr.decode().splitlines()
    assert line.startswith("Error: ")
    assert message in line


def test_a_file_given_as_a_bundle_is_refused_in_python_s_words(pictures: list[Path]) -> None:
    with pytest.raises(BundleError) as refusal:
        load(pictures[0])
    done = run("run", "--bundle", pictures[0], pictures[0], "red?")
    assert done.stderr.decode() == f"Error: {refusal.value}\n"


@pytest.mark.parametrize("count", [300, 3000])  # refused by its tokens, and by its characters
def test_a_prompt_too_long_is_refused_in_python_s_words(model: Model, pictures: list[Path], count: int) -> None:
    question = "red " * count
    done = run("run", "--bundle", model.bundle.folder, pictures[0], question)
    with pytest.raises(ContextError) as refused, model.open(pictures[0]) as conversation:
        conversation.ask(question)
    assert done.stderr.decode() == f"Error: {refused.value}\n"


def test_an_altered_bundle_is_refused(model: Model, pictures: list[Path], tmp_path: Path) -> None:
    bundle = copy(model.bundle.folder, tmp_path / "bundle")
    graph = bundle / "head.ort.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"x")
    done = run("run", "--bundle", bundle, pictures[0], "red?")
    assert b"head.ort.onnx was altered after the export" in done.stderr
    (bundle / "vtx.json").write_text("{}")
    assert b"vtx.json was altered" in run("run", "--bundle", bundle, pictures[0], "red?").stderr


@DEVICES
@pytest.mark.parametrize(("graph", "rows"), [("embed", 1), ("head", 0)])
def test_a_graph_that_gives_fewer_outputs_than_tokens_is_refused(
    model: Model, pictures: list[Path], tmp_path: Path, device: str, graph: str, rows: int
) -> None:
    forged = copy(model.bundle.folder, tmp_path / "forged")
    name = f"{graph}.{'ort' if device == 'cpu' else 'plain'}.onnx"
    cut_output(forged, name, rows)
    done = run("run", "--bundle", forged, "--device", device, "--threads", "1", pictures[0], "red?")
    assert f"{name} gives {rows} outputs for " in done.stderr.decode()
    assert done.returncode == 1


@needs_openvino
def test_a_stage_that_gives_fewer_queries_than_tokens_is_refused(
    model: Model, pictures: list[Path], tmp_path: Path
) -> None:
    forged, stages = copy(model.bundle.folder, tmp_path / "forged"), model.manifest.stages
    files = zip(model.manifest.dialects["plain"].stages, stages, strict=True)
    [name] = [file for file, spec in files if spec.query and spec.last == 4]
    cut_output(forged, name, 1, QUERY)
    asked = ("--device", "openvino", "--threads", "1", "--k", "none", "--reduce", "fastv:k=4")
    done = run("run", "--bundle", forged, *asked, pictures[0], "red?")
    assert f"{name} gives 1 outputs for 41 tokens; export" in done.stderr.decode()


def test_outputs_of_a_wrong_size_are_not_told_as_a_lack_of_memory(
    model: Model, pictures: list[Path], tmp_path: Path
) -> None:
    forged, name = copy(model.bundle.folder, tmp_path / "forged"), model.manifest.dialects["ort"].stages[0]
    cut_output(forged, name, 1, HIDDEN_OUT)
    done = run("run", "--bundle", forged, "--threads", "1", pictures[0], "red?")
    assert f"onnxruntime failed in {name}: " in done.stderr.decode()


@pytest.mark.parametrize("reduce", ["cdpruner:keep=1e19", "dart:keep=1e19,k=0"])
def test_more_tokens_than_any_number_of_64_bits_are_all(model: Model, pictures: list[Path], reduce: str) -> None:
    [found] = ask(model.bundle.folder, "--max-new-tokens=2", f"--reduce={reduce}", "--", pictures[0], "--red?")
    with model.open(pictures[0]) as conversation:
        assert expected(found) == expected(conversation.ask("--red?", reduce=reduce, max_new_tokens=2).to_dict())


def test_a_picture_that_is_damaged_is_refused(model: Model, pictures: list[Path], tmp_path: Path) -> None:
    for source in (pictures[0], pictures[3]):
        cut = tmp_path / source.name
        cut.write_bytes(source.read_bytes()[:400])
        done = run("run", "--bundle", model.bundle.folder, cut, "red?")
        assert done.returncode == 1
        assert b"is damaged and cannot be decoded" in done.stderr
    random_image(1).save(tmp_path / "a.bmp")
    assert b"it reads JPEG, PNG" in run("run", "--bundle", model.bundle.folder, tmp_path / "a.bmp", "red?").stderr


def test_a_gate_at_its_threshold_and_just_above_it_decides_as_in_python(
    tiny_checkpoint: Checkpoints, pictures: list[Path], tmp_path: Path
) -> None:
    options = ExportOptions(str(tiny_checkpoint()), (3,), "fp32", dialects=("ort",), gates=write_gate(tmp_path, 168))
    folder = export_with(options, tmp_path / "bundle").folder
    with load(folder, device="cpu", threads=THREADS) as gated, gated.open(pictures[0]) as conversation:
        [said] = conversation.ask("red?", "auto", max_new_tokens=1).stats.gate or ()
        for threshold, k in ((said.probability, None), (float(np.nextafter(said.probability, 0)), 3)):
            assert conversation.ask("red?", "auto", max_new_tokens=1, gate_threshold=threshold).stats.k == k
            more = ["--k", "auto", "--gate-threshold", repr(threshold), "--max-new-tokens", "1"]
            [answer] = ask(folder, pictures[0], "red?", *more)
            assert answer["k"] == k


def test_fastv_leaves_29_of_100_tokens_out_at_a_ratio_of_29_percent(models: Models, pictures: list[Path]) -> None:
    """As a binary fraction 0.29 * 100 is a little less than 29."""
    model = models(Tiny(image=140), (3, 5), "fp32", ("fastv",))
    for ratio, left in ((0.29, 71), (0.57, 43)):
        [answer] = ask(
            model.bundle.folder,
            pictures[0],
            "red?",
            "--reduce",
            f"fastv:ratio={ratio}",
            "--k",
            "none",
            "--max-new-tokens",
            "1",
        )
        assert answer["vision_tokens_kept"][1:3] == [100, left]


def test_an_answer_ends_for_its_length_before_it_ends_for_the_context(model: Model, pictures: list[Path]) -> None:
    """Where the limit is just what there is room for, nothing was cut short."""
    with model.open(pictures[0]) as conversation:
        for count in range(200, 400):
            with suppress(ContextError):
                answer = conversation.ask("?" * count, max_new_tokens=9, ignore_eos=True)
                if answer.stopped == "context":
                    break
    room = len(answer.token_ids)
    assert 0 < room < 9
    for limit, stopped in ((room, "length"), (room + 1, "context")):
        more = ["--max-new-tokens", str(limit), "--ignore-eos"]
        [found] = ask(model.bundle.folder, pictures[0], "?" * count, *more)
        assert (len(found["token_ids"]), found["stopped"]) == (room, stopped)
