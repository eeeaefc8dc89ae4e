"""A small checkpoint from a folder of published files: shrunk configuration, real tokenizer, random weights."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.families import gemma, pixtral, qwen
from tests.support.published import originals
from tests.support.published.places import published, read
from tests.support.published.sizes import TEXTS, part, shrunk
from tests.support.published.tokenizers import missing, write_tokenizer
from tests.support.quantised import Quantised, awq, matrices
from tests.support.tiny import Tiny, hub_name, random_tensor, write_json

if TYPE_CHECKING:
    import torch

# Files that a folder lacks, from the one of a sibling with the same processor and template.
_PROCESSOR = ("preprocessor_config.json", "processor_config.json", "chat_template.json")
SIBLINGS = {
    "llava-next-video-7b": ("llava-v1.6-mistral-7b-hf", _PROCESSOR),
    "video-llava-7b": ("llava-1.5-7b-hf", _PROCESSOR),
    "paligemma2-3b": ("paligemma-mix-224", ("preprocessor_config.json", "tokenizer_config.json")),
}
_SIDE = {"height": 224, "width": 224}
CHANGED = {  # what those say of the sibling alone
    "llava-next-video-7b": {"processor_class": "LlavaNextVideoProcessor"},
    "video-llava-7b": {
        "processor_class": "VideoLlavaProcessor", "image_processor_type": "VideoLlavaImageProcessor",
        "size": {"shortest_edge": 224}, "crop_size": _SIDE,
    },
}  # fmt: skip
IMAGES = r"\{% for content in .{1,80}'image'\) %\}\{\{ '<image>\s' \}\}\{% endfor %\}"
SHARDS = 2
Weights = dict[str, "torch.Tensor"]


def reason_absent(model: Path) -> str | None:
    """Why no checkpoint can be made of this folder here, or None."""
    if (model / "tokenizer.json").exists() or (model / "tokenizer.model").exists():
        return None
    config = read(model / "config.json")
    return missing(_kind(config), _text_of(config))


def _text_of(config: dict[str, Any]) -> str:
    """The text model's model_type; original LLaVA's is that of the whole."""
    return "llama" if originals.layout_of(config) == "llava_llama" else str(part(config, TEXTS)["model_type"])


def _kind(config: dict[str, Any]) -> str:
    """What decides on the tokenizer: the authors' layout, the model_type, or the tower for Pixtral."""
    if config.get("vision_config", {}).get("model_type") == "pixtral":
        return "pixtral"
    return originals.layout_of(config) or str(config["model_type"])


def build(model: Path, folder: Path, seed: int = 0, *, plain: bool = False) -> Path:
    """Write the small checkpoint into `folder`, which must not exist, under the published names, and return it.

    `plain`: weights of a quantised one as float32 numbers, which transformers reads without a further package.
    """
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("SOURCE", "*.safetensors", "*.bin", "*.index.json"))
    sibling, names = SIBLINGS.get(model.name, ("", ()))
    for name in names:
        settings = read(published() / "models" / sibling / name)
        changed = CHANGED.get(model.name, {})
        settings |= {key: value for key, value in changed.items() if key in settings}
        if "chat_template" in settings and changed:  # of families with videos
            settings["chat_template"] = re.sub(IMAGES, lambda found: found[0] + found[0].replace("image", "video"),
                                               settings["chat_template"])  # fmt: skip
        write_json(folder / name, settings)
    if model.name == "pixtral-12b":  # of which there is the configuration alone
        write_json(folder / "preprocessor_config.json", pixtral.image_settings(pixtral.PUBLISHED))
        write_json(folder / "processor_config.json", pixtral.processor_settings(pixtral.PUBLISHED))
        (folder / "chat_template.jinja").write_text(pixtral.TEMPLATE, encoding="utf-8")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    config = shrunk(read(model / "config.json"))
    quantised = config.get("quantization_config")
    if plain:
        del config["quantization_config"]
    write_json(folder / "config.json", config)
    layout, text = originals.layout_of(config), part(config, TEXTS)
    words = folder / "llm" if layout == "vila" else folder
    words.mkdir(exist_ok=True)
    write_tokenizer(words, _kind(config), _text_of(config), text.get("vocab_size", 32064))
    if layout == "openvla":
        write_shards(folder, originals.openvla_weights(config, seed))
        return folder
    weights = random_weights(originals.counterpart(config) if layout else config, dtype_of(config), seed)
    if layout == "vila":
        originals.write_vila(folder, config, weights, seed)
        return folder
    if layout == "llava_llama":
        originals.write_llava(folder, config, weights)
    tensors = originals.renamed(config, weights) if layout else _renamed(config, weights)
    if quantised:
        tensors = _packed(tensors, awq(quantised["group_size"]), plain=plain)
    write_shards(folder, tensors)
    return folder


def _packed(tensors: Weights, how: Quantised, *, plain: bool) -> Weights:
    """The decoder's matrices quantised, or in `plain` what the integers stand for."""
    packed = Weights()
    for name, weight in tensors.items():
        if not matrices(name):
            packed[name] = weight
            continue
        parts, value = how.pack(weight.float())
        stem = name.removesuffix("weight")
        packed |= (
            {name: value.contiguous()} if plain else {stem + end: part.contiguous() for end, part in parts.items()}
        )
    return packed


def dtype_of(config: dict[str, Any]) -> str:
    """The number format of a checkpoint's weights; bfloat16 where nothing says so."""
    text = part(config, TEXTS)
    return next((c[key] for c in (config, text) for key in ("torch_dtype", "dtype") if c.get(key)), "bfloat16")


def random_weights(config: dict[str, Any], dtype: str, seed: int) -> Weights:
    """Every tensor under transformers 5's name; a head that is tied is left out."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    settings = AutoConfig.for_model(**{key: value for key, value in config.items() if key != "quantization_config"})
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(settings)
        model.tie_weights()
    state = model.state_dict()
    head = state.get("lm_head.weight")
    # InternVL's class ties what its published files do not.
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    tied = tied and config["model_type"] != "internvl"
    draw = {"gemma3": gemma.tensor3, "gemma4": gemma.tensor}.get(config["model_type"], random_tensor)
    weights = dict[str, torch.Tensor]()
    for name, tensor in state.items():
        if tied and head is not None and name == "lm_head.weight":
            continue
        values = draw(name, tuple(tensor.shape), seed)
        if _adds_one(name, part(config, TEXTS)["model_type"]):
            values = values - 1
        if config["model_type"] == "gemma4" and name.endswith(("q_norm.weight", "k_norm.weight")):
            values = values * np.float32(0.5)  # heads are published ones, and attention has no other scale
        weights[name] = torch.from_numpy(values).to(getattr(torch, dtype)).contiguous()
    return weights


def _adds_one(name: str, text: str) -> bool:
    """Whether a norm multiplies by 1 more than its weight."""
    of_text = name.endswith("norm.weight") and not re.search("vis|linear_attn|merger", name)
    return of_text and text in ("gemma", "gemma2", "qwen3_5_text")


def _renamed(config: dict[str, Any], weights: Weights) -> Weights:
    """The tensors by their published names."""
    kind = config["model_type"]
    if kind in ("qwen2_vl", "qwen2_5_vl"):
        return {qwen.hub_name(name): tensor for name, tensor in weights.items()}
    tiny = Tiny(family=kind, names="saved" if _kind(config) in ("internvl", "pixtral") else "hub")
    return {hub_name(name, tiny): tensor for name, tensor in weights.items()}


def write_shards(folder: Path, tensors: Weights) -> None:
    """Two files of weights and their index."""
    from safetensors.torch import save_file

    names, placed = list(tensors), dict[str, str]()
    for number in range(SHARDS):
        shard = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        mine = names[number * len(names) // SHARDS : (number + 1) * len(names) // SHARDS]
        save_file({name: tensors[name] for name in mine}, folder / shard, metadata={"format": "pt"})
        placed |= dict.fromkeys(mine, shard)
    size = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": placed})
