"""Qwen3-VL: maps of the tower that join the image's tokens after the decoder's first layers, and random models.

`VTX_CONFIGURATIONS=30` sets how many random configurations are compared with transformers.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.bundles import export
from tests.support.exported import THREADS, Models, answer, greedy, policy, prompt
from tests.support.families.qwen import QWEN3
from tests.support.parity import QUESTIONS, STEPS, assert_answers_as_reference
from tests.support.reduced import Talk, word
from tests.support.reference import Reference
from tests.support.statement import Method, Statement
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.spec import names
from vtx.runtime.errors import ImageError
from vtx.runtime.session.prefix import Prompt
from vtx.runtime.session.session import Session

TOLERANCE = 1e-4
KS = (2, 3, 4, 5)
WIDE, HIGH = (150, 60), (40, 90)


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models(QWEN3, KS)


def without(asked: Prompt, name: str) -> Prompt:
    """The same prompt with zeros for one map."""

    def encode(given: Callable[[], object]) -> object:
        image = given()
        signals = {n: x * (n != name) for n, x in image.patches.signals.items()}  # type: ignore[attr-defined]
        return replace(image, patches=replace(image.patches, signals=signals))  # type: ignore[attr-defined,type-var]

    return replace(asked, encoders=tuple((key, lambda e=e: encode(e)) for key, e in asked.encoders))


@pytest.mark.parametrize("k", [None, *KS])
def test_text_sees_a_map_from_the_second_layer_behind_its_own_on(model: Model, k: int | None) -> None:
    asked = prompt(model, prompt_messages(QUESTIONS[1]), [random_image(0, WIDE)])
    whole = greedy(model, asked, k, 1).logits
    seen = []
    for each in model.manifest.token_inputs:
        change = np.abs(greedy(model, without(asked, names.token_input(each.name)), k, 1).logits - whole).max()
        assert change == 0 or change > 1e-3
        seen.append(bool(change))
    assert seen == [k is None or number <= k - 2 for number in (1, 2, 3)]


def test_an_export_says_which_maps_no_text_sees(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = str(tiny_checkpoint(QWEN3))
    said = [w for w in plan_export(ExportOptions(checkpoint, (5, 3, 4), "fp32")).warnings if "map" in w]
    assert [line.partition(" of the tower")[0] for line in said] == [
        "at K = 3 no text sees map 2 and map 3", "at K = 4 no text sees map 3",
    ]  # fmt: skip
    assert said[0].endswith("so all 3 count from K = 5 on")


@pytest.mark.parametrize("k", [None, 3, 5])
def test_a_chat_of_three_turns_with_two_images_is_answered_as_by_transformers(
    model: Model, reference: Callable[..., Reference], k: int | None
) -> None:
    judge, session = reference(QWEN3), Session(model.backend, model.manifest)
    images, messages = [random_image(0, WIDE), random_image(1, HIGH)], prompt_messages("red?", 2)
    for question in ("how many?", "and the circle?", None):
        found = answer(session, prompt(model, messages, images), policy(k), STEPS)
        wanted = judge.greedy(judge.inputs(messages, images), k, STEPS, guess=found.argmax(-1).tolist())
        assert found.argmax(-1).tolist() == wanted.ids
        np.testing.assert_allclose(found, wanted.logits.numpy(), atol=TOLERANCE, rtol=0)
        messages = [*messages, {"role": "assistant", "content": [{"type": "text", "text": "a circle"}]}]
        messages += prompt_messages(question or "", 0)


@pytest.mark.parametrize("k", [None, 4])
def test_prompt_lookup_changes_no_answer(model: Model, k: int | None) -> None:
    options = Options(24, ignore_eos=True, logprobs=True)
    with model.open([random_image(0, WIDE)]) as conversation:
        plain, drafted = (
            conversation.ask("red red red red?", k, replace(options, prompt_lookup=lookup)) for lookup in (0, 6)
        )
    assert drafted.token_ids == plain.token_ids
    np.testing.assert_allclose(drafted.logprobs, plain.logprobs, atol=TOLERANCE, rtol=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(1, 1), (160, 10), (10, 160), (64, 64)], ids=str)
def test_images_of_extreme_shapes_are_answered_as_by_transformers(
    models: Models, reference: Callable[..., Reference], shape: tuple[int, int]
) -> None:
    asked = prompt_messages(QUESTIONS[0])
    assert_answers_as_reference(models(QWEN3, (3, 5)), reference(QWEN3), asked, [random_image(0, shape)])


def test_an_image_of_300_to_1_is_refused(model: Model) -> None:
    with pytest.raises(ImageError, match="its sides may differ at most 200-fold"):
        model.open([random_image(0, (600, 2))])


CONFIGURATIONS = int(os.environ.get("VTX_CONFIGURATIONS") or 1)


def random_tiny(rng: random.Random) -> Tiny:
    """A random model: sizes, heads, maps, ties and names."""
    heads, kv_heads = rng.choice(((4, 4), (4, 2), (4, 1), (6, 3), (2, 2)))
    layers, tower = rng.randint(6, 9), rng.randint(3, 6)
    return replace(
        QWEN3, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=rng.choice((16, 24, 32)),
        hidden=rng.choice((48, 64, 96)), ffn=rng.choice((80, 96, 160)), tied=rng.random() < 0.5,
        attention_bias=rng.random() < 0.2, theta=rng.choice((1e4, 1e6, 5e6)), names=rng.choice(("hub", "saved", "new")),
        vision_layers=tower, vision_hidden=rng.choice((32, 48)), vision_heads=2, shards=rng.choice((1, 2)),
        maps=tuple(sorted(rng.sample(range(tower), rng.randint(0, min(4, tower))))),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(CONFIGURATIONS))
def test_random_models_are_answered_as_by_transformers_and_the_statement(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, seed: int
) -> None:
    """None against transformers, three K and three reductions against plain statements, for several questions."""
    rng = random.Random(seed)
    tiny = random_tiny(rng)
    ks = tuple(sorted(rng.sample(range(2, tiny.layers + 1), 3)))
    methods = (
        Method(fastv=(rng.randint(1, 4), 0.5)), Method(cdpruner=(6, "embedding")),
        Method(dart=(8, rng.randint(0, 4), 2, 2)),
    )  # fmt: skip
    checkpoint = tiny_checkpoint(tiny, seed)
    judge = Reference(checkpoint)
    folder = export(checkpoint, tmp_path / "bundle", ks, "fp32", reductions=tuple(map(word, methods))).folder
    shapes = [
        (rng.randint(112, 220), rng.randint(112, 220)) for _ in range(2)
    ]  # 16 tokens or more: DART leaves out none of fewer
    images, worst = [random_image(seed + n, shape) for n, shape in enumerate(shapes)], dict[str, float]()
    with load(folder, device="cpu", threads=THREADS) as model:
        for number in (1, 2):
            session, own = Session(model.backend, model.manifest), images[:number]
            for question in QUESTIONS:
                messages = prompt_messages(question, number)
                inputs, asked = judge.inputs(messages, own), prompt(model, messages, own)
                assert asked.ids.tolist() == inputs["input_ids"][0].tolist()
                for k in (None, *ks):
                    found = answer(session, asked, policy(k), STEPS)
                    if k is None:
                        ids, logits = judge.generate_hf(inputs, STEPS)
                    else:
                        ids, logits, _ = judge.greedy(inputs, k, STEPS, guess=found.argmax(-1).tolist())
                    worst[f"{k}"] = max(worst.get(f"{k}", 0.0), held(found, ids, logits.numpy()))
            for method in methods:
                wanted = Statement(judge).answer(inputs, method, STEPS)
                talked = Talk(model).ask(messages, own, method, STEPS)
                assert talked.kept == wanted.kept
                worst[word(method)] = held(talked.logits, wanted.ids, wanted.logits.numpy())
    print(seed, tiny.maps, {name: f"{value:.1e}" for name, value in worst.items()})  # with -s


def held(found: np.ndarray, ids: list[int], logits: np.ndarray) -> float:
    """The largest difference of logits, up to the first token where two are too close to call."""
    first, second = np.sort(logits, -1)[:, -1], np.sort(logits, -1)[:, -2]
    near = np.flatnonzero(first - second < 2 * TOLERANCE)
    count = len(ids) if not len(near) else int(near[0]) + 1
    assert found.argmax(-1).tolist()[: count - bool(len(near))] == ids[: count - bool(len(near))]
    np.testing.assert_allclose(found[:count], logits[:count], atol=TOLERANCE, rtol=0)
    return float(np.abs(found[:count] - logits[:count]).max())
