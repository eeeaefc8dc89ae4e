"""A model of several towers (Eagle-X5) in libvtx: pixels, answers and refusals are those of Python.

`VTX_CONFIGURATIONS=20` sets how many random configurations are compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.bundles import copy, export, forge, manifest
from tests.support.cpp import (
    ask,
    assert_answers_equal,
    assert_prepared_equal,
    expected,
    needs_cpp,
    needs_openvino,
    run,
)
from tests.support.families.eagle import TINY, drawn, make_eagle
from tests.support.traces import meets
from vtx.runtime.api.load import load
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import BundleError

pytestmark = needs_cpp

QUESTIONS = ("What is  the picture?", "red?", "the red picture")
SIZES = ((60, 60), (150, 60), (40, 90))
DIALECTS = ("ort", "plain")
REDUCTIONS = ("fastv:k=2,ratio=0.5", "divprune:keep=8", "cdpruner:keep=8,text=none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("eagle")
    return export(make_eagle(place / "checkpoint", TINY), place / "bundle", (3, 5), dialects=DIALECTS).folder


def test_pixels_and_answers_are_those_of_python(folder: Path, pictures: list[Path]) -> None:
    with load(folder, device="cpu", threads=1) as model:
        assert_prepared_equal(model, pictures)
        assert_answers_equal(model, pictures, QUESTIONS, ("none", 3, 5))


@needs_openvino
def test_answers_on_openvino_are_those_of_python(folder: Path, pictures: list[Path]) -> None:
    with load(folder, device="openvino", compute="f32", threads=1) as model:
        for k in ("none", "3"):
            options = ("--image", pictures[2], "--k", k, "--device", "openvino", "--compute", "f32")
            found = ask(folder, pictures[1], *QUESTIONS, *options, "--max-new-tokens", "6")
            with model.open(pictures[1:]) as conversation:
                for question, answer in zip(QUESTIONS, found, strict=True):
                    want = conversation.ask(question, k if k == "none" else int(k), max_new_tokens=6)
                    assert expected(answer) == expected(want.to_dict())


@pytest.mark.slow
def test_traces_are_met_with_weights_of_integers(tmp_path: Path) -> None:
    """At other precisions `test_contract` meets them: towers are one graph for both runtimes."""
    assert meets(make_eagle(tmp_path / "checkpoint", TINY), tmp_path, "int8", reductions=REDUCTIONS) > 30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["model"]["tower"].update(several=5), "several"),
        (lambda m: m["model"]["tower"].update(more=1), "unknown key 'more'"),
        (lambda m: m["model"]["tower"].update(state_width=0), "state_width is 0, outside"),
    ],
)  # fmt: skip
def test_a_manifest_that_was_altered_is_refused_as_by_python(
    folder: Path, pictures: list[Path], tmp_path: Path, change: Callable[[Any], object], message: str
) -> None:
    damaged = copy(folder, tmp_path / "damaged")
    written = manifest(folder)
    change(written)
    forge(damaged, written)
    done = run("run", "--bundle", damaged, "--max-new-tokens", "1", pictures[0], "What?")
    assert done.returncode == 1
    assert message in done.stderr.decode()
    with pytest.raises(BundleError, match=message):
        Bundle.open(damaged)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(int(os.environ.get("VTX_CONFIGURATIONS", "1"))))
def test_random_configurations_answer_as_in_python(tmp_path: Path, pictures: list[Path], number: int) -> None:
    tiny, ks = drawn(number)
    checkpoint = make_eagle(tmp_path / "checkpoint", tiny, number)
    bundle = export(checkpoint, tmp_path / "bundle", ks, dialects=DIALECTS)
    with load(bundle.folder, device="cpu", threads=1) as model:
        assert_prepared_equal(model, pictures)
        assert_answers_equal(model, pictures, QUESTIONS, ("none", ks[0], ks[-1]))
