"""Boxes in answers: each model's form, and the pixels of the picture that the model sees there, in both runtimes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tests.support.commands import invoke
from tests.support.cpp import failure, needs_cpp, output
from tests.support.exported import Models
from tests.support.families.gemma import GEMMA3, GEMMA4
from tests.support.families.internvl import INTERNVL
from tests.support.families.lfm2_vl import LFM2
from tests.support.families.paligemma import PALIGEMMA
from tests.support.families.qwen import QWEN2, QWEN3, QWEN25
from tests.support.serving import asking, serving, user
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api.boxes import Box, read_boxes
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.spec.text_settings import BoxForm
from vtx.runtime.errors import RequestError
from vtx.runtime.session.encoded_images import PreparedImage
from vtx.runtime.vision.tokens import PromptImage

POINTS = BoxForm("( # , # ) , ( # , # )", "before", 1000, rows_first=False)
JSON = BoxForm('"bbox_2d" : [ # , # , # , # ]', "inside", None, rows_first=False)
LOC = BoxForm("<loc#><loc#><loc#><loc#>", "after", 1024, rows_first=True)
LISTS = BoxForm("[ # , # , # , # ]", "before", 1000, rows_first=False)
WRITTEN = [
    (POINTS, "<|object_ref_start|>a cat<|object_ref_end|><|box_start|>(100,200),(500,1000)<|box_end|>",
     [("a cat", 20, 20, 100, 100)]),
    (POINTS, "The cats: (0,0),(10,20)\nThe dog: (10,0), (5,999.5)",
     [("The cats", 0, 0, 2, 2), ("The dog", 1, 0, 2, 99.95)]),
    (POINTS, "none (1,2),(3,4 and (5,6)", []),
    (JSON, '```json\n[\n\t{"bbox_2d": [10, 20, 40, 30], "label": "a \\"cat\\""},'
     '\n\t{"label": "dog", "bbox_2d":[0,0,80,40]},\n\t{"bbox_2d": [8, 8, 16, 16], "lab',
     [('a "cat"', 25, 50, 100, 75), ("dog", 0, 0, 200, 100), ("", 20, 20, 40, 40)]),
    (LOC, "<loc0256><loc0128><loc0512><loc1023> cat ; <loc0000><loc0000><loc1024><loc1024> big dog",
     [("cat", 25, 25, 199.8046875, 50), ("big dog", 0, 0, 200, 100)]),
    (LISTS, "<ref>a cat</ref><box>[[100, 200, 500, 900], [0, 0, 1000, 1000]]</box> and <ref>dog</ref><box>[[1,2,3,4]]",
     [("a cat", 20, 20, 100, 90), ("a cat", 0, 0, 200, 100), ("and dog", 0.2, 0.2, 0.6, 0.4)]),
]  # fmt: skip
FORMS: dict[str, tuple[Tiny, Callable[[list[int]], str]]] = {
    "qwen2": (QWEN2, lambda box: f"<|box_start|>({box[0]},{box[1]}),({box[2]},{box[3]})<|box_end|>"),
    "qwen2_5": (QWEN25, lambda box: json.dumps([{"bbox_2d": box, "label": "square"}])),
    "qwen3": (QWEN3, lambda box: json.dumps([{"bbox_2d": box, "label": "square"}])),
    "gemma4": (GEMMA4, lambda box: json.dumps([{"box_2d": [box[n] for n in (1, 0, 3, 2)], "label": "square"}])),
    "paligemma": (PALIGEMMA, lambda box: "".join(f"<loc{box[n]:04}>" for n in (1, 0, 3, 2)) + " square"),
    "internvl": (INTERNVL, lambda box: f"<ref>square</ref><box>[{box}]</box>"),
}
SIZES = [(90 + 17 * n, 80 + (61 * n) % 240) for n in range(20)]


def image_of(region: tuple[float, ...] = (0, 0, 200, 100), view: tuple[int, int] = (80, 40)) -> PreparedImage:
    """A picture of 200 x 100 pixels."""
    pixels = np.zeros((1, 3, view[1], view[0]), np.float32)
    made = PreparedImage(pixels, "", PromptImage((1,)), (200, 100), lambda views: views[0])
    return replace(made, region=region)  # type: ignore[arg-type]


def listed(boxes: tuple[Box, ...]) -> list[tuple[object, ...]]:
    return [(box.label, box.left, box.top, box.right, box.bottom) for box in boxes]


@pytest.mark.parametrize(("form", "text", "wanted"), WRITTEN)
def test_each_form_is_read_with_its_labels(form: BoxForm, text: str, wanted: list[tuple[object, ...]]) -> None:
    found = listed(read_boxes(text, form, image_of()))
    assert [box[0] for box in found] == [box[0] for box in wanted]
    np.testing.assert_allclose([box[1:] for box in found], [box[1:] for box in wanted], rtol=1e-12)  # type: ignore[arg-type]


def test_bars_are_taken_off_and_boxes_end_at_the_picture() -> None:
    padded = image_of((0, -50, 200, 150))
    assert listed(read_boxes("cat (100,500),(900,1000)", POINTS, padded)) == [("cat", 20, 50, 180, 100)]


def seen(model: Model, image: PreparedImage) -> tuple[float, float, float, float]:
    """The place of the red square in the view of the model, as shares of its width and height."""
    settings, whole = model.manifest.image, np.asarray(image.views[-1])  # of tiles the last is the whole picture
    red, _, blue = whole * np.array(settings.std)[:, None, None] + np.array(settings.mean)[:, None, None]
    shares = list[float]()
    for axis in (0, 1):
        profile = (red - blue).sum(axis)
        profile = profile / profile.max()
        middle = (profile * (np.arange(len(profile)) + 0.5)).sum() / profile.sum()
        shares += [(middle - profile.sum() / 2) / len(profile), (middle + profile.sum() / 2) / len(profile)]
    return shares[0], shares[2], shares[1], shares[3]


@pytest.mark.sampled
@pytest.mark.parametrize("name", FORMS)
def test_boxes_that_the_model_sees_come_back_within_a_pixel_at_twenty_sizes(models: Models, name: str) -> None:
    tiny, write = FORMS[name]
    model = models(tiny, (3,))
    form = model.manifest.text.boxes
    assert form is not None
    draw, fits = random.Random(name), [None]
    if name == "paligemma":
        fits = [None, "crop", "pad", "squash"]  # type: ignore[list-item]
    for width, height in SIZES:
        left, top = round(width * draw.uniform(0.28, 0.4)), round(height * draw.uniform(0.28, 0.4))
        right, bottom = round(width * draw.uniform(0.55, 0.7)), round(height * draw.uniform(0.55, 0.7))
        picture = Image.new("RGB", (width, height))
        ImageDraw.Draw(picture).rectangle((left, top, right - 1, bottom - 1), (255, 0, 0))
        for fit in fits:
            image = model.loaded.images.prepare(picture, fit)
            shares = seen(model, image)
            rows, columns = image.pixels.shape[1:]
            scales = (columns, rows) if form.scale is None else (form.scale, form.scale)
            numbers = [round(share * scale) for share, scale in zip(shares, scales * 2, strict=True)]
            [box] = read_boxes(write(numbers), form, image)
            half = max(width / scales[0], height / scales[1]) / 2  # of a step of the model's numbers
            found = np.array([box.left, box.top, box.right, box.bottom])
            wanted = np.array([left, top, right, bottom], float)
            if fit == "crop":  # all but the middle is cut off
                across, down = (width - min(width, height)) / 2, (height - min(width, height)) / 2
                wanted = wanted.clip([across, down] * 2, [width - across, height - down] * 2)
            assert np.abs(found - wanted).max() <= max(1.0, half + 0.5), (width, height, fit)
            assert box.label == ("" if name == "qwen2" else "square")


@pytest.mark.sampled
@pytest.mark.parametrize("tiny", [Tiny(), GEMMA3, LFM2], ids=lambda tiny: tiny.family)
def test_models_without_a_stated_form_refuse_by_name(models: Models, tiny: Tiny) -> None:
    model = models(tiny, (3,))
    with model.open(random_image(1)) as conversation, pytest.raises(RequestError, match="no stated form of boxes"):
        conversation.ask("red?", boxes=True)


def test_boxes_are_of_one_picture(models: Models) -> None:
    model = models(QWEN3, (3,))
    with model.open([random_image(1), random_image(2)]) as conversation:
        with pytest.raises(RequestError, match="boxes are of one picture, and 2 images and videos are given"):
            conversation.ask("red?", boxes=True)
        assert conversation.ask("red?", max_new_tokens=1).boxes is None


@pytest.mark.slow
def test_an_answer_has_its_boxes_everywhere(models: Models, tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
    model, picture = models(QWEN3, (3,)), random_image(1, (200, 100))
    text = '[{"bbox_2d": [100, 200, 500, 800], "label": "cat"}]'
    wanted = {"label": "cat", "left": 20.0, "top": 20.0, "right": 100.0, "bottom": 80.0}
    with model.open(picture) as conversation:
        answer = conversation.ask("where?", boxes=True, regex=re.escape(text), max_new_tokens=200)
    assert (answer.text, answer.boxes) == (text, (Box(**wanted),))  # type: ignore[arg-type]
    assert answer.to_dict()["boxes"] == [wanted]
    with serving({"tiny": model.bundle.folder}) as served:
        fields: dict[str, Any] = {"guided_regex": re.escape(text), "max_tokens": 200, "ignore_eos": False}
        reply = served.chat(asking(user("where?", picture), boxes=True, **fields)).json
        assert reply["usage"]["vtx"]["boxes"] == [wanted]
        assert "boxes" not in served.chat(asking(user("where?", picture), **fields)).json["usage"]["vtx"]
    path, shown = tmp_path / "picture.png", tmp_path / "boxes.png"
    picture.save(path)
    words = ["--bundle", str(model.bundle.folder), str(path), "where?", "--regex", re.escape(text), "--json"]
    result = invoke("run", *words, "--max-new-tokens", "200", "--show-boxes", shown)
    assert json.loads(result.stdout)["boxes"] == [wanted]
    changed = np.argwhere((np.asarray(Image.open(shown)) != np.asarray(picture)).any(2))
    assert [*changed.min(0), *changed.max(0)] == [20, 20, 80, 100]


@pytest.mark.slow
@needs_cpp
def test_libvtx_reads_the_same_boxes(models: Models, tmp_path: Path) -> None:
    draw, lines, wanted = random.Random(1), list[str](), list[list[Any]]()
    pieces = [piece for _, text, _ in WRITTEN for piece in re.split(r"(?<=[\],)>}])", text)]
    for number in range(600):
        form, text, _ = WRITTEN[number % len(WRITTEN)]
        if number >= len(WRITTEN):
            parts = [draw.choice([form.pattern, text, *draw.sample(pieces, 2)]) for _ in range(6)]
            text = "".join(part.replace("#", str(draw.randint(0, 1100))) for part in parts)
        region = tuple(draw.uniform(-50, 250) for _ in range(4))
        given = {"text": text, "region": region, "size": (200, 100), "view": (80, 40)}
        lines.append(json.dumps({"pattern": form.pattern, "label": form.label, "scale": form.scale, **given}
                                | {"rows_first": form.rows_first}))  # fmt: skip
        wanted.append([list(box) for box in listed(read_boxes(text, form, image_of(region)))])
    found = output("probe", "boxes", stdin="\n".join(lines).encode()).decode().splitlines()
    assert sum(map(len, wanted)) > 600
    assert [json.loads(line) for line in found] == wanted
    path = tmp_path / "picture.png"
    random_image(1).save(path)
    folder = models(GEMMA3, (3,)).bundle.folder
    assert "has no stated form of boxes" in failure("run", "--bundle", folder, path, "red?", "--boxes")
    folder = models(QWEN3, (3,)).bundle.folder
    two = ("run", "--bundle", folder, path, "--image", path, "red?", "--boxes")
    assert "boxes are of one picture, and 2 images" in failure(*two)
    answer = json.loads(output("run", "--bundle", folder, path, "red?", "--boxes", "--json", "--max-new-tokens", "2"))
    assert answer["boxes"] == []
