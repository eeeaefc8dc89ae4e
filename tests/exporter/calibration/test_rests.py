"""A rest at every K, measured as plain PyTorch states it; the ends of the scale, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.bundles import export
from tests.support.calibrating import ALL, GQA, KS, measure, questions
from tests.support.families.gemma import GEMMA3
from tests.support.families.qwen import QWEN3
from tests.support.fixtures import Checkpoints, References
from tests.support.rest import chosen_rest, rest_answer
from tests.support.tiny import Tiny, prompt_messages
from vtx.exporter.calibration.calibrate import CalibrationOptions
from vtx.exporter.calibration.source import open_source
from vtx.runtime.errors import RequestError
from vtx.tools.calibration.choosing import Choosing
from vtx.tools.calibration.report import make_report, read_choice, write_report
from vtx.tools.common.loading import Loading

RESTED = replace(ALL, rest="75%")


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return float((p.exp() * (p - q)).sum())


@pytest.mark.slow
@pytest.mark.parametrize("tiny", [GQA, QWEN3], ids=["gqa", "three-part positions and maps"])
def test_every_k_is_measured_with_its_rest_as_plain_pytorch_states_it(
    tiny_checkpoint: Checkpoints, reference: References, tmp_path: Path, tiny: Tiny
) -> None:
    data, model = questions(count=3), reference(tiny)
    measured = measure(tiny_checkpoint(tiny), data, tmp_path, RESTED)
    assert measured.ks == tuple(range(2, tiny.layers + 1))
    agreed = list[bool]()
    for row, item in zip(measured.results, data.items, strict=True):
        inputs = model.inputs(prompt_messages(item.question), list(item.images))  # type: ignore[arg-type]
        count = -(-3 * int((inputs["input_ids"] == model.image_token).sum()) // 4)
        full = model.greedy(inputs, None, 6)
        end = full.ids.index(2) + 1 if 2 in full.ids else 6
        answers = [rest_answer(model, inputs, k, chosen_rest(model, inputs, k, count), 6) for k in measured.ks]
        logs = [answer.logits[0].double().log_softmax(-1) for answer in answers]
        first = full.logits[0].double().log_softmax(-1)
        np.testing.assert_allclose(row.kl, [kl(p, first) for p in logs], rtol=1e-3, atol=1e-7)
        assert row.agree is not None
        assert row.agree == (True, *(answer.ids[:end] == full.ids[:end] for answer in answers))
        agreed += row.agree[1:]
    assert not all(agreed)
    assert np.mean([row.kl for row in measured.results]) > 1e-3


def test_a_rest_of_nothing_is_none_and_a_rest_of_everything_changes_nothing(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder, data = tiny_checkpoint(GQA), questions(count=2)
    plain = measure(folder, data, tmp_path / "plain")
    nothing = measure(folder, data, tmp_path / "nothing", replace(ALL, rest="0"))
    for row, other in zip(plain.results, nothing.results, strict=True):
        np.testing.assert_allclose(row.kl, other.kl, rtol=1e-4, atol=1e-9)
        assert row.agree == other.agree
    for row in measure(folder, data, tmp_path / "all", replace(ALL, rest="100%")).results:
        np.testing.assert_allclose(row.kl, 0, atol=1e-9)
        assert row.agree == (True,) * len(KS)


def test_a_k_at_which_none_can_be_chosen_is_left_out(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = tiny_checkpoint(GEMMA3)
    text = open_source(str(folder)).config.text
    measured = measure(folder, questions(count=1), tmp_path, replace(RESTED, max_new_tokens=0))
    assert measured.ks == tuple(k for k in range(2, text.layers + 1) if not text.slides(k - 1))


def test_what_cannot_be_measured_with_a_rest_is_refused(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="rest is 'ten'; it must be a share of the image tokens"):
        CalibrationOptions(rest="ten")
    with pytest.raises(RequestError, match="--attention measures the full model; leave it out with --rest"):
        CalibrationOptions(rest="10%", attention=True)
    bundle = export(tiny_checkpoint(GQA), tmp_path / "bundle", (2, 3)).folder
    engine = open_source("", bundle, engine=Loading(device="cpu", threads=1))
    from vtx.exporter.calibration.calibrate import calibrate

    with pytest.raises(RequestError, match="a rest is measured in float32; leave out --device"):
        calibrate(engine, questions(count=1), RESTED, tmp_path / "out")


def test_an_export_records_no_k_that_was_measured_with_a_rest(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = open_source(str(tiny_checkpoint(GQA)))
    measured = measure(tiny_checkpoint(GQA), questions(count=2), tmp_path, RESTED)
    path = write_report(make_report(source.calibrated, "q", measured, Choosing(min_kept=1), RESTED.rest), tmp_path)
    with pytest.raises(RequestError, match="was measured with a rest of '75%', which an export does not record; name"):
        read_choice(path, source.fingerprint)
