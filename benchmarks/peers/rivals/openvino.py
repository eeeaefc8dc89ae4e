"""OpenVINO GenAI's VLMPipeline on models that optimum-intel exports; prefix caching is on, as it is by default."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.contract import TORCH, Answer, Precision, Question
from benchmarks.peers.picture import MEAN, STD

PRECISIONS = ("fp32", "bf16", "int8", "int4")
REQUIREMENTS = (
    ("install", TORCH),
    ("install", "optimum-intel==2.2.0", "nncf==3.4.0", "openvino==2026.4.1", "openvino-genai==2026.4.1.0", TORCH),
    ("uninstall", "--yes", "torchvision"),  # not needed, and that of another torch breaks transformers
)
PACKAGES = ("openvino-genai", "openvino", "optimum-intel", "nncf")
NOTE = ""
MODEL = "model"
IMAGE = "<image>"
WEIGHTS = {
    "fp32": ("fp32",),
    "bf16": ("fp16",),
    "int8": ("int8",),
    "int4": ("int4", "--sym", "--group-size", "128", "--ratio", "1.0"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "bf16": {"INFERENCE_PRECISION_HINT": "bf16"},
    "int8": {"INFERENCE_PRECISION_HINT": "bf16"},
    "int4": {"INFERENCE_PRECISION_HINT": "bf16"},
}


def prepare(checkpoint: Path, precision: str, folder: Path) -> None:
    asked = Precision.parse(precision)
    export = Path(sys.executable).with_name("optimum-cli")
    weights = WEIGHTS[asked.stored][: 1 if asked.installed else None]
    command = [
        export,
        "export",
        "openvino",
        "--model",
        checkpoint,
        "--task",
        "image-text-to-text",
        "--weight-format",
        *weights,
        folder / MODEL,
    ]
    subprocess.run([*map(str, command)], check=True)
    write_image_settings(checkpoint, folder / MODEL / "preprocessor_config.json")


def write_image_settings(checkpoint: Path, target: Path) -> None:
    """In the file where the pipeline looks for them and every value written out; the exporter leaves them elsewhere."""
    settings = json.loads((checkpoint / "preprocessor_config.json").read_text(encoding="utf-8"))
    usual = {"image_mean": MEAN, "image_std": STD, "rescale_factor": 1 / 255, "resample": 3}
    steps = dict.fromkeys(("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb"), True)
    target.write_text(json.dumps({**usual, **steps, **settings}, indent=1), encoding="utf-8")


def load(folder: Path, precision: str, threads: int) -> Loaded:
    import openvino_genai

    settings = {**SETTINGS.get(precision, {}), "INFERENCE_NUM_THREADS": threads}
    pipeline = openvino_genai.VLMPipeline(os.fspath(folder / MODEL), "CPU", **settings)
    return Loaded(openvino_genai, pipeline)


class Loaded:
    def __init__(self, genai: Any, pipeline: Any) -> None:
        self._genai = genai
        self._pipeline = pipeline

    def ask(self, question: Question, new_tokens: int, pruning_ratio: int = 0) -> Answer:
        """`pruning_ratio`: percent of the image's tokens that its CDPruner leaves out, of models that it prunes."""
        import numpy as np
        import openvino
        from PIL import Image

        config = self._pipeline.get_generation_config()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.apply_chat_template = config.do_sample = False
        config.pruning_ratio = pruning_ratio
        start = time.perf_counter()
        image = openvino.Tensor(np.asarray(Image.open(question.image).convert("RGB"))[None].copy())
        ids = []
        moments = []

        def write(tokens: int | list[int]) -> Any:
            for token in [tokens] if isinstance(tokens, int) else tokens:
                ids.append(token)
                moments.append(time.perf_counter() - start)
            return self._genai.StreamingStatus.RUNNING

        streamer = make_streamer(self._genai, write)
        text = question.text.replace(IMAGE + "\n", IMAGE)  # the pipeline puts a line's end after each image itself
        done = self._pipeline.generate(text, images=[image], generation_config=config, streamer=streamer)
        read = done.perf_metrics.get_num_input_tokens()
        if read != len(question.ids) and not pruning_ratio:
            raise ValueError(f"OpenVINO GenAI read {read} tokens, the prompt has {len(question.ids)}")
        return Answer(tuple(ids), tuple(moments), done.perf_metrics.get_prepare_embeddings_duration().mean / 1000)


def make_streamer(genai: Any, write: Any) -> Any:
    """A streamer that hands each token on as it comes; the base class is known only once the library is loaded."""

    class Streamer(genai.StreamerBase):  # type: ignore[misc, name-defined]
        def write(self, tokens: int | list[int]) -> Any:
            return write(tokens)

        def end(self) -> None:
            pass

    return Streamer()
