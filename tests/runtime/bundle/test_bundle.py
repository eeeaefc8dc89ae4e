"""A bundle that is not as it was exported, by accident or on purpose, is refused by name."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import vtx
from tests.support import bundles
from tests.support.tiny import random_image
from vtx.runtime.bundle import bundle as bundle_module
from vtx.runtime.bundle import files
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.safetensors import read_header, read_tensor, write_safetensors
from vtx.runtime.errors import BundleError, DeviceError, TemplateError, VtxError

SHARD = "weights/00001-of-00001.safetensors"
GRAPHS = ["vision.ort.onnx", "embed.ort.onnx", "head.ort.onnx", "stage-01-02.ort.onnx", "stage-05-08.ort.onnx"]
FILES = [*GRAPHS, SHARD, "tokenizer.json", "chat_template.jinja", "golden.safetensors", "rope.safetensors"]


def ask(folder: Path) -> vtx.Answer:
    """Load and answer, so that every file is used."""
    model = vtx.load(folder, threads=1)
    with model.open(random_image(1)) as image:
        return image.ask("what is it?", options=vtx.Options(max_new_tokens=2, ignore_eos=True))


def refused(folder: Path, *, loads: type[VtxError] = BundleError) -> str:
    """The one line that `ask` fails with."""
    with pytest.raises(loads) as caught:
        ask(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_file_of_the_bundle_is_in_the_manifest(whole: Path) -> None:
    found = {path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file()}
    assert found == {*bundles.manifest(whole)["files"], "vtx.json", "vtx.json.sha256"}
    assert set(FILES) <= found


@pytest.mark.slow
def test_a_copy_of_a_bundle_answers_as_the_bundle_does(whole: Path, folder: Path) -> None:
    assert ask(folder).token_ids == ask(whole).token_ids
    assert all(problem is None for _, problem in Bundle.open(folder).verify())


@pytest.mark.slow
def test_a_bundle_is_found_by_a_relative_path_and_through_a_link(
    whole: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    (folder.parent / "link").symlink_to(folder)
    assert ask(Path("bundle")).token_ids == ask(Path("link")).token_ids == ask(whole).token_ids


# ---- files that are not as exported ----------------------------------------------------------------------------------


def test_a_file_in_a_bundle_s_place_says_what_to_name(folder: Path) -> None:
    with pytest.raises(BundleError, match=r"vtx\.json is a file; name the bundle's directory, unpack an archive"):
        Bundle.open(folder / "vtx.json")


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1])
    message = refused(folder)
    assert name in message
    assert f"{len(content) - 1:,}" in message


@pytest.mark.parametrize("name", FILES)
def test_a_file_with_one_byte_altered_is_named(folder: Path, name: str) -> None:
    bundles.flip(folder / name, (folder / name).stat().st_size // 2)
    message = refused(folder)
    assert name in message
    assert "altered" in message


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    message = refused(folder)
    assert name in message
    assert "missing" in message


def test_large_files_are_hashed_by_verify_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundles.flip(folder / SHARD)
    monkeypatch.setattr(bundle_module, "QUICK_BYTES", 100_000)
    opened = Bundle.open(folder)
    seen: list[int] = []
    problems = {name: problem for name, problem in opened.verify(seen.append) if problem}
    assert list(problems) == [SHARD]
    assert sum(seen) == sum(record.bytes for record in opened.manifest.files.values())


@pytest.mark.parametrize("bytes_", [-1, 1])
def test_a_large_file_has_the_size_that_the_manifest_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch, bytes_: int
) -> None:
    monkeypatch.setattr("vtx.runtime.bundle.bundle.QUICK_BYTES", 0)
    file = next((folder / "weights").iterdir())
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size + bytes_)
    with pytest.raises(BundleError, match=rf"{file.name} holds [\d,]+ bytes, the manifest says"):
        Bundle.open(folder)


def test_verify_tells_every_problem(folder: Path) -> None:
    bundles.flip(folder / SHARD)
    (folder / "head.ort.onnx").unlink()
    problems = {name for name, problem in Bundle.open(folder, check=False).verify() if problem}
    assert problems == {SHARD, "head.ort.onnx"}


@pytest.mark.parametrize("name", ["tokenizer.json", SHARD, "weights"])
def test_a_link_that_leaves_the_bundle_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    assert "leaves the bundle" in refused(folder)


def test_a_link_within_the_bundle_is_fine(folder: Path) -> None:
    (folder / SHARD).rename(folder / "weights/other")
    (folder / SHARD).symlink_to("other")
    assert ask(folder).token_ids


@pytest.mark.parametrize("target", ["nowhere", "tokenizer.json"], ids=["dangling", "circle"])
def test_a_link_to_nowhere_is_refused(folder: Path, target: str) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(target)
    assert "tokenizer.json" in refused(folder)


def test_a_pipe_or_a_directory_in_place_of_a_file_is_refused_without_waiting(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    assert "tokenizer.json" in refused(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()
    assert "tokenizer.json" in refused(folder)


# ---- what is no bundle -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["missing", "empty", "file", "~nobody-of-this-name/b", "a" * 300, "nul\0"])
def test_what_is_no_bundle_is_refused_in_one_line(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    with pytest.raises(BundleError) as caught:
        vtx.load(name, threads=1)
    assert "\n" not in str(caught.value)


def deny(*_: object, **__: object) -> Any:
    raise PermissionError(13, "Permission denied")


def test_no_permission_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.os, "open", deny)  # chmod does not keep root out
    with pytest.raises(BundleError, match="Permission denied"):
        Bundle.open(folder)


def test_an_unreadable_file_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Bundle.open(folder)
    monkeypatch.setattr(files.os, "open", deny)
    assert all("Permission denied" in str(problem) for _, problem in opened.verify())


def test_a_checksum_table_with_an_impossible_name_is_refused(folder: Path) -> None:
    value = bundles.manifest(folder)
    value["files"]["x" * 300] = value["files"]["tokenizer.json"]
    bundles.write_manifest(folder, value)
    refused(folder)


# ---- forged files, with checksums to match ---------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("content", [b"", b"garbage" * 100, b"\x08\x0a" * 2000], ids=["empty", "text", "protobuf"])
def test_a_forged_graph_is_a_bundle_error(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    bundles.reseal(folder, name)
    assert name in refused(folder)


FOLLOWS = pytest.mark.skipif(
    tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 24),
    reason="onnxruntime before 1.24 reads weights from any file that a graph names: SECURITY.md",
)


def _edit_external(path: Path, key: str, value: str) -> None:
    import onnx

    model = onnx.load_model(path, load_external_data=False)
    tensors = [t for t in model.graph.initializer if t.external_data]
    assert tensors
    for tensor in tensors:
        for entry in tensor.external_data:
            if entry.key == key:
                entry.value = value
    path.write_bytes(model.SerializeToString())


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["vision.ort.onnx", "embed.ort.onnx", "stage-03-04.ort.onnx"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("location", "../outside.safetensors", marks=FOLLOWS),
        ("location", "/etc/passwd"),
        pytest.param("location", "weights/../../outside.safetensors", marks=FOLLOWS),
        ("location", "weights/nothing"),
        ("offset", str(1 << 40)),
        ("offset", "-64"),
        ("length", str(1 << 40)),
    ],
)
def test_a_graph_cannot_reach_for_weights_elsewhere(folder: Path, name: str, key: str, value: str) -> None:
    (folder.parent / "outside.safetensors").write_bytes((folder / SHARD).read_bytes())
    _edit_external(folder / name, key, value)
    bundles.reseal(folder, name)
    refused(folder)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["short", "long", "half", "float16", "renamed", "garbage", "empty"])
def test_forged_rope_tables_are_refused(folder: Path, kind: str) -> None:
    path = folder / "rope.safetensors"
    tables = {name: read_tensor(info) for name, info in read_header(path).tensors.items()}
    changes: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "short": lambda t: t[:-1],
        "long": lambda t: np.concatenate([t, t]),
        "half": lambda t: t[:, ::2],
        "float16": lambda t: t.astype(np.float16),
    }
    if kind == "renamed":
        write_safetensors(path, {name + "x": table for name, table in tables.items()})
    elif kind in changes:
        write_safetensors(path, {name: changes[kind](table) for name, table in tables.items()})
    else:
        path.write_bytes(struct.pack("<Q", 1 << 60) if kind == "garbage" else b"")
    bundles.reseal(folder, "rope.safetensors")
    assert "rope.safetensors" in refused(folder, loads=VtxError)


@pytest.mark.sampled
@pytest.mark.parametrize("content", [b"", b"{}", b"garbage", b"\xff\xfe", b"[" * 100_000])
def test_a_forged_tokenizer_is_a_bundle_error(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    bundles.reseal(folder, "tokenizer.json")
    assert "tokenizer" in refused(folder)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "template",
    [
        "",
        "{{",
        "{{ messages.__class__.__mro__ }}",
        "{% for i in range(999999999) %}x{% endfor %}",
        "{% for a in range(30000) %}{% for b in range(30000) %}x{% endfor %}{% endfor %}",
        "{{ 'x' * 999999999 }}",
    ],
    ids=["empty", "broken", "attributes", "loop", "loops", "large"],
)
def test_a_forged_template_is_refused(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    bundles.reseal(folder, "chat_template.jinja")
    refused(folder, loads=TemplateError)


FOREIGN = [
    ("model", "hidden", 96),
    ("model", "hidden", 1),
    ("model", "kv_heads", 4),
    ("model", "kv_heads", 1),
    ("model", "kv_heads", (1 << 31) - 1),
    ("model", "head_dim", 32),
    ("model", "head_dim", 15),
    ("model", "vocab", 319),
    ("layout", "max_tokens", 17),
    ("layout", "parameters", {"tokens": 17}),
    ("layout", "parameters", {"tokens": 16, "tiles": 1}),
    ("layout", "name", "anyres"),
    ("layout", None, {"name": "single", "max_tokens": 17, "parameters": {"tokens": 17}}),
    ("layout", None, {"name": "single", "max_tokens": 1, "parameters": {"tokens": 1}}),
    ("max_context", None, 128),
    ("max_context", None, 1 << 23),
    ("kv_dtype", None, "float16"),
    ("image", "crop", [70, 70]),
    ("text", "image_token_id", 3),
    ("rope", None, "golden.safetensors"),
]
"""A manifest's statements that its graphs, which nobody forged, contradict."""


@pytest.mark.sampled
@pytest.mark.parametrize(("part", "key", "value"), FOREIGN)
def test_a_manifest_that_lies_about_its_graphs_is_refused(folder: Path, part: str, key: str | None, value: Any) -> None:
    lying = bundles.manifest(folder)
    if key is None:
        lying[part] = value
    else:
        lying[part][key] = value
    bundles.forge(folder, lying)
    refused(folder)


def test_a_tower_of_other_tokens_is_refused(folder: Path) -> None:
    lying = bundles.manifest(folder)
    lying["model"]["tower"]["tokens"] *= 2
    bundles.forge(folder, lying)
    assert "the tower gives" in refused(folder)


@pytest.mark.parametrize("place", ["embed", "vision", "head"])
def test_graphs_in_each_other_s_place_are_refused(folder: Path, place: str) -> None:
    lying = bundles.manifest(folder)
    graphs = lying["dialects"]["ort"]
    graphs[place] = graphs["embed" if place != "embed" else "head"]
    bundles.write_manifest(folder, lying)
    refused(folder)


def test_stages_in_each_other_s_place_are_refused(folder: Path) -> None:
    lying = bundles.manifest(folder)
    stages = lying["dialects"]["ort"]["stages"]
    stages[0], stages[1] = stages[1], stages[0]
    bundles.write_manifest(folder, lying)
    refused(folder)


def test_a_bundle_too_large_for_the_memory_is_refused_before_it_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vtx.runtime.api.load.available_memory", lambda: 1000)
    with pytest.raises(DeviceError, match=r"needs about .* of memory .*; 1 kB is free; .*--force"):
        vtx.load(folder, threads=1)
    forced = vtx.load(folder, threads=1, force=True)
    assert forced.ask("What is this?", options=vtx.Options(max_new_tokens=1)).token_ids
