"""The answer that a program may act on: a choice that the model finds probable enough; any other one is unsure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vtx.runtime.checks import check_number
from vtx.runtime.errors import RequestError

if TYPE_CHECKING:
    from vtx.runtime.bundle.card import Card
    from vtx.runtime.prompt.guiding import Guide

CARD = "card"  # in place of a probability, or of K: that of the bundle's card
MAX_SCORED = 64  # choices whose probabilities are computed, with a pass for each
ALLOWED = "a probability from 0 to 1, or card"


def read_accept(accept: object, guide: Guide | None) -> str | float:
    """`accept` of a question as "card" or a number.

    Raises RequestError: it is neither, or the answer has no choices whose probabilities are computed.
    """
    count = 0 if guide is None or guide.choices is None else len(guide.choices)
    if not 0 < count <= MAX_SCORED:
        raise RequestError(
            f"accept judges the probability of a choice, and {count:,} choices are given; give 1 to {MAX_SCORED}, or "
            "leave accept out"
        )
    if accept == CARD:
        return CARD
    if isinstance(accept, str):
        try:
            accept = float(accept)
        except ValueError:
            raise RequestError(f"accept is {accept!r:.40}; it must be {ALLOWED}") from None
    check_number("accept", accept, ALLOWED, least=0, most=1)
    return float(accept)  # type: ignore[arg-type]  # a number, as was checked


def threshold_of(accept: str | float, card: Card | None) -> float:
    """The probability from which on an answer is accepted. Raises RequestError: the card in use has none."""
    if isinstance(accept, float):
        return accept
    if card is None or card.accept is None:
        why = "no card is in use" if card is None else "the card has no threshold"
        raise RequestError(f"accept is card, and {why}; run vtx-eval --coverage, or give a probability")
    return card.accept.threshold


def doubt(text: str, choices: Mapping[str, float], mass: float, threshold: float) -> str | None:
    """The reason why the answer `text` is not accepted; None if it is."""
    if text not in choices:
        return "the answer was cut before it was one of the choices; raise max_new_tokens"
    share = choices[text]
    if share * mass >= threshold:
        return None
    return (
        f"the model gives '{text}' a probability of {share * mass:.3g} ({share:.3g} among the choices, which together "
        f"have {mass:.3g}); at least {threshold:.3g} is accepted"
    )
