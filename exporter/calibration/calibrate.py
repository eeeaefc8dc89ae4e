"""Measure how withdrawal at every K changes the answers to a set of questions: VTW Eq. 6, and equality of the answers.

Each question costs one pass of the plain reference, or of a bundle's engine: all tokens, and for each K the text tokens
from there on.
Results are saved batch by batch, so that an interrupted measurement resumes where it stopped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtx.exporter.bundling.predict import export_base
from vtx.exporter.calibration.source import OpenedModel, answering
from vtx.exporter.checkpoint.spec import model_size
from vtx.exporter.reference.attention import AttentionMeter
from vtx.exporter.reference.engine import EngineReference
from vtx.exporter.reference.model import Encoded, Reference, Sample, Watchers
from vtx.exporter.reference.prompts import PreparedItem, prepare
from vtx.runtime.backends.memory import RUN_BASE, needed_memory
from vtx.runtime.bundle.spec.model_spec import unscored
from vtx.runtime.errors import CheckpointError, RequestError, UnsupportedModelError
from vtx.runtime.policies.make import read_rest
from vtx.runtime.strict import json_value
from vtx.runtime.units import Progress, counter
from vtx.tools.calibration.report import ItemResult, Measurement, read_result
from vtx.tools.data.items import Data, image_key, plain
from vtx.tools.data.journal import ResultJournal
from vtx.tools.data.kinds import kind_of

LOGITS = 1 << 25  # logits computed at a time


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """A measurement of every K from `k_from` (5) on; without new tokens only the next one is compared.

    With a `rest`, "10%" or a number, that many image tokens stay at each K.
    """

    k_from: int | None = None
    max_new_tokens: int = 16
    batch: int = 8
    attention: bool = False
    rest: str | None = None

    def __post_init__(self) -> None:
        if self.batch < 1 or self.max_new_tokens < 0:
            raise RequestError(
                f"--batch is {self.batch} and --max-new-tokens {self.max_new_tokens}; they must be at least 1 and 0"
            )

        if self.rest is not None:
            read_rest(self.rest)
            if self.attention:
                raise RequestError("--attention measures the full model; leave it out with --rest")

    def ks(self, layers: int, cuts: Sequence[int] | None = None) -> tuple[int, ...]:
        """The K to measure: all, or of a bundle on its engine those of its `cuts`."""
        if layers < 2:
            raise RequestError(f"the model has {layers} layer; choosing K needs at least 2")
        if cuts == ():
            raise RequestError("the bundle was cut at no K; export it with --k and the K to measure")
        first, last = (min(5, layers), layers) if cuts is None else (2, max(cuts))
        first = first if self.k_from is None else self.k_from
        if not 2 <= first <= last:
            raise RequestError(f"--k-from is {first}; it must be 2 to {last}, the first layer without vision tokens")
        return tuple(k for k in cuts or range(2, layers + 1) if k >= first)


def predict_memory(source: OpenedModel, items: Sequence[PreparedItem], options: CalibrationOptions) -> int:
    if source.engine is not None:
        backend = source.engine.backend
        return export_base() + needed_memory(source.engine.bundle, backend.device, backend.compute)
    size = model_size(source.config, source.name)
    text = source.config.text
    image_token = source.config.image_token_id
    longest = max(len(prepared.ids) for prepared in items) + options.max_new_tokens
    longest_text = max(int((prepared.ids != image_token).sum()) for prepared in items) + options.max_new_tokens
    largest = 4 * max(size.decoder.head_macs, size.decoder.layer_macs)
    withdrawn = 4 * text.hidden * len(options.ks(text.layers)) * longest_text
    batch = min(options.batch, len(items)) * (4 * text.hidden * longest + withdrawn)
    memory = export_base() + 2 * largest + batch + 4 * withdrawn * max(1, text.ffn // text.hidden) + 12 * LOGITS
    if options.max_new_tokens:
        memory += RUN_BASE + 4 * size.decoder.parameters + 8 * text.layers * text.kv_heads * text.head_dim * longest
    return memory


def calibrate(
    source: OpenedModel, data: Data, options: CalibrationOptions, out: Path, report: Progress = lambda *_: None
) -> Measurement:
    """Measure every item that `out`/samples.jsonl does not hold yet, and save it there; equal items count once."""
    ks = _measured_ks(source, options)
    askable, skipped = prepare(source, data, options.max_new_tokens)
    with contextlib.ExitStack() as stack:
        settings = {name: value for name, value in asdict(options).items() if name != "batch"}
        if options.rest is None:
            del settings["rest"]
        identity = {"model": source.identity, "set of options": settings}
        journal = stack.enter_context(ResultJournal(out / "samples.jsonl", identity))
        items = {prepared.item.digest(): prepared for prepared in askable}
        missing = [digest for digest in items if digest not in journal.results]
        reference = source.reference()
        answerer: Reference | EngineReference | None = None
        if missing and options.max_new_tokens:
            answerer = (
                reference
                if source.engine
                else EngineReference(stack.enter_context(answering(source, out / ".answering", report)))
            )
        measurer = BatchMeasurer(source, reference, answerer, ks, options)
        size = options.batch if source.engine is None else 1  # an engine runs one at a time
        batches = [missing[i : i + size] for i in range(0, len(missing), size)]
        layer = counter(report, "measuring", len(batches) * source.config.text.layers)
        for batch in batches:
            measured = measurer.batch([items[digest] for digest in batch], layer)
            journal.add({digest: json_value(result) for digest, result in zip(batch, measured, strict=True)})
        results = _results(journal, items, len(ks))
    return Measurement(ks, results, tuple(skipped), tuple(items))


def _measured_ks(source: OpenedModel, options: CalibrationOptions) -> tuple[int, ...]:
    """The K to measure. Raises RequestError, UnsupportedModelError for what this model or engine does not give."""
    if options.attention and source.config.text.two_way == "prompt":
        raise UnsupportedModelError(
            f"{source.name} has prompts that see themselves both ways, and shares of attention are measured in causal "
            "ones; leave out --attention"
        )
    ks = options.ks(source.config.text.layers, source.cuts)
    if options.rest is None:
        return ks
    if source.engine is not None:
        raise RequestError(
            "a rest is measured in float32; leave out --device, or measure the bundle with vtx-eval or vtx-fit"
        )
    ks = tuple(k for k in ks if not unscored(source.config.text, k - 1))
    if not ks:
        raise RequestError(f"{source.name} has no K from {options.k_from or 5} on at which a rest can be chosen")
    return ks


def _results(journal: ResultJournal, items: Mapping[str, PreparedItem], ks: int) -> tuple[ItemResult, ...]:
    """The result of each item, with the number of its image and its kind of answer."""
    numbers: dict[object, int] = {}
    results = list[ItemResult]()
    for digest, prepared in items.items():
        result = read_result(journal.results[digest], ks)
        image = numbers.setdefault(tuple(map(image_key, prepared.item.images)), len(numbers))
        answer = prepared.item.answer or result.answer
        results.append(replace(result, image=image, kind=None if answer is None else kind_of(answer)))
    return tuple(results)


def _correct(prepared: PreparedItem, text: str | None) -> bool:
    """Return True if a complete answer's text is the expected one."""
    expected = prepared.item.answer
    return text is not None and expected is not None and plain(text) == plain(expected)


class BatchMeasurer:
    """Measures batches; an item's result does not depend on its batch."""

    def __init__(
        self,
        source: OpenedModel,
        reference: Reference | EngineReference,
        answerer: Reference | EngineReference | None,
        ks: tuple[int, ...],
        options: CalibrationOptions,
    ) -> None:
        self.reference = reference
        self.answerer = answerer
        self._source = source
        self._ks = ks
        self._options = options
        self._end_ids = torch.tensor(source.text.settings.end_ids)

    @torch.inference_mode()
    def batch(self, batch: Sequence[PreparedItem], layer: Callable[[int], None]) -> list[ItemResult]:
        """The results of some items; calls `layer(1)` after each decoder layer."""
        ends = self._source.text.settings.end_ids
        features = [self.reference.encode(prepared.item.images, self._source.image) for prepared in batch]
        answers = list[NDArray[np.int64]]()  # the full model's own
        texts = list[str | None]()
        for prepared, encoded in zip(batch, features, strict=True):
            answer, text = self._answer(prepared, encoded)
            answers.append(answer)
            texts.append(text)
        # First each item followed by the model's own answer; then, if that is wrong, followed by the right one.
        forced: dict[int, NDArray[np.int64]] = {}
        for i, (prepared, text) in enumerate(zip(batch, texts, strict=True)):
            complete = text if len(answers[i]) and answers[i][-1] in ends else None
            if prepared.answer_ids is not None and not _correct(prepared, complete):
                forced[i] = prepared.answer_ids
        samples = [
            Sample(np.append(batch[i].ids, tokens[:-1]), features[i], max(1, len(tokens)))
            for i, tokens in (*enumerate(answers), *forced.items())
        ]
        meter = AttentionMeter(samples[: len(batch)], self._source.config) if self._options.attention else None
        hidden = self._hidden(samples, layer, meter)
        right = dict(zip(forced, hidden[len(batch) :], strict=True))
        results = []
        for i, (prepared, text) in enumerate(zip(batch, texts, strict=True)):
            agree = None if text is None else self._along(hidden[i], answers[i])
            reached = self._along(right[i], forced[i]) if i in forced else agree
            results.append(
                ItemResult(
                    answer=text,
                    **self._next_token(hidden[i]),
                    agree=agree,
                    right=None if prepared.answer_ids is None else reached,
                    attention=meter.shares(i) if meter else None,
                )
            )
        return results

    def _answer(self, prepared: PreparedItem, features: Encoded) -> tuple[NDArray[np.int64], str | None]:
        """The full model's answer to an item, if there is one that answers; `features` are of `reference`."""
        answerer = self.answerer
        if answerer is None:
            return np.zeros(0, np.int64), None
        if answerer is not self.reference:
            features = answerer.encode(prepared.item.images, self._source.image)
        text = self._source.text
        (ids,) = answerer.greedy([Sample(prepared.ids, features)], text.settings.end_ids, self._options.max_new_tokens)
        return np.array(ids, np.int64), text.decode(ids).lstrip()

    def _hidden(
        self, samples: Sequence[Sample], layer: Callable[[int], None], meter: AttentionMeter | None
    ) -> Sequence[dict[int | None, Tensor]]:
        """Each sample's hidden states at its last tokens, for none and every K."""
        depths: list[int | None] = [None, *self._ks]
        if self._options.rest is None:
            return self.reference.hidden(samples, depths, layer, Watchers(meter))
        assert isinstance(self.reference, Reference), "an engine was refused"
        return self.reference.hidden(samples, depths, layer, rest=read_rest(self._options.rest))

    def _next_token(self, hidden: dict[int | None, Tensor]) -> dict[str, Any]:
        """VTW Eq. 6 both ways and top-1 agreement, after the prompt, for every K."""
        logits = torch.cat([part.double() for part in self._logits(self._stack(hidden)[:, 0])])
        logs = logits.log_softmax(-1)
        full = logs[:1]
        withdrawn = logs[1:]
        kl = (withdrawn.exp() * (withdrawn - full)).sum(-1).clamp(min=0)
        reverse = (full.exp() * (full - withdrawn)).sum(-1).clamp(min=0)
        top1 = withdrawn.argmax(-1) == full.argmax(-1)
        if not torch.isfinite(kl + reverse).all():
            raise CheckpointError("the model gives NaN or infinite logits; download the checkpoint again")
        return {"kl": tuple(kl.tolist()), "kl_reverse": tuple(reverse.tolist()), "top1": tuple(top1.tolist())}

    def _along(self, hidden: dict[int | None, Tensor], tokens: NDArray[np.int64]) -> tuple[bool, ...]:
        """For none and every K, True if greedy decoding gives `tokens`; all end tokens count as equal."""
        expected = torch.from_numpy(tokens)
        states = self._stack(hidden)
        likeliest = torch.cat([part.argmax(-1) for part in self._logits(states.flatten(0, 1))])
        likeliest = likeliest.reshape(states.shape[:2])
        ends = torch.isin(likeliest, self._end_ids) & torch.isin(expected, self._end_ids)
        return tuple(((likeliest == expected) | ends).all(-1).tolist())

    def _stack(self, hidden: dict[int | None, Tensor]) -> Tensor:
        """[1 + K's, last, hidden], no withdrawal first."""
        return torch.stack([hidden[k] for k in (None, *self._ks)])

    def _logits(self, hidden: Tensor) -> Iterator[Tensor]:
        step = max(1, LOGITS // self._source.config.text.vocab)
        for start in range(0, len(hidden), step):
            yield self.reference.head(hidden[start : start + step])
