"""Figures of several servers as those of one."""

from __future__ import annotations

import json

from vtx.tools.fleet.gathering import gathered

HEADS = ("# HELP vtx_a About a.", "# TYPE vtx_a counter", "# HELP vtx_b About b.", "# TYPE vtx_b gauge")


def test_equal_series_are_added_and_each_metric_s_stand_together() -> None:
    texts = [
        "\n".join([*HEADS[:2], 'vtx_a{key="x y"} 3', *HEADS[2:], "vtx_b 0.5", ""]),
        "\n".join([*HEADS[:2], 'vtx_a{key="x y"} 4', 'vtx_a{key="z"} 1', *HEADS[2:], "vtx_b 2", ""]),
    ]
    assert gathered("/metrics", [text.encode() for text in texts]).decode().splitlines() == [
        *HEADS[:2], 'vtx_a{key="x y"} 7', 'vtx_a{key="z"} 1', *HEADS[2:], "vtx_b 2.5",
    ]  # fmt: skip


def test_requests_are_listed_and_what_a_key_has_used_is_added() -> None:
    assert json.loads(gathered("/slots", [b'[{"k": 1}]', b"[]", b'[{"k": 2}]'])) == [{"k": 1}, {"k": 2}]
    usage = {"key": "a", "requests": 2, "tokens_today": 5, "limits": {"tokens_per_day": 9}}
    assert json.loads(gathered("/v1/usage", [json.dumps(usage).encode()] * 3)) == {
        **usage, "requests": 6, "tokens_today": 15,
    }  # fmt: skip
