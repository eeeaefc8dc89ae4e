"""What the gates learn from, measured on the frozen model: one full pass an item and a text-only tail for each K.

The inputs of all gates come from the full pass, the labels of all K from the tails along one answer. Results go to
shards, safetensors files of `batch` items in their order; which item lies in which shard is fixed beforehand, so
whoever measures a shard, and whenever, writes the same file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vtx.exporter.data import MAX_SKIPPED, Item
from vtx.exporter.reference import Reference, Sample
from vtx.exporter.source import Source, open_source
from vtx.runtime.errors import CheckpointError, RequestError, VtxError
from vtx.runtime.image import load_image, preprocess
from vtx.runtime.safetensors import open_tensor, read_header, write_safetensors

FORMAT = "2"
HEAD_ROWS = 512  # rows of logits in memory at once
UNKNOWN = 2
Ids = NDArray[np.int64]
Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """How items are measured. `answers` are the model's own greedy ones, or the data's.

    `batch` items are measured together and make one shard; own answers need their KV cache in memory.
    """

    answers: Literal["own", "reference"] = "own"
    max_new_tokens: int = 64
    batch: int = 8

    def __post_init__(self) -> None:
        if self.answers not in ("own", "reference"):
            raise RequestError(f"--answers is {self.answers!r}; give own or reference")
        if self.max_new_tokens < 1 or self.batch < 1:
            raise RequestError(f"{self.max_new_tokens} new tokens, batches of {self.batch}; give at least 1 of each")


@dataclass(frozen=True, slots=True)
class Shard:
    """Some items in a row: those `numbers` of all, held out from training or not."""

    number: int
    held_out: bool
    numbers: tuple[int, ...]
    items: tuple[Item, ...]

    @property
    def name(self) -> str:
        return f"{'held-out' if self.held_out else 'train'}-{self.number:05d}.safetensors"


def make_shards(items: Sequence[Item], batch: int, *, held_out: bool, first: int = 0) -> list[Shard]:
    """`items`, of which the first has number `first`, in shards of `batch`."""
    return [
        Shard(n, held_out, tuple(range(first + at, first + at + len(part))), part)
        for n, at in enumerate(range(0, len(items), batch))
        if (part := tuple(items[at : at + batch]))
    ]


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
        found: NDArray[np.bool_] = self.hits.all(1)
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
        source, answer = self._source, None
        if not item.images:
            raise RequestError("it has no image; questions about text skip the gates")
        content: list[Any] = [*({"type": "image"} for _ in item.images), {"type": "text", "text": item.question}]
        asked: list[Any] = [{"role": "user", "content": content}]
        prompt = source.text.prompt(asked, source.config.vision_tokens)
        if prompt[-1] == source.config.image_token_id:
            raise RequestError("its prompt ends with the image; give a chat template that prints the question after it")
        if item.answer:
            told = [*asked, {"role": "assistant", "content": [{"type": "text", "text": item.answer}]}]
            answer = self._answer_ids(prompt, source.text.prompt(told, source.config.vision_tokens, **_TOLD))
        if answer is None and self._options.answers == "reference":
            raise RequestError("it has no answer; use --answers own, or add one")
        longest = len(prompt) + max(len(answer or ()), self._options.max_new_tokens)
        if longest > source.context:
            raise RequestError(f"its prompt and answer take {longest} tokens, the model holds {source.context}")
        pixels = np.stack([preprocess(load_image(image), source.image) for image in item.images])
        with torch.inference_mode():
            return _Asked(number, prompt, self._reference.features(pixels), answer)

    def _answer_ids(self, prompt: Ids, told: Ids) -> tuple[int, ...]:
        """The answer as the template prints it behind the prompt, up to its end token."""
        if not np.array_equal(told[: len(prompt)], prompt) or len(told) == len(prompt):
            raise RequestError("the chat template does not print its answer behind the prompt; use --answers own")
        ids = told[len(prompt) :].tolist()
        ends = [at for at, token in enumerate(ids) if token in self._end_ids]
        return tuple(ids[: ends[0] + 1] if ends else [*ids, self._end_ids[0]])

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

    def _follow(
        self, asked: Sequence[_Asked]
    ) -> tuple[list[list[NDArray[np.float32]]], list[dict[str, _Along]]]:
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
            for job, hit, loss in zip(jobs, hits.split(sizes), losses.split(sizes), strict=True)
        }
        return inputs, [{name: found[n, ids] for name, ids in a.answers.items()} for n, a in enumerate(asked)]

    def _score(self, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row whether its target is the most likely token, and the cross-entropy."""
        hits, losses = [], []
        for some, wanted in zip(rows.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True):
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
        own, wanted = (_plain(self._source.text.decode(a.answers[name])) for name in ("own", "reference"))
        right = found["reference"].exact | (found["own"].exact & (own == wanted))
        return right.astype(np.uint8)


_TOLD: dict[str, Any] = {"add_generation_prompt": False}


def _plain(answer: str) -> str:
    return " ".join(answer.lower().split()).rstrip(".")


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


# --- the folder of shards -------------------------------------------------------------------------

Report = Callable[[int], None]


class Work:
    """A folder with what has been measured, guarded by a fingerprint of model, data and options.

    Raises `RequestError` where the folder holds another measurement.
    """

    def __init__(self, folder: Path, source: Source, options: MeasureOptions, shards: Sequence[Shard]) -> None:
        self.folder, self.shards = folder, tuple(shards)
        self.skipped: dict[str, list[str]] = {}
        data = hashlib.sha256()
        for shard in shards:
            for item in shard.items:
                data.update(f"{shard.name} {item.digest()}\n".encode())
        parts = {
            "model": _digest([source.fingerprint, source.version()]),
            "data": data.hexdigest(),
            "options": _digest([FORMAT, options.answers, options.max_new_tokens, options.batch]),
        }
        self.fingerprint = _digest(parts)
        self._guard(folder / "work.json", parts)

    def missing(self) -> list[Shard]:
        """The shards that are not there yet; damaged ones are removed and count as missing."""
        return [shard for shard in self.shards if not self._is_whole(shard)]

    def write(self, shard: Shard, tensors: Tensors, skipped: Sequence[str]) -> None:
        """Put a shard in its place in one step. Raises `RequestError` when too many items cannot be measured."""
        metadata = {"fingerprint": self.fingerprint, "skipped": json.dumps(list(skipped))}
        write_safetensors(self.folder / shard.name, tensors, metadata)
        self.skipped[shard.name] = list(skipped)
        self._check_skipped()

    def read(self, name: str, *, held_out: bool) -> NDArray[Any]:
        """One tensor over all shards [items, ...], of the items held out or of the others."""
        parts = []
        for shard in self.shards:
            if shard.held_out == held_out:
                tensors = read_header(self.folder / shard.name, error=RequestError).tensors
                if name in tensors:
                    parts.append(np.asarray(open_tensor(tensors[name], error=RequestError)))
        if not parts:
            raise RequestError(f"no item of {self.folder} could be measured")
        return np.concatenate(parts)

    @property
    def all_skipped(self) -> list[str]:
        return [line for shard in self.shards for line in self.skipped.get(shard.name, [])]

    def _check_skipped(self) -> None:
        total, skipped = sum(len(shard.items) for shard in self.shards), self.all_skipped
        if len(skipped) > MAX_SKIPPED * total:
            raise RequestError(
                f"{len(skipped)} of {total} items cannot be measured, the limit is {MAX_SKIPPED:.0%}; mend the data. "
                f"First: {skipped[0]}"
            )

    def _guard(self, path: Path, parts: Mapping[str, str]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_text(json.dumps(parts), encoding="utf-8")
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise RequestError(f"cannot use {self.folder} to work in ({e}); name another --work") from e
        other = [name for name in parts if not isinstance(found, dict) or found.get(name) != parts[name]]
        if other:
            raise RequestError(
                f"{self.folder} holds measurements with other {' and '.join(other)}; name another --work, or remove it"
            )

    def _is_whole(self, shard: Shard) -> bool:
        path = self.folder / shard.name
        if not path.exists():
            return False
        try:
            header = read_header(path, error=RequestError)
            if header.metadata.get("fingerprint") == self.fingerprint:
                self.skipped[shard.name] = json.loads(header.metadata["skipped"])
                return True
        except (VtxError, ValueError, KeyError):
            pass
        with suppress(OSError):
            path.unlink()
        return False


def measure(measurer: Measurer, work: Work, report: Report) -> None:
    """Measure on this machine what is missing. `report` gets the items as they are done."""
    for shard in work.missing():
        work.write(shard, *measurer(shard))
        report(len(shard.items))


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

