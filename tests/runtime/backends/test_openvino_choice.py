"""When OpenVINO is chosen, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import bundles
from tests.support.exported import THREADS, Models
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny
from vtx.runtime.api.load import load
from vtx.runtime.backends import devices
from vtx.runtime.backends.devices import choose
from vtx.runtime.backends.engines import AUTO
from vtx.runtime.errors import BundleError, DeviceError

openvino = pytest.importorskip("openvino", reason='openvino is not installed; pip install "vtx-edge[openvino]"')


@pytest.fixture(scope="module")
def bundle_models(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoints) -> Models:
    return Models(tmp_path_factory.mktemp("openvino"), tiny_checkpoint, ("ort", "plain"))


def test_a_bundle_without_plain_graphs_is_refused_with_the_export_option(bundle_models: Models, tmp_path: Path) -> None:
    folder = bundles.copy(bundle_models(Tiny()).bundle.folder, tmp_path / "bundle")
    value = bundles.manifest(folder)
    del value["dialects"]["plain"], value["interface"]["dialects"]["plain"]
    bundles.write_manifest(folder, value)
    with pytest.raises(DeviceError, match=r"'plain'.*--dialect ort,plain"):
        load(folder, device="openvino", threads=THREADS)
    assert load(folder, threads=THREADS).backend.device == "cpu"


def test_a_missing_openvino_is_named_with_its_extra(bundle_models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "openvino")
    with pytest.raises(DeviceError, match=r"openvino is not installed.*vtx-edge\[openvino\]"):
        load(bundle_models(Tiny()).bundle.folder, device="openvino", threads=THREADS)


@pytest.mark.parametrize("release", ["without the operator", "with another"])
def test_a_release_that_cannot_attend_over_blocks_is_refused_with_the_cure(
    bundle_models: Models, monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    def refuse(inputs: Sequence[Any]) -> None:
        raise RuntimeError(f"{len(inputs)} inputs are not what this operator takes")

    if release == "with another":
        monkeypatch.setattr("openvino.op._PagedAttentionExtension", refuse)
    else:
        monkeypatch.delattr("openvino.op._PagedAttentionExtension")
    with pytest.raises(DeviceError, match=r"cannot attend over blocks; pip install -U"):
        load(bundle_models(Tiny()).bundle.folder, device="openvino", threads=THREADS)


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    import vtx.runtime.backends.devices

    find = vtx.runtime.backends.devices.find_spec
    monkeypatch.setattr("vtx.runtime.backends.devices.find_spec", lambda name: None if name in modules else find(name))


@pytest.mark.parametrize(
    ("precision", "hidden", "device"),
    [
        ("fp32", 2048, "openvino"),
        ("fp32", 896, "cpu"),
        ("fp16", 896, "openvino"),
        ("int8", 512, "cpu"),
        ("int4", 4096, "openvino"),
    ],
)
def test_auto_takes_what_was_measured_to_be_faster(
    bundle_models: Models, precision: str, hidden: int, device: str
) -> None:
    bundle = bundle_models(Tiny(), precision=precision).bundle
    manifest = replace(bundle.manifest, model=replace(bundle.manifest.model, hidden=hidden))
    chosen = choose(replace(bundle, manifest=manifest))
    assert chosen.device == device
    assert f"{precision} weights" in chosen.why


def test_auto_takes_what_is_installed_and_says_why(bundle_models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = bundle_models(Tiny()).bundle
    assert choose(bundle, AUTO).device == "cpu"
    hide(monkeypatch, "onnxruntime")
    chosen = choose(bundle, AUTO)
    assert chosen.device == "openvino"
    assert "onnxruntime is not installed" in chosen.why
    hide(monkeypatch, "onnxruntime", "openvino")
    with pytest.raises(DeviceError, match=r"vtx-edge\[cpu\]"):
        choose(bundle, AUTO)


def test_arithmetic_that_a_device_lacks_is_refused(bundle_models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = bundle_models(Tiny()).bundle
    monkeypatch.setattr(devices, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    assert choose(bundle, AUTO, "bf16").device == "openvino"
    with pytest.raises(DeviceError, match=r"cpu computes in f32, not bf16.*openvino"):
        choose(bundle, "cpu", "bf16")
    with pytest.raises(DeviceError, match=r"'f8'.*f32, bf16"):
        choose(bundle, "openvino", "f8")


def test_a_damaged_graph_is_one_line(bundle_models: Models, tmp_path: Path) -> None:
    folder = bundles.copy(bundle_models(Tiny()).bundle.folder, tmp_path / "bundle")
    stage = bundle_models(Tiny()).manifest.dialects["plain"].stages[0]
    (folder / stage).write_bytes(b"\x08\x07 no graph")
    bundles.reseal(folder, stage)
    with pytest.raises(BundleError, match=f"OpenVINO cannot load {stage}") as caught:
        load(folder, device="openvino", threads=THREADS)
    assert "\n" not in str(caught.value)
    (folder / stage).write_bytes((folder / "head.plain.onnx").read_bytes())
    bundles.reseal(folder, stage)
    with pytest.raises(BundleError, match=r"is not the graph that vtx.json says"):
        load(folder, device="openvino", threads=THREADS)
