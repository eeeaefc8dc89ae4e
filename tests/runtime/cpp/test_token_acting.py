"""Actions of a model whose tokens are actions (OpenVLA) from libvtx: those of the Python runtime, and its refusals.

`VTX_CONFIGURATIONS=20` sets how many random configurations are compared.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bundles import ORT, copy, export, forge, manifest
from tests.support.cabi import BUNDLE, CONTEXT, DEADLINE, OK, REQUEST, Loaded
from tests.support.cpp import DEVICES, needs_cpp, output, run
from tests.support.exported import THREADS
from tests.support.families.openvla import (
    BRIDGE,
    FASTV,
    KS,
    NUMBERS,
    OTHER,
    WORDS,
    TinyOpenVLA,
    drawn,
    make_openvla,
    with_towers,
)
from tests.support.fixtures import Libraries
from tests.support.near import assert_near
from tests.support.tiny import random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.errors import VtxError

pytestmark = needs_cpp

SAME = 1e-5
PICTURES = [random_image(number, size) for number, size in enumerate(((80, 60), (40, 90), (301, 7)))]


@pytest.fixture(scope="module")
def folder(openvla: tuple[Path, Path]) -> Path:
    return openvla[1]


@pytest.fixture(scope="module")
def python(folder: Path) -> Iterator[Model]:
    with load(folder, device="cpu", threads=THREADS) as model:
        yield model


def compare(library: Loaded, python: Model, picture: Any, words: str, k: int | None, **given: Any) -> None:
    wanted = python.act(picture, words, k=k, **given)
    encoded = {name: value.encode() if isinstance(value, str) else value for name, value in given.items()}
    status, found, facts = library.act([picture], words, [], k=str(k or "none").encode(), **encoded)
    assert status == OK, facts
    assert facts["token_ids"] == list(python.actor.token_ids)
    assert_near(found, wanted, SAME)
    assert facts["actions"] == found.tolist()


@pytest.mark.slow
@DEVICES
def test_ids_and_actions_are_those_of_python(opened: Libraries, python: Model, folder: Path, device: str) -> None:
    library, answers = opened(folder, device), set()
    for picture in PICTURES:
        for k in (None, *KS):
            compare(library, python, picture, WORDS, k, reduce="none")
            answers.add(python.actor.token_ids)
    assert len(answers) > len(PICTURES), "K changes nothing, so the test shows nothing"


def test_reductions_are_those_of_python(opened: Libraries, python: Model, folder: Path) -> None:
    library = opened(folder)
    for reduce in (FASTV, "divprune:keep=5", "default"):
        for k in (None, 5):
            compare(library, python, PICTURES[0], WORDS, k, reduce=reduce)
    compare(library, python, PICTURES[0], WORDS, 5, normalized=True, unnorm_key="bridge_orig")


@pytest.mark.parametrize(
    "words", ["Block the ROBOT", "take </S> the <PAD>", "ÉPÉE, İzmir", "ΟΔΟΣ ΣΑΣ Σ", "  two  spaces ", "a\nb"]
)
def test_an_instruction_is_put_in_the_prompt_as_in_python(
    opened: Libraries, python: Model, folder: Path, words: str
) -> None:
    compare(opened(folder), python, PICTURES[0], words, 5, reduce="none")


def test_a_picture_that_is_the_same_is_not_encoded_again(opened: Libraries, python: Model, folder: Path) -> None:
    own, encoded = opened(folder), []
    for picture, words in ((0, "pick"), (1, "pick"), (1, "take red"), (0, "take red")):
        status, found, facts = own.act([PICTURES[picture]], words, [], k=b"5")
        assert status == OK, facts
        encoded.append(facts["encoded"])
        assert_near(found, python.act(PICTURES[picture], words, k=5), SAME)
        assert facts["seconds"]["prompt"] > 0
    assert encoded == [1, 1, 0, 1]


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"pictures": []}, REQUEST),
        ({"pictures": PICTURES[:2]}, REQUEST),
        ({"instruction": " "}, REQUEST),
        ({"instruction": "red " * 300}, CONTEXT),
        ({"state": [0.0] * 7}, REQUEST),
        ({"noise": np.zeros(7), "seed": 1}, REQUEST),
        ({"steps": 4}, REQUEST),
        ({"unnorm_key": "fractal"}, REQUEST),
        ({"k": 4}, REQUEST),
        ({"reduce": "cls"}, REQUEST),
        ({"reduce": "visionzip"}, REQUEST),
    ],
    ids=["no picture", "two", "words", "long", "state", "noise", "steps", "key", "k", "cls", "visionzip"],
)
def test_what_does_not_fit_is_refused_in_the_words_of_python(
    opened: Libraries, python: Model, folder: Path, changed: dict[str, Any], status: int
) -> None:
    given = {"pictures": PICTURES[:1], "instruction": WORDS, "state": None, **changed}
    images, words, state = (given.pop(name) for name in ("pictures", "instruction", "state"))
    with pytest.raises(VtxError) as refused:
        python.act(images, words, state, **given)
    given |= {name: str(given[name]).encode() for name in ("k", "reduce", "unnorm_key") if name in given}
    if "seed" in given:
        given["has_seed"] = 1
    found, _, facts = opened(folder).act(images, words, [] if state is None else state, **given)
    assert (found, facts["error"]) == (status, str(refused.value))


def test_cameras_have_no_names_and_late_actions_are_not_given(opened: Libraries, folder: Path) -> None:
    library = opened(folder)
    status, _, facts = library.act(PICTURES[:1], WORDS, [], cameras=("base",))
    assert (status, facts["error"]) == (REQUEST, "this bundle names no cameras; give the picture itself")
    status, found, facts = library.act(PICTURES[:1], WORDS, [], deadline_ms=1e-6)
    assert (status, found.size) == (DEADLINE, 0)
    words = r"no actions within 1e-06 ms, \d+ ms have passed, so none are given; raise deadline_ms, or take a smaller K"
    assert re.fullmatch(words, facts["error"])
    status, _, facts = library.act(PICTURES[:1], WORDS, [], deadline_ms=-1.0)
    assert (status, facts["error"]) == (REQUEST, "deadline_ms is -1.0; it must be milliseconds above 0, at most 1e9")
    assert library.act(PICTURES[:1], WORDS, [], deadline_ms=1e9)[0] == OK


@pytest.mark.slow
def test_several_data_sets_need_a_name(opened: Libraries, tmp_path: Path) -> None:
    tiny = TinyOpenVLA(norm_stats={"bridge_orig": BRIDGE, "fractal": OTHER})
    patch = with_towers(tiny)
    try:
        bundle = export(make_openvla(tmp_path / "checkpoint", tiny), tmp_path / "bundle", (3,), dialects=ORT).folder
    finally:
        patch.undo()
    library = opened(bundle)
    assert json.loads(library.library.vtx_model_json(library.handle))["action"] == {
        "widths": {"bridge_orig": NUMBERS, "fractal": 3}, "horizon": 1,
    }  # fmt: skip
    with load(bundle, device="cpu", threads=THREADS) as two:
        for name in ("bridge_orig", "fractal"):
            compare(library, two, PICTURES[0], WORDS, 3, unnorm_key=name)
        for key in ({}, {"unnorm_key": "Fractal"}):
            with pytest.raises(VtxError) as refused:
                two.act(PICTURES[0], WORDS, **key)
            _, _, facts = library.act(PICTURES[:1], WORDS, [], **{name: key[name].encode() for name in key})
            assert facts["error"] == str(refused.value)


def test_an_answer_that_ends_too_early_is_no_action(
    opened: Libraries, python: Model, folder: Path, tmp_path: Path
) -> None:
    python.act(PICTURES[0], WORDS, k=None, reduce=None)
    second = python.actor.token_ids[1]
    ending = copy(folder, tmp_path / "ending")
    written = manifest(folder)
    written["text"]["end_ids"] = [second]
    forge(ending, written)
    status, _, facts = opened(ending).act(PICTURES[:1], WORDS, [], k=b"none", reduce=b"none")
    assert status == BUNDLE
    assert re.match(r"the answer has [12] of the 7 tokens of an action and ends \(end\), so no action", facts["error"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["bins"].update(vocab=10), "bins: 256 edges, 10 tokens and "),
        (lambda m: m["bins"].update(vocab=1 << 20), "bins: they go beyond the model's vocabulary"),
        (lambda m: m["bins"].update(ranges={}), "and 0 data sets"),
        (lambda m: m["bins"].update(edges=1), "bins.edges is 1, outside 2..65536"),
        (lambda m: m["bins"]["ranges"]["bridge_orig"]["low"].pop(), "a range of 6 low and 7 high numbers and 7 of its"),
        (lambda m: m["bins"]["ranges"]["bridge_orig"]["high"].__setitem__(0, 1e200), "from -1e+30 to 1e+30"),
        (lambda m: m["bins"]["ranges"]["bridge_orig"]["mask"].__setitem__(0, 1), "not a list of true and false"),
        (lambda m: m["bins"].update(more=1), "unknown key 'more'"),
    ],
)
def test_a_manifest_that_was_altered_is_refused(
    folder: Path, tmp_path: Path, change: Callable[[Any], object], message: str
) -> None:
    damaged = copy(folder, tmp_path / "damaged")
    written = manifest(folder)
    change(written)
    forge(damaged, written)
    PICTURES[0].save(tmp_path / "a.png")
    done = run("run", "--bundle", damaged, "--act", "none", tmp_path / "a.png", WORDS)
    assert done.returncode == 1
    assert message in done.stderr.decode()


def test_the_command_prints_an_action_as_python_does(python: Model, folder: Path, tmp_path: Path) -> None:
    PICTURES[0].save(tmp_path / "a.png")
    words = ("--bundle", folder, "--k", "5", "--threads", "1", "--act", "none", "--unnorm-key", "bridge_orig")
    found = json.loads(output("run", *words, "--reduce", "none", tmp_path / "a.png", WORDS))
    wanted = python.act(PICTURES[0], WORDS, k=5, reduce=None, unnorm_key="bridge_orig")
    np.testing.assert_allclose(found["actions"], wanted, atol=SAME)
    assert set(found["seconds"]) == {"tower", "prompt", "expert"}
    done = run("run", *words, "--seed", "1", tmp_path / "a.png", WORDS)
    assert b"seed: this model makes actions of a picture and an instruction alone; leave it out" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", range(int(os.environ.get("VTX_CONFIGURATIONS", "1"))))
def test_random_configurations_act_as_in_python_on_both_engines(opened: Libraries, tmp_path: Path, number: int) -> None:
    tiny, ks = drawn(number)
    patch = with_towers(tiny)
    try:
        checkpoint = make_openvla(tmp_path / "checkpoint", tiny, number)
        bundle = export(checkpoint, tmp_path / "bundle", ks, dialects=(*ORT, "plain")).folder
    finally:
        patch.undo()
    picture = random_image(number, (90, 50))
    with load(bundle, device="cpu", threads=THREADS) as python:
        for device in ("cpu", "openvino"):
            library = opened(bundle, device)
            for k in (None, *ks):
                compare(library, python, picture, WORDS, k)
