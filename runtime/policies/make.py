"""From `--k` and `--reduce` to a policy, checked against the bundle. No other module names methods that withdraw."""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.spec.manifest import FINAL_NORM, Manifest
from vtx.runtime.bundle.spec.model_spec import unscored
from vtx.runtime.errors import RequestError, UnsupportedModelError
from vtx.runtime.policies.base import Needs, Policy, Reduction
from vtx.runtime.policies.methods.withdraw import Full, Rest, Withdraw, WithdrawToRest
from vtx.runtime.policies.spec import MAX_NUMBER, parse, to_spec
from vtx.runtime.vision.layout import Layout
from vtx.runtime.vision.limits import MAX_SAMPLED_FRAMES

if TYPE_CHECKING:
    from vtx.runtime.policies.methods.gate import Odds

NOT_RENUMBERED = "positions of three parts, which cannot be renumbered; use positions=keep"
NO_VIDEOS = "chooses from the frames of videos, and this model takes none; use divprune, cdpruner or dart"
TEXT_TOWER_FIX = "--text-tower CLIP, or use text=embedding, the form without a text tower"


def read_rest(value: object) -> Rest:
    """The rest that a number, a share from 0 to 1, or the text "57" or "10%" means. Raises RequestError."""
    rest = value
    if isinstance(value, str) and (text := re.fullmatch(r"([0-9]{1,9})(\.[0-9]{1,9})?(%?)", value)):
        digits, fraction, percent = text.groups()
        if percent:
            rest = float(f"{digits}{fraction or ''}") / 100
        elif not fraction:
            rest = int(digits)
    if isinstance(rest, numbers.Integral) and not isinstance(rest, bool) and 0 <= int(rest) <= MAX_NUMBER:
        return int(rest)
    if isinstance(rest, float) and 0 <= rest <= 1:
        return rest
    raise RequestError(
        f"rest is {value!r:.40}; it must be a share of the image tokens such as 10%, at most 100%, or a number of them "
        "such as 57"
    )


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Settings beside K. `threshold` is that of gates; `reduce`: a spec of reductions, "none" or None.

    `rest` is what stays from a prebuilt K on, a number of image tokens or as a float a share of them; None: none.
    """

    threshold: float = 0.5
    rest: Rest | None = None
    reduce: str | None = None


NO_SETTINGS = PolicySettings()


def make_policy(
    k: int | str | None,
    manifest: Manifest,
    odds: Odds,
    settings: PolicySettings = NO_SETTINGS,
    *,
    dialect: str = "ort",
    final_norm: Callable[[], NDArray[np.float32]] | None = None,
) -> Policy:
    """The policy that `k` and `settings` mean.

    `k` is a prebuilt K, "auto" for the gates, "none" or None; `odds` asks a gate; `dialect` is that of the graphs that
    will run. `final_norm` reads the weight of the decoder's last norm; it is called if a reduction needs it.

    Raises RequestError: a K out of range, or one the bundle was not cut at; "auto" without gates; a rest without a K,
    or at one where the bundle cannot choose it; reductions that are not known, do not go together, or for which the
    bundle was not exported.
    """
    rest = settings.rest
    reductions = () if settings.reduce is None else parse(settings.reduce)
    if reductions:
        check_provided(reductions, manifest, dialect)
    exits: Reduction
    if rest is not None and (k is None or k in ("none", "auto", "card")):
        raise RequestError(
            f"a rest is what stays of the image from a prebuilt K on, and K is {k or 'none'}; give K as a number, or "
            "leave the rest out"
        )
    if k is None or k == "none":
        exits = Full()
    elif k == "auto":
        if not manifest.gates:
            raise RequestError(
                "--k auto needs gates and this bundle has none; use --k none or a prebuilt K, "
                "or train gates with vtx-train-gate and export with --gates"
            )
        if not 0 <= settings.threshold <= 1:
            raise RequestError(f"the gate threshold is {settings.threshold}; give a probability from 0 to 1")
        from vtx.runtime.policies.methods.gate import Gate

        exits = Gate(odds, manifest.gates, settings.threshold)
    else:
        exits = withdrawal(_prebuilt(k, manifest), rest, manifest, dialect)
    policy = Policy((exits, *reductions))
    if not policy.needs.final_norm:
        return policy
    assert final_norm is not None
    return replace(policy, final_norm=final_norm())


def _prebuilt(k: int | str, manifest: Manifest) -> int:
    """`k` if it is a number that the bundle was cut at. Raises RequestError."""
    layers = manifest.model.layers
    if isinstance(k, bool) or not isinstance(k, numbers.Integral):
        raise RequestError(f"K is {k!r}; give a number from 2 to {layers}, or none")
    if not 2 <= k <= layers:
        raise RequestError(
            f"K = {k} is outside 2..{layers}: it is the first layer without vision tokens; give another, or none"
        )
    if k not in manifest.variants:
        built = ", ".join(map(str, manifest.variants)) or "none at all"
        raise RequestError(
            f"K = {k} was not prebuilt, this bundle has {built}; use one of these, or export with --k {k}"
        )
    source = manifest.model.first_source
    if source is not None and k > source:  # of bundles that an earlier vtx made
        raise RequestError(
            f"K = {k}: layers that read the keys and values of layer {source} would still see the image there; use "
            "a lower K, or none"
        )
    return int(k)  # it may be numpy's


def withdrawal(k: int, rest: Rest | None, manifest: Manifest, dialect: str) -> Reduction:
    """The withdrawal before layer `k`. Raises RequestError: the bundle's graphs lack what chooses a rest there."""
    if not rest:
        return Withdraw(k)
    if isinstance(rest, float) and rest == 1:
        return Full()
    withdrawal = WithdrawToRest(k, rest)
    if lacking := _lacking(withdrawal.needs(), manifest, dialect):
        why = unscored(manifest.model, k - 1)
        cure = f"{why}; use another K, or leave the rest out" if why else "export it again with this vtx"
        raise RequestError(f"at K = {k} this bundle cannot keep a rest: it lacks {lacking}; {cure}")
    return withdrawal


def check_depth(reductions: Sequence[Reduction], layers: int) -> None:
    """Raise RequestError for a reduction that would work beyond the last layer."""
    for part in reductions:
        most = layers - bool(part.needs().ahead)  # the last layer is no stage of its own
        beyond = [cut for cut in part.needs().cuts if not 2 <= cut <= most]
        if beyond:
            raise RequestError(
                f"{part.name} drops tokens after layer {beyond[0] - 1}, and this model has {layers} layers: "
                f"give it layers from 1 to {most - 1}"
            )


def check_provided(reductions: Sequence[Reduction], manifest: Manifest, dialect: str = "ort") -> None:
    """Raise RequestError if the bundle lacks a need of the reductions, with the option that exports it, if one does."""
    check_depth(reductions, manifest.model.layers)
    for part in reductions:
        if part.renumbers and manifest.model.rope.sections:
            raise RequestError(f"{part.name}: this model has {NOT_RENUMBERED}")
        if part.of_videos and manifest.video is None:
            raise RequestError(f"{part.name} {NO_VIDEOS}")
        tower = manifest.model.tower
        if reason := _never_there(
            part.needs(), max(tower.square, tower.pool), class_token=tower.class_token, two_towers=tower.several
        ):
            raise RequestError(f"{part.name} {reason}")
        lacking = _lacking(part.needs(), manifest, dialect)
        if lacking:
            further = f" {TEXT_TOWER_FIX}" if part.needs().text_tower else ""
            raise RequestError(
                f"this bundle was not exported for {part.name}: it lacks {lacking}; "
                f"export it with vtx-export --reduce {to_spec(reductions)}{further}"
            )


def check_layout(reductions: Sequence[Reduction], layout: Layout) -> None:
    """Raise RequestError for reductions that leave out tokens before the decoder if the layout puts text among them."""
    for part in reductions:
        if layout.has_text and part.entry() is not None:
            raise RequestError(
                f"{part.name} drops tokens before the decoder, but this model has text between its tiles; use "
                "fastv, dart after a layer, or mustdrop:...,tau=off,key=0"
            )


def check_patches(part: Reduction, side: int, *, class_token: bool, two_towers: bool = False) -> None:
    """Raise UnsupportedModelError if a tower, whose tokens are of `side` x `side` patches each, lacks a need."""
    if reason := _never_there(part.needs(), side, class_token=class_token, two_towers=two_towers):
        raise UnsupportedModelError(f"{part.name} {reason}")


def _never_there(needs: Needs, side: int, *, class_token: bool, two_towers: bool) -> str:
    """The reason why no export of this model meets `needs`, and what to use; empty: one can."""
    if two_towers and (needs.of_patches or needs.projector):
        return (
            "reads the patches of a single tower, but this model has several; use fastv, cdpruner, divprune, dart, "
            "or mustdrop:...,tau=off,key=0"
        )
    if (needs.of_patches and not needs.text_tower) and side > 1:
        return (
            f"works on single patches, but each token of this model covers {side} x {side} patches; "
            "use fastv, cdpruner, dart, or mustdrop:...,tau=off,key=0"
        )
    if needs.projector and (side > 1 or not class_token):
        lacks = "its tower has no class token" if side == 1 else f"each of its tokens covers {side} x {side} patches"
        return (
            "merges patches by the attention of the tower's class token and projects each patch by itself, but this "
            f"model does not: {lacks}; use divprune, cdpruner or dart"
        )
    if (needs.attention or needs.last_attention) and not class_token:
        return (
            "ranks patches by the class token's attention, but this model's tower has no class token; "
            "use mustdrop without key tokens (mustdrop:...,key=0), lsm or fastv"
        )
    return ""


def check_videos(reductions: Sequence[Reduction], *, between: bool, frames: int) -> None:
    """Raise RequestError for reductions that videos cannot have.

    The graph of frames lacks outputs that they need, or, with `between`, there is text between the frames; or the
    longest has more `frames` than may be in memory, and no method chooses from them in windows.
    """
    from vtx.runtime.policies.clip import Clip

    first = reductions[0] if reductions else None
    if frames > MAX_SAMPLED_FRAMES and not (isinstance(first, Clip) and first.at_once):
        raise RequestError(
            f"the video has {frames} sampled frames, and beyond {MAX_SAMPLED_FRAMES} their tokens must be chosen in "
            f"windows; use evs, or vidcom2 with window=32, or at most {MAX_SAMPLED_FRAMES} frames"
        )
    for part in reductions:
        needs = part.needs()
        if needs.of_patches or needs.projector:
            raise RequestError(
                f"{part.name} reads the patches of images and does not support video frames; use fastv, "
                "cdpruner, dart, or mustdrop:...,tau=off,key=0"
            )
        if between and part.entry() is not None:
            raise RequestError(
                f"{part.name} drops tokens before the decoder, but this model's videos have text between frames; "
                "use fastv, dart after a layer, or mustdrop:...,tau=off,key=0"
            )


def _lacking(needs: Needs, manifest: Manifest, dialect: str) -> str:
    """The first of `needs` that the graphs lack, in words; empty if they have all."""
    graphs = manifest.dialects[dialect]
    firsts = {stage.first for stage in manifest.stages}
    scored = {stage.last for stage in manifest.stages if stage.query}
    cuts = ", ".join(map(str, sorted(set(needs.boundaries) - firsts)))
    queries = ", ".join(map(str, sorted(set(needs.scored) - scored)))
    blocks = ", ".join(map(str, sorted(needs.tower_layers - {graphs.vision_received})))
    cases = {
        f"a cut before layer {cuts}": bool(cuts),
        f"the attention of layer {queries}": bool(queries),
        "a vision graph that merges windows": needs.merging and not graphs.vision_merges,
        "the weight of the decoder's last norm": needs.final_norm and FINAL_NORM not in manifest.files,
        "CLIP's text tower": needs.text_tower and manifest.text_tower is None,
        f"the attention of the tower's block {blocks}": bool(blocks),
        "the tower's tokens and a graph of the projector": needs.projector and graphs.projector is None,
        "the class token's attention in the tower's last block": needs.last_attention
        and not graphs.vision_last_attention,
        "the class token's attention": needs.attention and not graphs.vision_attention,
    }
    return next((words for words, lacks in cases.items() if lacks), "")
