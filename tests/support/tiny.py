"""Small random LLaVA checkpoints in Hugging Face's layout, the same bytes for the same `Tiny` and seed."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image, ImageDraw

if TYPE_CHECKING:
    import torch

Message = dict[str, Any]

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] != 'system' %}{{ m['role'] | upper }}: {% endif %}"
    "{% for part in m['content'] if part['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for part in m['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{{ eos_token if m['role'] == 'assistant' else ' ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
SPECIALS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
IMAGE_TOKEN = "<image>"
ARCHITECTURES = {
    "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "llava_next_video": "LlavaNextVideoForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "video_llava": "VideoLlavaForConditionalGeneration",
    "vipllava": "VipLlavaForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "llava_llama": "LlavaLlamaForCausalLM",
    "llava_mistral": "LlavaMistralForCausalLM",
    "vila": "LlavaLlamaModel",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "lisa": "LISAForCausalLM",
    "internvl_chat": "InternVLChatModel",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
    "fast_vlm": "FastVlmForConditionalGeneration",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "pi0": "PI0ForConditionalGeneration",  # made by tests/support/families/pi0.py
    "openvla": "OpenVLAForActionPrediction",  # made by tests/support/families/openvla.py
    "eagle_llama": "EagleLlamaForCausalLM",  # made by tests/support/families/eagle.py
    "lfm2_vl": "Lfm2VlForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "minicpmv4_6": "MiniCPMV4_6ForConditionalGeneration",
    "glm_ocr": "GlmOcrForConditionalGeneration",
    "lfm3_vl": "Lfm3VlForConditionalGeneration",
    "paddleocr_vl": "PaddleOCRVLForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "lighton_ocr": "LightOnOcrForConditionalGeneration",
}
PROCESSORS = {
    "llava": "LlavaProcessor",
    "llava_next": "LlavaNextProcessor",
    "llava_next_video": "LlavaNextVideoProcessor",
    "llava_onevision": "LlavaOnevisionProcessor",
    "video_llava": "VideoLlavaProcessor",
    "vipllava": "LlavaProcessor",
    "internvl": "InternVLProcessor",
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "qwen3_5": "Qwen3VLProcessor",
    "qwen3_5_moe": "Qwen3VLProcessor",
    "internvl_chat": "",
    "smolvlm": "SmolVLMProcessor",
    "idefics3": "Idefics3Processor",
    "fast_vlm": "LlavaProcessor",
    "paligemma": "PaliGemmaProcessor",
    "lfm2_vl": "Lfm2VlProcessor",
    "gemma3": "Gemma3Processor",
    "gemma4": "Gemma4Processor",
    "minicpmv4_6": "MiniCPMV4_6Processor",
    "glm_ocr": "Glm46VProcessor",
    "lfm3_vl": "Lfm3VlProcessor",
    "paddleocr_vl": "PaddleOCRVLProcessor",
    "mistral3": "PixtralProcessor",
    "lighton_ocr": "LightOnOcrProcessor",
}
MARKED = ("smolvlm", "idefics3")
OF_ID = (*MARKED, "lighton_ocr")  # whose files call the image token's id so
MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
MARKS = ["<fake_token_around_image>", *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))]
PINPOINTS = ("llava_next", "llava_next_video", "llava_onevision")
VIDEOS = {
    "llava_next_video": "LlavaNextVideoVideoProcessor",
    "llava_onevision": "LlavaOnevisionVideoProcessor",
    "video_llava": "VideoLlavaVideoProcessor",
}
VIDEO_TOKEN = "<video>"
AROUND = {"start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>"}  # internvl's


@dataclass(frozen=True)
class Tiny:
    """One variant of a tiny checkpoint; every field that a real checkpoint may differ in.

    `names` are the tensor and config names: "hub" as transformers 4 wrote them, "saved" as 5's save_pretrained
    writes them, "new" as 5's state_dict has them. `layers`, `head_dim` and the like speak of the text model.
    """

    family: Literal[
        "llava", "llava_next", "llava_next_video", "llava_onevision", "video_llava", "vipllava", "internvl",
        "llava_llama", "llava_mistral", "vila", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5",
        "qwen3_vl_moe", "qwen3_5_moe", "lisa",
        "internvl_chat", "smolvlm", "idefics3", "fast_vlm", "paligemma", "lfm2_vl", "gemma3", "gemma4",
        "minicpmv4_6", "glm_ocr", "lfm3_vl", "paddleocr_vl", "mistral3",
        "lighton_ocr",
    ] = "llava"  # fmt: skip
    text: Literal[
        "llama", "mistral", "qwen2", "qwen3", "granite", "gemma", "gemma2", "lfm2", "gemma3_text", "gemma4_text",
        "qwen3_5", "glm_ocr_text", "lfm3", "paddleocr_vl_text", "ministral3",
    ] = "llama"  # fmt: skip
    layers: int = 8
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None
    ffn: int = 96
    vocab: int = 320
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    rope: Literal["default", "linear", "llama3", "yarn", "longrope", "dynamic"] = "default"
    theta: float = 10_000.0
    context: int = 256
    multipliers: tuple[float, float, float, float] = (12.0, 0.11, 0.22, 4.0)  # of granite
    vision: Literal["clip", "siglip", "siglip2", "internvl", "fastvit", "pixtral"] = "clip"
    vision_layers: int = 4
    stage_blocks: tuple[int, ...] = (1, 2, 1, 2, 1)  # of fastvit
    stage_widths: tuple[int, ...] = (8, 16, 32, 32, 64)
    vision_hidden: int = 32
    vision_heads: int = 2
    vision_ffn: int = 48
    vision_act: str | None = None
    vision_head: bool = True
    image: int = 56
    patch: int = 14
    feature_layer: int | tuple[int, ...] = -2
    select: Literal["default", "full"] = "default"
    projector_act: str = "gelu"
    projector_bias: bool = True
    names: Literal["hub", "saved", "new"] = "hub"
    shards: int = 1
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    template_place: Literal["jinja", "chat_template.json", "tokenizer_config", "processor_config"] = "jinja"
    tokenizer: Literal["bytes", "metaspace"] = "metaspace"
    eos: int | tuple[int, ...] = 2
    aspect: Literal["pad", "anyres"] | None = None  # of the original layout
    pickled: bool = False
    maps: tuple[int, ...] = (0, 1, 2)  # qwen3_vl's layers of the tower that give maps
    attending: tuple[int, ...] = (1, 4, 6)  # lfm2's layers with attention, from 0; the others are convolutions
    taps: int = 3
    delta: tuple[int, int, int, int] = (2, 4, 32, 16)  # qwen3_5's heads of keys and of values, and their sizes
    partial: float = 0.5  # of a head rotates
    experts: tuple[int, int, int] = (6, 2, 48)  # of a layer of a mixture, of a token, and their width
    dense: tuple[int, ...] = ()  # layers of a mixture without experts, from 0
    apart: bool = False  # one tensor an expert
    full_every: int = 3  # gemma's layers that do not slide
    pool: int = 2  # gemma3's squares of patches, whose mean is a token
    crops: int | None = None  # of pan and scan, at most
    query_scale: float = 16  # its attention's products are divided by the root
    shared: int = 3  # its last layers, which share keys and values
    per_layer: int = 8  # numbers of each layer's input
    budget: int = 70  # tokens of an image, of gemma4
    softcap: float | None = None
    attention_softcap: float | None = None
    clipped: bool = False
    insert: int = 1  # minicpmv4_6's block of the tower, from 0, after which patches merge
    downsample: str = "16x"
    slices: int = 4  # of an image, at most
    numbered: bool = True  # images in a prompt
    video_slices: int = 2  # of a frame of a video, at most
    post_norms: bool = True  # lfm3's norms behind attention and the MLP
    gates: bool = True  # and of the heads of its attention

    @property
    def image_token(self) -> str:
        """What stands for an image in a prompt."""
        if self.vision == "pixtral":
            return "[IMG]"
        if self.family.startswith("gemma"):
            return "<|image|>" if self.family == "gemma4" else "<image_soft_token>"
        if self.family in ("minicpmv4_6", "lfm3_vl"):
            return "<|image_pad|>"
        if self.family == "glm_ocr":
            return "<|image|>"
        return "<IMG_CONTEXT>" if self.family in ("internvl", "internvl_chat") else IMAGE_TOKEN

    @property
    def tower(self) -> str:
        """The tower's model_type."""
        if self.family in MARKED:
            return f"{self.family}_vision"
        if self.vision in ("fastvit", "pixtral"):
            return "timm_wrapper" if self.vision == "fastvit" else "pixtral"
        return "internvl_vision" if self.vision == "internvl" else f"{self.vision}_vision_model"

    @property
    def template(self) -> str:
        videos = "{% for part in m['content'] if part['type'] == 'video' %}<video>\n{% endfor %}"
        first = "{% for part in m['content'] if part['type'] == 'text' %}"
        if self.family.startswith("qwen"):
            videos = videos.replace("<video>", "<|vision_start|><video><|vision_end|>")
        if self.family == "minicpmv4_6":
            videos = videos.replace("<video>", self.around[-1])
        taken = self.family in (*VIDEOS, "minicpmv4_6") or self.family.startswith("qwen")
        template = TEMPLATE.replace(first, videos + first) if taken else TEMPLATE
        return template.replace(IMAGE_TOKEN, "<start_of_image>" if self.family == "gemma3" else self.image_token)

    @property
    def around(self) -> list[str]:
        """Further special tokens, which stand before the image token in the vocabulary."""
        if self.vision == "pixtral":
            return ["[IMG_BREAK]", "[IMG_END]"]
        if self.family == "gemma3":
            return ["<start_of_image>", "<end_of_image>"]
        if self.family == "gemma4":
            return ["<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>"]
        if self.family == "paddleocr_vl":
            return ["<|IMAGE_START|>", "<|IMAGE_END|>", "<|video_pad|>"]
        if self.family == "lfm3_vl":
            return ["<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
        if self.family == "glm_ocr":
            return ["<|begin_of_image|>", "<|end_of_image|>", "<|video|>"]
        if self.family == "internvl_chat":
            return ["<img>", "</img>", "<|im_start|>", "<|im_end|>"]
        if self.family == "minicpmv4_6":
            return ["<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>", "<|video_pad|>"]
        if self.family in MARKED:
            return [*MARKS, *["<global-img>", "<end_of_utterance>"] * (self.family == "smolvlm")]
        if self.family == "lfm2_vl":
            places = [(1, 1), (1, 2), (1, 3), (2, 1), (3, 1)]
            tiles = [f"<|img_row_{row}_col_{column}|>" for row, column in places]
            return ["<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *tiles]
        videos = self.family in VIDEOS or self.family.startswith("qwen")
        return list(AROUND.values()) if self.family == "internvl" else [VIDEO_TOKEN] * videos

    @property
    def pinpoints(self) -> list[list[int]]:
        """The (height, width) that tiles may cover."""
        more = ((1, 1), (2, 3), (3, 2), (3, 3)) if self.family == "llava_onevision" else ()
        return [[self.image * a, self.image * b] for a, b in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3), *more)]

    @property
    def vision_tokens(self) -> int:
        """Rows of one pass of the tower; of llava an image takes as many in the prompt."""
        if self.family == "fast_vlm":
            return (self.image // 64) ** 2
        if self.family == "gemma3":
            return (self.image // self.patch // self.pool) ** 2
        if self.family in ("internvl", "internvl_chat", *MARKED):
            return (self.image // self.patch // 2) ** 2
        extra = (self.vision == "clip") - (self.select == "default")
        return (self.image // self.patch) ** 2 + extra


def make(folder: Path, tiny: Tiny, seed: int = 0) -> Path:
    """Write the checkpoint into `folder`, made if need be, and return it."""
    from tests.support.tiny_processor import write_processor  # both need Tiny
    from tests.support.tiny_tokenizer import write_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    if tiny.family in ("llava_llama", "llava_mistral", "vila", "lisa"):
        from tests.support.families.original import make_original
        from tests.support.families.vila import make_vila

        return (make_vila if tiny.family == "vila" else make_original)(folder, tiny, seed)
    if tiny.family.startswith("qwen"):
        return _make_qwen(folder, tiny, seed, write_tokenizer(folder, tiny))
    if tiny.family == "lfm2_vl":
        return _make_lfm2(folder, tiny, seed, write_tokenizer(folder, tiny))
    if tiny.vision == "pixtral":
        from tests.support.families.pixtral import make_pixtral

        return make_pixtral(folder, tiny, seed, write_tokenizer(folder, tiny))
    if tiny.family == "minicpmv4_6":
        from tests.support.families.minicpm import make_minicpm

        return make_minicpm(folder, tiny, seed, write_tokenizer(folder, tiny))
    if tiny.family == "paddleocr_vl":
        from tests.support.families.paddleocr_vl import make_paddle

        return make_paddle(folder, tiny, seed, write_tokenizer(folder, tiny))
    if tiny.family == "lfm3_vl":
        from tests.support.families.lfm3_vl import make_lfm3

        return make_lfm3(folder, tiny, seed, write_tokenizer(folder, tiny))
    if tiny.family == "glm_ocr":
        from tests.support.families.glm_ocr import make_glm

        return make_glm(folder, tiny, seed, write_tokenizer(folder, tiny))
    if tiny.family.startswith("gemma"):
        from tests.support.families.gemma import make_gemma

        return make_gemma(folder, tiny, seed)
    if tiny.family == "internvl_chat":
        from tests.support.families.internvl_chat import make_internvl_chat

        return make_internvl_chat(folder, tiny, seed)
    image_token = write_tokenizer(folder, tiny)
    config = _config(tiny, image_token)
    written = _hub_config(tiny, image_token) if tiny.names == "hub" else _new_config(config, tiny)
    write_json(folder / "config.json", written)
    eos = tiny.eos if isinstance(tiny.eos, int) else list(tiny.eos)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": eos, "pad_token_id": 3})
    write_processor(folder, tiny)
    write_weights(folder, tiny, _weights(config, tiny, seed))
    return folder


def _make_qwen(folder: Path, tiny: Tiny, seed: int, image_token: int) -> Path:
    from transformers import AutoConfig

    from tests.support.families import qwen

    text = _text_fields(tiny) | {"bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(tiny.family, **qwen.settings(tiny, text, image_token))
    written = qwen.hub_settings(tiny, text, image_token) if tiny.names == "hub" else config.to_dict()
    write_json(folder / "config.json", written | {"architectures": [ARCHITECTURES[tiny.family]]})
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3})
    write_json(folder / "preprocessor_config.json", qwen.image_settings(tiny))
    write_json(folder / "video_preprocessor_config.json", qwen.video_settings(tiny))
    (folder / "chat_template.jinja").write_text(qwen.template(tiny), encoding="utf-8")
    weights = _weights(config, tiny, seed)
    if tiny.family.endswith("_moe"):
        weights = qwen.of_experts(weights, tiny)
    if tiny.names == "hub" and not tiny.family.startswith("qwen3"):
        weights = {qwen.hub_name(name): tensor for name, tensor in weights.items()}
    write_weights(folder, tiny, weights)
    return folder


def _make_lfm2(folder: Path, tiny: Tiny, seed: int, image_token: int) -> Path:
    from transformers import AutoConfig

    from tests.support.families import lfm2_vl

    settings = lfm2_vl.settings(tiny, image_token)
    write_json(folder / "config.json", settings)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3})
    write_json(folder / "preprocessor_config.json", lfm2_vl.image_settings(tiny))
    (folder / "chat_template.jinja").write_text(tiny.template, encoding="utf-8")
    write_weights(folder, tiny, _weights(AutoConfig.for_model(**settings), tiny, seed))
    return folder


def random_image(seed: int, size: tuple[int, int] = (80, 60)) -> Image.Image:
    """An RGB picture, `size` is (width, height): coarse blocks that survive a resize, and fine noise."""
    rng = np.random.default_rng(seed)
    blocks = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize(size, Image.Resampling.NEAREST)
    noise = rng.integers(-30, 31, (size[1], size[0], 3))
    return Image.fromarray(np.clip(np.asarray(blocks) + noise, 0, 255).astype(np.uint8))


def marked(image: Image.Image, part: float) -> Image.Image:
    """The image with a mark at this part of its width, in its lower half."""
    changed, at = image.copy(), int(part * image.width)
    ImageDraw.Draw(changed).rectangle((at, image.height - 12, at + 5, image.height - 4), fill=(255, 0, 0))
    return changed


def random_video(seed: int, frames: int = 30, size: tuple[int, int] = (80, 60)) -> np.ndarray:
    """Frames [frames, height, width, 3] uint8 RGB: a picture that another one wipes away from the left."""
    first, last = (np.asarray(random_image(seed + 100 * part, size)) for part in (1, 2))
    edges = np.linspace(0, size[0], frames).astype(int)
    return np.stack([np.where(np.arange(size[0])[None, :, None] < edge, last, first) for edge in edges])


def prompt_messages(question: str, images: int = 1, videos: int = 0) -> list[Message]:
    """One user turn: the placeholders of images and videos, then the question."""
    pictures = [{"type": "image"}] * images + [{"type": "video"}] * videos
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": question}]}]


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- config ----------------------------------------------------------------------------------------------------------


def edited(checkpoint: Path, place: Path, name: str, changes: dict[str, Any], part: str | None = None) -> Path:
    """A copy of a checkpoint with other settings in one of its files, or in a part of it; None takes one out."""
    shutil.copytree(checkpoint, place)
    settings = json.loads((place / name).read_text(encoding="utf-8"))
    own = settings if part is None else settings[part]
    own.update(changes)
    for key in [key for key, value in own.items() if value is None]:
        del own[key]
    write_json(place / name, settings)
    return place


def _rope(tiny: Tiny) -> dict[str, Any]:
    # The old context is short, so that short prompts already reach the bands that the scaling changes.
    half = (tiny.head_dim or tiny.hidden // tiny.heads) // 2
    more: dict[str, dict[str, Any]] = {
        "default": {},
        "longrope": {
            "short_factor": [1.0 + 0.2 * n for n in range(half)],
            "long_factor": [2.0 + n for n in range(half)],
            "original_max_position_embeddings": tiny.context - 56,
        },
        "linear": {"factor": 2.0},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
        "dynamic": {"factor": 2.0},
    }
    if tiny.text == "ministral3":  # whose queries grow beyond those positions
        scaled = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
        more["yarn"] = {"factor": 4.0, "original_max_position_embeddings": tiny.context, **scaled}
    return {"rope_type": tiny.rope, **more[tiny.rope]}


def _text_fields(tiny: Tiny) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "vocab_size": tiny.vocab,
        "hidden_size": tiny.hidden,
        "intermediate_size": tiny.ffn,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "max_position_embeddings": tiny.context,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tiny.tied,
    }
    if tiny.head_dim is not None:
        fields["head_dim"] = tiny.head_dim
    if tiny.text in ("qwen3", "gemma", "ministral3"):  # whose heads are 128 and 256 wide unless told otherwise
        fields["head_dim"] = tiny.head_dim or tiny.hidden // tiny.heads
    if tiny.text in ("llama", "qwen3", "granite", "gemma"):
        fields |= {"attention_bias": tiny.attention_bias, "mlp_bias": tiny.mlp_bias}
    if tiny.text == "gemma2":
        fields |= {"query_pre_attn_scalar": tiny.query_scale, "final_logit_softcapping": tiny.softcap}
        fields |= {"attn_logit_softcapping": tiny.attention_softcap}
    if tiny.text == "granite":
        fields |= dict(zip(MULTIPLIERS, tiny.multipliers, strict=True))
    elif tiny.text != "llama":
        fields["sliding_window"] = tiny.sliding_window
    if tiny.text.startswith("qwen"):
        fields |= {"use_sliding_window": tiny.sliding_window is not None, "max_window_layers": 0}
    return fields


def _vision_fields(tiny: Tiny) -> dict[str, Any]:
    if tiny.vision == "fastvit":
        sizes = {"layers": list(tiny.stage_blocks), "embed_dims": list(tiny.stage_widths)}
        model = {"architecture": "fastvit_mci3", "model_args": {"inference_mode": True, **sizes}}
        return model | {"hidden_size": 2 * tiny.stage_widths[-1]}
    fields: dict[str, Any] = {
        "hidden_size": tiny.vision_hidden,
        "intermediate_size": tiny.vision_ffn,
        "num_hidden_layers": tiny.vision_layers,
        "num_attention_heads": tiny.vision_heads,
        "image_size": tiny.image,
        "patch_size": tiny.patch,
    }
    if tiny.vision == "siglip" and tiny.family not in MARKED:
        fields["vision_use_head"] = tiny.vision_head
    if tiny.vision == "internvl":
        fields["attention_bias"] = tiny.attention_bias
    return fields | ({} if tiny.vision_act is None else {"hidden_act": tiny.vision_act})


def _llava_fields(tiny: Tiny) -> dict[str, Any]:
    if tiny.family in MARKED:
        return {"scale_factor": 2}
    if tiny.family == "paligemma":
        return {"projection_dim": tiny.hidden, "hidden_size": tiny.hidden}
    layer = tiny.feature_layer
    fields: dict[str, Any] = {
        "image_seq_length": tiny.vision_tokens,
        "projector_hidden_act": tiny.projector_act,
        "vision_feature_layer": layer if isinstance(layer, int) else list(layer),
    }
    if tiny.family == "internvl":
        return fields | {"downsample_ratio": 0.5}
    if tiny.family == "lighton_ocr":
        return {"spatial_merge_size": 2}
    if tiny.family == "mistral3":
        del fields["image_seq_length"]
        return fields | {"multimodal_projector_bias": tiny.projector_bias, "spatial_merge_size": 2}
    if tiny.family == "vipllava":  # whose published checkpoints, and every release of transformers, have the plural
        fields["vision_feature_layers"] = fields.pop("vision_feature_layer")
        return fields | {"projector_layernorm_eps": 1e-5}
    fields |= {"multimodal_projector_bias": tiny.projector_bias, "vision_feature_select_strategy": tiny.select}
    if tiny.family in VIDEOS:
        fields["video_token_index"] = tiny.vocab - 2
    if tiny.family == "llava_onevision":
        fields["vision_aspect_ratio"] = "anyres_max_1"
    return fields | ({"image_grid_pinpoints": tiny.pinpoints} if tiny.family in PINPOINTS else {})


def _config(tiny: Tiny, image_token: int) -> Any:
    from transformers import AutoConfig

    rope = _rope(tiny) | {"rope_theta": tiny.theta}
    return AutoConfig.for_model(
        tiny.family,
        text_config=AutoConfig.for_model(tiny.text, **_text_fields(tiny), rope_parameters=rope),
        vision_config=AutoConfig.for_model(tiny.tower, **_vision_fields(tiny)),
        **{
            "image_token_id"
            if tiny.family in ("internvl", "lighton_ocr", *MARKED)
            else "image_token_index": image_token
        },
        tie_word_embeddings=tiny.tied,
        **_llava_fields(tiny),
    )


def _new_config(config: Any, tiny: Tiny) -> dict[str, Any]:
    written: dict[str, Any] = config.to_dict()
    for kind in ("image", "video"):
        if f"{kind}_token_index" in written:
            written[f"{kind}_token_id"] = written.pop(f"{kind}_token_index")
    return written | {"architectures": [ARCHITECTURES[tiny.family]], "dtype": tiny.dtype}


def _hub_config(tiny: Tiny, image_token: int) -> dict[str, Any]:
    """The config as transformers 4 wrote it: few keys, the rest left to the classes' defaults."""
    text = _text_fields(tiny) | {"model_type": tiny.text, "rope_theta": tiny.theta, "torch_dtype": tiny.dtype}
    if tiny.kv_heads == tiny.heads and tiny.text == "llama":
        del text["num_key_value_heads"]  # absent means one per head, here alone
    if tiny.rope != "default":
        scaling = _rope(tiny)
        if tiny.rope == "linear":
            scaling = {"type": scaling.pop("rope_type"), **scaling}  # the key's first name
        text["rope_scaling"] = scaling
    return _llava_fields(tiny) | {
        "architectures": [ARCHITECTURES[tiny.family]],
        "ignore_index": -100,
        "image_token_id" if tiny.family in OF_ID else "image_token_index": image_token,
        "model_type": tiny.family,
        "text_config": text,
        "tie_word_embeddings": tiny.tied,
        "torch_dtype": tiny.dtype,
        "transformers_version": "4.37.2",
        "vision_config": _vision_fields(tiny) | {"model_type": tiny.tower},
    }


# ---- weights ---------------------------------------------------------------------------------------------------------


def write_configuration(folder: Path, tiny: Tiny, fields: dict[str, Any]) -> Any:
    """Write config.json, as published or as transformers saves it, and generation_config.json; its configuration."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**fields)
    written = fields if tiny.names == "hub" else config.to_dict() | {"architectures": fields["architectures"]}
    write_json(folder / "config.json", written)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3})
    return config


def _weights(config: Any, tiny: Tiny, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor under transformers 5's name; a tensor depends on seed, name and shape alone."""
    import torch
    from transformers import AutoModelForImageTextToText

    from tests.support.families.fast_vlm import model_of

    with torch.device("meta"):
        model = (model_of if tiny.vision == "fastvit" else AutoModelForImageTextToText.from_config)(config)
        shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if t.ndim}
    if tiny.tied:
        del shapes["lm_head.weight"]
    dtype = getattr(torch, tiny.dtype)
    tensors = {name: random_tensor(name, shape, seed) for name, shape in shapes.items()}
    for name in tensors:
        of_text = name.endswith("norm.weight") and not re.search("vis|linear_attn|merger", name)
        if tiny.text in ("gemma", "gemma2", "qwen3_5") and of_text:
            tensors[name] -= 1  # its norms multiply by 1 more
    return {name: torch.from_numpy(tensor).to(dtype) for name, tensor in tensors.items()}


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """A float32 tensor of a size that keeps activations near one, attention uneven and logits a few units wide.

    Sharper attention would make the answers more varied, and float32 rounding of the logits larger than 2e-5.
    """
    noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, dtype=np.float32)
    if name.endswith("A_log"):
        return noise - 2.5  # heads that forget slowly, and some that do not
    if name.endswith(("bias", "in_proj_bias", "running_mean")):
        return noise * 0.2
    if name.endswith("running_var"):
        return np.exp(noise * 0.3)
    if "norm" in name or "layrnorm" in name or "ln_q" in name or name.endswith("bn.weight"):
        # The last norm widens the logits, so that embeddings can stay narrow: wide ones, tied, repeat the last token.
        wider = {"model.language_model.norm.weight": 3, "model.language_model.embedding_norm.weight": 2}
        return (1 + noise * 0.2) * wider.get(name, 1)
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        noise *= 0.1
        noise[[0, 1, 3, -1]] *= 0.1  # <unk>, <s>, <pad> and <image> are never the answer
        return noise
    if name.endswith(
        (
            "position_embedding.weight",
            "class_embedding",
            "probe",
            "image_newline",
            "cls_token",
            "position_embeddings",
            "pos_embed.weight",
        )
    ):
        return noise * 0.5
    if ".experts." in name:
        return noise * np.float32(shape[-1] ** -0.5)
    gain = 1.2 if "q_proj" in name or "k_proj" in name else 1.0
    if name.endswith("linear_attn.out_proj.weight"):
        gain = 0.5  # what the delta rule reads is normed, however small it is, so that rounding grows
    return noise * np.float32(gain / np.prod(shape[1:]) ** 0.5)


def hub_name(name: str, tiny: Tiny) -> str:
    """A tensor's name in the files of this variant."""
    if (
        tiny.names == "new"
        or tiny.family
        in (*MARKED, "lfm2_vl", "gemma4", "minicpmv4_6", "glm_ocr", "lfm3_vl", "paddleocr_vl", "lighton_ocr")
        or tiny.family.startswith("qwen")
    ):
        return name
    name = name.removeprefix("model.")
    if name.startswith("language_model."):
        return name.replace("language_model.", "language_model.model.", 1)
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    renamed = tiny.names == "hub" and tiny.family != "fast_vlm" and tiny.vision != "pixtral"
    for tower in ("vision_tower.", "image_tower.", "video_tower.") if renamed else ():
        name = name.replace(tower, f"{tower}vision_model.", 1)
    return name


def write_weights(folder: Path, tiny: Tiny, weights: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    tensors = {hub_name(name, tiny): tensor for name, tensor in weights.items()}
    if tiny.shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    placed: dict[str, str] = {}
    for i in range(tiny.shards):
        shard = f"model-{i + 1:05}-of-{tiny.shards:05}.safetensors"
        mine = names[i * len(names) // tiny.shards : (i + 1) * len(names) // tiny.shards]
        save_file({name: tensors[name] for name in mine}, folder / shard, metadata={"format": "pt"})
        placed |= dict.fromkeys(mine, shard)
    size = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": placed})
