"""The ends of budgets, and a picture of one patch: both runtimes keep the same tokens, or refuse in the same words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.cpp import ask, expected, failure, needs_cpp
from tests.support.exported import Models
from tests.support.families.internvl import INTERNVL
from tests.support.tiny import Tiny, random_image
from vtx.runtime.errors import RequestError

pytestmark = needs_cpp

EXPORTED = (
    "none", "cls", "visionzip", "hiprune:layer=1", "fastv", "dart", "pyramiddrop:layers=2/4",
    "mustdrop:layers=2/4,tau=off",
)  # fmt: skip
KEPT = {  # of 16 patches: the tokens that enter, and those of the last layer
    "cls:keep=1": (16, 16),
    "cls:keep=0.0001": (1, 1),
    "cdpruner:keep=17": (16, 16),
    "cdpruner:keep=0.0001,text=none": (1, 1),
    "divprune:keep=1000000000": (16, 16),
    "divprune:keep=0.0001": (1, 1),
    "random:keep=0.0001": (1, 1),
    "hiprune:keep=2,layer=1,alpha=1": (2, 2),
    "hiprune:keep=0.0001,layer=1": (1, 1),
    "dart:keep=3,k=0,pivots=50": (3, 3),
    "dart:keep=2,pivots=50": (16, 16),
    "visionzip:dominant=2,contextual=1000000000": (17, 17),
    "visionzip:dominant=0.0001,contextual=0.0001": (2, 2),
    "fastv:ratio=0": (16, 16),
    "fastv:ratio=1": (16, 0),
    "pyramiddrop:layers=2/4,ratio=1": (16, 16),
    "pyramiddrop:layers=2/4,ratio=0.3": (16, 1),
    "pyramiddrop:layers=2/4,ratio=0": (16, 0),
    "mustdrop:layers=2/4,tau=off,gamma=1,alpha=1,key=0": (16, 0),
}
REFUSED = {
    "cls:keep=0": "give the share to keep, above 0 and up to 1",
    "divprune:keep=1.5": "or a whole number of at least 2",
    "visionzip:dominant=2,contextual=0": "contextual is 0.0",
    "hiprune:layer=2": "lacks the attention of the tower's block 2",
    "pyramiddrop": "drops tokens after layer 8, and this model has 8 layers: give it layers from 1 to 6",
    "pyramiddrop:layers=7": "give it layers from 1 to 6",
    "pyramiddrop:layers=5": "lacks a cut before layer 7; export it with",
    "pyramiddrop:layers=4/2": "give rising numbers",
    "pyramiddrop:192": "no preset '192'; it has released",
    "random:keep=4,seed=-1": "seed is -1; it must be at least 0",
}


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("picture") / "a.png"
    random_image(4, (60, 60)).save(path)
    return path


@pytest.mark.sampled(6)
@pytest.mark.parametrize("side", [56, 14], ids=["16-patches", "one-patch"])
@pytest.mark.parametrize("spec", KEPT)
def test_the_ends_of_every_budget(models: Models, picture: Path, spec: str, side: int) -> None:
    model = models(Tiny(image=side), (3,), "fp32", EXPORTED)
    [found] = ask(model.bundle.folder, picture, "red?", "--k", "none", "--reduce", spec, "--max-new-tokens", "3")
    with model.open(picture) as conversation:
        want = conversation.ask("red?", "none", reduce=spec, max_new_tokens=3)
    assert expected(found) == expected(want.to_dict())
    entered, last = want.stats.vision_tokens, want.stats.vision_tokens_kept[-1]
    if side == 56:
        assert (entered, last) == KEPT[spec]
    else:  # VisionZip's two are the class token and the patch
        assert entered == (2 if spec.startswith("visionzip") else 1)


@pytest.mark.parametrize("spec", REFUSED)
def test_what_is_no_budget_is_refused_in_the_same_words(models: Models, picture: Path, spec: str) -> None:
    model = models(Tiny(image=56), (3,), "fp32", EXPORTED)
    with model.open(picture) as conversation, pytest.raises(RequestError) as refused:
        conversation.ask("red?", "none", reduce=spec)
    assert REFUSED[spec] in str(refused.value)
    assert str(refused.value) in failure("run", "--bundle", model.bundle.folder, picture, "red?", "--reduce", spec)


@pytest.mark.parametrize(
    ("tiny", "spec", "reason"),
    [
        (Tiny(vision="siglip"), "cls", "this model's tower has no class token; use mustdrop without key tokens"),
        (Tiny(vision="siglip"), "visionzip", "its tower has no class token; use divprune"),
        (Tiny(vision="siglip"), "mustdrop:layers=2/4,tau=off", "this model's tower has no class token"),
        (INTERNVL, "cls+fastv:k=2", "cls works on single patches, but each token of this model covers 2 x 2 patches"),
        (INTERNVL, "visionzip", "each of its tokens covers 2 x 2 patches; use divprune"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_no_export_of_a_model_can_have_is_refused_with_the_reason(
    models: Models, picture: Path, tiny: Tiny, spec: str, reason: str
) -> None:
    """Not with the advice to export it, which the exporter would refuse."""
    model = models(tiny, (3,))
    with model.open(picture) as conversation, pytest.raises(RequestError, match=re.escape(reason)) as refused:
        conversation.ask("red?", "none", reduce=spec)
    assert "vtx-export" not in str(refused.value)
    assert str(refused.value) in failure("run", "--bundle", model.bundle.folder, picture, "red?", "--reduce", spec)


@pytest.mark.parametrize("spec", ["evs", "vidcom2+fastv:k=2"])
def test_methods_of_videos_are_refused_by_name(models: Models, picture: Path, spec: str) -> None:
    """libvtx has none of them."""
    model = models(Tiny(image=56), (3,), "fp32", EXPORTED)
    assert f"{spec.partition('+')[0]} is not built into libvtx, which has cdpruner, cls" in failure(
        "run", "--bundle", model.bundle.folder, picture, "red?", "--reduce", spec
    )
