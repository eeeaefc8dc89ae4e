"""Conversations that go on from what their caches hold: the ids of a fresh one, and fewer tokens run."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from tests.support.exported import Models
from tests.support.families.lfm2_vl import LFM2
from tests.support.families.lfm3_vl import LFM3
from tests.support.families.llava_onevision import ONEVISION
from tests.support.families.minicpm import MINICPM
from tests.support.families.qwen import QWEN3, QWEN25, QWEN35
from tests.support.families.smolvlm import SMOLVLM
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api.answer import Answer
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options, Settings
from vtx.runtime.policies.methods.cdpruner import CDPruner
from vtx.runtime.session.encoded_images import ImageCache, nbytes
from vtx.runtime.vision.tokens import ImageTokens

OPTIONS = Options(max_new_tokens=8, ignore_eos=True, logprobs=True)
IMAGE = random_image(1)


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models(Tiny(), (3, 5), "fp32", ("fastv:k=3,ratio=0.5",))


def turns(*texts: str, images: int = 1) -> list[dict[str, Any]]:
    """Turns that alternate, the first the user's, with the images."""
    first = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": texts[0]}]
    rest = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts[1:], 1)]
    return [{"role": "user", "content": first}, *rest]


def ask(conversation: Conversation, messages: Any, k: int | None = None, reduce: str = "none") -> Answer:
    return conversation.stream_messages(messages, Settings(k, OPTIONS, reduce), resume=True).read()


def fresh(model: Model, messages: Any, k: int | None = None, reduce: str = "none", images: Any = IMAGE) -> Answer:
    return model.open(images).stream_messages(messages, Settings(k, OPTIONS, reduce)).read()


def same(answer: Answer, expected: Answer) -> None:
    assert answer.token_ids == expected.token_ids
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert answer.stats.kv_slots == expected.stats.kv_slots


@pytest.mark.sampled
@pytest.mark.parametrize(("k", "reduce"), [(None, "none"), (3, "none"), (5, "none"), (None, "fastv:k=3,ratio=0.5")])
def test_a_chat_sent_whole_each_time_gives_the_ids_of_fresh_runs(model: Model, k: int | None, reduce: str) -> None:
    conversation, texts = model.open(IMAGE), ["red?"]
    for question in ("how many circle shapes?", "what is the colour?", ""):
        answer = ask(conversation, turns(*texts), k, reduce)
        same(answer, fresh(model, turns(*texts), k, reduce))
        texts += [answer.text, question]


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiny", [QWEN25, QWEN3, QWEN35, SMOLVLM, ONEVISION, LFM2, LFM3, MINICPM], ids=lambda tiny: tiny.family
)
def test_a_chat_of_other_layouts_sent_whole_each_time_gives_the_ids_of_fresh_runs(models: Models, tiny: Tiny) -> None:
    """Positions of three parts go on behind an image; text stands among the tokens of tiles; images share a prompt."""
    model, images, texts = models(tiny, (3, 5)), [random_image(0, (150, 60)), random_image(1, (40, 90))], ["red?"]
    conversation = model.open(images)
    for question in ("how many?", ""):
        asked = turns(*texts, images=2)
        answer = ask(conversation, asked, 5)
        same(answer, fresh(model, asked, 5, images=images))
        texts += [answer.text, question]
    assert answer.stats.reused_tokens > answer.stats.vision_tokens


def test_a_fixed_policy_runs_only_the_tokens_that_are_new(model: Model) -> None:
    conversation = model.open(IMAGE)
    first = ask(conversation, turns("red?"), 3)
    assert first.stats.reused_tokens == 0
    second = ask(conversation, turns("red?", first.text, "how many?"), 3)
    assert second.stats.reused_tokens >= first.stats.prompt_tokens - 1
    assert second.stats.reused_layers == model.manifest.model.layers


def test_a_reduction_that_looks_at_the_question_runs_the_question_again(model: Model) -> None:
    conversation = model.open(IMAGE)
    for _ in range(2):
        answer = ask(conversation, turns("red?"), None, "fastv:k=3,ratio=0.5")
    assert answer.stats.reused_image
    assert answer.stats.reused_tokens == 0, "the image's tokens run again from the first cut on"


def test_a_changed_history_is_run_from_where_it_differs(model: Model) -> None:
    conversation = model.open(IMAGE)
    ask(conversation, turns("red?"))
    ask(conversation, turns("red?", "yes the square", "how many?"))
    edited = turns("red?", "no the circle", "how many?")
    answer = ask(conversation, edited)
    same(answer, fresh(model, edited))
    assert 0 < answer.stats.reused_tokens < answer.stats.prompt_tokens - 5


def test_a_change_of_k_between_turns_is_exact(model: Model) -> None:
    conversation = model.open(IMAGE)
    for k in (3, None, 5, 3):
        same(ask(conversation, turns("red?"), k), fresh(model, turns("red?"), k))


def test_text_alone_resumes_too(model: Model) -> None:
    conversation = model.open()
    first = ask(conversation, turns("what is the shape?", images=0))
    longer = turns("what is the shape?", first.text, "which is left?", images=0)
    second = ask(conversation, longer)
    same(second, fresh(model, longer, images=()))
    assert second.stats.reused_tokens >= first.stats.prompt_tokens - 1


def test_an_answer_that_was_cancelled_leaves_the_next_one_exact(model: Model) -> None:
    conversation = model.open(IMAGE)
    stream = conversation.stream_messages(turns("red?"), Settings(3, OPTIONS, "none"), resume=True)
    for _ in range(4):
        stream.step()
    stream.cancel()
    longer = turns("red?", stream.answer.text, "how many?")
    same(ask(conversation, longer, 3), fresh(model, longer, 3))


def test_a_step_gives_the_first_token_with_the_prompt_then_a_token_each(model: Model) -> None:
    stream = model.open(IMAGE).stream_messages(turns("red?"), Settings(3, OPTIONS, "none"))
    pieces = [stream.step()]
    assert len(stream.progress().token_ids) == 1
    with suppress(StopIteration):
        while True:
            pieces.append(stream.step())
    assert len(pieces) in (len(stream.answer.token_ids), len(stream.answer.token_ids) + 1), "one more: what was held"
    assert "".join(pieces) == stream.answer.text


def test_conversations_say_how_far_a_prompt_agrees_and_what_they_take(model: Model) -> None:
    conversation = model.open(IMAGE)
    ids = model.loaded.prompts.ids(turns("red?"), conversation.images)
    assert conversation.agreement(ids) == (0, 0)
    before = conversation.cache_bytes
    answer = ask(conversation, turns("red?"))
    assert conversation.agreement(ids)[0] == len(ids)
    assert conversation.agreement(ids)[1] == len(ids) + len(answer.token_ids) - 1
    other = model.loaded.prompts.ids(turns("which?"), conversation.images)
    assert 0 < conversation.agreement(other)[0] < len(other)
    filled = -(-(len(ids) + len(answer.token_ids) - 1) // 32) * 32
    kv = filled * model.manifest.model.layers * model.backend.kv_slot_bytes
    assert kv <= conversation.cache_bytes - before < 1.1 * kv, "next to it the encoded image"


def test_a_prompt_agrees_also_where_image_tokens_left_before_the_decoder(model: Model) -> None:
    conversation = model.open(IMAGE)
    ids = model.loaded.prompts.ids(turns("red?"), conversation.images)
    answer = ask(conversation, turns("red?"), reduce="cdpruner:keep=4,text=none")
    assert answer.stats.prompt_tokens < len(ids)
    assert conversation.agreement(ids) == (len(ids), len(ids) + len(answer.token_ids) - 1)
    other = model.loaded.prompts.ids(turns("which?"), conversation.images)
    assert answer.stats.vision_tokens < conversation.agreement(other)[0] < len(other)


def test_conversations_share_encoded_images_where_the_model_has_a_cache(model: Model) -> None:
    expected = fresh(model, turns("red?"))
    model.loaded.caches.images = ImageCache(1 << 20)
    try:
        for _ in range(2):
            same(fresh(model, turns("red?")), expected)
        assert (model.loaded.caches.images.hits, model.loaded.caches.images.misses) == (1, 1)
    finally:
        model.loaded.caches.images = None


def test_the_image_least_recently_used_leaves_first(model: Model) -> None:
    tokens: ImageTokens = model.backend.vision(model.loaded.images.prepare(IMAGE).pixels[None])
    cache = ImageCache(2 * nbytes(tokens))
    for key in "abab":
        if cache.get(key) is None:
            cache.put(key, tokens)
    cache.get("a")
    cache.put("c", tokens)
    assert cache.get("b") is None
    assert cache.get("a") is tokens
    assert cache.bytes == 2 * nbytes(tokens)
    small = ImageCache(nbytes(tokens) - 1)
    small.put("a", tokens)
    assert (small.bytes, small.get("a")) == (0, None)


def test_what_a_policy_works_out_of_an_image_counts_in_the_cache(model: Model) -> None:
    """The cosines of CDPruner, a square of the tokens, which come after the image was kept."""
    images = [model.backend.vision(model.loaded.images.prepare(random_image(number)).pixels[None]) for number in (1, 2)]
    cache = ImageCache(sum(map(nbytes, images)))
    for number, tokens in enumerate(images):
        cache.put(number, tokens)
    before = cache.bytes
    CDPruner(4, "none").select(images[1])
    assert cache.bytes >= before + 4 * len(images[1]) ** 2
    assert cache.get(1) is images[1]
    assert cache.get(0) is None
    assert cache.bytes == nbytes(images[1]) <= cache.limit_bytes
