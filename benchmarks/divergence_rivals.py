"""How others round a decoder: GGUF's types and llama.cpp's mixes of them, nncf, and PyTorch in bfloat16.

The types with super-blocks (Q4_K, Q5_K, Q6_K) are rounded by ggml's own C, whose file is in the source distribution of
`llama-cpp-python`, from whose folder `ggml` this makes the library that `GGML_QUANTS` names:

    touch include/ggml-version.h
    gcc -O2 -march=native -fPIC -shared -Iinclude -Isrc -Isrc/ggml-cpu -DGGML_VERSION='"0"' -DGGML_COMMIT='"0"' \\
        src/ggml-quants.c src/ggml.c -o ggml-quants.so

The other types are rounded by the package `gguf`, whose results are those of llama.cpp. nncf rounds as OpenVINO GenAI's
converter has it do by default: int8 with a zero point a row; int4 with one for 128 weights of a row, and the head in
int8.
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
BF16 = "torch-bf16"
NNCF_BLOCKS = {"nncf-int8": -1, "nncf-int4": 128}  # weights of a row that share a scale and a zero point; -1: all
SCALE_BITS = 16
Floats = NDArray[np.float32]


def type_of(form: str, name: str, width: int, layers: int, *, is_head: bool) -> str:
    """GGUF's type of a matrix in a form, which is a type or a mix as `llama-quantize` makes it without measuring."""
    kind = MIXES.get(form, form)
    match = SENSITIVE.match(name)
    if is_head and form != "Q8_0":
        kind = LARGER
    if form in MIXES and match and _has_more_bits(int(match[1]), layers):
        kind = LARGER
    return NARROW.get(kind, kind) if width % SUPER_BLOCK else kind


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


def rounded_by_nncf(values: Floats, form: str) -> tuple[Floats, float]:
    """A matrix [out, in] after rounding by nncf, and the bits of a weight."""
    from nncf import CompressWeightsMode
    from nncf.quantization.algorithms.weight_compression.config import WeightCompressionConfig
    from nncf.quantization.algorithms.weight_compression.weight_lowering import integer_quantize_dequantize_weight
    from nncf.tensor import Tensor

    mode = CompressWeightsMode.INT4_ASYM if form == "nncf-int4" else CompressWeightsMode.INT8_ASYM
    config = WeightCompressionConfig(mode, NNCF_BLOCKS[form])
    restored = integer_quantize_dequantize_weight(Tensor(values), config, reduction_axes=(1,))
    block = values.shape[1] if config.group_size < 0 else config.group_size
    own = np.array(restored.data)  # a copy: OpenVINO writes the next matrix of this shape into the same memory
    return own.reshape(values.shape), config.num_bits + (SCALE_BITS + config.num_bits) / block


def in_bf16(checkpoint: Path, texts: Mapping[str, NDArray[np.int64]]) -> dict[str, Floats]:
    """The logits [n, vocab] of each text by transformers' model in bfloat16."""
    from transformers import AutoModelForImageTextToText

    model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        batches = {name: torch.from_numpy(ids[None, :-1]) for name, ids in texts.items()}
        return {name: model(input_ids=ids).logits[0].float().numpy() for name, ids in batches.items()}
