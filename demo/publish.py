"""Write the trained demo model in Hugging Face's layout: `python demo/publish.py --run build/demo-train`.

The result is what ships as package data, `exporter/demo_model/`: float16 weights under the names of the
public LLaVA-1.5 checkpoints, tokenizer, processor settings and chat template.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import Shape
from safetensors.numpy import save_file
from train import MEAN, STD
from words import SPECIAL, TEMPLATE, run_tokenizer

HERE = Path(__file__).resolve().parent
HUB_NAMES = [
    (re.compile(r"^model\.language_model\."), "language_model.model."),
    (re.compile(r"^lm_head\."), "language_model.lm_head."),
    (re.compile(r"^model\."), ""),
]


def hub_name(name: str) -> str:
    for pattern, start in HUB_NAMES:
        if pattern.match(name):
            return pattern.sub(start, name)
    raise ValueError(f"no name on the hub for {name}")


def config(s: Shape) -> dict[str, Any]:
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": s.v_hidden,
        "intermediate_size": s.v_ffn,
        "num_hidden_layers": s.v_layers,
        "num_attention_heads": s.v_heads,
        "image_size": s.image,
        "patch_size": s.patch,
        "projection_dim": s.v_hidden,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    }
    text = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": s.hidden,
        "intermediate_size": s.ffn,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "vocab_size": s.vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": s.theta,
        "max_position_embeddings": 1024,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 4,
        "image_seq_length": s.vision_tokens,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "multimodal_projector_bias": True,
        "pad_token_id": 3,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "text_config": text,
        "vision_config": vision,
    }


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("build/demo-train"), help="what demo/train.py wrote")
    parser.add_argument("--out", type=Path, default=HERE.parent / "exporter" / "demo_model")
    args = parser.parse_args()
    state = torch.load(args.run / "last.pt", weights_only=True, map_location="cpu")
    shape = Shape(**state["shape"])
    args.out.mkdir(parents=True, exist_ok=True)
    weights = {hub_name(k): v.numpy().astype(np.float16) for k, v in state["model"].items()}
    # Beside its place and then renamed: bundles may be linked to the file that stands there.
    save_file(weights, args.out / "model.tmp", metadata={"format": "pt"})
    (args.out / "model.tmp").chmod(0o644)
    (args.out / "model.tmp").replace(args.out / "model.safetensors")
    write_json(args.out / "config.json", config(shape))
    write_json(args.out / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3})
    run_tokenizer(args.run, shape.vocab).save(str(args.out / "tokenizer.json"), pretty=False)
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token", "image_token"), SPECIAL, strict=True))
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1024,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        **names,
    }
    write_json(args.out / "tokenizer_config.json", tokenizer)
    image = {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": shape.image},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": shape.image, "width": shape.image},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": [float(f"{v:.8f}") for v in MEAN],
        "image_std": [float(f"{v:.8f}") for v in STD],
    }
    write_json(args.out / "preprocessor_config.json", image)
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": "<image>",
        "patch_size": shape.patch,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    write_json(args.out / "processor_config.json", processor)
    (args.out / "chat_template.jinja").write_text(TEMPLATE)
    total = sum(p.stat().st_size for p in args.out.iterdir())
    print(f"{args.out}: {total / 1e6:.2f} MB, {shape.layers} layers, after {state['step']} steps")


if __name__ == "__main__":
    main()
