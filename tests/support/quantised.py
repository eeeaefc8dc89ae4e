"""Quantised checkpoints made from a tiny one by the formats' public definitions, each beside what it stands for.

Nothing here is the product's: words are packed number by number with shifts, and values are plain products.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support.json_files import read_json, write_json
from tests.support.store import new_folder, publish

FILE = "model.safetensors"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the row that each 4 bits of a word hold, from the lowest on
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = tuple(sign * size / 12 for sign in (1, -1) for size in (0, 0.0625, 8, 12, 4, 6, 2, 3))

Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]  # the tensors of a module by the end of their names, and the weight in float32


@dataclass(frozen=True)
class Quantised:
    """A way of quantising: the settings, and a function from a weight [out, in] and a generator to its parts."""

    settings: Mapping[str, Any]
    pack: Callable[[torch.Tensor], Packed]
    exact: bool = True  # the bundle holds the integers and scales
    file: str | None = None  # that holds the settings, if it is not config.json
    more: Mapping[str, Any] = field(default_factory=dict)


def matrices(name: str) -> bool:
    """The decoder's matrices, which formats quantise by default."""
    return "layers" in name and name.endswith("proj.weight") and "vision" not in name


def make_quantised(
    source: Path, folder: Path, how: Quantised, chosen: Callable[[str], bool] = matrices
) -> tuple[Path, Path]:
    """The quantised copy of a checkpoint, and one with the weights that it stands for, in float32."""
    weights = load_file(source / FILE)
    packed, plain = Tensors(), Tensors()
    for name, weight in weights.items():
        if not chosen(name):
            packed[name] = weight
            plain[name] = weight.float()
            continue
        parts, value = how.pack(weight.float())
        stem = name.removesuffix(".weight")
        packed |= {f"{stem}.{end}": part.contiguous() for end, part in parts.items()}
        plain[name] = value.contiguous()
    for kind, tensors in (("quantised", packed), ("plain", plain)):
        shutil.copytree(source, folder / kind)
        save_file(tensors, folder / kind / FILE, {"format": "pt"})
    settings = read_json(source / "config.json")
    if how.file is None:
        settings["quantization_config"] = how.settings
        write_json(folder / "quantised/config.json", settings)
    else:
        write_json(folder / "quantised" / how.file, how.settings)
    return folder / "quantised", folder / "plain"


def quantised_pair(source: Path, folder: Path, name: str) -> tuple[Path, Path]:
    """Copies of what `make_quantised` makes by `SCHEMES[name]` of a shared checkpoint, once for all tests of a run."""
    store = source.parents[1]
    made = store / "quantised" / f"{source.name}-{name}"
    if not made.exists():
        made.parent.mkdir(exist_ok=True)
        place = new_folder(store)
        make_quantised(source, place, SCHEMES[name])
        publish(place, made)
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder / "quantised", folder / "plain"


def words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unsigned integers [rows, n] in 32-bit words [rows, ceil(n * bits / 32)], one after another or in an order."""
    each = 32 // bits
    rows, count = codes.shape
    out = np.zeros((rows, -(-count // each)), np.uint32)
    for column in range(out.shape[1]):
        for place in range(each):
            number = column * each + (place if order is None else order[place])
            if number < count:
                out[:, column] |= codes[:, number].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(out.view(np.int32))


def integers(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool, dtype: torch.dtype = torch.float16
) -> tuple[np.ndarray, torch.Tensor, np.ndarray, torch.Tensor]:
    """Codes [out, in] from 0 on, scales and zero points [out, groups], and the weights that they stand for.

    The last group may be smaller: zeros that fill it change no scale.
    """
    rows, width = weight.shape
    blocks = torch.nn.functional.pad(weight, (0, -width % group)).reshape(rows, -1, group)
    most = 2**bits - 1
    if symmetric:
        scales = (blocks.abs().amax(2) / (most // 2)).to(dtype)
        zeros = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.float32)
    else:
        low, high = blocks.amin(2).clamp(max=0), blocks.amax(2).clamp(min=0)
        scales = ((high - low) / most).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, most)
    codes = (blocks / scales.float()[..., None] + zeros[..., None]).round().clamp(0, most)
    value = ((codes - zeros[..., None]) * scales.float()[..., None]).reshape(rows, -1)[:, :width]
    codes = codes.reshape(rows, -1)[:, :width]
    return codes.numpy().astype(np.uint8), scales, zeros.numpy().astype(np.uint8), value


def awq(group: int) -> Quantised:
    def pack(weight: torch.Tensor) -> Packed:
        codes, scales, zeros, value = integers(weight, 4, group, symmetric=False)
        parts = {"qweight": words(codes.T, 4, AWQ_ORDER), "qzeros": words(zeros.T, 4, AWQ_ORDER), "scales": scales.T}
        return parts, value

    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Quantised({**settings, "modules_to_not_convert": ["visual"]}, pack)


def gptq(bits: int, group: int, *, symmetric: bool, version: int, order: bool = False) -> Quantised:
    def pack(weight: torch.Tensor) -> Packed:
        width, size = weight.shape[1], weight.shape[1] if group == -1 else group
        g_idx = torch.arange(width) // size
        if order:  # inputs are taken in an order of their own, neighbours of which share a group
            taken = torch.randperm(width, generator=torch.Generator().manual_seed(width))
            weight = weight[:, taken]
        codes, scales, zeros, value = integers(weight, bits, size, symmetric=symmetric)
        if order:
            back = taken.argsort()
            codes, value, g_idx = codes[:, back.numpy()], value[:, back], g_idx[back]
        stored = words(zeros.T, bits)
        if version == 1:  # a one less in each, borrowed across the word where one is 0
            ones = np.uint32(sum(1 << bits * place for place in range(32 // bits)))
            stored = torch.from_numpy((stored.numpy().view(np.uint32) - ones).view(np.int32))
        parts = {"qweight": words(codes, bits).T, "qzeros": stored, "scales": scales.T, "g_idx": g_idx.int()}
        return parts, value

    settings = {"bits": bits, "group_size": group, "sym": symmetric, "desc_act": order, "quant_method": "gptq"}
    return Quantised({**settings, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}, pack, not order)


def compressed_packed(bits: int, group: int | None, *, symmetric: bool) -> Quantised:
    def pack(weight: torch.Tensor) -> Packed:
        size = group or weight.shape[1]
        codes, scales, zeros, value = integers(weight, bits, size, symmetric=symmetric, dtype=torch.bfloat16)
        parts = {"weight_packed": words(codes, bits), "weight_scale": scales}
        parts["weight_shape"] = torch.tensor(weight.shape)
        if not symmetric:
            parts["weight_zero_point"] = words(zeros.T, bits).T
        return parts, value

    strategy = "channel" if group is None else "group"
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group}
    return Quantised(_compressed("pack-quantized", weights), pack)


def _compressed(form: str, weights: Mapping[str, Any], activations: object = None) -> Mapping[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*vision.*", "re:.*projector.*"],
        "kv_cache_scheme": None,
    }  # fmt: skip


def compressed_int8() -> Quantised:
    def pack(weight: torch.Tensor) -> Packed:
        codes, scales, _, value = integers(weight, 8, weight.shape[1], symmetric=True, dtype=torch.bfloat16)
        signed = torch.from_numpy(codes.astype(np.int16) - 128).to(torch.int8)
        return {"weight": signed, "weight_scale": scales}, value

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    rounded = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return Quantised(_compressed("int-quantized", weights, rounded), pack)


def fp8_blocks(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 weights, a scale for each block of so many rows and columns, and the products."""
    scales = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    codes, value = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.zeros(weight.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[part].abs().max() / 448
            codes[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            value[part] = codes[part].float() * scales[i, j]
    return codes, scales, value


def compressed_fp8(strategy: str) -> Quantised:
    def pack(weight: torch.Tensor) -> Packed:
        sizes = {"tensor": tuple(weight.shape), "channel": (1, weight.shape[1]), "block": (64, 32)}[strategy]
        codes, scales, value = fp8_blocks(weight, *sizes)
        return {"weight": codes, "weight_scale": scales.reshape(1) if strategy == "tensor" else scales}, value

    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    weights |= {"block_structure": [64, 32]} if strategy == "block" else {}
    rounded = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    return Quantised(_compressed("float-quantized", weights, rounded), pack, exact=False)


def fp8(block: tuple[int, int] = (128, 128)) -> Quantised:
    def pack(weight: torch.Tensor) -> Packed:
        codes, scales, value = fp8_blocks(weight, *block)
        return {"weight": codes, "weight_scale_inv": scales}, value

    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return Quantised(settings, pack, exact=False)


def bitsandbytes(kind: str, *, nested: bool) -> Quantised:
    table = torch.tensor(NF4 if kind == "nf4" else FP4)

    def pack(weight: torch.Tensor) -> Packed:
        flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64))
        largest = flat.reshape(-1, 64).abs().amax(1)
        facts: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float16", "shape": list(weight.shape)}
        parts = {"weight.quant_map": table.clone()}
        if nested:
            offset = float(largest.mean())
            steps = torch.linspace(-1, 1, 256)
            outer = torch.stack([(part - offset).abs().max() for part in largest.split(256)])
            inner = (largest - offset) / outer.repeat_interleave(256)[: len(largest)]
            entries = (inner[:, None] - steps).abs().argmin(1)
            largest = steps[entries] * outer.repeat_interleave(256)[: len(largest)] + offset
            facts |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            parts |= {"weight.absmax": entries.to(torch.uint8), "weight.nested_absmax": outer}
            parts["weight.nested_quant_map"] = steps
        else:
            parts["weight.absmax"] = largest
        scales = largest.repeat_interleave(64)[: weight.numel()]
        codes = ((weight.flatten() / scales)[:, None] - table).abs().argmin(1)
        value = (table[codes] * scales).reshape(weight.shape)
        parts["weight"] = (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
        state = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
        return {**parts, f"weight.quant_state.bitsandbytes__{kind}": state}, value

    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Quantised({**settings, "bnb_4bit_use_double_quant": nested}, pack, exact=False)


SCHEMES: Mapping[str, Quantised] = {
    "awq-128": awq(128), "awq-32": awq(32), "gptq-v1": gptq(4, 128, symmetric=True, version=1),
    "gptq-v1-zeros": gptq(4, 32, symmetric=False, version=1), "gptq-v2-zeros": gptq(4, 128, symmetric=False, version=2),
    "gptq-rows": gptq(4, -1, symmetric=True, version=1), "gptq-int8": gptq(8, 128, symmetric=True, version=1),
    "gptq-int8-zeros": gptq(8, 32, symmetric=False, version=2),
    "gptq-order": gptq(4, 32, symmetric=False, version=1, order=True),
    "packed-int4": compressed_packed(4, 128, symmetric=True),
    "packed-int4-zeros": compressed_packed(4, 32, symmetric=False),
    "packed-int8": compressed_packed(8, None, symmetric=True),
    "packed-int8-zeros": compressed_packed(8, 64, symmetric=False),
    "int8": compressed_int8(), "fp8-tensor": compressed_fp8("tensor"), "fp8-channel": compressed_fp8("channel"),
    "fp8-block": compressed_fp8("block"), "fp8-inverse": fp8(), "nf4": bitsandbytes("nf4", nested=False),
    "nf4-nested": bitsandbytes("nf4", nested=True), "fp4": bitsandbytes("fp4", nested=False),
}  # fmt: skip
