"""Qwen3-VL: maps of the tower that join the image's tokens after the decoder's first layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.support.exported import Models, greedy, prompt
from tests.support.families.qwen import QWEN3
from tests.support.fixtures import Checkpoints
from tests.support.near import assert_near
from tests.support.parity import QUESTIONS
from tests.support.tiny import prompt_messages, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.spec import names
from vtx.runtime.errors import ImageError
from vtx.runtime.session.prefix import Prompt

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


def test_an_export_says_which_maps_no_text_sees(tiny_checkpoint: Checkpoints) -> None:
    checkpoint = str(tiny_checkpoint(QWEN3))
    said = [w for w in plan_export(ExportOptions(checkpoint, (5, 3, 4), "fp32")).warnings if "map" in w]
    assert [line.partition(" of the tower")[0] for line in said] == [
        "at K = 3 no text sees map 2 and map 3", "at K = 4 no text sees map 3",
    ]  # fmt: skip
    assert said[0].endswith("so all 3 count from K = 5 on")


@pytest.mark.parametrize("k", [None, 4])
def test_prompt_lookup_changes_no_answer(model: Model, k: int | None) -> None:
    options = Options(24, ignore_eos=True, logprobs=True)
    with model.open([random_image(0, WIDE)]) as conversation:
        plain, drafted = (
            conversation.ask("red red red red?", k, replace(options, prompt_lookup=lookup)) for lookup in (0, 6)
        )
    assert drafted.token_ids == plain.token_ids
    assert_near(drafted.logprobs, plain.logprobs, TOLERANCE)  # type: ignore[arg-type]


def test_an_image_of_300_to_1_is_refused(model: Model) -> None:
    with pytest.raises(ImageError, match="its sides may differ at most 200-fold"):
        model.open([random_image(0, (600, 2))])
