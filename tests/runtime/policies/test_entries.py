"""Methods that choose an image's tokens by the image alone: each keeps the tokens of its plain statement."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.selection import (
    CASES,
    divprune,
    divprune_count,
    drawn,
    hiprune,
    random_tokens,
    released_cdpruner,
    relevance,
    selected,
    tower,
    visionzip,
)  # fmt: skip
from vtx.runtime.bundle.spec.names import RECEIVED
from vtx.runtime.errors import RequestError
from vtx.runtime.policies import PromptText, parse
from vtx.runtime.policies.methods.cdpruner import CDPruner
from vtx.runtime.vision.tokens import ImageTokens, MergedTokens, TowerTokens


def select(spec: str, image: ImageTokens) -> list[int]:
    found = selected(spec, image)
    assert parse(spec)[0].number_kept(len(image), 1) == len(found)
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", CASES)
def test_divprune_keeps_the_tokens_of_the_released_code(number: int) -> None:
    case = drawn(number)
    n = len(case.hidden)
    for spec, count in (("divprune", divprune_count(0.098, n)), ("divprune:keep=0.5", divprune_count(0.5, n)),
                        (f"divprune:keep={n - 1}", n - 1)):  # fmt: skip
        assert select(spec, case.image) == divprune(torch.tensor(case.hidden), count)


def test_divprune_rounds_a_share_to_the_nearest_number_and_a_half_to_the_even_one() -> None:
    [half] = parse("divprune:keep=0.5")
    assert [half.number_kept(n, 1) for n in (1, 2, 3, 5, 7, 9)] == [1, 1, 2, 2, 4, 4]
    assert parse("divprune")[0].number_kept(576, 1) == 56


def test_divprune_takes_the_token_farthest_from_its_nearest_other_first_and_never_one_twice() -> None:
    # 0 and 1 are close, 2 is nearer to them than 3 is; 3's nearest other is farthest.
    rows = np.array([[1, 0], [0.99, 0.1], [0.6, 0.8], [-1, 0.2]], np.float32)
    assert [select(f"divprune:keep={keep}", ImageTokens.one_per_patch(rows)) for keep in ("0.25", "2", "3")] == [
        [3], [0, 3], [0, 2, 3]
    ]  # fmt: skip
    equal = ImageTokens.one_per_patch(np.ones((9, 4), np.float32))
    assert select("divprune:keep=4", equal) == [0, 1, 2, 3]


@pytest.mark.parametrize("number", CASES)
def test_random_keeps_the_tokens_that_the_seed_and_the_image_say(number: int) -> None:
    case = drawn(number)
    n = len(case.hidden)
    for seed, keep, count in ((0, "0.25", -(-n // 4)), (number, "0.5", -(-n // 2)), (10**9, str(n - 1), n - 1)):
        assert select(f"random:keep={keep},seed={seed}", case.image) == random_tokens(case, count, seed)


@pytest.mark.sampled
@pytest.mark.parametrize("text", ["none", "embedding", "tower"])
@pytest.mark.parametrize("number", [n for n in CASES if n % 4 in (0, 2)])
def test_cdpruner_keeps_the_tokens_of_the_released_code_in_each_view(number: int, text: str) -> None:
    """Of layouts with equal tokens or few dimensions, the released code divides by 0."""
    case = drawn(number)
    [method] = parse(f"cdpruner:keep=7,text={text}")
    entry = method.entry()
    assert entry is not None
    found = entry.select(case.image, PromptText(np.zeros(1, np.int64), case.mean, np.ones(1, bool), case.embeddings))
    assert found is not None
    assert found.tolist() == released_cdpruner(case, relevance(case, text), 7)
    assert len(found) == 7 * (1 if case.views is None else 3)


def test_a_budget_beyond_a_view_keeps_all_of_it_and_beyond_all_views_the_whole_image() -> None:
    case = next(drawn(n) for n in CASES if n % 4 == 2)
    assert case.views is not None
    views = case.views.copy()
    views[np.flatnonzero(views == 1)[3:]] = 2  # a view of three tokens
    image = replace(case.image, patches=replace(case.image.patches, views=views))
    found = CDPruner(5, "none").select(image)
    assert found is not None
    assert np.bincount(views[found]).tolist() == [5, 3, 5]
    assert CDPruner(10_000, "none").select(image) is None
    assert CDPruner(1, "none").select(image) is None


@pytest.mark.sampled
@pytest.mark.parametrize("number", CASES)
def test_hiprune_keeps_the_tokens_of_the_released_code_in_each_view(number: int) -> None:
    case = drawn(number)
    views = np.zeros(len(case.hidden), int) if case.views is None else case.views
    received, each = torch.tensor(case.patches[:, 1:3]), int((views == 0).sum())
    for keep, alpha in ((each // 2, 0.1), (each - 1, 0.5), (max(2, each // 4), 0.3), (2, 0.0)):
        own = [np.flatnonzero(views == view) for view in range(views.max() + 1)]
        wanted = [int(i) for which in own for i in which[hiprune(received[which], keep, alpha)]]
        [method] = parse(f"hiprune:keep={keep},alpha={alpha}")
        found = method.select(case.image)  # type: ignore[attr-defined]
        assert found.tolist() == sorted(wanted)
        assert len(found) == len(own) * keep


def test_hiprune_takes_neighbours_around_corners_and_never_more_than_its_number() -> None:
    """Before the first patch there is the first, beyond the last the last, and beyond a row's end the next row."""
    received = np.zeros((9, 2), np.float32)
    image = ImageTokens.one_per_patch(np.zeros((9, 2), np.float32))

    def kept(keep: int, alpha: float, **highest: list[int]) -> list[int]:
        received[:] = np.arange(9, 0, -1)[:, None] / 100
        for column, name in enumerate(("anchors", "registers")):
            received[highest.get(name, []), column] = 0.5
        patches = replace(image.patches, signals={RECEIVED: received})
        [method] = parse(f"hiprune:keep={keep},alpha={alpha}")
        return method.select(replace(image, patches=patches)).tolist()  # type: ignore[attr-defined]

    assert kept(5, 1.0, anchors=[0]) == [0, 1, 2, 3, 4]  # 0 and its neighbours 1 and 3, then registers
    assert kept(5, 1.0, anchors=[8], registers=[0, 1]) == [0, 1, 5, 7, 8]
    assert kept(5, 1.0, anchors=[2], registers=[8, 7]) == [0, 1, 2, 3, 5]  # -1 is 0, and 3 starts the next row
    assert kept(2, 0.1, registers=[4, 6]) == [4, 6]
    assert kept(3, 1.0, anchors=[4]) == [1, 3, 4]  # five would be more than three
    assert [parse(f"hiprune:{preset}")[0].number_kept(576, 1) for preset in ("192", "128", "64")] == [192, 128, 64]
    for spec in ("keep=0", "alpha=1.1", "layer=0"):
        with pytest.raises(RequestError, match="hiprune"):
            parse(f"hiprune:{spec}")


def test_another_seed_or_another_image_gives_other_random_tokens() -> None:
    image = drawn(0).image
    assert select("random", image) == select("random", drawn(0).image)
    assert select("random", image) != select("random:seed=1", image)
    assert select("random", image) != select("random", replace(image, key="0" * 64))


@pytest.mark.parametrize("name", ["random", "divprune", "cdpruner"])
def test_budgets_of_0_are_refused_and_an_image_of_one_patch_enters(name: str) -> None:
    for keep in ("0", "-1", "1.5", "nan", "off"):
        with pytest.raises(RequestError, match="keep"):
            parse(f"{name}:keep={keep}")
    one = ImageTokens.one_per_patch(np.ones((1, 8), np.float32))
    assert CDPruner(0.25, "none").select(one) is None
    if name != "cdpruner":
        assert select(name, one) == [0]
        assert select(f"{name}:keep=1", drawn(0).image) == select(f"{name}:keep=1000000000", drawn(0).image)


# ---- merging ---------------------------------------------------------------------------------------------------------


def merged(spec: str, given: TowerTokens) -> tuple[list[int], Tensor, MergedTokens]:
    """The patches of the tokens that enter, their weights [n, tokens of the tower], and all that is known of them."""
    [method] = parse(spec)
    entry = method.entry()
    assert entry is not None
    count = given.attention.size
    found = entry.merge(replace(ImageTokens.one_per_patch(np.zeros((4, 2), np.float32)), tower=given))
    assert found is not None
    views, states = given.attention.shape
    assert views * (method.number_kept(states - 1, 1) or 0) == len(found.patches)
    ends = [*found.starts[1:], len(found.sources)]
    weights = torch.zeros(len(found.starts), count)
    for row, (start, end) in enumerate(zip(found.starts, ends, strict=True)):
        weights[row, found.sources[start:end]] = torch.tensor(found.weights[start:end])
    return found.patches.indices.tolist(), weights, found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", CASES)
def test_visionzip_merges_as_the_released_code(number: int) -> None:
    given = tower(number)
    views, count = given.attention.shape
    keys, attention = torch.tensor(given.keys), torch.tensor(given.attention)
    for dominant, contextual in ((2, 2), (count // 3, max(2, count // 20)), (count - 3, 2), (3, count - 3)):
        if dominant < 2:
            continue
        wanted = visionzip(keys, attention, given.columns, dominant, contextual)
        places, weights, found = merged(f"visionzip:dominant={dominant},contextual={contextual}", given)
        assert places == wanted.places
        torch.testing.assert_close(weights, wanted.weights, rtol=0, atol=1e-7)
        states = wanted.weights @ torch.tensor(given.states).flatten(0, 1)
        np.testing.assert_allclose(found.states(given), states, atol=1e-5)
        assert (found.patches.views is None) == (views == 1)
        assert not found.patches.merged.any()


def test_visionzip_has_its_presets_and_takes_all_of_the_tower_at_most() -> None:
    assert [parse(f"visionzip:{preset}")[0].number_kept(576, 1) for preset in ("192", "128", "64")] == [192, 128, 64]
    assert parse("visionzip")[0] == replace(parse("visionzip")[0], dominant=0.1875)
    assert parse("visionzip")[0].number_kept(576, 1) == 128
    given = tower(0)
    count = given.attention.shape[1]
    for spec in ("dominant=1", f"dominant={count}", "dominant=1000000000", f"dominant={count - 2},contextual=1"):
        places, weights, _ = merged(f"visionzip:{spec}", given)
        assert sorted(places) == list(range(-1, count - 1))
        assert weights.sum() == count
        assert (weights.count_nonzero(1) == 1).all()
    for spec in ("dominant=0", "contextual=0", "contextual=1.5", "dominant=-1"):
        with pytest.raises(RequestError, match="give the share to keep"):
            parse(f"visionzip:{spec}")


def test_a_view_of_one_patch_enters_with_its_class_token() -> None:
    one = TowerTokens(*(np.ones((1, 2, 3), np.float32) for _ in "sk"), np.ones((1, 2), np.float32))
    places, weights, _ = merged("visionzip", one)
    assert places == [-1, 0]
    assert torch.equal(weights, torch.eye(2))
