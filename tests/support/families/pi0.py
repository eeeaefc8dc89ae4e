"""pi0: tiny checkpoints, and withdrawal stated by masks over transformers' own layers."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.support.bundles import ORT, export
from tests.support.families.paligemma import PALIGEMMA
from tests.support.json_files import write_json
from tests.support.tiny import Tiny, random_tensor
from tests.support.tiny_tokenizer import write_tokenizer

STATISTICS = {
    "state_mean": [0.5, -1.0, 2.0, 0.0], "state_std": [1.0, 0.5, 2.0, 0.25], "actions_mean": [1.0, 0.0, -2.0],
    "actions_std": [0.5, 3.0, 1.0],
}  # fmt: skip


KS, WORDS = (3, 5, 8), "red square left"


@dataclass(frozen=True)
class TinyPi0:
    """A tiny pi0: `vlm` are the sizes of its PaliGemma, whose vocabulary ends before the image token."""

    vlm: Tiny = PALIGEMMA
    hidden: int = 32
    ffn: int = 48
    heads: int = 2
    state: int = 6
    width: int = 5
    horizon: int = 7
    steps: int = 10
    hub_names: bool = True
    statistics: bool = True


def random_pi0(chance: random.Random) -> tuple[TinyPi0, tuple[int, ...]]:
    """A random configuration and the K of its bundle."""
    layers, patch = chance.randint(3, 8), chance.choice([8, 14])
    vlm = replace(
        PALIGEMMA, layers=layers, head_dim=chance.choice([8, 16, 32]), heads=chance.choice([2, 4]), patch=patch,
        kv_heads=chance.choice([1, 2]), hidden=chance.choice([32, 64]), image=patch * chance.randint(2, 5),
        vision_layers=chance.randint(1, 3),
    )  # fmt: skip
    tiny = TinyPi0(
        vlm, hidden=chance.choice([16, 32, 48]), heads=chance.choice([2, 4]), ffn=chance.choice([32, 80]),
        state=chance.randint(1, 9), width=chance.randint(1, 9), horizon=chance.randint(1, 12),
        steps=chance.randint(1, 12), hub_names=chance.random() < 0.5, statistics=False,
    )  # fmt: skip
    return tiny, tuple(sorted(chance.sample(range(2, layers + 1), min(3, layers - 1))))


def export_pi0(folder: Path) -> Path:
    """The bundle of a `TinyPi0()` with the K of `KS`, for libvtx too, made in this folder."""
    return export(make_pi0(folder / "checkpoint", TinyPi0()), folder / "bundle", KS, dialects=(*ORT, "plain")).folder


def config_of(tiny: TinyPi0) -> Any:
    from transformers import PI0Config

    vlm, shared = tiny.vlm, {"rms_norm_eps": 1e-5, "max_position_embeddings": tiny.vlm.context}
    kinds = {"num_hidden_layers": vlm.layers, "num_key_value_heads": vlm.kv_heads, "head_dim": vlm.head_dim, **shared}
    return PI0Config(
        vlm_config={
            "model_type": "paligemma", "projection_dim": vlm.hidden, "hidden_size": vlm.hidden,
            "image_token_index": vlm.vocab - 1,
            "text_config": {
                "model_type": "gemma", "hidden_size": vlm.hidden, "intermediate_size": vlm.ffn,
                "num_attention_heads": vlm.heads, "vocab_size": vlm.vocab - 1, **kinds,
            },
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": vlm.vision_hidden, "image_size": vlm.image,
                "intermediate_size": vlm.vision_ffn, "num_hidden_layers": vlm.vision_layers, "patch_size": vlm.patch,
                "num_attention_heads": vlm.vision_heads, "vision_use_head": False,
            },
        },
        dit_config={
            "model_type": "gemma", "hidden_size": tiny.hidden, "intermediate_size": tiny.ffn,
            "num_attention_heads": tiny.heads, **kinds,
        },
        chunk_size=tiny.horizon, max_state_dim=tiny.state, max_action_dim=tiny.width, num_inference_steps=tiny.steps,
    )  # fmt: skip


def make_pi0(folder: Path, tiny: TinyPi0, seed: int = 0) -> Path:
    """Write a checkpoint, by the names of the hub or of transformers' state_dict."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, tiny.vlm)
    written = config_of(tiny).to_dict() | {"architectures": ["PI0ForConditionalGeneration"]}
    write_json(folder / "config.json", written)
    side = tiny.vlm.image
    processor = {
        "image_processor_type": "PI0ImageProcessor", "size": {"max_height": side, "max_width": side},
        "pad_size": {"height": side, "width": side},
    }  # fmt: skip
    statistics = STATISTICS if tiny.statistics else {}
    write_json(folder / "processor_config.json", {"image_processor": processor, **statistics})
    save_file(
        {_hub(n) if tiny.hub_names else n: t for n, t in weights_of(tiny, seed).items()}, folder / "model.safetensors"
    )
    return folder


def weights_of(tiny: TinyPi0, seed: int) -> dict[str, torch.Tensor]:
    from transformers import PI0ForConditionalGeneration

    with torch.device("meta"):
        shapes = {n: tuple(t.shape) for n, t in PI0ForConditionalGeneration(config_of(tiny)).state_dict().items()}
    found = {}
    for name, shape in shapes.items():
        value = random_tensor(name, shape, seed)
        gemma = "vision" not in name and name.endswith("norm.weight")
        found[name] = torch.from_numpy(value - 1 if gemma else value)
    return found


def _hub(name: str) -> str:
    """The name on the hub, where tables are only output matrices and the projections stand at the root."""
    name = name.removeprefix("embed_action_time.")
    name = name.replace("model.vlm.language_model.embed_tokens", "paligemma_with_expert.paligemma.lm_head")
    name = name.replace("model.dit.embed_tokens", "paligemma_with_expert.gemma_expert.lm_head")
    name = name.replace("model.vlm.vision_tower.", "model.vlm.vision_tower.vision_model.")
    name = name.replace("model.vlm.", "paligemma_with_expert.paligemma.model.")
    return name.replace("model.dit.", "paligemma_with_expert.gemma_expert.model.")


class Judge:
    """Transformers' model with the same weights; its processor needs torchvision, so prompts are written out here."""

    def __init__(self, tiny: TinyPi0, seed: int = 0) -> None:
        from transformers import PI0ForConditionalGeneration

        torch.set_num_threads(1)
        config = config_of(tiny)
        config._attn_implementation = "eager"
        self.tiny, self.model = tiny, PI0ForConditionalGeneration(config)
        self.model.load_state_dict(weights_of(tiny, seed))
        self.model.train(False)

    def pixels(self, image: Image.Image) -> torch.Tensor:
        """[3, side, side]: the picture at the top left of a square of zeros, which mean grey."""
        side, (width, height) = self.tiny.vlm.image, image.size
        scale = min(side / height, side / width)
        small = image.resize((int(width * scale), int(height * scale)), Image.Resampling.BICUBIC)
        values = torch.from_numpy(np.asarray(small, np.float32) / 255).permute(2, 0, 1)
        out = torch.zeros(3, side, side)
        out[:, : values.shape[1], : values.shape[2]] = (values - 0.5) / 0.5
        return out

    def ids(self, tokenizer: Any, instruction: str, cameras: int) -> torch.Tensor:
        prompt = "<image>" * self.tiny.vlm.vision_tokens * cameras + "<s>" + instruction + "\n"
        return torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])

    @torch.inference_mode()
    def sampled(self, ids: torch.Tensor, pixels: torch.Tensor, state: Any, noise: Any, steps: int | None) -> Any:
        """Transformers' own actions [horizon, width]."""
        return self.model.sample_actions(
            state=torch.tensor(state)[None], input_ids=ids, pixel_values=pixels[None], num_steps=steps,
            noise=torch.tensor(noise)[None], attention_mask=torch.ones_like(ids),
            pixel_attention_mask=torch.ones(1, len(pixels), dtype=torch.bool),
        )[0].numpy()  # fmt: skip

    @torch.inference_mode()
    def withdrawn(
        self, ids: torch.Tensor, pixels: torch.Tensor, state: Any, noise: Any, k: int | None, steps: int
    ) -> Any:
        """The actions if in the layers from `k` on nothing sees an image token, which nothing else changes."""
        from transformers import DynamicCache

        model, vlm, dit = self.model, self.model.model.vlm.language_model, self.model.model.dit
        rows = model.model.embed_prefix(ids, pixels[None], torch.ones(1, len(pixels), dtype=torch.bool))
        count, cache, image = ids.shape[1], DynamicCache(), ids[0] == self.tiny.vlm.vocab - 1
        rope = vlm.rotary_emb(rows, position_ids=torch.arange(count)[None])

        def mask(layer: int, queries: int, own: int) -> torch.Tensor:
            out = torch.zeros(1, 1, queries, count + own)
            if k is not None and layer >= k - 1:
                out[..., :count][..., image] = -torch.inf
            return out

        for number, layer in enumerate(vlm.layers):
            rows = layer(rows, attention_mask=mask(number, count, 0), position_embeddings=rope, past_key_values=cache)
        actions, given = torch.tensor(noise)[None], torch.tensor(state)[None]
        positions = torch.arange(count, count + self.tiny.horizon + 1)[None]
        for step in range(steps):
            time = torch.tensor([1 - step / steps])
            x, past = model.embed_action_time(given, actions, time), copy.deepcopy(cache)
            rope = dit.rotary_emb(x, position_ids=positions)
            for number, layer in enumerate(dit.layers):
                seen = mask(number, x.shape[1], x.shape[1])
                seen[:, :, 0, count + 1 :] = -torch.inf
                x = layer(x, attention_mask=seen, position_embeddings=rope, past_key_values=past)
            actions = actions - model.action_out_proj(dit.norm(x)[:, 1:]) / steps
        return actions[0].numpy()
