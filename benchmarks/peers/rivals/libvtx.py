"""vtx's C++ runtime, through its C ABI, over vtx's own bundles: what `make cpp` built."""

from __future__ import annotations

import ctypes
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.contract import Answer, Precision, Question
from benchmarks.peers.rivals import vtx as python

SAME_AS = "vtx"
PRECISIONS = python.PRECISIONS
REQUIREMENTS: tuple[tuple[str, ...], ...] = ()
PACKAGES = python.PACKAGES
NOTE = ""
prepare = python.prepare


def load(folder: Path, precision: str, threads: int) -> Loaded:
    from tests.support import cabi

    asked = Precision.parse(precision)
    device, compute = python.engine_of(asked)
    library = cabi.load_library()
    model = ctypes.c_void_p()
    options = cabi.LoadOptions()
    library.vtx_load_options_init(ctypes.byref(options), ctypes.sizeof(options))
    options.device = device.encode()
    options.threads = threads
    options.compute = compute and compute.encode()
    if asked.installed:  # as docs/how-to/cpp.md says
        os.environ.update(VTX_OPENVINO=cabi.openvino(), VTX_ONNXRUNTIME=cabi.onnxruntime())
    else:
        options.library = (cabi.openvino() if asked.engine else cabi.onnxruntime()).encode()
    bundle = os.fsencode(folder / python.BUNDLE)
    check(library, library.vtx_load(bundle, ctypes.byref(options), ctypes.byref(model)))
    return Loaded(library, model, asked.k)


class Loaded:
    def __init__(self, library: Any, model: ctypes.c_void_p, k: int | None) -> None:
        self._vtx = library
        self._model = model
        self._k = k
        self._image = ""
        self._conversation = ctypes.c_void_p()
        about = json.loads(library.vtx_model_json(model))
        self.how = f"{about['device']} in {about['compute']}"

    def ask(self, question: Question, new_tokens: int) -> Answer:
        from tests.support import cabi

        start = time.perf_counter()
        if question.image != self._image:
            self._open(question.image)
        opened = time.perf_counter() - start
        answer = ctypes.c_void_p()
        options = cabi.AskOptions()
        self._vtx.vtx_ask_options_init(ctypes.byref(options), ctypes.sizeof(options))
        options.max_new_tokens = new_tokens
        options.ignore_eos = 1
        options.k = b"none" if self._k is None else str(self._k).encode()
        asked = question.asked.encode()
        check(self._vtx, self._vtx.vtx_ask(self._conversation, asked, ctypes.byref(options), ctypes.byref(answer)))
        facts = json.loads(self._vtx.vtx_answer_json(answer))
        self._vtx.vtx_answer_free(answer)
        if facts["prompt_tokens"] != len(question.ids):
            raise ValueError(f"libvtx read {facts['prompt_tokens']} tokens, the prompt has {len(question.ids)}")
        times = facts["timings_ms"]
        moments = [opened + (times["first_token"] + n * times["decode_per_token"]) / 1000 for n in range(new_tokens)]
        return Answer(tuple(facts["token_ids"]), tuple(moments), times["vision"] / 1000)

    def _open(self, path: str) -> None:
        from tests.support import cabi

        self._vtx.vtx_conversation_free(self._conversation)
        self._conversation, image = ctypes.c_void_p(), cabi.VtxImage()
        self._vtx.vtx_image_init(ctypes.byref(image), ctypes.sizeof(image))
        image.path = os.fsencode(path)
        opened = self._vtx.vtx_open(self._model, ctypes.byref(image), 1, None, ctypes.byref(self._conversation))
        check(self._vtx, opened)
        self._image = path


def check(library: Any, status: int) -> None:
    if status:
        raise RuntimeError(library.vtx_last_error().decode())
