"""The traces of any runtime judged by those of this one, question by question."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from vtx.runtime.errors import RequestError
from vtx.runtime.report.golden import PIXEL_TOLERANCE, Check
from vtx.runtime.report.traces.files import IMAGES, Tensors, TracedCase, TracedQuestion, read_index, read_tensors

WRONG = float("inf")


def compare_traces(expected: Path, given: Path, limit: float, choices: float = 0.0) -> Iterator[Check]:
    """One check for the images, then one a question: the first fact that differs, or the difference of its logits.

    Token ids, masks, image tokens kept, slots, positions and numbers of reused tokens must be equal. Logits may
    differ by `limit`, a share of the expected ones' largest magnitude. A greedy token may be another one if the
    expected logits of the two are within twice that; from there on the answers are different texts, and nothing more
    is compared.

    `choices` holds between two different engines only: the share of the image tokens that may be chosen differently at
    the first cut with other choices. Nothing more of such a question is compared. Raises RequestError.
    """
    ours = read_index(expected)
    theirs = read_index(given)
    if ours.manifest != theirs.manifest:
        raise RequestError(
            f"the traces in {given} are of another bundle (its vtx.json is {theirs.manifest[:12]}..., expected "
            f"{ours.manifest[:12]}...); write them from this one"
        )
    choices = choices if ours.device != theirs.device else 0.0
    yield _images(read_tensors(expected, IMAGES), read_tensors(given, IMAGES))
    cases = {case.name: case for case in theirs.cases}
    for case in ours.cases:
        name = case.name
        other = cases.get(name)
        if other is None:
            yield Check(name, WRONG, limit, "this case is missing")
            continue
        case_tensors = read_tensors(expected, case.file)
        other_tensors = read_tensors(given, other.file)
        for number, question in enumerate(case.questions):
            check = f"{name}: {question.name}"
            want = _of(case_tensors, number)
            got = _of(other_tensors, number)
            problem = _decided(question, other, number)
            other_choice = _other_choice(want, got)
            if not problem and other_choice and 0 < other_choice.difference <= choices:
                yield replace(other_choice, name=check, limit=choices)
            elif problem := problem or _facts(want, got) or _reused(question, other.questions[number]):
                yield Check(check, WRONG, limit, problem)
            else:
                yield _logits(check, want, got, limit)


def _images(pictures: Tensors, others: Tensors) -> Check:
    if set(pictures) != set(others) or any(pictures[name].shape != others[name].shape for name in pictures):
        return Check("images", WRONG, PIXEL_TOLERANCE, "other images, or of another size")
    worst = max(
        float(np.abs(picture - others[name]).max() / np.abs(picture).max()) for name, picture in pictures.items()
    )
    return Check("images", worst if np.isfinite(worst) else WRONG, PIXEL_TOLERANCE)


def _of(tensors: Tensors, number: int) -> Tensors:
    start = f"{number}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _decided(question: TracedQuestion, other: TracedCase, number: int) -> str:
    """The first difference of the question or of its decisions; empty if there is none."""
    if number >= len(other.questions):
        return "this question is missing"
    answer = other.questions[number]
    for field in ("name", "messages", "images", "continues", "replaces", "k", "cuts"):
        if getattr(question, field) != getattr(answer, field):
            return f"{field}: {getattr(answer, field)!s:.60}, expected {getattr(question, field)!s:.60}"
    return ""


def _reused(question: TracedQuestion, given: TracedQuestion) -> str:
    if question.reused == given.reused:
        return ""
    return f"{given.reused} tokens of earlier prompts were not run, expected {question.reused}"


def _other_choice(wanted: Tensors, given: Tensors) -> Check | None:
    """The first cut at which other image tokens were kept, with their share; None if there is none."""
    for name in sorted(name for name in wanted if name.startswith("kept.")):
        want = wanted[name]
        got = given.get(name)
        if got is None or got.shape != want.shape:
            return None
        differences = int((want != got).sum())
        if differences:
            note = f"{name}: {differences} of {len(want)} image tokens chosen differently"
            return Check(name, differences / len(want), 0.0, note)
    return None


def _facts(wanted: Tensors, given: Tensors) -> str:
    """The first tensor of whole numbers that differs; the greedy answer is judged with its logits."""
    if set(wanted) != set(given):
        return f"{sorted(set(wanted) ^ set(given))[0]} is missing or unknown"
    for name in wanted:
        want = wanted[name]
        got = given[name]
        if want.shape != got.shape or want.dtype != got.dtype:
            return f"{name} is {got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}"
        if name not in ("logits", "tokens") and not np.array_equal(want, got):
            at = tuple(int(i) for i in np.argwhere(want != got)[0])
            return f"{name}{list(at)} is {got[at]}, expected {want[at]}"
    return ""


def _logits(name: str, wanted: Tensors, given: Tensors, limit: float) -> Check:
    worst = 0.0
    note = "same tokens"
    for step, (want, got) in enumerate(zip(wanted["logits"], given["logits"], strict=True)):
        scale = max(1e-9, float(np.abs(want).max()))
        difference = float(np.abs(want - got).max()) / scale
        worst = max(worst, difference if np.isfinite(difference) else WRONG)
        ours = int(wanted["tokens"][step])
        theirs = int(given["tokens"][step])
        if not 0 <= theirs < len(want):
            return Check(name, WRONG, limit, f"token {step} is {theirs}, outside the vocabulary")
        if ours != theirs:
            if float(want[ours] - want[theirs]) / scale > 2 * limit:
                return Check(name, WRONG, limit, f"token {step} is {theirs}, expected {ours}")
            note = f"equally likely tokens from step {step} on"
            break
    return Check(name, worst, limit, note)
