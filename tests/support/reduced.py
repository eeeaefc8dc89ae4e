"""Questions put to a session under a reduction, and thresholds that really divide what the statement measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from tests.support.exported import prompt
from tests.support.near import assert_near
from tests.support.reference import Inputs, Reference
from tests.support.statement import Method, Outcome, Statement
from tests.support.tiny import Message, Tiny, prompt_messages, random_image
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.tensors import read_final_norm
from vtx.runtime.policies.base import Policy, PromptText, Reduction
from vtx.runtime.policies.make import PolicySettings, make_policy
from vtx.runtime.session.encoded_images import PreparedImage, enter, vision_extras
from vtx.runtime.session.session import PrefillResult, Prompt, Session
from vtx.runtime.vision.tokens import ImageTokens

STEPS = 8
TOLERANCE = 1e-4
KS = (4, 9, 12)
QUESTIONS = ("What is the colour of the square in the picture?", "how many red shapes are there?", "left?")
CLEAR = 1e-4  # least relative distance of a score from its threshold; float32 and the order of sums stay far below
MODELS = {
    "16-layers-gqa": Tiny(layers=16, image=126, context=768),
    "32-layers-mha": Tiny(layers=32, kv_heads=4, image=126, context=768),
}
# The deeper one, whose heads are not shared, repeats what the first shows: make test-all asks it too.
PARAMETERS = [
    pytest.param(MODELS["16-layers-gqa"], id="16-layers-gqa"),
    pytest.param(MODELS["32-layers-mha"], id="32-layers-mha", marks=pytest.mark.slow),
]


def word(method: Method) -> str:
    """What the command line calls a method; its K is given apart."""
    tau = "off" if method.tau is None else method.tau
    parts = []
    if method.layers:
        parts.append(
            f"mustdrop:gamma={method.gamma!r},alpha={method.alpha!r},tau={tau},key={method.key},"
            f"layers={'/'.join(map(str, method.layers))},positions={method.positions},order={method.order},"
            f"keys={method.keys}"
        )
    elif method.tau is not None:
        parts.append(f"lsm:tau={tau},order={method.order}")
    if method.cls_keep is not None:
        parts.insert(0 if method.layers else len(parts), f"cls:keep={method.cls_keep}")
    if method.cdpruner is not None:
        keep, text = method.cdpruner
        parts.insert(0 if method.layers else len(parts), f"cdpruner:keep={keep},text={text}")
    if method.divprune is not None:
        parts.insert(0 if method.layers else len(parts), f"divprune:keep={method.divprune}")
    if method.hiprune is not None:
        parts.insert(0, "hiprune:keep={},alpha={},layer={}".format(*method.hiprune))
    if method.visionzip is not None:
        parts.insert(0, "visionzip:dominant={},contextual={}".format(*method.visionzip))
    if method.dart is not None:
        keep, k, pivots, text_pivots = method.dart
        spec = f"dart:keep={keep},k={k},pivots={pivots},text_pivots={text_pivots},order={method.dart_order}"
        parts.insert(0 if method.layers and not k else len(parts), spec)
    if method.pyramiddrop is not None:
        ratio, layers = method.pyramiddrop
        spec = f"ratio={ratio},layers={'/'.join(map(str, layers))},positions={method.positions}"
        parts.append(f"pyramiddrop:{spec}")
    if method.fastv is not None:
        parts.append(f"fastv:k={method.fastv[0]},ratio={method.fastv[1]}")
    return "+".join(parts) or "none"


@dataclass
class Found:
    """What a bundle answered: `logits` [n, vocab], row t chose ids[t]; `kept` as the statement's."""

    ids: list[int]
    logits: NDArray[np.float32]
    done: PrefillResult

    @property
    def kept(self) -> dict[int, list[int]]:
        return {cut.layer - 1: np.flatnonzero(cut.kept).tolist() for cut in self.done.cuts}


class Talk:
    """One session of a model; its questions reuse what they can."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._session = Session(model.backend, model.manifest)

    def ask(
        self,
        messages: Sequence[Message],
        images: Sequence[Image.Image],
        method: Method,
        n: int,
        exits: Reduction | None = None,
    ) -> Found:
        """The greedy answer of `n` ids; `exits` decides where the whole image leaves, instead of the method's K."""
        model = self._model
        policy = make_policy(
            method.k, model.manifest, model.backend.gate, PolicySettings(reduce=word(method)),
            dialect=model.backend.dialect, final_norm=lambda: read_final_norm(model.bundle),
        )  # fmt: skip
        if exits is not None:
            policy = replace(policy, parts=(exits, *policy.parts[1:]))
        asked = self._prompt(messages, images, policy) if policy.entries else prompt(model, messages, images)
        done = self._session.prefill(asked, policy)
        rows = [done.logits]
        ids = [int(done.logits.argmax())]
        while len(ids) < n:
            rows.append(self._session.decode(ids[-1]))
            ids.append(int(rows[-1].argmax()))
        return Found(ids, np.stack(rows), done)

    def _prompt(self, messages: Sequence[Message], images: Sequence[Image.Image], policy: Policy) -> Prompt:
        model = self._model
        pictures = model.loaded.images.prepare_all(images)
        token, counts = model.manifest.text.image_token_id, [picture.tokens for picture in pictures]
        plain = model.loaded.text.prompt(messages, counts)
        question = self._question(plain, token)
        if policy.needs.text_tower:
            question = replace(question, embeddings=model.loaded.prompts.embed_question(messages))
        encoded = [self._encode(picture, policy, question) for picture in pictures]
        ids: list[int] = []
        left, sizes, at = iter(encoded), iter(counts), 0
        while at < len(plain):
            image = plain[at] == token
            ids += [token] * len(next(left)) if image else [int(plain[at])]
            at += next(sizes) if image else 1
        key = f"{policy.entries} {question.key}"
        given = tuple((f"{p.key} {key}", lambda e=e: e) for p, e in zip(pictures, encoded, strict=True))
        array = np.array(ids, np.int64)
        return Prompt(array, array == token, given, max(0, sum(image.positions - len(image) for image in encoded)))

    def _question(self, ids: NDArray[np.int64], token: int) -> PromptText:
        is_vision = ids == token
        last = int(np.flatnonzero(is_vision)[-1]) if is_vision.any() else -1
        text = ids[~is_vision]
        return PromptText(text, self._model.backend.embed(text).hidden, np.flatnonzero(~is_vision) > last)

    def _encode(self, picture: PreparedImage, policy: Policy, question: PromptText) -> ImageTokens:
        tokens = picture.encode(self._model.backend, vision_extras(policy.entries))
        return enter(tokens, policy.entries, question, self._model.backend.project)


def assert_prompt_as_stated(model: Model, judge: Reference, inputs: Inputs, asked: Prompt, method: Method) -> None:
    """A prompt, of a video too, is answered as by the statement, and the same tokens stay, those of a method in layers.

    `inputs`: the prompt with all its pictures as images.
    """
    wanted, session = Statement(judge).answer(inputs, method, STEPS), Session(model.backend, model.manifest)
    norm = partial(read_final_norm, model.bundle)
    chosen = make_policy(
        method.k, model.manifest, model.backend.gate, PolicySettings(reduce=word(method)), final_norm=norm
    )
    done = session.prefill(asked, chosen)
    logits = [done.logits, *(session.decode(id) for id in wanted.ids[:-1])]
    assert_near(np.stack(logits), wanted.logits, TOLERANCE)
    kept = {cut.layer - 1: np.flatnonzero(cut.kept).tolist() for cut in done.cuts}
    assert {layer: left for layer, left in kept.items() if left} == wanted.kept


def dividing(statement: Statement, inputs: Inputs, method: Method, share: float) -> Method:
    """`method` with thresholds that drop about this share of the rows at its first prune, and are no close call."""
    layer = method.layers[0]
    free = statement.answer(inputs, replace(method, gamma=0.0, alpha=0.0, k=None), 1)
    total, most = (np.array(values) for values in free.received[layer])
    ranks = np.maximum(total.argsort().argsort(), most.argsort().argsort())  # a row leaves when both are low
    at = int(np.sort(ranks)[min(len(ranks) - 1, round(share * len(ranks)))])
    gamma, alpha = np.sort(total)[at] / total.sum() * 1.0001, np.sort(most)[at] * 1.0001
    for _ in range(50):
        tried = replace(method, gamma=float(np.float32(gamma)), alpha=float(np.float32(alpha)))
        if clear(statement.answer(inputs, replace(tried, k=None), 1), tried):
            return tried
        gamma, alpha = gamma * 1.003, alpha * 1.002
    raise AssertionError("every threshold tried is a close call")


def clear(outcome: Outcome, method: Method) -> bool:
    """Whether no score lies so near to its threshold that rounding could decide."""
    for total, most in outcome.received.values():
        sums, maxima = np.array(total), np.array(most)
        distances = [np.abs(sums / (method.gamma * sums.sum()) - 1), np.abs(maxima / method.alpha - 1)]
        if min(d.min() for d in distances) < CLEAR:
            return False
    return True


def window_cosines(judge: Reference, pixels: torch.Tensor) -> list[float]:
    """Mean pairwise cosine of each window of one image, by brute force over transformers' first block."""
    tower = judge.model.model.vision_tower
    with torch.inference_mode():
        x = tower.embeddings(pixels[None])
        clip = hasattr(tower, "pre_layrnorm")
        x = tower.encoder.layers[0](tower.pre_layrnorm(x) if clip else x, None)[0][int(clip) :]
    side = int(len(x) ** 0.5)
    grid = torch.nn.functional.normalize(x, dim=-1).view(side, side, -1)
    found = []
    for top in range(0, side - 2, 3):
        for left in range(0, side - 2, 3):
            window = grid[top : top + 3, left : left + 3].reshape(9, -1)
            found.append(float(((window @ window.T).sum() - 9) / 72))
    return found


class Case(NamedTuple):
    """One checkpoint: its bundle, and its statement over transformers' modules."""

    model: Model
    reference: Reference
    statement: Statement


def inputs(case: Case, messages: list[Message], seeds: tuple[int, ...] = (4,)) -> Inputs:
    return case.reference.inputs(messages, [random_image(seed) for seed in seeds])


def some_merged(case: Case, seed: int = 4) -> float:
    """A threshold that about half of the windows reach."""
    pixels = inputs(case, prompt_messages("red?"), (seed,))["pixel_values"][0]
    order = sorted(window_cosines(case.reference, pixels))
    low, high = max(pairwise(order[2:-1]), key=lambda pair: pair[1] - pair[0])
    assert high - low > 1e-3
    return (low + high) / 2


def assert_equal(found: Found, wanted: Outcome) -> None:
    assert wanted.margin > 2 * TOLERANCE, "two tokens are too close to prove anything"
    assert found.ids == wanted.ids
    assert_near(found.logits, wanted.logits, TOLERANCE)
    assert list(found.done.slots) == wanted.slots
    assert [image.indices.tolist() for image in found.done.images] == [image.places for image in wanted.images]
    assert [image.merged.tolist() for image in found.done.images] == [image.merged for image in wanted.images]
    entered = sum(len(image.places) for image in wanted.images)
    last = list(range(entered))
    for layer, kept in sorted({**wanted.kept}.items()):
        assert found.kept.get(layer, last) == kept
        last = kept
    assert set(found.kept) <= {*wanted.kept, *(k - 1 for k in KS)}


def ask_both(
    case: Case, method: Method, seeds: tuple[int, ...] = (4,), *, share: float | None = None
) -> tuple[Found, Outcome]:
    """A fresh session's answer and the statement's, to the first question where no two tokens are too close.

    `share`: with thresholds that drop about so many of the rows at the first prune.
    """
    for words in QUESTIONS:
        messages, images = prompt_messages(words, len(seeds)), [random_image(seed) for seed in seeds]
        given = inputs(case, messages, seeds)
        tried = method if share is None else dividing(case.statement, given, method, share)
        wanted = case.statement.answer(given, tried, STEPS, words)
        if wanted.margin > 2 * TOLERANCE:
            return Talk(case.model).ask(messages, images, tried, STEPS), wanted
    raise AssertionError("two tokens are too close in every answer")
