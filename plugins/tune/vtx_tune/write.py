"""The tuned checkpoint, the original's files with the trained weights in place of theirs; its card; peft's adapters.

Tensors keep their files, names and types, settings their bytes, so whatever loads the original loads the result.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vtx.exporter.checkpoint.hub import checkpoint_files
from vtx.exporter.checkpoint.loader import INDEX, MAX_INDEX
from vtx.exporter.reference.prompts import Source
from vtx.exporter.weights.tensors import CheckpointWeights, WeightSource
from vtx.runtime.bundle.files import sync_file
from vtx.runtime.bundle.safetensors import TensorInfo, layout, open_data, write_safetensors
from vtx.runtime.errors import CheckpointError, ExportError
from vtx_tune.decoder import ADAPTER, WithdrawingDecoder, adapter_config, adapter_layers, module_name
from vtx_tune.judge import TuningComparison
from vtx_tune.options import Learning, TuneOptions

ADAPTER_PREFIX = "base_model.model.model.language_model."  # of peft around transformers' vision-language models
SETTINGS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
CARD = "README.md"
CHUNK = 1 << 24  # bytes copied at a time
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Changed:
    """The trained weights, by canonical name."""

    decoder: WithdrawingDecoder
    names: Mapping[str, str]
    original: WeightSource

    @classmethod
    def of(cls, decoder: WithdrawingDecoder, source: Source) -> Changed:
        """Collect the canonical names of trained weights, each with the name of its module and parameter."""
        by_module = {module_name(name): name for name in source.checkpoint.tensors if name.startswith("text.layers.")}
        fields = {}
        for name in decoder.learning_parameters():
            plain = name.removeprefix("model.").partition(".lora_")[0]
            plain = plain if decoder.full else f"{plain}.weight"
            fields[by_module[plain]] = plain
        return cls(decoder, fields, CheckpointWeights(source.checkpoint))

    @torch.no_grad()
    def new(self, name: str) -> Tensor:
        """The trained weight, float32 on the CPU; adapters are added to the checkpoint's weight, unrounded."""
        module = self.decoder.model.get_submodule(self.names[name].rpartition(".")[0])
        if self.decoder.full:
            weight: Tensor = getattr(module, name.rpartition(".")[2])
            return weight.detach().float().cpu()
        delta: Tensor = module.get_delta_weight(ADAPTER).float().cpu()
        return self.original.read(name) + delta


def changes(changed: Changed) -> dict[int, float]:
    """For each layer, from 1, how far its matrices moved: the norm of the change as a share of theirs."""
    sums = dict[int, Tensor]()
    for name in changed.names:
        old = changed.original.read(name)
        pair = torch.stack([(changed.new(name) - old).square().sum(), old.square().sum()]).double()
        layer = int(name.split(".")[2]) + 1
        sums[layer] = sums.get(layer, torch.zeros(2, dtype=torch.float64)) + pair
    return {layer: float((moved / size).sqrt()) for layer, (moved, size) in sorted(sums.items())}


def write_merged(source: Source, changed: Changed, out: Path, card: str) -> None:
    """Write the whole checkpoint to the directory `out`, which is replaced only once the new one is complete."""
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        folder = source.checkpoint.folder
        tensors = source.checkpoint.tensors.items()
        settings = checkpoint_files(folder)
        for name in sorted({path.name for pattern in SETTINGS for path in folder.glob(pattern)}):
            (partial / name).write_bytes(settings.read(name, MAX_INDEX if name == INDEX else 1 << 28))
            sync_file(partial / name)
        files: dict[str, list[tuple[str, TensorInfo]]] = {}
        for name, info in sorted(tensors, key=lambda pair: pair[1].offset):
            files.setdefault(info.file.name, []).append((name, info))
        for file, infos in files.items():
            _rewrite(infos, changed, partial / file)
        (partial / CARD).write_text(card, encoding="utf-8")
        sync_file(partial / CARD)
        sync_file(partial)
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    except OSError as e:
        raise ExportError(f"cannot write {out} ({e.strerror}); free some space and run again") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _rewrite(infos: list[tuple[str, TensorInfo]], changed: Changed, path: Path) -> None:
    specs = [(info.name, info.dtype, info.shape) for _, info in infos]
    header, _ = layout(path, specs, {"format": "pt"})
    with path.open("wb") as file:
        file.write(header)
        for name, info in infos:
            if name in changed.names:
                weight = changed.new(name)
                if tuple(weight.shape) != info.shape:
                    raise CheckpointError(
                        f"tensor {info.name} has shape {list(info.shape)}, its trained weight {list(weight.shape)}"
                    )
                rounded = weight.to(DTYPES[info.dtype]).contiguous()
                if not torch.isfinite(rounded).all():
                    raise ExportError(
                        f"tensor {info.name} does not fit {info.dtype} after training; train with a lower --lr"
                    )
                file.write(rounded.view(torch.uint8).numpy().tobytes())
                continue
            remaining = info.nbytes
            with open_data(info) as original:
                original.seek(info.offset)
                while remaining:
                    part = original.read(min(CHUNK, remaining))
                    if not part:
                        raise CheckpointError(f"{info.file.name} ends inside of tensor {info.name}; download it again")
                    remaining -= len(part)
                    file.write(part)
        file.flush()
        os.fsync(file.fileno())


def write_adapters(source: Source, decoder: WithdrawingDecoder, learning: Learning, folder: Path) -> None:
    """The adapters in peft's format, for the original as transformers loads it. Raises ExportError."""
    tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}
    names = {module: name for name, module in decoder.model.named_modules()}
    for module in adapter_layers(decoder.model):
        name = names[module].removeprefix("model.")
        for part in ("lora_A", "lora_B"):
            weight = getattr(module, part)[ADAPTER].weight.detach().float().cpu().numpy()
            tensors[f"{ADAPTER_PREFIX}{name}.{part}.weight"] = weight
    config = adapter_config(learning, decoder.learns).to_dict()
    config |= {"base_model_name_or_path": source.name, "inference_mode": True, "peft_type": "LORA"}
    config["target_modules"] = f".*language_model{config['target_modules']}"

    def json_form(value: object) -> object:
        return sorted(value) if isinstance(value, set | frozenset) else getattr(value, "value", str(value))

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_safetensors(folder / "adapter_model.safetensors", tensors, {"format": "pt"})
        text = json.dumps(config, indent=1, sort_keys=True, default=json_form) + "\n"
        (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    except OSError as e:
        raise ExportError(f"cannot write {folder} ({e.strerror}); free some space and run again") from e


RECORDED = ("vtx-edge", "torch", "transformers", "peft", "accelerate")


def versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in RECORDED}


def model_card(base: str, options: TuneOptions, record: Mapping[str, Any], judged: TuningComparison | None) -> str:
    d = options.depths
    w = options.weights
    learning = options.learning
    range_text = f"{d.low} to {d.high}" + (f", {d.target} the most often" if d.target else "")
    layers = "all layers" if learning.layers is None else f"layers {learning.layers[0]} to {learning.layers[1]}"
    trained = f"the weights of {layers}" if learning.full else f"adapters of rank {learning.rank} on {layers}, merged"
    facts = [
        ("base model", base),
        ("trained weights", trained),
        ("K in training", f"{range_text}; {options.full_share:.0%} of the images without withdrawal"),
        ("loss", f"{w.kl:g} KL to the base model + {w.ce:g} cross-entropy + {w.hidden:g} hidden states"),
        ("data", f"{record['items']} questions about {record['rows']} rows of images, {record['data']}"),
        ("steps", f"{record['steps']} of {options.schedule.batch} images, learning rate {options.schedule.lr:g}"),
        ("seed", str(options.schedule.seed)),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions().items())),
    ]
    lines = [
        "---",
        f"base_model: {base}",
        "library_name: transformers",
        "tags:",
        "- visual-token-withdrawal",
        "---",
        "",
        f"# {base}, tuned for early withdrawal of the image",
        "",
        "Fine-tuned with `vtx-tune` so that image tokens may leave the decoder before layer K (counted from 1) with",
        "the answers that the base model gives with the image in all layers. Without withdrawal it is used like the",
        "base model, whose license and limits it shares.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts),
        "",
    ]
    if judged is None:
        return "\n".join([*lines, "Not judged on held-out data."]) + "\n"
    k = {name: value or "none" for name, value in judged.earliest_k.items()}
    lines += [
        f"On {judged.items} questions held out, the earliest K within {judged.max_drop_points:g} point of the "
        f"base model's accuracy at full depth: {k['before']} before, {k['after']} after.",
        "",
        "| K | right before (95%) | right after (95%) | points gained, paired (95%) | KL before | KL after |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_row(point) for point in judged.curve]
    for gates in judged.gates[:1]:
        lines += [
            "",
            f"Under its gates {gates.full_layers:.1f} layers see the image on average, and {_share(gates.right)} are "
            f"right: {_points(gates.gained)} points beside the base model without withdrawal, {_points(gates.ahead)} "
            f"beside this one at {gates.fixed}, paired by question.",
        ]
    return "\n".join(lines) + "\n"


def _row(point: Mapping[str, Any]) -> str:
    """The row of one K in the card's table."""
    before = point["before"]
    after = point["after"]
    cells = [point["k"] or "none", _share(before["right"]), _share(after["right"]), _points(point["gained"])]
    cells += [f"{entry['kl'].mean:.2g}" for entry in (before, after)]
    return f"| {' | '.join(map(str, cells))} |"


def _share(share: Any) -> str:
    """A share with its interval, in percent."""
    return f"{share.share:.1%} ({share.low:.1%}..{share.high:.1%})" if share else "-"


def _points(gain: Any) -> str:
    """A mean difference with its interval, in points."""
    return "-" if gain is None else f"{100 * gain.mean:+.1f} ({100 * gain.low:+.1f}..{100 * gain.high:+.1f})"
