"""Whatever a tokenizer.json holds, an export resolves it within its limits, or refuses it with one line."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.confined import write_tokenizers
from tests.support.fuzzing import cases, damaged, fuzz
from tests.support.text import SPECIALS, VICUNA, make_tokenizer
from vtx.runtime.errors import CheckpointError
from vtx.runtime.host.confined import ChildLimits, ChildTask, Subject, confine

BATCH = 50  # tokenizers a child
LIMITS = ChildLimits(memory=2 << 30, cpu_seconds=60)


SOUND = {kind: json.loads(make_tokenizer(kind).to_str()) for kind in ("words", "first", "normalizer", "bytes")}
IMAGE_IDS = {kind: make_tokenizer(kind).token_to_id("<image>") for kind in SOUND}
Candidate = tuple[str, int]  # a tokenizer.json and the id of its image token
STRINGS = st.text(max_size=4) | st.sampled_from(
    [*SPECIALS, "▁", "a" * 2000, "a" * 200, "(a+)+$", "\\", "[", "<0x41>", ""]
)
NUMBERS = st.integers(-2, 1 << 65) | st.sampled_from([0, 1, 2**16, 2**24, 2**31, 2**32 - 1, 2**63, 1e308, -0.5])
PARTS = st.sampled_from(
    [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 900},
        {"type": "Replace", "pattern": {"Regex": "(.*)*$"}, "content": "aa"},
        {"type": "Prepend", "prepend": "a" * 900},
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "Split", "pattern": {"Regex": "(a|a)*b"}, "behavior": "Removed", "invert": True},
        {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
    ]
)
VALUES = st.none() | st.booleans() | NUMBERS | STRINGS | PARTS | st.lists(PARTS, max_size=5)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to some of the values inside; a vocabulary counts with its first entries only."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())[:12]
    return [path, *(deeper for key, item in items for deeper in places(item, (*path, key)))]


@st.composite
def changed(draw: st.DrawFn) -> Candidate:
    """A sound tokenizer.json with a few values replaced, removed or added, or some of its bytes."""
    kind = draw(st.sampled_from(sorted(SOUND)))
    spec, image_id = copy.deepcopy(SOUND[kind]), IMAGE_IDS[kind]
    if draw(st.integers(0, 4)) == 0:
        return draw(damaged(json.dumps(spec).encode())).decode("utf-8", "replace"), image_id
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(places(spec)[1:]))
        owner: Any = spec
        for key in path:
            owner = owner[key]
        if draw(st.integers(0, 5)) == 0 and isinstance(owner, dict):
            del owner[last]
        else:
            owner[last] = copy.deepcopy(draw(VALUES))  # a part of PARTS that is changed next must stay as it is there
    return json.dumps(spec), image_id


def attack(candidates: list[Candidate]) -> list[str]:
    """What becomes of each; where one ends the child, that is one line too."""
    with TemporaryDirectory() as folder:
        request = {"candidates": write_tokenizers(Path(folder), candidates), "template": VICUNA}
        try:
            outcomes: list[str] = confine(
                ChildTask("tests.support.confined:resolve_tokenizers", request, LIMITS, reads=(folder,)),
                Subject("the tokenizers"),
            )
        except CheckpointError as error:
            outcomes = [f"CheckpointError: {error}"]
    for outcome in outcomes:
        assert outcome == "sound" or outcome.isprintable(), outcome
        assert "cannot be read" not in outcome, outcome  # an error that nobody foresaw
    return outcomes


def test_the_sound_ones_are_sound() -> None:
    assert attack([(json.dumps(spec), IMAGE_IDS[kind]) for kind, spec in SOUND.items()]) == ["sound"] * len(SOUND)


@pytest.mark.parametrize("case", cases("tokenizer"), ids=lambda case: case.name)
def test_what_was_found_before(case: Any) -> None:
    attack([(case.read_text(encoding="utf-8"), IMAGE_IDS["words"])])


@settings(fuzz, max_examples=max(1, fuzz.max_examples // BATCH))
@given(st.lists(changed(), min_size=BATCH, max_size=BATCH))
def test_changed_tokenizers_are_sound_or_refused(candidates: list[Candidate]) -> None:
    attack(candidates)
