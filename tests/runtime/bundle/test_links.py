"""No file of a checkpoint or a bundle is read through a link that leaves the folder, whenever it is made."""

from __future__ import annotations

import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import vtx
from tests.support import bundles
from tests.support.fixtures import Checkpoints
from tests.support.tiny import random_image
from vtx.exporter.bundling.prepare import ExportOptions, plan_export
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.files import Folder
from vtx.runtime.errors import BundleError, CheckpointError, VtxError

SETTINGS = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/default.jinja",
    "model.safetensors",
]


@pytest.fixture
def checkpoint(tiny_checkpoint: Checkpoints, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint(), tmp_path / "model"))


@pytest.fixture(scope="module")
def whole(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.export(tiny_checkpoint(), tmp_path_factory.mktemp("bundle") / "whole", (3,)).folder


def turn_into(path: Path, kind: str, outside: Path) -> None:
    """Put a link out of the folder, a pipe or a directory where `path` stands or might stand."""
    outside.parent.mkdir(exist_ok=True)
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text("{}")
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_checkpoint_s_file_must_be_a_regular_file_of_its_folder(checkpoint: Path, name: str, kind: str) -> None:
    if name == "additional_chat_templates/default.jinja":
        (checkpoint / "chat_template.jinja").unlink(missing_ok=True)
    if name == "preprocessor_config.json":
        (checkpoint / "processor_config.json").unlink(missing_ok=True)
    turn_into(checkpoint / name, kind, checkpoint.parent / "outside" / Path(name).name)
    with pytest.raises(CheckpointError, match="leaves the checkpoint" if kind == "link" else "is a d"):
        plan_export(ExportOptions(str(checkpoint), (3,)))


def test_links_within_a_checkpoint_are_fine(checkpoint: Path) -> None:
    for name in SETTINGS:
        if (checkpoint / name).exists() and "/" not in name:
            (checkpoint / name).rename(checkpoint / f"real-{name}")
            (checkpoint / name).symlink_to(f"real-{name}")
    assert plan_export(ExportOptions(str(checkpoint), (3,))).ks == (3,)


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_the_manifest_is_a_regular_file_of_the_bundle(folder: Path, kind: str) -> None:
    turn_into(folder / "vtx.json", kind, folder.parent / "outside" / "vtx.json")
    with pytest.raises(BundleError, match=r"vtx\.json"):
        Bundle.open(folder)


@pytest.mark.parametrize("inside", [True, False])
def test_the_manifest_is_never_a_link(folder: Path, inside: bool) -> None:
    real = (folder if inside else folder.parent) / "real.json"
    (folder / "vtx.json").rename(real)
    (folder / "vtx.json").symlink_to(real)
    with pytest.raises(BundleError, match=r"vtx\.json .*link"):
        Bundle.open(folder)


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "chat_template.jinja", "rope.safetensors", "embed.ort.onnx", "stage-03-08.ort.onnx",
     "vision.ort.onnx"],
)  # fmt: skip
def test_a_link_swapped_in_after_the_check_is_not_followed(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Bundle.open

    def then_swap(*args: object, **keywords: object) -> Bundle:
        opened = real(*args, **keywords)  # type: ignore[arg-type]
        turn_into(folder / name, "link", folder.parent / "outside" / name)
        return opened

    monkeypatch.setattr(Bundle, "open", then_swap)
    with pytest.raises(BundleError, match=name):
        vtx.load(folder, threads=1)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("openvino") is None, reason="OpenVINO is not installed")
def test_a_graph_that_is_loaded_with_the_first_image_is_not_read_through_a_link(folder: Path) -> None:
    model = vtx.load(folder, threads=1, device="openvino")
    name = model.manifest.dialects[model.backend.dialect].vision
    turn_into(folder / name, "link", folder.parent / "outside" / name)
    with pytest.raises(VtxError, match=re.escape(name)), model.open(random_image(1)) as image:
        image.ask("what is it?", options=vtx.Options(max_new_tokens=1))


def test_weights_swapped_after_the_check_are_not_read(folder: Path) -> None:
    opened = Bundle.open(folder)
    name = next(name for name in opened.manifest.files if name.startswith("weights/"))
    turn_into(folder / name, "link", folder.parent / "outside" / Path(name).name)
    with pytest.raises(BundleError, match=name), opened.graph_path("embed.ort.onnx"):
        pass


@pytest.mark.parametrize("how", ["written", "replaced"])
@pytest.mark.parametrize("graph", [True, False])
def test_a_file_that_changes_while_a_library_reads_it_is_told(folder: Path, graph: bool, how: str) -> None:
    opened = Bundle.open(folder)
    name = "embed.ort.onnx" if graph else next(n for n in opened.manifest.files if n.startswith("weights/"))

    def change() -> None:
        if how == "replaced":
            shutil.copy2(folder / name, folder / "another")
            (folder / "another").replace(folder / name)
        else:
            bundles.flip(folder / name)

    with pytest.raises(BundleError, match=f"{name} was replaced or written to"), opened.graph_path("embed.ort.onnx"):
        change()


@pytest.mark.parametrize("part", ["file", "folder"])
def test_a_link_swapped_in_between_resolving_and_opening_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    inside, outside = tmp_path / "bundle" / "weights", tmp_path / "outside"
    for place in (inside, outside):
        place.mkdir(parents=True)
        (place / "secret").write_text(place.name)
    real = os.path.realpath

    def then_swap(path: Any, *, strict: bool = False) -> str:
        found = real(path, strict=strict)
        if str(path).endswith("secret") and not inside.is_symlink():
            victim = inside / "secret" if part == "file" else inside
            victim.rename(tmp_path / "moved")
            victim.symlink_to(outside / "secret" if part == "file" else outside)
        return found

    monkeypatch.setattr(os.path, "realpath", then_swap)
    with pytest.raises(BundleError, match="weights/secret"):
        Folder(tmp_path / "bundle", "bundle", BundleError, "export again").open("weights/secret")


def test_content_altered_after_the_check_is_not_used(folder: Path) -> None:
    opened = Bundle.open(folder)
    content = (folder / "chat_template.jinja").read_bytes()
    (folder / "chat_template.jinja").write_bytes(content.replace(b"U", b"V", 1).replace(b"u", b"v", 1))
    with pytest.raises(BundleError, match=r"chat_template\.jinja was altered"):
        opened.read("chat_template.jinja", 1 << 20)
