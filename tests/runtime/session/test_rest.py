"""K with a rest answers as the plain statement over transformers does, whatever was asked before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.support.exported import DEVICES, THREADS, Models, answer, prompt
from tests.support.families.gemma import GEMMA3
from tests.support.families.internvl import INTERNVL
from tests.support.families.lfm2_vl import LFM2
from tests.support.families.llava_next import LLAVA_NEXT
from tests.support.families.paligemma import PALIGEMMA
from tests.support.families.qwen import QWEN2, QWEN3, QWEN25, QWEN35
from tests.support.families.smolvlm import SMOLVLM
from tests.support.near import assert_near
from tests.support.reference import Reference
from tests.support.rest import chosen_rest, rest_answer
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.spec.model_spec import unscored
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.policies.base import Policy
from vtx.runtime.policies.make import PolicySettings, make_policy, read_rest
from vtx.runtime.session.session import PrefillResult, Prompt, Session

KS = (2, 5, 8)
RESTS = ("1", "10%", "40%")
STEPS = 6
TOLERANCE = 1e-4
QUESTIONS = ("red?", "How many circle shapes are there?", "What is the colour of the square in the picture?", "left?")
FAMILIES = {
    "llava-llama": Tiny(),
    "llava-mistral-siglip": Tiny(text="mistral", vision="siglip", select="full", head_dim=24, kv_heads=4),
    "llava-qwen2": Tiny(text="qwen2", tokenizer="bytes", theta=1e6),
    "vipllava": Tiny(family="vipllava", feature_layer=(-1, 2)),
    "granite": Tiny(text="granite"),
}
OTHERS = {
    "tiles": LLAVA_NEXT, "internvl": INTERNVL, "text-between-tiles": SMOLVLM, "three-part-positions": QWEN25,
    "maps": QWEN3, "convolutions": LFM2, "delta-rule": QWEN35, "windows": GEMMA3,
}  # fmt: skip
Judges = Callable[..., Reference]
pytestmark = pytest.mark.dialects("ort", "plain")


@pytest.fixture(scope="module")
def opened(models: Models) -> Iterator[Callable[[Tiny, str], Model]]:
    """The model of a variant on a device."""
    made = dict[tuple[Path, str], Model]()

    def on(tiny: Tiny, device: str) -> Model:
        folder = models(tiny, KS).bundle.folder
        if (folder, device) not in made:
            made[folder, device] = load(folder, device=device, threads=THREADS)
        return made[folder, device]

    yield on
    for model in made.values():
        model.close()


def policy(model: Model, k: int | None, rest: str | None, reduce: str | None = None) -> Policy:
    number = None if rest is None else read_rest(rest)
    return make_policy(
        k, model.manifest, model.backend.gate, PolicySettings(rest=number, reduce=reduce), dialect=model.backend.dialect
    )


def count_of(rest: str, tokens: int) -> int:
    return int(rest) if "%" not in rest else -(-tokens * int(rest[:-1]) // 100)


def check(model: Model, reference: Reference, session: Session, question: str, k: int, rest: str, images: int) -> bool:
    """Hold one answer of a session to the statement; False if two of its tokens are too close to prove anything."""
    pictures, messages = [random_image(4 + number) for number in range(images)], prompt_messages(question, images)
    inputs = reference.inputs(messages, pictures)
    tokens = int((inputs["input_ids"] == reference.image_token).sum())
    rest_rows = chosen_rest(reference, inputs, k, count_of(rest, tokens))
    wanted = rest_answer(reference, inputs, k, rest_rows, STEPS)
    results = list[PrefillResult]()
    prefill = session.prefill

    def noted(*args: Any, **keywords: Any) -> PrefillResult:
        results.append(prefill(*args, **keywords))
        return results[0]

    with patch.object(session, "prefill", noted):
        logits = answer(session, prompt(model, messages, pictures), policy(model, k, rest), STEPS)
    done = results[0]
    assert np.flatnonzero(done.cuts[0].kept).tolist() == rest_rows
    assert (done.k, done.rest) == (k, len(rest_rows))
    whole = reference.kv_slots(inputs, None)
    left = [(count - tokens + len(rest_rows)) * (count > 0) for count in whole]
    assert list(done.slots) == whole[: k - 1] + left[k - 1 :]
    if wanted.margin < 2 * TOLERANCE:
        return False
    assert logits.argmax(1).tolist() == wanted.ids
    assert_near(logits, wanted.logits, TOLERANCE)
    return True


@pytest.mark.covering(1)
@pytest.mark.sampled(8)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tiny", FAMILIES.values(), ids=list(FAMILIES))
def test_every_question_about_a_picture_equals_the_statement(
    opened: Callable[[Tiny, str], Model], reference: Judges, tiny: Tiny, device: str
) -> None:
    """Nine pairs of K and rest one after another in a session, with other forms of K between them."""
    model, judge = opened(tiny, device), reference(tiny)
    session, proved = Session(model.backend, model.manifest), 0
    between = [(None, None), (5, None), (2, "100%"), (8, "3")]
    for number, (k, rest) in enumerate(product(KS, RESTS)):
        question = QUESTIONS[number % len(QUESTIONS)]
        proved += check(model, judge, session, question, k, rest, 1)
        proved += check(model, judge, session, QUESTIONS[(number + 1) % len(QUESTIONS)], k, rest, 1)
        asked = prompt(model, prompt_messages(question), [random_image(4)])
        answer(session, asked, policy(model, *between[number % len(between)]), 2)
    assert proved >= 9


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tiny", OTHERS.values(), ids=list(OTHERS))
def test_families_with_tiles_states_windows_and_maps_equal_the_statement(
    models: Models, reference: Judges, tiny: Tiny, device: str
) -> None:
    """At every K whose layer before it has attention over the whole prompt; one question after the other."""
    ks = tuple(range(2, tiny.layers + 1))
    judge, proved = reference(tiny), 0
    with load(models(tiny, ks).bundle.folder, device=device, threads=THREADS) as model:
        scored = [stage.last for stage in model.manifest.stages if stage.query]
        assert scored
        assert scored == [layer for layer in range(1, tiny.layers) if not unscored(model.manifest.model, layer)]
        session = Session(model.backend, model.manifest)
        for number, layer in enumerate(scored):
            question, rest = QUESTIONS[number % len(QUESTIONS)], RESTS[number % len(RESTS)]
            proved += check(model, judge, session, question, layer + 1, rest, 1)
            proved += check(model, judge, session, QUESTIONS[2 - number % 2], layer + 1, "40%", 1)
    assert proved >= len(scored)


@pytest.mark.parametrize("tiny", [PALIGEMMA, QWEN35, GEMMA3], ids=["two-way", "states", "windows"])
def test_a_k_behind_a_layer_that_cannot_rank_tokens_is_refused_by_name(models: Models, tiny: Tiny) -> None:
    model = models(tiny, tuple(range(2, tiny.layers + 1)))
    reasons = {k: unscored(model.manifest.model, k - 1) for k in model.manifest.variants}
    refused = {k: reason for k, reason in reasons.items() if reason}
    assert refused
    for k, reason in refused.items():
        with pytest.raises(RequestError, match=f"at K = {k} this bundle cannot keep a rest: .*{reason}; use another K"):
            policy(model, k, "10%")
        assert policy(model, k, "0").exit == k


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_of_several_pictures_compete(
    opened: Callable[[Tiny, str], Model], reference: Judges, device: str
) -> None:
    model, judge = opened(Tiny(), device), reference(Tiny())
    session = Session(model.backend, model.manifest)
    assert any([check(model, judge, session, question, 5, "20%", 2) for question in QUESTIONS])


@pytest.mark.parametrize("device", DEVICES)
def test_a_turn_of_a_chat_is_a_question_that_all_turns_lead_to(
    opened: Callable[[Tiny, str], Model], reference: Judges, device: str
) -> None:
    model, judge = opened(Tiny(), device), reference(Tiny())
    options = Options(max_new_tokens=STEPS, ignore_eos=True)
    with model.open(random_image(4)) as image:
        chat = image.chat(5)
        for turn, (question, rest) in enumerate(zip(QUESTIONS, ("10%", "10%", "3", "40%"), strict=True)):
            earlier = [*chat.messages]
            found = chat.ask(question, options, rest=rest)
            fresh = [*earlier, {"role": "user", "content": [{"type": "text", "text": question}]}]
            messages = fresh if earlier else prompt_messages(question)
            inputs = judge.inputs(messages, [random_image(4)])
            tokens = int((inputs["input_ids"] == judge.image_token).sum())
            rows = chosen_rest(judge, inputs, 5, count_of(rest, tokens))
            wanted = rest_answer(judge, inputs, 5, rows, STEPS)
            assert found.stats.reduced is not None
            assert found.stats.reduced.kept[-1].patches == (tuple(rows),)
            assert found.stats.reused_layers == (4 if turn else 0)
            if wanted.margin > 2 * TOLERANCE:
                assert list(found.token_ids) == wanted.ids


@pytest.mark.parametrize("device", DEVICES)
def test_the_ends_of_the_scale_are_the_other_forms_bit_by_bit(
    opened: Callable[[Tiny, str], Model], device: str
) -> None:
    model = opened(Tiny(), device)
    asked = prompt(model, prompt_messages(QUESTIONS[2]), [random_image(4)])

    def logits(k: int | None, rest: str | None, reduce: str | None = None) -> np.ndarray:
        session = Session(model.backend, model.manifest)
        return answer(session, asked, policy(model, k, rest, reduce), STEPS)

    for k in KS:
        for rest in ("0", "0%"):
            assert np.array_equal(logits(k, rest), logits(k, None))
        for rest in ("100%", "16", "1000"):
            assert np.array_equal(logits(k, rest), logits(None, None))
        released = logits(None, None, f"fastv:k={k - 1},ratio=0.9")
        assert np.array_equal(logits(k, "10%"), released)
        assert not np.array_equal(released, logits(k, None))


def test_the_next_question_runs_no_layer_before_k_again(opened: Callable[[Tiny, str], Model]) -> None:
    with opened(Tiny(), "cpu").open(random_image(4)) as image:
        first = [(5, "10%", 0), (5, "40%", 4), (8, "10%", 4), (5, "10%", 4), (5, None, 4)]
        for k, rest, reused in [*first, (2, 1, 0), (2, 2, 1), (8, 1, 7), (8, 2, 7)]:
            assert image.ask("red?", k, rest=rest, max_new_tokens=2).stats.reused_layers == reused


@pytest.mark.parametrize("device", DEVICES)
def test_drafts_and_prefix_files_leave_the_answer_as_it_is(
    opened: Callable[[Tiny, str], Model], tmp_path: Path, device: str
) -> None:
    model, pictures = opened(Tiny(), device), [random_image(4), random_image(5)]
    asked: dict[str, Any] = {"k": 5, "rest": "20%", "max_new_tokens": 24, "ignore_eos": True}

    def ids(prefix_file: Path | None = None, **more: Any) -> tuple[tuple[int, ...], int]:
        with model.open(pictures, prefix_file=prefix_file) as conversation:
            answer = conversation.ask(QUESTIONS[1], **asked, **more)
            assert answer.stats.rest == 7  # of 32
            return answer.token_ids, answer.stats.reused_tokens

    wanted, _ = ids()
    assert ids(prompt_lookup=6)[0] == wanted
    file = tmp_path / "prefix"
    assert ids(file) == (wanted, 0)
    assert file.exists()
    again, reused = ids(file)
    assert again == wanted
    assert 0 < reused < 16, "the text before the first picture comes from the file, and no hidden states of pictures"


def test_a_picture_behind_the_question_competes_for_the_template_s_last_token(
    models: Models, reference: Judges
) -> None:
    model, judge = models(QWEN2, (2, 5)), reference(QWEN2)
    messages = [{"role": "user", "content": [{"type": "text", "text": QUESTIONS[1]}, {"type": "image"}]}]
    asked, inputs = prompt(model, messages, [random_image(4)]), judge.inputs(messages, [random_image(4)])
    assert asked.is_vision.nonzero()[0][0] > 4, "the question is before it"
    rows = chosen_rest(judge, inputs, 5, 2)
    session = Session(model.backend, model.manifest)
    done = session.prefill(asked, policy(model, 5, "2"))
    assert np.flatnonzero(done.cuts[0].kept).tolist() == rows
    wanted = rest_answer(judge, inputs, 5, rows, STEPS)
    logits = [done.logits, *(session.decode(token) for token in wanted.ids[:-1])]
    assert_near(np.stack(logits), wanted.logits, TOLERANCE)


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "-1",
        "-5%",
        "101%",
        "ten",
        "10%%",
        "%",
        "nan%",
        "1e400%",
        "1.5",
        " 5",
        "٣",
        -1,
        1.5,
        True,
        float("nan"),
        [1],
        1e9,
    ],
)
def test_what_is_no_rest_is_refused(rest: Any) -> None:
    with pytest.raises(RequestError, match="it must be a share of the image tokens such as 10%"):
        Options(rest=rest)


def test_shares_and_numbers_are_told_apart() -> None:
    assert [Options(rest=rest).rest for rest in ("10%", 0.1, "57", 57, 1, 1.0, "2.5%")] == [
        0.1,
        0.1,
        57,
        57,
        1,
        1.0,
        0.025,
    ]
    assert isinstance(Options(rest=1).rest, int)


@pytest.mark.parametrize("k", [None, "none", "auto", "default"])
def test_a_rest_without_a_prebuilt_k_is_refused(models: Models, k: Any) -> None:
    ks = (5,) if k != "default" else ()
    with models(Tiny(), ks).open(random_image(4)) as image:
        with pytest.raises(RequestError, match=r"give K as a number, or leave the rest out|needs gates"):
            image.ask("red?", k, rest="10%")
        assert image.ask("red?", max_new_tokens=1).stats.rest == 0


def test_a_prompt_without_a_picture_is_answered_as_without_a_rest(opened: Callable[[Tiny, str], Model]) -> None:
    model = opened(Tiny(), "cpu")
    rested = model.ask("describe the shape", 5, rest="10%", max_new_tokens=4)
    assert rested.token_ids == model.ask("describe the shape", 5, max_new_tokens=4).token_ids
    assert (rested.stats.rest, rested.stats.k) == (0, None)


def test_a_picture_with_no_text_behind_it_is_refused(opened: Callable[[Tiny, str], Model]) -> None:
    model = opened(Tiny(), "cpu")
    asked = prompt(model, prompt_messages("red?"), [random_image(4)])
    end = int(asked.is_vision.nonzero()[0][-1]) + 1
    cut = Prompt(asked.ids[:end], asked.is_vision[:end], asked.encoders)
    with pytest.raises(RequestError, match="the prompt ends with an image and leaves no token to answer from"):
        Session(model.backend, model.manifest).prefill(cut, policy(model, 5, "10%"))
    with model.open(random_image(4)) as image:
        for question in ("", " "):
            with pytest.raises(RequestError, match="the question is empty; write at least one word"):
                image.ask(question, 5, rest="10%")


def test_of_a_picture_of_one_token_any_share_is_all_of_it(models: Models) -> None:
    with models(Tiny(image=14), (5,)).open(random_image(4)) as image:
        assert image.ask("red?", 5, max_new_tokens=1).stats.vision_tokens == 1
        rested, full = (image.ask("red?", k, rest=rest, max_new_tokens=4) for k, rest in ((5, "1%"), (None, None)))
        assert rested.token_ids == full.token_ids
        assert rested.stats.kv_slots == full.stats.kv_slots


def test_attention_that_is_not_a_number_is_an_error_and_leaves_the_conversation_whole(
    opened: Callable[[Tiny, str], Model],
) -> None:
    with opened(Tiny(), "cpu").open(random_image(4)) as image:
        wanted = image.ask("red?", 5, rest="10%", max_new_tokens=4).token_ids

        def broken(self: Any, *, last_only: bool = False) -> Any:
            return np.full(self.length, np.nan, np.float32), np.zeros(self.length, np.float32)

        with (
            patch("vtx.runtime.backends.ort.cache.OrtStageCache.attention", broken),
            pytest.raises(BundleError, match="the attention of layer 4 is not a number"),
        ):
            image.ask("left?", 5, rest="10%", max_new_tokens=4)
        assert image.ask("red?", 5, rest="10%", max_new_tokens=4).token_ids == wanted


def test_a_bundle_of_an_earlier_export_refuses_a_rest_by_name(opened: Callable[[Tiny, str], Model]) -> None:
    from dataclasses import replace

    model = opened(Tiny(), "cpu")
    manifest = model.manifest
    stages = tuple(replace(stage, query=False) for stage in manifest.stages)
    dialects = {name: replace(graphs, score=None) for name, graphs in manifest.dialects.items()}
    earlier = replace(manifest, stages=stages, dialects=dialects)
    with pytest.raises(RequestError, match=r"at K = 5 this bundle cannot keep a rest: .* layer 4; export it again"):
        make_policy(5, earlier, model.backend.gate, PolicySettings(rest=0.1))
    assert make_policy(5, earlier, model.backend.gate, PolicySettings(rest=0.0)) == make_policy(
        5, earlier, model.backend.gate
    )
