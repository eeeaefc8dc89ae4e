"""The work and the memory of the GPU paths, counted without a GPU: on the stand-ins of the tests, with a 7B's K and V.

    python -m benchmarks.gpu_work

The decoder has the 32 layers and the K and V of LLaVA-1.5-7B in fp16 and is narrow elsewhere, so that a CPU computes
it; nothing that is counted depends on that. A prompt of 641 tokens, 576 of them the picture's, gets an answer of 64.
Stand-ins take the place of CUDA, TensorRT and onnxruntime's CUDA provider and count every call; allocations are those
of device and of pinned memory. Calls are counted in three stages whose K and V are narrow, too, also of the next token
of one client and of eight, with the bytes that are copied and read. `--frames` asks a tiny model about as many pictures
in turn and reports what the last one holds. With `--write` the figures replace the results.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from benchmarks.common import markdown, parser
from benchmarks.conversations import held_slots
from benchmarks.make_checkpoint import SHAPES, Shape, write_config, write_tokenizer, write_weights
from PIL import Image
from tests.support import gpu_standin
from tests.support.engines import CARD, ORIN
from tests.support.gpu_standin import Gpu, build_all
from tests.support.ort_standin import Ort
from tests.support.tiny import Tiny, make

import vtx
from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.api.model import Model
from vtx.runtime.backends.ort import backend as ort_backend
from vtx.runtime.backends.ort import cuda as ort_cuda
from vtx.runtime.backends.slots import LANES
from vtx.runtime.backends.tensorrt import backend as tensorrt
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.scheduler.batching import Batching
from vtx.tools.tensorrt.graph import load_graph
from vtx.tools.tensorrt.releases import TENSORRT, Release

QUESTION = "What is in this picture? Describe each object."  # 65 tokens of text with the template
SECOND = "What is in its upper left corner? Say it shortly"
KS = (None, 17, 9)
NARROW = Shape(32, 64, 128, 4, head_dim=32, tower=(2, 64, 128, 2))
TOKENS = 64
PATHS = {"TensorRT-RTX": "sm89", "TensorRT 10.3": "jetson-orin", "onnxruntime's CUDA provider": None}
COUNTED = ("allocations", "recordings", "launches", "copies in", "copies out", "copies on the GPU", "waits")
BYTES = ("bytes in", "bytes out", "bytes on the GPU", "weights read")
RESULTS = Path("docs/measurements/results/gpu.jsonl")
MB = 1e6


def exported(work: Path, name: str, shape: Shape | None, ks: tuple[int, ...]) -> Path:
    """A bundle of this shape, or of a tiny model, with engines for the stand-in."""
    out = work / name
    checkpoint = work / f"checkpoint-{name}"
    if (out / "vtx.json").exists():
        return out
    shutil.rmtree(checkpoint, ignore_errors=True)
    if shape is None:
        make(checkpoint, Tiny(layers=4))
    else:
        checkpoint.mkdir(parents=True)
        write_config(checkpoint, shape)
        write_tokenizer(checkpoint, shape)
        write_weights(checkpoint, shape)
    options = ExportOptions(str(checkpoint), ks, "fp16", dialects=("ort", "ort-cuda", "trt", "trt10"))
    run_export(plan_export(options), out, force=False, report=lambda *_: None)
    build_all(out)
    build_all(out, "jetson-orin", Release(TENSORRT, (10, 3)), "trt10")
    return out


@contextmanager
def opened(folder: Path, path: str) -> Iterator[tuple[Model, Gpu]]:
    """A bundle on the stand-in of a path."""
    bundle = Bundle.open(folder)
    target = PATHS[path]
    with pytest.MonkeyPatch.context() as patch:
        if target is None:
            machine = Ort(Gpu(1 << 36))
            for module in (ort_backend, ort_cuda):
                patch.setattr(module, "load_onnxruntime", lambda: machine)
            patch.setattr(ort_cuda, "load_driver", lambda: machine.gpu)
            with Model(bundle, ort_cuda.OrtCudaBackend(bundle), 0.0, "") as model:
                yield model, machine.gpu
            return
        gpu = Gpu(1 << 36)
        made = gpu_standin.module
        patch.setattr(tensorrt, "load_driver", lambda: gpu)
        patch.setattr(tensorrt, "load_flavour", lambda flavour: made(gpu, gpu_standin.VERSION, flavour))
        patch.setattr(tensorrt, "find_gpu", lambda *_: CARD if target == "sm89" else ORIN)
        with Model(bundle, tensorrt.TensorrtBackend(bundle), 0.0) as model:
            yield model, gpu


class Count:
    """The calls since the count began."""

    def __init__(self, gpu: Gpu) -> None:
        gc.collect()
        self._gpu = gpu
        self._before = gpu.calls.copy()
        self._copies = len(gpu.copies)

    def now(self) -> dict[str, int]:
        calls = self._gpu.calls - self._before
        copies = self._gpu.copies[self._copies :]
        sides = [side for side, _ in copies]
        figures = (
            calls["cuMemAlloc_v2"] + calls["cuMemHostAlloc"],
            calls["cuStreamBeginCapture_v2"],
            calls["cuGraphLaunch"] + calls["captured enqueue"] + calls["run"],
            sides.count("in"),
            sides.count("out"),
            calls["copy_rows"],
            calls["cuStreamSynchronize"],
        )
        return dict(zip(COUNTED, figures, strict=True))


def picture(number: int, size: int = 336) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (size, size, 3), np.uint8))


def options(tokens: int) -> vtx.Options:
    return vtx.Options(max_new_tokens=tokens, ignore_eos=True)


def work(folder: Path, path: str, k: int | None) -> dict[str, dict[str, int]]:
    """What each picture, token and question takes."""
    found: dict[str, dict[str, int]] = {"first picture": {}, "second picture": {}}
    name = k or "none"
    with opened(folder, path) as (model, gpu):
        for number, title in enumerate(("first picture", "second picture")):
            with model.open(picture(number)) as image:
                count = Count(gpu)
                image.ask(QUESTION, name, options(8))
                found[title] = count.now()
                count = Count(gpu)
                image.ask(SECOND, name, options(8))
                found["second question"] = count.now()
                both = []
                for tokens in (8, 9):
                    image.ask(QUESTION, name, options(tokens))
                    count = Count(gpu)
                    image.ask(SECOND, name, options(tokens))
                    both.append(count.now())
        found["further token"] = {name: both[1][name] - both[0][name] for name in COUNTED}
    return found


def next_token(folder: Path, path: str, clients: int) -> list[str]:
    """The work of the next token of each of some clients, once they decode together and runs are recorded."""
    with opened(folder, path) as (model, gpu), ExitStack() as stack:
        images = [stack.enter_context(model.open(picture(number))) for number in range(clients)]
        streams = [image.stream(QUESTION, "none", options(8)) for image in images]
        batching = Batching(model, LANES, LANES)
        assert batching.obstacle is None
        for turn in range(6):
            gpu.calls.clear()
            gpu.moved.clear()
            if turn:
                batching.decode(streams)
            for stream in streams:
                stream.step()
        launches = sum(gpu.calls[name] for name in ("cuGraphLaunch", "enqueue", "run", "run on arrays"))
        sizes = {kind: [n for side, n in gpu.moved if side == kind] for kind in ("in", "out", "within", "weights")}
        read = sum(sizes.pop("weights"))
        graphs = model.manifest.dialects[model.backend.dialect]
        weights = sum(load_graph(folder / name).weights for name in (*graphs.stages, graphs.head))
        figures = [launches, *map(len, sizes.values()), gpu.calls["cuStreamSynchronize"], *map(sum, sizes.values())]
        return [path, str(clients), *map(str, figures), f"{read / weights:.2f} times"]


def memory(folder: Path, path: str, k: int | None) -> tuple[int, int, int]:
    """Bytes of K and V: of a whole context in every layer, of the filled slots, and those that are held."""
    with opened(folder, path) as (model, _), model.open(picture(0)) as image:
        answer = image.ask(QUESTION, k or "none", options(TOKENS))
        assert answer.stats.prompt_tokens == 641, answer.stats.prompt_tokens
        slot = model.backend.kv_slot_bytes
        layers = model.manifest.model.layers
        filled = slot * (sum(answer.stats.kv_slots) + (TOKENS - 1) * layers)
        return slot * layers * model.manifest.max_context, filled, int(slot * held_slots(image))


def frames(folder: Path, path: str, count: int) -> list[str]:
    """An application that opens a conversation for each of `count` frames and asks two questions."""
    process = psutil.Process()
    seen = dict[int, tuple[int, int, int]]()
    with opened(folder, path) as (model, gpu):
        for number in range(1, count + 1):
            with model.open(picture(number, 64)) as image:
                for question in (QUESTION, SECOND):
                    image.ask(question, 3, options(4))
            gpu.copies.clear()
            if number in (1, count // 10, count):
                gc.collect()
                allocated = gpu.calls["cuMemAlloc_v2"] + gpu.calls["cuMemHostAlloc"]
                seen[number] = gpu.used, allocated, process.memory_full_info().uss
    (first, early, last) = seen.values()
    shown = [f"{used / MB:.2f} MB" for used in (first[0], last[0])]
    return [path, str(count), *shown, str(last[1] - first[1]), f"{(last[2] - early[2]) / MB:+.1f} MB"]


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("--work", type=Path, default=Path("build/gpu-work"), help="bundles, 0.3 GB")
    args.add_argument("--frames", type=int, default=1000, help="10 at least")
    args.add_argument("--write", action="store_true", help=f"write {RESULTS}")
    given = args.parse_args()
    cuts = tuple(k for k in KS if k)
    lines = list[str]()

    def show(table: str, columns: list[str], left: int, rows: Iterator[list[str]]) -> None:
        align = [*["---"] * left, *["---:"] * (len(columns) - left)]
        lines.append(json.dumps({"table": table, "columns": columns, "align": align}))
        found = [*rows]
        lines.extend(json.dumps({"table": table, "row": row}) for row in found)
        print(f"{markdown([columns, *found])}\n", flush=True)

    folder = exported(given.work, "narrow", NARROW, cuts)
    show(
        "gpu-work",
        ["path", "K", "", *COUNTED],
        3,
        (
            [path, str(k or "none"), title, *map(str, figures.values())]
            for path in PATHS
            for k in (None, 9)
            for title, figures in work(folder, path, k).items()
        ),
    )
    show(
        "gpu-clients",
        ["path", "clients", *COUNTED[2:], *BYTES],
        1,
        (next_token(folder, path, clients) for path in PATHS for clients in (1, LANES)),
    )
    folder = exported(given.work, "kv-of-7b", SHAPES["kv-of-7b"], cuts)
    show(
        "gpu-kv",
        ["", "4,096 slots in every layer", "filled", "held"],
        1,
        ([f"K = {k or 'none'}", *(f"{each / 1e9:.3f} GB" for each in memory(folder, "TensorRT-RTX", k))] for k in KS),
    )
    folder = exported(given.work, "tiny", None, (2, 3))
    columns = ["path", "frames", "GPU memory after the first", "after the last", "allocations in between"]
    columns.append("process, since a tenth of them")
    show("gpu-frames", columns, 1, (frames(folder, path, given.frames) for path in PATHS))
    if given.write:
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
