"""A LLaVA for training: tensors named as Hugging Face names them, withdrawal and question packing built in.

Only what training needs stands here. The trained weights are saved in Hugging Face's layout and
from then on are read by `transformers` and by vtx like any other checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the demo model; `layers` grows during training."""

    layers: int = 24
    hidden: int = 128
    ffn: int = 256
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 544
    theta: float = 10000.0
    image: int = 72
    patch: int = 8
    v_layers: int = 4
    v_hidden: int = 96
    v_ffn: int = 256
    v_heads: int = 3

    @property
    def vision_tokens(self) -> int:
        return (self.image // self.patch) ** 2


def init_linear(out_features: int, in_features: int, *, bias: bool, scale: float = 1.0) -> nn.Linear:
    layer = nn.Linear(in_features, out_features, bias=bias)
    nn.init.normal_(layer.weight, std=scale * in_features**-0.5)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def init_embedding(count: int, width: int, std: float) -> nn.Embedding:
    made = nn.Embedding(count, width)
    nn.init.normal_(made.weight, std=std)
    return made


class Group(nn.Module):
    """Modules and parameters by name."""

    def __init__(self, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class VisionAttention(Group):
    def __init__(self, s: Shape) -> None:
        scales = {"q_proj": 1.0, "k_proj": 1.0, "v_proj": 1.0, "out_proj": 0.3}
        super().__init__(**{n: init_linear(s.v_hidden, s.v_hidden, bias=True, scale=c) for n, c in scales.items()})
        self.heads = s.v_heads

    def forward(self, x: Tensor) -> Tensor:
        b, n, h = x.shape
        q, k, v = (p(x).view(b, n, self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(y.transpose(1, 2).reshape(b, n, h))


class VisionMLP(Group):
    def __init__(self, s: Shape) -> None:
        super().__init__(
            fc1=init_linear(s.v_ffn, s.v_hidden, bias=True), fc2=init_linear(s.v_hidden, s.v_ffn, bias=True, scale=0.3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        return self.fc2(x * torch.sigmoid(1.702 * x))


class VisionLayer(Group):
    def __init__(self, s: Shape) -> None:
        super().__init__(
            self_attn=VisionAttention(s),
            layer_norm1=nn.LayerNorm(s.v_hidden),
            mlp=VisionMLP(s),
            layer_norm2=nn.LayerNorm(s.v_hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class VisionEmbeddings(Group):
    def __init__(self, s: Shape) -> None:
        super().__init__(
            class_embedding=nn.Parameter(torch.randn(s.v_hidden) * 0.02),
            patch_embedding=nn.Conv2d(3, s.v_hidden, s.patch, s.patch, bias=False),
            position_embedding=init_embedding(s.vision_tokens + 1, s.v_hidden, 0.3),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        cls = self.class_embedding.expand(len(pixels), 1, -1).to(patches.dtype)
        return torch.cat((cls, patches), 1) + self.position_embedding.weight


class VisionModel(Group):
    def __init__(self, s: Shape) -> None:
        super().__init__(
            embeddings=VisionEmbeddings(s),
            pre_layrnorm=nn.LayerNorm(s.v_hidden),
            encoder=Group(layers=nn.ModuleList(VisionLayer(s) for _ in range(s.v_layers))),
            post_layernorm=nn.LayerNorm(s.v_hidden),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """[batch, 3, side, side] to [batch, 1 + patches, hidden]: the output of the last but one layer."""
        x = self.pre_layrnorm(self.embeddings(pixels))
        for layer in list(self.encoder.layers)[:-1]:
            x = layer(x)
        return x


class Projector(Group):
    def __init__(self, s: Shape) -> None:
        super().__init__(
            linear_1=init_linear(s.hidden, s.v_hidden, bias=True), linear_2=init_linear(s.hidden, s.hidden, bias=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1(x)))


class RMSNorm(Group):
    def __init__(self, width: int) -> None:
        super().__init__(weight=nn.Parameter(torch.ones(width)))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), 1e-5)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(Group):
    def __init__(self, s: Shape) -> None:
        size = s.hidden // s.heads
        super().__init__(
            q_proj=init_linear(s.hidden, s.hidden, bias=False),
            k_proj=init_linear(s.kv_heads * size, s.hidden, bias=False),
            v_proj=init_linear(s.kv_heads * size, s.hidden, bias=False),
            o_proj=init_linear(s.hidden, s.hidden, bias=False, scale=0.3),
        )
        self.size, self.groups = size, s.heads // s.kv_heads

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        b, n, h = x.shape
        q, k, v = (p(x).view(b, n, -1, self.size).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, *rope), rotate(k, *rope)
        k, v = k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)
        scores = (q @ k.transpose(2, 3)) * self.size**-0.5 + mask
        y = scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
        return self.o_proj(y.transpose(1, 2).reshape(b, n, h))


class MLP(Group):
    def __init__(self, s: Shape) -> None:
        super().__init__(
            gate_proj=init_linear(s.ffn, s.hidden, bias=False),
            up_proj=init_linear(s.ffn, s.hidden, bias=False),
            down_proj=init_linear(s.hidden, s.ffn, bias=False, scale=0.3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(Group):
    def __init__(self, s: Shape) -> None:
        super().__init__(
            self_attn=Attention(s),
            mlp=MLP(s),
            input_layernorm=RMSNorm(s.hidden),
            post_attention_layernorm=RMSNorm(s.hidden),
        )

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))

    def silence(self) -> None:
        """Make this layer the identity: how a deeper model starts from a shallower one."""
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)


class Llava(Group):
    """The demo model. `forward` takes packed questions and a withdrawal depth `k` (1-based, None: never)."""

    def __init__(self, s: Shape) -> None:
        model = Group(
            vision_tower=Group(vision_model=VisionModel(s)),
            multi_modal_projector=Projector(s),
            language_model=Group(
                embed_tokens=init_embedding(s.vocab, s.hidden, 0.5),
                layers=nn.ModuleList(Layer(s) for _ in range(s.layers)),
                norm=RMSNorm(s.hidden),
            ),
        )
        super().__init__(model=model, lm_head=init_linear(s.vocab, s.hidden, bias=False))
        self.shape = s

    def see(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Vision tokens [batch, patches, hidden] and the CLS row [batch, vision hidden]."""
        rows = self.model.vision_tower.vision_model(pixels)
        return self.model.multi_modal_projector(rows[:, 1:]), rows[:, 0]

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        half = self.shape.hidden // self.shape.heads // 2
        rates = self.shape.theta ** (-torch.arange(half, device=positions.device) / half)
        angles = positions[:, None, :, None] * rates
        dtype = torch.bfloat16 if torch.is_autocast_enabled(positions.device.type) else torch.float32
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, ids: Tensor, vision: Tensor, positions: Tensor, mask: Tensor, at: int, k: int | None) -> Tensor:
        """Final hidden states of the text rows.

        ids [batch, text], vision [batch, patches, hidden] stands after the first `at` text tokens;
        positions [batch, rows] and mask [batch, 1, rows, rows] (0 or -30000, added to the scores)
        count text and vision rows.
        """
        n = vision.shape[1]
        text = self.model.language_model.embed_tokens(ids).to(vision.dtype)
        x = torch.cat((text[:, :at], vision, text[:, at:]), 1)
        kept = torch.cat((torch.arange(at), torch.arange(at + n, x.shape[1]))).to(ids.device)
        rope = self.rope(positions)
        for number, layer in enumerate(self.model.language_model.layers, 1):
            if number == k:
                x, mask = x[:, kept], mask[:, :, kept][..., kept]
                rope = (rope[0][:, :, kept], rope[1][:, :, kept])
            x = layer(x, rope, mask)
        return self.model.language_model.norm(x if k else x[:, kept])
