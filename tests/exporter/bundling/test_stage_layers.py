"""Graphs of few layers, for machines whose memory does not suffice to build engines of more."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.support.bundles import ORT, export_with
from tests.support.exported import THREADS, greedy, prompt
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.errors import RequestError


def test_a_cut_that_no_k_asks_for_changes_no_answer(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    options = ExportOptions(str(tiny_checkpoint(Tiny(layers=5))), (3,), "fp32", dialects=ORT)
    whole = export_with(options, tmp_path / "whole")
    cut = export_with(replace(options, stage_layers=2), tmp_path / "cut")
    assert [(stage.first, stage.last) for stage in whole.manifest.stages] == [(1, 2), (3, 5)]
    assert [(stage.first, stage.last) for stage in cut.manifest.stages] == [(1, 2), (3, 3), (4, 5)]
    answers = []
    for bundle in (whole, cut):
        model = load(bundle.folder, device="cpu", threads=THREADS)
        asked = prompt(model, prompt_messages("red?"), [random_image(1)])
        answers.append([greedy(model, asked, k, 4).logits for k in (None, 3)])
    np.testing.assert_allclose(answers[1], answers[0], atol=1e-5)


@pytest.mark.parametrize("most", range(1, 6))
def test_parts_are_nearly_equal_and_none_is_larger(most: int, tiny_checkpoint: Checkpoints) -> None:
    from vtx.exporter.bundling.prepare import plan_export

    options = ExportOptions(str(tiny_checkpoint(Tiny(layers=5))), (), "fp32", dialects=ORT, stage_layers=most)
    stages = plan_export(options).stages
    sizes = [stage.last - stage.first + 1 for stage in stages]
    assert sum(sizes) == 5
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert all(b.first == a.last + 1 for a, b in pairwise(stages))


def test_fewer_layers_than_one_are_refused() -> None:
    with pytest.raises(RequestError, match="--stage-layers is 0; it must be at least 1"):
        ExportOptions(stage_layers=0)
