"""Caches and rows: whatever came before, a prompt gives the logits of a fresh session, bit for bit."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from tests.support.exported import DEVICES, KS, QUESTIONS, THREADS, Models, answer, every_order, greedy, policy, prompt
from tests.support.fuse import check_interrupts
from tests.support.near import assert_near
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.backends.backend import Backend
from vtx.runtime.backends.slots import SlotCounter
from vtx.runtime.errors import ContextError, RequestError
from vtx.runtime.session.session import Prompt, Session
from vtx.runtime.vision.tokens import TokenStates

pytestmark = pytest.mark.dialects("ort", "plain")
TOLERANCE = 1e-5
ONE_BY_ONE = 5e-5  # one row and many run in different kernels: 1.5e-5 seen with AVX2, below 1e-5 with AVX512
STEPS = 6
DEPTHS = (None, *KS)
Logits = NDArray[np.float32]


@pytest.fixture(scope="module", params=DEVICES)
def model(request: pytest.FixtureRequest, models: Models) -> Model:
    return load(models.folder(), device=request.param, threads=THREADS)


@pytest.fixture(scope="module")
def same(model: Model) -> float:
    """How far logits of one prompt may be apart: onnxruntime's are equal bit for bit."""
    return 0 if model.backend.device == "cpu" else TOLERANCE


@pytest.fixture(scope="module")
def fresh(model: Model, prompts: list[Prompt]) -> dict[tuple[int, int | None], Logits]:
    """Logits [STEPS, vocab] of a fresh session for each prompt and K."""
    return {(i, k): greedy(model, p, k, STEPS).logits for i, p in enumerate(prompts) for k in DEPTHS}


# --- one prompt -----------------------------------------------------------------------------------


def one_shot(backend: Backend, session: Session, asked: Prompt, k: int | None) -> Logits:
    """The same graphs over the whole prompt at once: each stage once, no chunks."""
    rows = backend.embed(asked.ids).hidden
    if asked.encoders:
        rows[asked.is_vision] = np.concatenate([encode().hidden for _, encode in asked.encoders])
    positions = np.arange(len(rows), dtype=np.int64)
    for number, stage in enumerate(session.caches.stages):
        if stage.first == k:
            rows, positions = rows[~asked.is_vision], positions[~asked.is_vision]
        rows = backend.stage(number, session.capacity).append(TokenStates(rows), positions).copy()
    return backend.head(rows[-1:])[0]


@pytest.mark.sampled
@pytest.mark.parametrize("k", DEPTHS)
def test_a_question_behind_its_image_equals_all_at_once(model: Model, prompts: list[Prompt], k: int | None) -> None:
    for asked in prompts:
        session = Session(model.backend, model.manifest)
        found = session.prefill(asked, policy(k)).logits
        assert_near(found, one_shot(model.backend, session, asked, k), TOLERANCE)


@pytest.mark.parametrize("k", DEPTHS)
def test_decoding_equals_prefilling_the_longer_prompt(model: Model, prompts: list[Prompt], k: int | None) -> None:
    for asked in prompts:
        session = Session(model.backend, model.manifest)
        found = answer(session, asked, policy(k), STEPS)
        ids = np.concatenate([asked.ids, found[:-1].argmax(1)])
        longer = replace(asked, ids=ids, is_vision=np.append(asked.is_vision, np.zeros(STEPS - 1, bool)))
        whole = Session(model.backend, model.manifest).prefill(longer, policy(k)).logits
        assert_near(found[-1], whole, ONE_BY_ONE)


@pytest.mark.parametrize("k", DEPTHS)
def test_a_prompt_that_begins_with_the_image_withdraws_to_nothing(
    model: Model, prompts: list[Prompt], k: int | None
) -> None:
    vision, text = prompts[0].ids[prompts[0].is_vision], np.array([40, 41, 42])
    asked = replace(prompts[0], ids=np.append(vision, text), is_vision=np.arange(len(vision) + 3) < len(vision))
    session = Session(model.backend, model.manifest)
    done = session.prefill(asked, policy(k))
    assert done.slots == tuple(19 if k is None or layer < k else 3 for layer in range(1, 9))
    assert_near(done.logits, one_shot(model.backend, session, asked, k), TOLERANCE)


def test_a_prompt_that_ends_with_an_image_is_refused(model: Model, prompts: list[Prompt]) -> None:
    cut = prompts[0].prefix_length
    asked = replace(prompts[0], ids=prompts[0].ids[:cut], is_vision=prompts[0].is_vision[:cut])
    with pytest.raises(RequestError, match="ends with an image"):
        Session(model.backend, model.manifest).prefill(asked, policy(None))


def test_a_prompt_too_long_is_refused_and_changes_nothing(
    model: Model, prompts: list[Prompt], fresh: dict[tuple[int, int | None], Logits], same: float
) -> None:
    session = Session(model.backend, model.manifest)
    session.prefill(prompts[0], policy(3))
    filler = np.full(model.manifest.max_context, 40)
    asked = Prompt(filler, np.zeros(len(filler), bool))
    with pytest.raises(ContextError, match=r"255 fit .*; the model itself has no more positions$"):
        session.prefill(asked, policy(None))
    done = session.prefill(prompts[1], policy(3))
    assert done.reused_image
    assert_near(done.logits, fresh[1, 3][0], same)


def test_a_larger_context_is_offered_where_the_model_has_positions_for_it(model: Model) -> None:
    longer = replace(model.manifest, model=replace(model.manifest.model, max_positions=512))
    filler = np.full(model.manifest.max_context, 40)
    with pytest.raises(ContextError, match=r", or export with a larger --max-context \(up to 512\)$"):
        Session(model.backend, longer).prefill(Prompt(filler, np.zeros(len(filler), bool)), policy(None))


@pytest.mark.parametrize("k", DEPTHS)
def test_the_context_can_be_filled_to_its_last_slot(model: Model, prompts: list[Prompt], k: int | None) -> None:
    session = Session(model.backend, model.manifest)
    session.prefill(prompts[0], policy(k))
    while session.length < session.capacity - 1:
        session.decode(40)
    assert np.isfinite(session.decode(41)).all()
    with pytest.raises(ContextError, match="256 tokens"):
        session.decode(42)


@pytest.mark.parametrize("k", DEPTHS)
def test_a_question_runs_with_its_image_in_one_run_a_stage_unless_it_is_long(
    model: Model, prompts: list[Prompt], k: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    append = SlotCounter.append

    def counted(self: SlotCounter, hidden: Logits, positions: Any, **options: Any) -> Logits:
        runs.append(len(hidden))
        return append(self, hidden, positions, **options)

    monkeypatch.setattr(SlotCounter, "append", counted)
    session = Session(model.backend, model.manifest)
    first = session.prefill(prompts[0], policy(k))
    entering = [first.slots[stage.first - 1] for stage in model.manifest.stages]  # what is left of the prompt
    assert runs == entering
    runs.clear()
    session.prefill(prompts[1], policy(k))
    after = len(prompts[1].ids) - prompts[1].prefix_length
    assert runs == [after] * len(entering)
    runs.clear()
    question = len(prompts[0].ids) - prompts[0].prefix_length
    monkeypatch.setattr("vtx.runtime.session.caches.QUESTION_ROWS", question - 1)
    apart = Session(model.backend, model.manifest).prefill(prompts[0], policy(k))
    assert runs == [part for slots in entering for part in (slots - question, question)]
    assert_near(apart.logits, first.logits, TOLERANCE)


# --- one prompt after another ---------------------------------------------------------------------


def test_three_questions_at_every_order_of_k_equal_fresh_ones(
    model: Model, prompts: list[Prompt], fresh: dict[tuple[int, int | None], Logits], same: float
) -> None:
    session = Session(model.backend, model.manifest)
    for asked, k in enumerate(every_order(DEPTHS, 3)):
        done = session.prefill(prompts[asked % 3], policy(k))
        assert done.reused_image == (asked > 0)
        assert_near(done.logits, fresh[asked % 3, k][0], same, str(asked))


def test_a_k_between_two_turns_of_a_chat_does_not_mix_their_caches(
    model: Model, prompts: list[Prompt], fresh: dict[tuple[int, int | None], Logits]
) -> None:
    session = Session(model.backend, model.manifest)
    for k in (2, 5, 2, None, 5, 8, 3, 8):
        done = session.prefill(prompts[1], policy(k), after=session.selection)
        assert_near(done.logits, fresh[1, k][0], TOLERANCE)


# --- interrupts -----------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("moment", ["before", "within", "after"])
@pytest.mark.parametrize("earlier", [None, (1, None), (1, 3), (3, 5), (5, None)])
def test_a_question_after_one_interrupted_at_any_call_equals_a_fresh_one(
    model: Model,
    prompts: list[Prompt],
    fresh: dict[tuple[int, int | None], Logits],
    moment: str,
    earlier: tuple[int, int | None] | None,
) -> None:
    check_interrupts(model, prompts, fresh, moment, earlier, TOLERANCE)


# --- memory ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def roomy(models: Models) -> Model:
    """A model whose caches are large beside everything else: 8 MB a layer, 32 MB in all."""
    return models(Tiny(layers=4, heads=4, kv_heads=4, head_dim=64, context=4096), ks=(3,))


def caches(session: Session) -> list[Any]:
    return [session.caches.cache(number) for number in range(len(session.caches.stages))]


@pytest.mark.parametrize("k", [None, 3])
def test_decoding_writes_one_slot_in_place(roomy: Model, k: int | None) -> None:
    session = Session(roomy.backend, roomy.manifest)
    session.prefill(prompt(roomy, prompt_messages(QUESTIONS[0]), [random_image(1)]), policy(k))
    before = [np.stack(cache.kv) for cache in caches(session)]
    session.decode(40)
    for cache, old in zip(caches(session), before, strict=True):
        changed = (np.stack(cache.kv) != old).any(axis=(0, 1, 2, 3, 5))
        assert np.flatnonzero(changed).tolist() == [cache.length - 1]
        for number, value in enumerate(cache.buffers):
            assert value.data_ptr() == cache.kv[number // 2][number % 2].ctypes.data
        outputs = {value.data_ptr() for value in cache.row_binding.get_outputs()}
        assert {value.data_ptr() for value in cache.buffers} < outputs


@pytest.mark.parametrize("k", [None, 3])
def test_decoding_allocates_nothing_that_grows_with_the_cache(roomy: Model, k: int | None) -> None:
    session = Session(roomy.backend, roomy.manifest)
    session.prefill(prompt(roomy, prompt_messages(QUESTIONS[0]), [random_image(1)]), policy(k))
    for cache in caches(session):
        for layer in cache.kv:
            layer += 0  # touch every page, as a full context would
    for _ in range(50):
        session.decode(40)
    process, addresses = psutil.Process(), [layer.ctypes.data for cache in caches(session) for layer in cache.kv]
    gc.collect()
    tracemalloc.start()
    resident, (held, _) = process.memory_info().rss, tracemalloc.get_traced_memory()
    for _ in range(300):
        session.decode(40)
    (after, peak), grown = tracemalloc.get_traced_memory(), process.memory_info().rss - resident
    tracemalloc.stop()
    assert [layer.ctypes.data for cache in caches(session) for layer in cache.kv] == addresses
    # One layer's K alone is 4 MB: a single copy would show in either number.
    assert after - held < 1 << 16
    assert peak - held < 1 << 16
    assert grown < 1 << 21


def test_withdrawn_stages_hold_no_slot_for_vision_rows(roomy: Model) -> None:
    session = Session(roomy.backend, roomy.manifest)
    session.prefill(prompt(roomy, prompt_messages(QUESTIONS[0]), [random_image(1)]), policy(3))
    full, text = caches(session)
    assert (full.capacity, text.capacity) == (4096, 4096 - 16)
    assert set(session.caches.segments) == {(0, True), (1, False)}
