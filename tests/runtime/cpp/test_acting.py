"""Actions from libvtx: those of the Python runtime, and its refusals.

`VTX_CONFIGURATIONS=20` sets how many random configurations are compared.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.bundles import ORT, export, export_with
from tests.support.cabi import BUNDLE, CONTEXT, DEADLINE, OK, REQUEST
from tests.support.cpp import DEVICES, needs_cpp, output, run
from tests.support.exported import THREADS, Models
from tests.support.families.pi0 import KS, WORDS, TinyPi0, make_pi0, random_pi0
from tests.support.fixtures import Libraries
from tests.support.json_files import write_json
from tests.support.near import assert_near
from tests.support.tiny import random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.errors import VtxError
from vtx.runtime.generator import SplitMix

pytestmark = needs_cpp

SAME = 1e-5
TINY = TinyPi0()
PICTURES = [random_image(number, size) for number, size in enumerate(((80, 60), (40, 90), (56, 56), (301, 7)))]
STATE = [0.1, -0.2, 3.0, 0.5]


@pytest.fixture(scope="module")
def folder(pi0_bundle: Path) -> Path:
    return pi0_bundle


@pytest.fixture(scope="module")
def python(folder: Path) -> Iterator[Model]:
    with load(folder, device="cpu", threads=THREADS) as model:
        yield model


def noise(seed: int, tiny: TinyPi0 = TINY) -> Any:
    return np.random.default_rng(seed).standard_normal((tiny.horizon, tiny.width), np.float32)


@pytest.mark.sampled
@DEVICES
@pytest.mark.parametrize("cameras", [1, 3])
def test_actions_are_those_of_python(opened: Libraries, python: Model, folder: Path, device: str, cameras: int) -> None:
    library, images = opened(folder, device), PICTURES[4 - cameras :]
    for k in (None, *KS):
        status, found, facts = library.act(images, WORDS, STATE, noise=noise(cameras), k=str(k or "none").encode())
        assert status == OK, facts
        assert_near(found, python.act(images, WORDS, STATE, noise=noise(cameras), k=k), SAME)
        assert facts["actions"] == found.tolist()
        assert facts["encoded"] == (cameras if k is None else 0)


@pytest.mark.slow
@DEVICES
@pytest.mark.parametrize(("precision", "kv"), [("fp16", None), ("int8", "int8")])
def test_actions_of_other_precisions_are_those_of_python(
    opened: Libraries, tmp_path: Path, device: str, precision: str, kv: str | None
) -> None:
    checkpoint = make_pi0(tmp_path / "checkpoint", TINY)
    options = ExportOptions(str(checkpoint), (3,), precision, kv_precision=kv, dialects=(*ORT, "plain"))
    bundle = export_with(options, tmp_path / "bundle").folder
    library = opened(bundle, device)
    with load(bundle, device=device, threads=1) as model:
        for k in (None, 3):
            wanted = model.act(PICTURES[:2], WORDS, STATE, noise=noise(1), k=k)
            _, found, _ = library.act(PICTURES[:2], WORDS, STATE, noise=noise(1), k=str(k or "none").encode())
            assert_near(found, wanted, 1e-3)


def test_only_a_camera_with_another_picture_runs_through_the_tower(opened: Libraries, folder: Path) -> None:
    own, fresh = opened(folder), opened(folder)
    changed = [PICTURES[0], PICTURES[2]]
    encoded, last = [], None
    for pictures, words in ((PICTURES[:2], WORDS), (changed, WORDS), (changed[::-1], WORDS), (changed[::-1], "circle")):
        _, last, facts = own.act(pictures, words, STATE, noise=noise(1))
        encoded.append(facts["encoded"])
    assert encoded == [2, 1, 0, 0]
    _, wanted, facts = fresh.act(changed[::-1], "circle", STATE, noise=noise(1))
    assert facts["encoded"] == 2
    assert_near(last, wanted, SAME)


def test_released_inputs_are_those_of_python(opened: Libraries, folder: Path) -> None:
    """Of openpi: pictures in the middle of black, and an instruction without line breaks and underscores."""
    words = " pick_up\nthe cup\n"
    with load(folder, device="cpu", threads=THREADS, fit="released") as python:
        wanted = python.act(PICTURES, words, STATE, noise=noise(3))
    _, found, _ = opened(folder, fit="released").act(PICTURES, words, STATE, noise=noise(3))
    assert_near(found, wanted, SAME)
    _, plain, _ = opened(folder).act(PICTURES, words, STATE, noise=noise(3))
    assert np.abs(plain - wanted).max() > SAME


def test_a_seed_draws_the_noise_that_it_draws_in_python(opened: Libraries, python: Model, folder: Path) -> None:
    library = opened(folder)
    for seed in (0, 7, (1 << 62) + 5):
        _, found, _ = library.act(PICTURES[:1], WORDS, STATE, has_seed=1, seed=seed)
        assert_near(found, python.act(PICTURES[:1], WORDS, STATE, seed=seed), SAME)
    _, first, _ = library.act(PICTURES[:1], WORDS, STATE)
    _, other, _ = library.act(PICTURES[:1], WORDS, STATE)
    assert np.abs(first - other).max() > 0.01


@pytest.mark.slow
def test_normals_are_those_of_python() -> None:
    for seed in (1, 2):
        found = np.frombuffer(output("probe", "normals", str(seed), "200000"), np.float32)
        np.testing.assert_array_equal(found, SplitMix(seed).normals(200000))


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"pictures": []}, REQUEST),
        ({"pictures": PICTURES[:1] * 30}, CONTEXT),
        ({"instruction": " "}, REQUEST),
        ({"state": [0.0] * 3}, REQUEST),
        ({"state": [0, 0, np.nan, np.inf]}, REQUEST),
        ({"noise": np.full((7, 5), np.inf)}, REQUEST),
        ({"noise": np.zeros((7, 5)), "seed": 1}, REQUEST),
        ({"steps": 1001}, REQUEST),
        ({"k": 4}, REQUEST),
    ],
    ids=["no picture", "thirty", "words", "state", "nan", "inf", "both", "steps", "k"],
)
def test_what_does_not_fit_is_refused_in_the_words_of_python(
    opened: Libraries, python: Model, folder: Path, changed: dict[str, Any], status: int
) -> None:
    given = {"pictures": PICTURES[:2], "instruction": WORDS, "state": STATE, **changed}
    images, words, state = (given.pop(name) for name in ("pictures", "instruction", "state"))
    with pytest.raises(VtxError) as refused:
        python.act(images, words, state, **given)
    if "k" in given:
        given["k"] = str(given["k"]).encode()
    if "seed" in given:
        given["has_seed"] = 1
    found, _, facts = opened(folder).act(images, words, state, **given)
    assert (found, facts["error"]) == (status, str(refused.value))


def test_another_horizon_and_a_deadline_are_refused_by_name(opened: Libraries, folder: Path) -> None:
    library = opened(folder)
    status, _, facts = library.act(PICTURES[:1], WORDS, STATE, noise=np.zeros((8, 5)))
    assert (status, facts["error"]) == (REQUEST, "noise has the shape [40], this model's is [7, 5]")
    status, found, facts = library.act(PICTURES[:1], WORDS, STATE, deadline_ms=1e-6)
    assert (status, found.size) == (DEADLINE, 0)
    words = r"no actions within 1e-06 ms, \d+ ms have passed, so none are given; raise deadline_ms, or take fewer steps"
    assert re.match(words, facts["error"])
    status, _, facts = library.act(PICTURES[:1], WORDS, STATE, deadline_ms=-1.0)
    assert (status, facts["error"]) == (REQUEST, "deadline_ms is -1.0; it must be milliseconds above 0, at most 1e9")
    assert library.act(PICTURES[:1], WORDS, STATE, deadline_ms=1e9)[0] == OK


def test_words_and_actions_are_not_asked_of_the_wrong_model(
    opened: Libraries, python: Model, folder: Path, models: Models, tmp_path: Path
) -> None:
    with pytest.raises(VtxError) as refused:
        models().act(PICTURES[:1], WORDS, [0.0])
    status, _, facts = opened(models().bundle.folder).act(PICTURES[:1], WORDS, [0.0])
    assert (status, facts["error"]) == (REQUEST, str(refused.value))
    PICTURES[0].save(tmp_path / "a.png")
    done = run("run", "--bundle", folder, tmp_path / "a.png", "red?")
    assert b"outputs actions, not text; use act, or vtx-run --act" in done.stderr


@pytest.mark.slow
def test_cameras_have_names_and_a_bundle_may_lack_statistics(opened: Libraries, tmp_path: Path) -> None:
    checkpoint = make_pi0(tmp_path / "checkpoint", replace(TINY, statistics=False, hub_names=False))
    options = ExportOptions(str(checkpoint), (3,), "fp32", dialects=ORT, cameras=("base", "wrist"))
    bundle = export_with(options, tmp_path / "bundle").folder
    library, images, state = opened(bundle), PICTURES[:2], np.zeros(TINY.state)
    with load(bundle, device="cpu", threads=THREADS) as model:
        wanted = model.act(images, WORDS, state, noise=noise(1), normalized=True)
        swapped = images[::-1]
        for pictures, cameras in ((images, ()), (images, ("base", "wrist")), (swapped, ("wrist", "base"))):
            _, found, facts = library.act(pictures, WORDS, state, noise=noise(1), normalized=1, cameras=cameras)
            assert_near(found, wanted, SAME, str(facts))
        for names in (("base",), ("base", "wrist", "other")):
            with pytest.raises(VtxError) as refused:
                model.act(dict(zip(names, PICTURES, strict=False)), WORDS, state, normalized=True)
            _, _, facts = library.act(PICTURES[: len(names)], WORDS, state, normalized=1, cameras=names)
            assert facts["error"] == str(refused.value)
        with pytest.raises(VtxError) as refused:
            model.act(images[:1], WORDS, state, normalized=True)
        assert library.act(images[:1], WORDS, state, normalized=1)[2]["error"] == str(refused.value)
    _, _, facts = library.act([*images, images[0]], WORDS, state, normalized=1, cameras=("base", "wrist", "base"))
    assert facts["error"] == "the pictures hold base; this bundle's cameras are base, wrist"
    _, _, facts = library.act(images, WORDS, state)
    assert "has no means and deviations of states" in facts["error"]


def test_actions_that_are_not_numbers_are_withheld(opened: Libraries, folder: Path) -> None:
    library = opened(folder)
    for normalized, size, state in ((1, 3e38, np.zeros(TINY.state)), (0, 3.3e38, STATE)):
        status, found, facts = library.act(
            PICTURES[:1], WORDS, state, noise=np.full((7, 5), size), steps=1, normalized=normalized
        )
        assert (status, found.size) == (BUNDLE, 0)
        assert "the actions are not numbers, so they are withheld" in facts["error"]


def test_the_command_prints_actions_as_python_does(python: Model, folder: Path, tmp_path: Path) -> None:
    write_json(tmp_path / "state.json", STATE)
    pictures = [tmp_path / f"{number}.png" for number in range(2)]
    for picture, path in zip(PICTURES, pictures, strict=False):
        picture.save(path)
    words = ("--bundle", folder, "--seed", "3", "--k", "5", "--threads", "1", "--act", tmp_path / "state.json")
    found = json.loads(output("run", *words, *pictures, WORDS))
    np.testing.assert_allclose(found["actions"], python.act(PICTURES[:2], WORDS, STATE, seed=3, k=5), atol=SAME)
    assert set(found["seconds"]) == {"tower", "prompt", "expert"}
    (tmp_path / "state.json").write_text('{"state": [1]}')
    done = run("run", *words, *pictures, WORDS)
    assert done.returncode == 1
    assert b"state.json is not a JSON list of numbers, which is the robot's state" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", range(int(os.environ.get("VTX_CONFIGURATIONS", "2"))))
def test_random_configurations_act_as_in_python_on_both_engines(opened: Libraries, tmp_path: Path, number: int) -> None:
    chance = random.Random(number)
    tiny, ks = random_pi0(chance)
    checkpoint = make_pi0(tmp_path / "checkpoint", tiny, number)
    bundle = export(checkpoint, tmp_path / "bundle", ks, dialects=(*ORT, "plain")).folder
    images: list[Image.Image] = [
        random_image(number + n, (chance.randint(20, 150), chance.randint(20, 90))) for n in range(chance.randint(1, 3))
    ]
    state = np.random.default_rng(number).standard_normal(tiny.state, np.float32)
    with load(bundle, device="cpu", threads=THREADS) as model:
        asked: dict[str, Any] = {"noise": noise(number, tiny), "normalized": True}
        wanted = {k: model.act(images, WORDS, state, k=k, **asked) for k in (None, *ks)}
    for device in ("cpu", "openvino"):
        library = opened(bundle, device)
        for k, actions in wanted.items():
            status, found, facts = library.act(images, WORDS, state, k=str(k or "none").encode(), **asked)
            assert status == OK, facts
            assert_near(found, actions, SAME)
