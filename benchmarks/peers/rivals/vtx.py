"""vtx itself, through `vtx.load`: on onnxruntime or OpenVINO, with all layers or with withdrawal at a K."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.contract import AUTO, Answer, Precision, Question

FLOATS = ("fp32", "fp32@openvino", "bf16@openvino")
INTEGERS = tuple(f"{stored}{engine}" for stored in ("int8", "int4") for engine in ("", "@openvino", "@openvino+int8"))
PRECISIONS = (*FLOATS, *INTEGERS)
REQUIREMENTS: tuple[tuple[str, ...], ...] = ()
PACKAGES = ("onnxruntime", "openvino")
NOTE = ""
BUNDLE = "bundle"


def prepare(checkpoint: Path, precision: str, folder: Path) -> None:
    from vtx.exporter.bundling.export import run_export
    from vtx.exporter.bundling.options import ExportOptions
    from vtx.exporter.bundling.prepare import plan_export

    place, _, ks = precision.partition("/")
    stored = Precision.parse(place).stored
    if Precision.parse(place).installed:
        export = [
            Path(sys.executable).with_name("vtx-export"),
            "--model",
            checkpoint,
            "--k",
            ks or "none",
            "--precision",
            stored,
            "--out",
            folder / BUNDLE,
        ]
        subprocess.run([*map(str, export)], check=True)
        return
    block = 128 if stored == "int4" else None  # as OpenVINO GenAI's conversions
    options = ExportOptions(str(checkpoint), tuple(map(int, ks.split(","))) if ks else (), stored, int4_block=block)
    plan = plan_export(options)
    run_export(plan, folder / BUNDLE, force=False, report=lambda *_: None)


def load(folder: Path, precision: str, threads: int) -> Loaded:
    import vtx

    asked = Precision.parse(precision)
    device, compute = engine_of(asked)
    model = vtx.load(folder / BUNDLE, device=device, compute=compute, threads=threads)
    return Loaded(model, asked.k)


def engine_of(asked: Precision) -> tuple[str, str | None]:
    """The device, and the type of its arithmetic; vtx's own choice as installed, and of an engine with "+auto"."""
    if asked.installed:
        return AUTO, None
    device, _, compute = asked.engine.partition("+")
    usual = "bf16" if device and asked.stored != "fp32" else "f32"
    return device or "cpu", None if compute == AUTO else compute or usual


class Loaded:
    def __init__(self, model: Any, k: int | None) -> None:
        self._model = model
        self._k = k
        self.how = f"{model.backend.device} in {model.backend.compute}"
        self._image = ""
        self._conversation: Any = None

    def ask(self, question: Question, new_tokens: int) -> Answer:
        import vtx

        start = time.perf_counter()
        if question.image != self._image:
            self._conversation = self._model.open(question.image)
            self._image = question.image
        opened = time.perf_counter() - start
        options = vtx.Options(max_new_tokens=new_tokens, ignore_eos=True)
        answer = self._conversation.ask(question.asked, self._k, options)
        times = answer.stats.timings_ms
        if answer.stats.prompt_tokens != len(question.ids):
            raise ValueError(f"vtx read {answer.stats.prompt_tokens} tokens, the prompt has {len(question.ids)}")
        moments = [opened + (times["first_token"] + n * times["decode_per_token"]) / 1000 for n in range(new_tokens)]
        return Answer(answer.token_ids, tuple(moments), times["vision"] / 1000)
