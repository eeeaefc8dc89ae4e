"""Images in tiles: libvtx sees the views that Python sees, gives as many tokens, and answers as Python does."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.bundles import ORT, export
from tests.support.cpp import (
    ask,
    assert_answers_equal,
    assert_asked_equal,
    failure,
    needs_cpp,
    run,
)
from tests.support.exported import Models
from tests.support.families.llava_next import LLAVA_NEXT
from tests.support.families.llava_onevision import ONEVISION, onevision_of_another_scale
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny
from vtx.runtime.api.load import load
from vtx.runtime.bundle.bundle import seal_manifest
from vtx.runtime.errors import ContextError, RequestError

pytestmark = needs_cpp

SIZES = ((60, 60), (150, 60), (40, 90), (301, 97), (17, 200), (640, 33), (1, 1), (5, 400), (223, 225), (448, 112))
QUESTIONS = ("red?", "How many circle shapes are there?", "red?")


@pytest.mark.slow
def test_several_images_of_onevision_answer_as_python_at_another_scale_of_pixel_values(
    tiny_checkpoint: Checkpoints, tmp_path: Path, pictures: list[Path]
) -> None:
    checkpoint = onevision_of_another_scale(tiny_checkpoint(ONEVISION), tmp_path / "checkpoint")
    folder = export(checkpoint, tmp_path / "bundle", (3, 5), dialects=ORT).folder
    with load(folder, device="cpu", threads=1) as model:
        assert_answers_equal(model, pictures, QUESTIONS, ("none", 5, 3))


@pytest.mark.parametrize("changed", [{"mean": [2.0, 0.5, 0.5]}, {"mean": [0.0] * 3, "std": [1.0] * 3}], ids=str)
def test_bars_without_a_colour_are_refused_as_in_python(
    models: Models, tmp_path: Path, pictures: list[Path], changed: dict[str, list[float]]
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(models(ONEVISION, (3, 5)).bundle.folder, folder)
    manifest = models(ONEVISION, (3, 5)).manifest
    seal_manifest(folder, replace(manifest, image=replace(manifest.image, **{k: tuple(v) for k, v in changed.items()})))
    with load(folder, device="cpu", threads=1) as model, pytest.raises(RequestError) as refused:
        model.open(pictures[1:3])
    assert str(refused.value) in failure("run", "--bundle", folder, pictures[1], "red?", "--image", pictures[2])


def test_the_layout_of_cdpruners_code_is_that_of_python(models: Models, pictures: list[Path]) -> None:
    model, spec = models(LLAVA_NEXT, (3, 5)), "cdpruner:keep=5"
    with load(model.bundle.folder, device="cpu", threads=1, fit="released") as released:
        for picture in pictures:
            shown = [picture]
            answers = assert_asked_equal(released, shown, QUESTIONS, "--fit", "released", reduce=spec, max_new_tokens=6)
            assert [answer.stats.vision_tokens for answer in answers] == [25] * 3
            with model.open(picture, fit="released") as conversation:
                assert conversation.ask("red?", reduce="none", max_new_tokens=1).stats.vision_tokens == 80


def test_cdpruner_on_one_tile_with_a_newline_chooses_as_in_python(models: Models, pictures: list[Path]) -> None:
    """Each of several images has one tile, and a token behind it that no view has."""
    model, spec = models(ONEVISION, (3, 5)), "cdpruner:keep=5"
    answers = assert_asked_equal(model, pictures[1:3], QUESTIONS, reduce=spec, max_new_tokens=6)
    assert [answer.stats.vision_tokens for answer in answers] == [2 * 5] * 3


@pytest.mark.parametrize("tiny", [ONEVISION, Tiny()], ids=["onevision", "llava"])
def test_the_released_layout_is_refused_where_images_are_seen_otherwise(
    models: Models, pictures: list[Path], tiny: Tiny
) -> None:
    model = models(tiny, (3, 5))
    with pytest.raises(RequestError) as refused:
        model.open(pictures[0], fit="released")
    done = run("run", "--bundle", model.bundle.folder, pictures[0], "red?", "--fit", "released")
    assert done.stderr.decode() == f"Error: {refused.value}\n"


def test_fewer_tiles_and_what_does_not_fit_are_as_in_python(models: Models, pictures: list[Path]) -> None:
    model = models(LLAVA_NEXT, (3, 5))
    [found] = ask(model.bundle.folder, pictures[1], "red?", "--max-tiles", "1", "--max-new-tokens", "4")
    assert found["vision_tokens"] == model.loaded.images.layout.limited(1).count(150, 60)
    many = [word for _ in range(9) for word in ("--image", pictures[3])]
    with pytest.raises(ContextError) as room, model.open([pictures[3]] * 10) as conversation:
        conversation.ask("red?")
    for arguments, message in (
        (["--fit", "pad"], "fit 'pad' has no effect here: this model sees images of any shape in tiles"),
        (["--max-tiles", "-1"], "max_tiles is -1; it must be at least 1"),
        (many, str(room.value)),
    ):
        assert message in failure("run", "--bundle", model.bundle.folder, pictures[3], "red?", *arguments)


def test_tiles_have_no_place_in_a_bundle_of_one_view(models: Models, pictures: list[Path]) -> None:
    done = run("run", "--bundle", models().bundle.folder, pictures[0], "red?", "--max-tiles", "2")
    assert b"max_tiles has no effect here: this model sees each image in one piece" in done.stderr
