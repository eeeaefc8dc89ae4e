"""VILA 1.5: a decoder, a tower and a projector in folders of their own."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tests.support.families.original import counterpart, hub_name, write_json, write_tokenizer_model, write_tower
from tests.support.tiny import Tiny, make, random_tensor

if TYPE_CHECKING:
    import torch

# 5 x 5 patches: as 27 x 27, one row and column short of squares.
VILA = Tiny(family="vila", vision="siglip", select="full", image=70, context=1024, kv_heads=4)


def make_vila(folder: Path, tiny: Tiny, seed: int) -> Path:
    """The decoder with the tokenizer, the tower and a projector of its own, each in a folder."""
    from safetensors.torch import load_file, save_file

    with TemporaryDirectory() as other:
        theirs = make(Path(other) / "hf", counterpart(tiny), seed)
        weights = load_file(theirs / "model.safetensors")
        config, processor = (
            json.loads((theirs / name).read_text(encoding="utf-8")) for name in ("config.json", "processor_config.json")
        )
    write_tower(folder / "vision_tower", config["vision_config"], processor["image_processor"], weights)
    (folder / "llm").mkdir()
    write_json(folder / "llm" / "config.json", config["text_config"] | {"architectures": ["LlamaForCausalLM"]})
    write_tokenizer_model(folder / "llm" / "tokenizer.model", tiny.vocab)
    write_json(folder / "llm" / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "legacy": False})
    text = {hub_name(name): tensor for name, tensor in weights.items() if "vision" not in name and "modal" not in name}
    save_file(text, folder / "llm" / "model.safetensors", metadata={"format": "pt"})
    write_projector(folder / "mm_projector", tiny.vision_hidden, tiny.hidden, seed)
    write_json(folder / "mm_projector" / "config.json", {"mm_projector_type": "mlp_downsample"})
    top = {"mm_vision_select_layer": tiny.feature_layer, "mm_vision_select_feature": "cls_patch", "s2": False}
    top |= {"architectures": ["LlavaLlamaModel"], "model_type": "llava_llama", "image_aspect_ratio": "resize"}
    write_json(folder / "config.json", top | {f"{part}_cfg": {} for part in ("llm", "vision_tower", "mm_projector")})
    return folder


def write_projector(folder: Path, vision: int, hidden: int, seed: int, dtype: torch.dtype | None = None) -> None:
    """The weights of a projector that joins 2 x 2 patches of `vision` numbers."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    wide = 4 * vision
    shapes = {"1.norm": (wide,), "2.linear": (hidden, wide), "4.linear": (hidden, hidden)}
    projector = {}
    for name, shape in shapes.items():
        for kind, of in (("weight", shape), ("bias", shape[:1])):
            tensor = torch.from_numpy(random_tensor(f"{name}.{kind}", of, seed))
            projector[f"layers.{name[0]}.{kind}"] = tensor.to(dtype or torch.float32)
    save_file(projector, folder / "model.safetensors", metadata={"format": "pt"})
