"""A configuration as a bundle declares it, and back."""

from __future__ import annotations

from vtx.exporter.checkpoint.config import ModelConfig, Rope, TextConfig, VisionConfig
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.bundle.spec.model_spec import ModelSpec, ProjectorSpec, RopeSpec, TowerSpec
from vtx.runtime.vision.layout import read_layout


def model_spec(config: ModelConfig, name: str) -> ModelSpec:
    """The sizes of a model called `name`."""
    text, vision, rope = config.text, config.vision, config.text.rope
    tower = TowerSpec(
        family=vision.family, layers=vision.layers, hidden=vision.hidden, intermediate=vision.ffn, heads=vision.heads,
        image=vision.image, patch=vision.patch, class_token=vision.class_token, feature_layers=config.feature_layers,
        select=config.select, activation=vision.activation, eps=vision.eps,
        qkv_bias=vision.qkv_bias, layer_scale=vision.layer_scale, shuffle=vision.shuffle,
    )  # fmt: skip
    return ModelSpec(
        name=name, family=text.family, layers=text.layers, hidden=text.hidden, intermediate=text.ffn, heads=text.heads,
        kv_heads=text.kv_heads, head_dim=text.head_dim, vocab=text.vocab, max_positions=text.max_positions,
        eps=text.eps, activation=text.activation, tied=text.tied, qkv_bias=text.qkv_bias, o_bias=text.o_bias,
        mlp_bias=text.mlp_bias, rope=RopeSpec(rope.kind, rope.theta, rope.inverse_frequencies), tower=tower,
        projector=ProjectorSpec(
            text.hidden, config.projector_activation, config.projector_bias, config.projector_norm_eps
        ),
    )  # fmt: skip


def config_of(manifest: Manifest) -> ModelConfig:
    """The configuration that a bundle was exported from, as far as it concerns the bundle."""
    m, tower, rope = manifest.model, manifest.model.tower, manifest.model.rope
    text = TextConfig(
        family=m.family, layers=m.layers, hidden=m.hidden, ffn=m.intermediate, heads=m.heads, kv_heads=m.kv_heads,
        head_dim=m.head_dim, vocab=m.vocab, eps=m.eps, activation=m.activation, qkv_bias=m.qkv_bias, o_bias=m.o_bias,
        mlp_bias=m.mlp_bias, tied=m.tied, rope=Rope(rope.kind, rope.theta, rope.frequencies),
        max_positions=m.max_positions,
    )  # fmt: skip
    vision = VisionConfig(
        family=tower.family, layers=tower.layers, hidden=tower.hidden, ffn=tower.intermediate, heads=tower.heads,
        image=tower.image, patch=tower.patch, eps=tower.eps, activation=tower.activation,
        qkv_bias=tower.qkv_bias, layer_scale=tower.layer_scale, shuffle=tower.shuffle,
    )  # fmt: skip
    return ModelConfig(
        text=text, vision=vision, feature_layers=tower.feature_layers, select=tower.select,
        projector_activation=m.projector.activation, projector_bias=m.projector.bias,
        projector_norm_eps=m.projector.norm_eps,
        image_token_id=manifest.text.image_token_id, layout=read_layout(manifest.layout, tower),
    )  # fmt: skip
