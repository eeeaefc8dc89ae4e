"""Training data of the gates, measured on the frozen model: one full pass per item, and per K a text-only continuation.

The inputs of all gates come from the full pass, the labels of all K from the continuations along one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vtx.exporter.calibration.source import OpenedModel
from vtx.exporter.gates.workdir import MeasureOptions, Shard, Tensors, WorkDirectory
from vtx.exporter.reference.model import Encoded, Sample, Watchers
from vtx.exporter.reference.prompts import answer_ids, prompt_ids
from vtx.runtime.errors import RequestError, VtxError
from vtx.tools.calibration.gates import UNKNOWN
from vtx.tools.data.items import Item, plain

HEAD_TOKENS = 512  # tokens whose logits are in memory at once
Ids = NDArray[np.int64]


@dataclass(slots=True)
class _GateItem:
    """One prepared item; `answers` are those to force through the model: own, reference."""

    number: int
    prompt: Ids
    features: Encoded
    reference: tuple[int, ...] | None
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)


# The model forced along one answer, for each K and last without withdrawal: whether each token is the most likely one
# [K, tokens], and the mean cross-entropy [K].
_Along = tuple[NDArray[np.bool_], NDArray[np.float32]]


class Measurer:
    """A model opened once, that measures shards."""

    def __init__(self, source: OpenedModel, options: MeasureOptions) -> None:
        self._source = source
        self._options = options
        self._reference = source.reference()
        if source.cuts not in (None, self.ks):
            raise RequestError(
                f"{source.name} was cut at {len(source.cuts or ())} of {len(self.ks)} K, and each gate needs its own; "
                f"export it with --k {','.join(map(str, self.ks))}"
            )

    @property
    def ks(self) -> tuple[int, ...]:
        return tuple(range(2, self._source.config.text.layers + 1))

    def __call__(self, shard: Shard) -> tuple[Tensors, list[str]]:
        """The tensors of a shard, and a line on each item that cannot be measured.

        Per item: `item`, its number; `rows`, text and vision tokens of the prompt; `inputs.{layer}` [2 * hidden],
        float32, for the gate on decoder layer `layer`, from 0; and for each K, starting at 2, last none: `agreement`,
        the share of the answer's tokens that are the most likely ones; `cross_entropy`, their mean. Held-out items add:
        `same`, 1 if the answer is the full model's own; `right`, 1 if it is the data's, 2 if the data have none.
        """
        items, skipped = self._prepared(shard)
        if not items:
            return {"item": np.zeros(0, np.int64)}, skipped
        labelling = self._options.answers
        with torch.inference_mode():
            self._answer(items, held_out=shard.held_out)
            inputs, along = self._follow(items)
        vision = [int((item.prompt == self._source.config.image_token_id).sum()) for item in items]
        tensors: dict[str, NDArray[Any]] = {
            "item": np.array([item.number for item in items]),
            "rows": np.array([[len(item.prompt) - count, count] for item, count in zip(items, vision, strict=True)]),
            "agreement": np.stack([by_name[labelling][0].mean(1, dtype=np.float32) for by_name in along]),
            "cross_entropy": np.stack([by_name[labelling][1] for by_name in along]),
        }
        for layer in range(len(self.ks)):
            tensors[f"inputs.{layer}"] = np.stack([by_layer[layer] for by_layer in inputs])
        if shard.held_out:
            tensors["same"] = np.stack([by_name["own"][0].all(1) for by_name in along]).astype(np.uint8)
            tensors["right"] = np.stack([self._right(*of_item) for of_item in zip(items, along, strict=True)])
        return tensors, skipped

    def _prepared(self, shard: Shard) -> tuple[list[_GateItem], list[str]]:
        """The items that can be measured, and a line on each other one."""
        items = list[_GateItem]()
        skipped = list[str]()
        for number, item in zip(shard.numbers, shard.items, strict=True):
            try:
                items.append(self._prepare(number, item))
            except VtxError as e:
                skipped.append(f"item {number + 1}: {e}")
        return items, skipped

    def _answer(self, items: Sequence[_GateItem], *, held_out: bool) -> None:
        """Give each item the answers along which it is measured; those that are held out have both."""
        labelling = self._options.answers
        if held_out or labelling == "own":
            prompts = [Sample(item.prompt, item.features) for item in items]
            answers = self._reference.greedy(prompts, self._source.text.settings.end_ids, self._options.max_new_tokens)
            for item, ids in zip(items, answers, strict=True):
                item.answers["own"] = tuple(ids)
        for item in items:
            if item.reference is not None and (held_out or labelling == "reference"):
                item.answers["reference"] = item.reference

    def _right(self, item: _GateItem, along: dict[str, _Along]) -> NDArray[np.uint8]:
        """By K, whether the answer is the data's, token by token or as normalised text."""
        if item.reference is None:
            return np.full(len(self.ks) + 1, UNKNOWN, np.uint8)
        texts = {plain(self._source.text.decode(item.answers[name])) for name in ("own", "reference")}
        right = along["reference"][0].all(1) | (along["own"][0].all(1) & (len(texts) == 1))
        return np.asarray(right, np.uint8)

    def _prepare(self, number: int, item: Item) -> _GateItem:
        source = self._source
        if not item.images:
            raise RequestError("it has no image; questions about text skip the gates")
        prompt = prompt_ids(source, item)
        if prompt[-1] == source.config.image_token_id:
            raise RequestError("its prompt ends with the image; give a chat template that prints the question after it")
        ids = answer_ids(source, item, prompt)
        answer = None if ids is None else tuple(ids.tolist())
        if answer is None and self._options.answers == "reference":
            raise RequestError("it has no answer after its prompt; use --answers own, or add an answer")
        longest = len(prompt) + max(len(answer or ()), self._options.max_new_tokens)
        if longest > source.context:
            raise RequestError(
                f"its prompt and answer take {longest} tokens, the model's context is {source.context}; shorten them"
            )
        with torch.inference_mode():
            return _GateItem(number, prompt, self._reference.encode(item.images, source.image), answer)

    def _follow(self, items: Sequence[_GateItem]) -> tuple[list[list[NDArray[np.float32]]], list[dict[str, _Along]]]:
        """Gate inputs of each item by layer, and the model along each of its answers; equal ones run once."""
        jobs = list(dict.fromkeys((n, ids) for n, item in enumerate(items) for ids in item.answers.values()))
        samples = [  # outputs start at the prompt's last token; an answer's last token predicts nothing
            Sample(np.concatenate([items[n].prompt, np.array(ids[:-1], np.int64)]), items[n].features, len(ids))
            for n, ids in jobs
        ]
        inputs: list[list[NDArray[np.float32]]] = [[] for _ in items]

        def watch(layer: int, number: int, hidden: Tensor) -> None:
            n, answer = jobs[number]
            if layer <= len(self.ks) and len(inputs[n]) < layer:
                prompt = items[n].prompt
                prefix = int(np.flatnonzero(prompt == self._source.config.image_token_id)[-1]) + 1
                suffix = hidden[prefix - len(prompt) - len(answer) + 1 :]  # an engine gives these alone
                inputs[n].append(gate_input(suffix[: len(prompt) - prefix], 0))

        ks: list[int | None] = [*self.ks, None]
        by_sample = self._reference.hidden(samples, ks, watchers=Watchers(output=watch))
        hidden = torch.cat([torch.cat([by_k[k] for k in ks]) for by_k in by_sample])
        targets = torch.cat([torch.tensor(ids).repeat(len(ks)) for _, ids in jobs])
        hits = list[Tensor]()
        losses = list[Tensor]()
        for states, expected in zip(torch.split(hidden, HEAD_TOKENS), torch.split(targets, HEAD_TOKENS), strict=True):
            logits = self._reference.head(states)
            hits.append(logits.argmax(-1) == expected)
            losses.append(F.cross_entropy(logits, expected, reduction="none"))
        sizes = [len(ks) * len(ids) for _, ids in jobs]
        by_job = zip(jobs, torch.split(torch.cat(hits), sizes), torch.split(torch.cat(losses), sizes), strict=True)
        along = dict[Any, _Along]()
        for job, hit, loss in by_job:
            along[job] = hit.reshape(len(ks), -1).numpy(), loss.reshape(len(ks), -1).mean(1).numpy()
        return inputs, [{name: along[n, ids] for name, ids in item.answers.items()} for n, item in enumerate(items)]


def gate_input(hidden: Tensor, prefix: int) -> NDArray[np.float32]:
    """Of the hidden states [n, hidden] after the prefix the mean without the last (zeros if alone), then the last."""
    suffix = hidden[prefix:]
    mean = suffix[:-1].mean(0) if len(suffix) > 1 else torch.zeros_like(suffix[0])
    features: NDArray[np.float32] = torch.cat((mean, suffix[-1])).float().numpy()
    return features


def measure(measurer: Measurer, work: WorkDirectory, report: Callable[[int], None]) -> None:
    """Measure the missing shards on this machine. `report` gets the number of items done."""
    for shard in work.missing():
        work.write(shard, *measurer(shard))
        report(len(shard.items))
