"""pi0: actions of an expert that reads the prompt's K and V, against transformers and a statement by masks.

`VTX_CONFIGURATIONS=20` sets how many random configurations are compared.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.bundles import ORT, export, export_with, reseal
from tests.support.commands import invoke
from tests.support.exported import THREADS, Models
from tests.support.families.pi0 import KS, STATISTICS, WORDS, Judge, TinyPi0, make_pi0, random_pi0
from tests.support.json_files import read_json, write_json
from tests.support.near import assert_near
from tests.support.tiny import random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.safetensors import write_safetensors
from vtx.runtime.errors import BundleError, ContextError, DeadlineError, RequestError
from vtx.runtime.report.golden import check_golden

TOLERANCE = 1e-4
TINY = TinyPi0()
PICTURES = [random_image(0, (80, 60)), random_image(1, (40, 90))]


@pytest.fixture(scope="module")
def folder(pi0_bundle: Path) -> Path:
    return pi0_bundle


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    with load(folder, device="cpu", threads=THREADS) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(TINY)


def drawn(tiny: TinyPi0, seed: int) -> tuple[Any, Any]:
    chance = np.random.default_rng(seed)
    state = chance.standard_normal(tiny.state, np.float32)
    return state, chance.standard_normal((tiny.horizon, tiny.width), np.float32)


def compare(model: Model, judge: Judge, images: list[Image.Image], seed: int, ks: tuple[int, ...], steps: int) -> None:
    state, noise = drawn(judge.tiny, seed)
    ids = judge.ids(model.loaded.text.tokenizer, WORDS, len(images))
    pixels = torch.stack([judge.pixels(image) for image in images])
    wanted = judge.sampled(ids, pixels, state, noise, steps)
    for k in (None, *ks):
        found = model.act(images, WORDS, state, k=k, noise=noise, steps=steps, normalized=True)
        stated = judge.withdrawn(ids, pixels, state, noise, k, steps)
        assert_near(found, stated, TOLERANCE)
        if k is None:
            assert_near(found, wanted, TOLERANCE)
        else:
            assert np.abs(found - wanted).max() > TOLERANCE


@pytest.mark.parametrize("cameras", [1, 3])
def test_actions_are_those_of_transformers_and_of_the_statement(model: Model, judge: Judge, cameras: int) -> None:
    images = [random_image(number, ((80, 60), (40, 90), (56, 56))[number]) for number in range(cameras)]
    compare(model, judge, images, cameras, KS, 10)


def test_the_golden_actions_hold(model: Model) -> None:
    checks = list(check_golden(model))
    assert [check.name for check in checks][3:] == [f"actions at K = {k}" for k in ("none", *KS)]
    assert all(check.passed for check in checks), checks


def test_other_golden_actions_are_found(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "bundle"))
    stored = Bundle.open(copy).arrays("golden.safetensors", 1 << 20)
    stored["actions.5"] = stored["actions.3"]
    write_safetensors(copy / "golden.safetensors", stored, None)
    reseal(copy, "golden.safetensors")
    with load(copy, device="cpu", threads=THREADS) as other:
        failed = [check.name for check in check_golden(other) if not check.passed]
    assert failed == ["actions at K = 5"]


@pytest.mark.slow
def test_openvino_gives_the_same_actions(model: Model, folder: Path) -> None:
    pytest.importorskip("openvino", reason="the [openvino] extra is not installed")
    state, noise = drawn(TINY, 1)
    with load(folder, device="openvino", threads=1) as other:
        for k in (None, 5):
            found = [m.act(PICTURES, WORDS, state, k=k, noise=noise, normalized=True) for m in (model, other)]
            assert_near(found[0], found[1], TOLERANCE)


def openpi_picture(image: Image.Image, side: int) -> Image.Image:
    """The resizing of openpi's client, read in its public code."""
    ratio = max(image.width / side, image.height / side)
    width, height = int(image.width / ratio), int(image.height / ratio)
    square = Image.new("RGB", (side, side), 0)
    at = max(0, int((side - width) / 2)), max(0, int((side - height) / 2))
    square.paste(image.resize((width, height), Image.Resampling.BILINEAR), at)
    return square


def test_released_inputs_are_those_of_openpi(model: Model, folder: Path) -> None:
    """Pictures in the middle of black, and an instruction without line breaks and underscores."""
    state, noise = drawn(TINY, 1)
    side = model.manifest.image.size[0]
    pictures = [openpi_picture(picture, side) for picture in PICTURES]
    with load(folder, device="cpu", threads=THREADS, fit="released") as released:
        found = released.act(PICTURES, " pick_up\nthe cup\n", state, noise=noise, normalized=True)
    np.testing.assert_array_equal(found, model.act(pictures, "pick up the cup", state, noise=noise, normalized=True))
    assert np.abs(found - model.act(PICTURES, "pick up the cup", state, noise=noise, normalized=True)).max() > TOLERANCE
    assert np.abs(found - model.act(pictures, "pick_up the cup", state, noise=noise, normalized=True)).max() > TOLERANCE


def test_only_a_camera_with_another_picture_runs_through_the_tower(folder: Path) -> None:
    state, noise = drawn(TINY, 1)
    with load(folder, device="cpu", threads=THREADS) as own, load(folder, device="cpu", threads=THREADS) as fresh:
        own.act(PICTURES, WORDS, state, noise=noise, normalized=True)
        assert own.actor.encoded == 2
        changed = [PICTURES[0], random_image(9)]
        found = own.act(changed, WORDS, state, noise=noise, normalized=True)
        assert own.actor.encoded == 1
        np.testing.assert_array_equal(found, fresh.act(changed, WORDS, state, noise=noise, normalized=True))
        own.act(changed[::-1], WORDS, state, noise=noise, normalized=True)
        assert own.actor.encoded == 0
        other = own.act(changed[::-1], "the circle", state, noise=noise, normalized=True)
    with load(folder, device="cpu", threads=THREADS) as fresh:
        wanted = fresh.act(changed[::-1], "the circle", state, noise=noise, normalized=True)
        assert_near(other, wanted, 1e-6)


def test_states_and_actions_are_in_the_robots_units(model: Model) -> None:
    state, noise = np.array([0.1, -0.2, 3.0, 0.5], np.float32), drawn(TINY, 2)[1]
    mean, std = (np.array(STATISTICS[f"state_{kind}"], np.float32) for kind in ("mean", "std"))
    padded = np.append((state - mean) / std, [0, 0]).astype(np.float32)
    wanted = model.act(PICTURES, WORDS, padded, noise=noise, normalized=True)[:, :3]
    found = model.act(PICTURES, WORDS, state, noise=noise)
    assert found.shape == (TINY.horizon, 3)
    scaled = wanted * np.array(STATISTICS["actions_std"]) + np.array(STATISTICS["actions_mean"])
    assert_near(found, scaled, 1e-5)


def test_a_seed_draws_the_same_actions_again(model: Model) -> None:
    first, again, other = (model.act(PICTURES, WORDS, np.zeros(4), seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01


class Clock:
    """Time passes with each look at it, a millisecond a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks = 0
        monkeypatch.setattr("vtx.runtime.api.acting.monotonic", self)

    def __call__(self) -> float:
        self.looks += 1
        return self.looks / 1000


def test_a_deadline_ends_an_answer_at_every_stage_and_step_and_gives_nothing(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"instruction": "blue", "state": np.zeros(4), "seed": 5, "k": 3}
    wanted, clock = model.act(PICTURES, **given), Clock(monkeypatch)
    stages = len(model.manifest.stages)
    frames = [random_image(7, (80, 60)), random_image(8, (40, 90))]
    with pytest.raises(DeadlineError, match=r"no actions within 0\.5 ms, 1 ms have passed, so none are given"):
        model.act(frames, deadline_ms=0.5, **given)  # before the tower
    for deadline in range(2, stages + TINY.steps + 3):  # the tower is looked at first, the last step at last
        model.act([*frames, frames[0]], **given)  # so that no K and V are kept
        clock.looks = 0
        with pytest.raises(DeadlineError):
            model.act(PICTURES, deadline_ms=deadline - 0.5, **given)
        assert clock.looks == deadline + 1
    model.act([*frames, frames[0]], **given)
    clock.looks = 0
    found = model.act(PICTURES, deadline_ms=stages + TINY.steps + 2.5, **given)
    np.testing.assert_array_equal(found, wanted)  # what was begun before leaves no trace


def test_what_is_done_by_a_deadline_is_kept_for_the_next_call(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"instruction": "green", "state": np.zeros(4), "seed": 5}
    frames, stages, clock = [random_image(9), random_image(10)], len(model.manifest.stages), Clock(monkeypatch)
    with pytest.raises(DeadlineError):
        model.act(frames, deadline_ms=stages + 3.5, **given)  # some steps of the expert are done
    clock.looks = 0
    found = model.act(frames, deadline_ms=TINY.steps + 2.5, **given)  # there is no time for the stages
    assert model.actor.encoded == 0
    np.testing.assert_array_equal(found, model.act(frames, **given))


def test_fewer_steps_are_fewer_runs_of_the_expert(model: Model, judge: Judge) -> None:
    (state, noise), ids = drawn(TINY, 4), judge.ids(model.loaded.text.tokenizer, WORDS, 2)
    pixels = torch.stack([judge.pixels(image) for image in PICTURES])
    for steps in (1, 4, 15):
        found = model.act(PICTURES, WORDS, state, k=None, noise=noise, steps=steps, normalized=True)
        assert_near(found, judge.sampled(ids, pixels, state, noise, steps), TOLERANCE)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"images": []}, "0 pictures are given, and this bundle has at least one camera"),
        ({"images": {"base": random_image(0)}}, "names no cameras"),
        ({"images": [random_image(0)] * 30}, "of them for images"),
        ({"instruction": " "}, "say in words"),
        ({"state": np.zeros(3)}, r"state has the shape \[3\], this model's is \[4\]"),
        ({"state": [0, 0, np.nan, 0]}, "state holds 1 values that are not numbers"),
        ({"state": "left"}, "state is not an array of numbers"),
        ({"noise": np.zeros((8, 5))}, r"noise has the shape \[8, 5\], this model's is \[7, 5\]"),
        ({"noise": np.full((7, 5), np.inf)}, "noise holds 35 values"),
        ({"noise": np.zeros((7, 5)), "seed": 1}, "leave one out"),
        ({"seed": -1}, "seed is -1"),
        ({"noise": np.zeros((7, 5, 1))}, r"noise has the shape \[7, 5, 1\]"),
        ({"state": np.zeros(5)}, r"state has the shape \[5\], this model's is \[4\]"),
        ({"state": np.zeros(4), "normalized": True}, r"state has the shape \[4\], this model's is \[6\]"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": 1001}, "steps is 1001"),
        ({"deadline_ms": 0}, "deadline_ms is 0; it must be milliseconds above 0"),
        ({"deadline_ms": np.nan}, "deadline_ms is nan"),
        ({"k": 4}, "4"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(model: Model, changed: dict[str, Any], message: str) -> None:
    given = {"images": PICTURES, "instruction": WORDS, "state": np.zeros(4), **changed}
    with pytest.raises((RequestError, ContextError), match=message):
        model.act(**given)


def test_words_and_actions_are_not_asked_of_the_wrong_model(model: Model, models: Models) -> None:
    with pytest.raises(RequestError, match="outputs actions"), model.open(PICTURES) as conversation:
        conversation.ask("red?")
    with pytest.raises(RequestError, match="answers in words"):
        models().act(PICTURES, WORDS, [0.0])


def test_a_tokenizer_without_an_image_token_gets_the_one_that_transformers_processor_adds(
    folder: Path, tmp_path: Path
) -> None:
    """Its id is the number of the tokenizer's tokens, that of the configuration."""
    checkpoint = make_pi0(tmp_path / "checkpoint", TINY)
    tokenizer = read_json(checkpoint / "tokenizer.json")
    image = tokenizer["added_tokens"].pop()
    assert (image["content"], image["id"]) == ("<image>", TINY.vlm.vocab - 1)
    write_json(checkpoint / "tokenizer.json", tokenizer)
    settings = read_json(checkpoint / "tokenizer_config.json")
    del settings["image_token"]
    write_json(checkpoint / "tokenizer_config.json", settings)
    made, whole = plan_export(ExportOptions(str(checkpoint))).text, Bundle.open(folder).manifest.text
    assert (made.image_token, made.image_token_id, made.examples) == ("<image>", image["id"], whole.examples)


def test_cameras_have_names_and_a_bundle_may_lack_statistics(tmp_path: Path) -> None:
    checkpoint = make_pi0(tmp_path / "checkpoint", replace(TINY, statistics=False, hub_names=False))
    options = ExportOptions(str(checkpoint), (3,), "fp32", dialects=ORT, cameras=("base", "wrist"))
    bundle, state = export_with(options, tmp_path / "bundle"), drawn(TINY, 1)
    with load(bundle.folder, device="cpu", threads=THREADS) as named:
        assert named.manifest.default_k == 3
        given = {"state": state[0], "noise": state[1], "instruction": WORDS}
        wanted = named.act(PICTURES, normalized=True, **given)
        by_name = {"wrist": PICTURES[1], "base": PICTURES[0]}
        np.testing.assert_array_equal(named.act(by_name, normalized=True, **given), wanted)
        for images, message in (
            ({"base": PICTURES[0]}, "lack wrist; this bundle's cameras are base, wrist"),
            ({**by_name, "other": PICTURES[0]}, "hold other"),
            (PICTURES[:1], "1 pictures are given, and this bundle has 2 cameras"),
        ):
            with pytest.raises(RequestError, match=message):
                named.act(images, normalized=True, **given)
        with pytest.raises(RequestError, match="no means and deviations"):
            named.act(PICTURES, **given)


class Nonsense:
    """A backend whose expert changes the actions so."""

    def __init__(self, backend: Any, change: float) -> None:
        self._backend, self._change = backend, np.float32(change)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def expert(self, *_: Any) -> Any:
        return lambda actions, _: np.full_like(actions, self._change)


@pytest.mark.parametrize("change", [np.nan, 3.3e38])  # the second overflows in the robot's units alone
def test_actions_that_are_not_numbers_are_withheld(change: float, model: Model) -> None:
    broken = Model(model.bundle, Nonsense(model.backend, change), 0)
    with pytest.raises(BundleError, match="not numbers, so they are withheld"):
        broken.act(PICTURES, WORDS, np.zeros(4))


def test_the_command_prints_actions_as_json(folder: Path, tmp_path: Path, model: Model) -> None:
    (tmp_path / "state.json").write_text("[0.1, 0, 1, 0]", encoding="utf-8-sig")
    pictures = [str(tmp_path / f"{number}.png") for number in range(2)]
    for picture, path in zip(PICTURES, pictures, strict=True):
        picture.save(path)
    arguments = ["--bundle", str(folder), "--device", "cpu", "--seed", "3", "--k", "5", "--act"]
    done = invoke("run", *arguments, str(tmp_path / "state.json"), *pictures, WORDS)
    found = json.loads(done.stdout)
    wanted = model.act(PICTURES, WORDS, [0.1, 0, 1, 0], seed=3, k=5)
    np.testing.assert_allclose(found["actions"], wanted, atol=1e-5)
    assert set(found["seconds"]) == {"tower", "prompt", "expert"}
    late = invoke("run", "--deadline-ms", "0.001", *arguments, str(tmp_path / "state.json"), *pictures, WORDS)
    assert late.exit_code == 1
    assert "no actions within 0.001 ms" in late.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "most"), [("fp16", 0.02), ("bf16", 0.05), ("int8", 0.15)])
def test_actions_are_near_those_of_transformers_at_other_precisions(
    tmp_path: Path, judge: Judge, precision: str, most: float
) -> None:
    bundle = export(make_pi0(tmp_path / "checkpoint", TINY), tmp_path / "bundle", (3,), precision, dialects=ORT)
    with load(bundle.folder, device="cpu", threads=THREADS) as rounded:
        assert all(check.passed for check in check_golden(rounded))
        (state, noise), ids = drawn(TINY, 1), judge.ids(rounded.loaded.text.tokenizer, WORDS, 2)
        pixels = torch.stack([judge.pixels(image) for image in PICTURES])
        found = rounded.act(PICTURES, WORDS, state, k=3, noise=noise, normalized=True)
        assert_near(found, judge.withdrawn(ids, pixels, state, noise, 3, 10), most)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(int(os.environ.get("VTX_CONFIGURATIONS", "1"))))
def test_random_configurations_act_as_transformers_and_the_statement(tmp_path: Path, number: int) -> None:
    chance = random.Random(number)
    tiny, ks = random_pi0(chance)
    bundle = export(make_pi0(tmp_path / "checkpoint", tiny, number), tmp_path / "bundle", ks, dialects=ORT)
    sizes = [(chance.randint(20, 90), chance.randint(20, 90)) for _ in range(chance.randint(1, 3))]
    images = [random_image(number + n, size) for n, size in enumerate(sizes)]
    with load(bundle.folder, device="cpu", threads=THREADS) as model:
        compare(model, Judge(tiny, number), images, number, ks, tiny.steps)
