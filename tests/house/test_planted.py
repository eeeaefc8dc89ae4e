"""The list of `make planted` fits this tree: each fault has one place, and tests that are there."""

from __future__ import annotations

from pathlib import Path

from tests.support.scripts import script

ROOT = Path(__file__).parents[2]


def test_every_fault_has_one_place_and_its_tests() -> None:
    faults = script("planted").read_faults([])
    places = {f"{fault['file']}: {fault['what']}": (ROOT / fault["file"], fault["old"]) for fault in faults}
    assert len(places) == len(faults)
    counts = {name: file.read_text("utf-8").count(old) for name, (file, old) in places.items()}
    assert {name: count for name, count in counts.items() if count != 1} == {}
    tests = {test.partition("::")[0] for fault in faults for test in fault["tests"]}
    assert sorted(test for test in tests if not (ROOT / test).exists()) == []
