"""CDPruner and DART, which choose tokens by hidden states and the question, answer as their plain statements do."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from tests.support.bundles import export_with
from tests.support.dialects import DialectBackend
from tests.support.exported import THREADS
from tests.support.fixtures import Checkpoints, References
from tests.support.reduced import PARAMETERS, QUESTIONS, STEPS, Case, Talk, ask_both, assert_equal, inputs, some_merged
from tests.support.statement import Method, Statement
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.bundle.tensors import read_final_norm
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.generator import SplitMix
from vtx.runtime.policies.methods.gate import Gate

SPECS = (
    "none", "dart", "dart:k=7", "lsm", "mustdrop:layers=3/7", "fastv:k=2", "visionzip", "hiprune:layer=1",
    "pyramiddrop:layers=3/7/11", "pyramiddrop:layers=5/6",
)  # fmt: skip
KS = (4, 9)
AFTER_2, AFTER_7, BEFORE = (24, 2, 4, 4), (16, 7, 2, 3), (20, 0, 4, 4)
WAYS: dict[str, dict[str, Any]] = {
    "cdpruner": {"cdpruner": (20, "embedding")},
    "cdpruner-without-text": {"cdpruner": (20, "none")},
    "divprune": {"divprune": 20},
    "visionzip": {"visionzip": (14, 5)},
    "hiprune": {"hiprune": (20, 0.5, 1)},
    "dart": {"dart": AFTER_2},
    "dart-pivots-as-released": {"dart": AFTER_2, "dart_order": "code"},
    "dart-after-layer-7": {"dart": AFTER_7},
    "dart-before-layer-1": {"dart": BEFORE},
    "dart-before-layer-1-without-text": {"dart": (20, 0, 4, 0)},
    "pyramiddrop": {"pyramiddrop": (0.5, (3, 7, 11))},
    "pyramiddrop-as-released": {"pyramiddrop": (0.5, (3, 7, 11)), "positions": "renumber"},
    "pyramiddrop-after-neighbours": {"pyramiddrop": (0.6, (5, 6)), "positions": "renumber"},
}


@pytest.fixture(scope="module", params=PARAMETERS)
def case(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_checkpoint: Checkpoints,
    reference: References,
) -> Case:
    return make(request.param, tmp_path_factory, tiny_checkpoint, reference)


def make(
    tiny: Tiny,
    folders: pytest.TempPathFactory,
    tiny_checkpoint: Checkpoints,
    reference: References,
) -> Case:
    options = ExportOptions(str(tiny_checkpoint(tiny)), KS, "fp32", reductions=SPECS)
    bundle = export_with(options, folders.mktemp("selection") / "b")
    judge = reference(tiny)
    return Case(load(bundle.folder, device="cpu", threads=THREADS), judge, Statement(judge))


def entered(case: Case, way: dict[str, Any], seeds: tuple[int, ...] = (4,)) -> list[list[int]]:
    found, wanted = ask_both(case, Method(**way), seeds)
    assert_equal(found, wanted)
    return [image.places for image in wanted.images]


def test_a_smaller_budget_of_cdpruner_lies_within_a_larger_one(case: Case) -> None:
    few, many = (set(entered(case, {"cdpruner": (keep, "none")})[0]) for keep in (12, 30))
    assert few < many


def test_the_order_of_pivots_matters(case: Case) -> None:
    by_size, released = (
        ask_both(case, Method(dart=AFTER_2, dart_order=order))[0].kept[2]  # type: ignore[arg-type]
        for order in ("size", "code")
    )
    assert by_size != released
    assert len(by_size) == len(released)


@pytest.mark.parametrize("keep", [1, 3, 40, 80])
def test_dart_before_layer_1_keeps_exactly_the_number_named_and_its_positions(case: Case, keep: int) -> None:
    if keep == 1:  # a number of 1 would be a share
        with case.model.open(random_image(4)) as image:
            stats = image.ask("red?", None, Options(max_new_tokens=1), reduce="dart:keep=0.01,k=0").stats
        assert stats.vision_tokens == 1
        return
    places = entered(case, {"dart": (keep, 0, 4, 4)})
    assert len(places[0]) == keep


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_withdrawal_behind_it(case: Case, way: dict[str, Any]) -> None:
    found, wanted = ask_both(case, Method(**way, k=9), (4, 7))
    assert_equal(found, wanted)
    assert found.done.k == 9


@pytest.mark.parametrize("way", ["cdpruner", "dart", "dart-before-layer-1"])
def test_a_gate_behind_it(case: Case, way: str) -> None:
    gate = Gate(lambda layer, _: np.array([0.1, 0.9] if layer == 9 else [0.9, 0.1]), KS)
    messages = prompt_messages(QUESTIONS[0])
    wanted = case.statement.answer(inputs(case, messages), Method(**WAYS[way], k=9), STEPS)
    assert_equal(Talk(case.model).ask(messages, [random_image(4)], Method(**WAYS[way]), STEPS, exits=gate), wanted)


@pytest.mark.parametrize("way", ["cdpruner", "dart", "dart-before-layer-1"])
def test_merging_before_it(case: Case, way: str) -> None:
    found, wanted = ask_both(case, Method(tau=some_merged(case), **WAYS[way]))
    assert_equal(found, wanted)
    unmerged = ask_both(case, Method(**WAYS[way]))[1]
    assert wanted.images[0].places != unmerged.images[0].places


@pytest.mark.parametrize("way", ["cdpruner", "dart-before-layer-1", "dart-after-layer-7"])
def test_fastv_before_or_behind_it(case: Case, way: str) -> None:
    assert_equal(*ask_both(case, Method(**WAYS[way], fastv=(2, 0.5))))


@pytest.mark.parametrize("positions", ["keep", "renumber"])
@pytest.mark.parametrize("way", ["cdpruner", "dart", "dart-before-layer-1"])
def test_mustdrop_behind_it(case: Case, way: str, positions: str) -> None:
    method = Method(**WAYS[way], key=0.08, layers=(3, 7), positions=positions)  # type: ignore[arg-type]
    assert_equal(*ask_both(case, method, share=0.3))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_questions_on_the_same_image_equal_fresh_runs(case: Case, way: dict[str, Any]) -> None:
    talk, kept = Talk(case.model), []
    for words in (*QUESTIONS, QUESTIONS[0]):
        messages = prompt_messages(words)
        for method in (Method(**way), Method(), Method(**way, k=9)):
            wanted = case.statement.answer(inputs(case, messages), method, STEPS)
            if wanted.margin > 2e-4:
                assert_equal(talk.ask(messages, [random_image(4)], method, STEPS), wanted)
        kept.append(wanted.images[0].places)
    assert kept[0] == kept[-1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dialect", [name for name in DIALECTS if name != "ort"])
@pytest.mark.parametrize("name", ["cdpruner", "visionzip", "dart", "dart-before-layer-1", "pyramiddrop"])
def test_every_dialect(case: Case, name: str, dialect: str) -> None:
    """One way of each place at which tokens leave."""
    way = WAYS[name]
    other = case._replace(model=Model(case.model.bundle, DialectBackend(case.model.bundle, dialect), 0))
    assert_equal(*ask_both(other, Method(**way)))
    assert_equal(*ask_both(other, Method(**way, k=9), (4, 7)))


# ---- what is reused --------------------------------------------------------------------------------------------------

REUSED = {
    "none": 16,
    "fastv:k=2": 2,
    "dart": 2,
    "dart:k=7": 7,
    "dart:k=0": 0,
    "dart:k=0,text_pivots=0": 16,
    "cdpruner": 0,
    "cdpruner:text=none": 16,
    "divprune": 16,
    "random": 16,
    "visionzip": 16,
    "hiprune:layer=1": 16,
    "pyramiddrop:layers=3/7/11": 3,
}


@pytest.mark.parametrize(("spec", "layers"), REUSED.items(), ids=list(REUSED))
def test_layers_whose_image_tokens_serve_the_next_question(case: Case, spec: str, layers: int) -> None:
    options, depth = Options(max_new_tokens=2), case.model.manifest.model.layers
    with case.model.open(random_image(4)) as image:
        first = image.ask(QUESTIONS[0], None, options, reduce=spec).stats
        second = image.ask(QUESTIONS[1], None, options, reduce=spec).stats
        again = image.ask(QUESTIONS[1], None, options, reduce=spec).stats
    assert first.reused_layers == 0
    assert second.reused_layers == (depth if layers == 16 else layers)
    assert second.reused_image == (layers > 0)
    assert again.reused_layers == (second.reused_layers or depth)


def test_an_image_keeps_its_random_tokens_in_every_conversation_and_another_has_others(case: Case) -> None:
    def kept(image: int, spec: str) -> Any:
        with case.model.open(random_image(image)) as conversation:
            reduced = [conversation.ask(words, None, Options(max_new_tokens=1), reduce=spec).stats.reduced
                       for words in QUESTIONS[:2]]  # fmt: skip
        assert reduced[0] is not None
        assert reduced[0].kept == (reduced[1].kept if reduced[1] else None)
        return reduced[0].kept

    key = case.model.loaded.images.prepare(random_image(4)).key
    generator = SplitMix(int(sha256(f"3 {key}".encode()).hexdigest()[:16], 16))
    numbers = [generator.uniform() for _ in range(81)]
    [entered] = kept(4, "random:keep=9,seed=3")
    assert [list(patches) for patches in entered.patches] == [sorted(np.argsort(numbers)[:9].tolist())]
    assert kept(4, "random:keep=9") == kept(4, "random:keep=9,seed=0")
    assert kept(4, "random:keep=9") != kept(7, "random:keep=9")


def test_withdrawal_reuses_every_layer_that_sees_the_image(case: Case) -> None:
    with case.model.open(random_image(4)) as image:
        stats = [image.ask(words, 9, Options(max_new_tokens=2), reduce="none").stats for words in QUESTIONS]
    assert [s.reused_layers for s in stats] == [0, 8, 8]


def test_a_chat_keeps_the_choice_of_its_first_turn(case: Case) -> None:
    options = Options(max_new_tokens=3, ignore_eos=True)
    with case.model.open(random_image(4)) as image:
        alone = [image.ask(words, None, options, reduce="cdpruner:keep=20").stats.reduced for words in QUESTIONS[:2]]
        chat = image.chat(None, reduce="cdpruner:keep=20")
        turns = [chat.ask(words, options).stats for words in QUESTIONS[:2]]
    assert alone[0] is not None
    assert alone[1] is not None
    assert alone[0].kept != alone[1].kept, "both questions choose alike and prove nothing"
    assert [turn.reduced.kept if turn.reduced else None for turn in turns] == [alone[0].kept] * 2
    assert turns[1].reused_layers == case.model.manifest.model.layers


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_bundle_without_the_final_norm_says_how_to_get_it(case: Case) -> None:
    files = {name: record for name, record in case.model.manifest.files.items() if name != "final_norm.safetensors"}
    manifest = replace(case.model.manifest, files=files)
    bundle = replace(case.model.bundle, manifest=manifest)
    with (
        Model(bundle, case.model.backend, 0).open(random_image(4)) as image,
        pytest.raises(RequestError, match="lacks the weight of the decoder's last norm; export it with"),
    ):
        image.ask("red?", None, reduce="dart")


def test_a_final_norm_of_another_size_is_refused(case: Case) -> None:
    model = case.model
    spec = replace(model.manifest.model, hidden=model.manifest.model.hidden - 1)
    bundle = replace(model.bundle, manifest=replace(model.manifest, model=spec))
    with pytest.raises(BundleError, match=r"weight is not a float32 tensor \(63,\); export again"):
        read_final_norm(bundle)


def test_gaps_count_as_context(case: Case) -> None:
    """81 tokens of an image take 81 positions, however few of them enter."""
    with case.model.open(random_image(4)) as image:
        full = image.ask("red?", None, Options(max_new_tokens=1), reduce="none").stats
        gaps = image.ask("red?", None, Options(max_new_tokens=1), reduce="dart:keep=20,k=0").stats
    assert gaps.prompt_tokens == full.prompt_tokens - 61
    assert set(gaps.kv_slots) == {gaps.prompt_tokens}


def test_merged_tokens_are_projected_once_for_the_questions_of_an_image(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, project = list[int](), type(case.model.backend).project
    monkeypatch.setattr(
        type(case.model.backend), "project", lambda self, states: (runs.append(len(states)), project(self, states))[1]
    )
    with case.model.open(random_image(11)) as image:
        few, many = "visionzip:dominant=5,contextual=2", "visionzip:dominant=9,contextual=2"
        for spec in (few, few, "none", few, many, few):
            image.ask(QUESTIONS[0], None, Options(max_new_tokens=1), reduce=spec)
    assert runs == [7, 11, 7]
