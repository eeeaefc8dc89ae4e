"""Any questions over images that change, at any K of any cuts, are answered as fresh ones: in Python and in libvtx.

`VTX_SEQUENCES=1000` sets how many random sequences of each family every engine is put through in either runtime, others
each time; cuts are drawn among all layers, anew for every 100, whose conversations a loaded model has one by one.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bundles import export
from tests.support.cabi import Frames, Loaded
from tests.support.cpp import DEVICES, needs_abi, needs_cpp
from tests.support.families.gemma import GEMMA3
from tests.support.families.paligemma import PALIGEMMA
from tests.support.families.qwen import QWEN35
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api.load import load

pytestmark = [needs_cpp, needs_abi]

GIVEN = os.environ.get("VTX_SEQUENCES")
DIALECTS = "ort", "plain"  # of the engines here
SEQUENCES, OF_A_BUNDLE = int(GIVEN or 4), 100
QUESTIONS = ("red?", "How many?", "red? no, blue?", "Where is the red star?")
IMAGES = [random_image(4, (60, 60)), random_image(5, (90, 50)), random_image(6, (64, 64))]
SAME = "token_ids", "k", "rest", "kv_slots", "vision_tokens_kept"
TOKENS = 4
RESTS = (None, "10%", "2")
Opened = Callable[[], AbstractContextManager["Ask"]]  # a new conversation of a loaded model
Ask = Callable[[int, str, Any, Any], dict[str, Any]]  # of the images of this number, a question at this K with a rest


@contextmanager
def python(folder: Path, device: str) -> Iterator[Opened]:
    with load(folder, device=device, threads=1) as model:

        @contextmanager
        def opened() -> Iterator[Ask]:
            with model.open([IMAGES[0]]) as conversation:

                def ask(image: int, question: str, k: Any, rest: Any) -> dict[str, Any]:
                    conversation.replace([IMAGES[image]])
                    return conversation.ask(question, k, rest=rest, max_new_tokens=TOKENS, ignore_eos=True).to_dict()

                yield ask

        yield opened


@contextmanager
def libvtx(folder: Path, device: str) -> Iterator[Opened]:
    with closing(Loaded(folder, device)) as loaded:

        @contextmanager
        def opened() -> Iterator[Ask]:
            with closing(Frames(loaded, [np.asarray(IMAGES[0])])) as frames:

                def ask(image: int, question: str, k: Any, rest: Any) -> dict[str, Any]:
                    frames.replace([np.asarray(IMAGES[image])])
                    fields = {} if rest is None else {"rest": rest.encode()}
                    return frames.ask(
                        question, k=str(k or "none").encode(), max_new_tokens=TOKENS, ignore_eos=1, **fields
                    )

                yield ask

        yield opened


@contextmanager
def fresh(folder: Path, device: str) -> Iterator[Ask]:
    """Each answer is that of a new conversation; what is asked again is not computed again."""
    with load(folder, device=device, threads=1) as model:

        @cache
        def ask(image: int, question: str, k: Any, rest: Any) -> dict[str, Any]:
            with model.open([IMAGES[image]]) as conversation:
                answer = conversation.ask(question, k, rest=rest, max_new_tokens=TOKENS, ignore_eos=True)
                return answer.to_dict()

        yield ask


@pytest.mark.sampled(6)
@pytest.mark.parametrize("tiny", [QWEN35, GEMMA3, PALIGEMMA], ids=["stateful", "windowed", "two-way"])
@DEVICES
@pytest.mark.parametrize("runtime", [python, libvtx])
def test_any_sequence_equals_fresh_answers(
    tiny_checkpoint: Checkpoints, tmp_path: Path, tiny: Tiny, device: str, runtime: Any
) -> None:
    rng = random.Random(None if GIVEN else 7)
    for first in range(0, SEQUENCES, OF_A_BUNDLE):
        cuts = tuple(sorted(rng.sample(range(2, tiny.layers + 1), rng.randint(1, 4))))
        bundle = export(tiny_checkpoint(tiny), tmp_path / f"bundle-{first}", cuts, dialects=DIALECTS)
        folder, scored = bundle.folder, {stage.last for stage in bundle.manifest.stages if stage.query}
        with fresh(folder, device) as alone, runtime(folder, device) as opened:
            for _ in range(min(OF_A_BUNDLE, SEQUENCES - first)):
                steps = list[tuple[int, str, Any, Any]]()
                for _ in range(rng.randint(2, 5)):
                    k = rng.choice((None, *cuts))
                    rest = rng.choice(RESTS) if k is not None and k - 1 in scored else None
                    steps.append((rng.randrange(len(IMAGES)), rng.choice(QUESTIONS), k, rest))
                with opened() as ask:
                    for number, step in enumerate(steps):
                        found, want = ask(*step), alone(*step)
                        told = cuts, steps[: number + 1]
                        for key in SAME:
                            assert list(np.ravel(found[key])) == list(np.ravel(want[key])), (key, told)
        shutil.rmtree(folder)
