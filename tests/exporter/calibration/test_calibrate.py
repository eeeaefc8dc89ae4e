"""Measuring every K: as plain PyTorch states it, resumed where it stopped, on checkpoints and on bundles."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.bundles import export
from tests.support.calibrating import ALL, GQA, KS, measure, questions
from tests.support.exported import DEVICES
from tests.support.families.gemma import GEMMA3
from tests.support.families.paligemma import PALIGEMMA
from tests.support.families.qwen import QWEN3
from tests.support.fixtures import Checkpoints, References
from tests.support.reference import Reference
from tests.support.tiny import Tiny, prompt_messages
from vtx.exporter.calibration.calibrate import CalibrationOptions, calibrate, predict_memory
from vtx.exporter.calibration.source import open_source
from vtx.exporter.reference import prompts
from vtx.exporter.reference.engine import EngineReference
from vtx.exporter.reference.prompts import prepare
from vtx.runtime.errors import BundleError, RequestError
from vtx.tools.calibration.choosing import Choosing
from vtx.tools.calibration.report import make_report
from vtx.tools.common.loading import Loading
from vtx.tools.data.items import Data, Item
from vtx.tools.data.journal import as_line

MHA = Tiny(kv_heads=4, layers=6)


def stated(model: Reference, item: Item) -> tuple[Any, list[torch.Tensor]]:
    """The inputs of an item, and the next token's log-probabilities at none and every K."""
    inputs = model.inputs(prompt_messages(item.question, len(item.images)), list(item.images))  # type: ignore[arg-type]
    return inputs, [model.logits(inputs, k).double().log_softmax(-1) for k in KS]


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return float((p.exp() * (p - q)).sum())


# --- measuring ------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tiny", [MHA, GQA], ids=["mha", "gqa"])
@pytest.mark.parametrize("images", [1, 2])
def test_every_k_is_measured_as_plain_pytorch_states_it(
    tiny_checkpoint: Checkpoints, reference: References, tmp_path: Path, tiny: Tiny, images: int
) -> None:
    data, model = questions(images, 3), reference(tiny)
    measured = measure(tiny_checkpoint(tiny), data, tmp_path)
    assert measured.ks == KS[1:]
    agreed = []
    for row, item in zip(measured.results, data.items, strict=True):
        inputs, (full, *withdrawn) = stated(model, item)
        np.testing.assert_allclose(row.kl, [kl(p, full) for p in withdrawn], rtol=1e-4)
        np.testing.assert_allclose(row.kl_reverse, [kl(full, p) for p in withdrawn], rtol=1e-4)
        assert row.top1 == tuple(bool(p.argmax() == full.argmax()) for p in withdrawn)
        answers = [model.greedy(inputs, k, 6).ids for k in KS]
        end = answers[0].index(2) + 1 if 2 in answers[0] else 6
        assert row.agree == tuple(ids[:end] == answers[0][:end] for ids in answers)
        assert row.answer.strip() == model.tokenizer.decode(answers[0][:end], skip_special_tokens=True).strip()
        agreed += row.agree[1:]
    assert not all(agreed)
    assert np.mean([row.kl for row in measured.results]) > 0.01


def test_a_right_answer_is_followed_token_by_token_at_every_k(
    tiny_checkpoint: Checkpoints, reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, model = questions(count=2), reference(GQA)
    answers = [model.greedy(stated(model, item)[0], 3, 5).ids for item in data.items]
    wanted = {item.question: np.array(ids) for item, ids in zip(data.items, answers, strict=True)}
    monkeypatch.setattr(prompts, "answer_ids", lambda _, item, __: wanted[item.question])
    for options in (ALL, replace(ALL, max_new_tokens=0)):
        for row, item in zip(
            measure(tiny_checkpoint(GQA), data, tmp_path / str(options), options).results, data.items, strict=True
        ):
            inputs = stated(model, item)[0]
            expected = tuple(model.greedy(inputs, k, 5).ids == wanted[item.question].tolist() for k in KS)
            assert row.right == expected
            assert (expected[0], expected[2]) == (False, True)


def test_an_answer_that_reads_as_the_right_one_is_right(
    tiny_checkpoint: Checkpoints, reference: References, tmp_path: Path
) -> None:
    item, model = questions(count=1).items[0], reference(GQA)
    ids = model.greedy(stated(model, item)[0], None, 4).ids
    folder = tiny_checkpoint(replace(GQA, eos=(2, ids[-1])))
    answer = measure(folder, Data("a", (item,)), tmp_path / "a").results[0].answer
    row = measure(folder, Data("b", (replace(item, answer=f" {answer.strip().upper()}."),)), tmp_path / "b").results[0]
    assert row.right == row.agree
    assert row.right[0] is True
    other = measure(folder, Data("c", (replace(item, answer="red"),)), tmp_path / "c").results[0]
    assert other.right == (False,) * len(KS)


def test_the_right_answers_tokens_continue_the_prompt_and_end(tiny_checkpoint: Checkpoints) -> None:
    source, item = open_source(str(tiny_checkpoint(GQA))), replace(questions(count=1).items[0], answer="red square")
    one = prepare(source, Data("a", (item,)), 6)[0][0]
    assert one.answer_ids is not None
    assert one.answer_ids[-1] == 2
    assert source.text.decode(one.answer_ids).strip() == "red square"
    long = replace(item, answer="red square " * 20)
    assert prepare(source, Data("a", (long,)), 6)[0][0].answer_ids is None


def test_without_answers_only_the_next_token_is_compared(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    data, folder = questions(count=2), tiny_checkpoint(GQA)
    with_answers = measure(folder, data, tmp_path / "a").results
    without = measure(folder, data, tmp_path / "b", replace(ALL, max_new_tokens=0)).results
    assert all(row.agree is None and row.answer is None for row in without)
    np.testing.assert_allclose([r.kl for r in without], [r.kl for r in with_answers], rtol=1e-4)


@pytest.mark.parametrize("tiny", [GQA, GEMMA3], ids=lambda tiny: tiny.family)
def test_attention_is_as_transformers_gives_it(
    tiny_checkpoint: Checkpoints, reference: References, tmp_path: Path, tiny: Tiny
) -> None:
    """Of Gemma 3 within windows, and in its own scale."""
    data, model = questions(images=2, count=1), reference(tiny)
    row = measure(tiny_checkpoint(tiny), data, tmp_path, replace(ALL, max_new_tokens=0, attention=True)).results[0]
    inputs, _ = stated(model, data.items[0])
    with torch.inference_mode():
        layers = model.model(**inputs, output_attentions=True).attentions
    vision = np.flatnonzero(inputs["input_ids"][0] == model.image_token)
    assert row.attention is not None
    for found, by_question, weights in zip(row.attention.answer, row.attention.question, layers, strict=True):
        mean = weights[0].mean(0).double()
        for shares, rows in ((found, mean[-1:]), (by_question, mean[vision[-1] + 1 :])):
            system, seen = rows[:, : vision[0]].sum(1).mean(), rows[:, vision].sum(1).mean()
            np.testing.assert_allclose(shares, [system, seen, 1 - system - seen, 0], atol=1e-5)
    np.testing.assert_allclose(row.attention.steps, [np.mean(row.attention.answer, 0)])


def test_items_that_cannot_be_asked_are_named_and_too_many_stop(tiny_checkpoint: Checkpoints) -> None:
    source, data = open_source(str(tiny_checkpoint(GQA))), questions()
    long = Item(data.items[0].images, "red " * 300)
    prepared, skipped = prepare(source, replace(data, items=(*data.items, long)), 6)
    assert len(prepared) == 5
    assert "question 6" in skipped[0]
    assert "the limit is 224 of a context of 256" in skipped[0]
    odd = Item(data.items[0].images, "\ud800")
    assert "surrogate" in prepare(source, replace(data, items=(*data.items, odd)), 6)[1][0]
    with pytest.raises(RequestError, match="2 of 7"):
        prepare(source, replace(data, items=(*data.items, long, long)), 6)


@pytest.mark.parametrize(("k_from", "first"), [(None, 5), (2, 2), (6, 6)])
def test_candidates_run_from_five_or_the_first_asked_to_the_last_layer(k_from: int | None, first: int) -> None:
    assert CalibrationOptions(k_from).ks(6) == tuple(range(first, 7))
    assert CalibrationOptions().ks(3) == (3,)


@pytest.mark.parametrize("k_from", [-1, 0, 1, 7])
def test_candidates_out_of_range_are_refused(k_from: int) -> None:
    with pytest.raises(RequestError, match=r"must be 2 to 6"):
        CalibrationOptions(k_from).ks(6)


def test_the_predicted_memory_grows_with_the_items_and_with_answers(tiny_checkpoint: Checkpoints) -> None:
    source, data = open_source(str(tiny_checkpoint(GQA))), questions()
    prepared = prepare(source, data, 6)[0]
    whole, part = predict_memory(source, prepared, ALL), predict_memory(source, prepared[:1], ALL)
    assert whole > part
    assert predict_memory(source, prepared, replace(ALL, max_new_tokens=0)) < whole


# --- resuming -------------------------------------------------------------------------------------


class Stop(Exception):
    """An interrupt after some layers."""


def stopping_after(count: int) -> Callable[[str, int, int], None]:
    def report(phase: str, done: int, _: int) -> None:
        if phase == "measuring" and done == count:
            raise Stop

    return report


@pytest.mark.parametrize("layers", [7, 18])
def test_an_interrupted_measurement_goes_on_and_gives_the_same(
    tiny_checkpoint: Checkpoints, tmp_path: Path, layers: int
) -> None:
    data, folder = questions(), tiny_checkpoint(GQA)
    whole = measure(folder, data, tmp_path / "whole")
    with pytest.raises(Stop):
        measure(folder, data, tmp_path / "part", report=stopping_after(layers))
    journal = tmp_path / "part" / "samples.jsonl"
    assert len(journal.read_bytes().splitlines()) == 1 + 2 * ((layers - 1) // 6)
    journal.write_bytes(journal.read_bytes() + b'{"item": "torn')
    left = list[int]()
    resumed = measure(
        folder, data, tmp_path / "part", report=lambda phase, _, n: left.append(n) if phase == "measuring" else None
    )
    assert resumed == whole
    assert set(left) == {6 * (3 - (layers - 1) // 6)}
    assert {path.name for path in (tmp_path / "part").iterdir()} == {"samples.jsonl"}


def test_more_samples_are_added_to_those_measured(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    data, folder, seen = questions(), tiny_checkpoint(GQA), list[str]()
    first = measure(folder, replace(data, items=data.items[:3]), tmp_path)
    both = measure(folder, data, tmp_path, report=lambda phase, *_: seen.append(phase))
    assert both.results[:3] == first.results
    assert seen.count("measuring") == 6
    assert measure(folder, data, tmp_path, report=stopping_after(1)) == both


def test_a_measurement_of_another_model_or_with_other_options_is_not_continued(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    data = questions(count=1)
    measure(tiny_checkpoint(GQA), data, tmp_path)
    with pytest.raises(RequestError, match=r"another model.*--out"):
        measure(tiny_checkpoint(GQA, 1), data, tmp_path)
    with pytest.raises(RequestError, match=r"another set of options.*--out"):
        measure(tiny_checkpoint(GQA), data, tmp_path, replace(ALL, k_from=3))
    assert measure(tiny_checkpoint(GQA), data, tmp_path, replace(ALL, batch=1)).results


def test_a_journal_that_was_edited_is_refused(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    data = questions(count=1)
    measure(tiny_checkpoint(GQA), data, tmp_path)
    journal = tmp_path / "samples.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'"top1":[', b'"top1":[ '))
    assert measure(tiny_checkpoint(GQA), data, tmp_path).results, "blanks say nothing"
    journal.write_bytes(journal.read_bytes().replace(b"true", b"false", 1))
    with pytest.raises(RequestError, match=r"samples\.jsonl is damaged"):
        measure(tiny_checkpoint(GQA), data, tmp_path)


@pytest.mark.parametrize("line", [b"garbage\n", b"[]\n", b'{"item": 5}\n', b'{"item": "a"}\n{"model": 1}\n'])
def test_a_damaged_journal_is_refused(tiny_checkpoint: Checkpoints, tmp_path: Path, line: bytes) -> None:
    data = questions(count=1)
    measure(tiny_checkpoint(GQA), data, tmp_path)
    journal = tmp_path / "samples.jsonl"
    journal.write_bytes(journal.read_bytes() + line)
    with pytest.raises(RequestError, match=r"samples\.jsonl"):
        measure(tiny_checkpoint(GQA), data, tmp_path)


def test_a_row_without_every_k_is_refused(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    data = questions(count=1)
    measure(tiny_checkpoint(GQA), data, tmp_path)
    journal = tmp_path / "samples.jsonl"
    head, row = journal.read_text().splitlines()
    short = {name: [1.0] if name == "kl" else value for name, value in json.loads(row).items() if name != "crc"}
    crc = zlib.crc32(as_line(short))
    journal.write_bytes(head.encode() + b"\n" + as_line({**short, "crc": crc}))
    with pytest.raises(RequestError, match="no kl for every K"):
        measure(tiny_checkpoint(GQA), data, tmp_path)


# --- bundles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiny", [GQA, replace(GQA, names="saved", dtype="float16", tied=True)], ids=["fp32", "fp16"])
def test_a_bundle_is_measured_as_its_checkpoint(tiny_checkpoint: Checkpoints, tmp_path: Path, tiny: Tiny) -> None:
    data, folder = questions(count=2), tiny_checkpoint(tiny)
    bundle = export(folder, tmp_path / "bundle", precision={"float32": "fp32"}.get(tiny.dtype, "fp16"))
    from_checkpoint = measure(folder, data, tmp_path / "a")
    source = open_source("demo", bundle.folder)
    assert source.fingerprint == open_source(str(folder)).fingerprint
    assert calibrate(source, data, ALL, tmp_path / "b") == from_checkpoint


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_quantised_bundle_is_refused_with_its_checkpoint_named(
    precision: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    bundle = export(tiny_checkpoint(GQA), tmp_path / "bundle", precision=precision).folder
    with pytest.raises(BundleError, match=rf"{precision}.* --device auto, or the checkpoint .*: --model "):
        open_source("demo", bundle)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("tiny", "images"), [(GQA, 1), (GQA, 2), (replace(QWEN3, layers=6), 1), (replace(PALIGEMMA, layers=6), 1)]
)
def test_an_engine_measures_what_the_reference_does(
    tiny: Tiny, images: int, device: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Of the same weights in float32, at the K that the bundle was cut at."""
    data, folder = questions(images, 3), tiny_checkpoint(tiny)
    data = replace(data, items=(*(replace(item, answer="red square") for item in data.items),))
    bundle = export(folder, tmp_path / "bundle", (2, 4, 5)).folder
    source = open_source("demo", bundle, engine=Loading(device, "f32"))
    measured, expected = calibrate(source, data, ALL, tmp_path / "a"), measure(folder, data, tmp_path / "b")
    assert measured.ks == (2, 4, 5)
    at = [expected.ks.index(k) for k in measured.ks]
    for row, truth in zip(measured.results, expected.results, strict=True):
        assert row.answer == truth.answer
        for name in ("kl", "kl_reverse"):
            wanted = [getattr(truth, name)[n] for n in at]
            np.testing.assert_allclose(getattr(row, name), wanted, rtol=1e-3, atol=1e-7)
        assert row.top1 == tuple(truth.top1[n] for n in at)
        for name in ("agree", "right"):
            values = getattr(truth, name)
            assert getattr(row, name) == (values and (values[0], *(values[1 + n] for n in at)))
    assert np.mean([row.kl for row in measured.results]) > 0.01
    assert (
        make_report(source.calibrated, "q", measured, Choosing(min_kept=1)).model.engine == f"fp32 on {device} in f32"
    )


def test_an_engines_measurement_resumes_and_belongs_to_one_arithmetic(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = export(tiny_checkpoint(GQA), tmp_path / "bundle", (2, 4, 5), "int4").folder
    source, data = open_source("demo", bundle, engine=Loading("cpu")), questions(count=3)
    whole = calibrate(source, data, ALL, tmp_path / "a")
    calibrate(source, replace(data, items=data.items[:2]), ALL, tmp_path / "b")
    asked = list[int]()
    greedy = EngineReference.greedy
    monkeypatch.setattr(
        EngineReference, "greedy", lambda self, s, *more: asked.append(len(s)) or greedy(self, s, *more)
    )
    assert calibrate(source, data, ALL, tmp_path / "b") == whole
    assert asked == [1]
    other = export(tiny_checkpoint(GQA), tmp_path / "other", (2, 3, 5), "int4").folder
    with pytest.raises(RequestError, match="another model"):
        calibrate(open_source("demo", other, engine=Loading("cpu")), data, ALL, tmp_path / "b")
    uncut = export(tiny_checkpoint(GQA), tmp_path / "uncut", (), "int4").folder
    with pytest.raises(RequestError, match="cut at no K"):
        calibrate(open_source("demo", uncut, engine=Loading("cpu")), data, ALL, tmp_path / "c")


@pytest.mark.parametrize("tiny", [GQA, Tiny(vision="siglip", tied=True), Tiny(rope="yarn")])
def test_a_bundle_is_measured_by_the_configuration_that_it_declares(
    tiny: Tiny, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(tiny)
    bundle = export(checkpoint, tmp_path / "bundle").folder
    assert open_source("demo", bundle).config == open_source(str(checkpoint)).config
