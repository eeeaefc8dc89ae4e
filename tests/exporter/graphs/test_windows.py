"""Graphs of other dialects for layers that slide, share keys and values, or see images both ways: as transformers does.

They run on onnxruntime's CPU provider. Prompts are several times as long as the window, 24 positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partialmethod
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.support.bundles import export, export_all
from tests.support.dialects import DialectBackend
from tests.support.exported import policy, prompt
from tests.support.families.gemma import GEMMA3, GEMMA4
from tests.support.fixtures import Checkpoints, References
from tests.support.near import assert_near
from tests.support.parity import QUESTIONS, assert_every_k
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.graphs.dialects.trt import Trt
from vtx.exporter.graphs.dialects.trt10 import Trt10
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.precision import PRECISIONS
from vtx.runtime.report.golden import check_golden
from vtx.runtime.session.session import Session

OTHERS = ("plain", "trt", "trt10")
FAMILIES = {"gemma3": (GEMMA3, (2, 4, 6)), "gemma4": (GEMMA4, (2, 4, 5))}
WINDOW, TOLERANCE = 24, 1e-4
Get = Callable[..., Model]


@pytest.fixture(scope="module")
def dialect_models(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoints) -> Get:
    """`models(family, dialect)`: its bundle of every K, run in that dialect."""
    folder = tmp_path_factory.mktemp("windows")

    @cache
    def bundle(family: str) -> Bundle:
        tiny, ks = FAMILIES[family]
        return export_all(tiny_checkpoint(tiny), folder / family, ks)

    return cache(lambda family, dialect: Model(bundle(family), DialectBackend(bundle(family), dialect), 0))


@pytest.mark.slow
@pytest.mark.parametrize("dialect", OTHERS)
@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers_and_at_k_of_the_statement(
    dialect_models: Get, reference: References, family: str, images: int, dialect: str
) -> None:
    (tiny, ks), model = FAMILIES[family], dialect_models(family, dialect)
    judge, messages = reference(tiny), prompt_messages(QUESTIONS[1], images)
    pictures = [random_image(number, (90 + 50 * number, 70)) for number in range(images)]
    assert len(prompt(model, messages, pictures).ids) > 2 * WINDOW
    assert_every_k(model, judge, messages, pictures, ks, TOLERANCE)


@pytest.mark.parametrize("dialect", ["trt", "trt10"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_question_goes_on_from_the_slots_that_were_kept(
    dialect_models: Get, reference: References, family: str, dialect: str
) -> None:
    (tiny, ks), model, pictures = FAMILIES[family], dialect_models(family, dialect), [random_image(3)]
    judge, session = reference(tiny), Session(model.backend, model.manifest)
    for words, k in ((QUESTIONS[1], None), (QUESTIONS[0], ks[1]), ("red?", None), (QUESTIONS[1], ks[-1])):
        messages = prompt_messages(words)
        done = session.prefill(prompt(model, messages, pictures), policy(k))
        wanted = judge.greedy(judge.inputs(messages, pictures), k, 4)
        found = [done.logits, *(session.decode(token) for token in wanted.ids[:3])]
        assert_near(np.stack(found), wanted.logits, TOLERANCE)


@pytest.mark.parametrize("dialect", ["trt", "trt10"])
@pytest.mark.parametrize("precision", ["fp16", "int4"])
@pytest.mark.parametrize("tiny", [replace(GEMMA3, head_dim=32), replace(GEMMA4, head_dim=32)], ids=lambda t: t.family)
def test_a_dialect_computes_what_the_stored_weights_say(
    tiny_checkpoint: Checkpoints, tmp_path: Path, tiny: Tiny, precision: str, dialect: str
) -> None:
    bundle = export(tiny_checkpoint(tiny), tmp_path / "bundle", (3,), precision, dialects=("ort", dialect))
    checks = list(check_golden(Model(bundle, DialectBackend(bundle, dialect), 0)))
    assert len(checks) == 5
    assert all(check.difference <= PRECISIONS["fp16"].tolerance for check in checks), checks


@pytest.mark.parametrize("dialect", ["trt", "trt10"])
def test_a_table_that_is_larger_than_a_tensor_may_be_is_read_in_parts(
    tiny_checkpoint: Checkpoints, tmp_path: Path, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4 E2B has 2.3 G numbers in its table of inputs to each layer; here 320 rows are read from parts of 100."""
    width = GEMMA4.layers * GEMMA4.per_layer
    kind = {"trt": Trt, "trt10": Trt10}[dialect]
    monkeypatch.setattr(kind, "__init__", partialmethod(kind.__init__, largest=100 * width))
    bundle = export(tiny_checkpoint(GEMMA4), tmp_path / "bundle", (3,), dialects=("ort", dialect))
    graphs = bundle.manifest.dialects[dialect]
    sizes = {
        name: [tuple(x.dims) for x in onnx.load(bundle.path(name), load_external_data=False).graph.initializer]
        for name in (graphs.embed, graphs.vision)
    }
    assert [shape for shape in sizes[graphs.embed] if shape[-1:] == (width,)] == 3 * [(100, width)] + [(20, width)]
    assert [shape for shape in sizes[graphs.vision] if shape[-1:] == (width,)] == [(1, width)]
    ids = np.arange(320)
    found, wanted = (DialectBackend(bundle, name).embed(ids) for name in (dialect, "ort"))
    np.testing.assert_allclose(found.hidden, wanted.hidden, atol=1e-6)
    for name, each in wanted.inputs.items():
        np.testing.assert_allclose(found.inputs[name], each, atol=1e-6)
