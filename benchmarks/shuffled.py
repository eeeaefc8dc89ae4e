"""A decoder with its channels in another order: the same function, in other blocks.

    python -m benchmarks.shuffled build/real-weights/qwen2.5-coder-0.5b build/qwen2.5-coder-0.5b-shuffled

The decoders of `make real-weights` were quantised in blocks of neighbouring weights. A form with the same blocks meets
their grids again, and seems to lose less than it would lose of weights that were never rounded. Here the channels of
the hidden state, of the values of a head and of the feed-forward are drawn in another order in all matrices that write
or read them, so that every block holds weights of several of the source's blocks. The orders of LLaVA's layout with a
decoder of Qwen2 and of Gemma 3's are known; names that they do not have are an error.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

READERS = re.compile(
    r"(q_proj|k_proj|v_proj|gate_proj|up_proj|embed_tokens|lm_head|norm|layernorm)\.weight|mm_input_projection_weight"
)
KEPT = re.compile(r"vision_tower\.|projector\.linear_1\.|mm_soft_emb_norm|(q_proj|k_proj)\.bias|(q|k)_norm\.")


class Order:
    """The drawn orders of a decoder's channels."""

    def __init__(self, text: Mapping[str, Any]) -> None:
        self._generator = torch.Generator().manual_seed(0)
        heads = text["num_attention_heads"]
        groups = text["num_key_value_heads"]
        size = text.get("head_dim") or text["hidden_size"] // heads
        self.hidden, self.inner = self._drawn(text["hidden_size"]), self._drawn(text["intermediate_size"])
        values = torch.stack([self._drawn(size) + size * group for group in range(groups)])
        self.values = values.flatten()
        read = values - size * torch.arange(groups)[:, None]  # by each head, its group's
        starts = size * torch.arange(heads)[:, None]
        self.heads = (read.repeat_interleave(heads // groups, 0) + starts).flatten()

    def _drawn(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator)

    def applied(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor with its channels in the drawn order."""
        if KEPT.search(name):
            return tensor
        if READERS.search(name):
            tensor = tensor[..., self.hidden]
        if ".v_proj." in name:
            return tensor[self.values]
        if ".gate_proj." in name or ".up_proj." in name:
            return tensor[self.inner]
        if ".down_proj." in name:
            return tensor[self.hidden][:, self.inner]
        if ".o_proj." in name:
            return tensor[self.hidden][:, self.heads]
        if "linear_2." in name:
            return tensor[self.hidden]
        if not READERS.search(name):
            raise SystemExit(f"{name} is not a tensor of LLaVA with Qwen2 or of Gemma 3")
        return tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    config = json.loads((options.checkpoint / "config.json").read_text(encoding="utf-8"))
    order = Order(config["text_config"])
    for file in sorted(options.checkpoint.iterdir()):
        if file.suffix == ".safetensors":
            tensors = {name: order.applied(name, tensor).contiguous() for name, tensor in load_file(file).items()}
            save_file(tensors, options.out / file.name, metadata={"format": "pt"})
        else:
            shutil.copyfile(file, options.out / file.name)


if __name__ == "__main__":
    main()
