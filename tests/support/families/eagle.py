"""Eagle-X5: tiny checkpoints in its authors' layout, and its five towers stated as the released code computes them.

CLIP, SAM and Pix2Struct are transformers' own modules, with the released code's deviations; ConvNeXt and EVA-02 are
plain PyTorch.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from tests.support.families.original import VICUNA, write_tokenizer_model
from tests.support.json_files import read_json, write_json
from tests.support.tiny import random_tensor

NAMES = "clip-448;convnext-1024;sam-1024;det-1024;pix2struct-1024"
TOWERS = ("clip", "convnext", "sam", "eva02", "pix2struct")
CLIP_SIDE, TRAINED, CUT = 336, 16, 2048  # pixels; patches a side; patches
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


@dataclass(frozen=True)
class TinyEagle:
    """Sizes of the decoder and, of each tower, (layers, hidden, ffn) and what else a checkpoint may differ in."""

    layers: int = 8
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 4
    ffn: int = 96
    vocab: int = 320
    context: int = 512
    image: int = 128
    clip: tuple[int, int, int] = (2, 64, 96)
    clip_patch: int = 28
    clip_positions: int = 12  # a side of its table, which is resized if the patches are others
    blocks: tuple[int, int, int, int] = (1, 1, 2, 1)
    widths: tuple[int, int, int, int] = (8, 16, 24, 32)
    sam: tuple[int, int, int] = (3, 32, 48)
    sam_heads: int = 2
    sam_window: int = 3
    sam_whole: tuple[int, ...] = (1,)
    neck: int = 8
    eva: tuple[int, int, int] = (3, 64, 44)
    eva_heads: int = 2
    eva_window: int = 3
    eva_positions: int = 5
    buffers: bool = True  # the tables of EVA-02's rotation are in the file
    pix2struct: tuple[int, int, int] = (2, 64, 96)
    pix2struct_patch: int = 4
    rows: int = 64

    @property
    def grid(self) -> int:
        return self.image // 32

    @property
    def tokens(self) -> int:
        return self.grid**2

    @property
    def width(self) -> int:
        return self.clip[1] + self.widths[-1] + 4 * self.neck + self.eva[1] + self.pix2struct[1]


TINY = TinyEagle()


def drawn(number: int) -> tuple[TinyEagle, tuple[int, ...]]:
    """A configuration by its number, with up to three K."""
    chance = random.Random(number)
    pick, heads, first = chance.choice, chance.choice([2, 4]), chance.choice([4, 8])
    layers, sam_layers, buffers = chance.randint(3, 8), chance.randint(1, 4), chance.random() < 0.7
    tiny = TinyEagle(
        layers=layers, hidden=pick([32, 64]), heads=heads, kv_heads=pick([1, heads]), ffn=pick([48, 96]),
        image=32 * chance.randint(2, 5), clip=(chance.randint(1, 3), pick([64, 128]), pick([48, 96])),
        clip_patch=pick([28, 42, 56]), clip_positions=pick([6, 8, 12]),
        blocks=tuple(chance.randint(1, 2) for _ in range(4)), widths=(first, pick([8, 16]), 16, pick([24, 40])),
        sam=(sam_layers, pick([16, 32]), pick([24, 48])), sam_heads=pick([1, 2]), sam_window=chance.randint(2, 5),
        sam_whole=tuple(n for n in range(sam_layers) if chance.random() < 0.4), neck=pick([4, 8]),
        eva=(chance.randint(1, 4), pick([64, 128]), pick([44, 80])), eva_heads=pick([2, 4]) if buffers else 0,
        eva_window=chance.randint(2, 5) if buffers else 16, eva_positions=chance.randint(2, 6), buffers=buffers,
        pix2struct=(chance.randint(1, 2), pick([64, 128]), pick([48, 96])), pix2struct_patch=pick([1, 2, 3]),
        rows=pick([46, 64]),
    )  # fmt: skip
    if not buffers:
        tiny = replace(tiny, eva_heads=tiny.eva[1] // 64)
    return tiny, tuple(sorted(chance.sample(range(2, layers + 1), min(3, layers - 1))))


def config_of(tiny: TinyEagle) -> dict[str, Any]:
    return {
        "architectures": ["EagleLlamaForCausalLM"], "model_type": "eagle_llama", "torch_dtype": "bfloat16",
        "vocab_size": tiny.vocab, "hidden_size": tiny.hidden, "intermediate_size": tiny.ffn,
        "num_hidden_layers": tiny.layers, "num_attention_heads": tiny.heads, "num_key_value_heads": tiny.kv_heads,
        "max_position_embeddings": tiny.context, "rms_norm_eps": 1e-5, "image_aspect_ratio": "pad",
        "tokenizer_model_max_length": tiny.context, "mm_vision_tower": NAMES, "mm_hidden_size": tiny.width,
        "mm_projector_type": "mlp2x_gelu", "mm_vision_select_layer": -2, "mm_vision_select_feature": "patch",
        "mm_patch_merge_type": "flat", "mm_use_im_start_end": False, "mm_use_im_patch_token": False,
        "unfreeze_mm_vision_tower": True,
    }  # fmt: skip


def make_eagle(folder: Path, tiny: TinyEagle, seed: int = 0, **changed: Any) -> Path:
    """Write a checkpoint; `changed` are keys of `config.json`, None to leave one out."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    written = {key: value for key, value in {**config_of(tiny), **changed}.items() if value is not None}
    write_json(folder / "config.json", written)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "legacy": True})
    write_json(folder / "generation_config.json", {"eos_token_id": 2})
    write_tokenizer_model(folder / "tokenizer.model", tiny.vocab)
    tensors = {name: tensor.contiguous() for name, tensor in weights_of(tiny, seed).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rewrite(folder: Path, change: Any) -> None:
    """Change a checkpoint's tensors: `change` gets them by name."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def weights_of(tiny: TinyEagle, seed: int) -> dict[str, Tensor]:
    """Random weights by their authors' names."""
    shapes = dict[str, tuple[int, ...]]()
    for number, tower in enumerate(TOWERS):
        p = f"model.vision_tower.vision_towers.{number}.vision_tower."
        shapes |= {f"{p}{name}": shape for name, shape in _SHAPES[tower](tiny).items()}
    for number, into in ((0, tiny.width), (2, tiny.hidden)):
        p = f"model.mm_projector.{number}."
        shapes |= {f"{p}weight": (tiny.hidden, into), f"{p}bias": (tiny.hidden,)}
    shapes |= {name: tuple(tensor.shape) for name, tensor in _llama(tiny, meta=True).state_dict().items()}
    found = {}
    for name, shape in shapes.items():
        value = random_tensor(name, shape, seed)
        if name.endswith(("pos_embed", "row_embedder.weight", "column_embedder.weight")):
            value = random_tensor(f"{name}cls_token", shape, seed)
        if len(shape) == 1 and name.split(".")[-3:-1] and name.split(".")[-3] == "blocks" and name.endswith(".weight"):
            value = 0.5 + 0.2 * value  # ConvNeXt's scale of a block
        if name.endswith("attention.query.weight"):
            value = value * 0.15  # scores have no scale
        if name.endswith("ffn_ln.weight"):
            value = 1 + 0.2 * value
        if name == "model.norm.weight":
            value = value * 3
        found[name] = torch.from_numpy(np.ascontiguousarray(value, np.float32))
    if tiny.buffers:
        p = "model.vision_tower.vision_towers.3.vision_tower.rope_win."
        angles = eva_angles(tiny.eva[1] // tiny.eva_heads, tiny.eva_window)
        found |= {f"{p}freqs_cos": angles.cos(), f"{p}freqs_sin": angles.sin()}
    return found


def _llama(tiny: TinyEagle, *, meta: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps")
    config = LlamaConfig(**{name: config_of(tiny)[name] for name in names})
    config._attn_implementation = "eager"
    with torch.device("meta" if meta else "cpu"):
        return LlamaForCausalLM(config)


def _clip_module(tiny: TinyEagle) -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    layers, hidden, ffn = tiny.clip
    config = CLIPVisionConfig(
        hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        image_size=tiny.clip_positions * tiny.clip_patch, patch_size=tiny.clip_patch, hidden_act="quick_gelu",
        layer_norm_eps=1e-5,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = CLIPVisionModel(config)
    return getattr(model, "vision_model", model)


class ShortNeck(nn.Module):
    """What stands in place of SAM's neck: one convolution of 1 x 1, and a norm over channels."""

    def __init__(self, hidden: int, out: int) -> None:
        super().__init__()
        self.conv1, self.layer_norm1 = nn.Conv2d(hidden, out, 1, bias=False), nn.LayerNorm(out, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer_norm1(self.conv1(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        return y


def _sam_module(tiny: TinyEagle) -> Any:
    from transformers import SamVisionConfig
    from transformers.models.sam.modeling_sam import SamVisionEncoder

    layers, hidden, ffn = tiny.sam
    config = SamVisionConfig(
        hidden_size=hidden, output_channels=tiny.neck, num_hidden_layers=layers, num_attention_heads=tiny.sam_heads,
        image_size=tiny.image, patch_size=16, mlp_dim=ffn, window_size=tiny.sam_window, layer_norm_eps=1e-6,
        global_attn_indexes=list(tiny.sam_whole),
    )  # fmt: skip
    config._attn_implementation = "eager"
    encoder = SamVisionEncoder(config)
    encoder.neck = ShortNeck(hidden, tiny.neck)
    return encoder


def _pix2struct_module(tiny: TinyEagle) -> Any:
    from transformers import Pix2StructVisionConfig, Pix2StructVisionModel

    layers, hidden, ffn = tiny.pix2struct
    config = Pix2StructVisionConfig(
        hidden_size=hidden, patch_embed_hidden_size=3 * tiny.pix2struct_patch**2, d_ff=ffn, d_kv=64, seq_len=tiny.rows,
        num_hidden_layers=layers, num_attention_heads=hidden // 64,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return Pix2StructVisionModel(config)


def _of_module(module: Any, prefix: str = "") -> dict[str, tuple[int, ...]]:
    return {f"{prefix}{name}": tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _convnext_shapes(tiny: TinyEagle) -> dict[str, tuple[int, ...]]:
    found, before = dict[str, tuple[int, ...]](), tiny.widths[0]
    found |= {"stem.0.weight": (before, 3, 4, 4), "stem.0.bias": (before,)}
    found |= {"stem.1.weight": (before,), "stem.1.bias": (before,)}
    for stage, (blocks, width) in enumerate(zip(tiny.blocks, tiny.widths, strict=True)):
        p = f"stages.{stage}"
        if stage:
            found |= {f"{p}.downsample.0.weight": (before,), f"{p}.downsample.0.bias": (before,)}
            found |= {f"{p}.downsample.1.weight": (width, before, 2, 2), f"{p}.downsample.1.bias": (width,)}
        for b in (f"{p}.blocks.{number}" for number in range(blocks)):
            found |= {f"{b}.weight": (width,), f"{b}.conv_dw.weight": (width, 1, 7, 7), f"{b}.conv_dw.bias": (width,)}
            found |= {f"{b}.norm.weight": (width,), f"{b}.norm.bias": (width,)}
            found |= {f"{b}.mlp.fc1.weight": (4 * width, width), f"{b}.mlp.fc1.bias": (4 * width,)}
            found |= {f"{b}.mlp.fc2.weight": (width, 4 * width), f"{b}.mlp.fc2.bias": (width,)}
        before = width
    head = {"head.norm.weight": (before,), "head.norm.bias": (before,), "head.fc.weight": (10, before)}  # unused
    return found | head


def _eva_shapes(tiny: TinyEagle) -> dict[str, tuple[int, ...]]:
    layers, hidden, ffn = tiny.eva
    found: dict[str, tuple[int, ...]] = {"pos_embed": (1, tiny.eva_positions**2 + 1, hidden)}
    found |= {"patch_embed.proj.weight": (hidden, 3, 16, 16), "patch_embed.proj.bias": (hidden,)}
    for b in (f"blocks.{layer}" for layer in range(layers)):
        for name in ("norm1", "norm2"):
            found |= {f"{b}.{name}.weight": (hidden,), f"{b}.{name}.bias": (hidden,)}
        found |= {f"{b}.attn.{part}_proj.weight": (hidden, hidden) for part in "qkv"}
        found |= {f"{b}.attn.{part}_bias": (hidden,) for part in "qv"}
        found |= {f"{b}.attn.proj.weight": (hidden, hidden), f"{b}.attn.proj.bias": (hidden,)}
        for name in ("w1", "w2"):
            found |= {f"{b}.mlp.{name}.weight": (ffn, hidden), f"{b}.mlp.{name}.bias": (ffn,)}
        found |= {f"{b}.mlp.ffn_ln.weight": (ffn,), f"{b}.mlp.ffn_ln.bias": (ffn,)}
        found |= {f"{b}.mlp.w3.weight": (hidden, ffn), f"{b}.mlp.w3.bias": (hidden,)}
    return found


_SHAPES: dict[str, Any] = {
    "clip": lambda tiny: _of_module(_clip_module(tiny), "vision_model."), "convnext": _convnext_shapes,
    "sam": lambda tiny: _of_module(_sam_module(tiny)), "eva02": _eva_shapes,
    "pix2struct": lambda tiny: _of_module(_pix2struct_module(tiny)),
}  # fmt: skip


def eva_angles(head: int, side: int) -> Tensor:
    """EVA-02's angles in a square of patches [patches, head]: by row and by column, each twice for a pair."""
    rates = 1.0 / (10000 ** (torch.arange(0, head // 2, 2).float() / (head // 2)))
    along = torch.einsum("i,j->ij", torch.arange(side) / side * TRAINED, rates).repeat_interleave(2, -1)
    rows, columns = along[:, None].expand(-1, side, -1), along[None].expand(side, -1, -1)
    return torch.cat((rows, columns), -1).reshape(side**2, head)


class Judge:
    """The model stated once more: the five towers, the projector, and transformers' llama without a cache."""

    def __init__(self, folder: Path, tiny: TinyEagle, seed: int = 0) -> None:
        import sentencepiece
        from transformers import LlavaImageProcessorPil, Pix2StructImageProcessorPil

        torch.set_num_threads(1)
        self.tiny, self.weights = tiny, weights_of(tiny, seed)
        self.words = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        self.llama = _llama(tiny)
        own = {name: w for name, w in self.weights.items() if "vision_tower" not in name and "mm_" not in name}
        self.llama.load_state_dict(own)
        side = {"height": tiny.image, "width": tiny.image}
        self.processor = LlavaImageProcessorPil(
            do_pad=True, size={"shortest_edge": tiny.image}, crop_size=side, image_mean=MEAN, image_std=STD
        )
        patch = {"height": tiny.pix2struct_patch, "width": tiny.pix2struct_patch}
        self.cutter = Pix2StructImageProcessorPil(patch_size=patch, max_patches=CUT, is_vqa=False)
        self.clip_model, self.sam_model, self.pix2struct_model = (
            module(tiny) for module in (_clip_module, _sam_module, _pix2struct_module)
        )
        for number, module, prefix in (
            (0, self.clip_model, "vision_model."), (2, self.sam_model, ""), (4, self.pix2struct_model, ""),
        ):  # fmt: skip
            module.load_state_dict({n.removeprefix(prefix): w for n, w in self.own(number).items()})
        for module in (self.llama, self.clip_model, self.sam_model, self.pix2struct_model):
            module.train(False)

    def own(self, number: int) -> dict[str, Tensor]:
        """The weights of a tower by their names in it."""
        prefix = f"model.vision_tower.vision_towers.{number}.vision_tower."
        return {name.removeprefix(prefix): w for name, w in self.weights.items() if name.startswith(prefix)}

    def pixels(self, images: list[Image.Image]) -> Tensor:
        """[images, 3, side, side]."""
        parts = [self.processor([image], return_tensors="pt")["pixel_values"] for image in images]
        return torch.cat(parts).float()

    # ---- the towers, each [images, 3, side, side] to [images, tokens, width] ---------------------------------------

    @torch.inference_mode()
    def tower(self, name: str, pixels: Tensor) -> Tensor:
        """A tower's features on the grid that all share."""
        found: Tensor = getattr(self, f"_{name}")(pixels)
        if found.ndim == 3:  # [images, places, channels]
            side = math.isqrt(found.shape[1])
            found = found.transpose(1, 2).reshape(len(found), -1, side, side)
        if found.shape[-1] != self.tiny.grid:
            found = F.interpolate(found, (self.tiny.grid,) * 2, mode="bilinear", align_corners=True)
        return found.flatten(2, 3).transpose(1, 2)

    def _clip(self, pixels: Tensor) -> Tensor:
        x = F.interpolate(pixels, (CLIP_SIDE,) * 2, mode="bilinear", align_corners=True)
        own = self.clip_model.embeddings
        patches = own.patch_embedding(x).flatten(2).transpose(1, 2)
        x = torch.cat((own.class_embedding.expand(len(x), 1, -1), patches), 1)
        table = own.position_embedding.weight[None]
        if table.shape[1] != x.shape[1]:
            old, new = self.tiny.clip_positions, math.isqrt(x.shape[1] - 1)
            grid = table[:, 1:].reshape(1, old, old, -1).permute(0, 3, 1, 2)
            grid = F.interpolate(grid, (new, new), mode="bicubic", antialias=True)
            table = torch.cat((table[:, :1], grid.permute(0, 2, 3, 1).reshape(1, new**2, -1)), 1)
        x = self.clip_model.pre_layrnorm((x + table)[:, 1:])
        for layer in self.clip_model.encoder.layers:
            x = layer(x, None)
        return x

    def _convnext(self, pixels: Tensor) -> Tensor:
        w = self.own(1)

        def norm(x: Tensor, name: str) -> Tensor:
            return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

        def norm2d(x: Tensor, name: str) -> Tensor:
            return norm(x.permute(0, 2, 3, 1), name).permute(0, 3, 1, 2)

        x = norm2d(F.conv2d(pixels, w["stem.0.weight"], w["stem.0.bias"], stride=4), "stem.1")
        for stage, blocks in enumerate(self.tiny.blocks):
            p = f"stages.{stage}"
            if stage:
                x = norm2d(x, f"{p}.downsample.0")
                x = F.conv2d(x, w[f"{p}.downsample.1.weight"], w[f"{p}.downsample.1.bias"], stride=2)
            for b in (f"{p}.blocks.{number}" for number in range(blocks)):
                kernel = w[f"{b}.conv_dw.weight"]
                y = F.conv2d(x, kernel, w[f"{b}.conv_dw.bias"], padding=3, groups=len(kernel)).permute(0, 2, 3, 1)
                y = F.linear(norm(y, f"{b}.norm"), w[f"{b}.mlp.fc1.weight"], w[f"{b}.mlp.fc1.bias"])
                y = F.linear(F.gelu(y), w[f"{b}.mlp.fc2.weight"], w[f"{b}.mlp.fc2.bias"]).permute(0, 3, 1, 2)
                x = x + y * w[f"{b}.weight"].reshape(1, -1, 1, 1)
        return x

    def _sam(self, pixels: Tensor) -> Tensor:
        x = self.sam_model(pixels).last_hidden_state.permute(0, 3, 1, 2)
        return F.pixel_unshuffle(x, 2)

    def _eva02(self, pixels: Tensor) -> Tensor:
        w, heads, window = self.own(3), self.tiny.eva_heads, self.tiny.eva_window

        def norm(x: Tensor, name: str) -> Tensor:
            return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

        def attention(x: Tensor, name: str) -> Tensor:
            """[windows, side, side, hidden]."""
            side, flat = x.shape[1], x.flatten(1, 2)
            angles = eva_angles(x.shape[-1] // heads, side)

            def turned(z: Tensor) -> Tensor:
                first, second = z.unflatten(-1, (-1, 2)).unbind(-1)
                return z * angles.cos() + torch.stack((-second, first), -1).flatten(-2) * angles.sin()

            biases = {"q": w[f"{name}.q_bias"], "k": None, "v": w[f"{name}.v_bias"]}
            parts = [F.linear(flat, w[f"{name}.{part}_proj.weight"], bias) for part, bias in biases.items()]
            q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
            weights = (turned(q) * q.shape[-1] ** -0.5 @ turned(k).transpose(2, 3)).softmax(-1)
            seen = (weights @ v).transpose(1, 2).flatten(2)
            return F.linear(seen, w[f"{name}.proj.weight"], w[f"{name}.proj.bias"]).unflatten(1, (side, side))

        x = F.conv2d(pixels, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=16)
        x, side, old = x.permute(0, 2, 3, 1), x.shape[-1], self.tiny.eva_positions
        table = w["pos_embed"][:, 1:].reshape(1, old, old, -1)
        if old != side:
            table = F.interpolate(table.permute(0, 3, 1, 2), (side, side), mode="bicubic", align_corners=False)
            table = table.permute(0, 2, 3, 1)
        x = x + table
        for layer in range(self.tiny.eva[0]):
            b = f"blocks.{layer}"
            y = norm(x, f"{b}.norm1")
            if layer % 3 == 2:
                y = attention(y, f"{b}.attn")
            else:
                along = -(-side // window)
                y = F.pad(y, (0, 0, 0, along * window - side, 0, along * window - side))
                y = y.reshape(len(x), along, window, along, window, -1).transpose(2, 3).flatten(0, 2)
                y = attention(y, f"{b}.attn").unflatten(0, (len(x), along, along)).transpose(2, 3)
                y = y.reshape(len(x), along * window, along * window, -1)[:, :side, :side]
            x = x + y
            y = norm(x, f"{b}.norm2")
            one, two = (F.linear(y, w[f"{b}.mlp.{part}.weight"], w[f"{b}.mlp.{part}.bias"]) for part in ("w1", "w2"))
            y = norm(F.silu(one) * two, f"{b}.mlp.ffn_ln")
            x = x + F.linear(y, w[f"{b}.mlp.w3.weight"], w[f"{b}.mlp.w3.bias"])
        return x.permute(0, 3, 1, 2)

    def _pix2struct(self, pixels: Tensor) -> Tensor:
        mean, std = (torch.tensor(part).reshape(1, 3, 1, 1) for part in (MEAN, STD))
        pictures = [*((pixels * std + mean) * 255.0).float().numpy()]
        cut = self.cutter(pictures, return_tensors="pt", input_data_format="channels_first")
        x = self.pix2struct_model(cut["flattened_patches"], cut["attention_mask"]).last_hidden_state[:, : 45 * 45]
        return x.transpose(1, 2).reshape(len(x), -1, 45, 45)

    # ---- the rest ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def features(self, pixels: Tensor) -> Tensor:
        """[images, tokens, hidden of the decoder]."""
        x, w = torch.cat([self.tower(name, pixels) for name in TOWERS], -1), self.weights
        x = F.linear(x, w["model.mm_projector.0.weight"], w["model.mm_projector.0.bias"])
        return F.linear(F.gelu(x), w["model.mm_projector.2.weight"], w["model.mm_projector.2.bias"])

    def ids(self, question: str, images: int) -> list[int]:
        """The prompt, an image's tokens as 0: each piece between images is tokenised alone, after one BOS."""
        ids = [1]
        for number, piece in enumerate(VICUNA.format("<image>\n" * images, question).split("<image>")):
            ids += [0] * self.tiny.tokens * bool(number) + self.words.encode(piece)
        return ids

    @torch.inference_mode()
    def greedy(self, images: list[Image.Image], question: str, k: int | None, count: int) -> tuple[list[int], Tensor]:
        """The ids of an answer with image tokens gone from layer `k` on, and the logits [count, vocab] behind them."""
        ids, inner = self.ids(question, len(images)), self.llama.model
        is_image = torch.tensor(ids) == 0
        prompt = inner.embed_tokens(torch.tensor(ids))
        if images:
            prompt[is_image] = self.features(self.pixels(images)).flatten(0, 1)
        found, logits = list[int](), list[Tensor]()
        for _ in range(count):
            x = torch.cat((prompt, inner.embed_tokens(torch.tensor(found, dtype=torch.int64))))[None]
            gone = torch.cat((is_image, torch.zeros(len(found), dtype=torch.bool)))
            positions = torch.arange(x.shape[1])
            for number, layer in enumerate(inner.layers, 1):
                if number == k:
                    x, positions = x[:, ~gone], positions[~gone]
                mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None]
                rope = inner.rotary_emb(x, position_ids=positions[None])
                x = layer(x, attention_mask=mask, position_ids=positions[None], position_embeddings=rope)
            logits.append(self.llama.lm_head(inner.norm(x[0, -1])))
            found.append(int(logits[-1].argmax()))
        return found, torch.stack(logits)


def rewritten_config(folder: Path, **changed: Any) -> None:
    """Change keys of a checkpoint's `config.json`."""
    path = folder / "config.json"
    write_json(path, {**read_json(path), **changed})
