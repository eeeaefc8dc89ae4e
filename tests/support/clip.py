"""A small random CLIP around a tiny LLaVA's own vision tower, and what CDPruner's code takes from such a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.reference import Reference

WORDS = ("what", "is", "the", "colour", "of", "square", "in", "picture", "how", "many", "red", "shapes", "are", "there")
SEGMENT = 14  # ids of a segment; CLIP has 77
WIDTH = 20


def make_clip(folder: Path, judge: Reference, *, seed: int = 0, old_end: bool = True, **changes: Any) -> Path:
    """Write a CLIPModel whose vision tower is the LLaVA's; `old_end`: its configuration calls the end token 2."""
    from transformers import CLIPConfig, CLIPModel

    vocab = _write_tokenizer(folder)
    vision = judge.model.config.vision_config.to_dict()
    text = {
        "vocab_size": vocab, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": SEGMENT, "bos_token_id": vocab - 2,
        "eos_token_id": 2 if old_end else vocab - 1, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "text" in name or "projection" in name or "post_layernorm" in name:
                weight.copy_(torch.randn(weight.shape) * (0.3 if weight.ndim > 1 else 0.1) + ("norm" in name) * 1.0)
    model.vision_model.load_state_dict(judge.model.model.vision_tower.state_dict())
    model.vision_model.post_layernorm.weight.data += torch.randn(vision["hidden_size"]) * 0.1
    model.save_pretrained(folder)
    return folder


def _write_tokenizer(folder: Path) -> int:
    """Bytes, bytes that end a word, merges that make whole words of `WORDS`, and the two special tokens last."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces, merges = [*letters, *(f"{letter}</w>" for letter in letters)], dict[tuple[str, str], None]()
    for word in WORDS:
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            merges[parts[0], parts[1]] = None
            parts = [parts[0] + parts[1], *parts[2:]]
    pieces += [*dict.fromkeys("".join(pair) for pair in merges if "".join(pair) not in pieces)]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    folder.mkdir(parents=True, exist_ok=True)
    CLIPTokenizer(vocab=vocab, merges=list(merges)).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return len(vocab)


class Clip:
    """The checkpoint as transformers loads it, used as CDPruner's released code does."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer, CLIPModel

        self.model: Any = CLIPModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    @torch.inference_mode()
    def texts(self, question: str) -> Tensor:
        """The embedding of each segment, [segments, width]; the last one is padded with zeros and masked."""
        ids = self.tokenizer(question).input_ids
        parts = [ids[start : start + SEGMENT] for start in range(0, len(ids), SEGMENT)]
        padded = torch.tensor([part + [0] * (SEGMENT - len(part)) for part in parts])
        mask = torch.tensor([[1] * len(part) + [0] * (SEGMENT - len(part)) for part in parts])
        found: Tensor = self.model.get_text_features(input_ids=padded, attention_mask=mask).pooler_output
        return found

    @torch.inference_mode()
    def patches(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, hidden] of the tower's select layer in CLIP's space, [n, width]."""
        found: Tensor = self.model.visual_projection(self.model.vision_model.post_layernorm(hidden))
        return found

    @torch.inference_mode()
    def patches_of(self, pixels: Tensor, layer: int) -> Tensor:
        """The patches of one image [3, side, side], by CLIP's own vision tower, without the class token."""
        states = self.model.vision_model(pixels[None], output_hidden_states=True).hidden_states
        return self.patches(states[layer][0, 1:])
