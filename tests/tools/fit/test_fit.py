"""vtx-fit on a small bundle: the card, resuming, and what is refused before any work."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from PIL import Image
from tests.support import bundles
from tests.support.exported import Models
from tests.support.families.llava_next import LLAVA_NEXT
from tests.support.families.qwen import QWEN25
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny, random_image

from vtx.cli import doctor, fit
from vtx.runtime.api.load import load
from vtx.runtime.backends.memory import needed_memory
from vtx.runtime.bundle import card as card_module
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.card import CARD, KINDS, read_card, write_card
from vtx.runtime.host.profiles import load_profile
from vtx.runtime.strict import json_value
from vtx.runtime.terminal.console import WideTable
from vtx.runtime.vision.layout import limited_layout
from vtx.tools.data.items import plain
from vtx.tools.estimate.plan import PlannedMethods, Workload, make_plan
from vtx.tools.estimate.sizes import bundle_size
from vtx.tools.estimate.weights import precisions_by_name
from vtx.tools.fit import asking, settings
from vtx.tools.fit.fit import FURTHER, LEAST_TIMES
from vtx.tools.fit.planning import PlannedEngine
from vtx.tools.fit.report import card_tables

TOKENS = "2"
IMAGES = 30  # of which 15 are held out; 14 show that 80% of the answers stay the same


@pytest.fixture(autouse=True)
def _one_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few configurations that all are tested, however they do."""
    monkeypatch.setattr(settings, "RESTS", ("10%",))


@pytest.fixture
def bundle(models: Models, tmp_path: Path) -> Bundle:
    return Bundle.open(bundles.copy(models(ks=(3, 8)).bundle.folder, tmp_path / "bundle"))


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return write(tmp_path, [f"{n}.png" for n in range(IMAGES)])


def write(folder: Path, images: Sequence[str], size: tuple[int, int] = (8, 8)) -> Path:
    """A question, without an answer, about each of these images, which are plain colours of their own."""
    for number, name in enumerate(dict.fromkeys(images)):
        Image.new("RGB", size, (4 * number % 256, 255 - number % 256, number * 9 % 256)).save(folder / name)
    file = folder / "questions.jsonl"
    file.write_text(
        "".join(json.dumps({"image": name, "question": f"red {n}?"}) + "\n" for n, name in enumerate(images))
    )
    return file


def run(bundle: Bundle, questions: Path, *words: str, keep: str = "80%") -> Result:
    return CliRunner().invoke(
        fit,
        [str(bundle.folder), "--questions", str(questions), *(["--keep", keep] if keep else []), "--device", "cpu",
         "--threads", "1", "--max-new-tokens", TOKENS, "--out", str(questions.parent / "out"), *words],
    )  # fmt: skip


@pytest.mark.slow
def test_the_card_holds_what_was_measured_and_the_bundle_answers_by_it(bundle: Bundle, questions: Path) -> None:
    done = run(bundle, questions, "--json")
    assert done.exit_code == 0, done.output
    report, card = json.loads(done.stdout), read_card(bundle)
    assert "predicted: at most" in done.stderr
    assert card is not None
    assert report["chosen"]["configuration"]["k"] == card.chosen.configuration.k
    assert (card.data.questions, card.data.images, card.data.held_out_images) == (IMAGES, IMAGES, 15)
    assert (card.guarantee.method, card.guarantee.confidence) == ("Clopper-Pearson", 0.95)
    assert card.guarantee.limit == pytest.approx(0.2)
    assert (questions.parent / "out" / "front.png").stat().st_size > 1000
    assert [depth.kind for depth in card.kinds] == sorted({depth.kind for depth in card.kinds}, key=KINDS.index)
    assert sum(depth.questions for depth in card.kinds) == 15
    assert report["kinds"] == [json_value(depth) for depth in card.kinds]
    with load(bundle.folder, threads=1) as model:
        assert model.loaded.card == card
    # the share of changed answers, counted anew on the questions held out
    held_out = asking.split(asking.Questions.of(asking_data(questions)), 0)[1]
    with load(bundle.folder, device="cpu", threads=1) as model:

        def texts(k: int | None, reduce: str, rest: int | None) -> list[str]:
            found = list[str]()
            for n in held_out:
                with model.open(questions.parent / f"{n}.png") as image:
                    said = image.ask(f"red {n}?", k, reduce=reduce, rest=rest, max_new_tokens=int(TOKENS))
                    found.append(plain(said.text))
            return found

        whole = texts(None, "none", None)
        for evidence in report["evidence"]:
            how = evidence["configuration"]
            changed = sum(map(str.__ne__, whole, texts(how["k"], how["reduce"], how.get("rest"))))
            assert evidence["changed"] == pytest.approx(changed / len(held_out))


def asking_data(questions: Path) -> Any:
    from vtx.tools.data.items import read_data

    return read_data(str(questions), None, IMAGES)


@pytest.mark.slow
def test_a_search_interrupted_anywhere_resumes_and_gives_the_same_card(
    bundle: Bundle, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, kept = asking.Conversation, list[int]()

    def interrupted(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return opened(*args)

    for count in (1, 4, 30, 40, 40):  # the first answer; in the search, in the test, between turns of timing
        left = count
        with monkeypatch.context() as patched:
            patched.setattr(asking, "Conversation", interrupted)
            assert run(bundle, questions).exit_code == 130
        assert not (bundle.folder / CARD).exists()
        kept.append((questions.parent / "out" / "answers.jsonl").read_text().count("\n"))
    assert kept == sorted(kept)
    assert kept[-1] > 80

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(card_module, "write_sealed", full_disk)
        assert "No space left on device" in run(bundle, questions).stderr
    assert not (bundle.folder / CARD).exists()
    first = run(bundle, questions, "--json")
    assert first.exit_code == 0, first.output
    card = read_card(bundle)
    again = run(bundle, questions, "--json")
    assert json.loads(again.stdout)["asked"] == 0
    assert read_card(bundle) == card


def test_questions_or_a_bundle_that_changed_are_told_apart(bundle: Bundle, questions: Path) -> None:
    assert run(bundle, questions, "--check").exit_code == 1
    assert run(bundle, questions).exit_code == 0
    assert "made of these questions" in run(bundle, questions, "--check").stderr
    Image.new("RGB", (8, 8), (1, 2, 3)).save(questions.parent / "7.png")
    changed = run(bundle, questions, "--check")
    assert changed.exit_code == 1
    assert "the questions or images changed since card.json" in changed.stderr
    Image.new("RGB", (8, 8), (28, 248, 63)).save(questions.parent / "7.png")  # as it was
    assert run(bundle, questions, "--check").exit_code == 0
    lines = questions.read_text().splitlines()
    for fewer_or_other, now in ((lines[:-1], IMAGES - 1), ([*lines[:-1], lines[-1].replace("red", "blue")], IMAGES)):
        questions.write_text("\n".join(fewer_or_other))
        told = run(bundle, questions, "--check")
        assert f"was made of {IMAGES} questions, now {now}; run vtx-fit again" in told.stderr


@pytest.mark.parametrize(
    ("images", "keep", "words"),
    [
        ([f"{n}.png" for n in range(20)], "99%", "takes at least 299 images held out, 598 in all"),
        (["0.png"] * 60, "90%", "60 questions about 1 image,"),
        ([f"{n % 30}.png" for n in range(60)], "90%", "questions about one image count as one"),
    ],
)
def test_too_few_images_are_refused_with_the_number_that_would_do(
    bundle: Bundle, tmp_path: Path, images: list[str], keep: str, words: str
) -> None:
    done = run(bundle, write(tmp_path, images), keep=keep)
    assert done.exit_code == 1
    assert words in done.stderr
    assert not (tmp_path / "out").exists()


def test_drawn_scenes_are_as_many_as_asked_for(bundle: Bundle, tmp_path: Path) -> None:
    assert "give a number, e.g. --samples 1200" in run(bundle, Path("scenes")).stderr
    done = run(bundle, Path("scenes"), "--samples", "20", "--out", str(tmp_path / "out"))
    assert "the drawn scenes: 20 questions about 20 images, half of which are held out" in done.stderr, done.output


def test_a_question_that_does_not_fit_is_left_out_for_all_and_named(bundle: Bundle, questions: Path) -> None:
    lines = questions.read_text().splitlines()
    lines[3] = json.dumps({"image": "3.png", "question": "red " * 3000})
    questions.write_text("\n".join(lines))
    done = run(bundle, questions, keep="75%")
    assert done.exit_code == 0, done.output
    assert "skipped 'red red" in done.stderr
    card = read_card(bundle)
    assert card is not None
    assert (card.data.questions, card.data.held_out_questions in (14, 15)) == (IMAGES, True)


def test_the_same_picture_under_many_names_is_one_image(bundle: Bundle, questions: Path) -> None:
    for path in questions.parent.glob("*.png"):
        path.write_bytes((questions.parent / "0.png").read_bytes())
    assert "30 questions about 1 image," in run(bundle, questions).stderr


@pytest.mark.slow
def test_a_drop_of_accuracy_counts_the_right_answers_that_are_lost(bundle: Bundle, questions: Path) -> None:
    refused = run(bundle, questions, "--accuracy-drop", "20", keep="")
    assert "30 of 30 questions have no answer, and --accuracy-drop needs all of them" in refused.stderr
    assert "mutually exclusive" in run(bundle, questions, "--accuracy-drop", "20").stderr
    report = json.loads(run(bundle, questions, "--json", "--no-card").stdout)
    lines = [json.loads(line) for line in questions.read_text().splitlines()]
    with load(bundle.folder, device="cpu", threads=1) as model:  # which is right in every other question
        for number, line in enumerate(lines):
            with model.open(questions.parent / line["image"]) as image:
                full = image.ask(line["question"], None, reduce="none", max_new_tokens=int(TOKENS)).text
            line["answer"] = (full or "?") if number % 2 else "nobody says this"
    questions.write_text("".join(json.dumps(line | {"answer": line["answer"] * (n != 4)}) + "\n"
                                 for n, line in enumerate(lines)))  # fmt: skip
    assert "1 of 30 questions have no answer" in run(bundle, questions, "--accuracy-drop", "45", keep="").stderr
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run(bundle, questions, "--accuracy-drop", "45", "--json", keep="")
    assert done.exit_code == 0, done.output
    lost, card = json.loads(done.stdout), read_card(bundle)
    assert lost["asked"] == 0, "answers are the same ones, counted in another way"
    by_name = {repr(each["configuration"]): each["changed"] for each in report["evidence"]}
    pairs = [
        (by_name[repr(e["configuration"])], e["changed"])
        for e in lost["evidence"]
        if repr(e["configuration"]) in by_name
    ]
    assert all(0 <= now <= before for before, now in pairs)
    assert any(now < before for before, now in pairs)
    assert card is not None
    assert card.guarantee.limit == pytest.approx(0.45)
    full = dataclasses.replace(card, reference=f"{card.chosen.bundle}: {card.chosen.configuration.name}")
    assert full.in_words.endswith("the full model, so no answer changes")
    other = dataclasses.replace(card, reference="another")
    assert other.in_words.endswith("at most 45% of the answers were right and are wrong now (95% confidence)")
    assert "were right and are wrong now" in CliRunner().invoke(doctor, [str(bundle.folder)]).stdout


@pytest.mark.slow
def test_a_budget_that_excludes_everything_says_what_would_do(bundle: Bundle, questions: Path) -> None:
    done = run(bundle, questions, "--first-token", "0.001")
    assert done.exit_code == 1
    assert "nothing fits the budget" in done.stderr
    assert "it fits with --first-token" in done.stderr
    assert not (bundle.folder / CARD).exists()
    done = run(bundle, questions, "--memory", "0.001")
    assert "nothing fits into 1 MB of memory" in done.stderr
    assert "is predicted to take" in done.stderr


@pytest.mark.slow
def test_a_reference_beyond_the_memory_is_compared_with_and_not_chosen(
    bundle: Bundle, questions: Path, models: Models, tmp_path: Path
) -> None:
    small = bundles.copy(models(ks=(3, 8), precision="int8").bundle.folder, tmp_path / "small")
    most = needed_memory(Bundle.open(small))
    assert most < needed_memory(bundle)
    done = run(bundle, questions, str(small), "--memory", f"{1e-9 * (most + 1):.9f}", "--json", keep="50%")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["reference"].startswith("bundle: K = none")
    assert report["chosen"]["bundle"] == "small"
    assert (small / CARD).exists()
    assert not (bundle.folder / CARD).exists()


def test_times_that_do_not_agree_are_said_to_be_of_a_busy_machine(
    bundle: Bundle, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(10**9))
    monkeypatch.setattr(asking.time, "perf_counter", lambda: 1e-6 * next(ticks) ** 2)  # slower and slower
    done = run(bundle, questions)
    assert "the machine is not quiet" in " ".join(done.stdout.split())
    card = read_card(bundle)
    assert card is not None
    assert not card.quiet
    assert f"turn={1 + FURTHER}" in (questions.parent / "out" / "answers.jsonl").read_text()


@pytest.mark.slow
def test_a_limit_of_times_takes_enough_of_them_for_a_bound(bundle: Bundle, questions: Path) -> None:
    done = run(bundle, questions, "--first-token", "60000", "--json")
    assert done.exit_code == 0, done.output
    card = read_card(bundle)
    assert card is not None
    first = card.chosen.first_token_ms
    assert first.count >= LEAST_TIMES > 2 * card.data.held_out_questions
    assert first.p99_upper is not None
    assert first.p99 <= first.p99_upper < 60000
    assert run(bundle, questions, "--check").exit_code == 0  # reads the card again


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("tiny", "size", "wanted"),
    [(LLAVA_NEXT, (200, 100), [{"max_tiles": 2}]), (QWEN25, (140, 112), [10, 5, 2])],  # of 3 tiles, and of 20 tokens
    ids=["tiles", "pixels"],
)
def test_tiles_or_pixels_are_searched_and_the_card_limits_images(
    models: Models, tmp_path: Path, tiny: Tiny, size: tuple[int, int], wanted: list[Any]
) -> None:
    model = models(tiny, ks=(3,))
    folder, layout = bundles.copy(model.bundle.folder, tmp_path / "bundle"), model.loaded.images.layout
    wanted = [{"max_pixels": layout.fitting([size], most)} if isinstance(most, int) else most for most in wanted]
    bundle, file = Bundle.open(folder), write(tmp_path, [f"{n}.png" for n in range(10)], size)
    done = run(bundle, file, "--json", keep="50%")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    first = report["search"][0]["settings"]
    for most in wanted:
        (unit, count), *_ = most.items()
        limit = f"at most {count:,} {unit.removeprefix('max_')} an image"
        assert f"bundle: K = none, no reduction, {limit}, f32 on cpu" in first
        assert f"bundle: K = 3, no reduction, {limit}, f32 on cpu" in first
    assert len(first) == 2 * (1 + len(wanted)) - 1 + 1  # without the reference, with a rest
    card = read_card(bundle)
    assert card is not None
    how = dataclasses.replace(card.chosen.configuration, **wanted[-1])
    write_card(folder, dataclasses.replace(card, chosen=dataclasses.replace(card.chosen, configuration=how)))
    with load(folder, threads=1) as fitted, load(folder, threads=1, **dict.fromkeys(wanted[-1], 1 << 20)) as given:
        seen = fitted.loaded.images.prepare(tmp_path / "0.png").tokens
        assert seen == limited_layout(layout, how.max_tiles, how.max_pixels).count(*size)
        assert seen < given.loaded.images.prepare(tmp_path / "0.png").tokens == layout.count(*size)


@pytest.fixture
def half(tiny_checkpoint: Checkpoints, tmp_path: Path) -> Bundle:
    """With the graphs of onnxruntime's CUDA provider."""
    return bundles.export(tiny_checkpoint(), tmp_path / "bundle", (3, 8), "fp16", dialects=("ort", "ort-cuda"))


def test_a_profile_plans_for_a_device_that_is_not_here(half: Bundle, questions: Path) -> None:
    words = "--profile", "rtx-4070", "--device", "auto", "--json"
    done = run(half, questions, *words)
    assert done.exit_code == 0, done.output
    report, card = json.loads(done.stdout), read_card(half)
    assert card is not None
    assert card.planned == report["planned"] == "NVIDIA GeForce RTX 4070"
    assert card.in_words.endswith("times are estimates for NVIDIA GeForce RTX 4070, not measured")
    assert card.chosen.configuration.device in ("tensorrt", "cuda")
    assert card.chosen.first_token_ms.p99_upper is None
    assert run(half, questions, *words).exit_code == 0
    again = read_card(half)
    assert again is not None
    assert again.chosen == card.chosen, "estimates do not vary"
    with load(half.folder, device="cpu", threads=1) as model:
        assert model.loaded.card is None, "it is for another engine"
    table, *_ = card_tables(again)
    assert isinstance(table, WideTable)
    assert any(row[1].endswith("estimates for NVIDIA GeForce RTX 4070, not measured") for row in table.rows)


def test_an_estimate_is_that_of_vtx_plan_for_what_the_answer_ran(half: Bundle) -> None:
    planned = PlannedEngine.of(half, load_profile("rtx-4070"), "auto", 2)
    size = bundle_size(half)
    with load(half.folder, device="cpu", threads=1) as model, model.open(random_image(0)) as image:
        for k in (None, 3, 8):
            answer = image.ask("red?", k, max_new_tokens=2)
            text = answer.stats.prompt_tokens - answer.stats.vision_tokens
            work = Workload(text, answer.stats.vision_tokens, 2, 1)
            parts = precisions_by_name(size, ["fp16"])
            cost = make_plan(size, work, PlannedMethods([k]), parts, planned.profile, engine=planned.engine.cost)
            phases = cost.depths[0].precisions["fp16"].phases
            assert phases is not None
            assert planned.times(answer, 1) == pytest.approx(
                (phases["vision"].ms + phases["prefill"].ms, phases["decode_per_token"].ms)
            )


def test_a_plan_without_an_engine_there_is_refused(half: Bundle, questions: Path) -> None:
    assert "no profile is called" in run(half, questions, "--profile", "abacus").stderr
    assert "leave it out" in run(half, questions, "--profile", "orin-nx-16", "--compute", "f32").stderr
    done = run(half, questions, "--profile", "orin-nx-16", "--device", "auto")
    assert "bundle holds none; export it with --dialect ort,trt" in done.stderr
    done = run(half, questions, "--profile", "rtx-4070", "--device", "auto", "--memory", "0.001")
    assert "nothing fits into 1 MB of memory" in done.stderr
