"""OpenVLA: tiny checkpoints in its authors' layout, and the model stated in plain PyTorch, timm's towers included."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from tests.support.bundles import ORT, export
from tests.support.json_files import write_json
from tests.support.tiny import random_tensor
from vtx.exporter.checkpoint.families import openvla
from vtx.tools.model.vision import VisionConfig

KS, WORDS, FASTV, NUMBERS = (3, 5, 8), "Pick the red Out", "fastv:k=2,ratio=0.5", 7
EMPTY, PAD, PIECES = 29871, 32000, 32000
DINO, SIGLIP = "tiny_reg4_dinov2", "tiny_siglip"
MEANS, STDS = [[0.485, 0.456, 0.406], [0.5, 0.5, 0.5]], [[0.229, 0.224, 0.225], [0.5, 0.5, 0.5]]
BRIDGE = {
    "action": {
        "q01": [-0.5, -1.5, 0.0, -2.0, 1.0, -0.25, 0.0], "q99": [0.5, 2.5, 3.0, -1.0, 1.5, 0.75, 1.0],
        "mask": [True, True, True, True, True, True, False], "mean": [0.0] * 7,
    },
    "num_transitions": 12,
}  # fmt: skip
OTHER = {"action": {"q01": [0.0] * 3, "q99": [4.0, 2.0, 1.0]}}


@dataclass(frozen=True)
class TinyOpenVLA:
    """`dino` and `siglip` are (layers, hidden, ffn, heads) of the towers."""

    layers: int = 8
    hidden: int = 64
    ffn: int = 96
    heads: int = 4
    kv_heads: int = 4
    image: int = 56
    patch: int = 14
    registers: int = 4
    dino: tuple[int, int, int, int] = (3, 32, 48, 2)
    siglip: tuple[int, int, int, int] = (4, 24, 40, 2)
    bins: int = 256
    context: int = 256
    norm_stats: Mapping[str, Any] = field(default_factory=lambda: {"bridge_orig": BRIDGE})

    @property
    def towers(self) -> dict[str, VisionConfig]:
        """What stands in place of timm's sizes."""
        (a, b, c, d), (e, f, g, h) = self.dino, self.siglip
        shared = (self.image, self.patch, 1e-6, "gelu")
        return {
            DINO: VisionConfig("dinov2", a, b, c, d, *shared, layer_scale=True, registers=self.registers),
            SIGLIP: VisionConfig("siglip", e, f, g, h, *shared),
        }

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2


def export_openvla(folder: Path) -> tuple[Path, Path]:
    """A checkpoint of a `TinyOpenVLA()`, and its bundle with the K of `KS` and `FASTV`, for libvtx too."""
    tiny, made = TinyOpenVLA(), folder / "bundle"
    checkpoint, patch = make_openvla(folder / "checkpoint", tiny), with_towers(tiny)
    export(checkpoint, made, KS, reductions=(FASTV,), dialects=(*ORT, "plain"))
    patch.undo()
    return checkpoint, made


def drawn(number: int) -> tuple[TinyOpenVLA, tuple[int, ...]]:
    """A configuration by its number, with up to three K."""
    chance = random.Random(number)
    heads, patch, grid = chance.choice([2, 4]), chance.choice([8, 14]), chance.randint(2, 5)
    low = [chance.uniform(-2, 0) for _ in range(chance.randint(1, 9))]
    statistics = {"action": {"q01": low, "q99": [x + chance.uniform(0, 3) for x in low]}}
    tiny = TinyOpenVLA(
        layers=chance.randint(3, 8), hidden=chance.choice([32, 64]), heads=heads, kv_heads=chance.choice([1, heads]),
        ffn=chance.choice([48, 96]), image=patch * grid + chance.randint(0, patch - 1), patch=patch,
        registers=chance.randint(1, 5), dino=(chance.randint(2, 4), 16 * chance.randint(1, 3), 40, 2),
        siglip=(chance.randint(2, 4), 8 * chance.randint(2, 5), 56, 4), bins=chance.choice([64, 256]),
        norm_stats={"bridge_orig": statistics},
    )  # fmt: skip
    return tiny, tuple(sorted(chance.sample(range(2, tiny.layers + 1), min(3, tiny.layers - 1))))


def with_towers(tiny: TinyOpenVLA) -> pytest.MonkeyPatch:
    """The sizes of this model's towers in place of timm's."""
    patch = pytest.MonkeyPatch()
    for name, tower in tiny.towers.items():
        patch.setitem(openvla.TOWERS, name, tower)
    return patch


def config_of(tiny: TinyOpenVLA) -> dict[str, Any]:
    return {
        "architectures": ["OpenVLAForActionPrediction"], "model_type": "openvla", "torch_dtype": "bfloat16",
        "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"},
        "arch_specifier": "no-align+fused-gelu-mlp",
        "vision_backbone_id": "dinosiglip-vit-so-224px", "llm_backbone_id": "llama2-7b-pure",
        "timm_model_ids": [DINO, SIGLIP], "timm_override_act_layers": [None, None], "pad_token_id": PAD,
        "image_sizes": [tiny.image] * 2, "image_resize_strategy": "resize-naive", "use_fused_vision_backbone": True,
        "n_action_bins": tiny.bins, "pad_to_multiple_of": 64, "norm_stats": dict(tiny.norm_stats),
        "text_config": {
            "model_type": "llama", "vocab_size": PIECES + 64, "hidden_size": tiny.hidden, "rms_norm_eps": 1e-6,
            "intermediate_size": tiny.ffn, "num_hidden_layers": tiny.layers, "num_attention_heads": tiny.heads,
            "num_key_value_heads": tiny.kv_heads, "max_position_embeddings": tiny.context, "pad_token_id": PAD,
        },
    }  # fmt: skip


def processor_of(tiny: TinyOpenVLA) -> dict[str, Any]:
    return {
        "image_processor_type": "PrismaticImageProcessor", "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, tiny.image, tiny.image]] * 2, "interpolations": ["bicubic"] * 2, "means": MEANS,
        "stds": STDS, "use_fused_vision_backbone": True,
    }  # fmt: skip


def make_openvla(folder: Path, tiny: TinyOpenVLA, seed: int = 0, **changed: Any) -> Path:
    """Write a checkpoint; `changed` are keys of `config.json`, None to leave one out."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    written = {key: value for key, value in {**config_of(tiny), **changed}.items() if value is not None}
    write_json(folder / "config.json", written)
    write_json(folder / "preprocessor_config.json", processor_of(tiny))
    _write_tokenizer(folder)
    save_file(weights_of(tiny, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_tokenizer(folder: Path) -> None:
    """A sentencepiece model of Llama's kind and size: the mark of a space is token 29871, letters come behind it."""
    from transformers.convert_slow_tokenizer import import_protobuf

    words = ["▁In", "▁What", "▁action", "▁should", "▁the", "▁robot", "▁take", "▁to", "▁pick", "▁red", "Out"]
    merged = dict.fromkeys(word[:end] for word in words for end in range(2, len(word) + 1))
    letters = ["▁", *"etaoinshrdlucmfwypvbgkqjxzUSERAITNWO:?,.\n"]
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *merged]
    filler = (chr(0x20000 + number) for number in range(PIECES))  # which no merge makes
    pieces += [next(filler) for _ in range(EMPTY - len(pieces))] + letters
    pieces += [next(filler) for _ in range(PIECES - len(pieces))]
    model = import_protobuf().ModelProto()  # type: ignore[no-untyped-call]
    kinds = model.SentencePiece
    for number, piece in enumerate(pieces):
        kind = kinds.CONTROL if number in (1, 2) else kinds.NORMAL
        kind = kinds.UNKNOWN if not number else kinds.BYTE if piece.startswith("<0x") else kind
        model.pieces.add(piece=piece, score=0.0 if number < 259 else float(259 - number), type=kind)
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = 2, True
    model.trainer_spec.vocab_size = len(pieces)
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = False
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {0: "<unk>", 1: "<s>", 2: "</s>", PAD: "<PAD>"}
    settings = {
        "tokenizer_class": "LlamaTokenizer", "pad_token": "<PAD>", "legacy": False,
        "added_tokens_decoder": {str(id): {"content": token, **flags} for id, token in added.items()},
    }  # fmt: skip
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "added_tokens.json", {"<PAD>": PAD})


def weights_of(tiny: TinyOpenVLA, seed: int) -> dict[str, Tensor]:
    """Random weights by their authors' names."""
    shapes = dict[str, tuple[int, ...]]()
    for tower, (layers, hidden, ffn, _) in (("featurizer", tiny.dino), ("fused_featurizer", tiny.siglip)):
        p = f"vision_backbone.{tower}."
        shapes |= {f"{p}patch_embed.proj.weight": (hidden, 3, tiny.patch, tiny.patch), f"{p}norm.weight": (hidden,)}
        shapes |= {f"{p}patch_embed.proj.bias": (hidden,), f"{p}pos_embed": (1, tiny.tokens, hidden)}
        if tower == "featurizer":
            shapes |= {f"{p}cls_token": (1, 1, hidden), f"{p}reg_token": (1, tiny.registers, hidden)}
        for layer in range(layers):
            b = f"{p}blocks.{layer}."
            for name, out, into in (
                ("attn.qkv", 3 * hidden, hidden), ("attn.proj", hidden, hidden), ("mlp.fc1", ffn, hidden),
                ("mlp.fc2", hidden, ffn),
            ):  # fmt: skip
                shapes |= {f"{b}{name}.weight": (out, into), f"{b}{name}.bias": (out,)}
            for norm in ("norm1", "norm2"):
                shapes |= {f"{b}{norm}.weight": (hidden,), f"{b}{norm}.bias": (hidden,)}
            if tower == "featurizer":
                shapes |= {f"{b}ls{half}.scale_factor": (hidden,) for half in (1, 2)}
    width, h = tiny.dino[1] + tiny.siglip[1], tiny.hidden
    for number, (out, into) in enumerate(((4 * width, width), (h, 4 * width), (h, h)), 1):
        shapes |= {f"projector.fc{number}.weight": (out, into), f"projector.fc{number}.bias": (out,)}
    shapes |= {f"language_model.{name}": tuple(t.shape) for name, t in _llama(tiny).state_dict().items()}
    found = {}
    for name, shape in shapes.items():
        value = random_tensor(name, shape, seed)
        if name.endswith(("pos_embed", "reg_token")):
            value = random_tensor("cls_token" + name, shape, seed) * 0.5
        if name.endswith("scale_factor"):
            value = 1 + 0.2 * value
        if name == "language_model.model.norm.weight":
            value = value * 3
        if name == "language_model.lm_head.weight":
            value[PIECES - tiny.bins : PIECES] *= 3  # most answers are actions
        found[name] = torch.from_numpy(np.ascontiguousarray(value, np.float32))
    return found


def _llama(tiny: TinyOpenVLA) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{k: v for k, v in config_of(tiny)["text_config"].items() if k != "model_type"})
    config._attn_implementation = "eager"
    with torch.device("meta"):
        return LlamaForCausalLM(config)


class Judge:
    """The model stated once more: timm's towers in plain PyTorch, and transformers' llama without a cache."""

    def __init__(self, folder: Path, tiny: TinyOpenVLA, seed: int = 0) -> None:
        import sentencepiece
        from transformers import LlamaForCausalLM

        torch.set_num_threads(1)
        self.tiny, self.weights = tiny, weights_of(tiny, seed)
        self.words = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        self.llama: Any = LlamaForCausalLM(_llama(tiny).config)
        own = "language_model."
        self.llama.load_state_dict({n.removeprefix(own): w for n, w in self.weights.items() if n.startswith(own)})
        self.llama.train(False)

    def ids(self, instruction: str) -> list[int]:
        """The prompt's ids but those of the image, which stands behind the first."""
        text = f"In: What action should the robot take to {instruction.lower()}?\nOut:"
        ids = [1, *self.words.encode(text)]
        return ids if ids[-1] == EMPTY else [*ids, EMPTY]

    def tower(self, image: Image.Image, number: int) -> Tensor:
        """The patches [patches, hidden] behind the last block but one."""
        tiny, w = self.tiny, self.weights
        layers, _, _, heads = (tiny.dino, tiny.siglip)[number]
        p = ("vision_backbone.featurizer.", "vision_backbone.fused_featurizer.")[number]
        small = image.convert("RGB").resize((tiny.image, tiny.image), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(small)).permute(2, 0, 1).float() / 255
        pixels = (pixels - torch.tensor(MEANS[number])[:, None, None]) / torch.tensor(STDS[number])[:, None, None]
        kernel, bias = w[f"{p}patch_embed.proj.weight"], w[f"{p}patch_embed.proj.bias"]
        x = F.conv2d(pixels[None], kernel, bias, stride=tiny.patch).flatten(2).transpose(1, 2) + w[f"{p}pos_embed"]
        first = 0
        if number == 0:
            x, first = torch.cat((w[f"{p}cls_token"], w[f"{p}reg_token"], x), 1), 1 + tiny.registers

        def linear(y: Tensor, name: str) -> Tensor:
            return F.linear(y, w[f"{name}.weight"], w[f"{name}.bias"])

        def norm(y: Tensor, name: str) -> Tensor:
            return F.layer_norm(y, y.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

        for layer in range(layers - 1):
            b = f"{p}blocks.{layer}."
            one, two = (w.get(f"{b}ls{half}.scale_factor", torch.ones(1)) for half in (1, 2))
            q, k, v = linear(norm(x, f"{b}norm1"), f"{b}attn.qkv").unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            weights = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).softmax(-1)
            x = x + one * linear((weights @ v).transpose(1, 2).flatten(2), f"{b}attn.proj")
            x = x + two * linear(F.gelu(linear(norm(x, f"{b}norm2"), f"{b}mlp.fc1")), f"{b}mlp.fc2")
        return x[0, first:]

    @torch.inference_mode()
    def features(self, image: Image.Image) -> Tensor:
        x, w = torch.cat((self.tower(image, 0), self.tower(image, 1)), -1), self.weights
        for number in (1, 2, 3):
            x = F.gelu(x) if number > 1 else x
            x = F.linear(x, w[f"projector.fc{number}.weight"], w[f"projector.fc{number}.bias"])
        return x

    @torch.inference_mode()
    def logits(
        self, ids: list[int], features: Tensor, k: int | None, asked: int, fastv: tuple[int, int] | None = None
    ) -> Tensor:
        """The logits of the last token, if in the layers from `k` on nothing sees an image token.

        `fastv`: after that layer nothing sees an image token but that many, at which the prompt's last token looks
        most. The prompt is the first `asked` ids.
        """
        inner = self.llama.model
        words = inner.embed_tokens(torch.tensor(ids))
        x = torch.cat((words[:1], features, words[1:]))[None]
        count, images = x.shape[1], slice(1, 1 + len(features))
        last = asked - 1 + len(features)
        rope = inner.rotary_emb(x, position_ids=torch.arange(count)[None])
        gone, mask, before = torch.zeros(count, dtype=torch.bool), x, x
        for number, layer in enumerate(inner.layers, 1):
            if number == k:
                gone[images] = True
            if fastv is not None and number == fastv[0] + 1:
                looks = self._attention(inner.layers[number - 2], before, rope, mask)[:, last, images].mean(0)
                order = looks.argsort(descending=True, stable=True)
                gone[1 + order[fastv[1] :]] = True
            mask = torch.full((count, count), -torch.inf).triu(1)
            mask[:, gone] = -torch.inf
            mask.fill_diagonal_(0.0)  # what has left sees itself alone; nothing reads it
            before = x
            x = layer(x, attention_mask=mask[None, None], position_embeddings=rope)
        logits: Tensor = self.llama.lm_head(inner.norm(x[0, -1]))
        return logits

    @staticmethod
    def _attention(layer: Any, x: Tensor, rope: Any, mask: Tensor) -> Tensor:
        """The attention [heads, n, n] in a layer."""
        found: Tensor = layer.self_attn(
            hidden_states=layer.input_layernorm(x), attention_mask=mask[None, None], position_embeddings=rope
        )[1]
        return found[0]

    def greedy(
        self, image: Image.Image, instruction: str, k: int | None, count: int, fastv: tuple[int, int] | None = None
    ) -> tuple[list[int], list[Tensor]]:
        """The ids of an answer, and the logits that chose each."""
        ids, features, found, logits = self.ids(instruction), self.features(image), list[int](), list[Tensor]()
        for _ in range(count):
            logits.append(self.logits([*ids, *found], features, k, len(ids), fastv))
            found.append(int(logits[-1].argmax()))
        return found, logits

    def actions(self, ids: list[int], statistics: Mapping[str, Any] | None) -> list[float]:
        """What the ids mean in the robot's units, or without statistics, one number at a time."""
        edges, out = np.linspace(-1, 1, self.tiny.bins), list[float]()
        for number, id in enumerate(ids):
            at = min(max(PIECES - id - 1, 0), self.tiny.bins - 2)
            value = (edges[at] + edges[at + 1]) / 2
            if statistics is not None and statistics.get("mask", [True] * len(ids))[number]:
                low, high = statistics["q01"][number], statistics["q99"][number]
                value = 0.5 * (value + 1) * (high - low) + low
            out.append(float(value))
        return out
