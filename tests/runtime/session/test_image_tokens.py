"""The budget of an image by request: transformers' logits at each, in Python, the server and libvtx, side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.bundles import ORT, export
from tests.support.cpp import assert_budgets_equal, failure, needs_cpp, write_pictures
from tests.support.exported import THREADS, greedy, prompt
from tests.support.families.gemma import GEMMA4
from tests.support.fixtures import Checkpoints, References
from tests.support.near import assert_near
from tests.support.parity import QUESTIONS
from tests.support.serving import asking, data_url, serving, user
from tests.support.tiny import edited, prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.errors import ContextError, RequestError

LARGE = replace(GEMMA4, budget=280, context=1024)
BUDGETS = 70, 140, 280
SIZE = 100, 60
SIZES = SIZE, (17, 19), (64, 64), (640, 480), (480, 640), (300, 900), (1024, 484), (512, 14), (33, 77), (800, 800)


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose images have 70 tokens unless a request asks for more."""
    place = tmp_path_factory.mktemp("budgets")
    usual = edited(tiny_checkpoint(LARGE), place / "checkpoint", "preprocessor_config.json", {"max_soft_tokens": 70})
    return export(usual, place / "bundle", (4,), dialects=ORT, max_context=700).folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    with load(folder, device="cpu", threads=THREADS) as model:
        yield model


def sized(budget: object, image: Image.Image, question: str = "red?") -> dict[str, Any]:
    part = {"type": "image", "image": image, "image_tokens": budget}
    return {"role": "user", "content": [part, {"type": "text", "text": question}]}


def test_each_budget_has_the_logits_of_transformers(model: Model, reference: References) -> None:
    judge, picture = reference(LARGE), random_image(2, SIZE)
    assert model.manifest.layout.max_tokens == 280
    for budget in BUDGETS:
        judge.processor.image_processor.max_soft_tokens = budget
        messages = prompt_messages(QUESTIONS[0])
        inputs = judge.inputs(messages, [picture])
        messages[0]["content"][0]["image_tokens"] = budget
        for k in (None, 4):
            answer = greedy(model, prompt(model, messages, [picture]), k, 2)
            wanted = judge.greedy(inputs, k, 2)
            assert answer.ids == wanted.ids
            assert_near(answer.logits, wanted.logits, 1e-4)
    usual = model.loaded.images.prepare(picture)
    assert usual.key == model.loaded.images.prepare(picture, image_tokens=70).key
    assert model.open(picture, image_tokens=280).images[0].tokens > 2 * usual.tokens


def test_a_question_may_have_a_budget_of_its_own(model: Model) -> None:
    picture = random_image(2, SIZE)
    with model.open(picture, image_tokens=140) as image:
        counts = []
        for budget in (None, 280, 70):
            answer = image.ask("red?", image_tokens=budget, max_new_tokens=2, logprobs=True)
            fresh = model.generate([sized(budget or 140, picture)], max_new_tokens=2, logprobs=True)
            assert answer.token_ids == fresh.token_ids
            np.testing.assert_allclose(answer.logprobs, fresh.logprobs, atol=1e-4)
            counts.append(answer.stats.vision_tokens)
        assert counts[1] > counts[0] > counts[2]
        assert image.ask("red?", max_new_tokens=2).stats.vision_tokens == counts[2]
        image.replace_prepared(image.images)
        with pytest.raises(RequestError, match="as they were opened"):
            image.ask("red?", image_tokens=70)
    with model.open() as nothing, pytest.raises(RequestError, match="image_tokens is for images"):
        nothing.ask("red?", image_tokens=70)


def test_pictures_of_several_budgets_are_never_mixed(model: Model) -> None:
    """Not even one of a single colour, whose pixels are equal."""
    grey = Image.new("RGB", (100, 100), (90, 90, 90))
    images = [model.loaded.images.prepare(grey, image_tokens=budget) for budget in BUDGETS]
    assert len({image.key for image in images}) == len({image.tokens for image in images}) == 3
    with model.open(grey, image_tokens=70) as conversation:
        counts = [conversation.ask("red?", max_new_tokens=2).stats.vision_tokens]
        for budget in (280, 140, 70):
            conversation.replace(grey, image_tokens=budget)
            answer = conversation.ask("red?", max_new_tokens=2, logprobs=True)
            fresh = model.generate([sized(budget, grey)], max_new_tokens=2, logprobs=True)
            counts.append(answer.stats.vision_tokens)
            assert answer.token_ids == fresh.token_ids
            np.testing.assert_allclose(answer.logprobs, fresh.logprobs, atol=1e-4)  # type: ignore[arg-type]
    assert counts == [64, 256, 121, 64]


def test_turns_of_a_chat_have_budgets_of_their_own(model: Model) -> None:
    first, second = random_image(2, SIZE), random_image(3, SIZE)
    turns = [sized("low", first), {"role": "assistant", "content": "a"}, sized(280, second)]
    answer = model.generate(turns, max_new_tokens=2)
    counts = [model.loaded.images.prepare(each, image_tokens=n).tokens for each, n in ((first, 70), (second, 280))]
    assert answer.stats.vision_tokens == sum(counts)
    alike = model.generate([sized(70, first), *turns[1:]], max_new_tokens=2)
    assert (alike.token_ids, alike.stats.vision_tokens) == (answer.token_ids, answer.stats.vision_tokens)


def test_a_budget_beyond_the_context_or_the_bundle_is_refused_with_both_numbers(
    folder: Path, tmp_path: Path, model: Model
) -> None:
    picture = random_image(2, (80, 80))
    with pytest.raises(RequestError, match="image_tokens is 560; images of this bundle have at most 280; lower it"):
        model.open(picture, image_tokens=560)
    with pytest.raises(RequestError, match="image_tokens is for images, not for videos and texts; leave it out"):
        model.open(image_tokens=70)
    with pytest.raises(ContextError, match=r"takes 7\d\d tokens, 768 .*, and 699 fit .*--image-tokens 140 \(image_to"):
        model.open([picture, picture.rotate(90), picture.rotate(180)], image_tokens=280).ask("red?")


def test_two_budgets_of_one_picture_in_one_server_are_answered_as_alone(folder: Path, model: Model) -> None:
    picture = random_image(2, SIZE)
    question = user("red?", picture)
    url = question["content"][0]["image_url"]["url"]
    ways: list[tuple[object, dict[str, Any], dict[str, Any]]] = [
        ("low", {"detail": "low"}, {}), (280, {"detail": "high"}, {}), (None, {"detail": "auto"}, {}),
        (140, {"image_tokens": 140}, {}), (140, {}, {"image_tokens": 140}), (280, {"image_tokens": 280}, {}),
        (70, {"detail": "low"}, {"image_tokens": 280}), (None, {}, {}),
    ]  # fmt: skip
    with serving({"tiny": folder}) as served:
        for budget, own, whole in [*ways, *ways]:
            content = [{"type": "image_url", "image_url": {"url": url, **own}}, question["content"][1]]
            response = served.chat(asking({"role": "user", "content": content}, **whole)).json
            fresh = model.generate([sized(budget, picture)], max_new_tokens=8, ignore_eos=True)
            assert response["usage"]["vtx"]["token_ids"] == list(fresh.token_ids)
            assert response["usage"]["prompt_tokens"] == fresh.stats.prompt_tokens
        for path, body in others(picture):
            reply = served.request("POST", path, json.dumps(body).encode(), content_type="application/json").json
            counts = [reply["usage"]["vtx"] if "usage" in reply else reply["vtx"]]
            fresh = model.generate([sized(140, picture)], max_new_tokens=8)
            assert counts[0]["vision_tokens"] == fresh.stats.vision_tokens
            assert counts[0]["token_ids"] == list(fresh.token_ids)
        response = served.chat(asking(question, image_tokens=560))
        assert response.status == 400
        assert "images of this bundle have at most 280" in response.json["error"]["message"]


def others(picture: Image.Image) -> list[tuple[str, dict[str, Any]]]:
    """Requests for 140 tokens of a picture to the addresses of Anthropic's and Ollama's clients."""
    data = data_url(picture).partition(",")[2]
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    text = {"type": "text", "text": "red?"}
    return [
        ("/v1/messages", {"max_tokens": 8, "messages": [
            {"role": "user", "content": [{**block, "image_tokens": 140}, text]}]}),
        ("/v1/messages", {"max_tokens": 8, "image_tokens": 140, "messages": [
            {"role": "user", "content": [block, text]}]}),
        ("/api/chat", {"image_tokens": 140, "stream": False, "options": {"num_predict": 8}, "messages": [
            {"role": "user", "content": "red?", "images": [data]}]}),
        ("/api/generate", {"image_tokens": 140, "stream": False, "options": {"num_predict": 8}, "prompt": "red?",
                           "images": [data]}),
    ]  # fmt: skip


@pytest.mark.slow
def test_the_largest_budgets_have_the_logits_of_transformers(
    tiny_checkpoint: Checkpoints, reference: References, tmp_path: Path
) -> None:
    """Of the model that is published with them: positions of the tower for 1,120 tokens."""
    largest = replace(GEMMA4, budget=1120, context=2048, vision_layers=1)
    judge = reference(largest)
    picture = random_image(2, SIZE)
    bundle = export(tiny_checkpoint(largest), tmp_path / "bundle", (3,), dialects=ORT, max_context=1300).folder
    with load(bundle, device="cpu", threads=THREADS) as model:
        for budget in (560, 1120):
            judge.processor.image_processor.max_soft_tokens = budget
            messages = prompt_messages(QUESTIONS[0])
            inputs = judge.inputs(messages, [picture])
            messages[0]["content"][0]["image_tokens"] = budget
            for k in (None, 3):
                given = prompt(model, messages, [picture])
                assert given.is_vision.sum() > budget // 2
                answer = greedy(model, given, k, 2)
                wanted = judge.greedy(inputs, k, 2)
                assert answer.ids == wanted.ids
                assert_near(answer.logits, wanted.logits, 1e-4)


@needs_cpp
def test_libvtx_sees_each_budget_as_python_does(model: Model, tmp_path: Path) -> None:
    paths, bundle = write_pictures(tmp_path, SIZES), model.bundle.folder
    assert_budgets_equal(model, paths, BUDGETS)
    for budget, few in ((560, "lower it"), (-1, "image_tokens is -1"), (30, "raise it")):
        assert few in failure("run", "--bundle", bundle, paths[0], "red?", "--image-tokens", str(budget))
    images = [part for path in paths[-1:] * 3 for part in ("--image", path)]
    assert "--image-tokens 140 (image_tokens=140) fits" in failure(
        "run", "--bundle", bundle, *images, "--image-tokens", "280", paths[-1], "red?"
    )
