"""Time a step of a robot with pi0: tower, prompt and expert, without withdrawal and at three K.

    python benchmarks/actions.py                                   # 4 of 18 layers, 6 of 27 of the tower, int8
    python benchmarks/actions.py --layers 18 --tower-layers 27     # the true shape: 9 GB of disk
    python benchmarks/actions.py --layers 18 --tower-layers 27 --precision bf16 --device openvino:bf16

PaliGemma 3B's and the expert's widths, random weights, three cameras of 224 x 224 pixels that all change at each
step, ten Euler steps; the vocabulary is of bytes, whose table a step does not read. Each round takes none and the
three K in turn. `--bundle DIR` keeps the bundle there, or measures the one that is there already.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import parser, report, scratch, write_random
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PI0Config

from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.exporter.graphs.expert import expert_tensors
from vtx.exporter.graphs.vision import vision_tensors
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.host.machine import cores
from vtx.tools.bench.series import Series, shown, spread

INSTRUCTION = "pick up the red cup and put it on the plate"


def checkpoint(folder: Path, layers: int, tower_layers: int) -> Path:
    """A pi0 of the published widths, with that many layers, in float16."""
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE({c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<bos>", "<eos>", "<image>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    config = PI0Config().to_dict() | {"architectures": ["PI0ForConditionalGeneration"]}
    vlm = config["vlm_config"]
    image = tokenizer.get_vocab_size() - 1
    vlm["text_config"] |= {"num_hidden_layers": layers, "vocab_size": image}
    vlm |= {"image_token_id": image, "image_token_index": image}
    vlm["vision_config"]["num_hidden_layers"] = tower_layers
    config["dit_config"] |= {"num_hidden_layers": layers, "vocab_size": image}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": {}}))
    model = read_config(config)
    assert model.action is not None
    needed = [*vision_tensors(model), *model.text.tensors(), *expert_tensors(model.text, model.action)]
    write_random(folder / "model.safetensors", needed)
    return folder


def step(model: Model, pictures: list[NDArray[np.uint8]], k: int | None) -> dict[str, float]:
    """Seconds of one step's parts, and processor seconds of all."""
    begun = time.process_time()
    model.act(pictures, INSTRUCTION, np.zeros(32), k=k, seed=0, normalized=True)
    parts = model.actor.seconds
    found = {"tower": parts.tower, "prompt": parts.prompt, "expert": parts.expert}
    return {**found, "step": sum(found.values()), "processor": time.process_time() - begun}


def measure(model: Model, ks: list[int | None], rounds: int, cameras: int) -> dict[int | None, dict[str, Series]]:
    rng = np.random.default_rng(1)
    found: dict[int | None, list[dict[str, float]]] = {k: [] for k in ks}
    for number in range(rounds + 1):
        for k in ks:
            pictures = [rng.integers(0, 256, (224, 224, 3), np.uint8) for _ in range(cameras)]
            parts = step(model, pictures, k)
            if number:  # the first round warms up
                found[k].append(parts)
    return {k: {name: spread([run[name] for run in runs]) for name in runs[0]} for k, runs in found.items()}


def main(arguments: argparse.Namespace) -> None:
    rows = [["device", "K", "step, s", "tower", "prompt", "expert", "CPU s"]]
    figures = list[dict[str, Any]]()
    with scratch(arguments.scratch) as folder:
        bundle = arguments.bundle or folder / "bundle"
        if not bundle.exists():
            layers = arguments.layers
            made = checkpoint(folder / "checkpoint", layers, arguments.tower_layers)
            wanted = tuple(sorted({min(layers, max(2, round(layers * share) + 1)) for share in (0.25, 0.5, 0.75)}))
            options = ExportOptions(str(made), wanted, arguments.precision, 1024, dialects=("ort", "plain"))
            run_export(plan_export(options), bundle, force=False, report=lambda *_: None)
            (made / "model.safetensors").unlink()
        made_of = Bundle.open(bundle).manifest
        for place in arguments.device.split(",") if arguments.rounds else ():
            device, _, compute = place.partition(":")
            with load(bundle, device=device, compute=compute or None, threads=arguments.threads) as model:
                found = measure(model, [None, *made_of.variants], arguments.rounds, arguments.cameras)
            for k, parts in found.items():
                whole = parts["step"].median
                shares = [f"{parts[name].median / whole:.0%}" for name in ("tower", "prompt", "expert")]
                rows.append([place, str(k or "none"), shown(parts["step"]), *shares, shown(parts["processor"])])
                figures.append({"device": place, "k": k, **parts})
    about = {
        "layers": made_of.model.layers,
        "tower_layers": made_of.model.tower.layers,
        "precision": made_of.precision,
    }
    print(f"{about}, {arguments.cameras} cameras, {arguments.threads} threads, {arguments.rounds} rounds\n")
    report({**about, "rows": figures}, rows, arguments.json)


if __name__ == "__main__":
    args = parser(__doc__ or "")
    args.add_argument("--layers", type=int, default=4, help="of the decoder and the expert, of 18")
    args.add_argument("--tower-layers", type=int, default=6, help="of 27")
    args.add_argument("--precision", default="int8")
    args.add_argument("--cameras", type=int, default=3)
    args.add_argument("--device", default="cpu,openvino", metavar="DEVICE[:COMPUTE],...")
    args.add_argument("--threads", type=int, default=cores())
    args.add_argument("--rounds", type=int, default=5, help="0: only make the bundle")
    args.add_argument("--bundle", type=Path, help="folder of the bundle, made here if it does not exist")
    args.add_argument("--scratch", type=Path, help="folder for the weights [default: here]")
    main(args.parse_args())
