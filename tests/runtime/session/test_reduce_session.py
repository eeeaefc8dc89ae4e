"""Sessions whose vision rows leave by question: whatever came before, a prompt gives the logits of a fresh session."""

from __future__ import annotations

import gc
import itertools
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from tests.support.exported import QUESTIONS, Models, answer, prompt
from tests.support.fuse import Fuse, FusedBackend, fused
from tests.support.near import assert_near
from tests.support.reduced import word
from tests.support.reference import Reference
from tests.support.statement import Method, Outcome, Statement
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.model import Model
from vtx.runtime.errors import BundleError
from vtx.runtime.policies.base import Policy
from vtx.runtime.policies.make import PolicySettings, make_policy
from vtx.runtime.session import session as session_module
from vtx.runtime.session.session import Prompt, Session
from vtx.runtime.vision.tokens import Scores

STEPS = 5
ROUNDING = 1e-5
BEGINNING = 100  # lines of the session's modules that a question runs up to its first layer, and more
LAYERS = (2, 4, 6)
# A little below 1/16, what each of 16 rows gets on average: some rows leave at each of the three cuts.
DUAL = "mustdrop:gamma=0.05,alpha=1,tau=off,key=0.1,layers=2/4/6"
NOTHING, EVERYTHING = "gamma=0,alpha=0,tau=off,key=0,layers=2/4/6", "gamma=1,alpha=2,tau=off,key=0,layers=2/4/6"
WAYS: dict[str, tuple[int | None, str]] = {
    "none": (None, "none"),
    "withdrawal": (5, "none"),
    "fastv": (None, "fastv:k=3,ratio=0.5"),
    "fastv then withdrawal": (5, "fastv:k=3,ratio=0.5"),
    "withdrawal before fastv": (3, "fastv:k=3,ratio=0.5"),
    "mustdrop": (None, DUAL),
    "mustdrop renumbering": (None, f"{DUAL},positions=renumber"),
    "mustdrop then withdrawal": (5, DUAL),
    "mustdrop and fastv": (None, f"{DUAL}+fastv:k=3,ratio=0.5"),
    "mustdrop drops nothing": (None, f"mustdrop:{NOTHING}"),
    "mustdrop drops everything": (None, f"mustdrop:{EVERYTHING}"),
}
Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models(ks=(3, 5), reductions=(DUAL, "fastv:k=3"))


def policy(model: Model, way: str) -> Policy:
    k, word = WAYS[way]
    return make_policy(k, model.manifest, model.backend.gate, PolicySettings(reduce=word))


@pytest.fixture(scope="module")
def fresh(model: Model, prompts: list[Prompt]) -> dict[tuple[int, str], Logits]:
    """Logits [STEPS, vocab] of a fresh session for each prompt and way."""
    return {
        (i, way): answer(Session(model.backend, model.manifest), asked, policy(model, way), STEPS)
        for i, asked in enumerate(prompts)
        for way in WAYS
    }


# --- what leaves ----------------------------------------------------------------------------------


def test_the_ways_differ_and_so_do_the_survivors(model: Model, prompts: list[Prompt], fresh: dict[Any, Logits]) -> None:
    """Else the tests below would hold for a session that ignores its policy."""
    answers = {fresh[0, way].tobytes() for way in WAYS}
    # Dropping nothing equals no reduction; a withdrawal before FastV's cut leaves it nothing.
    assert len(answers) == len(WAYS) - 1
    kept, cuts = set(), []
    for asked in prompts[:3]:
        done = Session(model.backend, model.manifest).prefill(asked, policy(model, "mustdrop"))
        kept.add(done.cuts[-1].kept.tobytes())
        cuts.append([cut.layer for cut in done.cuts])
    assert len(kept) == 3
    assert cuts == [[3], [3, 5, 7], [3, 7]]


def test_dropping_nothing_is_no_reduction(fresh: dict[Any, Logits]) -> None:
    for number in range(6):
        assert np.array_equal(fresh[number, "none"], fresh[number, "mustdrop drops nothing"])


def test_without_an_image_every_way_is_the_same(fresh: dict[Any, Logits]) -> None:
    assert len({fresh[5, way].tobytes() for way in WAYS}) == 1


def test_caches_hold_the_survivors_from_the_first_pruned_layer_on(model: Model, prompts: list[Prompt]) -> None:
    done = Session(model.backend, model.manifest).prefill(prompts[1], policy(model, "mustdrop"))
    text = len(prompts[1].ids) - 16
    left = int(done.cuts[-1].kept.sum())
    assert 0 < left < 16
    assert done.slots == (text + 16, *[text + left] * 7)
    assert done.vision_kept[:2] == (16, 16)
    assert done.vision_kept[6:] == (left, left)


def test_a_withdrawal_after_mustdrop_leaves_its_survivors_in_the_earlier_caches(
    model: Model, prompts: list[Prompt]
) -> None:
    done = Session(model.backend, model.manifest).prefill(prompts[1], policy(model, "mustdrop then withdrawal"))
    assert [(cut.layer, cut.by) for cut in done.cuts] == [(3, ("mustdrop",)), (5, ("withdrawal",))]
    text, left = len(prompts[1].ids) - 16, int(done.cuts[0].kept.sum())
    assert done.slots == (text + 16, *[text + left] * 3, *[text] * 4)
    assert done.k == 5


def test_a_question_of_one_token_is_scored(model: Model, prompts: list[Prompt]) -> None:
    front = prompts[0].prefix_length
    asked = replace(prompts[0], ids=prompts[0].ids[: front + 1], is_vision=prompts[0].is_vision[: front + 1])
    for way in ("fastv", "mustdrop"):
        done = Session(model.backend, model.manifest).prefill(asked, policy(model, way))
        assert 0 < done.cuts[0].kept.sum() < 16
        assert np.isfinite(done.logits).all()


def test_the_context_can_be_filled_to_its_last_slot(model: Model, prompts: list[Prompt]) -> None:
    for way in WAYS:
        session = Session(model.backend, model.manifest)
        session.prefill(prompts[0], policy(model, way))
        while session.length < session.capacity:
            assert np.isfinite(session.decode(40)).all()


# --- one prompt after another ---------------------------------------------------------------------


def test_any_two_ways_after_each_other_equal_fresh_ones(
    model: Model, prompts: list[Prompt], fresh: dict[Any, Logits]
) -> None:
    for ways in itertools.product(WAYS, repeat=2):
        session = Session(model.backend, model.manifest)
        for number, way in enumerate(ways):
            assert np.array_equal(answer(session, prompts[number], policy(model, way), STEPS), fresh[number, way]), ways


@pytest.mark.covering(2)
@pytest.mark.sampled(5)
@pytest.mark.parametrize("moment", ["before", "within", "after"])
@pytest.mark.parametrize("earlier", [None, "none", "withdrawal", "mustdrop"])
@pytest.mark.parametrize("way", ["fastv then withdrawal", "mustdrop renumbering", "mustdrop then withdrawal"])
def test_a_question_after_one_interrupted_at_any_call_equals_a_fresh_one(
    model: Model, prompts: list[Prompt], fresh: dict[Any, Logits], moment: str, earlier: str | None, way: str
) -> None:
    """Every call that the second question makes is interrupted in turn; then others are asked in other ways."""
    for at in itertools.count():
        backend = FusedBackend(model.backend)
        session = Session(backend, model.manifest)
        if earlier is not None:
            answer(session, fused(backend, prompts[1]), policy(model, earlier), 2)
        backend.fuse = Fuse(at, moment)
        try:
            answer(session, fused(backend, prompts[0]), policy(model, way), 2)
        except KeyboardInterrupt:
            pass
        else:
            break
        backend.fuse = Fuse()
        for number, other in ((0, way), (1, "none"), (2, "mustdrop"), (3, "withdrawal")):
            found = answer(session, fused(backend, prompts[number]), policy(model, other), 2)
            tolerance = ROUNDING if number == 3 else 0  # of another image: only the text before it is in the caches
            assert_near(found, fresh[number, other][:2], tolerance, f"{at} {other}")
    assert at > 15, "the question made fewer calls than it has stages, scores and caches that shrink"


def interrupted(call: Callable[[], Any], at: int) -> bool:
    """True if a call was interrupted, before the line of that number from 0 that it ran in the session's modules."""
    room, before, left = str(Path(session_module.__file__).parent), sys.gettrace(), at

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return enter if frame.f_code.co_filename.startswith(room) else None

    sys.settrace(enter)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("other", [2, 3], ids=["same image", "other image"])
def test_a_chat_goes_on_after_another_question_interrupted_at_any_line(
    model: Model, prompts: list[Prompt], fresh: dict[Any, Logits], other: int
) -> None:
    """Each line of its beginning, where caches are put back and replaced, and some of the rest."""
    asked, ways = prompts[1], [policy(model, way) for way in ("mustdrop", "fastv then withdrawal")]
    turn = replace(asked, ids=np.append(asked.ids, [40, 41]), is_vision=np.append(asked.is_vision, [False, False]))
    undisturbed = Session(model.backend, model.manifest)
    first = undisturbed.prefill(asked, ways[0]).selection
    wanted = undisturbed.prefill(turn, ways[0], after=first).logits
    for at in (*range(BEGINNING), *range(BEGINNING, 10_000, 25)):
        session = Session(model.backend, model.manifest)
        session.prefill(asked, ways[0])
        if not interrupted(lambda s=session: s.prefill(prompts[other], ways[1]), at):  # type: ignore[misc]
            break
        assert np.array_equal(session.prefill(turn, ways[0], after=first).logits, wanted), at
        found = answer(session, prompts[other], ways[1], 2)
        assert np.array_equal(found, fresh[other, "fastv then withdrawal"][:2]), at
    assert at > 2 * BEGINNING


def test_the_image_is_not_run_again_before_the_first_cut(model: Model, prompts: list[Prompt]) -> None:
    """Counted in rows: of the front, later questions run only what left the full line."""
    session = Session(model.backend, model.manifest)
    session.prefill(prompts[0], policy(model, "mustdrop"))
    ran: list[int] = []
    for cache in [segment.cache for (_, whole), segment in session.caches.segments.items() if whole]:
        append = cache.append
        cache.append = lambda rows, *rest, append=append, **how: (ran.append(len(rows)), append(rows, *rest, **how))[1]  # type: ignore[method-assign]
    assert session.prefill(prompts[2], policy(model, "mustdrop")).reused_image
    assert ran == [len(prompts[2].ids) - prompts[2].prefix_length] * 2  # layers 1 and 2, one stage each


# --- turns ----------------------------------------------------------------------------------------


def stated_turns(judge: Reference, model: Model, seeds: int, method: Method, turns: list[int], n: int) -> Outcome:
    """The plain statement's logits after a first prompt and `turns` more tokens, one after the other."""
    statement, out = Statement(judge), Outcome()
    messages, image = prompt_messages(QUESTIONS[1]), random_image(seeds)
    given = judge.inputs(messages, [image])
    import torch

    with torch.inference_mode():
        out.images = [statement.image(pixels, method) for pixels in given["pixel_values"]]
        caches, hidden = statement.prompt(given["input_ids"][0].tolist(), out, method)
        for position, token in enumerate(turns, statement.next_position):
            hidden = statement.step(token, position, caches, method)
            out.ids.append(token)
        out.logits = statement.logits(hidden)
        out.slots = [len(cache.rows) for cache in caches]
    return out


@pytest.mark.parametrize("positions", ["keep", "renumber"])
@pytest.mark.parametrize("k", [None, 5])
def test_a_later_turn_keeps_the_rows_of_the_first(
    models: Models, model: Model, reference: Any, positions: str, k: int | None
) -> None:
    method = Method(key=0.1, layers=LAYERS, gamma=0.05, alpha=1.0, positions=positions, k=k)  # type: ignore[arg-type]
    how = make_policy(k, model.manifest, model.backend.gate, PolicySettings(reduce=word(method)))
    session, asked = (
        Session(model.backend, model.manifest),
        prompt(model, prompt_messages(QUESTIONS[1]), [random_image(1)]),
    )
    first = session.prefill(asked, how)
    said = [int(first.logits.argmax())]
    said += [int(session.decode(said[-1]).argmax())]
    turns = [*said, 40, 41, 42]
    ids = np.concatenate([asked.ids, turns])
    longer = replace(asked, ids=ids, is_vision=np.append(asked.is_vision, np.zeros(len(turns), bool)))
    second = session.prefill(longer, how, after=session.selection)
    wanted = stated_turns(reference(Tiny()), model, 1, method, turns, 0)
    assert_near(second.logits, wanted.logits, 1e-4)
    assert list(second.slots) == wanted.slots
    assert [cut.kept.tolist() for cut in second.cuts] == [cut.kept.tolist() for cut in first.cuts]


# --- what can go wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["fastv", "mustdrop"])
def test_attention_that_is_nan_is_an_error_and_drops_nothing(
    model: Model, prompts: list[Prompt], fresh: dict[Any, Logits], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vtx.runtime.backends.ort.backend import OrtStageCache

    real = OrtStageCache.attention

    def broken(cache: Any, *, last_only: bool = False) -> Scores:
        total, most = real(cache, last_only=last_only)
        return np.where(np.arange(len(total)) == 7, np.nan, total).astype(np.float32), most

    session = Session(model.backend, model.manifest)
    with monkeypatch.context() as patch:
        patch.setattr(OrtStageCache, "attention", broken)
        with pytest.raises(BundleError, match=r"attention of layer \d is not a number"):
            session.prefill(prompts[0], policy(model, way))
    assert np.array_equal(answer(session, prompts[0], policy(model, way), STEPS), fresh[0, way])


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_shrinking_and_restoring_hold_nothing_that_grows(model: Model, prompts: list[Prompt]) -> None:
    session, process = Session(model.backend, model.manifest), psutil.Process()

    def ask() -> None:
        for number, way in itertools.product(range(3), ("mustdrop", "none", "mustdrop then withdrawal")):
            answer(session, prompts[number], policy(model, way), 2)

    def grown() -> tuple[int, int]:
        """Bytes of Python objects and of the process that forty rounds leave behind."""
        gc.collect()
        resident, (held, _) = process.memory_info().rss, tracemalloc.get_traced_memory()
        for _ in range(40):
            ask()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - held, process.memory_info().rss - resident

    tracemalloc.start()
    for _ in range(10):
        ask()
    measured = [grown() for _ in range(3)]
    tracemalloc.stop()
    assert max(objects for objects, _ in measured) < 1 << 16
    # The allocator may take a few pages once, at any time; a leak takes them in every round.
    assert min(resident for _, resident in measured) < 1 << 20


def test_what_is_set_aside_is_what_full_stages_lost(model: Model, prompts: list[Prompt]) -> None:
    """A stage before the first cut sets K and V of the dropped rows saved; later ones run anew and keep nothing."""
    session = Session(model.backend, model.manifest)
    done = session.prefill(prompts[0], policy(model, "mustdrop"))
    (number,) = [number for (number, _), segment in session.caches.segments.items() if segment.saved]
    saved = session.caches.segments[number, True].saved
    assert saved is not None
    spec, dropped = model.manifest.model, int((~done.cuts[-1].kept).sum())
    assert model.manifest.stages[number].first == 2
    assert [layer.shape for layer in saved.kv] == [(2, 1, spec.kv_heads, dropped, spec.head_dim)]
