"""Images that a model is given: in every form the same answer, and of another shape as `fit` says."""

from __future__ import annotations

import base64
import io
import logging

import numpy as np
import pytest
from click.testing import CliRunner

import vtx
from tests.support.exported import Models
from tests.support.tiny import random_image
from vtx import cli
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.errors import ImageError, RequestError
from vtx.runtime.vision import preprocess as fit_module

WIDE = random_image(4, (160, 60))
ARRAY = np.asarray(WIDE)


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models()


def png() -> bytes:
    buffer = io.BytesIO()
    WIDE.save(buffer, "PNG")
    return buffer.getvalue()


def test_every_form_of_an_image_is_the_same_image(model):
    forms = [WIDE, ARRAY, vtx.bgr(ARRAY[:, :, ::-1]), png(), bytearray(png()), io.BytesIO(png())]
    forms.append("data:image/png;base64," + base64.b64encode(png()).decode())
    assert len({model.loaded.images.prepare(form).key for form in forms}) == 1


def test_a_fit_is_chosen_by_load_and_by_open_and_is_the_checkpoints_without_a_choice(model):
    by_fit = {fit: model.loaded.images.prepare(WIDE, fit).key for fit in ("crop", "pad", "squash")}
    assert len(set(by_fit.values())) == 3
    assert model.loaded.images.prepare(WIDE).key == by_fit["crop"]
    with load(model.bundle.folder, device="cpu", threads=1, fit="squash") as squashing:
        assert squashing.loaded.images.prepare(WIDE).key == by_fit["squash"]
        with squashing.open(WIDE, fit="pad") as conversation:
            assert conversation.images[0].key == by_fit["pad"]


def test_an_unknown_fit_or_format_is_refused_by_load_and_open(model):
    with pytest.raises(RequestError, match="fit is 'stretch'"):
        load(model.bundle.folder, fit="stretch")
    with pytest.raises(RequestError, match="fit is ''"):
        model.open(WIDE, fit="")
    with pytest.raises(ImageError, match="image format 'TIFF' is unknown"):
        load(model.bundle.folder, image_formats=["tiff"])


def test_formats_that_load_was_not_given_are_refused(model):
    with load(model.bundle.folder, device="cpu", threads=1, image_formats=["jpeg"]) as careful:
        with pytest.raises(ImageError, match="is a PNG image, and only JPEG are read here"):
            careful.open(png())
        assert careful.open(ARRAY).images[0].key == model.loaded.images.prepare(ARRAY).key


def test_a_crop_is_noted_once_by_the_logger_vtx(model, caplog):
    fit_module.noted.clear()
    with caplog.at_level(logging.WARNING, "vtx"):
        model.open([WIDE, WIDE])
    assert [record.name for record in caplog.records] == ["vtx"]
    assert "leaves out 62% of a 160x60 picture" in caplog.text


def test_vtx_run_takes_fit_and_formats(model, tmp_path):
    path = tmp_path / "wide.png"
    path.write_bytes(png())
    arguments = [str(path), "what is it?", "--bundle", str(model.bundle.folder), "--max-new-tokens", "1"]
    run = CliRunner().invoke
    assert run(cli.run, [*arguments, "--fit", "pad", "--device", "cpu"]).exit_code == 0
    refused = run(cli.run, [*arguments, "--image-formats", "jpeg,webp"])
    assert refused.exit_code == 1
    assert "is a PNG image, and only JPEG, WEBP are read here; add png to the image formats" in refused.stderr
    assert run(cli.run, [*arguments, "--fit", "stretch"]).exit_code == 2
