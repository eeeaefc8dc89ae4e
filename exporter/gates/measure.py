"""What the gates learn from, measured on the frozen model: one full pass an item and a text-only tail for each K.

The inputs of all gates come from the full pass, the labels of all K from the tails along one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vtx.exporter.calibration.source import open_source
from vtx.exporter.data.items import Item, plain
from vtx.exporter.data.prompts import answer_ids, messages
from vtx.exporter.data.source import Source
from vtx.exporter.gates.workdir import MeasureOptions, Shard, Tensors, Work
from vtx.exporter.reference.model import Reference, Sample
from vtx.runtime.errors import CheckpointError, RequestError, VtxError
from vtx.runtime.vision.image import load_image
from vtx.runtime.vision.preprocess import preprocess

HEAD_ROWS = 512  # rows of logits in memory at once
UNKNOWN = 2
Ids = NDArray[np.int64]
Report = Callable[[int], None]


@dataclass(slots=True)
class _Asked:
    """One item on its way through the model; `answers` are those to follow: own, reference."""

    number: int
    prompt: Ids
    features: Tensor
    reference: tuple[int, ...] | None
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Along:
    """A model along one answer, for each K and last without withdrawal.

    `hits` [K, tokens]: the token is the most likely one; `losses` [K]: mean cross-entropy.
    """

    hits: NDArray[np.bool_]
    losses: NDArray[np.float32]

    @property
    def exact(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = np.all(self.hits, 1)
        return found


class Measurer:
    """A model opened once, that measures shards."""

    def __init__(self, source: Source, options: MeasureOptions) -> None:
        self._source, self._options = source, options
        self._reference = Reference(source.checkpoint, source.config)
        self._end_ids = source.text.settings.end_ids

    @classmethod
    def open(cls, model: str, fingerprint: str, options: MeasureOptions) -> Measurer:
        """Open `model` on this machine; it has to be the one of `fingerprint`. Raises `CheckpointError`."""
        source = open_source(model)
        if source.fingerprint != fingerprint:
            raise CheckpointError(
                f"{model} is another model on this machine ({source.fingerprint[:12]}, not {fingerprint[:12]}); "
                "give every worker the same files under the same path"
            )
        return cls(source, options)

    @property
    def ks(self) -> tuple[int, ...]:
        return tuple(range(2, self._source.config.text.layers + 1))

    def __call__(self, shard: Shard) -> tuple[Tensors, list[str]]:
        """The tensors of a shard, and a line on each item that cannot be measured.

        Per item: `item`, its number; `rows`, of text and of vision in the prompt; `inputs.{layer}` [2 * hidden],
        float32, for the gate on decoder layer `layer`, from 0; and for each K from 2 on, last for none: `agreement`,
        the share of the answer's tokens that are the most likely ones; `cross_entropy`, their mean. Held out as well:
        `same`, 1 where the answer is the full model's own; `right`, 1 where it is the data's, 2 where that has none.
        """
        asked, skipped = self._ask(shard)
        if not asked:
            return {"item": np.zeros(0, np.int64)}, skipped
        with torch.inference_mode():
            self._answer(asked, shard.held_out)
            inputs, along = self._follow(asked)
        tensors: dict[str, NDArray[Any]] = {
            "item": np.array([a.number for a in asked]),
            "rows": np.stack([self._rows(a) for a in asked]),
            "agreement": np.stack([found[self._options.answers].hits.mean(1, dtype=np.float32) for found in along]),
            "cross_entropy": np.stack([found[self._options.answers].losses for found in along]),
        }
        for layer in range(len(self.ks)):
            tensors[f"inputs.{layer}"] = np.stack([found[layer] for found in inputs])
        if shard.held_out:
            tensors["same"] = np.stack([found["own"].exact for found in along]).astype(np.uint8)
            tensors["right"] = np.stack([self._right(a, found) for a, found in zip(asked, along, strict=True)])
        return tensors, skipped

    def _ask(self, shard: Shard) -> tuple[list[_Asked], list[str]]:
        asked, skipped = list[_Asked](), list[str]()
        for number, item in zip(shard.numbers, shard.items, strict=True):
            try:
                asked.append(self._prepare(number, item))
            except VtxError as e:
                skipped.append(f"item {number + 1}: {e}")
        return asked, skipped

    def _prepare(self, number: int, item: Item) -> _Asked:
        """Raises VtxError for an item that cannot be measured."""
        source = self._source
        if not item.images:
            raise RequestError("it has no image; questions about text skip the gates")
        prompt = source.text.prompt(messages(item), source.config.vision_tokens)
        if prompt[-1] == source.config.image_token_id:
            raise RequestError("its prompt ends with the image; give a chat template that prints the question after it")
        found = answer_ids(source, item, prompt)
        answer = None if found is None else tuple(found.tolist())
        if answer is None and self._options.answers == "reference":
            raise RequestError("it has no answer behind its prompt; use --answers own, or add one")
        longest = len(prompt) + max(len(answer or ()), self._options.max_new_tokens)
        if longest > source.context:
            raise RequestError(f"its prompt and answer take {longest} tokens, the model holds {source.context}")
        pixels = np.stack([preprocess(load_image(image), source.image) for image in item.images])
        with torch.inference_mode():
            return _Asked(number, prompt, self._reference.features(pixels), answer)

    def _answer(self, asked: Sequence[_Asked], held_out: bool) -> None:
        """Choose the answers to follow: the one that labels, and both where the item is held out."""
        if held_out or self._options.answers == "own":
            prompts = [Sample(a.prompt, a.features) for a in asked]
            own = self._reference.greedy(prompts, self._end_ids, self._options.max_new_tokens)
            for a, ids in zip(asked, own, strict=True):
                a.answers["own"] = tuple(ids)
        for a in asked:
            if a.reference is not None and (held_out or self._options.answers == "reference"):
                a.answers["reference"] = a.reference

    def _follow(self, asked: Sequence[_Asked]) -> tuple[list[list[NDArray[np.float32]]], list[dict[str, _Along]]]:
        """Gate inputs of each item by layer, and how the model fares along each of its answers.

        Equal answers are followed once.
        """
        jobs = list(dict.fromkeys((n, ids) for n, a in enumerate(asked) for ids in a.answers.values()))
        samples = [_forced(asked[n], ids) for n, ids in jobs]
        inputs: list[list[NDArray[np.float32]]] = [[] for _ in asked]

        def watch(layer: int, number: int, rows: Tensor) -> None:
            n = jobs[number][0]
            if layer <= len(self.ks) and len(inputs[n]) < layer:
                inputs[n].append(gate_input(rows[: len(asked[n].prompt)], _front(asked[n].prompt, self._source)))

        ks: list[int | None] = [*self.ks, None]
        hidden = self._reference.hidden(samples, ks, watch=watch)
        rows = torch.cat([torch.cat([found[k] for k in ks]) for found in hidden])
        targets = torch.cat([torch.tensor(ids).repeat(len(ks)) for _, ids in jobs])
        hits, losses = self._score(rows, targets)
        sizes = [len(ks) * len(ids) for _, ids in jobs]
        found = {
            job: _Along(hit.reshape(len(ks), -1).numpy(), loss.reshape(len(ks), -1).mean(1).numpy())
            for job, hit, loss in zip(jobs, torch.split(hits, sizes), torch.split(losses, sizes), strict=True)
        }
        return inputs, [{name: found[n, ids] for name, ids in a.answers.items()} for n, a in enumerate(asked)]

    def _score(self, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row whether its target is the most likely token, and the cross-entropy."""
        hits, losses = [], []
        for some, wanted in zip(torch.split(rows, HEAD_ROWS), torch.split(targets, HEAD_ROWS), strict=True):
            logits = self._reference.head(some)
            hits.append(logits.argmax(-1) == wanted)
            losses.append(F.cross_entropy(logits, wanted, reduction="none"))
        return torch.cat(hits), torch.cat(losses)

    def _rows(self, a: _Asked) -> NDArray[np.int64]:
        vision = int((a.prompt == self._source.config.image_token_id).sum())
        return np.array([len(a.prompt) - vision, vision])

    def _right(self, a: _Asked, found: Mapping[str, _Along]) -> NDArray[np.uint8]:
        """By K whether the answer is the data's, token by token, or reads the same."""
        if a.reference is None:
            return np.full(len(self.ks) + 1, UNKNOWN, np.uint8)
        own, wanted = (plain(self._source.text.decode(a.answers[name])) for name in ("own", "reference"))
        right = found["reference"].exact | (found["own"].exact & (own == wanted))
        return right.astype(np.uint8)


def _forced(a: _Asked, ids: tuple[int, ...]) -> Sample:
    """The prompt and all of an answer but its last token, asked from the prompt's last row on."""
    return Sample(np.concatenate([a.prompt, np.array(ids[:-1], np.int64)]), a.features, len(ids))


def _front(prompt: Ids, source: Source) -> int:
    return int(np.flatnonzero(prompt == source.config.image_token_id)[-1]) + 1


def gate_input(rows: Tensor, front: int) -> NDArray[np.float32]:
    """[mean of a prompt's rows [n, hidden] from `front` on but the last one; the last one]; one row: zeros and it."""
    tail = rows[front:]
    mean = tail[:-1].mean(0) if len(tail) > 1 else torch.zeros_like(tail[0])
    found: NDArray[np.float32] = torch.cat((mean, tail[-1])).float().numpy()
    return found


def measure(measurer: Measurer, work: Work, report: Report) -> None:
    """Measure on this machine what is missing. `report` gets the items as they are done."""
    for shard in work.missing():
        work.write(shard, *measurer(shard))
        report(len(shard.items))
