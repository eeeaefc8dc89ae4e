"""The decoder as it is trained: transformers' own layers, the image tokens leaving before layer K.

Exactly the runtime's withdrawal: tokens that stay keep their positions, and layers K..N see text alone. The teacher is
the same module without adapters and without withdrawal; no second copy of the model is held.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.reference.model import Encoded
from vtx.exporter.reference.prompts import Source
from vtx.exporter.weights.tensors import CheckpointWeights
from vtx.runtime.errors import UnsupportedModelError
from vtx_tune.options import Learning
from vtx_tune.packing import Row, visible

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTER = "default"
_CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
}


def module_name(canonical: str) -> str:
    """The name in transformers' text model of a weight that the checkpoint's reader calls `canonical`."""
    return "lm_head.weight" if canonical == "head.weight" else canonical.replace("text.", "model.", 1)


def load_text_model(
    source: Source, dtype: torch.dtype, device: torch.device, learning: Learning, mesh: Any = None
) -> Any:
    """The text model of a checkpoint as transformers has it, without towers; layers trained in full are float32.

    With a `mesh` of processes each holds its share of every layer's weights, and all of them for as long as it runs.
    """
    import transformers

    c = source.config.text
    if c.family not in _CLASSES:
        raise UnsupportedModelError(f"text family {c.family!r} is not tuned; vtx-tune knows {', '.join(_CLASSES)}")
    config_class, model_class = (getattr(transformers, name) for name in _CLASSES[c.family])
    config = config_class(
        vocab_size=c.vocab,
        hidden_size=c.hidden,
        intermediate_size=c.ffn,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        hidden_act=c.activation,
        rms_norm_eps=c.eps,
        max_position_embeddings=c.max_positions,
        tie_word_embeddings=c.tied,
        **_family_settings(c),
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = model_class(config)
    model.model.rotary_emb = nn.Identity()  # positions are rotated by the tables of our own configuration
    weights = CheckpointWeights(source.checkpoint)

    def read(shapes: Iterable[tuple[str, Any]], place: torch.device, kind: torch.dtype) -> dict[str, Tensor]:
        return {module_name(name): weights.read(name).to(device=place, dtype=kind) for name, _ in shapes}

    state = read([pair for pair in c.tensors() if ".layers." not in pair[0]], device, dtype)
    if c.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True, strict=False)
    exact = learning.chosen(c.layers) if learning.full else ()
    for number, layer in enumerate(model.model.layers, 1):  # a layer is on the CPU until it is in 4 bits, or shared
        place = torch.device("cpu") if learning.qlora or mesh is not None else device
        state = read(c.layer_tensors(number), place, torch.float32 if number in exact else dtype)
        layer.load_state_dict({name.split(".", 3)[3]: weight for name, weight in state.items()}, assign=True)
        layer.requires_grad_(False)
        if learning.qlora:
            hold_in_4_bits(layer, dtype, device)
        if mesh is not None:
            fully_shard(layer, mesh=mesh)
    model.requires_grad_(False).eval()
    model.is_loaded_in_4bit = learning.qlora  # by which peft puts its adapters on such matrices
    return model


def _family_settings(config: TextConfig) -> dict[str, Any]:
    """The settings that transformers' configuration of a family has beside those of all."""
    if config.family == "llama":
        return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    if config.family == "qwen3":
        return {"attention_bias": config.qkv_bias}
    return {"sliding_window": None} if config.family == "mistral" else {}


def hold_in_4_bits(layer: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Put a layer on `device`, its matrices as 4-bit numbers (NF4) that are widened to `dtype` to multiply."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for block in (layer.self_attn, layer.mlp):
        for name in MATRICES:
            if (wide := getattr(block, name, None)) is None:
                continue
            narrow = Linear4bit(
                wide.in_features,
                wide.out_features,
                wide.bias is not None,
                compute_dtype=dtype,
                quant_type="nf4",
                device="meta",
            )
            narrow.weight = Params4bit(wide.weight.data, requires_grad=False, quant_type="nf4")
            narrow.bias = wide.bias
            setattr(block, name, narrow.to(device))
    layer.to(device)


class WithdrawingDecoder(nn.Module):
    """A decoder over packed questions. Only its trained parameters require gradients."""

    def __init__(self, text: TextConfig, model: Any, learning: Learning, *, seed: int, checkpointing: bool) -> None:
        super().__init__()
        self.text = text
        self.model = model
        self._checkpointing = checkpointing
        self.learns = learning.chosen(text.layers)
        self.full = learning.full
        self._originals: dict[int, nn.Module] = {}  # in no state_dict: the teacher's layers in place of `learns`
        if learning.full:
            for number in self.learns:
                layer = model.model.layers[number - 1]
                self._originals[number] = copy.deepcopy(layer).to(model.model.embed_tokens.weight.dtype)
                layer.requires_grad_(True)
            return
        from peft import inject_adapter_in_model

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(adapter_config(learning, self.learns), self.model, ADAPTER)
        for name, parameter in self.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.float()

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.model.embed_tokens.weight.device
        return device

    def learning_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer changes, by name, in a fixed order."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def forward(self, row: dict[str, Any], features: Tensor, k: int | None) -> Tensor:
        """The hidden states [m, hidden] before the last norm of the tokens `at`; `features` [image tokens, hidden]."""
        return self._run(list(self.model.model.layers), row, features, k)

    @torch.no_grad()
    def teach(self, row: dict[str, Any], features: Tensor) -> Tensor:
        """As `forward`, of the model as it was and without withdrawal."""
        with self._as_it_was() as layers:
            return self._run(layers, row, features, None)

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.lm_head(self.model.model.norm(hidden)).float()
        return logits

    @contextmanager
    def _as_it_was(self) -> Iterator[Sequence[nn.Module]]:
        adapted = [] if self.full else list(adapter_layers(self.model))
        for module in adapted:
            module.enable_adapters(False)
        try:
            yield [self._originals.get(number, layer) for number, layer in enumerate(self.model.model.layers, 1)]
        finally:
            for module in adapted:
                module.enable_adapters(True)

    def _run(self, layers: Sequence[nn.Module], row: dict[str, Any], features: Tensor, k: int | None) -> Tensor:
        x = self._enter(row, features)
        (text,) = torch.where(~row["image"])
        (image,) = torch.where(row["image"])
        at = row["at"]
        mask = visible(row["blocks"])[None, None]
        rope = self._rope(row["positions"], x.dtype)
        for number, layer in enumerate(layers, 1):
            if number == k:
                x = x[:, text]
                mask = mask[:, :, text][..., text]
                rope = (rope[0][:, text], rope[1][:, text])
                at = torch.searchsorted(text, at)
            if self._checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, attention_mask=mask, position_embeddings=rope, use_reentrant=False)
            else:
                x = layer(x, attention_mask=mask, position_embeddings=rope)
            if number <= len(row["maps"]) and (k is None or number < k):
                x = x.index_add(1, image, row["maps"][number - 1][None].to(x.dtype))
        return x[0, at]

    def _enter(self, row: dict[str, Tensor], features: Tensor) -> Tensor:
        x: Tensor = self.model.model.embed_tokens(row["ids"])
        x[row["image"]] = features.to(x.dtype)
        return x[None]

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cos and sin [1, n, head_dim] of positions [n], or of three parts each [n, 3]."""
        rope = self.text.rope
        rates = torch.tensor(rope.frequencies, device=positions.device)
        three_part = positions[:, rope.axes] if positions.ndim > 1 else positions[:, None]
        angles = (three_part.float() * rates).repeat(1, 2)[None]
        return (angles.cos() * rope.scale).to(dtype), (angles.sin() * rope.scale).to(dtype)

    @torch.no_grad()
    def greedy(
        self,
        prefix: Tensor,
        image: Tensor,
        encoded: Encoded,
        suffixes: Sequence[Tensor],
        ends: Sequence[int],
        limit: int,
    ) -> list[list[int]]:
        """The teacher's greedy answers to questions `suffixes` after one `prefix`, at most `limit` ids, the end too.

        `image` [prefix] bool says which of the prefix's tokens are the image's.
        """
        positions = prefix_positions(encoded, image).to(prefix.device)
        with self._as_it_was() as layers:
            cache = _Cache()
            x = self._enter({"ids": prefix, "image": image}, encoded.hidden)
            self._extend(layers, x, positions[:-1], cache, torch.where(image)[0], encoded.maps)
            answers = []
            for suffix in suffixes:
                cache.crop(len(prefix))
                answer = list[int]()
                ids = suffix
                start = 0
                while len(answer) < limit and not (answer and answer[-1] in ends):
                    x = self.model.model.embed_tokens(ids)[None]
                    numbers = torch.arange(start, start + len(ids), device=ids.device)
                    at = positions[-1] + (numbers if positions.ndim == 1 else numbers[:, None])
                    x = self._extend(layers, x, at, cache)
                    start += len(ids)
                    answer.append(int(self.head(x[:, -1])[0].argmax()))
                    ids = torch.tensor(answer[-1:], device=suffix.device)
                answers.append(answer)
        return answers

    def _extend(
        self,
        layers: Sequence[nn.Module],
        x: Tensor,
        positions: Tensor,
        cache: _Cache,
        image: Tensor | None = None,
        maps: Sequence[Tensor] = (),
    ) -> Tensor:
        """New tokens [1, n, hidden] at `positions`, after those in `cache`, which they join.

        `maps` are added to those numbered `image`, one after each of the first layers.
        """
        n = x.shape[1]
        filled = cache.length
        rope = self._rope(positions, x.dtype)
        mask = torch.ones(n, filled + n, dtype=torch.bool, device=x.device).tril(filled)[None, None]
        for number, layer in enumerate(layers):
            x = layer(x, attention_mask=mask, position_embeddings=rope, past_key_values=cache)
            if image is not None and number < len(maps):
                x = x.index_add(1, image, maps[number][None].to(x))
        return x


class _Cache:
    """Keys and values [1, kv_heads, n, head_dim] of each layer, as transformers' layers ask for them."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        return next((keys.shape[2] for keys, _ in self._kept.values()), 0)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if layer_idx in self._kept:
            before = self._kept[layer_idx]
            keys = torch.cat((before[0], keys), 2)
            values = torch.cat((before[1], values), 2)
        self._kept[layer_idx] = keys, values
        return keys, values

    def crop(self, length: int) -> None:
        self._kept = {layer: (k[:, :, :length], v[:, :, :length]) for layer, (k, v) in self._kept.items()}


def adapter_config(learning: Learning, layers: range) -> Any:
    from peft import LoraConfig

    numbers = "|".join(str(number - 1) for number in layers)
    make: Any = LoraConfig  # its annotation wants a whole alpha, its arithmetic does not
    return make(
        r=learning.rank,
        lora_alpha=learning.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=rf".*\.layers\.({numbers})\.(self_attn|mlp)\.({'|'.join(MATRICES)})",
    )


def adapter_layers(model: Any) -> Iterator[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return (module for module in model.modules() if isinstance(module, BaseTunerLayer))


def prefix_positions(encoded: Encoded, image: Tensor) -> Tensor:
    """Positions [p + 1], or [p + 1, 3], of the tokens before a question and of its first one; `image` [p] bool."""
    return torch.from_numpy(encoded.positions(np.append(image.cpu().numpy(), False)))


def tensors_of(row: Row, encoded: Encoded, device: torch.device) -> dict[str, Any]:
    """A row's tensors, at the positions that its images give it, with the `maps` that are added to their tokens."""
    names = ("ids", "blocks", "positions", "image", "at", "targets", "given")
    tensors: dict[str, Any] = {name: getattr(row, name).to(device) for name in names}
    if encoded.images:
        prefix = int((row.blocks == 0).sum())
        image_positions = prefix_positions(encoded, row.image[:prefix])
        question_positions = image_positions[-1] + (row.positions[prefix:] - prefix)[:, None]
        tensors["positions"] = torch.cat((image_positions[:-1], question_positions)).to(device)
    return tensors | {"maps": [layer_map.to(device) for layer_map in encoded.maps]}
