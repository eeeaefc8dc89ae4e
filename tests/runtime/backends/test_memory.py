"""What an answer takes in memory: caches that are resident where they are filled, and a forecast beside the weights."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support import bundles
from tests.support.exported import THREADS
from tests.support.families.gemma import GEMMA4
from tests.support.families.lfm3_vl import LFM3
from tests.support.families.paligemma import PALIGEMMA2
from tests.support.families.qwen import QWEN25
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api.answer import Answer
from vtx.runtime.api.load import load
from vtx.runtime.api.options import Options
from vtx.runtime.backends.allocation import zeros_in_small_pages
from vtx.runtime.backends.engines import ENGINES, EXPANDED, INTEGERS, KEPT, NARROWED, floats_in_memory
from vtx.runtime.backends.memory import (
    RUN_BASE,
    answering_memory,
    needed_memory,
    prompt_tokens,
    tokenizer_memory,
    weights_in_memory,
)
from vtx.runtime.errors import DeviceError

MB = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_cache_filled_in_part_is_resident_in_part() -> None:
    before = resident()
    cache = zeros_in_small_pages((4, 2, 1, 16, 4096, 64), np.dtype(np.float16))
    cache[..., :64, :] = 1
    filled = cache.nbytes * 64 // 4096
    assert cache.nbytes == 64 * MB
    assert resident() - before < filled + 4 * MB
    assert cache[..., :64, :].all()
    assert not cache[..., 64:, :].any()


@pytest.mark.sampled
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("device", ["cpu", "openvino"])
@pytest.mark.parametrize("k", [None, 2])
def test_conversations_take_the_memory_that_they_report(
    device: str, k: int | None, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """And not that of the context, 50 MB each: a head has 16 slots in a page."""
    shape = Tiny(layers=3, hidden=256, heads=4, kv_heads=4, head_dim=64, context=8192)
    folder = bundles.export(tiny_checkpoint(shape), tmp_path / "bundle", (2,), "fp32").folder
    with load(folder, device=device, threads=THREADS) as model:
        kept = [model.open(random_image(0))]
        kept[0].ask("red?", k, Options(4))
        before = resident()
        for number in range(1, 13):
            kept.append(model.open(random_image(number)))
            kept[-1].ask("red?", k, Options(4))
        grown, reported = resident() - before, sum(each.cache_bytes for each in kept[1:])
    assert reported < 12 * 2 * MB
    assert grown < 2 * reported + 8 * MB


PARSING = """
import json, os
from tokenizers import Tokenizer

def resident():
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

letters = [chr(0x4E00 + n) for n in range(316)]
pairs = [(a, b) for a in letters for b in letters]
words = letters + [a + b for a, b in pairs]
model = {"type": "BPE", "vocab": {word: n for n, word in enumerate(words)}, "merges": pairs}
text = json.dumps({"version": "1.0", "added_tokens": [], "model": model}, ensure_ascii=False)
before = resident()
tokenizer = Tokenizer.from_str(text)
print(len(text.encode()), resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_tokenizer_takes_about_the_memory_that_is_predicted() -> None:
    done = subprocess.run([sys.executable, "-c", PARSING], capture_output=True, text=True, check=True)
    nbytes, taken = map(int, done.stdout.split())
    assert 0.7 * taken < tokenizer_memory(nbytes, 100_000) < 4 * taken


@pytest.mark.parametrize("shape", [(2, 3), (1,), (0, 4)])
def test_zeros_in_small_pages_are_plain_writable_arrays(shape: tuple[int, ...]) -> None:
    array = zeros_in_small_pages(shape, np.dtype(np.float32))
    assert (array.shape, array.dtype) == (shape, np.float32)
    array += 2
    assert array.sum() == 2 * math.prod(shape)


@pytest.mark.skipif(sys.platform != "linux", reason="the address space is Linux's")
def test_a_cache_beyond_the_address_space_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="no memory"):
        zeros_in_small_pages((1 << 50,), np.dtype(np.float32))


def test_the_forecast_is_the_weights_and_what_an_answer_takes(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    made = bundles.export(tiny_checkpoint(), tmp_path / "bundle")
    assert needed_memory(made) > weights_in_memory(made) > 0


def test_narrow_weights_count_half_where_nothing_expands_them(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    fp16 = bundles.export(tiny_checkpoint(), tmp_path / "fp16", precision="fp16")
    fp32 = bundles.export(tiny_checkpoint(), tmp_path / "fp32", precision="fp32")
    assert weights_in_memory(fp16, NARROWED) < weights_in_memory(fp16, KEPT) < weights_in_memory(fp16, EXPANDED)
    assert weights_in_memory(fp16, NARROWED) == weights_in_memory(fp16, EXPANDED) // 2
    assert weights_in_memory(fp32, KEPT) == weights_in_memory(fp32, EXPANDED) == 2 * weights_in_memory(fp32, NARROWED)


def test_a_processor_with_amx_widens_16_bits_unless_it_computes_in_them() -> None:
    amx, other = frozenset({"amx_bf16"}), frozenset({"avx512_bf16"})
    for kind, floats in ENGINES["openvino"].compute.items():
        assert floats_in_memory("openvino", kind, other) == floats
        assert floats_in_memory("openvino", kind, amx) == (floats if kind == "bf16" else {**floats, **EXPANDED})
    assert floats_in_memory("cpu", "f32", amx) == EXPANDED


def test_int4_of_layers_takes_a_byte_a_weight_more_where_products_are_of_integers(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    made = bundles.export(tiny_checkpoint(), tmp_path / "int4", precision="int4")
    int8 = bundles.export(tiny_checkpoint(), tmp_path / "int8", precision="int8")
    matrices = sum(
        2 * math.prod(info.shape)
        for name in made.manifest.files
        if name.startswith("weights/")
        for info in made.header(name).tensors.values()
        if info.dtype == "U8" and ".layers." in info.name
    )
    assert matrices > 0
    assert weights_in_memory(made, INTEGERS) == weights_in_memory(made, KEPT) + matrices
    assert weights_in_memory(int8, INTEGERS) == weights_in_memory(int8, KEPT)


def test_an_answer_of_the_7b_shape_takes_half_a_megabyte_a_slot_beside_a_gigabyte_at_most() -> None:
    plain = dict.fromkeys(("sliding", "shared", "two_way"))
    shape: Any = SimpleNamespace(attending=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, **plain)
    prompt = prompt_tokens(576, 4096)
    wide, narrow = (answering_memory(shape, "cpu", tokens=prompt, kv_bytes=size) for size in (4, 2))
    assert wide - narrow == (576 + 256) * 512 * 1024
    assert narrow < 1024 * MB


LONG = {"hidden": 256, "heads": 16, "kv_heads": 4, "head_dim": 64, "context": 4096}
WORDS = {Tiny(layers=2, **LONG): 900, replace(LFM3, **LONG): 3800, replace(PALIGEMMA2, **LONG): 900}


def peak_of(call: Callable[[], object]) -> int:
    """The most memory that this process has while it calls, in bytes beyond what it had."""
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")
    call()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) - before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("tiny", "device"), [*product(WORDS, ("cpu", "openvino"))])
def test_a_long_prompt_takes_about_the_memory_that_is_predicted(
    tiny: Tiny, device: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    made = bundles.export(tiny_checkpoint(tiny), tmp_path / "bundle", (2,), "fp32", max_context=4096)
    with load(made.folder, device=device, threads=THREADS) as model:
        model.ask("red?", options=Options(1))
        answers = list[Answer]()
        taken = peak_of(lambda: answers.append(model.ask("red " * WORDS[tiny], options=Options(1))))
    tokens = answers[0].stats.prompt_tokens
    predicted = answering_memory(made.manifest.model, device, tokens=tokens, kv_bytes=4) - RUN_BASE
    assert tokens > 3000
    assert 0.4 * predicted < taken < 1.3 * predicted


@pytest.mark.parametrize("tiny", [replace(QWEN25, context=2048), replace(GEMMA4, budget=280, context=1024)])
def test_a_bundle_whose_largest_image_does_not_fit_names_a_size_that_does(
    tiny: Tiny, tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bundles.export(tiny_checkpoint(tiny), tmp_path / "bundle", (3,), "int4")
    needed = needed_memory(made, "openvino")
    text = needed_memory(made, "openvino", image_tokens=0)
    monkeypatch.setattr("vtx.runtime.api.load.available_memory", lambda: (needed + text) // 2)
    with pytest.raises(DeviceError, match=r"or load it with --max-pixels (\d+) \(max_pixels=\1\) \(--force") as refused:
        load(made.folder, device="openvino", threads=THREADS)
    pixels = re.search(r"max_pixels=(\d+)", str(refused.value))
    assert pixels is not None
    with load(made.folder, device="openvino", threads=THREADS, max_pixels=int(pixels[1])) as model:
        assert model.ask("red?", options=Options(1)).token_ids
    monkeypatch.setattr("vtx.runtime.api.load.available_memory", lambda: text)
    with pytest.raises(DeviceError, match=r"or export with a smaller --max-context \(--force"):
        load(made.folder, device="openvino", threads=THREADS)
    monkeypatch.setattr("vtx.runtime.api.load.available_memory", lambda: text - 1)
    with pytest.raises(DeviceError, match=r"is free; use a machine with more \(--force"):
        load(made.folder, device="openvino", threads=THREADS)
