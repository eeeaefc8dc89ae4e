"""The distance of a new bundle's answers from its checkpoint's, and the arithmetic that does not add to it.

The bundle answers some questions in float32. The checkpoint, computed in float32 one layer at a time, then reads the
same tokens, and so does the bundle in each narrower arithmetic. The measure is the mean Kullback-Leibler divergence
(KL, in nats) of their distributions of the next token from the checkpoint's: what fewer bits cost, and what arithmetic
adds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.bundling.options import MeasuredArithmetic
from vtx.exporter.bundling.prepare import Plan
from vtx.exporter.bundling.staging import NeedsConsentError
from vtx.exporter.reference.prompts import messages
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.backends.allocation import returning_memory
from vtx.runtime.backends.devices import missing_instructions
from vtx.runtime.backends.engines import ENGINES, INSTRUCTIONS, merit_on_cpu
from vtx.runtime.backends.memory import needed_memory
from vtx.runtime.bundle.bundle import Bundle, seal_manifest
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import BundleError, DeviceError, RequestError
from vtx.runtime.host.machine import available_memory
from vtx.runtime.policies.make import make_policy
from vtx.runtime.precision import PRECISIONS
from vtx.runtime.report.golden import DECODED_TOKENS, bounded_prompt
from vtx.runtime.session.sampling import log_softmax
from vtx.runtime.session.session import Session
from vtx.runtime.units import Progress, size
from vtx.runtime.vision.preprocess import without_notes
from vtx.runtime.vision.tokens import Ids
from vtx.tools.data.items import Item, scene_items

Logits = NDArray[np.float32]
DEVICE = next(
    name for name, engine in ENGINES.items() if not engine.gpu and INSTRUCTIONS.keys() & engine.compute.keys()
)
SAMPLES = 36  # questions of --calibration, at most
SCENES = 24
TEXTS = (
    "Describe a rainy morning in a small harbour town.",
    "Write a short recipe for pancakes, with amounts.",
    "What is 17 times 23? Show each step.",
    "Write a Python function that returns the median of a list.",
    "Give the name, year and price of a book as a JSON object.",
    "Translate into French: The train to Lyon leaves at half past six.",
)
TOKENS = 24  # of an answer, at most
ENOUGH = 192  # tokens of all answers, after which no further question is asked
SECONDS = 120.0  # that a measurement by default takes
FIRST_SHARE = 0.2  # of them for the answers in float32
MARGIN = 0.005  # nats that narrower arithmetic may add to the KL of float32
SHARE = 0.1  # of the KL of float32 that it may add beside
MOST = 1.0  # nats of a bundle that nobody needs to allow
LARGE = 1 << 30  # bytes of memory that are said before they are taken


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """A question's `ids` [n], of its picture at most the first `DECODED_TOKENS` tokens, and its answer's ids [m]."""

    item: Item
    ids: Ids
    answer: tuple[int, ...]


@dataclass(slots=True)
class Divergence:
    """The summed KL of `tokens` positions, and of how many the most probable token is the same."""

    kl: float = 0.0
    same: int = 0
    tokens: int = 0

    def add(self, wanted: Logits, logits: Logits) -> None:
        """Count the positions of two arrays [m, vocab]."""
        for p, q in zip(map(log_softmax, wanted), map(log_softmax, logits), strict=True):
            self.kl += float(np.exp(p) @ (p - q))
            self.same += int(p.argmax() == q.argmax())
            self.tokens += 1

    def to_record(self) -> dict[str, float]:
        return {"kl": float(f"{self.kl / self.tokens:.3g}"), "same": round(self.same / self.tokens, 4)}


def candidates(manifest: Manifest, *, always: bool) -> tuple[str, ...]:
    """Types of arithmetic to measure on this processor; none without OpenVINO.

    Without `always` there are none if CPUs choose another engine, and only those that a bundle uses by default.
    """
    engine = ENGINES[DEVICE]
    chosen = merit_on_cpu(manifest, openvino=True)[0] > merit_on_cpu(manifest, openvino=False)[0]
    if find_spec(engine.modules[0]) is None or engine.dialect not in manifest.dialects or not (chosen or always):
        return ()
    bits = PRECISIONS[manifest.precision].bits
    integers = bits is not None and (bits == 8 or always)
    return tuple(kind for kind in engine.compute if kind != "f32" and (kind != "int8" or integers))


def is_rounded(manifest: Manifest) -> bool:
    """True if the bundle holds fewer bits than its checkpoint: integers as weights, or as K and V."""
    weights = manifest.precision, manifest.vision_precision, manifest.head_precision
    return any(PRECISIONS[part].bits for part in weights) or manifest.kv_scales is not None


def memory_to_measure(folder: Path, device: str, kinds: Sequence[str]) -> int:
    """Bytes that `measure` needs at most, with one engine at a time."""
    bundle = Bundle.open(folder, check=False)
    logits = 2 * 4 * bundle.manifest.model.vocab * (ENOUGH + TOKENS)
    return logits + max(needed_memory(bundle, device, kind) for kind in ("f32", *kinds))


def check_fidelity(
    folder: Path, plan: Plan, wanted: MeasuredArithmetic, report: Progress, say: Callable[[str], None]
) -> None:
    """Measure the bundle as `measure` does; leave it out for want of memory, unless it is asked for.

    Raises NeedsConsentError for a bundle beyond `MOST`, unless the plan's options allow changed answers.
    """
    manifest = Bundle.open(folder, check=False).manifest
    possible = candidates(manifest, always=wanted.always)
    kinds = tuple(kind for kind in possible if not missing_instructions(kind))
    if lacking := [kind for kind in possible if kind not in kinds]:
        say(
            f"not measuring {' and '.join(lacking)} arithmetic, for which this processor has no instructions; on one "
            "that has them, vtx-fit measures it"
        )
    if not kinds and not is_rounded(manifest):
        return None
    device = DEVICE if kinds else "cpu"
    if not _has_memory(memory_to_measure(folder, device, kinds), kinds, wanted, say):
        return None
    record = measure(folder, plan, device, kinds, wanted, report)
    if not record:
        return say("not measuring the bundle's answers: no question about one image fits its template and its context")
    lost = record["f32"]
    if lost["kl"] > MOST and not plan.options.allow_changed_answers:
        raise NeedsConsentError(
            f"the bundle's weights are too far from the checkpoint's: a KL of {lost['kl']:.2f} nats over "
            f"{record['tokens']} tokens, the limit is {MOST:g}; {lost['same']:.0%} keep the most probable token. Use "
            "--precision int8 or fp16, or make it all the same with --allow-changed-answers"
        )
    return None


def _has_memory(memory: int, kinds: Sequence[str], wanted: MeasuredArithmetic, say: Callable[[str], None]) -> bool:
    """Return True if the answers are measured, which needs this memory; `say` what it takes, or why they are not."""
    named = " and ".join(("f32", *kinds))
    rooms = {"is free": available_memory(), "is allowed": wanted.memory}
    short = next((f" ({size(room)} {what})" for what, room in rooms.items() if room is not None and memory > room), "")
    if short and not wanted.always:
        say(
            f"not measuring the bundle's answers in {named} arithmetic, which needs about {size(memory)} of "
            f"memory{short}: it is answered in f32. Export where more memory is free, or measure all the same with "
            "--arithmetic measured"
        )
        return False
    if memory >= LARGE or short:
        limit = "" if wanted.always else f" and {SECONDS / 60:.0f} minutes"
        say(
            f"measuring the bundle's answers in {named} arithmetic, which needs about {size(memory)} of "
            f"memory{short}{limit}; --arithmetic f32 leaves it out"
        )
    return True


def measure(
    folder: Path, plan: Plan, device: str, kinds: Sequence[str], wanted: MeasuredArithmetic, report: Progress
) -> dict[str, Any]:
    """Write the divergence of float32 and of each of `kinds` into the manifest, and the kinds that add little to it.

    A kind is accepted if its mean KL exceeds that of float32 by at most `MARGIN` and a `SHARE` of it. Returns the
    record, empty if no question could be asked. Raises BundleError: the logits of float32 are not finite.
    """
    started = time.monotonic()
    limit = float("inf") if wanted.always else SECONDS
    items = questions(wanted)
    manifest = Bundle.open(folder, check=False).manifest
    rounded = is_rounded(manifest)
    total = len(items) * (1 + len(kinds)) + (plan.config.text.layers if rounded else 0)
    done = 0

    def step(_: int = 1) -> None:
        nonlocal done
        done += 1
        report("arithmetic", min(done, total), total)

    report("arithmetic", 0, total)  # before an engine takes memory, which is not the export's own
    with _loaded(folder, device, "f32") as model:
        enough = ENOUGH if wanted.data is None else None
        exchanges, given = _answers(model, items, enough, started + FIRST_SHARE * limit, step)
    if not exchanges:
        return {}
    first_seconds = time.monotonic() - started
    wanted_logits = given
    largest = dict[str, float]()
    if rounded:
        wanted_logits, largest = checkpoint_logits(plan, folder, exchanges, step)
    own = Divergence()
    for pair in zip(wanted_logits, given, strict=True):
        own.add(*pair)
    del given
    most = (1 + SHARE) * own.kl + MARGIN * own.tokens
    results: dict[str, dict[str, Any]] = {"f32": {**own.to_record(), **largest}}
    for kind in kinds:
        if time.monotonic() - started + first_seconds > limit:
            results[kind] = {"obstacle": f"there was no time for it in {SECONDS:.0f} s; vtx-fit measures it"}
            continue
        results[kind] = _measured(partial(_loaded, folder, device, kind), exchanges, wanted_logits, most, step)
    accepted = tuple(kind for kind in kinds if results[kind].get("accepted"))
    record = {
        "data": "drawn scenes and texts" if wanted.data is None else wanted.data.source,
        "reference": "the checkpoint" if rounded else "the bundle in f32",
        "questions": len(exchanges),
        "tokens": own.tokens,
        "most": float(f"{most / own.tokens:.3g}"),
        "seconds": round(time.monotonic() - started, 1),
        **results,
    }
    report("arithmetic", total, total)
    changed = dataclasses.replace(manifest, arithmetic=accepted, record={**manifest.record, "arithmetic": record})
    seal_manifest(folder, changed)
    return record


def _answers(
    model: Model, items: Sequence[Item], enough: int | None, until: float, step: Callable[[], None]
) -> tuple[list[Exchange], list[Logits]]:
    """The answers to items and their logits, one at least: until there are `enough` tokens, or the clock says `until`.

    Items that cannot be asked, since the template needs an image, say, are left out.
    """
    exchanges = list[Exchange]()
    logits_of = list[Logits]()
    for item in items:
        if exchanges and time.monotonic() > until:
            break
        if enough is not None and sum(len(exchange.answer) for exchange in exchanges) >= enough:
            break
        try:
            exchange, logits = answer(model, item)
        except RequestError:
            continue
        exchanges.append(exchange)
        logits_of.append(logits)
        step()
    return exchanges, logits_of


def _measured(
    loading: Callable[[], AbstractContextManager[Model]],
    exchanges: Sequence[Exchange],
    wanted: Sequence[Logits],
    most: float,
    step: Callable[[], None],
) -> dict[str, Any]:
    """The record of a kind of arithmetic; it ends with the exchange after which it cannot be accepted any more."""
    divergence = Divergence()
    try:
        with loading() as model:
            for exchange, logits in zip(exchanges, wanted, strict=True):
                divergence.add(logits, read(model, exchange))
                step()
                if not divergence.kl <= most:
                    break
    except DeviceError as e:  # no memory, or no such arithmetic on this processor
        return {"obstacle": str(e)}
    except BundleError:
        divergence.kl = float("nan")
    if not np.isfinite(divergence.kl):
        return {"obstacle": "its logits are not finite numbers"}
    return {**divergence.to_record(), "tokens": divergence.tokens, "accepted": divergence.kl <= most}


def questions(wanted: MeasuredArithmetic) -> list[Item]:
    """Questions about at most one image each, in the order in which they are asked while there is time."""
    if wanted.data is not None:
        return [item for item in wanted.data.items if len(item.images) <= 1]
    scenes = scene_items(SCENES)
    texts = [Item((), text) for text in TEXTS]
    in_turn = [item for pair in zip(texts, scenes, strict=False) for item in pair]
    return [*in_turn, *scenes[len(texts) :]]


@contextmanager
def _loaded(folder: Path, device: str, compute: str) -> Iterator[Model]:
    """The bundle in this arithmetic; the system has its memory back before the next engine loads."""
    with returning_memory(at_once=False), load(folder, device=device, compute=compute) as model:
        yield model


def answer(model: Model, item: Item) -> tuple[Exchange, Logits]:
    """The greedy answer to a question, and the logits [m, vocab] that gave its tokens. Raises RequestError."""
    session, ids, logits = _asked(model, item)
    rows = [logits]
    tokens = [int(logits.argmax())]
    ends = model.manifest.text.end_ids
    while len(tokens) < TOKENS and tokens[-1] not in ends:
        rows.append(session.decode(tokens[-1]).copy())
        tokens.append(int(rows[-1].argmax()))
    return Exchange(item, ids, tuple(tokens)), np.stack(rows)


def read(model: Model, exchange: Exchange) -> Logits:
    """The logits [m, vocab] before each token of an answer that is given."""
    session, _, logits = _asked(model, exchange.item)
    return np.stack([logits, *(session.decode(token).copy() for token in exchange.answer[:-1])])


def _asked(model: Model, item: Item) -> tuple[Session, Ids, NDArray[np.float32]]:
    """A session that has read a question, its ids, and the logits [vocab] after it."""
    loaded = model.loaded
    with without_notes():
        images = [loaded.images.prepare(image) for image in item.images]
    ids = loaded.text.prompt(messages(item), [image.in_prompt for image in images])
    encode = partial(images[0].encode, model.backend) if images else None
    prompt = bounded_prompt(ids, model.manifest.text.image_token_id, encode)
    session = Session(model.backend, model.manifest)
    prefilled = session.prefill(prompt, make_policy(None, model.manifest, model.backend.gate))
    return session, prompt.ids, prefilled.logits.copy()


def checkpoint_logits(
    plan: Plan, folder: Path, exchanges: Sequence[Exchange], step: Callable[[int], None]
) -> tuple[list[Logits], dict[str, float]]:
    """The checkpoint's logits [m, vocab] before each token of the answers; `step` is called for each layer.

    Also the `layer` whose output the weights in `folder` move most, and by what share, `moved`: of the first exchange
    with a picture, or without one.
    """
    import torch

    from vtx.exporter.reference.model import LayerErrors, Reference, Sample, Watchers
    from vtx.exporter.weights.tensors import BundleWeights

    reference = Reference(plan.checkpoint, plan.config)
    rounded = Reference(plan.checkpoint, plan.config, BundleWeights(folder, plan.weights.stored))
    with torch.inference_mode(), returning_memory():
        samples = list[Sample]()
        for exchange in exchanges:
            images = reference.encode(exchange.item.images, plan.image).first(DECODED_TOKENS)
            ids = np.append(exchange.ids, np.array(exchange.answer[:-1], np.int64))
            samples.append(Sample(ids, images, len(exchange.answer)))
        sample = next((number for number, exchange in enumerate(exchanges) if exchange.item.images), 0)
        errors = LayerErrors(reference, rounded, samples, sample)
        states = reference.hidden(samples, [None], step, Watchers(output=errors.watch))
        layer, moved = errors.largest
        logits = [reference.head(state[None]).numpy() for state in states]
        return logits, {"layer": layer, "moved": float(f"{moved:.3g}")}
