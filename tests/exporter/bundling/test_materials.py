"""The bill of materials in a bundle's record."""

from __future__ import annotations

from importlib import metadata

from vtx.exporter.bundling.build import DISTRIBUTION, packages


def test_every_package_that_took_part_is_named_with_its_version() -> None:
    named = packages(f"{DISTRIBUTION}[export]")
    assert {"torch", "transformers", "onnx-ir", "numpy", "safetensors", DISTRIBUTION} <= set(named)
    assert named["markupsafe"] == metadata.version("markupsafe"), "what a dependency depends on counts too"
    assert named["numpy"] == metadata.version("numpy")


def test_packages_of_other_extras_are_not_materials() -> None:
    assert "openvino" in packages(f"{DISTRIBUTION}[openvino]")
    assert not {"openvino", "ruff", "hypothesis"} & set(packages(f"{DISTRIBUTION}[export]"))


def test_what_is_not_installed_is_left_out() -> None:
    assert packages("no-such-distribution") == {}
