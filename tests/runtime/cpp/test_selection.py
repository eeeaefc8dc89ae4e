"""CDPruner and DART in libvtx keep the tokens of Python and of the plain statement, at the sizes of real images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support import clip, selection
from tests.support.bundles import export_with
from tests.support.cpp import ask, needs_cpp, output
from tests.support.exported import THREADS
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json
from tests.support.reference import Reference
from tests.support.selection import CASES, Drawn, cdpruner, divprune, divprune_count, random_tokens
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.spec.names import CLIP_PATCHES
from vtx.runtime.policies import PromptText, parse
from vtx.runtime.policies.methods.cdpruner import CDPruner
from vtx.runtime.policies.methods.dart import Dart, set_order
from vtx.runtime.report.golden import logits_limit
from vtx.runtime.report.traces.compare import compare_traces
from vtx.runtime.report.traces.record import write_traces
from vtx.runtime.vision.tokens import ImageTokens, Patches

pytestmark = needs_cpp

Floats = NDArray[np.float32]
TOKENS, CLIP = 576, 96
SET_ORDERS = Path(__file__).parents[1] / "policies/set_orders.json"
KEEPS = (144, 288)
SPECS = tuple(f"cdpruner:keep={keep},text=tower" for keep in KEEPS)
QUESTIONS = (
    "What is in the picture?",
    "How many RED shapes are there, and what is the colour of the square in the picture? It's 2024!!",
    "red?",
    "Is there a dog? " + "word " * 60,  # two segments of 77
)


# ---- whole answers ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """576 image tokens, and a text tower with CLIP's segments and width."""
    tiny = Tiny(
        layers=4, hidden=512, heads=8, ffn=256, image=336, context=1024, vision_hidden=256, vision_heads=4,
        vision_ffn=512,
    )  # fmt: skip
    checkpoint, folder = tiny_checkpoint(tiny), tmp_path_factory.mktemp("tower")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clip, "SEGMENT", 77)
        patch.setattr(clip, "WIDTH", 768)
        tower = clip.make_clip(folder / "clip", Reference(checkpoint))
    options = ExportOptions(
        str(checkpoint), (3,), "fp32", dialects=("ort",), reductions=("none", *SPECS), text_tower=str(tower)
    )
    bundle = export_with(options, folder / "b")
    return load(bundle.folder, device="cpu", threads=THREADS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the centre crop")
def test_tokens_kept_by_the_text_tower_are_those_of_python_and_of_the_statement(model: Model, tmp_path: Path) -> None:
    """In some of these, two tokens' gains lie within a millionth of each other."""
    for number in (1, 4):
        picture = random_image(number, (336, 336))
        picture.save(tmp_path / "a.png")
        image = model.backend.vision(model.loaded.images.prepare(picture).pixels[None])
        patches = image.patches.signals[CLIP_PATCHES]
        for keep, spec in zip(KEEPS, SPECS, strict=True):
            found = ask(model.bundle.folder, tmp_path / "a.png", *QUESTIONS, "--reduce", spec, "--max-new-tokens", "1")
            with model.open(tmp_path / "a.png") as conversation:
                for question, answer in zip(QUESTIONS, found, strict=True):
                    texts = model.loaded.prompts.embed_question(prompt_messages(question))
                    wanted = stated(image.hidden, by_clip(patches, texts), keep)
                    kept = conversation.ask(question, reduce=spec, max_new_tokens=1).to_dict()["kept"][0]["patches"][0]
                    assert [*kept] == wanted, (number, keep, question)
                    assert answer["kept"][0]["patches"][0] == wanted, (number, keep, question)


@pytest.mark.slow
def test_a_bundle_of_576_tokens_and_a_text_tower_meets_its_traces(model: Model, tmp_path: Path) -> None:
    write_traces(model, tmp_path / "python")
    output("traces", model.bundle.folder, tmp_path / "python", tmp_path / "cpp", "cpu")
    checks = list(compare_traces(tmp_path / "python", tmp_path / "cpp", logits_limit(model.manifest, "f32")))
    assert [f"{check.name}: {check.note}" for check in checks if not check.passed] == []
    assert len(checks) > 40


# ---- selection alone -------------------------------------------------------------------------------------------------


def drawn(seed: int, width: int) -> tuple[Floats, Floats, list[tuple[Floats, Floats]]]:
    """Tokens of an image, their patches in CLIP's space, and of three questions the mean embedding and CLIP's."""
    random = np.random.default_rng(seed)
    region = np.arange(TOKENS) * 16 // TOKENS
    rows = 0.6 * random.standard_normal((TOKENS, width)) + random.standard_normal((16, width))[region] + 0.5
    patches = 0.6 * random.standard_normal((TOKENS, CLIP)) + random.standard_normal(CLIP)
    questions = [
        (random.standard_normal((1, width), np.float32), random.standard_normal((1, CLIP), np.float32)) for _ in "123"
    ]
    return rows.astype(np.float32), patches.astype(np.float32), questions


def selected(
    spec: str, rows: Floats, patches: Floats, questions: Sequence[tuple[Floats, Floats]], cosines: Floats | None = None
) -> list[list[int]]:
    """What libvtx keeps for each question; the last one finds these `cosines` with the image, where they are given."""
    arrays = [rows, patches, *(array for pair in questions for array in pair), *([] if cosines is None else [cosines])]
    sizes = (len(rows), rows.shape[1], patches.shape[1], len(questions))
    lines = output("probe", "select", spec, *map(str, sizes), stdin=b"".join(array.tobytes() for array in arrays))
    return [json.loads(line)["kept"] for line in lines.decode().splitlines()]


def in_python(
    method: CDPruner | Dart, rows: Floats, patches: Floats, questions: Sequence[tuple[Floats, Floats]]
) -> list[list[int]]:
    where = Patches(np.arange(len(rows)), np.zeros(len(rows), bool), {CLIP_PATCHES: patches})
    image, kept = ImageTokens(rows, where), []
    for mean, embedding in questions:
        found = method.select(image, PromptText(np.zeros(1, np.int64), mean, np.ones(1, bool), embedding))
        assert found is not None
        kept.append(found.tolist())
    return kept


def of_case(spec: str, case: Drawn) -> list[int]:
    """What libvtx keeps of a drawn image."""
    arrays: list[NDArray[Any]] = [case.hidden, case.patches, *([] if case.views is None else [case.views])]
    sizes = [*case.hidden.shape, case.patches.shape[1], 1, *([] if case.views is None else ["tiled"])]
    given = b"".join(array.tobytes() for array in [*arrays, case.mean, case.embeddings[:1]])
    [line] = output("probe", "select", spec, *map(str, sizes), stdin=given).decode().splitlines()
    return [*json.loads(line)["kept"]]


def by_clip(patches: Floats, texts: Floats) -> torch.Tensor:
    both = torch.tensor(patches).double()[:, None], torch.tensor(texts).double()[None]
    return -torch.cosine_similarity(*both, dim=-1).mean(1)


def stated(rows: Floats, raw: torch.Tensor | None, keep: int) -> list[int]:
    return cdpruner(torch.tensor(rows), raw, keep)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("text", ["embedding", "tower", "none"])
@pytest.mark.parametrize("seed", range(4))
def test_the_tokens_that_both_runtimes_keep_are_the_statements(seed: int, text: str, keep: int) -> None:
    rows, patches, questions = drawn(seed, 512)
    spec = f"cdpruner:keep={keep},text={text}"
    found = selected(spec, rows, patches, questions)
    assert found == in_python(CDPruner(keep, text), rows, patches, questions)  # type: ignore[arg-type]
    mean, embedding = questions[2]
    raw = {
        "embedding": lambda: torch.cosine_similarity(torch.tensor(rows).double(), torch.tensor(mean).double(), dim=-1),
        "tower": lambda: by_clip(patches, embedding),
        "none": lambda: None,
    }[text]()
    assert found[2] == stated(rows, raw, keep)


@pytest.mark.parametrize("text", ["embedding", "tower", "none"])
def test_equal_tokens_and_more_tokens_than_dimensions_are_chosen_as_in_python(text: str) -> None:
    """Newlines of tiles are one vector; of 48 dimensions no 49th token gains anything but rounding."""
    rows, patches, questions = drawn(9, 48)
    rows[24::25], patches[24::25] = rows[24], patches[24]
    rows[300:320], patches[300:320] = rows[7], patches[7]
    for keep in (12, 144, 560):
        spec = f"cdpruner:keep={keep},text={text}"
        method = CDPruner(keep, text)  # type: ignore[arg-type]
        assert selected(spec, rows, patches, questions) == in_python(method, rows, patches, questions)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", CASES)
def test_methods_that_look_at_the_image_alone_choose_as_their_statements(number: int) -> None:
    case = selection.drawn(number)
    tokens, count = torch.tensor(case.hidden), len(case.hidden)
    assert of_case("divprune", case) == divprune(tokens, divprune_count(0.098, count))
    assert of_case("divprune:keep=0.5", case) == divprune(tokens, divprune_count(0.5, count))
    sizes = np.zeros(count, int) if case.views is None else case.views
    for spec in (f"hiprune:keep={(sizes == 0).sum() // 2},alpha=0.4", "hiprune:keep=5,alpha=0.9", "hiprune"):
        assert of_case(spec, case) == parse(spec)[0].select(case.image).tolist()  # type: ignore[attr-defined]
    assert of_case(f"random:seed={number}", case) == random_tokens(case, -(-count // 4), number)
    assert of_case(f"random:keep={count - 1},seed=1000000000", case) == random_tokens(case, count - 1, 10**9)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", CASES)
def test_visionzip_merges_as_python(number: int) -> None:
    """tests/runtime/policies/test_entries.py holds Python to the released code."""
    tower = selection.tower(number)
    views, count, width = tower.keys.shape
    image = replace(ImageTokens.one_per_patch(tower.states[0, 1:]), tower=tower)
    for spec in ("visionzip", f"visionzip:dominant={count - 2},contextual=1", "visionzip:dominant=2,contextual=4"):
        [method] = parse(spec)
        wanted = method.merge(image)  # type: ignore[attr-defined]
        given = tower.keys.tobytes() + tower.attention.tobytes()
        sizes = map(str, (views, count, width, tower.columns))
        found = json.loads(output("probe", "merge", spec, *sizes, stdin=given))
        assert found["places"] == wanted.patches.indices.tolist()
        assert found["views"] == ([] if wanted.patches.views is None else wanted.patches.views.tolist())
        assert found["starts"] == wanted.starts.tolist()
        assert found["sources"] == wanted.sources.tolist()
        assert found["weights"] == wanted.weights.tolist()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", ["none", "embedding", "tower"])
@pytest.mark.parametrize("number", [n for n in CASES if n % 4 in (0, 2)])
def test_cdpruner_chooses_from_each_view_as_the_released_code(number: int, text: str) -> None:
    case = selection.drawn(number)
    case.embeddings = case.embeddings[:1]
    found = of_case(f"cdpruner:keep=7,text={text}", case)
    assert found == selection.released_cdpruner(case, selection.relevance(case, text), 7)


@pytest.mark.parametrize("text_pivots", [0, 1])
def test_dart_before_layer_1_chooses_as_python_among_equal_tokens_too(text_pivots: int) -> None:
    for seed, keep in ((1, 64), (2, 144), (3, 288)):
        rows, patches, questions = drawn(seed, 512)
        rows[24::25], rows[300:320] = rows[24], rows[7]
        spec = f"dart:keep={keep},k=0,text_pivots={text_pivots}"
        wanted = in_python(Dart(keep, 0, text_pivots=text_pivots), rows, patches, questions)
        assert selected(spec, rows, patches, questions) == wanted


def test_sizes_that_no_block_divides_are_summed_to_the_end() -> None:
    for count, width in ((17, 5), (131, 259), (300, 513)):
        rows, patches, questions = drawn(2, width)
        given = rows[:count], patches[:count], questions
        wanted = in_python(CDPruner(count // 3), *given)
        assert selected(f"cdpruner:keep={count // 3}", *given) == wanted


def test_the_cosines_of_an_image_are_worked_out_once_for_all_questions() -> None:
    """With others in their place, in which no two tokens are alike, relevance alone decides."""
    rows, patches, questions = drawn(3, 64)
    questions[2] = questions[0]
    found = selected("cdpruner:keep=30", rows, patches, questions, np.eye(TOKENS, dtype=np.float32))
    relevance = rows @ questions[0][0][0] / np.linalg.norm(rows, axis=1)
    assert found[2] == sorted(np.argsort(-relevance)[:30].tolist())
    assert found[0] != found[2]


def test_pivots_take_turns_in_the_order_of_darts_code() -> None:
    """The recorded cases, to which tests/runtime/policies/test_methods.py holds Python's statement of the rule."""
    cases = read_json(SET_ORDERS)
    random = np.random.default_rng(168)
    more = [random.integers(0, most, count).tolist() for count in (4, 8, 30) for most in (64, 700, 1 << 40)]
    lines = "\n".join(json.dumps(numbers) for numbers in [*(numbers for numbers, _ in cases), *more])
    found = [json.loads(line) for line in output("probe", "turns", stdin=lines.encode()).decode().splitlines()]
    assert found == [*(order for _, order in cases), *map(set_order, more)]
