"""What the metrics count."""

from __future__ import annotations

from vtx.runtime.server.metrics import Histogram


def test_an_observation_counts_in_its_bucket_and_those_above() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.1, 0.5, 2.0):
        histogram.observe(value)
    assert histogram.lines("x") == [
        'x_bucket{le="0.1"} 1', 'x_bucket{le="1.0"} 2', 'x_bucket{le="+Inf"} 3', "x_sum 2.600000", "x_count 3",
    ]  # fmt: skip
