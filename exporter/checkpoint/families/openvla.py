"""OpenVLA in its authors' layout: DINOv2's and SigLIP's features side by side, and a llama whose tokens are actions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vtx.exporter.checkpoint.config import ModelConfig, check_layers, check_values, parse, part_of
from vtx.exporter.checkpoint.family import SIGLIP_DEFAULTS, Config, Family, ImageProcessor, OriginalLayout, WholeLayout
from vtx.exporter.checkpoint.fields import NUMBERS
from vtx.exporter.checkpoint.original.known_towers import thirds
from vtx.exporter.checkpoint.text_config import text_config_of
from vtx.runtime.bundle.safetensors import TensorInfo
from vtx.runtime.bundle.spec.action_spec import ActionBins, ActionRange
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.single import Single
from vtx.tools.model.vision import VisionConfig

if TYPE_CHECKING:
    from vtx.runtime.prompt.text import Text

NORM_EPS = 1e-6  # of timm's towers: no setting
LLAMAS = (  # names of the released code, which makes a llama for these whatever text_config says
    "llama2-7b-pure",
    "llama2-13b-pure",
    "llama2-7b-chat",
    "llama2-13b-chat",
    "vicuna-v15-7b",
    "vicuna-v15-13b",
)
EMPTY = 29871  # the token with which every prompt ended in training: the mark of a space
BEFORE = "In: What action should the robot take to "
AFTER = "?\nOut:"
# The towers' sizes, which are in no file of a checkpoint; `image` is config.json's.
TOWERS: dict[str, VisionConfig] = {
    "vit_large_patch14_reg4_dinov2.lvd142m": VisionConfig(
        "dinov2", 24, 1024, 4096, 16, 224, 14, NORM_EPS, "gelu", layer_scale=True, registers=4
    ),
    "vit_so400m_patch14_siglip_224": VisionConfig("siglip", 27, 1152, 4304, 16, 224, 14, NORM_EPS, "gelu"),
}
# One question is one prompt; the space behind it is the token EMPTY.
TEMPLATE = (
    "{%- if messages | length != 1 or messages[0]['role'] != 'user' -%}"
    "{{ raise_exception('this model takes one instruction, without a system prompt and earlier turns') }}"
    "{%- endif -%}{{- bos_token -}}"
    "{%- for part in messages[0]['content'] if part['type'] == 'image' -%}{{- image_token -}}{%- endfor -%}"
    f"{{{{- '{BEFORE}' -}}}}"
    "{%- for part in messages[0]['content'] if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}"
    "{{- '?\\nOut: ' -}}"
)
_TOWER_NAMES = {"vision_backbone.featurizer.": "vision.", "vision_backbone.fused_featurizer.": "vision.beside."}
_NAMES = (
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."), (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding.weight"), (r"^reg_token$", "embeddings.registers"),
    (r"^blocks\.(\d+)\.norm([12])\.", r"encoder.layers.\1.layer_norm\2."),
    (r"^blocks\.(\d+)\.attn\.proj\.", r"encoder.layers.\1.self_attn.out_proj."),
    (r"^blocks\.(\d+)\.attn\.", r"encoder.layers.\1.self_attn."),
    (r"^blocks\.(\d+)\.ls([12])\.\w+$", r"encoder.layers.\1.lambda_\2"),
    (r"^blocks\.", "encoder.layers."),
)  # fmt: skip


def _read(config: Config) -> ModelConfig:
    known = {"use_fused_vision_backbone": (None, True), "llm_backbone_id": (None, *LLAMAS)}
    check_values(config, "an OpenVLA", known)
    names = config.get("timm_model_ids")
    towers = [TOWERS.get(name) if isinstance(name, str) else None for name in names] if isinstance(names, list) else []
    first, second = towers if len(towers) == 2 else (None, None)
    if first is None or second is None or not first.registers or second.class_token:
        raise UnsupportedModelError(
            f"timm_model_ids {names!r:.120} are not supported; vtx supports {' and '.join(TOWERS)}, in this order"
        )
    if config.get("timm_override_act_layers") not in (None, [None, None]):
        raise UnsupportedModelError("timm_override_act_layers is not supported; vtx supports the towers' own")
    side = _side(config)
    if first.patch != second.patch or not first.patch <= side <= 1 << 14:
        raise UnsupportedModelError(
            f"images of {side} pixels are not supported with towers of {first.patch} x "
            f"{first.patch} and {second.patch} x {second.patch} patches"
        )
    settings = part_of(config, "text_config")
    check_layers(settings)
    parsed = parse("LlamaConfig", settings)
    tied = bool(parsed.tie_word_embeddings)
    text = text_config_of(SimpleNamespace(text_config=parsed, tie_word_embeddings=tied))
    tower = replace(first, image=side, beside=replace(second, image=side))
    return ModelConfig(
        text=text,
        vision=tower,
        feature_layers=(tower.layers - 1,),
        select="default",
        projector_activation="gelu",
        projector_bias=True,
        image_token_id=config.get("image_token_id", 0),  # from the tokenizer's files
        layout=Single(tower.grid**2),
        projector_layers=3,
        projector_widths=(4 * (first.hidden + second.hidden), text.hidden),
        bins=_bins(config, text.vocab),
    )


def _side(config: Config) -> int:
    """The side of both towers' pictures."""
    sides = config.get("image_sizes")
    if not isinstance(sides, list) or len(sides) != 2 or sides[0] != sides[1] or type(sides[0]) is not int:
        raise CheckpointError(f"config.json: image_sizes is {sides!r:.60}; it must be one size twice, e.g. [224, 224]")
    return sides[0]


def _bins(config: Config, vocab: int) -> ActionBins:
    padding = config.get("pad_to_multiple_of", 64)
    edges = config.get("n_action_bins", 256)
    sets = config.get("norm_stats")
    if type(padding) is not int or type(edges) is not int or not 0 <= padding < vocab:
        raise CheckpointError(
            f"config.json: pad_to_multiple_of is {padding!r:.40} and n_action_bins {edges!r:.40}; both must be whole "
            f"numbers, and the first less than the vocabulary's {vocab}"
        )
    if not isinstance(sets, Mapping) or not sets:
        raise CheckpointError(
            "config.json has no norm_stats, which say what the tokens of an action mean; add the statistics of your "
            "data set, as training wrote them"
        )
    ranges = {str(name): _range(str(name), stated) for name, stated in sets.items()}
    try:
        return ActionBins(vocab - padding, edges, ranges)
    except BundleError as e:
        raise CheckpointError(f"config.json: {str(e).removeprefix('vtx.json: ')}") from e


def _range(name: str, stated: Any) -> ActionRange:
    """The range of an action's numbers in the data set `name`, of its statistics."""
    action = stated.get("action") if isinstance(stated, Mapping) else None
    if not isinstance(action, Mapping):
        raise CheckpointError(f"config.json: norm_stats of {name[:60]!r} has no statistics of actions; add them")
    found = dict[str, list[Any]]()
    for key, kinds in (("q01", (int, float)), ("q99", (int, float)), ("mask", (bool,))):
        values = action.get(key, [True] * len(found.get("q01", ())) if key == "mask" else None)
        if not isinstance(values, list) or not all(type(v) in kinds and abs(v) <= NUMBERS[1] for v in values):
            raise CheckpointError(
                f"config.json: {key} in norm_stats of {name[:60]!r} is {values!r:.60}, not a list of "
                f"{'true and false' if key == 'mask' else 'finite numbers'}; correct it"
            )
        found[key] = values
    if len({*map(len, found.values())}) != 1:
        counts = ", ".join(f"{len(values)} of {key}" for key, values in found.items())
        raise CheckpointError(f"config.json: norm_stats of {name[:60]!r} have {counts}; there must be as many of each")
    try:
        return ActionRange(tuple(map(float, found["q01"])), tuple(map(float, found["q99"])), tuple(found["mask"]))
    except BundleError as e:
        raise CheckpointError(f"config.json: norm_stats of {name[:60]!r}: {str(e).removeprefix('vtx.json: ')}") from e


def _statistics(processor: Config) -> list[tuple[list[float], list[float]]]:
    """The means and deviations of each tower's pixel values.

    They are those of `tvf_normalize_params` if the file has them, as in the released code: the published ones are the
    `means` and `stds` in bfloat16.
    """
    means = processor.get("means")
    stds = processor.get("stds")
    stated = processor.get("tvf_normalize_params")
    if isinstance(stated, list) and all(isinstance(tower, Mapping) for tower in stated):
        means = [tower.get("mean") for tower in stated]
        stds = [tower.get("std") for tower in stated]
    return [*zip(_of_towers("means", means, -NUMBERS[1]), _of_towers("stds", stds, 0), strict=True)]


def _of_towers(name: str, values: Any, least: float) -> list[list[float]]:
    """Three numbers above `least` for each of two towers. Raises CheckpointError for anything else."""
    lists = values if isinstance(values, list) else []
    numbers = [number for colours in lists if isinstance(colours, list) for number in colours]
    if [len(colours) if isinstance(colours, list) else 0 for colours in lists] != [3, 3] or not all(
        type(number) in (int, float) and least < number < NUMBERS[1] for number in numbers
    ):
        raise CheckpointError(
            f"preprocessor_config.json: {name} is {values!r:.80}; it must be two lists of 3 numbers; download it again"
        )
    return lists


def _processor(config: Config, processor: Config) -> Config:
    """The first tower's pictures; the second's pixel values are made of these in its graph."""
    for file, settings in (("config.json", config), ("preprocessor_config.json", processor)):
        strategy = settings.get("image_resize_strategy")
        if strategy != "resize-naive":
            raise UnsupportedModelError(
                f"{file}: image_resize_strategy {strategy!r:.40} is not supported; vtx supports resize-naive"
            )
    side = _side(config)
    for name, wanted in (("input_sizes", [[3, side, side]] * 2), ("interpolations", ["bicubic"] * 2)):
        if processor.get(name) != wanted:
            raise UnsupportedModelError(
                f"preprocessor_config.json: {name} {processor.get(name)!r:.80} is not supported; vtx supports {wanted}"
            )
    mean, std = _statistics(processor)[0]
    return {
        "image_processor_type": PRISMATIC.name,
        "size": {"height": side, "width": side},
        "image_mean": mean,
        "image_std": std,
    }


def _adjust(model: ModelConfig, processor: Config) -> ModelConfig:
    """With the map from the first tower's pixel values to the second's."""
    (mean, std), (other_mean, other_std) = _statistics(processor)
    assert model.vision.beside is not None
    second = replace(
        model.vision.beside,
        pixel_scale=tuple(a / b for a, b in zip(std, other_std, strict=True)),
        pixel_shift=tuple((a - b) / c for a, b, c in zip(mean, other_mean, other_std, strict=True)),
    )
    return replace(model, vision=replace(model.vision, beside=second))


def _tensors(_: Config, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors with the towers' by their canonical names, q, k and v separated, and tables without axes of 1."""
    for name, info in thirds(tensors):
        tower = next((tower for tower in _TOWER_NAMES if name.startswith(tower)), None)
        if tower is None:
            yield name, info
            continue
        rest = name.removeprefix(tower)
        axes = {"pos_embed": 1, "reg_token": 1, "cls_token": 2}.get(rest, 0)
        if axes and info.shape[:axes] == (1,) * axes:
            info = replace(info, shape=info.shape[axes:])
        renamed = next((re.sub(old, new, rest) for old, new in _NAMES if re.search(old, rest)), rest)
        yield _TOWER_NAMES[tower] + renamed, info


def _check(text: Text) -> None:
    from vtx.runtime.prompt.tokenizer import encode

    parts: Any = [{"type": "image"}, {"type": "text", "text": "move"}]
    found = text.prompt([{"role": "user", "content": parts}], 1).tolist()
    words = encode(text.tokenizer, f"{BEFORE}move{AFTER}").ids
    wanted = [text.tokenizer.token_to_id(str(text.settings.bos_token)), text.settings.image_token_id, *words, EMPTY]
    if found != wanted:
        raise CheckpointError(
            f"the tokenizer begins a prompt with {found[:4]} and ends it with {found[-2:]}, OpenVLA was trained with "
            f"{wanted[:4]} and {wanted[-2:]}; use the tokenizer that belongs to the model, its tokenizer.model too"
        )


PRISMATIC = ImageProcessor("PrismaticImageProcessor", SIGLIP_DEFAULTS)
FAMILY = Family(
    model_type="openvla",
    architecture="OpenVLAForActionPrediction",
    read=_read,
    processors=(PRISMATIC,),
    tensors=((r"^projector\.fc(\d)\.", r"projector.linear_\1."),),
    adjust=_adjust,
    check=_check,
    original=OriginalLayout(
        processor=_processor,
        template=lambda _: TEMPLATE,
        whole=WholeLayout("text_config", "<PAD>", "</s>", _tensors),
    ),
)
