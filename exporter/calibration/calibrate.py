"""Measuring what withdrawal at every K changes, on a set of questions: VTW Eq. 6, and whether answers stay.

Each question costs one pass of the plain reference: the full rows, and for each K the text rows from there on.
Results are written down a batch at a time, so that an interrupted measurement goes on where it stopped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtx.exporter.bundling.predict import EXPORT_BASE
from vtx.exporter.calibration.source import OpenedModel, answering
from vtx.exporter.data.items import Data, Item, plain
from vtx.exporter.data.journal import Journal
from vtx.exporter.data.prompts import PreparedItem, prepare
from vtx.exporter.data.source import Source
from vtx.exporter.estimate.rates import LAYER_SECONDS, product_speed
from vtx.exporter.estimate.sizes import model_size
from vtx.exporter.reference.attention import AttentionMeter
from vtx.exporter.reference.model import Reference, Sample
from vtx.runtime.api.answer import Answer
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.backends.memory import RUN_BASE
from vtx.runtime.errors import CheckpointError, RequestError
from vtx.runtime.vision.image import load_image
from vtx.runtime.vision.preprocess import preprocess

LOGITS = 1 << 25  # logits computed at a time
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """What to measure: every K from `k_from` (5) to the last layer, on answers of at most `max_new_tokens` tokens.

    With 0 no answers are made: less memory, and only the next token is compared.
    """

    k_from: int | None = None
    max_new_tokens: int = 16
    batch: int = 8
    attention: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1 or self.max_new_tokens < 0:
            raise RequestError(f"--batch {self.batch} or --max-new-tokens {self.max_new_tokens} is too small")

    def ks(self, layers: int) -> tuple[int, ...]:
        """The candidates for a model of `layers` layers."""
        if layers < 2:
            raise RequestError("a model of one layer has no K to choose")
        first = min(5, layers) if self.k_from is None else self.k_from
        if not 2 <= first <= layers:
            raise RequestError(f"--k-from {first} is outside 2..{layers}: K is the first layer without vision tokens")
        return tuple(range(first, layers + 1))


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured: `rows` has a JSON object an item; `skipped` are the items that could not be asked."""

    ks: tuple[int, ...]
    rows: tuple[dict[str, Any], ...]
    skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Forecast:
    """Rough needs of a measurement, of bytes, seconds and multiply-accumulates as FLOPs."""

    flops: float
    seconds: float
    memory: int


def forecast(source: Source, asked: Sequence[PreparedItem], options: CalibrationOptions) -> Forecast:
    """What measuring will take, by the matrices' arithmetic and the speed of one of them here: a rough figure."""
    size, text = model_size(source.config, source.name), source.config.text
    ks, vision = options.ks(text.layers), source.config.vision_tokens
    macs, longest = 0, max(len(one.ids) for one in asked) + options.max_new_tokens
    for one in asked:
        rows = len(one.ids) + options.max_new_tokens
        text_rows = rows - vision * len(one.item.images)
        tail_layers = sum(text.layers - k + 1 for k in ks)
        macs += size.decoder.layer_macs * (rows * text.layers + text_rows * tail_layers)
        macs += size.decoder.head_macs * (1 + options.max_new_tokens) * (1 + len(ks))
        macs += (size.vision.parameters if size.vision else 0) * vision * len(one.item.images)
    largest = 4 * max(size.decoder.head_macs, size.decoder.layer_macs)
    tails = 4 * text.hidden * len(ks) * (longest - vision)
    batch = min(options.batch, len(asked)) * (4 * text.hidden * longest + tails)
    memory = EXPORT_BASE + 2 * largest + batch + 4 * tails * max(1, text.ffn // text.hidden) + 12 * LOGITS
    if options.max_new_tokens:
        memory += RUN_BASE + 4 * size.decoder.parameters + 8 * text.layers * text.kv_heads * text.head_dim * longest
    seconds = 2 * macs / product_speed(text.hidden, text.ffn, longest) + 2 * LAYER_SECONDS * text.layers * len(asked)
    return Forecast(2 * macs, seconds, memory)


def calibrate(
    source: OpenedModel, data: Data, options: CalibrationOptions, out: Path, report: Report = lambda *_: None
) -> Measurement:
    """Measure every item that `out`/samples.jsonl does not hold yet, and write it there; an equal item counts once.

    Raises:
        RequestError: nothing to measure, or `out` holds a measurement of another model or with other options.
        ExportError: `out` cannot be written.

    """
    asked, skipped = prepare(source, data, options.max_new_tokens)
    ks = options.ks(source.config.text.layers)
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(Journal(out / "samples.jsonl", _identity(source, options)))
        items = {one.item.digest(): one for one in asked}
        todo = [item for item in items if item not in journal.rows]
        answers = todo and options.max_new_tokens
        model = stack.enter_context(answering(source, out / ".answering", report)) if answers else None
        measure = _Measure(source, model, ks, options)
        batches = [todo[i : i + options.batch] for i in range(0, len(todo), options.batch)]
        total, done = len(batches) * source.config.text.layers, 0

        def layer(count: int) -> None:
            nonlocal done
            done += count
            report("measuring", done, total)

        for batch in batches:
            rows = measure.batch([items[item] for item in batch], layer)
            journal.add(dict(zip(batch, rows, strict=True)))
        found = tuple(_sound(journal.rows[item], len(ks)) for item in items)
        return Measurement(ks, found, tuple(skipped))


def _identity(source: Source, options: CalibrationOptions) -> dict[str, Any]:
    kept = {name: value for name, value in asdict(options).items() if name != "batch"}
    return {"model": [source.fingerprint, source.version()], "set of options": kept}


def _sound(row: dict[str, Any], count: int) -> dict[str, Any]:
    """A row as it was measured, also where it has been read from a file."""
    lengths = {"kl": count, "kl_reverse": count, "top1": count, "agree": 1 + count, "right": 1 + count}
    for name, length in lengths.items():
        value = row.get(name, ())
        numbers = isinstance(value, list) and len(value) == length and all(isinstance(v, int | float) for v in value)
        if not numbers and not (value is None and length > count):
            raise RequestError(f"samples.jsonl is damaged: an item has no {name} for every K; remove the file")
    return row


class _Measure:
    """One batch after the other; an item's results do not depend on its batch."""

    def __init__(self, source: Source, model: Model | None, ks: tuple[int, ...], options: CalibrationOptions) -> None:
        self._source, self._model, self._ks, self._options = source, model, ks, options
        self._reference = Reference(source.checkpoint, source.config)
        self._end_ids = torch.tensor(source.text.settings.end_ids, dtype=torch.int64)

    @torch.inference_mode()
    def batch(self, batch: Sequence[PreparedItem], layer: Callable[[int], None]) -> list[dict[str, Any]]:
        """Measure some items; `layer` gets 1 a decoder layer."""
        answers = [self._answer(one) for one in batch]
        features = [self._features(one.item) for one in batch]
        # First each item with the model's own answer behind it, then those with the right one that it did not give.
        told: list[NDArray[np.int64]] = [np.array(answer.token_ids if answer else (), np.int64) for answer in answers]
        forced = {i: one.wanted for i, one in enumerate(batch) if one.wanted is not None and not _met(one, answers[i])}
        samples = [
            Sample(np.append(batch[i].ids, tokens[:-1]), features[i], max(1, len(tokens)))
            for i, tokens in (*enumerate(told), *forced.items())
        ]
        meter = AttentionMeter(samples[: len(batch)], self._source.config) if self._options.attention else None
        hidden = self._reference.hidden(samples, [None, *self._ks], layer, meter)
        right = dict(zip(forced, hidden[len(batch) :], strict=True))
        rows = []
        for i, (one, answer) in enumerate(zip(batch, answers, strict=True)):
            row: dict[str, Any] = {"answer": answer.text if answer else None, **self._next_token(hidden[i])}
            row["agree"] = self._along(hidden[i], told[i]) if answer else None
            row["right"] = None if one.wanted is None else row["agree"]
            if i in forced:
                row["right"] = self._along(right[i], forced[i])
            rows.append(row | ({"attention": meter.shares(i)} if meter else {}))
        return rows

    def _answer(self, one: PreparedItem) -> Answer | None:
        """The full model's own answer."""
        if self._model is None:
            return None
        with self._model.open(list(one.item.images)) as images:
            return images.ask(one.item.question, None, Options(self._options.max_new_tokens))

    def _features(self, item: Item) -> Tensor:
        pixels = np.stack([preprocess(load_image(image), self._source.image) for image in item.images])
        return self._reference.features(pixels)

    def _next_token(self, hidden: dict[int | None, Tensor]) -> dict[str, Any]:
        """VTW Eq. 6 both ways and top-1 agreement, after the prompt, for every K."""
        logits = torch.cat([part.double() for part in self._logits(self._stack(hidden)[:, 0])])
        logs = logits.log_softmax(-1)
        full, withdrawn = logs[:1], logs[1:]
        kl = (withdrawn.exp() * (withdrawn - full)).sum(-1).clamp(min=0)
        reverse = (full.exp() * (full - withdrawn)).sum(-1).clamp(min=0)
        top1 = withdrawn.argmax(-1) == full.argmax(-1)
        if not torch.isfinite(kl + reverse).all():
            raise CheckpointError("the model gives NaN or infinite logits; download the checkpoint again")
        return {"kl": kl.tolist(), "kl_reverse": reverse.tolist(), "top1": top1.tolist()}

    def _along(self, hidden: dict[int | None, Tensor], tokens: NDArray[np.int64]) -> list[bool]:
        """For none and every K whether the likeliest next token is the given one all along; any end token will do."""
        wanted, rows = torch.from_numpy(tokens), self._stack(hidden)
        likeliest = torch.cat([part.argmax(-1) for part in self._logits(rows.flatten(0, 1))]).reshape(rows.shape[:2])
        ends = torch.isin(likeliest, self._end_ids) & torch.isin(wanted, self._end_ids)
        same: list[bool] = ((likeliest == wanted) | ends).all(-1).tolist()
        return same

    def _stack(self, hidden: dict[int | None, Tensor]) -> Tensor:
        """[1 + K's, last, hidden], no withdrawal first."""
        return torch.stack([hidden[k] for k in (None, *self._ks)])

    def _logits(self, rows: Tensor) -> Iterator[Tensor]:
        """Logits of rows [n, hidden], a bounded number at a time."""
        step = max(1, LOGITS // self._source.config.text.vocab)
        for start in range(0, len(rows), step):
            yield self._reference.head(rows[start : start + step])


def _met(one: PreparedItem, answer: Answer | None) -> bool:
    """Whether the whole answer is the right one, capitals and the last full stop apart."""
    if answer is None or answer.stopped != "end" or one.item.answer is None:
        return False
    return plain(answer.text) == plain(one.item.answer)
