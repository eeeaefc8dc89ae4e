"""Bundles of tiny checkpoints, made by the real exporter, and greedy answers with the logits behind them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.support.bundles import export_anew, reads_documents, shared
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Message, Tiny, prompt_messages, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.images import Picture
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.policies.base import Policy
from vtx.runtime.policies.methods.withdraw import Full, Withdraw
from vtx.runtime.session.session import PrefillResult, Prompt, Session

THREADS = 1  # tests run side by side
KS = (2, 3, 5, 8)
QUESTIONS = ("red?", "How many circle shapes are there?", "What is the colour of the square in the picture?")
DEVICES = [name for name, module in (("cpu", "onnxruntime"), ("openvino", "openvino")) if find_spec(module)]


class Models:
    """`models(tiny, ks, precision, reductions)`: that bundle, loaded; each is made once, with these dialects."""

    def __init__(self, folder: Path, checkpoints: Checkpoints, dialects: tuple[str, ...]) -> None:
        self._folder, self._checkpoints, self._dialects = folder, checkpoints, dialects
        self._get = cache(self._make)

    def __call__(
        self,
        tiny: Tiny = Tiny(),  # noqa: B008
        ks: tuple[int, ...] = KS,
        precision: str = "fp32",
        reductions: tuple[str, ...] = (),
    ) -> Model:
        return self._get(tiny, ks, precision, reductions)

    def folder(
        self,
        tiny: Tiny = Tiny(),  # noqa: B008
        ks: tuple[int, ...] = KS,
        precision: str = "fp32",
        reductions: tuple[str, ...] = (),
    ) -> Path:
        """That bundle, not loaded."""
        checkpoint = self._checkpoints(tiny)
        options = ExportOptions(
            str(checkpoint), ks, precision, reductions=reductions, dialects=self._dialects, allow_pickle=tiny.pickled,
            allow_changed_answers=reads_documents(checkpoint),
        )  # fmt: skip
        return shared(options) or export_anew(options, Path(mkdtemp(dir=self._folder)) / "bundle").folder

    def _make(self, *what: Any) -> Model:
        return load(self.folder(*what), device="cpu", threads=THREADS)


class Greedy(NamedTuple):
    """`ids`, as many as asked for; `logits` [n, vocab], row t chose ids[t]; what the prefill reported."""

    ids: list[int]
    logits: NDArray[np.float32]
    done: PrefillResult


def prompt(model: Model, messages: Sequence[Message], images: Sequence[Picture]) -> Prompt:
    """The prompt as a session takes it, pixels and all."""
    pictures = model.loaded.images.prepare_all(images, messages=messages)
    ids = model.loaded.text.prompt(messages, [picture.in_prompt for picture in pictures])
    encoders = tuple((p.key, lambda p=p: p.encode(model.backend)) for p in pictures)
    return Prompt(ids, ids == model.manifest.text.image_token_id, encoders)


def mixed_prompts(model: Model) -> list[Prompt]:
    """Three questions on one image, one on another, one on two, and one without."""
    first, second = random_image(1), random_image(2)
    on_one = [prompt(model, prompt_messages(question), [first]) for question in QUESTIONS]
    on_other = prompt(model, prompt_messages(QUESTIONS[1]), [second])
    on_both = prompt(model, prompt_messages(QUESTIONS[0], 2), [first, second])
    return [*on_one, on_other, on_both, prompt(model, prompt_messages(QUESTIONS[2], 0), [])]


def policy(k: int | None) -> Policy:
    return Policy((Full() if k is None else Withdraw(k),))


def answer(session: Session, asked: Prompt, how: Policy, n: int) -> NDArray[np.float32]:
    """Logits [n, vocab] of a greedy answer in a session that may have answered before."""
    rows = [session.prefill(asked, how).logits]
    while len(rows) < n:
        rows.append(session.decode(int(rows[-1].argmax())))
    return np.stack(rows)


def greedy(model: Model, asked: Prompt, k: int | None, n: int, forced: Sequence[int] = ()) -> Greedy:
    """`n` greedy tokens of a fresh session, or the logits along `forced` instead of the tokens chosen."""
    session = Session(model.backend, model.manifest)
    done = session.prefill(asked, policy(k))
    rows, ids = [done.logits], [int(done.logits.argmax())]
    while len(ids) < n:
        rows.append(session.decode(forced[len(ids) - 1] if forced else ids[-1]))
        ids.append(int(rows[-1].argmax()))
    return Greedy(ids, np.stack(rows), done)


def every_order(values: Sequence[int | None], length: int) -> list[int | None]:
    """The shortest sequence in which every `length` of the values follow each other in every order (de Bruijn's)."""
    found = [0] * length
    seen = {tuple(found)}
    while True:
        before = found[len(found) - length + 1 :]
        following = (n for n in reversed(range(len(values))) if (*before, n) not in seen)
        if (chosen := next(following, None)) is None:
            return [values[n] for n in found]
        seen.add((*before, chosen))
        found.append(chosen)
