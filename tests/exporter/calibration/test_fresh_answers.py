"""vtx-calibrate's measurements in plain PyTorch equal fresh answers of the runtime at every K."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bundles import ORT, export
from tests.support.calibrating import ALL, GQA, KS, QUESTIONS, measure
from tests.support.exported import THREADS
from tests.support.fixtures import Checkpoints
from tests.support.sequences import NotedSampling, noted
from tests.support.tiny import random_image
from vtx.runtime.api.answer import Answer
from vtx.runtime.api.load import load
from vtx.runtime.api.options import Options
from vtx.tools.data.items import Data, Item

Fresh = Callable[[Item, int | None], tuple[Answer, np.ndarray[Any, Any]]]
CLOSE = 1e-4


class Stop(Exception):
    """The process ends here."""


@pytest.fixture(scope="module")
def fresh(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The answer to an item at a K, and the log probabilities [vocab] of its first token."""
    folder = export(tiny_checkpoint(GQA), tmp_path_factory.mktemp("fresh") / "bundle", (2, 3, 4, 5, 6), dialects=ORT)
    known: dict[Any, Any] = {}
    with load(folder.folder, device="cpu", threads=THREADS) as model:

        def answer(item: Item, k: int | None) -> Any:
            key = item.digest(), k
            if key not in known:
                sampling = NotedSampling()
                with noted(), model.open(list(item.images)) as conversation:
                    found = conversation.ask(item.question, k, Options(ALL.max_new_tokens, sampling=sampling))
                logits = sampling.logits[0].astype(np.float64)
                known[key] = found, logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            return known[key]

        yield answer


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(6))
def test_any_items_interrupted_anywhere_are_measured_as_fresh_answers(
    tiny_checkpoint: Checkpoints, tmp_path: Path, fresh: Fresh, seed: int
) -> None:
    rng = random.Random(seed)
    items = []
    for _ in range(5):
        images = tuple(random_image(rng.randint(0, 2)) for _ in range(rng.randint(1, 2)))
        item = Item(images, rng.choice(QUESTIONS))
        items.append(replace(item, answer=fresh(item, None)[0].text.strip() or None) if rng.random() < 0.5 else item)

    def stopping(phase: str, done: int, _: int) -> None:
        if phase == "measuring" and done and rng.random() < 0.2:
            raise Stop

    folder, data = tiny_checkpoint(GQA), Data("items", tuple(items))
    for _ in range(2):
        options = replace(ALL, batch=rng.randint(1, 3))
        try:
            measure(folder, data, tmp_path, options, report=stopping)
        except Stop:
            rng.shuffle(items)
            data = Data("items", tuple(items))
    results = measure(folder, data, tmp_path).results
    assert len(results) == len({item.digest() for item in items})
    for item, result in zip({item.digest(): item for item in items}.values(), results, strict=True):
        at = {k: fresh(item, k) for k in KS}
        (own, full), withdrawn = at[None], [at[k] for k in KS[1:]]
        assert result.answer == own.text
        assert result.agree == tuple(at[k][0].token_ids == own.token_ids for k in KS)
        assert result.top1 == tuple(answer.token_ids[0] == own.token_ids[0] for answer, _ in withdrawn)
        kls = [float((np.exp(p) * (p - full)).sum()) for _, p in withdrawn]
        assert result.kl == pytest.approx(kls, abs=CLOSE)
        assert result.kl_reverse == pytest.approx(
            [float((np.exp(full) * (full - p)).sum()) for _, p in withdrawn], abs=CLOSE
        )
