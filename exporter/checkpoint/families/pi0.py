"""pi0: PaliGemma reads cameras and an instruction, and an expert beside it makes actions out of noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, parse
from vtx.exporter.checkpoint.families.paligemma import PROMPT, paligemma_config
from vtx.exporter.checkpoint.family import Family, ImageProcessor
from vtx.exporter.checkpoint.fields import number, size
from vtx.exporter.checkpoint.text_config import GEMMA_NORMS, TextConfig, text_config_of
from vtx.runtime.bundle.spec.action_spec import ActionSpec
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError

EXPERT_NORMS = GEMMA_NORMS.replace("text", "head")
_HEADS = "state_proj|action_in_proj|action_out_proj"
_PROCESSOR = {
    "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "resample": 3,
    "do_pad": True, "size": {"max_height": 224, "max_width": 224}, "pad_size": {"height": 224, "width": 224},
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip


def _read(config: Mapping[str, Any]) -> ModelConfig:
    parsed = parse("PI0Config", config)
    model = paligemma_config(parsed.vlm_config, parsed.vlm_config.image_token_id)
    text = model.text
    expert = parsed.dit_config
    if parsed.dit_config.model_type != "gemma" or parsed.vlm_config.text_config.model_type != "gemma":
        raise UnsupportedModelError("vtx exports pi0 whose two decoders are Gemma's")
    own = text_config_of(SimpleNamespace(text_config=expert, tie_word_embeddings=True))
    shared = ("layers", "kv_heads", "head_dim", "rope")
    if differing := [name for name in shared if getattr(text, name) != getattr(own, name)]:
        raise UnsupportedModelError(
            f"config.json: dit_config and the decoder of vlm_config differ in {', '.join(differing)}; the expert reads "
            "the decoder's K and V layer by layer, so both must be the same"
        )
    if own.qkv_bias or own.o_bias:
        raise UnsupportedModelError("attention_bias of pi0's expert is not supported")
    image_token = model.image_token_id
    if not isinstance(image_token, int) or not 0 <= image_token <= text.vocab:
        raise CheckpointError(
            f"image_token_id {image_token!r:.60} is not a token id up to the vocabulary's {text.vocab}; correct "
            "config.json"
        )
    steps = size(parsed, "num_inference_steps")
    action = expert_spec(own, parsed, "config.json", state=size(parsed, "max_state_dim"), steps=steps)
    # transformers keeps no output matrix; the table is there once, whatever the settings say
    decoder = replace(text, tied=True, shifts=(*text.shifts, (EXPERT_NORMS, 1.0)))
    return replace(model, text=decoder, action=action)


def expert_spec(expert: TextConfig, policy: Any, source: str, **fields: Any) -> ActionSpec:
    """The expert's record by its decoder and the settings of a policy. Raises CheckpointError, which names `source`."""
    try:
        return ActionSpec(
            hidden=expert.hidden,
            intermediate=expert.ffn,
            heads=expert.heads,
            eps=expert.eps,
            activation=expert.activation,
            width=size(policy, "max_action_dim"),
            horizon=size(policy, "chunk_size"),
            min_period=number(vars(policy), "min_period"),
            max_period=number(vars(policy), "max_period"),
            **fields,
        )
    except BundleError as e:
        raise CheckpointError(f"{source}: {str(e).removeprefix('vtx.json: ')}") from e


def _statistics(config: ModelConfig, processor: Mapping[str, Any]) -> ModelConfig:
    """With the statistics of states and actions of `processor_config.json`."""
    assert config.action is not None
    names = [f"{what}_{kind}" for what in ("state", "actions") for kind in ("mean", "std")]
    found = dict[str, Any]()
    for name in names:
        values = processor.get(name)
        if values is None:
            continue
        if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
            raise CheckpointError(f"processor_config.json: {name} is {values!r:.60}, not a list of numbers; correct it")
        found[name] = tuple(map(float, values))
    try:
        return replace(config, action=replace(config.action, **found))
    except BundleError as e:
        raise CheckpointError(f"processor_config.json: {str(e).removeprefix('vtx.json: ')}") from e


_VLM = r"^(?:model\.vlm|(?:model\.)?vlm|(?:model\.)?paligemma_with_expert\.paligemma\.model)\."
_DIT = r"^(?:model\.dit|(?:model\.)?dit|(?:model\.)?paligemma_with_expert\.gemma_expert\.model)\."
FAMILY = Family(
    model_type="pi0",
    architecture="PI0ForConditionalGeneration",
    read=_read,
    processors=(ImageProcessor("PI0ImageProcessor", _PROCESSOR, within=True),),
    tensors=(
        (rf"^(?:model\.)?(?:embed_action_time\.)?({_HEADS})\.", r"head.\1."),
        (r"^(?:model\.)?(?:embed_action_time\.)?(?:action_)?time_mlp_(in|out)\.", r"head.action_time_mlp_\1."),
        (_DIT + r"(layers|norm)\.", r"head.\1."),
        (r"^(?:model\.)?paligemma_with_expert\.paligemma\.lm_head\.", "table."),
        (_VLM + r"multi_modal_projector\.linear\.", "projector.linear_1."),
        (_VLM + r"vision_tower\.(?:vision_model\.)?", "vision."),
        (_VLM + r"language_model\.(?:model\.)?", "text."),
    ),
    prompt=PROMPT,
    statistics=_statistics,
)
