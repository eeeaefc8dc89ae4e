"""The C ABI from another language, by ctypes: structs, statuses, callbacks, buffers, and calls that make no sense."""

from __future__ import annotations

import ctypes as c
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.peers.contract import Question
from benchmarks.peers.rivals import libvtx as cpp_peer
from benchmarks.peers.rivals import vtx as python_peer
from PIL import Image

from tests.support.cabi import (
    BGR8,
    BUNDLE,
    BUSY,
    CONTEXT,
    IMAGE,
    OK,
    ON_TOKEN,
    REQUEST,
    RGB8,
    LoadOptions,
    VtxImage,
    load_library,
    opened,
    options_of,
)  # fmt: skip
from tests.support.cpp import BUILD, needs_cpp, onnxruntime
from tests.support.exported import Models
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api.model import Model

pytestmark = needs_cpp


@pytest.fixture(scope="module")
def library() -> c.CDLL:
    return load_library()


@pytest.fixture(scope="module")
def python(models: Models) -> Model:
    return models()


def loaded(library: c.CDLL, python: Model) -> c.c_void_p:
    handle, options = c.c_void_p(), LoadOptions()
    library.vtx_load_options_init(c.byref(options), c.sizeof(options))
    options.library, options.threads = onnxruntime().encode(), 1
    status = library.vtx_load(os.fsencode(python.bundle.folder), c.byref(options), c.byref(handle))
    assert status == OK, library.vtx_last_error()
    return handle


@pytest.fixture(scope="module")
def model(library: c.CDLL, python: Model) -> Iterator[c.c_void_p]:
    handle = loaded(library, python)
    yield handle
    library.vtx_model_free(handle)


def asked(library: c.CDLL, conversation: c.c_void_p, question: str, **fields: Any) -> dict[str, Any]:
    answer = c.c_void_p()
    options = options_of(library, **fields)
    status = library.vtx_ask(conversation, question.encode(), c.byref(options), c.byref(answer))
    assert status == OK, library.vtx_last_error()
    facts = json.loads(library.vtx_answer_json(answer))
    count = c.c_size_t()
    ids = library.vtx_answer_ids(answer, c.byref(count))
    assert ids[: count.value] == facts["token_ids"]
    facts["stopped"] = library.vtx_answer_stopped(answer).decode()
    library.vtx_answer_free(answer)
    return facts


def test_frames_with_a_stride_are_asked_about_as_in_python(library: c.CDLL, model: c.c_void_p, python: Model) -> None:
    wide = np.asarray(random_image(4, (90, 70)))
    frame = wide[5:65, 7:77]  # rows with a gap between them
    want = python.open(np.ascontiguousarray(frame)).ask("red?", max_new_tokens=8)
    swapped = np.ascontiguousarray(wide[..., ::-1])[5:65, 7:77]
    for array, format in ((frame, RGB8), (swapped, BGR8)):
        conversation = opened(library, model, array, format)
        found = asked(library, conversation, "red?")
        assert (found["token_ids"], found["text"]) == (list(want.token_ids), want.text)
        assert not found["reused_image"]
        assert asked(library, conversation, "blue?")["reused_image"]
        library.vtx_conversation_free(conversation)


def test_pieces_of_text_are_the_answer_and_a_callback_ends_it(library: c.CDLL, model: c.c_void_p) -> None:
    conversation = opened(library, model, np.asarray(random_image(1)))
    pieces = list[bytes]()
    take = ON_TOKEN(lambda user, token, text, length: pieces.append(text[:length]) or 0)
    found = asked(library, conversation, "red?", on_token=take)
    assert b"".join(pieces).decode() == found["text"]
    assert len(pieces) == len(found["token_ids"])
    stop = ON_TOKEN(lambda *_: 1)
    found = asked(library, conversation, "red?", on_token=stop, ignore_eos=1)
    assert (found["stopped"], len(found["token_ids"])) == ("cancelled", 1)
    library.vtx_conversation_free(conversation)


def test_another_thread_is_told_that_it_is_busy_and_can_cancel(library: c.CDLL, model: c.c_void_p) -> None:
    conversation = opened(library, model, np.asarray(random_image(1)))
    statuses = list[int]()

    def interfere() -> None:
        answer = c.c_void_p()
        statuses.append(library.vtx_ask(conversation, b"blue?", None, c.byref(answer)))
        library.vtx_cancel(conversation)

    def on_token(*_: object) -> int:
        if not statuses:
            thread = threading.Thread(target=interfere)
            thread.start()
            thread.join()
        return 0

    found = asked(library, conversation, "red?", on_token=ON_TOKEN(on_token), ignore_eos=1, max_new_tokens=100)
    assert statuses == [BUSY]
    assert (found["stopped"], len(found["token_ids"])) == ("cancelled", 1)
    assert asked(library, conversation, "red?", ignore_eos=1)["stopped"] == "length"  # and can be used on
    library.vtx_conversation_free(conversation)


def test_thresholds_that_differ_in_the_seventh_digit_merge_an_image_anew(library: c.CDLL, models: Models) -> None:
    python = models(Tiny(), (3,), "fp32", ("lsm:tau=0.5",))
    array = np.asarray(random_image(4))

    def tokens(tau: float) -> int:
        return conversation.ask("red?", reduce=f"lsm:tau={tau}", max_new_tokens=1).stats.vision_tokens

    with python.open(array) as conversation:
        low, high = -1.0, 1.0
        most = tokens(high)
        assert tokens(low) < most
        while high - low > 1e-7:
            middle = (low + high) / 2
            low, high = (low, middle) if tokens(middle) == most else (middle, high)
        wanted = [tokens(low), most]
    handle = loaded(library, python)
    opening = opened(library, handle, array)
    specs = [f"lsm:tau={tau}".encode() for tau in (low, high)]
    assert [asked(library, opening, "red?", reduce=spec)["vision_tokens"] for spec in specs] == wanted
    library.vtx_conversation_free(opening)
    library.vtx_model_free(handle)


def test_token_ids_are_asked_about_without_a_tokenizer(library: c.CDLL, model: c.c_void_p, python: Model) -> None:
    image = random_image(6)
    conversation = opened(library, model, np.asarray(image))
    with python.open(image) as other:
        want = other.ask("red?", max_new_tokens=8)
        ids = python.loaded.prompts.ids(other.opening("red?")).tolist()
    answer, options = c.c_void_p(), options_of(library)
    array = (c.c_int64 * len(ids))(*ids)
    assert library.vtx_ask_ids(conversation, array, len(ids), c.byref(options), c.byref(answer)) == OK
    assert json.loads(library.vtx_answer_json(answer))["token_ids"] == list(want.token_ids)
    library.vtx_answer_free(answer)
    chosen = options_of(library, reduce=b"cdpruner:keep=4", about=b"the dog")
    assert library.vtx_ask_ids(conversation, array, len(ids), c.byref(chosen), c.byref(answer)) == REQUEST
    assert b"about is given with token ids instead of text; ask by text, or leave about out" in library.vtx_last_error()
    found = asked(library, conversation, "red?", reduce=b"cdpruner:keep=4", about=b"the dog")
    with python.open(image) as other:
        want = other.ask("red?", reduce="cdpruner:keep=4", about="the dog", max_new_tokens=8).to_dict()
    assert found["kept"] == json.loads(json.dumps(want["kept"]))
    array[0] = 10**9
    assert library.vtx_ask_ids(conversation, array, len(ids), None, c.byref(answer)) == REQUEST
    assert b"token id is 1000000000; it must be at least 0 and at most" in library.vtx_last_error()
    library.vtx_conversation_free(conversation)


def test_calls_that_make_no_sense_have_a_status(library: c.CDLL, model: c.c_void_p, tmp_path: Path) -> None:
    handle, answer, image = c.c_void_p(), c.c_void_p(), VtxImage()
    assert library.vtx_load(None, None, c.byref(handle)) == REQUEST
    assert library.vtx_load(os.fsencode(tmp_path), None, c.byref(handle)) == BUNDLE
    assert not handle
    assert b"holds no vtx.json" in library.vtx_last_error()
    assert library.vtx_open(None, None, 0, None, c.byref(handle)) == REQUEST
    assert library.vtx_open(model, c.byref(image), 1, None, c.byref(handle)) == REQUEST  # no _init
    library.vtx_image_init(c.byref(image), c.sizeof(image))
    assert library.vtx_open(model, c.byref(image), 1, None, c.byref(handle)) == REQUEST
    assert b"the image's data is NULL" in library.vtx_last_error()
    (tmp_path / "a.png").write_bytes(b"not a picture")
    image.path = os.fsencode(tmp_path / "a.png")
    assert library.vtx_open(model, c.byref(image), 1, None, c.byref(handle)) == IMAGE
    assert library.vtx_ask(None, b"red?", None, c.byref(answer)) == REQUEST
    conversation = opened(library, model, np.asarray(Image.new("RGB", (60, 60))))
    assert library.vtx_ask(conversation, None, None, c.byref(answer)) == REQUEST
    assert library.vtx_ask(conversation, b"", None, c.byref(answer)) == REQUEST
    assert library.vtx_ask(conversation, b"\xff\xfe", None, c.byref(answer)) == REQUEST
    assert library.vtx_ask(conversation, b"red? " * 2000, None, c.byref(answer)) == CONTEXT
    assert not answer
    for free in (library.vtx_conversation_free, library.vtx_model_free, library.vtx_answer_free, library.vtx_cancel):
        free(None)
    library.vtx_conversation_free(conversation)


def test_a_conversation_outlives_the_model_that_opened_it(library: c.CDLL, python: Model) -> None:
    handle, options = c.c_void_p(), LoadOptions()
    library.vtx_load_options_init(c.byref(options), c.sizeof(options))
    options.library, options.threads = onnxruntime().encode(), 1
    assert library.vtx_load(os.fsencode(python.bundle.folder), c.byref(options), c.byref(handle)) == OK
    conversation = opened(library, handle, np.asarray(random_image(1)))
    library.vtx_model_free(handle)
    with python.open(random_image(1)) as other:
        assert asked(library, conversation, "red?")["token_ids"] == list(other.ask("red?", max_new_tokens=8).token_ids)
    library.vtx_conversation_free(conversation)


IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from tests.support.cabi import Loaded
model, picture = Loaded(Path(sys.argv[1]), "cpu"), [Path(sys.argv[2])]
before = model.ask(picture, ["red?"], max_new_tokens=4)[0]["token_ids"]
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
for more in (0, 1 << 20, 1 << 24):
    resource.setrlimit(resource.RLIMIT_AS, (size + more, hard))
    try:
        model.ask(picture, ["Is it red?"], max_new_tokens=4)
        print("answered")
    except AssertionError as refusal:
        print(refusal)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    assert model.ask(picture, ["red?"], max_new_tokens=4)[0]["token_ids"] == before
"""


def test_in_the_comparison_with_peers_it_gives_python_s_tokens(python: Model, tmp_path: Path) -> None:
    (tmp_path / "bundle").symlink_to(python.bundle.folder)
    for number in (1, 2):
        random_image(number).save(tmp_path / f"{number}.png")
    with python.open(tmp_path / "1.png") as conversation:
        tokens = conversation.ask("red?", max_new_tokens=1).stats.prompt_tokens
    pair = [rival.load(tmp_path, "fp32/3", 1) for rival in (python_peer, cpp_peer)]
    for number, count in ((1, 2), (2, 6), (2, 2)):
        question = Question(str(tmp_path / f"{number}.png"), "red?", "", (0,) * tokens, 0, 0)
        ours, theirs = (peer.ask(question, count) for peer in pair)
        assert ours.ids == theirs.ids
        assert len(theirs.moments) == count


@pytest.mark.usefixtures("library")
def test_a_lack_of_memory_is_one_line_and_the_model_can_be_used_on(python: Model, tmp_path: Path) -> None:
    random_image(1).save(tmp_path / "a.png")
    command = [sys.executable, "-c", IN_LITTLE_MEMORY, str(python.bundle.folder), str(tmp_path / "a.png")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert "not enough memory" in first or "no memory left" in first
    assert len(others) == 2
    for line in others:
        assert line == "answered" or "not enough memory" in line or "no memory left" in line


# The limit holds the picture's 48 MB of pixels, and not the 96 MB of a progressive JPEG's coefficients as well.
DECODING_IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from tests.support.cabi import Loaded
model, picture = Loaded(Path(sys.argv[1]), "cpu"), [Path(sys.argv[2])]
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (size + (100 << 20), hard))
try:
    model.ask(picture, ["red?"], max_new_tokens=4)
except AssertionError as refusal:
    print(refusal)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
print(len(model.ask(picture, ["red?"], max_new_tokens=4)))
"""


@pytest.mark.usefixtures("library")
def test_a_jpeg_that_memory_lacks_for_is_not_called_damaged(python: Model, tmp_path: Path) -> None:
    Image.new("RGB", (4000, 4000)).save(tmp_path / "a.jpg", progressive=True, subsampling=0)
    command = [sys.executable, "-c", DECODING_IN_LITTLE_MEMORY, str(python.bundle.folder), str(tmp_path / "a.jpg")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    refusal, answers = done.stdout.splitlines()
    assert "no memory left" in refusal
    assert answers == "1"


def test_a_program_of_an_older_header_gets_no_more_than_its_struct_holds(library: c.CDLL) -> None:
    older = c.sizeof(c.c_size_t) + 2 * c.sizeof(c.c_char_p)  # before threads came
    memory = (c.c_ubyte * 256)(*[7] * 256)
    library.vtx_load_options_init(memory, older)
    assert int.from_bytes(bytes(memory[: c.sizeof(c.c_size_t)]), sys.byteorder) == older
    assert set(memory[c.sizeof(c.c_size_t) : older]) == {0}
    assert set(memory[older:]) == {7}


class NewerLoadOptions(LoadOptions):
    _fields_ = (("invented", c.c_char_p),)


def test_what_a_program_of_a_newer_header_asks_for_is_not_ignored(library: c.CDLL, tmp_path: Path) -> None:
    handle, options = c.c_void_p(), NewerLoadOptions()
    library.vtx_load_options_init(c.byref(options), c.sizeof(options))
    assert library.vtx_load(os.fsencode(tmp_path), c.byref(options), c.byref(handle)) == BUNDLE  # nothing is asked for
    options.invented = b"verify"
    assert library.vtx_load(os.fsencode(tmp_path), c.byref(options), c.byref(handle)) == REQUEST
    assert b"sets a field that libvtx" in library.vtx_last_error()


def test_only_the_abi_is_visible(library: c.CDLL) -> None:
    assert library.vtx_api_version() == 1
    header = (Path(__file__).parents[3] / "runtime/cpp/include/vtx/vtx.h").read_text(encoding="utf-8")
    declared = set(re.findall(r"^VTX_API .*?(vtx_\w+)\(", header, re.MULTILINE))
    listed = subprocess.run(["nm", "-D", "--defined-only", BUILD / "libvtx.so"], capture_output=True, check=True)
    assert {line.split()[2] for line in listed.stdout.decode().splitlines()} == declared
