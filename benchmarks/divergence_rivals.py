"""How others round a decoder: GGUF's types and llama.cpp's mixes of them, nncf, and PyTorch in bfloat16.

The types with super-blocks (Q4_K, Q5_K, Q6_K) are rounded by ggml's own C, whose file is in the source distribution of
`llama-cpp-python`, from whose folder `ggml` this makes the library that `GGML_QUANTS` names:

    touch include/ggml-version.h
    gcc -O2 -march=native -fPIC -shared -Iinclude -Isrc -Isrc/ggml-cpu -DGGML_VERSION='"0"' -DGGML_COMMIT='"0"' \\
        src/ggml-quants.c src/ggml.c -o ggml-quants.so

The other types are rounded by the package `gguf`, whose results are those of llama.cpp. nncf compresses the model of
transformers as OpenVINO GenAI's converter does by default: int8 with a zero point a row; int4 with one for 128
weights of a row, and table and head in int8.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

SUPER_BLOCK = 256  # weights of Q4_K, Q5_K and Q6_K
NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # of rows that super-blocks do not divide
MIXES = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K"}  # the type of most matrices
LARGER = "Q6_K"  # of the head, and of half of the matrices in `SENSITIVE`
SENSITIVE = re.compile(r"text\.layers\.(\d+)\.(self_attn\.v_proj|mlp\.down_proj)\.weight")
TORCH = {"torch-bf16": 16.0, "nncf-int8": None, "nncf-int4": None}  # bits of a weight
Floats = NDArray[np.float32]


def type_of(form: str, name: str, width: int, layers: int, *, is_head: bool) -> str:
    """GGUF's type of a matrix in a form, which is a type or a mix as `llama-quantize` makes it without measuring."""
    if form not in MIXES:
        return "Q8_0" if is_head else form
    kind = MIXES[form]
    match = SENSITIVE.match(name)
    if is_head or (match and _has_more_bits(int(match[1]), layers)):
        kind = LARGER
    return NARROW[kind] if width % SUPER_BLOCK else kind


def _has_more_bits(layer: int, layers: int) -> bool:
    """`use_more_bits` of llama.cpp: the first and the last eighth, and every third layer between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def rounded(values: Floats, kind: str) -> tuple[Floats, float]:
    """A matrix [out, in] after rounding to a type of GGUF, and the bits of a weight."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quantize

    number = GGMLQuantizationType[kind]
    weights, nbytes = GGML_QUANT_SIZES[number]
    packed = _packed(values, kind, nbytes) if kind in NARROW else quantize(values, number)
    return dequantize(packed, number).astype(np.float32), 8 * nbytes / weights


def _packed(values: Floats, kind: str, nbytes: int) -> NDArray[np.uint8]:
    """Rows of super-blocks, by ggml's own code."""
    library = ctypes.CDLL(os.environ["GGML_QUANTS"], mode=os.RTLD_LAZY)
    function = getattr(library, f"quantize_{kind[0].lower()}{kind[1:]}")
    rows, width = values.shape
    packed = np.empty((rows, width // SUPER_BLOCK * nbytes), np.uint8)
    sizes = ctypes.c_int64(rows), ctypes.c_int64(width)
    contiguous = np.ascontiguousarray(values)
    function(contiguous.ctypes.data_as(ctypes.c_void_p), packed.ctypes.data_as(ctypes.c_void_p), *sizes, None)
    return packed


def computed(checkpoint: Path, form: str, texts: Mapping[str, NDArray[np.int64]]) -> dict[str, Floats]:
    """The logits [n, vocab] of each text by transformers' model in bfloat16, or in float32 after nncf."""
    from transformers import AutoModelForImageTextToText

    kind = torch.bfloat16 if form == "torch-bf16" else torch.float32
    model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=kind).eval()
    inputs = {name: {"input_ids": torch.from_numpy(ids[None, :-1])} for name, ids in texts.items()}
    if form != "torch-bf16":
        import nncf

        modes = nncf.CompressWeightsMode
        settings = {"mode": modes.INT4_ASYM, "group_size": 128, "ratio": 1.0} if form == "nncf-int4" else {}
        example = nncf.Dataset([next(iter(inputs.values()))])
        model = nncf.compress_weights(model, dataset=example, **{"mode": modes.INT8_ASYM, **settings})
    with torch.inference_mode():
        return {name: model(**batch).logits[0].float().numpy() for name, batch in inputs.items()}
