"""How far do rounded weights, K and V and arithmetic move the next token of a real decoder, beside its float32 weights?

    make real-weights
    python -m benchmarks.divergence build/real-weights/qwen2.5-coder-0.5b --forms int8 int4-64 Q4_0 --rows rows.jsonl
    python -m benchmarks.divergence build/real-weights/qwen2.5-coder-0.5b --bundle BUNDLE --device openvino

Eight texts of several kinds are read token by token, `POSITIONS` of each. The truth are the logits of the plain PyTorch
reference with the checkpoint's weights. KL is in nats, mean over the positions; `same` is the share of positions whose
most probable token stays. A form rounds every matrix of the decoder, and the head as `HEADS` says, and is computed in
float32; `divergence_rivals.py` has those of others. A bundle given as `--stored` is computed in float32, too, from its
weights; one given as `--bundle` is run by an engine, and is told what each token was. `bits` are those of a weight of
the matrices and the head, scales and zero points included. `--write` puts the rows of a decoder into the results.

The decoders of `make real-weights` come from files of 4 to 8 bits, whose dequantised values are the truth here.
`shuffled.py` gives a decoder's channels another order, so that no form meets the blocks of those files again.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks import divergence_rivals as rivals
from benchmarks.common import markdown, replace_tables
from numpy.typing import NDArray
from torch import Tensor

from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import Plan, plan_export
from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.reference.model import Encoded, Reference, Sample
from vtx.exporter.weights.plan import StoredTensor
from vtx.exporter.weights.quantize import dequantise, quantise
from vtx.exporter.weights.tensors import BundleWeights, CheckpointWeights, WeightSource
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.safetensors import EVERY, RowIndex, read_header
from vtx.runtime.bundle.spec.stored import EMBEDDING, HEAD, SCALES, WIDER, ZEROS, Precisions, multiplied, scheme
from vtx.runtime.policies.make import make_policy
from vtx.runtime.session.sampling import log_softmax
from vtx.runtime.session.session import Prompt, Session
from vtx.tools.model.mixed import head_rows, widened

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/measurements/results/divergence.jsonl"
POSITIONS = 144  # of a text
PREFILLED = 8  # tokens before the first position that a bundle is judged at
HEADS = {"int4-32": "int8", "int4-64": "int8", "int4-128": "int8", "nncf-int4": "nncf-int8"}
COLUMNS = ["form", "bits", "KL", "same top-1", "perplexity"]
ALIGN = ["---", *["---:"] * 4]
CAPTION = (
    "{decoder}, {positions} positions of eight texts, teacher-forced; KL in nats from float32; bits of a weight of "
    "decoder and head."
)
Texts = dict[str, NDArray[np.int64]]  # ids [POSITIONS + 1] by the kind of text
Logits = dict[str, NDArray[np.float32]]  # [POSITIONS, vocab]


@dataclass(frozen=True)
class Row:
    """One form or bundle beside the truth."""

    decoder: str
    form: str
    bits: float | None
    kl: float
    median: float
    same: float
    perplexity: float
    positions: int


class Rounded:
    """A checkpoint's weights, those of the decoder's matrices rounded to a form."""

    def __init__(self, weights: WeightSource, form: str, text: TextConfig) -> None:
        self._weights = weights
        self._form, _, bits = form.partition("@")
        self._layers = text.layers
        self._wider = wider_in(text, self._form, float(bits)) if bits else frozenset[str]()
        self._parts = head_rows(text.vocab) if bits else dict[str, range]()
        self.bits = self.numbers = 0.0

    def holds(self, name: str) -> bool:
        return name in self._parts or self._weights.holds(name)

    def rows(self, name: str) -> int:
        return len(self._parts[name]) if name in self._parts else self._weights.rows(name)

    def read(self, name: str, rows: RowIndex = EVERY) -> Tensor:
        if name in self._parts:
            assert isinstance(rows, slice)
            numbers = self._parts[name][rows]
            head = HEAD if self._weights.holds(HEAD) else EMBEDDING
            return self._counted(self._weights.read(head, slice(numbers.start, numbers.stop)), name, is_head=False)
        values = self._weights.read(name, rows)
        is_head = name == HEAD or (name == EMBEDDING and isinstance(rows, slice))  # embedded tokens are read by index
        if not is_head and not (name.startswith("text.layers") and multiplied(name, tuple(values.shape))):
            return values
        return self._counted(values, name, is_head=is_head)

    def _counted(self, values: Tensor, name: str, *, is_head: bool) -> Tensor:
        """A matrix after rounding, whose bits are added to those of all."""
        rounded, bits = self._rounded(values.numpy(), name, is_head=is_head)
        self.bits += bits * values.numel()
        self.numbers += values.numel()
        return torch.from_numpy(rounded)

    def _rounded(self, values: NDArray[np.float32], name: str, *, is_head: bool) -> tuple[NDArray[np.float32], float]:
        """A matrix after rounding, and the bits of each weight."""
        form = WIDER if name in self._wider else self._form
        if form.startswith("Q"):
            return rivals.rounded(values, rivals.type_of(form, name, values.shape[1], self._layers, is_head=is_head))
        if is_head:
            form = HEADS.get(form, form)
        if form in rivals.NNCF_BLOCKS:
            return rivals.rounded_by_nncf(values, form)
        return rounded_rows(values, form, name)


def wider_in(text: TextConfig, form: str, bits: float) -> frozenset[str]:
    """The matrices of a decoder in a form of int4 that are int8 for a mean of `bits` a weight."""
    precisions = Precisions("int4", "int8", "int4", "fp16", {"int4": int(form.partition("-")[2])})
    tensors = dict(text.tensors())
    tensors.pop(HEAD, None)
    tensors |= {name: (len(rows), text.hidden) for name, rows in head_rows(text.vocab).items()}
    return widened(precisions, tensors.items(), bits).wider


def rounded_rows(values: NDArray[np.float32], form: str, name: str) -> tuple[NDArray[np.float32], float]:
    """Rows of a matrix after rounding, and the bits of each weight."""
    precision, _, block = form.partition("-")
    storage = scheme(precision, values.shape, int(block) if block else None)
    assert storage is not None, name
    return dequantise(*quantise(values, storage, name), storage), storage.bits_of_a_weight


def texts_of(checkpoint: Path) -> Texts:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    lines = (ROOT / "benchmarks/divergence_texts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = {line["kind"]: line["text"] for line in map(json.loads, lines)}
    texts["licence"] = (ROOT / "LICENSE").read_text(encoding="utf-8")
    return {kind: np.array(tokenizer.encode(text).ids[: POSITIONS + 1]) for kind, text in texts.items()}


def forward(plan: Plan, texts: Texts, weights: WeightSource) -> Logits:
    """The reference's logits at every position of each text."""
    reference = Reference(plan.checkpoint, plan.config, weights)
    nothing = torch.zeros((0, plan.config.text.hidden))
    with torch.inference_mode():
        samples = [Sample(ids[:-1], Encoded(nothing), len(ids) - 1) for ids in texts.values()]
        states = [state[None] for state in reference.hidden(samples, [None])]
        logits = reference.head(torch.cat(states)).numpy()  # at once, so that the head is rounded once
    starts = np.cumsum([len(state) for state in states])[:-1]
    return dict(zip(texts, np.split(logits, starts), strict=True))


def stored_in(folder: Path) -> dict[str, StoredTensor]:
    """The weights of a bundle by canonical name, from the headers of its files."""
    parts = dict[str, StoredTensor]()
    for file in sorted((folder / "weights").iterdir()):
        for name, info in read_header(file).tensors.items():
            kind = info.dtype
            shape = info.shape
            if kind == "U8" and not name.endswith(ZEROS):
                kind = "I4"
                shape = (shape[0], 2 * shape[1])
            parts[name] = StoredTensor(f"weights/{file.name}", info.offset, info.nbytes, kind, shape)
    return {
        name: replace(part, scales=parts.get(name + SCALES), zeros=parts.get(name + ZEROS))
        for name, part in parts.items()
        if not name.endswith((SCALES, ZEROS))
    }


def bits_of(stored: Mapping[str, StoredTensor]) -> float:
    """Bits of a weight of the decoder's matrices and the head."""
    matrices = [
        part
        for name, part in stored.items()
        if name == HEAD or (name.startswith("text.layers") and multiplied(name, part.shape))
    ]
    parts = [part for matrix in matrices for part in (matrix, matrix.scales, matrix.zeros) if part]
    return 8 * sum(part.nbytes for part in parts) / sum(prod(matrix.shape) for matrix in matrices)


def answered(model: Model, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """A bundle's logits at the positions from `PREFILLED` on."""
    session = Session(model.backend, model.manifest)
    first = ids[:PREFILLED]
    policy = make_policy(None, model.manifest, model.backend.gate)
    logits = session.prefill(Prompt(first, np.zeros(len(first), bool), ()), policy).logits.copy()
    return np.stack([logits, *(session.decode(int(token)).copy() for token in ids[PREFILLED:-1])])


def row(
    decoder: str, form: str, bits: float | None, truth: Mapping[str, NDArray[np.float32]], texts: Texts, logits: Logits
) -> Row:
    kl = list[float]()
    same = list[bool]()
    losses = list[float]()
    for kind, judged in logits.items():
        targets = texts[kind][-len(judged) :]
        for wanted, found, target in zip(truth[kind][-len(judged) :], judged, targets, strict=True):
            p = log_softmax(wanted)
            q = log_softmax(found)
            kl.append(float(np.exp(p) @ (p - q)))
            same.append(bool(p.argmax() == q.argmax()))
            losses.append(-float(q[target]))
    return Row(
        decoder,
        form,
        bits and round(bits, 3),
        float(f"{np.mean(kl):.3g}"),
        float(f"{np.median(kl):.3g}"),
        round(float(np.mean(same)), 4),
        round(float(np.exp(np.mean(losses))), 3),
        len(kl),
    )


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    plan = plan_export(ExportOptions(str(options.checkpoint), (), "fp32"))
    texts = texts_of(options.checkpoint)
    name = options.checkpoint.name
    truth = Logits()
    if options.truth is not None and options.truth.exists():
        truth = dict(np.load(options.truth))
    else:
        truth = forward(plan, texts, CheckpointWeights(plan.checkpoint))
        if options.truth is not None:
            np.savez(options.truth, **truth)
    for form in options.forms:
        if form == "float32":
            yield row(name, form, 32.0, truth, texts, truth)
            continue
        if form == rivals.BF16:
            yield row(name, form, 16.0, truth, texts, rivals.in_bf16(options.checkpoint, texts))
            continue
        weights = Rounded(CheckpointWeights(plan.checkpoint), form, plan.config.text)
        logits = forward(plan, texts, weights)
        yield row(name, form, weights.bits / weights.numbers, truth, texts, logits)
    for folder in options.stored:
        stored = stored_in(folder)
        logits = forward(plan, texts, BundleWeights(folder, stored))
        yield row(name, folder.name, bits_of(stored), truth, texts, logits)
    for folder in options.bundle:
        with load(folder, device=options.device, compute=options.compute) as model:
            logits = {kind: answered(model, ids) for kind, ids in texts.items()}
            about = f"{folder.name}, {model.backend.device} {model.backend.compute}"
        yield row(name, about, None, truth, texts, logits)


def write_results(file: Path) -> None:
    """The rows of a run as tables of a decoder: its forms, from the most bits of a weight on, and its bundles."""
    tables = defaultdict[str, list[Row]](list)
    for line in file.read_text(encoding="utf-8").splitlines():
        row = Row(**json.loads(line))
        tables[row.decoder.replace(".", "-") + ("-engines" if row.bits is None else "")].append(row)
    lines = list[dict[str, Any]]()
    for table, rows in tables.items():
        caption = CAPTION.format(decoder=rows[0].decoder, positions=rows[0].positions)
        lines.append({"table": table, "columns": COLUMNS, "align": ALIGN, "caption": caption})
        for row in sorted(rows, key=lambda row: -(row.bits or 0)):
            bits = "" if row.bits is None else f"{row.bits:.2f}"
            cells = [row.form, bits, f"{row.kl:.2g}", f"{row.same:.1%}", f"{row.perplexity:.2f}"]
            lines.append({"table": table, "row": cells})
    replace_tables(RESULTS, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument(
        "--forms", nargs="+", default=[], help="float32, int8, int8-BLOCK, int4-BLOCK, int4-BLOCK@BITS, or a rival's"
    )
    parser.add_argument("--stored", type=Path, nargs="+", default=[], help="bundles, computed in float32")
    parser.add_argument("--bundle", type=Path, nargs="+", default=[])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compute", default="f32")
    parser.add_argument("--truth", type=Path, help="keep the float32 logits in this .npz, hundreds of MB")
    parser.add_argument("--rows", type=Path, help="append each row to this file")
    parser.add_argument("--write", action="store_true", help="put all rows of --rows into the results")
    options = parser.parse_args()
    table = [["form", "bits", "KL", "median", "same", "perplexity", "positions"]]
    for result in rows_of(options):
        if options.rows is not None:
            with options.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")
        cells = result.bits, result.kl, result.median, f"{result.same:.1%}", result.perplexity, result.positions
        table.append([result.form, *map(str, cells)])
        print(markdown(table), flush=True)
    if options.write:
        write_results(options.rows)


if __name__ == "__main__":
    main()
