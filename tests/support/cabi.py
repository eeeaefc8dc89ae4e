"""libvtx's C ABI by ctypes: its structs, and enough of its calls to ask questions in this process."""

from __future__ import annotations

import ctypes as c
import json
import os
from collections.abc import Callable, Container, Sequence
from copy import copy
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from PIL import Image

from tests.support.cpp import BUILD, onnxruntime, openvino
from vtx.runtime.vision.video import Video

OK, REQUEST, CONTEXT, BUSY, IMAGE, BUNDLE, DEADLINE = 0, 1, 2, 3, 5, 6, 10
RGB8, BGR8, FILE, VIDEO = 0, 1, 6, 8
Shown: TypeAlias = "np.ndarray[Any, Any] | Video"
ON_TOKEN = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_int64, c.c_char_p, c.c_size_t)


class LoadOptions(c.Structure):
    _fields_ = (
        ("size", c.c_size_t),
        ("device", c.c_char_p),
        ("library", c.c_char_p),
        ("threads", c.c_int32),
        ("fit", c.c_char_p),
        ("compute", c.c_char_p),
        ("max_tiles", c.c_int32),
        ("require_signature", c.c_char_p),
        ("max_pixels", c.c_int64),
    )


class VtxImage(c.Structure):
    _fields_ = (
        ("size", c.c_size_t),
        ("path", c.c_char_p),
        ("data", c.c_void_p),
        ("data2", c.c_void_p),
        ("bytes", c.c_size_t),
        ("width", c.c_int32),
        ("height", c.c_int32),
        ("stride", c.c_size_t),
        ("format", c.c_int),
        ("frames", c.c_void_p),
        ("frame_count", c.c_size_t),
        ("fps", c.c_double),
        ("sampled", c.c_int32),
        ("image_tokens", c.c_int32),
    )


class AskOptions(c.Structure):
    _fields_ = (
        ("size", c.c_size_t),
        ("k", c.c_char_p),
        ("reduce", c.c_char_p),
        ("max_new_tokens", c.c_int64),
        ("temperature", c.c_double),
        ("top_p", c.c_double),
        ("top_k", c.c_int64),
        ("has_seed", c.c_int32),
        ("seed", c.c_uint64),
        ("repetition_penalty", c.c_double),
        ("gate_threshold", c.c_double),
        ("stop", c.POINTER(c.c_char_p)),
        ("stop_count", c.c_size_t),
        ("timeout", c.c_double),
        ("ignore_eos", c.c_int32),
        ("logprobs", c.c_int32),
        ("on_token", ON_TOKEN),
        ("user", c.c_void_p),
        ("about", c.c_char_p),
        ("guide_kind", c.c_char_p),
        ("guide", c.c_char_p),
        ("rest", c.c_char_p),
        ("accept", c.c_char_p),
        ("boxes", c.c_int32),
        ("thinking", c.c_int32),
        ("max_thinking_tokens", c.c_int64),
    )


class ActOptions(c.Structure):
    _fields_ = (
        ("size", c.c_size_t),
        ("k", c.c_char_p),
        ("steps", c.c_int64),
        ("normalized", c.c_int32),
        ("noise", c.POINTER(c.c_float)),
        ("noise_count", c.c_size_t),
        ("has_seed", c.c_int32),
        ("seed", c.c_uint64),
        ("deadline_ms", c.c_double),
        ("cameras", c.POINTER(c.c_char_p)),
        ("unnorm_key", c.c_char_p),
        ("reduce", c.c_char_p),
    )


def load_library() -> c.CDLL:
    """libvtx.so of the build under test, with the types of what its calls return."""
    if "sanitize" in BUILD.name:
        pytest.skip("a sanitized library ends a process that has not loaded its runtime first")
    loaded = c.CDLL(str(BUILD / "libvtx.so"))
    for name in ("version", "last_error", "model_json", "answer_text", "answer_stopped", "answer_json", "actions_json"):
        getattr(loaded, f"vtx_{name}").restype = c.c_char_p
    loaded.vtx_answer_ids.restype = c.POINTER(c.c_int64)
    loaded.vtx_answer_seg_states.restype = c.POINTER(c.c_float)
    loaded.vtx_actions_values.restype = c.POINTER(c.c_float)
    return loaded


class Loaded:
    """A bundle on one engine: `handle`, a model of `library`. `close` frees it."""

    def __init__(
        self, bundle: Path, device: str, threads: int = 1, key: Path | None = None, fit: str | None = None
    ) -> None:
        self.library, self.handle, options = load_library(), c.c_void_p(), LoadOptions()
        self.library.vtx_load_options_init(c.byref(options), c.sizeof(options))
        options.device, options.threads = device.encode(), threads
        options.require_signature = None if key is None else os.fsencode(key)
        options.fit = None if fit is None else fit.encode()
        options.library = (openvino() if device == "openvino" else onnxruntime()).encode()
        self.check(self.library.vtx_load(os.fsencode(bundle), c.byref(options), c.byref(self.handle)))

    def ask(
        self, pictures: Sequence[Path], questions: Sequence[str], ks: Sequence[str] = (), turns: Container[int] = (),
        **fields: Any,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """The answers to questions about the same pictures, as `vtx-run --json` prints them; `ks`: each one's K.

        `turns`: the numbers of those that are turns of one chat.
        """
        images, conversation, options = (VtxImage * len(pictures))(), c.c_void_p(), AskOptions()
        for image, picture in zip(images, pictures, strict=True):
            self.library.vtx_image_init(c.byref(image), c.sizeof(image))
            image.path = os.fsencode(picture)
        self.library.vtx_ask_options_init(c.byref(options), c.sizeof(options))
        for name, value in fields.items():
            setattr(options, name, value)
        self.check(self.library.vtx_open(self.handle, images, len(images), None, c.byref(conversation)))
        found = []
        for number, question in enumerate(questions):
            if ks:
                options.k = ks[number].encode()
            call = self.library.vtx_chat if number in turns else self.library.vtx_ask
            found.append(self.answer(call, conversation, question, options))
        self.library.vtx_conversation_free(conversation)
        return found

    def answer(self, call: Any, conversation: c.c_void_p, question: str, options: AskOptions) -> dict[str, Any]:
        answer = c.c_void_p()
        self.check(call(conversation, question.encode(), c.byref(options), c.byref(answer)))
        facts: dict[str, Any] = json.loads(self.library.vtx_answer_json(answer))
        facts["stopped"] = self.library.vtx_answer_stopped(answer).decode()
        self.library.vtx_answer_free(answer)
        return facts

    def act(
        self, pictures: Sequence[Image.Image], instruction: str, state: Any, *, noise: Any = None,
        cameras: Sequence[str] = (), **fields: Any,
    ) -> tuple[int, np.ndarray[Any, Any], dict[str, Any]]:  # fmt: skip
        """The status of `vtx_act`, its actions [horizon, width], and what it says of them."""
        images, actions, options = (VtxImage * len(pictures))(), c.c_void_p(), ActOptions()
        arrays = [np.asarray(picture.convert("RGB")) for picture in pictures]
        for image, array in zip(images, arrays, strict=True):
            self.library.vtx_image_init(c.byref(image), c.sizeof(image))
            image.data, image.height, image.width = array.ctypes.data, array.shape[0], array.shape[1]
            image.stride = array.strides[0]
        self.library.vtx_act_options_init(c.byref(options), c.sizeof(options))
        numbers = np.ascontiguousarray(noise if noise is not None else [], np.float32)
        if noise is not None:
            options.noise, options.noise_count = numbers.ctypes.data_as(c.POINTER(c.c_float)), numbers.size
        if cameras:
            options.cameras = (c.c_char_p * len(cameras))(*map(str.encode, cameras))
        for name, value in fields.items():
            setattr(options, name, value)
        given = np.ascontiguousarray(state, np.float32)
        status = self.library.vtx_act(
            self.handle, images, len(images), instruction.encode(), given.ctypes.data_as(c.POINTER(c.c_float)),
            given.size, c.byref(options), c.byref(actions),
        )  # fmt: skip
        if status != OK:
            return status, np.zeros((0, 0), np.float32), {"error": self.library.vtx_last_error().decode()}
        horizon, width = c.c_size_t(), c.c_size_t()
        values = self.library.vtx_actions_values(actions, c.byref(horizon), c.byref(width))
        found = np.ctypeslib.as_array(values, (horizon.value, width.value)).copy()
        facts: dict[str, Any] = json.loads(self.library.vtx_actions_json(actions))
        self.library.vtx_actions_free(actions)
        return status, found, facts

    def opened(self, picture: Image.Image) -> Callable[..., dict[str, Any]]:
        """A conversation about one picture, as a function of a question and the fields of `AskOptions`."""
        conversation = opened(self.library, self.handle, np.asarray(picture))

        def ask(question: str, **fields: Any) -> dict[str, Any]:
            return self.answer(self.library.vtx_ask, conversation, question, options_of(self.library, **fields))

        return ask

    def check(self, status: int) -> None:
        assert status == OK, self.library.vtx_last_error().decode()

    def close(self) -> None:
        self.library.vtx_model_free(self.handle)
        self.handle = c.c_void_p()


def images_of(library: c.CDLL, arrays: Sequence[Shown], format: int = RGB8) -> c.Array[VtxImage]:
    """Pixels [height, width, channels], and videos of arrays, as the C ABI takes them; the arrays must live as long."""
    images = (VtxImage * len(arrays))()
    for image, array in zip(images, arrays, strict=True):
        library.vtx_image_init(c.byref(image), c.sizeof(image))
        if isinstance(array, Video):
            frames = images_of(library, list(array.source))  # type: ignore[arg-type]
            image.format, image.frames, image.frame_count = VIDEO, c.addressof(frames), len(frames)
            image.fps, image.sampled = array.fps or 0, array.frames or 0
            images.held = [*getattr(images, "held", []), frames]  # type: ignore[attr-defined]
            continue
        image.data, image.height, image.width = array.ctypes.data, array.shape[0], array.shape[1]
        image.stride, image.format = array.strides[0], format
    return images


def opened(library: c.CDLL, model: c.c_void_p, array: np.ndarray[Any, Any], format: int = RGB8) -> c.c_void_p:
    handle, images = c.c_void_p(), images_of(library, [array], format)
    assert library.vtx_open(model, images, 1, None, c.byref(handle)) == OK, library.vtx_last_error()
    return handle


class Frames:
    """A conversation of `loaded` whose images are replaced; `close` frees it."""

    def __init__(self, loaded: Loaded, arrays: Sequence[Shown], system: str | None = None) -> None:
        self.loaded, self.library, self.handle = loaded, loaded.library, c.c_void_p()
        images, text = images_of(self.library, arrays), None if system is None else system.encode()
        loaded.check(self.library.vtx_open(loaded.handle, images, len(images), text, c.byref(self.handle)))

    def ask(self, question: str, *, turn: bool = False, **fields: Any) -> dict[str, Any]:
        """The answer to a question, or to the next turn of the chat."""
        call = self.library.vtx_chat if turn else self.library.vtx_ask
        return self.loaded.answer(call, self.handle, question, options_of(self.library, **fields))

    def replace(self, arrays: Sequence[Shown], near: float = 0.0) -> bool:
        replaced, images = c.c_int32(-1), images_of(self.library, arrays)
        status = self.library.vtx_conversation_replace(
            self.handle, images, len(images), c.c_double(near), c.byref(replaced)
        )
        self.loaded.check(status)
        return bool(replaced.value)

    def fork(self) -> Frames:
        """Another conversation about the same images."""
        forked = copy(self)
        forked.handle = c.c_void_p()
        self.loaded.check(self.library.vtx_conversation_fork(self.handle, c.byref(forked.handle)))
        return forked

    def load_prefix(self, file: Path) -> str:
        """What is said of a file that is refused, else nothing."""
        status = self.library.vtx_conversation_load_prefix(self.handle, os.fsencode(file))
        return "" if status == OK else f"{status} {self.library.vtx_last_error().decode()}"

    def save_prefix(self, file: Path) -> str:
        status = self.library.vtx_conversation_save_prefix(self.handle, os.fsencode(file))
        return "" if status == OK else f"{status} {self.library.vtx_last_error().decode()}"

    def close(self) -> None:
        self.library.vtx_conversation_free(self.handle)


def options_of(library: c.CDLL, **fields: Any) -> AskOptions:
    options = AskOptions()
    library.vtx_ask_options_init(c.byref(options), c.sizeof(options))
    options.max_new_tokens = 8
    for name, value in fields.items():
        setattr(options, name, value)
    return options
