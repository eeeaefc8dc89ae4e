"""Manifests that were altered are refused by name in libvtx, and refused in Python."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.cpp import failure, needs_cpp
from tests.support.exported import Models
from tests.support.families.gemma import GEMMA3, GEMMA4
from tests.support.families.glm_ocr import GLM_OCR
from tests.support.families.lfm2_vl import LFM2
from tests.support.families.minicpm import MINICPM
from tests.support.families.qwen import QWEN2, QWEN35
from tests.support.families.smolvlm import SMOLVLM
from tests.support.families.videos import VIDEO_LLAVA
from tests.support.json_files import read_json, write_json
from tests.support.tiny import Tiny
from vtx.runtime.bundle.vtx_json import parse_manifest
from vtx.runtime.errors import BundleError
from vtx.runtime.vision.layouts import read_layout

pytestmark = needs_cpp
CROPS = replace(GEMMA3, crops=3, context=512)


IMAGE = object()  # in place of the id of an image's token
ALTERED: list[tuple[Tiny, dict[str, Any], str]] = [
    (GEMMA3, {"model": {"sliding": {"layers": []}}}, "model.sliding names layers [] of 8"),
    (GEMMA3, {"model": {"sliding": {"layers": [9]}}}, "model.sliding names layers [9] of 8"),
    (GEMMA3, {"model": {"sliding": {"window": 0}}}, "window is 0, outside 1..2147483647"),
    (GEMMA3, {"model": {"sliding": {"head_dim": 22}}}, "12 rotary frequencies do not fit heads of 22"),
    (GEMMA3, {"model": {"sliding": {"other": 1}}}, "unknown key 'other'"),
    (GEMMA3, {"model": {"two_way": "all"}}, "'all', unknown to this vtx, which has prompt, images"),
    (GEMMA3, {"model": {"two_way": None}}, "interface is"),
    (GEMMA3, {"model": {"tower": {"tokens": 4}}}, "interface is"),
    (CROPS, {"layout": {"parameters": {"most": 65}}}, "at most 64 crops"),
    (CROPS, {"layout": {"parameters": {"ratio": 0.5}}}, "a ratio of at least 1"),
    (GEMMA4, {"model": {"shared": 1}}, "model.shared is 1, and each layer from it to the last, 9, needs one"),
    (GEMMA4, {"model": {"shared": 2}}, "model.shared is 2, and each layer from it to the last, 9, needs one"),
    (GEMMA4, {"model": {"shared": 8}}, "do not cut 9 layers|declares caches"),
    (GEMMA4, {"layout": {"parameters": {"tokens": 71}}}, "it needs one of 70, 140, 280, 560, 1120"),
    (GEMMA4, {"layout": {"parameters": {"pool": 2}}}, "the image layout has tokens of 2 x 2 patches"),
    (GEMMA4, {"model": {"tower": {"positions": "table"}}}, "the image layout has tokens of 3 x 3 patches"),
    (GLM_OCR, {"layout": {"parameters": {"small": "twice"}}}, "'twice', unknown to this vtx, which has floored"),
    (GLM_OCR, {"layout": {"parameters": {"flat": 1}}}, "flat is '1', not bool"),
    (LFM2, {"model": {"conv_taps": 17}}, "convolutions of 17 taps in the layers"),
    (LFM2, {"model": {"conv_taps": 1}}, "they have 2 to 16 taps"),
    (LFM2, {"model": {"conv_layers": [2, 1]}}, "in the layers [2, 1] do not fit"),
    (LFM2, {"model": {"conv_layers": [99]}}, "conv_layers is '[99]', not a list of numbers in range"),
    (LFM2, {"model": {"conv_layers": []}}, "keeps states in layers"),
    (LFM2, {"model": {"conv_taps": 4}}, "interface is"),
    (LFM2, {"layout": {"parameters": {"tile": 56}}}, "do not fit|tiles of 56"),
    (LFM2, {"layout": {"parameters": {"most": 65}}}, "it needs 2 to 64 tiles"),
    (LFM2, {"layout": {"parameters": {"tolerance": 0.5}}}, "and 1 times or more"),
    (LFM2, {"model": {"tower": {"positions": "table"}}}, "has tokens of 2 x 2 patches of 8 pixels and tiles"),
    (QWEN35, {"model": {"delta": {"value_heads": 3}}}, "3 value heads cannot share"),
    (QWEN35, {"model": {"delta": {"key_dim": 1 << 30, "value_dim": 1 << 30}}}, "more than 2147483647 numbers"),
    (QWEN35, {"model": {"delta": {"key_dim": 0}}}, "key_dim is 0, outside 1..2147483647"),
    (QWEN35, {"model": {"delta": {"other": 1}}}, "unknown key 'other'"),
    (MINICPM, {"model": {"tower": {"positions": "spiral"}}}, "model.tower has unknown positions, 'spiral'"),
    (MINICPM, {"model": {"tower": {"square": 2}}}, "4 x 4 patches of 8 pixels, the tower of 2 x 2 of 8"),
    (MINICPM, {"model": {"tower": {"positions": "table"}}}, "has tokens of 4 x 4 patches of 8 pixels, the tower"),
    (MINICPM, {"layout": {"parameters": {"most": 65}}}, "has up to 65 slices of 64 x 64 pixels"),
    (MINICPM, {"layout": {"parameters": {"side": 31}}}, "it needs 1 to 64 slices of at least one token"),
    (MINICPM, {"layout": {"parameters": {"side": 1 << 30}}}, "and at most 33,554,432 pixels in all"),
    (MINICPM, {"layout": {"parameters": {"merge": 2}}}, "gives at most|tokens of 2 x 2 patches"),
    (MINICPM, {"layout": {"parameters": {"numbered": 1}}}, "numbered is '1', not bool"),
    (MINICPM, {"layout": {"max_tokens": 5}}, "layout.max_tokens is 5"),
    (MINICPM, {"image": {"crop": [64, 64]}}, "null, as pad and resize, where the layout resizes"),
    (LFM2, {"stages": {0: {"caches": ["slots"]}}}, "declares caches ['slots']; it needs one kind a layer"),
    (LFM2, {"stages": {0: {"caches": ["slots", "ring"]}}}, "with a cache of the kind 'ring' are unknown to this vtx"),
    (LFM2, {"stages": {0: {"caches": ["none", "none"]}}}, "declares caches ['none', 'none']; it needs one kind a"),
    (LFM2, {"stages": {0: {"caches": ["slots", "slots"]}}}, "keeps states in layers []"),
    (
        QWEN2, {"model": {"rope": {"sections": [1, 2, 3, 2]}}},
        "rope.sections [1, 2, 3, 2] do not divide 8 frequencies in 3",
    ),
    (QWEN2, {"model": {"rope": {"sections": [1, 1, 1]}}}, "rope.sections [1, 1, 1] do not divide 8 frequencies in 3"),
    (QWEN2, {"layout": {"min_tokens": 5}}, "layout.min_tokens 5 is not that of 'native'"),
    (QWEN2, {"model": {"tower": {"positions": "table"}}}, "image layout has tokens of 2 x 2 patches of 14 pixels, the"),
    (QWEN2, {"image": {"crop": [56, 56]}}, "image setting crop is not null"),
    (QWEN2, {"layout": {"name": "single"}}, "image setting crop is null"),
    (SMOLVLM, {"layout": {"parameters": {"side": 9}}}, "layout 'marked' has 9 tiles a side of"),
    (SMOLVLM, {"layout": {"parameters": {"side": 0}}}, "layout 'marked'.side is 0, outside 1.."),
    (SMOLVLM, {"layout": {"parameters": {"most": 0}}}, "layout 'marked'.most is 0, outside 1.."),
    (SMOLVLM, {"layout": {"parameters": {"tokens": 3}}}, "gives at most"),
    (SMOLVLM, {"layout": {"parameters": {"tile": 1 << 20}}}, "layout 'marked'.tile is 1048576, outside 1..2048"),
    (SMOLVLM, {"layout": {"parameters": {"columns": 1}}}, "layout 'marked': unknown key 'columns'"),
    (SMOLVLM, {"text": {"image_token": ""}}, "vtx.json: text: image_token is "),
    (VIDEO_LLAVA, {"text": {"video_token_id": IMAGE}}, "video_token_id"),
    (
        VIDEO_LLAVA, {"text": {"video_token": None, "video_token_id": None}},
        "videos, their token and their graph go together",
    ),
]  # fmt: skip


def altered_by(value: Any, changes: Any, image: int) -> Any:
    """The value with other parts, by key or number."""
    if not isinstance(changes, dict):
        return image if changes is IMAGE else changes
    value = value.copy()
    for key, change in changes.items():
        old = value.get(key) if isinstance(value, dict) else value[key]
        value[key] = change if old is None else altered_by(old, change, image)
    return value


@pytest.mark.sampled(60)
@pytest.mark.parametrize(("tiny", "changes", "named"), ALTERED, ids=lambda value: getattr(value, "family", None))
def test_altered_manifests_are_refused_by_both_runtimes(
    models: Models, tmp_path: Path, tiny: Tiny, changes: dict[str, Any], named: str
) -> None:
    written: dict[str, Any] = read_json(models(tiny, (3, 5)).bundle.folder / "vtx.json")
    altered = altered_by(written, changes, written["text"]["image_token_id"])
    write_json(tmp_path / "vtx.json", altered)
    refused = failure("probe", "parse", "manifest", tmp_path / "vtx.json")
    assert any(part in refused for part in named.split("|")), refused
    with pytest.raises(BundleError):
        read_in_python(json.dumps(altered))


def read_in_python(altered: str) -> None:
    manifest = parse_manifest(altered)
    read_layout(manifest.layout, manifest.model.tower)
