"""Cards of vtx-fit in libvtx: the same defaults as in Python, and what Python refuses is refused in the same words."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.support import bundles
from tests.support.cabi import Loaded
from tests.support.cards import card_of
from tests.support.cpp import ask, needs_cpp, run
from tests.support.exported import Models
from tests.support.families.llava_next import LLAVA_NEXT
from tests.support.families.qwen import QWEN3
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api.load import load
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.card import CARD, write_card
from vtx.runtime.bundle.seal import write_sealed
from vtx.runtime.errors import BundleError

pytestmark = needs_cpp
FASTV = "fastv:k=2,ratio=0.5"


@pytest.fixture
def bundle(models: Models, tmp_path: Path) -> Bundle:
    """Its own default is K = 2 without a reduction."""
    return Bundle.open(bundles.copy(models(reductions=("none", FASTV)).bundle.folder, tmp_path / "bundle"))


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    random_image(0).save(tmp_path / "a.png")
    return tmp_path / "a.png"


@pytest.mark.sampled
@pytest.mark.parametrize(("k", "reduce"), [(5, FASTV), (None, "none"), (3, "none")])
def test_a_card_has_the_defaults_and_every_option_overrides_them(
    bundle: Bundle, picture: Path, k: int | None, reduce: str
) -> None:
    write_card(bundle.folder, card_of(bundle, k, reduce))
    [fitted] = ask(bundle.folder, picture, "red?", "--max-new-tokens", "4")
    assert (fitted["k"], fitted["reduce"], fitted["device"], fitted["compute"]) == (k, reduce, "cpu", "f32")
    with load(bundle.folder, threads=1) as model, model.open(picture) as image:
        assert list(image.ask("red?", max_new_tokens=4).token_ids) == fitted["token_ids"]
    [other] = ask(bundle.folder, picture, "red?", "--k", "2", "--reduce", "none", "--max-new-tokens", "1")
    assert (other["k"], other["reduce"]) == (2, "none")


@pytest.mark.parametrize(
    ("tiny", "limit", "whole_images"),
    [
        (LLAVA_NEXT, {"max_tiles": 2}, ("--max-tiles", "5")),
        (QWEN3, {"max_pixels": 8 * 1024}, ("--max-pixels", "40960")),
    ],
    ids=["tiles", "pixels"],
)
def test_a_card_limits_images_unless_a_limit_is_given(
    models: Models, tmp_path: Path, tiny: Tiny, limit: dict[str, int], whole_images: tuple[str, str]
) -> None:
    folder = bundles.copy(models(tiny, (3, 5)).bundle.folder, tmp_path / "bundle")
    random_image(0, (200, 100)).save(tmp_path / "wide.png")
    whole = card_of(Bundle.open(folder), None, "none")
    how = dataclasses.replace(whole.chosen.configuration, **limit)
    write_card(folder, dataclasses.replace(whole, chosen=dataclasses.replace(whole.chosen, configuration=how)))
    [fitted] = ask(folder, tmp_path / "wide.png", "red?", "--max-new-tokens", "4")
    with load(folder, threads=1) as model, model.open(tmp_path / "wide.png") as image:
        answer = image.ask("red?", max_new_tokens=4)
        assert fitted["vision_tokens"] == answer.stats.vision_tokens == model.loaded.images.layout.count(200, 100)
        assert fitted["token_ids"] == list(answer.token_ids)
    [given] = ask(folder, tmp_path / "wide.png", "red?", "--max-new-tokens", "1", *whole_images)
    assert given["vision_tokens"] > fitted["vision_tokens"]


@pytest.mark.parametrize(
    ("device", "asked", "told", "default"),
    [
        ("cpu", "auto", "used", "5"),
        ("openvino", "cpu", "ignored: another device or arithmetic was asked for", "2"),
        ("npu", "auto", "ignored: device 'npu' is not available in this version", "2"),
    ],
)
def test_the_model_says_whether_its_card_holds_here(
    bundle: Bundle, device: str, asked: str, told: str, default: str
) -> None:
    write_card(bundle.folder, card_of(bundle, 5, FASTV, device))
    model = Loaded(bundle.folder, asked)
    facts = json.loads(model.library.vtx_model_json(model.handle))
    model.close()
    assert (facts["card"], facts["default_k"]) == (told, default)


@pytest.mark.parametrize("damage", ["altered", "another manifest", "another format"])
def test_what_python_refuses_is_refused_in_the_same_words(bundle: Bundle, damage: str) -> None:
    write_card(bundle.folder, card_of(bundle, 5, FASTV))
    path = bundle.folder / CARD
    if damage == "altered":
        path.write_text(path.read_text().replace('"k": 5', '"k": 3'))
    elif damage == "another manifest":
        bundles.write_manifest(bundle.folder, {**bundles.manifest(bundle.folder), "record": {"another": "export"}})
    else:
        write_sealed(path, path.read_bytes().replace(b"vtx-card-1", b"vtx-card-9"))
    with pytest.raises(BundleError) as python:
        load(bundle.folder, device="cpu", threads=1)
    done = run("run", "--bundle", bundle.folder, "--text-only", "Who?")
    assert done.returncode == 1
    said = str(python.value).replace("install a newer vtx", "use a newer libvtx")
    assert done.stderr.decode().strip() == f"Error: {said}"
