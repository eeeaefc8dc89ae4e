"""What a bundle declares of a model is what its configuration says, and back."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.json_files import read_json
from tests.support.tiny import Tiny, make
from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.exporter.checkpoint.spec import config_of, model_spec
from vtx.runtime.bundle.spec.model_spec import ModelSpec
from vtx.runtime.errors import BundleError
from vtx.runtime.strict import Strict, json_value
from vtx.runtime.vision.layouts import spec_of

VARIANTS = (
    Tiny(vision="siglip", attention_bias=True, mlp_bias=True, rope="llama3", feature_layer=(-2, -1)),
    Tiny(family="internvl", vision="internvl", names="saved"),
    Tiny(family="vipllava", text="qwen2"),
)


def configured(folder: Path, tiny: Tiny = Tiny()) -> ModelConfig:  # noqa: B008 - frozen
    return read_config(read_json(make(folder, tiny) / "config.json"))


def declared(config: ModelConfig, spec: ModelSpec) -> Any:
    text, layout = SimpleNamespace(image_token_id=config.image_token_id), spec_of(config.layout)
    return SimpleNamespace(model=spec, layout=layout, text=text, action=config.action, bins=config.bins)


@pytest.mark.sampled
@pytest.mark.parametrize("tiny", VARIANTS, ids=lambda tiny: str(tiny.family))
def test_a_configuration_comes_back_from_the_manifest_as_it_was(tiny: Tiny, tmp_path: Path) -> None:
    config = configured(tmp_path, tiny)
    spec = Strict().read(ModelSpec, json.loads(json.dumps(json_value(model_spec(config, "it")))), "model")
    assert config_of(declared(config, spec)) == config


def test_facts_are_stated_once(tmp_path: Path) -> None:
    parts = model_spec(configured(tmp_path, VARIANTS[1]), "it").parts
    assert not {field.name for field in fields(ModelSpec)} & parts.text.keys()


@pytest.mark.parametrize("part", ["text", "vision"])
def test_a_flag_of_another_release_is_refused_by_name(tmp_path: Path, part: str) -> None:
    config = configured(tmp_path)
    spec = model_spec(config, "it")
    getattr(spec.parts, part)["wobble"] = True
    with pytest.raises(BundleError, match=f"model.parts.{part}: unknown key 'wobble'"):
        config_of(declared(config, spec))
