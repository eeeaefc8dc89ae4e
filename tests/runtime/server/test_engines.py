"""Several bundles by name within a limit of memory, and conversations kept within a limit of bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.bundles import copy, export
from tests.support.serving import WAIT, Served, asking, serving, until, user
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options, Settings
from vtx.runtime.errors import BundleError, DeviceError, RequestError
from vtx.runtime.scheduler.conversations import ConversationPool
from vtx.runtime.server.engines import Engines, named
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.refusal import Refusal

MANY = 100

Load = Callable[[Path], Model]


@pytest.fixture(scope="module")
def bundles(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"tiny": tiny_bundle, "other": copy(tiny_bundle, tmp_path_factory.mktemp("other") / "other")}


def load_on_cpu(folder: Path) -> Model:
    return load(folder, device="cpu", threads=1)


def needed(bundles: dict[str, Path]) -> int:
    """Bytes that one of the bundles needs."""
    from vtx.runtime.backends.memory import needed_memory
    from vtx.runtime.bundle.bundle import Bundle

    return needed_memory(Bundle.open(bundles["tiny"]))


def test_bundles_are_loaded_when_they_are_asked_for(bundles: dict[str, Path]) -> None:
    with serving(bundles) as served:
        assert served.metrics()["vtx_models_loaded"] == 0
        for name, loaded in (("tiny", 1), ("other", 2), ("tiny", 2)):
            response = served.chat(asking(user("red?"), model=name))
            assert (response.status, response.json["model"]) == (200, name)
            assert served.metrics()["vtx_models_loaded"] == loaded
        assert [m["id"] for m in served.request("GET", "/v1/models").json["data"]] == ["tiny", "other"]


def test_the_bundle_that_nobody_uses_makes_room(bundles: dict[str, Path]) -> None:
    engines = Engines(bundles, load_on_cpu, Limits(), memory=int(1.5 * needed(bundles)))
    try:
        first = engines.acquire("tiny")
        with engines.use(first), pytest.raises(Refusal, match="does not fit") as refused:
            engines.acquire("other")
        assert refused.value.status == 503
        assert refused.value.retry_after
        with engines.use(engines.acquire("other")):
            assert [engine.name for engine in engines.loaded] == ["other"]
    finally:
        engines.close()
    with pytest.raises(Refusal, match="shutting down"):
        engines.acquire("tiny")


def test_a_bundle_that_is_given_back_within_a_moment_makes_room(bundles: dict[str, Path]) -> None:
    engines = Engines(bundles, load_on_cpu, Limits(), memory=int(1.5 * needed(bundles)))
    try:
        with ThreadPoolExecutor(1) as pool:
            with engines.use(engines.acquire("tiny")):
                other = pool.submit(engines.acquire, "other")
                time.sleep(0.2)  # longer than a look, shorter than the wait
                assert not other.done()
            with engines.use(other.result(WAIT)):
                assert [engine.name for engine in engines.loaded] == ["other"]
    finally:
        engines.close()


def test_of_bundles_that_nobody_uses_the_least_recently_used_makes_room(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("vtx.runtime.server.engines.time.monotonic", lambda: next(clock))
    three = {name: copy(tiny_bundle, tmp_path / name) for name in ("one", "two", "three")}
    engines = Engines(three, load_on_cpu, Limits(), memory=int(2.5 * needed({"tiny": tiny_bundle})))
    try:
        for name in ("one", "two", "one"):
            with engines.use(engines.acquire(name)):
                pass
        with engines.use(engines.acquire("three")):
            assert sorted(engine.name for engine in engines.loaded) == ["one", "three"]
    finally:
        engines.close()


def test_a_bundle_that_can_never_fit_is_told_at_the_start(bundles: dict[str, Path]) -> None:
    with pytest.raises(DeviceError, match="--memory"):
        Engines(bundles, load_on_cpu, Limits(), memory=needed(bundles) - 1)


def test_bundles_are_named_by_their_directory_or_as_told(tmp_path: Path) -> None:
    assert named((str(tmp_path / "demo"), f"big={tmp_path / 'llava'}")) == {
        "demo": tmp_path / "demo", "big": tmp_path / "llava",
    }  # fmt: skip
    with pytest.raises(RequestError, match="two bundles are named"):
        named(("a/demo", "b/demo"))


# --- kept conversations ---------------------------------------------------------------------------


def asked(pool: ConversationPool, model: Model, question: str, seed: int | None = 1) -> bool:
    """Ask through the pool; whether a kept conversation served."""
    images = [] if seed is None else [model.loaded.images.prepare(random_image(seed))]
    content: list[Any] = [*({"type": "image"} for _ in images), {"type": "text", "text": question}]
    messages: Any = [{"role": "user", "content": content}]
    before = pool.hits
    conversation = pool.lease(images, model.loaded.prompts.ids(messages, images))
    conversation.stream_messages(messages, Settings(None, Options(max_new_tokens=2), "none"), resume=True).read()
    pool.give_back(conversation)
    return pool.hits > before


@pytest.fixture(scope="module")
def local(tiny_bundle: Path) -> Model:
    return load_on_cpu(tiny_bundle)


def test_conversations_are_found_by_their_images(local: Model) -> None:
    pool = ConversationPool(local.loaded, 1 << 30, MANY)
    assert [asked(pool, local, "red?", seed) for seed in (1, 2, 1, 2, None)] == [False, False, True, True, False]


def test_one_that_has_little_of_the_prompt_is_left_to_its_owner(local: Model) -> None:
    pool = ConversationPool(local.loaded, 1 << 30, MANY)
    asked(pool, local, "what is the shape of the picture, and is there a circle?", None)
    assert not asked(pool, local, "red?", None)
    assert asked(pool, local, "what is the shape of the picture, and is there a circle?", None)


def test_the_one_least_recently_used_leaves_when_the_bytes_are_used_up(local: Model) -> None:
    pool = ConversationPool(local.loaded, 1 << 30, MANY)
    asked(pool, local, "red?", 1)
    one = pool.kept_bytes
    pool = ConversationPool(local.loaded, int(2.5 * one), MANY)
    assert [asked(pool, local, "red?", seed) for seed in (1, 2, 1, 3, 1, 2)] == [False, False, True, False, True, False]
    assert pool.kept_bytes <= 2.5 * one


def test_no_more_are_kept_than_may(local: Model) -> None:
    pool = ConversationPool(local.loaded, 1 << 30, 2)
    assert [asked(pool, local, "red?", seed) for seed in (1, 2, 3, 2, 1)] == [False, False, False, True, False]


def test_conversations_in_use_count_too(local: Model) -> None:
    pool = ConversationPool(local.loaded, 1 << 30, MANY)
    asked(pool, local, "red?", 1)
    pool = ConversationPool(local.loaded, int(1.5 * pool.kept_bytes), MANY)
    asked(pool, local, "red?", 1)
    images = [local.loaded.images.prepare(random_image(2))]
    messages: Any = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "red?"}]}]
    conversation = pool.lease(images, local.loaded.prompts.ids(messages, images))
    conversation.stream_messages(messages, Settings(None, Options(max_new_tokens=2), "none"), resume=True).read()
    pool.give_back(conversation)
    assert not asked(pool, local, "red?", 1)
    assert pool.kept_bytes


def test_what_is_in_use_leaves_less_room_for_what_is_kept(local: Model) -> None:
    pool = ConversationPool(local.loaded, 1 << 30, MANY)
    asked(pool, local, "red?", 1)
    one = pool.kept_bytes
    pool = ConversationPool(local.loaded, int(2.5 * one), MANY)
    for seed in (1, 2):
        assert not asked(pool, local, "red?", seed)
    images = [local.loaded.images.prepare(random_image(1))]
    messages: Any = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "red?"}]}]
    in_use = pool.lease(images, local.loaded.prompts.ids(messages, images))
    assert in_use.cache_bytes == one, "a kept one"
    assert not asked(pool, local, "red?", 3), "a third"
    assert pool.kept_bytes == one, "beside it one is kept, and not two"
    pool.give_back(in_use)
    assert pool.kept_bytes == 2 * one
    assert [asked(pool, local, "red?", seed) for seed in (1, 3)] == [True, True]


def test_nothing_is_kept_without_room(local: Model) -> None:
    pool = ConversationPool(local.loaded, 0, MANY)
    assert [asked(pool, local, "red?") for _ in range(2)] == [False, False]
    assert pool.kept_bytes == 0


def replaced(folder: Path, by: Path) -> None:
    """Another bundle under the same path, in one step, as `vtx-export --force` does it."""
    new = copy(by, folder.with_name("new"))
    folder.rename(folder.with_name(f"old-{len(list(folder.parent.iterdir()))}"))
    new.rename(folder)


@pytest.fixture(scope="module")
def later(tiny_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with another K."""
    return export(tiny_checkpoint(Tiny()), tmp_path_factory.mktemp("later") / "later", (4,), "fp32").folder


def ks(served: Served) -> Any:
    (told,) = served.request("GET", "/v1/models").json["data"]
    return told["vtx"]["ks"]


def test_a_bundle_is_replaced_while_its_answers_run(tiny_bundle: Path, later: Path, tmp_path: Path) -> None:
    folder = copy(tiny_bundle, tmp_path / "served")
    with serving({"tiny": folder}) as served, ThreadPoolExecutor(2) as pool:
        body = asking(user("red?", random_image(1)), k=3, max_tokens=200, ignore_eos=True)
        wanted = served.chat(body).json["usage"]["vtx"]["token_ids"]
        assert served.engines.reload() == ["tiny is unchanged"]
        (old,) = served.engines.loaded
        answers = [pool.submit(served.chat, body) for _ in range(2)]
        until(lambda: old.scheduler.active == 2, "the answers begin")
        replaced(folder, later)
        assert served.engines.reload() == ["tiny was replaced"]
        for answer in answers:
            assert answer.result(WAIT).json["usage"]["vtx"]["token_ids"] == wanted
        assert old.model.loaded.conversations.closed
        assert served.engines.loaded != [old]
        assert ks(served) == [4]
        assert served.chat(body).status == 400
        assert served.chat(asking(user("red?", random_image(1)), k=4)).status == 200


def test_a_bundle_that_fails_does_not_take_the_place_of_the_old_one(
    tiny_bundle: Path, later: Path, tmp_path: Path
) -> None:
    folder, verified = copy(tiny_bundle, tmp_path / "served"), list[Model]()

    def verify(model: Model) -> None:
        verified.append(model)
        raise BundleError("logits differ")

    with serving({"tiny": folder}, verify=verify) as served:
        body = asking(user("red?", random_image(1)), k=3)
        assert served.chat(body).status == 200
        (old,) = served.engines.loaded
        replaced(folder, later)
        assert served.engines.reload() == ["tiny was not replaced: logits differ"]
        assert [model.loaded.conversations.closed for model in verified] == [True]
        (folder / "vtx.json").write_text("{}")
        (told,) = served.engines.reload()
        assert "was altered" in told
        assert served.engines.loaded == [old]
        assert ks(served) == [3, 5]
        assert served.chat(body).status == 200


def test_a_bundle_that_is_not_loaded_is_replaced_without_loading_it(
    tiny_bundle: Path, later: Path, tmp_path: Path
) -> None:
    folder = copy(tiny_bundle, tmp_path / "served")
    engines = Engines({"tiny": folder}, load_on_cpu, Limits(), memory=needed({"tiny": tiny_bundle}) * 3 // 2)
    replaced(folder, later)
    assert engines.reload() == ["tiny was replaced"]
    assert not engines.loaded
    with engines.use(engines.acquire("tiny")):
        replaced(folder, tiny_bundle)
        (told,) = engines.reload()
        assert "does not fit into memory next to the models in use" in told
    engines.close()
    assert engines.reload()[0].startswith("tiny was not replaced: the server is shutting down")
