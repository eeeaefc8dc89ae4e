"""A small pi0 of transformers' own modules: its sizes, its training by flow matching, and its checkpoint."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.toy_robot.tabletop import (
    COLORS,
    FORMS,
    HORIZON,
    SIDE,
    Numbers,
    Pictures,
    draw_hands,
    draw_shapes,
    draw_tables,
    instruction,
    patch_labels,
    wanted_actions,
    with_hands,
)
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import DynamicCache, PI0Config, PI0ForConditionalGeneration

SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


@dataclass(frozen=True)
class Shape:
    """Sizes of the model: the decoder's and, of the same depth, the expert's; the tower's."""

    layers: int = 6
    hidden: int = 64
    ffn: int = 128
    heads: int = 4
    head_dim: int = 16
    tower_layers: int = 2
    patch: int = 12
    steps: int = 10

    @property
    def grid(self) -> int:
        return SIDE // self.patch


@dataclass(frozen=True)
class Schedule:
    """A training: `draws` of noise and time for each scene; `none` of the batches of `ks` keep their image tokens."""

    steps: int = 1000
    batch: int = 32
    draws: int = 2
    lr: float = 2e-3
    none: float = 0.3
    ks: tuple[int, ...] = ()


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE in which each word of an instruction is one token; the image's is the last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=[*SPECIAL.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [instruction(c, f) + "\n" for c in range(len(COLORS)) for f in range(len(FORMS))], trainer
    )
    tokenizer.add_special_tokens([AddedToken("<image>", special=True, normalized=False)])
    return tokenizer


def instruction_ids(tokenizer: Tokenizer) -> Tensor:
    """The tokens behind the images, [colours, forms, tokens]."""
    texts = [[f"<s>{instruction(c, f)}\n" for f in range(len(FORMS))] for c in range(len(COLORS))]
    return torch.tensor([[tokenizer.encode(t, add_special_tokens=False).ids for t in row] for row in texts])


def make_config(shape: Shape, vocab: int) -> PI0Config:
    """`vocab` counts the image token, which lies behind the decoder's table."""
    shared = {
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": 1,
        "head_dim": shape.head_dim,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "model_type": "gemma",
        "max_position_embeddings": 128,
        "vocab_size": vocab - 1,
    }
    tower = {
        "model_type": "siglip_vision_model",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.tower_layers,
        "num_attention_heads": shape.heads,
        "image_size": SIDE,
        "patch_size": shape.patch,
        "vision_use_head": False,
    }
    vlm = {
        "model_type": "paligemma",
        "projection_dim": shape.hidden,
        "hidden_size": shape.hidden,
        "image_token_index": vocab - 1,
        "text_config": shared,
        "vision_config": tower,
    }
    return PI0Config(
        vlm_config=vlm,
        dit_config=shared,
        chunk_size=HORIZON,
        max_state_dim=2,
        max_action_dim=2,
        num_inference_steps=shape.steps,
    )


def make_model(shape: Shape, vocab: int, seed: int) -> PI0ForConditionalGeneration:
    """A new model whose layers begin at the scale of their inputs."""
    torch.manual_seed(seed)
    model = PI0ForConditionalGeneration(make_config(shape, vocab))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2:
                continue
            closing = name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight", "fc2.weight"))
            inputs = 1.0 if "position_embedding" in name else weight[0].numel()
            weight.normal_(0, inputs**-0.5 * ((2 * shape.layers) ** -0.5 if closing else 1))
    return model


@dataclass(frozen=True)
class Units:
    """Means and deviations of states and actions, as in the checkpoint's processor_config.json."""

    state_mean: list[float]
    state_std: list[float]
    actions_mean: list[float]
    actions_std: list[float]


def measure_units() -> Units:
    rng = np.random.default_rng(0)
    tables = draw_tables(rng, 10_000)
    hands = draw_hands(rng, tables)
    actions = wanted_actions(tables.targets, hands).reshape(-1, 2)
    return Units(*(getattr(each, how)(0).tolist() for each in (hands, actions) for how in ("mean", "std")))


class Robot(nn.Module):
    """A model with what its training needs: the units, and heads that name what each image token shows."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.tokenizer = make_tokenizer()
        self.units = measure_units()
        self.ids = instruction_ids(self.tokenizer)
        self.pi0 = make_model(shape, self.tokenizer.get_vocab_size(), seed)
        self.named = nn.Linear(shape.hidden, len(COLORS) + len(FORMS) + 4)

    def tokens(self, pictures: Pictures) -> Tensor:
        """Image tokens [batch, cameras * patches, hidden] of pictures [batch, cameras, side, side, 3]."""
        pixels = torch.from_numpy(pictures).flatten(0, 1).permute(0, 3, 1, 2).float() / 127.5 - 1
        found = self.pi0.model.vlm.get_image_features(pixels).pooler_output
        return found.reshape(len(pictures), -1, self.shape.hidden)

    def prompt(self, tokens: Tensor, ids: Tensor, k: int | None) -> tuple[DynamicCache, int]:
        """K and V of the prompt in every layer, without image tokens from layer `k` on; and the prompt's length."""
        decoder = self.pi0.model.vlm.language_model
        rows = torch.cat((tokens, decoder.embed_tokens(ids)), 1)
        length = rows.shape[1]
        images = tokens.shape[1]
        cache = DynamicCache()
        rope = decoder.rotary_emb(rows, position_ids=torch.arange(length)[None])
        for number, layer in enumerate(decoder.layers, 1):
            if number == k:
                rows = rows[:, images:]
                rope = tuple(table[:, images:] for table in rope)
            mask = rows.new_zeros(1, 1, rows.shape[1], rows.shape[1])
            rows = layer(rows, attention_mask=mask, position_embeddings=rope, past_key_values=cache)
        return cache, length

    def velocity(self, cache: DynamicCache, length: int, state: Tensor, actions: Tensor, times: Tensor) -> Tensor:
        """The expert's answer [batch, draws, horizon, 2] to several noisy actions [batch, draws, horizon, 2].

        Takes the cache: its own K and V are behind the prompt's afterwards.
        """
        batch, draws = times.shape
        rows = self.pi0.embed_action_time(
            state.repeat_interleave(draws, 0), actions.flatten(0, 1), times.flatten()
        ).unflatten(0, (batch, draws))
        rows = torch.cat((rows[:, 0, :1], rows[:, :, 1:].flatten(1, 2)), 1)
        draw = torch.cat((torch.tensor([-1]), torch.arange(draws).repeat_interleave(HORIZON)))
        hidden = (draw[:, None] != draw) & (draw >= 0)
        own = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
        positions = length + torch.cat((torch.zeros(1, dtype=torch.long), torch.arange(1, HORIZON + 1).repeat(draws)))
        expert = self.pi0.model.dit
        rope = expert.rotary_emb(rows, position_ids=positions[None])
        for layer, kept in zip(expert.layers, cache.layers, strict=True):
            mask = F.pad(own, (kept.keys.shape[2], 0))[None, None]
            rows = layer(rows, attention_mask=mask, position_embeddings=rope, past_key_values=cache)
        return self.pi0.action_out_proj(expert.norm(rows)[:, 1:]).unflatten(1, (draws, HORIZON))

    def normalized(self, values: Numbers, what: str) -> Tensor:
        mean, std = (np.array(getattr(self.units, f"{what}_{kind}"), np.float32) for kind in ("mean", "std"))
        return torch.from_numpy((values - mean) / std)

    def loss(self, rng: np.random.Generator, schedule: Schedule, k: int | None) -> tuple[Tensor, Tensor]:
        """Flow matching's loss on new scenes, and that of the heads on image tokens."""
        tables = draw_tables(rng, schedule.batch)
        hands = draw_hands(rng, tables)
        tokens = self.tokens(with_hands(draw_shapes(tables), hands))
        cache, length = self.prompt(tokens, self.ids[tables.colors[:, 0], tables.forms[:, 0]], k)
        actions = self.normalized(wanted_actions(tables.targets, hands), "actions")[:, None]
        count = schedule.batch, schedule.draws
        times = torch.from_numpy(rng.beta(1.5, 1, count).astype(np.float32)) * 0.999 + 0.001  # as pi0 draws it
        noise = torch.from_numpy(rng.standard_normal((*count, HORIZON, 2), np.float32))
        at = times[..., None, None]
        found = self.velocity(cache, length, self.normalized(hands, "state"), at * noise + (1 - at) * actions, times)
        names, centres = patch_labels(tables, self.shape.grid)
        color, form, centre = self.named(tokens).split((len(COLORS) + 1, len(FORMS) + 1, 2), -1)
        wanted = torch.from_numpy(names)
        aside = F.mse_loss(centre * (wanted[..., :1] > 0), torch.from_numpy(centres))
        for each, number in ((color, 0), (form, 1)):
            aside = aside + F.cross_entropy(each.flatten(0, 1), wanted[..., number].flatten())
        return F.mse_loss(found, noise - actions), aside

    @torch.inference_mode()
    def act(self, pictures: Pictures, ids: Tensor, hand: Numbers, noise: Numbers, k: int | None) -> Numbers:
        """Normalised actions [horizon, 2], as `model.act` gives them, by the forward pass of training."""
        actions = torch.from_numpy(noise)[None, None]
        state = self.normalized(hand[None], "state")
        for step in range(self.shape.steps):
            cache, length = self.prompt(self.tokens(pictures[None]), ids[None], k)
            time = torch.tensor([[1 - step / self.shape.steps]])
            actions = actions - self.velocity(cache, length, state, actions, time) / self.shape.steps
        return actions[0, 0].numpy()

    def save(self, folder: Path) -> Path:
        """Write a checkpoint as `vtx-export` reads it."""
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        size = {"max_height": SIDE, "max_width": SIDE}, {"height": SIDE, "width": SIDE}
        processor = {"image_processor_type": "PI0ImageProcessor", "size": size[0], "pad_size": size[1]}
        for name, settings in (
            ("tokenizer_config", {**SPECIAL, "tokenizer_class": "PreTrainedTokenizerFast"}),
            ("config", self.pi0.config.to_dict() | {"architectures": ["PI0ForConditionalGeneration"]}),
            ("processor_config", {"image_processor": processor, **asdict(self.units)}),
        ):
            (folder / f"{name}.json").write_text(json.dumps(settings), encoding="utf-8")
        save_file({n: t.contiguous() for n, t in self.pi0.state_dict().items()}, folder / "model.safetensors")
        return folder


def train(robot: Robot, schedule: Schedule, seed: int, log: int = 100) -> dict[str, Any]:
    """Train in place; the seed decides scenes, noise and each batch's K. What is recorded of it."""
    rng = np.random.default_rng(seed)
    depths = np.random.default_rng((seed, 1))
    begun = time.process_time()
    optimizer = torch.optim.AdamW(robot.parameters(), lr=schedule.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    mean = np.zeros(2)
    for step in range(schedule.steps):
        share = step / schedule.steps
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr * min(1, (step + 1) / 50, (1 - share) / 0.5)
        keeps = not schedule.ks or depths.random() < schedule.none
        flow, aside = robot.loss(rng, schedule, None if keeps else int(depths.choice(schedule.ks)))
        optimizer.zero_grad()
        (flow + 0.3 * aside).backward()
        nn.utils.clip_grad_norm_(robot.parameters(), 1.0)
        optimizer.step()
        now = np.array([flow.item(), aside.item()])
        mean = now if step == 0 else 0.98 * mean + 0.02 * now
        if (step + 1) % log == 0:
            print(f"  step {step + 1}: {mean.round(3)}, {time.process_time() - begun:.0f} s of processor", flush=True)
    return {"flow": mean[0], "heads": mean[1], "processor_seconds": time.process_time() - begun}
