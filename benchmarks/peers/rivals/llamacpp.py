"""llama.cpp with its own vision part (mtmd), through llama-cpp-python's bindings, built for this machine's processor.

Text goes in by ids, the image through mtmd; a second question removes the cells after the image and goes on there,
as llama.cpp's server does.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.peers import gguf_files
from benchmarks.peers.contract import Answer, Precision, Question

PRECISIONS = ("fp32", "f16", "q8_0", "q4_0")
REQUIREMENTS = (("install", "--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36", "gguf==0.19.0", "pillow"),)
PACKAGES = ("llama-cpp-python",)
NOTE = ""
TEXT = "text.gguf"
MMPROJ = "mmproj.gguf"
FILE_TYPES = {"q4_0": 2, "q8_0": 7}  # llama.h: LLAMA_FTYPE_MOSTLY_*
F32 = 0  # ggml.h: GGML_TYPE_F32
FLASH_ATTENTION = 1  # llama.h: LLAMA_FLASH_ATTN_TYPE_ENABLED
BATCH = 1024


def prepare(checkpoint: Path, precision: str, folder: Path) -> None:
    import llama_cpp

    precision = Precision.parse(precision).stored
    full = precision == "fp32"
    gguf_files.write_mmproj(checkpoint, folder / MMPROJ, full=full)
    if precision not in FILE_TYPES:
        gguf_files.write_text(checkpoint, folder / TEXT, full=full)
        return
    plain = folder / "f16.gguf"
    gguf_files.write_text(checkpoint, plain, full=False)
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = FILE_TYPES[precision]
    failed = llama_cpp.llama_model_quantize(os.fsencode(plain), os.fsencode(folder / TEXT), ctypes.byref(options))
    if failed:
        raise RuntimeError(f"llama_model_quantize returned {failed}")
    plain.unlink()


def load(folder: Path, precision: str, threads: int) -> Loaded:
    import llama_cpp
    from llama_cpp import mtmd_cpp

    llama_cpp.llama_backend_init()
    settings = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(folder / TEXT), settings)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {TEXT}")
    context = llama_cpp.llama_init_from_model(model, context_settings(llama_cpp, precision, threads))
    vision = mtmd_cpp.mtmd_context_params_default()
    vision.use_gpu = False
    vision.print_timings = False
    vision.warmup = False
    vision.n_threads = threads
    mtmd = mtmd_cpp.mtmd_init_from_file(os.fsencode(folder / MMPROJ), model, vision)
    if not context or not mtmd:
        raise RuntimeError("llama.cpp cannot make a context for text and image")
    return Loaded(llama_cpp, mtmd_cpp, model, context, mtmd)


def context_settings(llama_cpp: Any, precision: str, threads: int) -> Any:
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = 1024
    settings.n_threads = settings.n_threads_batch = threads
    if Precision.parse(precision).installed:
        return settings
    settings.n_batch = settings.n_ubatch = BATCH
    settings.flash_attn_type = FLASH_ATTENTION
    if precision == "fp32":
        settings.type_k = settings.type_v = F32
    return settings


class Loaded:
    def __init__(self, llama: Any, vision: Any, model: Any, context: Any, mtmd: Any) -> None:
        self._llama = llama
        self._vision = vision
        self._model = model
        self._context = context
        self._mtmd = mtmd
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._image = ""

    def ask(self, question: Question, new_tokens: int) -> Answer:
        start = time.perf_counter()
        memory = self._llama.llama_get_memory(self._context)
        vision = None
        if question.image == self._image:
            self._llama.llama_memory_seq_rm(memory, 0, question.front, -1)
        else:
            self._llama.llama_memory_clear(memory, True)
            vision = self._read_front(question)
        self._image = question.image
        self._decode(question.ids[question.front :])
        ids = []
        moments = []
        while True:
            ids.append(self._greedy())
            moments.append(time.perf_counter() - start)
            if len(ids) == new_tokens:
                return Answer(tuple(ids), tuple(moments), vision)
            self._decode(ids[-1:])

    def _read_front(self, question: Question) -> float:
        """Run text before the image and the image; seconds of the latter's encoder."""
        at = question.ids.index(question.image_token)
        self._decode(question.ids[:at])
        chunks = self._chunks(question.image)
        chunk = self._vision.mtmd_input_chunks_get(chunks, 0)
        rows = self._vision.mtmd_input_chunk_get_n_tokens(chunk)
        if rows != question.front - at:
            raise ValueError(f"llama.cpp makes {rows} rows of the image, the prompt has {question.front - at}")
        start = time.perf_counter()
        check(self._vision.mtmd_encode_chunk(self._mtmd, chunk), "mtmd_encode_chunk")
        seconds = time.perf_counter() - start
        features = self._vision.mtmd_get_output_embd(self._mtmd)
        past = self._llama.llama_pos(0)
        decode = self._vision.mtmd_helper_decode_image_chunk
        nothing = self._vision.mtmd_helper_post_decode_callback()
        failed = decode(self._mtmd, self._context, chunk, features, at, 0, BATCH, ctypes.byref(past), nothing, None)
        check(failed, "mtmd_helper_decode_image_chunk")
        self._vision.mtmd_input_chunks_free(chunks)
        return seconds

    def _chunks(self, image: str) -> Any:
        from PIL import Image

        picture = Image.open(image).convert("RGB")
        data = (ctypes.c_uint8 * (3 * picture.width * picture.height)).from_buffer_copy(picture.tobytes())
        bitmap = self._vision.mtmd_bitmap_init(picture.width, picture.height, data)
        part = self._vision.mtmd_input_part(None, bitmap)
        parts = (ctypes.POINTER(self._vision.mtmd_input_part) * 1)(ctypes.pointer(part))
        chunks = self._vision.mtmd_input_chunks_init()
        check(self._vision.mtmd_tokenize_from_parts(self._mtmd, chunks, parts, 1, False), "mtmd_tokenize_from_parts")
        self._vision.mtmd_bitmap_free(bitmap)
        return chunks

    def _decode(self, ids: Any) -> None:
        tokens = (self._llama.llama_token * len(ids))(*ids)
        check(
            self._llama.llama_decode(self._context, self._llama.llama_batch_get_one(tokens, len(ids))), "llama_decode"
        )

    def _greedy(self) -> int:
        import numpy as np

        logits = self._llama.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())


def check(failed: int, function: str) -> None:
    if failed:
        raise RuntimeError(f"{function} returned {failed}")
