"""K by the kind of answer: for each kind of question the fastest pair of K and rest that keeps its answers."""

from __future__ import annotations

from vtx.runtime.bundle.card import KINDS, Kind, KindDepth
from vtx.runtime.policies.make import read_rest
from vtx.tools.data.bounds import least_images, passing
from vtx.tools.data.kinds import kind_of
from vtx.tools.fit.asking import KeptAnswers, split
from vtx.tools.fit.fit import Fitted, losses_of
from vtx.tools.fit.search import Budget, rate, search
from vtx.tools.fit.settings import Setting, pairs_of


def fit_kinds(fitted: Fitted, answers: KeptAnswers, seed: int) -> tuple[KindDepth, ...]:
    """The pair of each kind that has questions held out, on the chosen engine with its reductions; () if none is.

    As the choice itself, each is searched with one half of the images and tested on the other, in turn until one
    fails; a kind for which none passes, or with too few images, has K None: it runs in full.
    """
    if fitted.chosen is None:
        return ()
    items = answers.questions.data.items
    reference = fitted.reference
    pairs = pairs_of(fitted.chosen)
    halves = [answers.usable(half) for half in split(answers.questions, seed)]
    kinds = {n: kind_of(items[n].answer or answers.reply(reference, n).text) for half in halves for n in half}
    depths = list[KindDepth]()
    for kind in KINDS:
        searched, held_out = ([n for n in half if kinds[n] == kind] for half in halves)
        if held_out:
            depths.append(_depth(kind, pairs, fitted, answers, searched, held_out))
    return tuple(depths)


def _depth(
    kind: Kind, pairs: list[Setting], fitted: Fitted, answers: KeptAnswers, searched: list[int], held_out: list[int]
) -> KindDepth:
    """The pair of one kind, from the numbers of its questions."""
    images = answers.questions.images
    reference = fitted.reference
    budget = Budget(fitted.budget.keep, of_right=fitted.budget.of_right)  # whatever the time: the choice keeps limits
    pictures = [images[n] for n in held_out]
    in_full = KindDepth(kind, None, 0.0, 1.0, 1.0, len(held_out))
    if not searched or len(set(pictures)) < least_images(budget.limit, single=len(set(pictures)) == len(pictures)):
        return in_full
    finalists, _ = search(pairs, reference, searched, images, answers, budget)
    answers.ask(finalists, held_out, "testing kinds")
    losses = [losses_of(setting, reference, held_out, images, answers) for setting in finalists]
    passed = finalists[: passing(losses, budget.limit)]
    if not passed:
        return in_full
    speed = {s: rate(s, reference, searched, images, answers, budget).answer_ms for s in passed}
    choice = min(passed, key=lambda setting: speed[setting])
    loss = losses[finalists.index(choice)]
    assert isinstance(choice.k, int)
    share = 0.0 if choice.rest is None else float(read_rest(choice.rest))
    return KindDepth(kind, choice.k, share, 1 - loss.mean, 1 - loss.upper(), len(held_out))
