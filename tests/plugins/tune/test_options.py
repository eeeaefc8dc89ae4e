"""The options of a tuning: which K it draws, and what is refused."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.families.glm_ocr import GLM_OCR
from tests.support.json_files import read_json
from tests.support.tiny import make, random_image
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.runtime.errors import DeviceError, RequestError, UnsupportedModelError, VtxError
from vtx_tune.options import AROUND, Depths, Learning, LossWeights, Packing, Schedule, TuneOptions, check_tunable
from vtx_tune.tune import open_workspace


def test_one_k_is_drawn_around_and_a_range_alike() -> None:
    rng = random.Random(0)
    around = Counter(Depths.parse("8").within(32).draw(rng) for _ in range(9000))
    assert set(around) == set(range(8 - AROUND, 8 + AROUND + 1))
    assert [round(around[k] / 1000) for k in range(6, 11)] == [1, 2, 3, 2, 1]
    alike = Counter(Depths.parse("4-6").draw(rng) for _ in range(9000))
    assert {k: round(n / 1000) for k, n in alike.items()} == {4: 3, 5: 3, 6: 3}


def test_a_decoder_with_norms_behind_its_parts_is_refused(tmp_path: Path) -> None:
    config = read_json(make(tmp_path, GLM_OCR) / "config.json")
    with pytest.raises(UnsupportedModelError, match="norms behind attention and the MLP, which vtx-tune does not"):
        check_tunable(read_config(config), "this model", original=False)


def test_a_k_near_the_ends_of_the_model_stays_within_it() -> None:
    assert (Depths.parse("2").within(4).low, Depths.parse("4").within(4).high) == (2, 4)


@pytest.mark.parametrize(("k", "message"), [("40", "K = 40 is beyond the model's 32"), ("4-33", "K = 33")])
def test_a_k_beyond_the_model_is_refused(k: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Depths.parse(k).within(32)


@pytest.mark.parametrize("k", ["1", "none", "8-4", "4-12-16", "", "-3", "8.5"])
def test_a_k_that_cannot_be_is_refused(k: str) -> None:
    with pytest.raises(RequestError, match="--k is"):
        Depths.parse(k)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LossWeights(0, 0, 0),
        lambda: LossWeights(kl=float("nan")),
        lambda: Learning(rank=0),
        lambda: Learning.parse_layers("0-3"),
        lambda: Learning(full=True, qlora=True),
        lambda: Learning(layers=(1, 9)).chosen(8),
        lambda: Schedule(lr=0),
        lambda: Schedule(batch=0),
        lambda: Schedule(steps=0),
        lambda: Packing(questions=0),
        lambda: TuneOptions(Depths(2, 3), full_share=1.1),
        lambda: TuneOptions(Depths(2, 3), items=0),
        lambda: TuneOptions(Depths(2, 3), held_out=0, gates=True),
    ],
)
def test_what_makes_no_sense_is_refused(make: object) -> None:
    with pytest.raises(VtxError):
        make()  # type: ignore[operator]


def test_steps_go_before_epochs() -> None:
    assert Schedule(epochs=2.5, batch=4).steps_over(10) == 7  # 25 rows seen, 4 a step
    assert Schedule(epochs=2.5, batch=4, steps=3).steps_over(10) == 3


def test_without_peft_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(DeviceError, match=r'tuning needs peft; pip install "vtx-edge\[tune\]"'):
        open_workspace(TuneOptions(Depths(2, 3)), tmp_path / "out", lambda _: None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("sharding", "learning", "message"),
    [
        ("DEEPSPEED", Learning(), r"DEEPSPEED.* launch it with --use_fsdp"),
        ("FSDP", Learning(full=True), "FSDP.* leave out --full and --qlora"),
        ("FSDP", Learning(qlora=True), "FSDP.* leave out --full and --qlora"),
    ],
)
def test_a_launcher_that_shards_otherwise_than_vtx_tune_does_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharding: str, learning: Learning, message: str
) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{sharding}", "true")
    monkeypatch.setattr("vtx_tune.tune.find_spec", lambda _: True)  # bitsandbytes is there
    with pytest.raises(DeviceError, match=message):
        open_workspace(TuneOptions(Depths(2, 3), learning=learning), tmp_path / "out", lambda _: None)
    assert not (tmp_path / "out").exists()


def test_processes_that_share_the_model_refuse_questions_without_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_image(0).save(tmp_path / "a.png")
    lines = [{"image": "a.png", "question": "what?", "answer": "a dog"}, {"image": "a.png", "question": "where?"}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    options = TuneOptions(Depths(2, 3), data=str(tmp_path / "data.jsonl"), items=2, held_out=0)
    with pytest.raises(RequestError, match=r"1 of 2 questions have no answer.* give data with answers"):
        open_workspace(options, tmp_path / "out", lambda _: None)
    assert not (tmp_path / "out").exists()


def test_without_bitsandbytes_qlora_is_refused_before_anything_costs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(DeviceError, match="--qlora needs bitsandbytes; pip install bitsandbytes"):
        open_workspace(TuneOptions(Depths(2, 3), learning=Learning(qlora=True)), tmp_path / "out", lambda _: None)
    assert not (tmp_path / "out").exists()
