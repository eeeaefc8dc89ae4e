"""LFM2-VL: layers that keep a state in place of K and V, which goes back with the conversation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bundles import export
from tests.support.families.lfm2_vl import LFM2, geometry
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json
from tests.support.tiny import edited
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.errors import CheckpointError, DeviceError, RequestError, UnsupportedModelError
from vtx.runtime.vision.layouts import read_layout

KS = (2, 3, 5, 8)  # 2 and 8 leave stages without attention
WIDE, HIGH = (150, 60), (40, 90)  # of 3 tiles and a whole image, of one piece


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny_checkpoint(LFM2), tmp_path_factory.mktemp("lfm2") / "bundle", KS, "fp32").folder


@pytest.mark.sampled
def test_sizes_tiles_and_tokens_are_those_of_transformers_functions(folder: Path) -> None:
    from types import SimpleNamespace

    from vtx.exporter.checkpoint.families.lfm2_vl import DEFAULTS, KEYS
    from vtx.runtime.vision.layouts.native_tiles import NativeTiles

    settings = SimpleNamespace(
        **dict(zip(KEYS, DEFAULTS, strict=True)), encoder_patch_size=16, downsample_factor=2,
        max_pixels_tolerance=2.0, do_image_splitting=True,
    )  # fmt: skip
    layout = NativeTiles(16, 2, 64 * 1024, 256 * 1024, 512, 2, 10, 2.0, True)
    rng = np.random.default_rng(0)
    sizes = [(640, 480), (1024, 1024), (1920, 1080), (720, 724), (2400, 12), (12, 2400), (3, 3), (512, 1024)]
    sizes += [(int(width), int(width * 2 ** rng.uniform(-4, 4)) or 1) for width in rng.integers(1, 4000, 300)]
    for size in sizes:
        (width, height), (columns, rows) = geometry(settings, *size)
        whole = width * height // 1024
        tokens = whole if columns * rows == 1 else whole + 256 * columns * rows
        assert layout.count(*size) == tokens <= layout.max_tokens
        assert layout.passes(*size) == (1 if columns * rows == 1 else columns * rows + 1) <= layout.max_views


def test_fewer_tiles_are_as_transformers_has_them_with_fewer(model: Model) -> None:
    layout = read_layout(model.manifest.layout, model.manifest.model.tower)
    assert layout.passes(*WIDE) == 4
    assert layout.limited(3).passes(*WIDE) == 3
    assert layout.limited(1).passes(*WIDE) == layout.limited(2).passes(*WIDE) == 1
    with pytest.raises(RequestError, match="use max_tiles"):
        layout.within(4096)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layer_types": ["conv"] * 8}, "none of this model's layers has attention"),
        ({"layer_types": ["conv", "full_attention"]}, "layer_types names 2 layers, num_hidden_layers 8|layer_types"),
        (
            {"layer_types": ["mamba", *["full_attention"] * 7]},
            "layers of the kind .* are not supported; vtx exports conv",
        ),
        ({"conv_L_cache": 1}, "conv_L_cache 1 is not supported; vtx exports convolutions over 2 to 16 tokens"),
        ({"conv_L_cache": 0}, "conv_L_cache 0 is not supported"),
        ({"conv_L_cache": -3}, "conv_L_cache -3 is not supported"),
        ({"conv_L_cache": 5}, "has shape"),
        ({"conv_L_cache": "3"}, "conv_L_cache"),
        ({"block_ffn_dim_multiplier": 0.0}, "block_ffn_dim_multiplier"),
        ({"block_multiple_of": 0}, "block_multiple_of"),
    ],
    ids=str,
)
def test_text_models_that_do_not_fit_are_refused_by_name(
    tiny_checkpoint: Checkpoints, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    checkpoint = tiny_checkpoint(replace(LFM2, names="saved"))
    text = read_json(checkpoint / "config.json")["text_config"]
    broken = edited(checkpoint, tmp_path / "broken", "config.json", {"text_config": text | change})
    with pytest.raises((CheckpointError, UnsupportedModelError), match=reason):
        plan_export(ExportOptions(str(broken), (), "fp32"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"min_tiles": 1}, "min_tiles is 1; vtx cuts images in 2 tiles or more, or none"),
        ({"tile_size": 40}, "tiles of 40 pixels"),
        ({"max_tiles": 0}, "max_tiles is 0"),
        ({"max_pixels_tolerance": 0.5}, "over 0.5 times"),
        ({"encoder_patch_size": 14}, "encoder_patch_size is 14, the tower's is 8"),
        ({"min_image_tokens": 99}, "at least one token must fit"),
        ({"use_thumbnail": "yes"}, "must be true or false"),
    ],
    ids=str,
)
def test_image_processors_that_do_not_fit_are_refused_by_name(
    tiny_checkpoint: Checkpoints, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    broken = edited(tiny_checkpoint(LFM2), tmp_path / "broken", "preprocessor_config.json", change)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=reason):
        plan_export(ExportOptions(str(broken), (), "fp32"))


def test_graphs_for_gpus_are_exported(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    plan = plan_export(ExportOptions(str(tiny_checkpoint(LFM2)), (3,), "fp32"))
    assert not plan.warnings
    assert [*plan.dialects] == [*DIALECTS]
    bundle = export(tiny_checkpoint(LFM2), tmp_path / "bundle", (3,), dialects=("ort", "trt"))
    with pytest.raises(DeviceError, match="holds no engines"):
        load(bundle.folder, device="tensorrt")
