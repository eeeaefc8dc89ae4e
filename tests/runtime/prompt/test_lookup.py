"""Drafts of prompt lookup: what followed the last tokens where they stood before, and how long a draft is."""

from __future__ import annotations

import pytest

from vtx.runtime.prompt.lookup import FIRST, PromptLookup


@pytest.mark.parametrize(
    ("ids", "draft"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6]),
        ([9, 1, 2, 3, 5, 5, 5, 7, 1, 2, 3], [5, 5, 5, 7]),
        ([1, 2, 3, 8, 8, 8, 1, 2, 3, 7, 7, 7, 6, 1, 2, 3], [7, 7, 7, 6]),  # the last of two places
        ([2, 3, 4, 4, 9, 2, 3, 5, 5, 1, 2, 3, 6, 6, 9, 2, 3], [5, 5, 1, 2]),  # three tokens before two
        ([1, 2, 7, 1, 2], [7, 1, 2, 7]),  # comes around again
        ([5, 5, 5], [5, 5, 5, 5]),
        ([1, 2, 3, 4], []),
        ([1, 2], []),
        ([1], []),
    ],
)
def test_a_draft_is_what_followed_the_last_tokens(ids: list[int], draft: list[int]) -> None:
    assert PromptLookup(ids, 4, first=4).draft(9) == draft


def test_a_draft_is_as_long_as_there_is_room() -> None:
    for most, draft in ((3, [3, 4, 5]), (1, [3]), (0, [])):
        assert PromptLookup([1, 2, 3, 4, 5, 6, 1, 2], 4, first=4).draft(most) == draft


def test_drafts_grow_while_they_are_accepted_and_shrink_while_they_are_not() -> None:
    lookup, lengths = PromptLookup([7] * 4, 8), []
    for accepted in (2, 4, 8, 3, 0, 0, 0, 1, 2):
        lengths.append(len(lookup.draft(100)))
        for _ in range(accepted):
            lookup.push(7)
            lookup.accept()
    assert lengths == [FIRST, 4, 8, 8, 4, 2, 1, 1, 2]
    assert (lookup.drafted, lookup.accepted) == (sum(lengths), 20)


def test_no_draft_leaves_the_length_as_it_is() -> None:
    lookup = PromptLookup([1, 2, 3], 8)
    assert [lookup.draft(8) for _ in range(5)] == [[]] * 5
    for token in (1, 2):
        lookup.push(token)
    assert lookup.draft(8) == [3, 1]
