"""LISA in libvtx: the states of its segmentation tokens leave by the JSON, by the C ABI, and are those of Python."""

from __future__ import annotations

import ctypes as c
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cabi import OK, AskOptions, LoadOptions, VtxImage, load_library
from tests.support.cpp import ask, expected, needs_cpp, onnxruntime, output, run
from tests.support.exported import Models
from tests.support.families.lisa import LISA, QUESTION
from tests.support.json_files import read_json, write_json
from tests.support.parity import STEPS, TOLERANCE
from vtx.runtime.api.model import Model

pytestmark = needs_cpp

SIZES = ((150, 60), (40, 90))


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models(LISA, (3, 5))


def compared(found: dict[str, Any], want: dict[str, Any]) -> int:
    """Answers are equal, and their states nearly so, as their sums are taken in another order; how many there were."""
    found, want = expected(found), expected(want)
    states, wanted = found.pop("seg_states"), want.pop("seg_states")
    assert found == want
    assert len(states) == len(wanted)
    if states:
        np.testing.assert_allclose(states, wanted, atol=TOLERANCE, rtol=2e-5)
    return len(states)


def test_pixels_are_those_of_python(model: Model, pictures: list[Path]) -> None:
    lines = output("probe", "layout", model.bundle.folder, *pictures).decode().splitlines()
    assert lines == [f"{prepared.tokens} {prepared.key}" for prepared in map(model.loaded.images.prepare, pictures)]


def test_the_states_in_the_json_are_those_of_python(model: Model, pictures: list[Path]) -> None:
    questions, options = (QUESTION, "red?", QUESTION), ("--ignore-eos", "--max-new-tokens", str(STEPS))
    states = 0
    for k, shown in (("none", pictures[:1]), ("3", pictures), ("5", pictures[1:])):
        more = [word for path in shown[1:] for word in ("--image", path)]
        found = ask(model.bundle.folder, shown[0], *questions, *more, "--k", k, *options)
        with model.open(shown) as conversation:
            for question, answer in zip(questions, found, strict=True):
                depth = k if k == "none" else int(k)
                want = conversation.ask(question, depth, max_new_tokens=STEPS, ignore_eos=True)
                states += compared(answer, want.to_dict())
    assert states, "no answer held a segment"


def test_the_states_of_the_abi_are_those_of_the_json(model: Model, pictures: list[Path]) -> None:
    library, handle, conversation, answer = load_library(), c.c_void_p(), c.c_void_p(), c.c_void_p()
    load, image, options = LoadOptions(), VtxImage(), AskOptions()
    library.vtx_load_options_init(c.byref(load), c.sizeof(load))
    load.library, load.threads = onnxruntime().encode(), 1
    assert library.vtx_load(os.fsencode(model.bundle.folder), c.byref(load), c.byref(handle)) == OK
    library.vtx_image_init(c.byref(image), c.sizeof(image))
    image.path = os.fsencode(pictures[0])
    assert library.vtx_open(handle, c.byref(image), 1, None, c.byref(conversation)) == OK
    library.vtx_ask_options_init(c.byref(options), c.sizeof(options))
    options.max_new_tokens, options.ignore_eos = STEPS, 1
    assert library.vtx_ask(conversation, QUESTION.encode(), c.byref(options), c.byref(answer)) == OK
    count, hidden = c.c_size_t(), c.c_size_t()
    states = library.vtx_answer_seg_states(answer, c.byref(count), c.byref(hidden))
    wanted = np.array(json.loads(library.vtx_answer_json(answer))["seg_states"], np.float32)
    assert wanted.size, "the answer held no segment"
    assert (count.value, hidden.value) == wanted.shape
    np.testing.assert_array_equal(np.ctypeslib.as_array(states, wanted.shape), wanted)
    assert not library.vtx_answer_seg_states(None, c.byref(count), None)
    assert count.value == 0
    for free, what in (("answer", answer), ("conversation", conversation), ("model", handle)):
        getattr(library, f"vtx_{free}_free")(what)


@pytest.mark.parametrize(
    ("id", "named"), [(-1, "is -1, outside 0.."), (1 << 24, "outside 0.."), ("x", "is '\"x\"', not int")]
)
def test_an_altered_id_of_the_token_is_refused_by_name(model: Model, tmp_path: Path, id: object, named: str) -> None:
    manifest = read_json(model.bundle.folder / "vtx.json")
    manifest["text"]["seg_token_id"] = id
    write_json(tmp_path / "vtx.json", manifest)
    done = run("probe", "parse", "manifest", tmp_path / "vtx.json")
    assert done.returncode == 1
    assert "seg_token_id" in done.stderr.decode()
    assert named in done.stderr.decode()
