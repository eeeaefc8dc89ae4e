"""What states in place of K and V bring with them in LFM2-VL, Qwen3.5 and MiniCPM-V 4.6: drafts, changed turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.contract import FAMILIES, Family
from tests.support.exported import DEVICES, THREADS, Models, prompt
from tests.support.parity import assert_changed_turns_go_back, assert_rejected_tokens_leave_states
from tests.support.tiny import prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import MAX_DRAFT
from vtx.runtime.backends.slots import RECENT, TRIED
from vtx.runtime.errors import ImageError

pytestmark = pytest.mark.dialects("ort", "plain")
TOLERANCE = 1e-4  # in float32 transformers' two forms of the gated delta rule differ by half of it
STATES = ("lfm2_vl", "lfm3_vl", "qwen3_5", "minicpmv4_6")
QUICK = {("lfm2_vl", "cpu"), ("qwen3_5", "cpu")}  # what `make test` runs; MiniCPM has the decoder of the second


def case(name: str, device: str) -> Any:
    marks = [] if (name, device) in QUICK else [pytest.mark.slow]
    return pytest.param((FAMILIES[name], device), id=f"{name}-{device}", marks=marks)


@pytest.fixture(scope="module", params=[case(name, device) for name in STATES for device in DEVICES])
def drawn(request: pytest.FixtureRequest) -> tuple[Family, str]:
    drawn: tuple[Family, str] = request.param
    return drawn


@pytest.fixture(scope="module")
def model(drawn: tuple[Family, str], models: Models) -> Iterator[Model]:
    with load(models(drawn[0].tiny, drawn[0].ks).bundle.folder, device=drawn[1], threads=THREADS) as loaded:
        yield loaded


@pytest.mark.sampled
@pytest.mark.parametrize("right", [0, 2, MAX_DRAFT])
@pytest.mark.parametrize("k", [None, 3])
def test_rejected_tokens_of_a_draft_leave_the_states_as_they_were(
    model: Model, drawn: tuple[Family, str], k: int | None, right: int
) -> None:
    asked = prompt(model, prompt_messages("red?"), [random_image(0, drawn[0].sizes[0])])
    assert_rejected_tokens_leave_states(model, asked, k, right)


def test_every_token_of_a_draft_may_be_the_last_one() -> None:
    assert TRIED == MAX_DRAFT + 1


@pytest.mark.parametrize("back", [1, RECENT, 3 * RECENT])
def test_a_turn_that_changes_an_earlier_one_goes_back_to_a_state_that_is_held(model: Model, back: int) -> None:
    assert_changed_turns_go_back(model, prompt(model, prompt_messages("red?"), [random_image(0)]), back)


def test_a_strip_of_300_to_1_is_refused(model: Model) -> None:
    with pytest.raises(ImageError, match="its sides may differ at most 200-fold"):
        model.open([random_image(0, (600, 2))])
