"""VILA 1.5: a decoder, a tower and a projector in folders of their own."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.support.families.original import QUESTION, VICUNA, counterpart, hub_name, write_tokenizer_model, write_tower
from tests.support.json_files import read_json, write_json
from tests.support.tiny import Tiny, make, random_tensor

# 5 x 5 patches: as 27 x 27, one row and column short of squares.
VILA = Tiny(family="vila", vision="siglip", select="full", image=70, context=1024, kv_heads=4)


def make_vila(folder: Path, tiny: Tiny, seed: int) -> Path:
    """The decoder with the tokenizer, the tower and a projector of its own, each in a folder."""
    with TemporaryDirectory() as other:
        theirs = make(Path(other) / "hf", counterpart(tiny), seed)
        weights = load_file(theirs / "model.safetensors")
        config, processor = (read_json(theirs / name) for name in ("config.json", "processor_config.json"))
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
    folder.mkdir()
    wide = 4 * vision
    shapes = {"1.norm": (wide,), "2.linear": (hidden, wide), "4.linear": (hidden, hidden)}
    projector = {}
    for name, shape in shapes.items():
        for kind, of in (("weight", shape), ("bias", shape[:1])):
            tensor = torch.from_numpy(random_tensor(f"{name}.{kind}", of, seed))
            projector[f"layers.{name[0]}.{kind}"] = tensor.to(dtype or torch.float32)
    save_file(projector, folder / "model.safetensors", metadata={"format": "pt"})


def projected(folder: Path, states: torch.Tensor) -> torch.Tensor:
    """The released code's projector, token by token: [patches, width] to [tokens, hidden], column after column."""
    weights = {name: x.float() for name, x in load_file(folder / "mm_projector" / "model.safetensors").items()}
    side, tokens = round(len(states) ** 0.5), []
    nothing = torch.zeros(states.shape[1])
    for column in range(0, side, 2):
        for row in range(0, side, 2):
            square = [(row, column), (row, column + 1), (row + 1, column), (row + 1, column + 1)]
            tokens.append(torch.cat([states[y * side + x] if max(y, x) < side else nothing for y, x in square]))
    norm = weights["layers.1.weight"], weights["layers.1.bias"]
    hidden = F.layer_norm(torch.stack(tokens), (4 * states.shape[1],), *norm)
    hidden = F.gelu(F.linear(hidden, weights["layers.2.weight"], weights["layers.2.bias"]))
    return F.linear(hidden, weights["layers.4.weight"], weights["layers.4.bias"])


@torch.inference_mode()
def stated(
    model: Any, images: Any, folder: Path, pictures: list[Image.Image], question: str = QUESTION
) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """The prompt's ids, with 0 for image tokens, its hidden states, and which of them are image tokens.

    `model` is transformers' LLaVA of the same tower and decoder, `images` its image processor.
    """
    import sentencepiece

    cut = sentencepiece.SentencePieceProcessor(model_file=str(folder / "llm" / "tokenizer.model"))
    states = []
    if pictures:
        pixels = images(pictures, return_tensors="pt")["pixel_values"]
        states = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states[-2]
    pieces = VICUNA.format("<image>\n" * len(pictures), question).split("<image>")
    embed, ids, rows = model.model.language_model.embed_tokens, [1], []
    rows.append(embed(torch.tensor([1])))
    for number, piece in enumerate(pieces):
        if number:
            rows.append(projected(folder, states[number - 1]))
            ids += [0] * len(rows[-1])
        ids += cut.encode(piece)
        rows.append(embed(torch.tensor(cut.encode(piece))))
    return ids, torch.cat(rows)[None], torch.tensor(ids) == 0
