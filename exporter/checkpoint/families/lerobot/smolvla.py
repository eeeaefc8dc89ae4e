"""SmolVLA as LeRobot saves it: the first layers of a SmolVLM2, and an expert that reads its K and V by projections."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from vtx.exporter.checkpoint.config import ModelConfig, check_values, part_of
from vtx.exporter.checkpoint.families.idefics.smolvlm import read_marked
from vtx.exporter.checkpoint.families.lerobot.policy import action_spec, processor, square
from vtx.exporter.checkpoint.family import Config, Family, OriginalLayout
from vtx.exporter.checkpoint.fields import number, size
from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.runtime.errors import RequestError, UnsupportedModelError
from vtx.runtime.vision.layouts.single import Single

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}  # of the policy's code, whatever the SmolVLM2's settings say
MULTIPLE = 256  # of the width of the expert's MLP
_DEFAULTS = {
    "vlm_model_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct", "num_vlm_layers": 16, "num_expert_layers": -1,
    "self_attn_every_n_layers": 2, "expert_width_multiplier": 0.75, "attention_mode": "cross_attn", "num_steps": 10,
    "resize_imgs_with_padding": [512, 512],
}  # fmt: skip
TEMPLATE = (
    "{%- if messages | length != 1 or messages[0]['role'] != 'user' -%}"
    "{{ raise_exception('this model takes one instruction, without a system prompt and earlier turns') }}"
    "{%- endif -%}"
    "{%- for part in messages[0]['content'] if part['type'] == 'image' -%}<image>{%- endfor -%}"
    "{%- for part in messages[0]['content'] if part['type'] == 'text' -%}"
    "{{- part['text'] -}}{%- if not part['text'].endswith('\\n') -%}{{- '\\n' -}}{%- endif -%}"
    "{%- endfor -%}"
)


def _read(config: Config) -> ModelConfig:
    settings = {**_DEFAULTS, **config}
    layers = settings["num_vlm_layers"]
    known = {
        "add_image_special_tokens": (None, False),
        "attention_mode": ("cross_attn", "self_attn"),
        "num_expert_layers": (-1, 0, layers),
    }
    check_values(settings, "a SmolVLA", known)
    if "base" not in config:
        raise RequestError("the sizes of a SmolVLA are in its SmolVLM2's config.json; plan with --model smolvla")
    text = {**part_of(config["base"], "text_config"), "rope_parameters": ROPE, "rope_theta": ROPE["rope_theta"]}
    text.pop("rope_scaling", None)
    policy = SimpleNamespace(**settings)
    if type(layers) is not int or layers > 0:
        text["num_hidden_layers"] = size(policy, "num_vlm_layers")
    model = read_marked("SmolVLM", {**config["base"], "text_config": text})
    decoder = model.text
    every = size(policy, "self_attn_every_n_layers") if settings["attention_mode"] == "cross_attn" else 1
    action = action_spec(
        config,
        _expert(decoder, number(settings, "expert_width_multiplier")),
        state_in="prompt",
        causal=True,
        self_every=every,
        steps=size(policy, "num_steps"),
    )
    scaled = (*decoder.factors, (r"^projector\.", decoder.hidden**0.5))
    decoder = replace(decoder, tied=True, two_way="prompt", scaled_embedding=True, factors=scaled)
    return replace(model, text=decoder, layout=Single(model.view_tokens), action=action)


def _expert(decoder: TextConfig, multiplier: float) -> TextConfig:
    """The expert's widths, which are parts of the decoder's."""
    hidden = int(decoder.hidden * multiplier)
    if hidden < 2 or hidden % 2 or decoder.qkv_bias or decoder.family != "llama":
        raise UnsupportedModelError(
            f"an expert of width {hidden} beside a {decoder.family} is not supported; vtx supports even widths beside "
            "a llama without biases"
        )
    inner = 4 * int(2 * hidden / 3)
    return replace(decoder, hidden=hidden, ffn=-(-inner // MULTIPLE) * MULTIPLE)


_PARTS = r"^(?:model\.)?vlm_with_expert\."
_VLM = _PARTS + r"vlm\.model\."
FAMILY = Family(
    model_type="lerobot.smolvla",
    architecture="SmolVLAPolicy",
    policy="smolvla",
    read=_read,
    processors=(processor("SmolVLAImageProcessor", "ended"),),
    tensors=(
        (_VLM + r"vision_model\.", "vision."),
        (_VLM + r"text_model\.", "text."),
        (_VLM + r"connector\.modality_projection\.proj\.", "projector.linear_1."),
        (_PARTS + r"vlm\.lm_head\.", "table."),  # of a SmolVLM2 that ties it
        (_PARTS + r"lm_expert\.", "head."),
    ),
    prompt=TEMPLATE,
    original=OriginalLayout(
        processor=lambda config, _: square({**_DEFAULTS, **config}["resize_imgs_with_padding"]),
        template=lambda _: TEMPLATE,
        base=lambda config: str({**_DEFAULTS, **config}["vlm_model_name"]),
    ),
)
