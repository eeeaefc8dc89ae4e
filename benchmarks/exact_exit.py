"""Time Gemma 4's exact exit: a prompt in the layers with keys and values, and its last token or all of it behind.

    python benchmarks/exact_exit.py               # 14 of 35 layers, 6 of them with keys and values
    python benchmarks/exact_exit.py --layers 35   # the true shape of E2B's layers: 6 GB of disk
    python benchmarks/exact_exit.py --bundle build/shapes/gemma4-e2b/vtx-int4/bundle     # of `shapes.py export`

E2B's widths, random weights, a vocabulary of bytes and a tower of one layer, which play no part. Each round takes both
ways in turn, one prompt of random hidden states; processor seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import parser, report, scratch, write_random
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.exporter.graphs.vision import vision_tensors
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.host.machine import cores
from vtx.runtime.vision.tokens import TokenStates
from vtx.tools.bench.series import shown, spread
from vtx.tools.estimate.flops import decoder_macs, full_schedule, with_exit
from vtx.tools.estimate.sizes import bundle_size

TEMPLATE = (
    "{% for m in messages %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|image|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def checkpoint(folder: Path, layers: int) -> Path:
    """A Gemma 4 of E2B's widths, with that many layers, in float16."""
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE({c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ("<pad>", "<eos>", "<bos>", "<|image>", "<image|>", "<|image|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    count = tokenizer.get_vocab_size()
    kinds = ["full_attention" if n % 5 == 0 else "sliding_attention" for n in range(1, layers + 1)]
    text = {
        "model_type": "gemma4_text",
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
        "layer_types": kinds,
        "num_kv_shared_layers": layers * 4 // 7,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256,
        "vocab_size": count,
        "pad_token_id": 256,
        "vocab_size_per_layer_input": count,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": {"model_type": "gemma4_vision", "num_hidden_layers": 1},
        "image_token_id": count - 1,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Gemma4ImageProcessor"}))
    model = read_config(config)
    needed = [*vision_tensors(model), *model.text.tensors()]
    write_random(folder / "model.safetensors", needed)
    return folder


def prefill(model: Model, tokens: TokenStates, *, whole: bool) -> float:
    """Processor seconds of a prompt: in layers with K and V, and in those behind for its last token or the `whole`."""
    *first, last = model.manifest.stages
    positions = np.arange(len(tokens))
    caches = [model.backend.stage(number, model.manifest.max_context) for number in range(len(first))]
    sources = model.manifest.model.sources(last.first, last.last)
    of = {
        layer: cache
        for stage, cache in zip(first, caches, strict=True)
        for layer in sources
        if stage.first <= layer <= stage.last
    }
    behind = model.backend.stage(len(first), 0, of)
    begun = time.process_time()
    count = len(tokens)
    states = tokens
    for cache in caches:
        states = tokens.after(cache.append(states, positions).copy())
    at = 0 if whole else count - 1
    behind.append(states.part(at, count), positions[at:])
    return time.process_time() - begun


def main(arguments: argparse.Namespace) -> None:
    rows: list[list[str]] = [["device", "exit, s", "whole, s", "of the time", "of the FLOPs"]]
    figures = list[dict[str, Any]]()
    rng = np.random.default_rng(1)
    with scratch(arguments.scratch) as folder:
        if (bundle := arguments.bundle) is None:
            bundle = folder / "bundle"
            made = checkpoint(folder / "checkpoint", arguments.layers)
            options = ExportOptions(
                str(made), (), arguments.precision, 1024, dialects=("ort", "plain"), template=TEMPLATE
            )
            run_export(plan_export(options), bundle, force=False, report=lambda *_: None)
            (made / "model.safetensors").unlink()
        manifest = Bundle.open(bundle, check=False).manifest
        if manifest.model.shared is None or manifest.stages[-1].first != manifest.model.shared:
            raise SystemExit(f"{bundle} is not a model whose last stage shares keys and values, as Gemma 4 E2B does")
        for device in arguments.device.split(","):
            with load(bundle, device=device, threads=arguments.threads) as model:
                size = bundle_size(model.bundle).decoder
                inputs = model.manifest.token_inputs
                drawn = {e.name: rng.standard_normal((arguments.tokens, e.width), np.float32) for e in inputs}
                tokens = TokenStates(rng.standard_normal((arguments.tokens, size.hidden), np.float32), drawn)
                ran: dict[bool, list[float]] = {False: [], True: []}
                for number in range(arguments.rounds + 1):
                    for whole, seconds in ran.items():
                        taken = prefill(model, tokens, whole=whole)
                        if number:  # the first round warms up
                            seconds.append(taken)
            found = {whole: spread(seconds) for whole, seconds in ran.items()}
            every = full_schedule(size.layers, text=arguments.tokens, vision=0)
            work = decoder_macs(size, with_exit(size, every)) / decoder_macs(size, every)
            share = found[False].median / found[True].median
            rows.append([device, shown(found[False]), shown(found[True]), f"{share:.0%}", f"{work:.0%}"])
            figures.append({"device": device, "exit": found[False], "whole": found[True], "flops": work})
    about = {"layers": manifest.model.layers, "tokens": arguments.tokens, "precision": manifest.precision}
    print(f"{about}, {arguments.threads} threads, {arguments.rounds} rounds\n")
    report({**about, "rows": figures}, rows, arguments.json)


if __name__ == "__main__":
    args = parser(__doc__ or "")
    args.add_argument("--layers", type=int, default=14, help="of the decoder, of 35")
    args.add_argument("--tokens", type=int, default=302, help="of the prompt: an image of 280 and a question")
    args.add_argument("--precision", default="int8")
    args.add_argument("--bundle", type=Path, help="a Gemma 4's, instead of one that is made now; it may have a K")
    args.add_argument("--device", default="cpu,openvino", metavar="NAME,...")
    args.add_argument("--threads", type=int, default=cores())
    args.add_argument("--rounds", type=int, default=5)
    args.add_argument("--scratch", type=Path, help="folder for the weights [default: here]")
    main(args.parse_args())
