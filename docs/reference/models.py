"""Writes docs/reference/models.md: `python docs/reference/models.py`. Each cell comes from the code that decides."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vtx.exporter.bundling.reductions import plan_reductions
from vtx.exporter.checkpoint import families
from vtx.exporter.checkpoint.config import VISION_FAMILIES, ModelConfig
from vtx.exporter.checkpoint.families.eagle import NAMES as EAGLE_TOWERS
from vtx.exporter.checkpoint.families.gemma.gemma4 import EXPERTS
from vtx.exporter.checkpoint.families.openvla import TOWERS as OPENVLA_TOWERS
from vtx.exporter.checkpoint.families.registry import FAMILIES, REFUSED
from vtx.exporter.checkpoint.family import Family
from vtx.exporter.checkpoint.mixture import QUANTISED
from vtx.exporter.checkpoint.original.known_towers import CLIP_L_336
from vtx.exporter.checkpoint.text_config import TEXT_FAMILIES
from vtx.runtime.backends.tensorrt.backend import ACTIONS
from vtx.runtime.bundle.spec.model_spec import unscored
from vtx.runtime.errors import VtxError
from vtx.runtime.modules import modules_of
from vtx.runtime.vision.layouts import spec_of
from vtx.runtime.vision.layouts.budget import TokenBudget
from vtx.runtime.vision.layouts.native import Native
from vtx.runtime.vision.layouts.pairs import Pairs
from vtx.runtime.vision.layouts.sliced_frames import SlicedFrames
from vtx_tune.options import check_tunable

PAGE = Path(__file__).with_suffix(".md")
TRIED = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
CPP = Path(__file__).parents[2] / "runtime/cpp/src"
BUNDLE = "bundle/manifest", "bundle/model", "bundle/text_settings"  # of libvtx, with the keys that it knows
HEAD = f"""# Models

The model families that vtx exports, by `architectures` and `model_type` of `config.json`. Generated from the code by
`python docs/reference/models.py`; a test compares them. [What families change](../explanation/families.md) explains
the kinds of layers and images, [checkpoints in their authors' layout](../how-to/original.md) how to export those, and
[videos](../how-to/videos.md) how to ask about them.

Text models: {", ".join(TEXT_FAMILIES)}, gemma2 (in PaliGemma 2), gemma3, gemma4, glm (in GLM-OCR), ernie (in
PaddleOCR-VL), lfm3.
Towers: {", ".join(sorted({*VISION_FAMILIES.values()}))},
those of InternVL, Qwen-VL, GLM-OCR, PaddleOCR-VL, LFM3-VL, Gemma 4 and Pixtral, FastViTHD, SigLIP 2 at native
resolution, MiniCPM-V 4.6's, DINOv2 with registers together with SigLIP, and Eagle-X5's five together: CLIP, ConvNeXt,
SAM, EVA-02 and Pix2Struct.

**Evidence.** Of every family, token ids and logits of small random models equal transformers' (fp32: within 1e-4, of
Gemma 4 within twice transformers' own distance from float64), or a plain PyTorch statement where transformers lacks
it (actions of LeRobot's policies: its own code's), without withdrawal and at several K, on onnxruntime and OpenVINO,
and in libvtx where its column says yes *(run on a CPU)*. Engines of TensorRT-RTX were built from random models of
`smolvlm`, `llava_onevision`, `video_llava`, `vila`, `internvl_chat`, `lfm2_vl`, `lfm3_vl`, `glm_ocr`, `paddleocr_vl`,
`qwen3_5`, `mistral3`, `lighton_ocr`, Pixtral, `gemma3` and `gemma4` *(built without a GPU)*.
"Real files tried" (`make published`): published
configuration, processor, template and tensor names, a real tokenizer of that kind and small random weights; some of
those files were written down from memory. Of a family with "none", compare answers with its authors' code first.
"""
# The shapes of published checkpoints, most with a CLIP tower, from which the cells are computed.
_TOWER = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
          "num_attention_heads": 16, "image_size": 336, "patch_size": 14}  # fmt: skip
_TEXT = {"model_type": "llama", "vocab_size": 32064}
_QWEN2 = {"model_type": "qwen2", "vocab_size": 152000}
_QWEN_TEXT = {"vocab_size": 152064, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
_GEMMA_4 = [*["sliding_attention"] * 4, "full_attention"] * 7
_OWN: Mapping[str, Mapping[str, Any]] = {
    "llava_next_video": {"video_token_index": 32001},
    "video_llava": {"vision_config": {**_TOWER, "image_size": 224}, "video_token_index": 32001},
    "llava_onevision": {
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "image_size": 384}, "text_config": _QWEN2,
    },
    "llava_llama": {"mm_vision_tower": CLIP_L_336, "mm_projector_type": "mlp2x_gelu", "image_aspect_ratio": "pad"},
    "llava_mistral": {
        "mm_vision_tower": CLIP_L_336, "mm_projector_type": "mlp2x_gelu", "image_aspect_ratio": "anyres",
        "mm_patch_merge_type": "spatial_unpad",
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    },
    "vila": {
        "mm_vision_select_feature": "cls_patch", "llm_cfg": _TEXT,
        "mm_projector_cfg": {"mm_projector_type": "mlp_downsample"},
        "vision_tower_cfg": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14},
    },
    "lisa": {
        "mm_vision_tower": "openai/clip-vit-large-patch14", "vision_config": {**_TOWER, "image_size": 224},
        "image_aspect_ratio": "square",
    },
    "internvl": {"image_token_id": 32000, "vision_config": {"model_type": "internvl_vision"}},
    "internvl_chat": {
        "llm_config": {"architectures": ["InternLM2ForCausalLM"], **_TEXT},
        "vision_config": {"image_size": 448, "norm_type": "layer_norm", "qk_normalization": False},
        "dynamic_image_size": True, "use_thumbnail": True, "downsample_ratio": 0.5, "max_dynamic_patch": 12,
    },
    "smolvlm": {
        "image_token_id": 32000, "scale_factor": 4,
        "vision_config": {"model_type": "smolvlm_vision", "image_size": 512, "patch_size": 16},
    },
    "idefics3": {
        "image_token_id": 32000, "scale_factor": 2,
        "vision_config": {"model_type": "idefics3_vision", "image_size": 364, "patch_size": 14},
    },
    "fast_vlm": {
        "image_seq_length": 256, "text_config": _QWEN2,
        "vision_config": {
            "model_type": "timm_wrapper", "architecture": "fastvit_mci3", "hidden_size": 3072,
            "model_args": {"inference_mode": True},
        },
    },
    "paligemma": {
        "image_token_index": 257152, "projection_dim": 3072,
        "text_config": {"model_type": "gemma", "vocab_size": 257216, "num_hidden_layers": 18},
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "image_size": 224},
    },
    "eagle_llama": {"mm_vision_tower": EAGLE_TOWERS, "mm_projector_type": "mlp2x_gelu", "image_aspect_ratio": "pad"},
    "openvla": {
        "timm_model_ids": [*OPENVLA_TOWERS], "image_sizes": [224, 224], "text_config": {**_TEXT, "rms_norm_eps": 1e-6},
        "norm_stats": {"bridge_orig": {"action": {"q01": [-1.0] * 7, "q99": [1.0] * 7}}},
    },
    "lerobot.pi0": {"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m"},
    "lerobot.pi05": {"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m"},
    "lerobot.smolvla": {
        "base": {
            "image_token_id": 49190, "scale_factor": 4,
            "text_config": {
                "model_type": "llama", "vocab_size": 49280, "hidden_size": 960, "num_attention_heads": 15,
                "num_key_value_heads": 5,
            },
            "vision_config": {"model_type": "smolvlm_vision", "image_size": 512, "patch_size": 16},
        },
    },
    "lfm2_vl": {
        "image_token_id": 396,
        "text_config": {"hidden_size": 2048, "num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
        "vision_config": {"hidden_size": 1152, "num_attention_heads": 16, "num_patches": 256},
    },
    "gemma3": {
        "image_token_index": 262144,
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024,
        },
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "image_size": 896},
    },
    "gemma4": {
        "image_token_id": 258880, "vision_config": {"model_type": "gemma4_vision"},
        "text_config": {
            "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
            "num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "layer_types": _GEMMA_4,
        },
    },
    "lfm3_vl": {"image_token_id": 125030, "text_config": {"model_type": "lfm3"}, "vision_config": {}},
    "glm_ocr": {
        "text_config": {
            "hidden_size": 1536, "intermediate_size": 4608, "head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {},
    },
    "paddleocr_vl": {
        "text_config": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {},
    },
    "qwen2_vl": {"text_config": _QWEN_TEXT, "vision_config": {"hidden_size": 3584}},
    "qwen2_5_vl": {"text_config": _QWEN_TEXT, "vision_config": {"hidden_size": 1280}},
    "qwen3_vl": {
        "text_config": {"vocab_size": 151936, "hidden_size": 2560}, "vision_config": {"out_hidden_size": 2560},
    },
    "qwen3_vl_moe": {
        "text_config": {
            "vocab_size": 151936, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        },
        "vision_config": {"out_hidden_size": 2048},
    },
    "qwen3_5": {"text_config": {}, "vision_config": {"out_hidden_size": 4096}},
    "mistral3": {
        "text_config": {"model_type": "mistral", "vocab_size": 131072, "hidden_size": 5120, "num_hidden_layers": 40},
        "vision_config": {"model_type": "pixtral", "image_size": 1540, "patch_size": 14},
    },
    "lighton_ocr": {
        "image_token_id": 151655,
        "text_config": {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28},
        "vision_config": {"model_type": "pixtral", "image_size": 1540, "patch_size": 14},
    },
    "qwen3_5_moe": {"text_config": {}, "vision_config": {"out_hidden_size": 2048}},
    "minicpmv4_6": {
        "image_token_id": 248056, "video_token_id": 248057, "text_config": {"model_type": "qwen3_5_text"},
        "vision_config": {"model_type": "minicpmv4_6_vision", "image_size": 448, "patch_size": 16},
    },
}  # fmt: skip
_QWEN_PIXELS = {"min_pixels": 3136, "max_pixels": 12_845_056}
_QWEN3_PIXELS = {"min_pixels": 65_536, "max_pixels": 16_777_216}
_PIXELS: Mapping[str, Mapping[str, Any]] = {
    "glm_ocr": {"size": {"shortest_edge": 12_544, "longest_edge": 9_633_792}},
    "lfm3_vl": {},
    "paddleocr_vl": {"min_pixels": 147_384, "max_pixels": 2_822_400},
}
_SPECS = ("fastv", "mustdrop:tau=off", "lsm", "cls", "cdpruner", "dart", "dart:k=0")
Cell = Callable[[Family, ModelConfig], str]


def _config(family: Family) -> ModelConfig:
    settings: Mapping[str, Any] = {
        "model_type": family.model_type, "architectures": [family.architecture], "image_token_index": 32000,
        "text_config": _TEXT, "vision_config": _TOWER, **_OWN.get(family.model_type, {}),
    }  # fmt: skip
    config = family.read(settings)
    if not isinstance(config.layout, Native) or family.adjust is None:
        return config
    of_qwen = _QWEN_PIXELS if config.vision.patch == 14 else _QWEN3_PIXELS
    return family.adjust(config, _PIXELS.get(family.model_type, of_qwen))


def _tokens(_: Family, config: ModelConfig) -> str:
    layout = config.layout
    if isinstance(layout, TokenBudget):
        return f"up to {layout.tokens:,} depending on the image size, by request {layout.max_tokens:,}, in one pass"
    if config.vision.native:
        return f"up to {layout.max_tokens:,} depending on the image size, in one pass of the tower"
    if layout.max_views == 1:
        return f"{layout.max_tokens}, in one pass of the tower"
    return f"up to {layout.max_tokens:,}, in up to {layout.max_views} passes of the tower"


def _image_tokens(_: Family, config: ModelConfig) -> str:
    """The numbers that a request may choose."""
    layout = config.layout
    if config.action or (layout.max_views == 1 and layout.min_tokens is None):
        return "no: every image has the same number of tokens"
    if layout.budgets:
        return ", ".join(map(str, reversed(layout.budgets)))
    if layout.max_views == 1:
        return "fewer pixels"
    return "fewer tiles" if layout.min_tokens is None else "fewer tiles, then fewer pixels"


def _boxes(family: Family, _: ModelConfig) -> str:
    """The numbers of boxes in answers."""
    form = family.boxes
    if form is None:
        return "no: its authors state no form of boxes that vtx reads"
    return "pixels of the resized picture" if form.scale is None else f"of {form.scale:,}"


def _video(_: Family, config: ModelConfig) -> str:
    """Tokens of a video, and of another number of frames."""
    if config.video is None:
        return "no"
    frames = config.video.layout
    if isinstance(frames, Pairs):
        return f"by size and length: {frames.a_second:g} frames/s, at most {frames.frames}, two frames per token"
    if isinstance(frames, SlicedFrames):
        return f"by size and length: 1 frame/s, at most {frames.frames}, each like an image"
    each, ending = frames.count(2) - frames.count(1), " and a newline" if frames.newline else ""
    return f"{frames.count(frames.frames):,}: {frames.frames} frames of {each}{ending}; other numbers by `--frames`"


def _cpp(family: Family, config: ModelConfig) -> str:
    """Support by libvtx, which refuses by name the parts of a manifest that it does not know."""
    layout = spec_of(config.layout)
    file = CPP / f"vision/layouts/{layout.name}.cpp"
    if not file.exists():
        return f"no: libvtx does not support the layout `{layout.name}`"
    source = file.read_text(encoding="utf-8")
    bases = re.findall(r'#include "(vision/layouts/\w+)\.hpp"', source)  # whose parameters it has, too
    known = "".join((CPP / f"{name}.cpp").read_text(encoding="utf-8") for name in (*BUNDLE, *bases)) + source
    fields = {*layout.parameters, *(["video"] if config.video else [])}
    fields |= {"seg_token_id"} if family.seg_token else set()
    later = sorted(fields - {*re.findall(r'"(\w+)"', known)})
    if later:
        return f"no: libvtx does not support `{'`, `'.join(later)}` in the manifest"
    if config.video is None:
        return "yes"
    videos = spec_of(config.video.layout)
    file = CPP / f"vision/layouts/{videos.name}.cpp"
    known = file.read_text(encoding="utf-8") if file.exists() else ""
    return "yes" if {*videos.parameters} <= {*re.findall(r'"(\w+)"', known)} else "images, not videos"


def _tensorrt(_: Family, config: ModelConfig) -> str:
    if config.action:
        return f"no: {ACTIONS}"
    return "yes" if config.frames is None else "images, not videos"


def _tune(family: Family, config: ModelConfig) -> str:
    try:
        check_tunable(config, "this model", original=family.original is not None)
    except VtxError as reason:
        return f"no: {reason}"
    return "yes"


def _fit(_: Family, config: ModelConfig) -> str:
    if config.vision.native or config.action:
        return "no: images keep their aspect ratio"
    return "yes" if config.layout.max_views == 1 else "no: tiles cover images of any aspect ratio"


def _reduction(spec: str) -> Cell:
    def cell(_: Family, config: ModelConfig) -> str:
        try:
            plan_reductions([spec], config)
        except VtxError as reason:
            return f"no: {reason}"
        return "yes"

    return cell


def _rest(_: Family, config: ModelConfig) -> str:
    """The K that can keep a rest: all, or those behind a layer whose attention can be read."""
    if config.action:
        return f"no: {ACTIONS}"
    text = config.text
    reasons = {k: unscored(text, k - 1) for k in range(2, (text.first_source or text.layers) + 1)}
    ks = [k for k, reason in reasons.items() if not reason]
    if not ks:
        return f"no: {reasons[2]}"
    return "yes" if len(ks) == len(reasons) else f"K = {', '.join(map(str, ks))}"


Columns = Mapping[str, Cell]
ABOUT = {module.FAMILY.model_type: module for module in modules_of(families) if hasattr(module, "FAMILY")}


def _about(family: Family, _: ModelConfig) -> str:
    """The first sentence of its file."""
    return " ".join((inspect.getdoc(ABOUT[family.model_type]) or "").partition("\n\n")[0].split()).rstrip(".")


def _decoder(_: Family, config: ModelConfig) -> str:
    """Its text model, and what of its layers a runtime must do otherwise than for a llama."""
    text, parts = config.text, list[str]()
    if text.conv_layers:
        kind = "the gated delta rule" if text.delta else "convolutions"
        parts.append(f"{kind} in {len(text.conv_layers)} of {text.layers} layers, which keep a state")
    if text.sliding:
        parts.append(f"windows of {text.sliding.window} in {len(text.sliding.layers)} of {text.layers} layers")
    if text.shared:
        parts.append(f"layers from {text.shared} on read K and V of earlier ones")
    if text.two_way:
        seen = {"images": "an image's tokens see each other", "prompt": "the prompt sees itself both ways"}
        parts.append(seen[text.two_way])
    if text.rope.sections:
        parts.append("positions of time, row and column")
    return f"{text.family}{': ' if parts else ''}{'; '.join(parts)}"


FACTS: Columns = {
    "what it is": _about,
    "decoder": _decoder,
}
FILES: Columns = {
    "architecture": lambda family, _: f"`{family.architecture}`",
    "layout": lambda _, config: f"`{spec_of(config.layout).name}`",
    "image processors": lambda family, _: ", ".join(f"`{kind.name}`" for kind in family.processors),
}


def _tried(family: Family, _: ModelConfig) -> str:
    """The models whose published files were compared with transformers, as `make published` found them."""
    names = TRIED["families"].get(family.model_type)
    return f"{', '.join(names)} ({TRIED['date']})" if names else "none"


TOKENS: Columns = {"tokens of an image": _tokens, "tokens of a video": _video, "real files tried": _tried}


def _shown(_: Family, config: ModelConfig) -> str:
    if config.action:
        return "no: the model outputs actions"
    return "no: images have variable sizes" if config.vision.native or config.vision.naflex else "yes"


USES: Columns = {
    "libvtx": _cpp, "TensorRT": _tensorrt, "`vtx-tune`": _tune,
    "`--rest`": _rest, "`--show-tokens`": _shown, "`--fit`": _fit,
    "`--image-tokens`": _image_tokens, "`--boxes`": _boxes,
    "`--max-tiles`": lambda _, c: "no: each image is a single view" if c.layout.max_views == 1 else "yes",
    "`--max-pixels`": lambda _, c: (
        "yes" if c.vision.native else "no: tiles have a fixed size" if c.vision.naflex
        else "no: images are resized to a fixed size"
    ),
}  # fmt: skip
REDUCTIONS: Columns = {f"`{spec}`": _reduction(spec) for spec in _SPECS}


def page() -> str:
    """The text of docs/reference/models.md."""
    configs = {family.model_type: (family, _config(family)) for family in FAMILIES}
    notes: dict[str, int] = {}

    def table(columns: Columns) -> list[str]:
        lines = ["", "| family | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
        for name, pair in configs.items():
            cells = [re.sub(r"^no: (.+)$", numbered, cell(*pair)) for cell in columns.values()]
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
        return lines

    def numbered(match: re.Match[str]) -> str:
        return f"no ({notes.setdefault(match[1], len(notes) + 1)})"

    lines = [HEAD.rstrip(), *table(FACTS), *table(FILES), *table(TOKENS), "", "## Engines, runtimes and options"]
    lines += [
        "",
        "onnxruntime and OpenVINO support every family. `no (1)`: refused with an error; note 1 gives the reason.",
    ]
    lines += [*table(USES), "", "## Reductions", *table(REDUCTIONS), "", "## Notes", ""]
    lines += [f"{number}. {reason}" for reason, number in notes.items()]
    lines += ["", "## Refused by name", "", "| `model_type`, architecture or setting | reason |", "|---|---|"]
    refused = {**REFUSED, "enable_moe_block": EXPERTS, "quantised experts": QUANTISED}
    lines += [f"| `{name}` | {reason} |" for name, reason in refused.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
