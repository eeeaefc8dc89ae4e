"""FastVLM: tiny checkpoints, and transformers' model with a plain statement of the tower that it takes from timm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.tiny import Tiny

FAST_VLM = Tiny(
    family="fast_vlm", text="qwen2", tokenizer="bytes", vision="fastvit", image=256, patch=64, select="full",
    feature_layer=-1,
)  # fmt: skip


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Module()
        self.conv.conv = nn.Conv2d(width, width, 7, padding=3, groups=width, bias=False)
        self.conv.bn = nn.BatchNorm2d(width)
        self.fc1, self.fc2 = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(self.conv.bn(self.conv.conv(x)))))


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width, 1, 1))


class Merged(nn.Module):
    """A convolution whose branches in training were merged into one."""

    def __init__(self, into: int, out: int, kernel: int, stride: int = 1, *, apart: bool = True) -> None:
        super().__init__()
        groups = into if apart else 1
        self.reparam_conv = nn.Conv2d(into, out, kernel, stride, kernel // 2, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.reparam_conv(x)


class Mixing(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.token_mixer, self.layer_scale, self.mlp = Merged(width, width, 3), Scale(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token_mixer(x)
        return x + self.layer_scale.gamma * self.mlp(x)


class Attending(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.token_mixer = nn.LayerNorm(width, eps=1e-5), nn.Module()
        self.token_mixer.qkv, self.token_mixer.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.layer_scale_1, self.layer_scale_2, self.mlp = Scale(width), Scale(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        images, width, high, wide = x.shape
        rows = self.norm(x.permute(0, 2, 3, 1)).reshape(images, high * wide, width)
        q, k, v = self.token_mixer.qkv(rows).reshape(images, -1, 3, width // 32, 32).permute(2, 0, 3, 1, 4)
        seen = (q @ k.transpose(-2, -1) * 32**-0.5).softmax(-1) @ v
        y = self.token_mixer.proj(seen.transpose(1, 2).reshape(images, -1, width))
        x = x + self.layer_scale_1.gamma * y.reshape(images, high, wide, width).permute(0, 3, 1, 2)
        return x + self.layer_scale_2.gamma * self.mlp(x)


class Stage(nn.Module):
    def __init__(self, number: int, before: int, width: int, blocks: int) -> None:
        super().__init__()
        if number:
            self.downsample = nn.Module()
            self.downsample.proj = nn.Sequential(Merged(before, width, 7, 2), Merged(width, width, 1, apart=False))
        if number > 2:
            self.pos_emb = Merged(width, width, 7)
        self.blocks = nn.Sequential(*[(Attending if number > 2 else Mixing)(width) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "downsample"):
            for part in self.downsample.proj:
                x = F.gelu(part(x))
        if hasattr(self, "pos_emb"):
            x = self.pos_emb(x)
        return self.blocks(x)


class Tower(nn.Module):
    """timm's fastvit_mci3 at inference, with its names, as its paper and its settings say (arXiv 2412.13303)."""

    def __init__(self, blocks: Sequence[int], widths: Sequence[int]) -> None:
        super().__init__()
        first, last = widths[0], widths[-1]
        self.stem = nn.Sequential(
            Merged(3, first, 3, 2, apart=False), Merged(first, first, 3, 2), Merged(first, first, 1, apart=False)
        )
        sizes = enumerate(zip((0, *widths), widths, blocks, strict=False))
        self.stages = nn.Sequential(*[Stage(number, *size) for number, size in sizes])
        self.final_conv, se = Merged(last, 2 * last, 3), nn.Module()
        se.fc1, se.fc2 = nn.Conv2d(2 * last, last // 8, 1), nn.Conv2d(last // 8, 2 * last, 1)
        self.final_conv.se = se

    def forward(self, x: Tensor) -> Tensor:
        for part in self.stem:
            x = F.gelu(part(x))
        x = self.final_conv(self.stages(x))
        se = self.final_conv.se
        return F.gelu(x * torch.sigmoid(se.fc2(torch.relu(se.fc1(x.mean((2, 3), keepdim=True))))))


class Wrapped(nn.Module):
    """What transformers' wrapper of timm gives its model."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.timm_model = tower

    def forward(self, pixel_values: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.timm_model(pixel_values))


def model_of(config: Any) -> Any:
    """Transformers' model of a FastVlmConfig: built with another tower, which this one then replaces."""
    from transformers import CLIPVisionConfig, FastVlmForConditionalGeneration

    tower = config.vision_config
    other = CLIPVisionConfig(hidden_size=tower.hidden_size, num_hidden_layers=1, num_attention_heads=1)
    kept = FastVlmForConditionalGeneration.config_class(**{**config.to_dict(), "vision_config": other.to_dict()})
    kept._attn_implementation = "eager"
    model = FastVlmForConditionalGeneration(kept)
    model.model.vision_tower = Wrapped(Tower(tower.model_args["layers"], tower.model_args["embed_dims"]))
    return model


def load_fast_vlm(folder: Path) -> Any:
    from safetensors.torch import load_file
    from transformers import FastVlmConfig, GenerationConfig

    held = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    model = model_of(FastVlmConfig.from_pretrained(folder, local_files_only=True))
    renamed = (("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head."))
    renamed += (("vision_tower.", "model.vision_tower."), ("multi_modal", "model.multi_modal"))  # as saved, in memory
    state = {}
    for name, tensor in held.items():
        new = next((now + name.removeprefix(then) for then, now in renamed if name.startswith(then)), name)
        state[new] = tensor.float()
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert all(name.endswith(("num_batches_tracked", "lm_head.weight")) for name in missing.missing_keys)
    model.tie_weights()
    model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.float()
