"""Other checkpoints of each family, its precisions and its graphs for other engines: `tests.support.contract`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.contract import FAMILIES, NEAR, Family, on_engines_in_turn
from tests.support.dialects import DialectBackend
from tests.support.exported import Models, greedy, prompt
from tests.support.fixtures import Checkpoints, References
from tests.support.near import assert_near
from tests.support.parity import STEPS, assert_every_k, assert_near_reference
from tests.support.reduced import QUESTIONS
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.report.golden import check_golden

pytestmark = pytest.mark.dialects("ort", "plain")


@pytest.fixture(scope="module")
def every_graph(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoints) -> Models:
    """Bundles with the graphs of all dialects."""
    return Models(tmp_path_factory.mktemp("every_graph"), tiny_checkpoint, DIALECTS)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tiny", "device"), on_engines_in_turn("variants"))
def test_other_checkpoints_of_a_family_are_answered_as_by_transformers(
    loaded: Callable[..., Model], reference: References, family: Family, tiny: Tiny, device: str
) -> None:
    images = [random_image(0, family.sizes[1]), random_image(1, family.sizes[0])]
    judge, asked = reference(tiny), prompt_messages(QUESTIONS[0], 2)
    tolerance = family.tolerance if device == "cpu" else NEAR
    model = loaded(device, tiny, family.ks)
    assert_every_k(model, judge, asked, images, family.ks, tolerance, family.alike, steps=16)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "precision", "device"), on_engines_in_turn("rounded"))
def test_every_precision_is_near_transformers_or_computes_what_the_reference_does_with_the_same_weights(
    loaded: Callable[..., Model], reference: References, family: Family, precision: str, device: str
) -> None:
    tiny, most = replace(family.tiny, **family.rounding), family.rounded[precision]
    model = loaded(device, tiny, (3,), precision)
    assert all(check.passed for check in check_golden(model))
    if most is not None:
        images = [random_image(0, family.sizes[0])]
        assert_near_reference(model, reference(tiny), prompt_messages(QUESTIONS[0]), images, most)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", [name for name in DIALECTS if name != "ort"])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.dialects])
def test_graphs_of_other_dialects_compute_the_same(every_graph: Models, name: str, dialect: str) -> None:
    family = FAMILIES[name]
    images = [random_image(n, size) for n, size in enumerate(family.sizes[:2])]
    messages = prompt_messages(QUESTIONS[0], 2)
    model = every_graph(family.tiny, family.ks)
    other = Model(model.bundle, DialectBackend(model.bundle, dialect), 0)
    for k in (None, family.ks[-1]):
        wanted, found = (greedy(each, prompt(each, messages, images), k, STEPS) for each in (model, other))
        assert found.ids == wanted.ids
        assert_near(found.logits, wanted.logits, NEAR)
