"""VILA 1.5: a decoder, a tower and a projector in folders of their own."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.families.original import counterpart, hub_name, write_json, write_tokenizer_model, write_tower
from tests.support.tiny import Tiny, make, random_tensor

# 5 x 5 patches: as 27 x 27, one row and column short of squares.
VILA = Tiny(family="vila", vision="siglip", select="full", image=70, context=1024, kv_heads=4)


def make_vila(folder: Path, tiny: Tiny, seed: int) -> Path:
    """The decoder with the tokenizer, the tower and a projector of its own, each in a folder."""
    import torch
    from safetensors.torch import load_file, save_file

    with TemporaryDirectory() as other:
        theirs = make(Path(other) / "hf", counterpart(tiny), seed)
        weights = load_file(theirs / "model.safetensors")
        config, processor = (
            json.loads((theirs / name).read_text(encoding="utf-8")) for name in ("config.json", "processor_config.json")
        )
    write_tower(folder / "vision_tower", config["vision_config"], processor["image_processor"], weights)
    for part in ("llm", "mm_projector"):
        (folder / part).mkdir()
    write_json(folder / "llm" / "config.json", config["text_config"] | {"architectures": ["LlamaForCausalLM"]})
    write_tokenizer_model(folder / "llm" / "tokenizer.model", tiny.vocab)
    write_json(folder / "llm" / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "legacy": False})
    text = {hub_name(name): tensor for name, tensor in weights.items() if "vision" not in name and "modal" not in name}
    save_file(text, folder / "llm" / "model.safetensors", metadata={"format": "pt"})
    wide, hidden = 4 * tiny.vision_hidden, tiny.hidden
    shapes = {"1.norm": (wide,), "2.linear": (hidden, wide), "4.linear": (hidden, hidden)}
    projector = {}
    for name, shape in shapes.items():
        for kind, of in (("weight", shape), ("bias", shape[:1])):
            projector[f"layers.{name[0]}.{kind}"] = torch.from_numpy(random_tensor(f"{name}.{kind}", of, seed))
    save_file(projector, folder / "mm_projector" / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "mm_projector" / "config.json", {"mm_projector_type": "mlp_downsample"})
    top = {"mm_vision_select_layer": tiny.feature_layer, "mm_vision_select_feature": "cls_patch", "s2": False}
    top |= {"architectures": ["LlavaLlamaModel"], "model_type": "llava_llama", "image_aspect_ratio": "resize"}
    write_json(folder / "config.json", top | {f"{part}_cfg": {} for part in ("llm", "vision_tower", "mm_projector")})
    return folder
