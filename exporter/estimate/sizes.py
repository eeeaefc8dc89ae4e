"""Sizes of a model for a plan: of one known by name, of a checkpoint's `config.json`, or of a bundle."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtx.exporter.estimate.flops import DecoderSize, VisionSize
from vtx.runtime.errors import BundleError, RequestError

if TYPE_CHECKING:
    from vtx.exporter.checkpoint.config import ModelConfig
    from vtx.runtime.bundle.bundle import Bundle

MAX_GRAPH = 64 << 20

_VICUNA_7B = DecoderSize(layers=32, hidden=4096, ffn=11008, heads=32, kv_heads=32, head_dim=128, vocab=32064)
_VICUNA_13B = DecoderSize(layers=40, hidden=5120, ffn=13824, heads=40, kv_heads=40, head_dim=128, vocab=32064)
_CLIP_L_336 = VisionSize(
    layers=24, used=23, hidden=1024, ffn=4096, patches=576, patch=14, class_token=True,
    features=1, view_tokens=576, image_tokens=576, out=4096,
)  # fmt: skip
# 8 frames of 16 x 16 patches and a class token; pictures and videos have a tower each.
_VIDEO = replace(_CLIP_L_336, patches=256, view_tokens=257, image_tokens=8 * 257, views=8, towers=2)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """One model: `vision` is None where a bundle or a checkpoint has no tower."""

    name: str
    source: str
    decoder: DecoderSize
    vision: VisionSize | None

    @property
    def parameters(self) -> int:
        return self.decoder.parameters + (0 if self.vision is None else self.vision.parameters)

    def views(self, vision_tokens: int) -> int:
        """Passes of the tower that `vision_tokens` in the prompt need, whole images taken."""
        if self.vision is None:
            return 0
        return -(-vision_tokens // self.vision.image_tokens) * self.vision.views

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


# The sizes that the models' public configurations state. LLaVA-NeXT: up to four tiles and the whole picture, the
# 48 x 48 patches of the tiles with a newline token a row, the 24 x 24 of the whole.
KNOWN: Mapping[str, ModelSize] = {
    model.name: model
    for model in (
        ModelSize("llava-1.5-7b", "known", _VICUNA_7B, _CLIP_L_336),
        ModelSize("llava-1.5-13b", "known", _VICUNA_13B, replace(_CLIP_L_336, out=5120)),
        ModelSize("llava-next-7b", "known", _VICUNA_7B, replace(_CLIP_L_336, views=5, image_tokens=576 + 48 * 49)),
        ModelSize("video-llava-7b", "known", _VICUNA_7B, _VIDEO),
        ModelSize("vila-7b", "known", replace(_VICUNA_7B, vocab=32000), _CLIP_L_336),
    )
}


def find_size(model: str) -> ModelSize:
    """Sizes of a known name, of a bundle's directory, or of a checkpoint's directory or `config.json`.

    Raises:
        RequestError: none of these; the message lists the known names.
        BundleError: a damaged bundle.
        CheckpointError: a damaged configuration, or one that vtx does not export.

    """
    if model in KNOWN:
        return KNOWN[model]
    path = Path(model).expanduser()
    if (path / "vtx.json").is_file():
        from vtx.runtime.bundle.bundle import Bundle

        return bundle_size(Bundle.open(path))
    from vtx.exporter.checkpoint.loader import MAX_CONFIG, read_json_object, read_settings

    config = path / "config.json" if path.is_dir() else path
    if not os.path.lexists(config):
        raise RequestError(
            f"{model!r} is no known model ({', '.join(KNOWN)}), and no directory with a config.json or a bundle in it"
        )
    found = read_settings(path, "config.json") if path.is_dir() else read_json_object(config, MAX_CONFIG)
    return config_size(found, config.absolute().parent.name)


def config_size(config: Mapping[str, Any], name: str) -> ModelSize:
    """Sizes of a Hugging Face configuration, read as the exporter reads it; no weights are needed."""
    from vtx.exporter.checkpoint.config import ModelConfig

    return model_size(ModelConfig.from_hf(config), name)


def model_size(config: ModelConfig, name: str) -> ModelSize:
    """Sizes of a configuration that the exporter has read."""
    t, v = config.text, config.vision
    decoder = DecoderSize(
        t.layers, t.hidden, t.ffn, t.heads, t.kv_heads, t.head_dim, t.vocab, t.tied, t.qkv_bias, t.o_bias, t.mlp_bias
    )
    vision = VisionSize(
        layers=v.layers, used=max(config.feature_layers), hidden=v.hidden, ffn=v.ffn, patches=v.grid**2, patch=v.patch,
        class_token=v.family == "clip", features=len(config.feature_layers), view_tokens=config.vision_tokens,
        image_tokens=config.vision_tokens, out=t.hidden, projector_bias=config.projector_bias,
    )  # fmt: skip
    return ModelSize(name, "config", decoder, vision)


# --- bundles --------------------------------------------------------------------------------------


def bundle_size(bundle: Bundle) -> ModelSize:
    """Sizes of a bundle: its manifest, the headers of its weights, and the weights that its graphs name.

    A tower's layers after the last feature layer are not in a bundle, so they do not count here.
    """
    spec, graphs = bundle.manifest.model, bundle.manifest.dialects["ort"]
    vision, stage, head = (_graph(bundle, name) for name in (graphs.vision, graphs.stages[0].graph, graphs.head))
    shape = _shapes(bundle)
    decoder = DecoderSize(
        spec.layers, spec.hidden, shape("layers.0.mlp.gate_proj.weight", 2)[0], spec.heads, spec.kv_heads,
        spec.head_dim, spec.vocab, tied=b"text.embed_tokens.weight" in head,
        qkv_bias=b"text.layers.0.self_attn.q_proj.bias" in stage,
        o_bias=b"text.layers.0.self_attn.o_proj.bias" in stage,
        mlp_bias=b"text.layers.0.mlp.up_proj.bias" in stage,
    )  # fmt: skip
    used = 1 + max((int(n) for n in re.findall(rb"vision\.encoder\.layers\.(\d{1,4})\.", vision)), default=-1)
    hidden, _, patch, _ = shape("embeddings.patch_embedding.weight", 4)
    rows, class_token = shape("embeddings.position_embedding.weight", 2)[0], b"class_embedding" in vision
    ffn = shape("encoder.layers.0.mlp.fc1.weight", 2)[0] if used else hidden
    tower = VisionSize(
        layers=max(used, 1), used=used, hidden=hidden, ffn=ffn, patches=rows - class_token, patch=patch,
        class_token=class_token, features=shape("projector.linear_1.weight", 2)[1] // hidden,
        view_tokens=spec.vision_tokens, image_tokens=spec.vision_tokens, out=spec.hidden,
        projector_bias=b"projector.linear_1.bias" in vision,
    )  # fmt: skip
    return ModelSize(spec.name, "bundle", decoder, tower)


def _graph(bundle: Bundle, name: str) -> bytes:
    """A graph's bytes: its weights are outside, and a weight's name stands in it as it is."""
    return bundle.read(name, MAX_GRAPH)


def _shapes(bundle: Bundle) -> Callable[[str, int], tuple[int, ...]]:
    """`shape(end, dimensions)` of the one weight whose name ends so, whoever named it, and has so many dimensions."""
    tensors: dict[str, tuple[int, ...]] = {}
    for file in bundle.manifest.files:
        if file.startswith("weights/"):
            found = bundle.header(file).tensors
            # Two weights of 4 bits to a byte.
            tensors |= {n: (*i.shape[:-1], 2 * i.shape[-1]) if i.dtype == "U8" else i.shape for n, i in found.items()}

    def shape(end: str, dimensions: int) -> tuple[int, ...]:
        fits = [s for name, s in tensors.items() if f".{name}".endswith(f".{end}") or name.endswith(f"_{end}")]
        if len(fits) != 1 or len(fits[0]) != dimensions:
            raise BundleError(f"{bundle.folder.name} has no weight {end} of {dimensions} dimensions; export again")
        return fits[0]

    return shape
