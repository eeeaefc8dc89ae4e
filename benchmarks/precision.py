"""What each precision changes in the demo's answers: exact answers, and divergence of the next token from float32.

The demo is exported at every precision and asked the same drawn scenes, none of them of its training, at each K.
`KL` is the divergence of the first answer token's distribution from the float32 bundle's at the same K, in nats, mean
over the questions; `median` is that of the questions at K = none, since a few of them make most of the mean. `tower` is
the largest difference of the image's rows, as a share of the largest. Activation-aware bundles are measured on other
scenes than those that are asked about.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from common import parser, report, scratch
from numpy.typing import NDArray

from vtx.exporter.bundling.activation_aware import SAMPLES as MEASURED
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.policies.make import make_policy
from vtx.runtime.session.generate import generate
from vtx.runtime.session.session import Prompt, Session
from vtx.tools.data.items import Data, Item, plain, scene_items

KS = (None, 16, 8, 5)
BUNDLES = {
    "fp32": ("fp32", None, None), "fp16": ("fp16", None, None), "bf16": ("bf16", None, None),
    "int8": ("int8", "int8", None), "int4": ("int4", "int8", None), "int8, tower fp16": ("int8", "fp16", None),
    "int4, tower fp16": ("int4", "fp16", None), "fp16, K and V int8": ("fp16", None, "int8"),
    "fp16, K and V int8, OpenVINO": ("fp16", None, "int8"),
    "int8, OpenVINO": ("int8", "int8", None), "int8, OpenVINO, compute int8": ("int8", "int8", None),
    "int4, OpenVINO": ("int4", "int8", None), "int4, OpenVINO, compute int8": ("int4", "int8", None),
}  # fmt: skip
AWARE = {"int8, activation-aware": ("int8", "int8", None), "int4, activation-aware": ("int4", "int8", None)}


def export(folder: Path, precision: str, vision: str | None, kv: str | None, measured: Data | None) -> Path:
    from vtx.exporter.bundling.export import run_export
    from vtx.exporter.bundling.options import ExportOptions
    from vtx.exporter.bundling.prepare import plan_export

    ks = tuple(k for k in KS if k)
    options = ExportOptions(
        ks=ks, precision=precision, vision_precision=vision, kv_precision=kv, dialects=("ort", "plain"), aware=measured
    )
    run_export(plan_export(options), folder, force=False, report=lambda *_: None)
    return folder


def answers(model: Model, item: Item) -> tuple[NDArray[np.float32], list[tuple[NDArray[np.float64], bool]]]:
    """The image tokens; at each K the log-probabilities of the first token and whether the greedy answer is right."""
    manifest = model.manifest
    picture = model.loaded.images.prepare(item.images[0])
    tokens = model.backend.vision(picture.pixels[None])
    content: list[Any] = [{"type": "image"}, {"type": "text", "text": item.question}]
    ids = model.loaded.text.prompt([{"role": "user", "content": content}], picture.tokens)
    prompt = Prompt(ids, ids == manifest.text.image_token_id, ((picture.key, lambda: tokens),))
    session = Session(model.backend, manifest)
    found = []
    for k in KS:
        logits = session.prefill(prompt, make_policy(k, manifest, model.backend.gate)).logits.copy()
        ends = manifest.text.end_ids
        tokens = list(generate(session, logits, lambda row: int(row.argmax()), end_ids=ends, max_new_tokens=64))
        stream = model.loaded.text.stream()
        text = "".join(map(stream.push, tokens)) + stream.finish()
        right = tokens[-1] in ends and plain(text) == plain(item.answer or "")
        shifted = logits.astype(np.float64) - logits.max()
        found.append((shifted - np.log(np.exp(shifted).sum()), right))
    return tokens.hidden, found


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("--samples", type=int, default=400)
    args.add_argument("--threads", type=int)
    args.add_argument("--only", nargs="+", metavar="NAME", help="fp32 and these rows alone")
    args.add_argument("--scratch", type=Path, help="folder for the bundles, 80 MB [default: here]")
    given = args.parse_args()
    right: dict[str, list[list[bool]]] = defaultdict(list)
    divergence: dict[str, list[list[float]]] = defaultdict(list)
    tower: dict[str, float] = defaultdict(float)
    scenes = scene_items(given.samples + MEASURED)
    measured = Data("other scenes", scenes[given.samples :])
    with scratch(given.scratch) as folder:
        models = {}
        for name, asked in {**BUNDLES, **AWARE}.items():
            if given.only and name not in ("fp32", *given.only):
                continue
            place = folder / name.replace(", ", "-").replace(" ", "-")
            bundle = export(place, *asked, measured if name in AWARE else None)
            device = "openvino" if "OpenVINO" in name else "cpu"
            compute = "int8" if "compute int8" in name else "f32"
            models[name] = load(bundle, device=device, compute=compute, threads=given.threads)
        for item in scenes[: given.samples]:
            found = {name: answers(model, item) for name, model in models.items()}
            exact, reference = found["fp32"]
            for name, (rows, by_k) in found.items():
                right[name].append([good for _, good in by_k])
                kl = [float((np.exp(p) * (p - q)).sum()) for (p, _), (q, _) in zip(reference, by_k, strict=True)]
                divergence[name].append(kl)
                tower[name] = max(tower[name], float(np.abs(rows - exact).max() / np.abs(exact).max()))
    heads = [f"K = {k or 'none'}" for k in KS]
    rows = [["precision", *(f"right, {head}" for head in heads), *(f"KL, {head}" for head in heads), "median", "tower"]]
    figures: dict[str, Any] = {"samples": given.samples, "ks": list(KS)}
    for name in models:
        shares, kl = np.mean(right[name], 0), [*np.mean(divergence[name], 0), np.median(divergence[name], 0)[0]]
        figures[name] = {"right": shares.tolist(), "kl": kl[:-1], "kl_median": kl[-1], "tower": tower[name]}
        rows.append(
            [name, *(f"{share:.1%}" for share in shares), *(f"{nats:.1e}" for nats in kl), f"{tower[name]:.1e}"]
        )
    report(figures, rows, given.json)


if __name__ == "__main__":
    main()
