"""The manifest's sizes of a configuration, and back. Fields of the same name are copied, without a list of them.

A flag of a decoder or a tower without a field of its own is one of the manifest's `flags`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, TextConfig, VisionConfig
from vtx.exporter.checkpoint.fields import Rope
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.bundle.spec.model_spec import ModelSpec, ProjectorSpec, RopeSpec, TowerSpec
from vtx.runtime.errors import BundleError
from vtx.runtime.vision.layouts import read_layout


def model_spec(config: ModelConfig, name: str) -> ModelSpec:
    """The sizes of a model called `name`."""
    text, vision, rope = config.text, config.vision, config.text.rope
    tower = TowerSpec(
        **_declared(vision, TowerSpec),
        intermediate=vision.ffn,
        feature_layers=config.feature_layers,
        select=config.select,
    )
    projector = ProjectorSpec(
        config.projector_width,
        config.projector_activation,
        config.projector_bias,
        config.projector_norm_eps,
        config.projector_layers,
    )
    sizes = _declared(text, ModelSpec) | {
        "rope": RopeSpec(rope.kind, rope.theta, rope.inverse_frequencies, rope.sections, rope.scale)
    }
    return ModelSpec(**sizes, name=name, intermediate=text.ffn, tower=tower, projector=projector)


def config_of(manifest: Manifest) -> ModelConfig:
    """The part of a checkpoint's configuration that its bundle holds.

    Raises BundleError for an unknown flag of the decoder or the tower.
    """
    m, tower, rope = manifest.model, manifest.model.tower, manifest.model.rope
    sizes = _configured(m, TextConfig) | {
        "rope": Rope(rope.kind, rope.theta, rope.frequencies, rope.sections, rope.scale)
    }
    return ModelConfig(
        text=TextConfig(**sizes, ffn=m.intermediate),
        vision=VisionConfig(**_configured(tower, VisionConfig), ffn=tower.intermediate),
        feature_layers=tower.feature_layers,
        select=tower.select,
        projector_activation=m.projector.activation,
        projector_bias=m.projector.bias,
        projector_norm_eps=m.projector.norm_eps,
        projector_layers=m.projector.layers,
        image_token_id=manifest.text.image_token_id,
        layout=read_layout(manifest.layout, tower),
    )


def _names(kind: type[TextConfig | VisionConfig | ModelSpec | TowerSpec]) -> set[str]:
    return {field.name for field in fields(kind)}


def _declared(part: TextConfig | VisionConfig, kind: type[ModelSpec | TowerSpec]) -> dict[str, Any]:
    """The values of `part` that have a field in the manifest, and its other flags."""
    shared = {name: getattr(part, name) for name in _names(kind) if hasattr(part, name)}
    others = sorted(_names(type(part)) - set(shared))
    return shared | {"flags": tuple(name for name in others if getattr(part, name) is True)}


def _configured(part: ModelSpec | TowerSpec, kind: type[TextConfig | VisionConfig]) -> dict[str, Any]:
    """The values that have a field in `kind`, and the flags that are set."""
    unknown = sorted(set(part.flags) - _names(kind))
    if unknown:
        raise BundleError(
            f"vtx.json: the flag {unknown[0]!r:.60} of the model is unknown to this vtx; "
            'upgrade it with pip install -U "vtx-edge"'
        )
    shared = {name: getattr(part, name) for name in _names(type(part)) & _names(kind)}
    return shared | dict.fromkeys(part.flags, True)
