"""What the metrics count."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from tests.support.bundles import copy
from tests.support.serving import asking, serving, user
from vtx.runtime.backends.memory import needed_memory
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.host.machine import version
from vtx.runtime.server.metrics import Histogram, Metrics


def test_an_observation_counts_in_its_bucket_and_those_above() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.1, 0.5, 2.0):
        histogram.observe(value)
    assert histogram.lines("x") == [
        'x_bucket{le="0.1"} 1', 'x_bucket{le="1.0"} 2', 'x_bucket{le="+Inf"} 3', "x_sum 2.600000", "x_count 3",
    ]  # fmt: skip


def test_each_count_of_an_answer_is_added_to_its_own_total() -> None:
    metrics, counts = Metrics(), {"prompt_tokens": 7, "reused_tokens": 5, "completion_tokens": 3, "withdrawn_tokens": 2}
    metrics.answer(("llava", "17", "none"), counts, {"queue": 0.1, "first_token": 0.2, "answer": 0.4}, None)
    metrics.answer(("llava", "17", "none"), counts, {"queue": 0.0, "first_token": 0.3, "answer": 2.0}, 0.01)
    metrics.request(200)
    metrics.request(429)
    metrics.request(200)
    metrics.cancelled()
    lines = metrics.text({"models_loaded": 2, "conversation_hits_total": 4}).splitlines()
    for name, count in counts.items():
        assert f"vtx_{name}_total {2 * count}" in lines
    for line in (
        'vtx_requests_total{status="200"} 2', 'vtx_requests_total{status="429"} 1', "vtx_cancelled_total 1",
        "vtx_first_token_seconds_sum 0.500000", "vtx_first_token_seconds_count 2", "vtx_token_seconds_count 1",
        'vtx_answers_total{model="llava",k="17",reduce="none"} 2', "vtx_queue_seconds_sum 0.100000",
        "vtx_answer_seconds_sum 2.400000", 'vtx_answer_seconds_bucket{le="1.0"} 1',
        "# TYPE vtx_models_loaded gauge", "vtx_models_loaded 2", "# TYPE vtx_conversation_hits_total counter",
        f'vtx_build_info{{version="{version("vtx-edge")}"}} 1', "# TYPE vtx_build_info gauge",
    ):  # fmt: skip
        assert line in lines, line
    types = [number for number, line in enumerate(lines) if line.startswith("# TYPE ")]
    for number in types:
        name = lines[number].split()[2]
        assert re.fullmatch(rf"# HELP {name} .+\.", lines[number - 1]), "each says what it is"
        assert lines[number + 1].startswith(name)
    (memory,) = (float(line.split()[1]) for line in lines if line.startswith("vtx_resident_memory_bytes "))
    assert 0.5 < memory / psutil.Process().memory_info().rss < 2


@pytest.mark.slow
def test_counts_never_fall_while_bundles_are_closed_and_replaced(tiny_bundle: Path, tmp_path: Path) -> None:
    bundles = {name: copy(tiny_bundle, tmp_path / name) for name in ("tiny", "other")}
    needed = needed_memory(Bundle.open(tiny_bundle))
    with serving(bundles, memory=int(1.5 * needed)) as served:
        counts = list[tuple[float, float]]()
        for name in ("tiny", "other", "tiny", "other"):  # there is room for one at a time
            assert served.chat(asking(user("red?"), model=name)).status == 200
            figures = served.metrics()
            counts.append((figures["vtx_conversation_misses_total"], figures["vtx_models_loaded"]))
    assert counts == [(1, 1), (2, 1), (3, 1), (4, 1)]
