"""Small random checkpoints in original LLaVA's layout: the same weights as a tiny one in Hugging Face's, renamed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.families import lisa
from tests.support.json_files import read_json, write_json
from tests.support.tiny import Tiny, make

TOWER = "clip-tower"
PIECES = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *"etaoinshrdlucmfwypvbgkqjxzUSERAITN:?"]
WORDS = ("▁the", "▁what", "▁is", "▁picture", "▁red")
DECODERS = {"llava_llama": "llama", "llava_mistral": "mistral", "vila": "llama", "lisa": "llama"}
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions. USER: {}{} ASSISTANT:"
)
PAD = Tiny(family="llava_llama", aspect="pad", pickled=True, shards=2, context=1024)
ANYRES = Tiny(family="llava_mistral", text="mistral", aspect="anyres", kv_heads=4, context=1024)
QUESTION = "What is  the picture?"
SCRIPTS = [(0x20, 0x7F), (0xA0, 0x180), (0x370, 0x400), (0x400, 0x500), (0x590, 0x5F5), (0x600, 0x700), (0x900, 0x980)]
SCRIPTS += [(0xE00, 0xE5C), (0x10A0, 0x1100), (0x3040, 0x3100), (0x4E00, 0x5200), (0xAC00, 0xB000), (0x1F300, 0x1F650)]


def counterpart(tiny: Tiny) -> Tiny:
    """The checkpoint in Hugging Face's layout that has the same weights."""
    family = "llava_next" if tiny.aspect == "anyres" else "llava"
    return replace(tiny, family=family, text=DECODERS[tiny.family], names="new", shards=1, aspect=None, pickled=False)  # type: ignore[arg-type]


def make_original(folder: Path, tiny: Tiny, seed: int) -> Path:
    """Write the checkpoint into `folder`, its tower in a folder inside."""
    from safetensors.torch import load_file

    with TemporaryDirectory() as other:
        theirs = make(Path(other) / "hf", counterpart(tiny), seed)
        weights = load_file(theirs / "model.safetensors")
        config, processor = (read_json(theirs / name) for name in ("config.json", "processor_config.json"))
    write_tower(folder / TOWER, config["vision_config"], processor["image_processor"], weights)
    text = {key: value for key, value in config["text_config"].items() if value is not None}
    rope = text.pop("rope_parameters")
    write_json(folder / "config.json", text | _fields(tiny) | {"rope_theta": rope["rope_theta"]})
    pieces = write_tokenizer_model(folder / "tokenizer.model", tiny.vocab)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "legacy": True})
    write_json(folder / "generation_config.json", {"eos_token_id": 2})
    if tiny.family == "lisa":
        write_json(folder / "added_tokens.json", {token: pieces + n for n, token in enumerate(lisa.ADDED)})
        weights = {name: weight for name, weight in weights.items() if "projector" not in name}
        weights |= lisa.make_projector(tiny, seed)
        weights["lm_head.weight"][pieces] *= lisa.OFTEN
        weights["model.visual_model.mask_decoder.weight"] = weights["lm_head.weight"][:2].clone()
    tensors = {hub_name(name): tensor for name, tensor in weights.items() if not _of_tower(name)}
    _write_weights(folder, tensors, tiny)
    return folder


def write_tower(folder: Path, config: dict[str, Any], processor: dict[str, Any], weights: dict[str, Any]) -> None:
    """A CLIP or SigLIP tower as a checkpoint of its own, with the tensors of a LLaVA's."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    name = "SiglipImageProcessor" if config["model_type"].startswith("siglip") else "CLIPImageProcessor"
    kind = processor | {"image_processor_type": name}
    kind.pop("do_pad", None)
    write_json(folder / "preprocessor_config.json", kind)
    mine = {"vision_model." + _after(name, "vision_tower."): w for name, w in weights.items() if _of_tower(name)}
    save_file(mine, folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer_model(path: Path, vocab: int) -> int:
    """Write a sentencepiece model of Llama's kind with `vocab` pieces at most, and return their number."""
    from transformers.convert_slow_tokenizer import import_protobuf

    merged = dict.fromkeys(word[:end] for word in WORDS for end in range(2, len(word) + 1))
    pieces = ["<unk>", "<s>", "</s>", *PIECES, *[piece for piece in merged if piece not in PIECES]][:vocab]
    model = import_protobuf().ModelProto()  # type: ignore[no-untyped-call]
    kinds = model.SentencePiece
    for number, piece in enumerate(pieces):
        kind = kinds.NORMAL
        if number < 3:
            kind = kinds.CONTROL if number else kinds.UNKNOWN
        elif piece.startswith("<0x"):
            kind = kinds.BYTE
        model.pieces.add(piece=piece, score=0.0 if number < 259 else float(259 - number), type=kind)
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = 2, True
    model.trainer_spec.vocab_size = len(pieces)
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = False
    path.write_bytes(model.SerializeToString())
    return len(pieces)


def _fields(tiny: Tiny) -> dict[str, Any]:
    fields = {
        "architectures": [f"Llava{DECODERS[tiny.family].capitalize()}ForCausalLM"],
        "model_type": tiny.family,
        "mm_vision_tower": f"somewhere/{TOWER}",
        "mm_hidden_size": tiny.vision_hidden,
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_layer": tiny.feature_layer,
        "mm_vision_select_feature": "patch",
        "mm_use_im_start_end": False,
        "mm_use_im_patch_token": False,
    }  # fmt: skip
    if tiny.family == "lisa":
        del fields["mm_projector_type"]  # absent means one matrix
        fields |= {"architectures": ["LISAForCausalLM"], "model_type": "llava", "mm_use_im_start_end": True}
        fields["image_aspect_ratio"] = "square"
    if tiny.aspect == "anyres":
        points = [[width, height] for height, width in tiny.pinpoints]
        fields |= {"mm_patch_merge_type": "spatial_unpad", "image_grid_pinpoints": points}
    return fields | ({"image_aspect_ratio": tiny.aspect} if tiny.aspect else {})


def _of_tower(name: str) -> bool:
    return "vision_tower." in name


def _after(name: str, part: str) -> str:
    return name.partition(part)[2].removeprefix("vision_model.")


def hub_name(name: str) -> str:
    """A tensor's name in the original layout."""
    if name.startswith("model.multi_modal_projector."):
        layer, _, kind = _after(name, "multi_modal_projector.").partition(".")
        return f"model.mm_projector.{2 * (int(layer.removeprefix('linear_')) - 1)}.{kind}"
    return name.replace("model.language_model.", "model.")


def _write_weights(folder: Path, tensors: dict[str, Any], tiny: Tiny) -> None:
    import torch
    from safetensors.torch import save_file

    if not tiny.pickled:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    placed: dict[str, str] = {}
    for i in range(tiny.shards):
        shard = f"pytorch_model-{i + 1:05}-of-{tiny.shards:05}.bin"
        mine = names[i * len(names) // tiny.shards : (i + 1) * len(names) // tiny.shards]
        torch.save({name: tensors[name] for name in mine}, folder / shard)
        placed |= dict.fromkeys(mine, shard)
    write_json(folder / "pytorch_model.bin.index.json", {"weight_map": placed})
