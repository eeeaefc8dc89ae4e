"""Reading a checkpoint's safetensors with numpy alone, under the hub's LLaVA names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEXT = "language_model."
TOWER = "vision_tower.vision_model."
PROJECTOR = "multi_modal_projector."
TYPES = {"F32": "<f4", "F16": "<f2"}


def read(checkpoint: Path) -> Iterator[tuple[str, Any]]:
    """Each tensor's name and its values, mapped, in the order of the files."""
    import numpy as np

    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in TYPES:
                raise ValueError(f"{name} is {entry['dtype']}; this reader knows {', '.join(TYPES)}")
            dtype = np.dtype(TYPES[entry["dtype"]])
            start = 8 + size + entry["data_offsets"][0]
            values = np.memmap(path, dtype, "r", start, tuple(entry["shape"]))
            yield name.removeprefix("model."), values


def config(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return found


def write_text_model(checkpoint: Path, folder: Path) -> None:
    """The decoder alone, as a llama checkpoint of its own."""
    import shutil

    text = config(checkpoint)["text_config"]
    if text["model_type"] != "llama":
        raise ValueError(f"the decoder is {text['model_type']}; only llama is written out")
    folder.mkdir()
    facts = {
        **text,
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float16",
        "rms_norm_eps": text.get("rms_norm_eps", 1e-6),
    }
    (folder / "config.json").write_text(json.dumps(facts, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(checkpoint / name, folder)
    tensors = [(name.removeprefix(TEXT), values) for name, values in read(checkpoint) if name.startswith(TEXT)]
    header = {}
    at = 0
    for name, values in tensors:
        dtype = next(key for key, code in TYPES.items() if code == values.dtype.str)
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": (at, at + values.nbytes)}
        at += values.nbytes
    text_header = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(text_header).to_bytes(8, "little") + text_header)
        for _, values in tensors:
            values.tofile(out)
