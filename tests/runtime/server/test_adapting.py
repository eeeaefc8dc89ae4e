"""K and reductions chosen by load: what the reply and the metrics say of it, and which requests it concerns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.serving import asking, serving, user
from tests.support.tiny import random_image
from vtx.runtime.api.model import Model
from vtx.runtime.errors import RequestError
from vtx.runtime.scheduler.choosing import Allowed, Chooser
from vtx.runtime.scheduler.engine import Capacity, Engine

NONE, DEEP = Allowed("none", None, "none", 0.84, 1000.0), Allowed("K = 5", 5, "none", 0.83, 600.0)


def test_a_method_that_the_bundle_lacks_is_refused_when_it_is_loaded(local: Model) -> None:
    with pytest.raises(RequestError, match="K = 4"):
        Engine("tiny", local, Capacity(), Chooser([Allowed("K = 4", 4, "none", 0.8, 1.0)]))


def test_a_server_says_which_method_it_chose_and_why_and_counts_them(tiny_bundle: Path) -> None:
    """Only for requests with a deadline and a picture that name neither K nor reductions."""
    with serving({"tiny": tiny_bundle}, choosers={"tiny": Chooser([NONE, DEEP])}) as served:
        image = random_image(3)
        for fields, adapts in (
            ({"deadline_ms": 60_000}, True), ({"deadline_ms": 60_000, "k": 3}, False),
            ({"deadline_ms": 60_000, "reduce": "none"}, False), ({}, False),
        ):  # fmt: skip
            response = served.chat(asking(user("red?", image), max_tokens=3, ignore_eos=True, **fields))
            assert response.status == 200
            vtx = response.json["usage"]["vtx"]
            assert ("adapted" in vtx) == adapts
            if adapts:
                assert vtx["adapted"] == {
                    "method": "none",
                    "figure": 0.84,
                    "best_figure": 0.84,
                    "why": vtx["adapted"]["why"],
                }
                assert vtx["k"] is None
        text = served.chat(asking(user("red?"), max_tokens=3, deadline_ms=60_000)).json["usage"]["vtx"]
        assert "adapted" not in text
        counts = {name: value for name, value in served.metrics().items() if name.startswith("vtx_answers_total")}
    assert counts == {  # the bundle's own are K = 3 and FastV; a text has no image to withdraw
        'vtx_answers_total{model="tiny",k="none",reduce="none"}': 1,
        'vtx_answers_total{model="tiny",k="3",reduce="none"}': 1,
        'vtx_answers_total{model="tiny",k="3",reduce="fastv"}': 2,
        'vtx_answers_total{model="tiny",k="none",reduce="fastv"}': 1,
    }
