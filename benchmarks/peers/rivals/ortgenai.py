"""onnxruntime-genai: its model builder and its generator. It has no LLaVA, so it gets a text of the prompt's length."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers import tensors
from benchmarks.peers.contract import TORCH, Answer, Precision, Question

PRECISIONS = ("fp32", "int4")
REQUIREMENTS = (
    ("install", TORCH),
    ("install", "onnxruntime-genai==0.18.0", "transformers==5.23.0", "onnx==1.23.2", "onnx-ir==1.1.0", TORCH),
)
PACKAGES = ("onnxruntime-genai", "onnxruntime")
NOTE = "decoder only, a text of as many tokens"
OPTIONS = {"fp32": (), "int4": ("int4_accuracy_level=4", "int4_block_size=32")}
MODEL = "model"


def prepare(checkpoint: Path, precision: str, folder: Path) -> None:
    asked = Precision.parse(precision)
    text = folder / "text"
    tensors.write_text_model(checkpoint, text)
    chosen = () if asked.installed else OPTIONS[asked.stored]
    options = ("--extra_options", *chosen) if chosen else ()
    command = [
        sys.executable,
        "-m",
        "onnxruntime_genai.models.builder",
        "-m",
        text,
        "-o",
        folder / MODEL,
        "-p",
        asked.stored,
        "-e",
        "cpu",
        "-c",
        folder / "cache",
        *options,
    ]
    subprocess.run([*map(str, command)], check=True)
    shutil.rmtree(text)


def load(folder: Path, precision: str, threads: int) -> Loaded:
    import onnxruntime_genai as genai

    settings = f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {threads}}}}}}}}}'
    config = genai.Config(os.fspath(folder / MODEL))
    config.overlay(settings)
    return Loaded(genai, genai.Model(config))


class Loaded:
    """A second question rewinds the generator to the end of the front."""

    def __init__(self, genai: Any, model: Any) -> None:
        self._genai = genai
        self._model = model
        self._image = ""
        self._generator: Any = None

    def ask(self, question: Question, new_tokens: int) -> Answer:
        import numpy as np

        start = time.perf_counter()
        ids = np.array(text_ids(question), np.int32)
        if question.image == self._image:
            self._generator.rewind_to(question.front)
            ids = ids[question.front :]
        else:
            self._generator = self._new(len(ids) + 256)
            self._image = question.image
        self._generator.append_tokens(ids)
        found = []
        moments = []
        while len(found) < new_tokens:
            self._generator.generate_next_token()
            found.append(int(self._generator.get_next_tokens()[0]))
            moments.append(time.perf_counter() - start)
        return Answer(tuple(found), tuple(moments))

    def _new(self, length: int) -> Any:
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        return self._genai.Generator(self._model, params)


def text_ids(question: Question) -> list[int]:
    """The prompt's ids with text in the image's place, another one for each image."""
    seed = sum(question.image.encode())
    return [3 + (7 * n + seed) % 200 if id == question.image_token else id for n, id in enumerate(question.ids)]
