"""The benchmark of chats about pictures counts what a server does; the table is computed from its rows."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.follow_ups import QUESTIONS, TABLE, Side, one_round, summary, write_results

from tests.support.bundles import export
from tests.support.fixtures import Checkpoints
from tests.support.serving import Served, serving
from tests.support.tiny import Tiny

PLAIN = {"k": "none", "reduce": "none"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoints) -> Iterator[Served]:
    bundle = export(tiny_checkpoint(Tiny()), tmp_path_factory.mktemp("served") / "bundle", (3,), "fp32").folder
    with serving({"model": bundle}) as served:
        yield served


@pytest.mark.slow
def test_each_chat_has_a_picture_that_its_later_questions_find_in_the_caches(served: Served) -> None:
    sides = {"whole": Side(("a",), PLAIN), "once": Side(("a",), PLAIN, once=True)}
    rows = [*one_round(sides, {("a",): served.port}, [1, 2], 1, 2)]
    assert len(rows) == 2 * len(QUESTIONS) * (1 + 2)
    assert [row["side"] for row in rows][: len(QUESTIONS)] == ["once"] * len(QUESTIONS), "it begins in its turn"
    for row in rows:
        assert 0 < row["first_s"] <= row["whole_s"]
        assert bool(row["cached_tokens"]) == bool(row["turn"]), "new pictures, and their later questions"
    later = {name: [row["sent"] for row in rows if row["turn"] and row["side"] == name] for name in sides}
    assert max(later["once"]) < 2000 < min(later["whole"]), "the picture is sent once"
    assert len(summary(rows)) == 1 + 4


def row(number: int, turn: int, first: float) -> dict[str, Any]:
    about = {"round": number, "side": "a", "clients": 1, "client": 0, "turn": turn, "whole_s": 9.0}
    return {**about, "first_s": first, "prompt_tokens": 10, "cached_tokens": 9 * bool(turn), "sent": 1500}


def test_the_table_has_the_medians_of_the_rounds(tmp_path: Path) -> None:
    shares = (1.0, 0.1, 0.2, 0.5)  # of the first question's time
    rows = [row(n, turn, scale * share) for n, scale in enumerate((1, 2, 4)) for turn, share in enumerate(shares)]
    table = summary(rows)
    assert table[1] == ["a", "1", "2.00 (1.00 to 4.00)", "0.40 (0.20 to 0.80)", "90", "1.5"]
    rounds = [{"load_before": 0.5, "rows": rows}]
    target = tmp_path / "follow-ups.jsonl"
    write_results(target, Namespace(shape="1b", precision="int8"), rounds, table)
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["table"] for line in lines] == [TABLE] * 2 + [f"{TABLE}-raw"] * len(rows)
    assert [line["row"] for line in lines[2:]] == rows
