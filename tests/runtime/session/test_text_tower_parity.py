"""CDPruner with CLIP's text tower, as its authors run it, answers as the plain statement over a CLIPModel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.support.bundles import IGNORE, export_with
from tests.support.clip import SEGMENT, Clip, make_clip
from tests.support.dialects import DialectBackend
from tests.support.exported import THREADS
from tests.support.fixtures import Checkpoints, References
from tests.support.reduced import QUESTIONS, STEPS, Case, Talk, ask_both, assert_equal, inputs, some_merged
from tests.support.statement import Method, Statement
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.policies.methods.gate import Gate

MODELS = {
    "8-layers-mha": (Tiny(layers=8, kv_heads=4, image=126, context=768), False),
    "16-layers-gqa": (Tiny(layers=16, image=126, context=768), True),
}
K = 4
TOWER = Method(cdpruner=(20, "tower"))
SPECS = ("none", "cdpruner:64", "lsm", "fastv", "mustdrop:layers=3")
LONG = " ".join(QUESTIONS) + " and is the picture of the square red?"


class ClipCase(NamedTuple):
    """A checkpoint with a text tower beside it."""

    case: Case
    clip: Clip


@pytest.fixture(scope="module", params=MODELS.values(), ids=list(MODELS))
def made(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_checkpoint: Checkpoints,
    reference: References,
) -> ClipCase:
    tiny, old_end = request.param
    judge, folder = reference(tiny), tmp_path_factory.mktemp("tower")
    clip = make_clip(folder / "clip", judge, old_end=old_end)
    options = ExportOptions(str(tiny_checkpoint(tiny)), (K,), "fp32", reductions=SPECS, text_tower=str(clip))
    plan = plan_export(options)
    assert plan.warnings == ()
    bundle = run_export(plan, folder / "b", force=False, report=IGNORE)
    truth = Clip(clip)
    return ClipCase(Case(load(bundle.folder, device="cpu", threads=THREADS), judge, Statement(judge, truth)), truth)


@pytest.fixture
def case(made: ClipCase) -> Case:
    return made.case


def backends(case: Case) -> dict[str, Model]:
    bundle = case.model.bundle
    others = {name: Model(bundle, DialectBackend(bundle, name), 0) for name in DIALECTS if name != "ort"}
    return {"ort": case.model, **others}


# ---- the parts -------------------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.sampled(6)
@pytest.mark.parametrize("words", [*QUESTIONS, LONG, "?", "a<|endoftext|>b"])
def test_the_text_tower_gives_transformers_embeddings(made: ClipCase, words: str) -> None:
    wanted = made.clip.texts(words).numpy()
    assert len(wanted) == (3 if words == LONG else 1)
    for name, model in backends(made.case).items():
        np.testing.assert_allclose(
            model.loaded.prompts.embed_question(prompt_messages(words)), wanted, atol=2e-5, err_msg=name
        )


def test_patches_stand_in_clips_space_as_clips_own_vision_tower_has_them(made: ClipCase) -> None:
    pixels = inputs(made.case, prompt_messages("red?"))["pixel_values"][0]
    wanted = made.clip.patches_of(pixels, made.case.reference.model.config.vision_feature_layer).numpy()
    for name, model in backends(made.case).items():
        found = model.backend.vision(pixels[None].numpy()).patches.signals[names.CLIP_PATCHES]
        np.testing.assert_allclose(found, wanted, atol=2e-5, err_msg=name)


def test_a_segment_without_an_end_is_pooled_where_transformers_pools_it(made: ClipCase) -> None:
    """The first segment of a long text has no end token: CLIP then takes its first token, which saw nothing."""
    long, other = (made.clip.texts(words) for words in (LONG, f"red {LONG}"))
    assert 2 * SEGMENT < len(made.clip.tokenizer(LONG).input_ids) < 3 * SEGMENT
    torch.testing.assert_close(long[0], other[0])
    assert not torch.allclose(long[2], other[2])


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [2, 20, 45])
def test_ids_tokens_kept_and_logits_at_every_budget(case: Case, keep: int) -> None:
    found, wanted = ask_both(case, Method(cdpruner=(keep, "tower")))
    assert_equal(found, wanted)
    assert len(wanted.images[0].places) == keep


def test_relevance_changes_the_choice(case: Case) -> None:
    places = {
        kind: tuple(ask_both(case, Method(cdpruner=(20, kind)))[1].images[0].places)  # type: ignore[arg-type]
        for kind in ("tower", "embedding", "none")
    }
    assert len(set(places.values())) == 3


def test_a_long_question_counts_by_all_its_segments(case: Case) -> None:
    messages = prompt_messages(LONG)
    wanted = case.statement.answer(inputs(case, messages), TOWER, STEPS, LONG)
    assert_equal(Talk(case.model).ask(messages, [random_image(4)], TOWER, STEPS), wanted)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", [TOWER, Method(cdpruner=(20, "tower"), k=K)], ids=["alone", "withdrawal-behind"])
def test_two_images(case: Case, way: Method) -> None:
    assert_equal(*ask_both(case, way, (4, 7)))


@pytest.mark.sampled(2)
def test_a_gate_behind_it(case: Case) -> None:
    gate = Gate(lambda _, __: np.array([0.1, 0.9]), (K,))
    messages = prompt_messages(QUESTIONS[0])
    wanted = case.statement.answer(inputs(case, messages), Method(cdpruner=(20, "tower"), k=K), STEPS, QUESTIONS[0])
    assert_equal(Talk(case.model).ask(messages, [random_image(4)], TOWER, STEPS, exits=gate), wanted)


@pytest.mark.sampled(2)
def test_other_methods_before_and_behind_it(case: Case) -> None:
    assert_equal(*ask_both(case, replace(TOWER, tau=some_merged(case))))
    assert_equal(*ask_both(case, replace(TOWER, fastv=(2, 0.5))))
    assert_equal(*ask_both(case, replace(TOWER, key=0.08, layers=(3,)), share=0.3))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dialect", [name for name in DIALECTS if name != "ort"])
def test_every_dialect(case: Case, dialect: str) -> None:
    other = case._replace(model=backends(case)[dialect])
    assert_equal(*ask_both(other, TOWER))
    assert_equal(*ask_both(other, Method(cdpruner=(20, "tower"), k=K), (4, 7)))


@pytest.mark.sampled(2)
def test_openvino(case: Case) -> None:
    pytest.importorskip("openvino")
    assert_equal(
        *ask_both(case._replace(model=load(case.model.bundle.folder, device="openvino", threads=THREADS)), TOWER)
    )


@pytest.mark.sampled(2)
def test_answers_of_the_api_are_those_of_the_statement(case: Case) -> None:
    for words in QUESTIONS:
        wanted = case.statement.answer(inputs(case, prompt_messages(words)), TOWER, STEPS, words)
        if wanted.margin > 2e-4:
            break
    options = Options(max_new_tokens=STEPS, ignore_eos=True)
    with case.model.open(random_image(4)) as image:
        found = image.ask(words, None, options, reduce="cdpruner:keep=20,text=tower")
    assert [*found.token_ids] == wanted.ids
    assert found.stats.reduced is not None
    assert [*found.stats.reduced.kept[0].patches[0]] == wanted.images[0].places


# ---- tiles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [3, 7])
def test_tiles_have_a_budget_each_and_one_scale_of_relevance(
    tiny_checkpoint: Checkpoints, reference: References, tmp_path: Path, keep: int
) -> None:
    tiny, method = Tiny(family="llava_next"), Method(cdpruner=(keep, "tower"))
    judge = reference(tiny)
    folder = make_clip(tmp_path / "clip", judge)
    spec = f"cdpruner:keep={keep},text=tower"
    options = ExportOptions(str(tiny_checkpoint(tiny)), (3,), "fp32", reductions=("none", spec), text_tower=str(folder))
    bundle = export_with(options, tmp_path / "b")
    images, messages = [random_image(0, (60, 150)), random_image(1, (150, 60))], prompt_messages(QUESTIONS[0], 2)
    wanted = Statement(judge, Clip(folder)).answer(judge.inputs(messages, images), method, STEPS, QUESTIONS[0])
    ort = load(bundle.folder, device="cpu", threads=THREADS)
    for model in (ort, *(Model(bundle, DialectBackend(bundle, name), 0) for name in DIALECTS if name != "ort")):
        found = Talk(model).ask(messages, images, method, STEPS)
        assert [image.indices.tolist() for image in found.done.images] == [i.places for i in wanted.images]
        assert found.ids == wanted.ids
        assert list(found.done.slots) == wanted.slots
