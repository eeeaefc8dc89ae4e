"""Writes docs/models.md from the code: `python docs/models.py`. Every cell is asked of what decides it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vtx.exporter.bundling.reductions import plan_reductions
from vtx.exporter.checkpoint.config import TEXT_FAMILIES, VISION_FAMILIES, ModelConfig
from vtx.exporter.checkpoint.families.registry import FAMILIES, REFUSED
from vtx.exporter.checkpoint.family.declaration import Family
from vtx.exporter.checkpoint.original.known_towers import CLIP_L_336
from vtx.exporter.checkpoint.spec import model_spec
from vtx.exporter.tuning.options import check_tunable
from vtx.runtime.backends.tensorrt.backend import NOT_BUILT
from vtx.runtime.errors import VtxError
from vtx.runtime.strict import json_value
from vtx.runtime.vision.layout_spec import spec_of

PAGE = Path(__file__).with_suffix(".md")
CPP = Path(__file__).parents[1] / "runtime/cpp/src"
HEAD = f"""# Models

What vtx exports, family by family. A family is what a checkpoint's `architectures` and `model_type` say; it has one
file in `exporter/checkpoint/families/`. This page is made from the code by `python docs/models.py`; a test compares
them.

Text models: {", ".join(TEXT_FAMILIES)}. Towers: {", ".join(sorted({*VISION_FAMILIES.values()}))}, InternVL's, Qwen's.
Precisions, K, gates, calibration and streaming export work alike for every family: they see passes of the tower, and
tokens. onnxruntime and OpenVINO answer alike *(run on a CPU: `tests/runtime/session/test_tiles.py`)*. Graphs
for TensorRT come from the same builder *(run on onnxruntime: `tests/exporter/graphs/test_dialects.py`)*; engines of
TensorRT-RTX were built of random models, fp16 and int4, of `smolvlm`, `llava_onevision`, `video_llava`, `vila` and
`internvl_chat` *(built without a GPU)*. `vtx-calibrate` and `vtx-train-gate` were run on Qwen2-VL and SmolVLM,
`vtx-tune` on SmolVLM and LLaVA-OneVision *(run on a CPU, random models of eight layers)*.
"""
# The shapes of published checkpoints, most with a CLIP tower: what a cell asks is asked about these.
_TOWER = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
          "num_attention_heads": 16, "image_size": 336, "patch_size": 14}  # fmt: skip
_TEXT = {"model_type": "llama", "vocab_size": 32064}
_QWEN2 = {"model_type": "qwen2", "vocab_size": 152000}
_QWEN_TEXT = {"vocab_size": 152064, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
_OWN: Mapping[str, Mapping[str, Any]] = {
    "llava_next_video": {"video_token_index": 32001},
    "video_llava": {"vision_config": {**_TOWER, "image_size": 224}, "video_token_index": 32001},
    "llava_onevision": {
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "image_size": 384},
        "text_config": _QWEN2,
    },
    "llava_llama": {"mm_vision_tower": CLIP_L_336, "mm_projector_type": "mlp2x_gelu", "image_aspect_ratio": "pad"},
    "llava_mistral": {
        "mm_vision_tower": CLIP_L_336,
        "mm_projector_type": "mlp2x_gelu",
        "image_aspect_ratio": "anyres",
        "mm_patch_merge_type": "spatial_unpad",
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    },
    "vila": {
        "mm_vision_select_feature": "cls_patch",
        "llm_cfg": _TEXT,
        "mm_projector_cfg": {"mm_projector_type": "mlp_downsample"},
        "vision_tower_cfg": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14},
    },
    "lisa": {
        "mm_vision_tower": "openai/clip-vit-large-patch14",
        "vision_config": {**_TOWER, "image_size": 224},
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
    "qwen2_vl": {"text_config": _QWEN_TEXT, "vision_config": {"hidden_size": 3584}},
    "qwen2_5_vl": {"text_config": _QWEN_TEXT, "vision_config": {"hidden_size": 1280}},
}  # fmt: skip
_QWEN_PIXELS = {"min_pixels": 3136, "max_pixels": 12_845_056}
_SPECS = ("fastv", "mustdrop:tau=off", "lsm", "cls", "cdpruner", "dart", "dart:k=0")
Cell = Callable[[Family, ModelConfig], str]


def _config(family: Family) -> ModelConfig:
    settings: Mapping[str, Any] = {
        "model_type": family.model_type, "architectures": [family.architecture], "image_token_index": 32000,
        "text_config": _TEXT, "vision_config": _TOWER, **_OWN.get(family.model_type, {}),
    }  # fmt: skip
    config = family.read(settings)
    return config if not config.vision.native or family.adjust is None else family.adjust(config, _QWEN_PIXELS)


def _tokens(_: Family, config: ModelConfig) -> str:
    layout = config.layout
    if config.vision.native:
        return f"up to {layout.max_tokens:,} by the image's size, in one pass of the tower"
    if layout.max_views == 1:
        return f"{layout.max_tokens}, in one pass of the tower"
    return f"up to {layout.max_tokens:,}, in up to {layout.max_views} passes of the tower"


def _video(_: Family, config: ModelConfig) -> str:
    """Tokens of a video, and of another number of frames."""
    if config.video is None:
        return "no"
    frames = config.video.layout
    each, ending = frames.count(2) - frames.count(1), " and a newline" if frames.newline else ""
    return f"{frames.count(frames.frames):,}: {frames.frames} frames of {each}{ending}; other numbers by `--frames`"


def _cpp(family: Family, config: ModelConfig) -> str:
    """Whether libvtx reads the manifest: what it does not know it refuses by name."""
    layout, spec = spec_of(config.layout), model_spec(config, "")
    if spec.rope.sections:
        return "no: positions of three parts (`sections`) are refused by name"
    file = CPP / f"vision/layouts/{layout.name}.cpp"
    if not file.exists():
        return f"no: the layout `{layout.name}` is refused by name"
    known = (CPP / "bundle/manifest.cpp").read_text(encoding="utf-8") + file.read_text(encoding="utf-8")
    fields = {
        *json_value(spec.tower),
        *json_value(spec.projector),
        *layout.parameters,
        *(["video"] if config.video else []),
    }
    fields |= {"seg_token_id"} if family.seg_token else set()
    later = sorted(fields - {*re.findall(r'"(\w+)"', known)})
    if later:
        return f"no: `{'`, `'.join(later)}` of the manifest is refused by name"
    return "yes" if config.video is None else "images"


def _tensorrt(_: Family, config: ModelConfig) -> str:
    if config.vision.native:
        return f"no: {NOT_BUILT}"
    return "yes" if config.frames is None else "images, and no videos"


def _tune(family: Family, config: ModelConfig) -> str:
    try:
        check_tunable(config, "this model", original=family.original is not None)
    except VtxError as reason:
        return f"no: {reason}"
    return "yes"


def _fit(_: Family, config: ModelConfig) -> str:
    if config.vision.native:
        return "no: images keep their shape"
    return "yes" if config.layout.max_views == 1 else "no: tiles show all of any shape"


def _reduction(spec: str) -> Cell:
    def cell(_: Family, config: ModelConfig) -> str:
        try:
            plan_reductions([spec], config)
        except VtxError as reason:
            return f"no: {reason}"
        return "yes"

    return cell


ROWS: Mapping[str, Cell] = {
    "architecture": lambda family, _: f"`{family.architecture}`",
    "image processors": lambda family, _: ", ".join(f"`{kind.name}`" for kind in family.processors),
    "layout": lambda _, config: f"`{spec_of(config.layout).name}`",
    "tokens of an image": _tokens,
    "tokens of a video": _video,
    **{f"`--reduce {spec}`": _reduction(spec) for spec in _SPECS},
    "[libvtx](cpp.md), the C++ runtime": _cpp,
    "`vtx-build`, TensorRT": _tensorrt,
    "`vtx-tune`": _tune,
    "`--show-tokens`": lambda _, c: "no: images have any shape" if c.vision.native else "yes",
    "`--fit`": _fit,
    "`--max-tiles`": lambda _, c: "no: each image is seen in one piece" if c.layout.max_views == 1 else "yes",
    "`--max-pixels`": lambda _, c: "yes" if c.vision.native else "no: images are not seen at their own resolution",
}


def page() -> str:
    """The text of docs/models.md."""
    configs = {family.model_type: (family, _config(family)) for family in FAMILIES}
    lines = [HEAD, "| | " + " | ".join(f"`{name}`" for name in configs) + " |", "|---" * (1 + len(configs)) + "|"]
    for title, cell in ROWS.items():
        lines.append(f"| {title} | " + " | ".join(cell(*pair) for pair in configs.values()) + " |")
    lines += ["", "## Known, and refused by name", "", "| `model_type` or architecture | why |", "|---|---|"]
    lines += [f"| `{name}` | {reason} |" for name, reason in REFUSED.items()]
    return "\n".join(lines) + TAIL


TAIL = """

## Videos

`vtx-run clip.mp4 "What happens?"`; further ones by `--video`, images among them by `--image`. Files (MP4, MOV, MKV,
WebM, AVI) are read by PyAV, from `pip install "vtx-edge[video]"`; what a file is its content says, not its name. In
Python a video is also an array of frames ([API](api.md)).

- Files are decoded in a child process with limits of memory and time, without network or files of its own
  ([SECURITY.md](../SECURITY.md#confined-child-processes)). It costs 0.1 s of processor time a video.
- Frames are sampled evenly from the first to the last, as Video-LLaVA's own code does it (VILA's below): of n, frame
  i of N is `int(i * (n - 1) / (N - 1))`. N is the model's (above) unless `--frames N` (`vtx.video(..., frames=N)`) says
  another; of shorter videos frames are taken twice. Frames are turned upright as their file says, and prepared by
  Pillow: within a level of 255 of transformers, which resizes tensors.
- **Video-LLaVA** has a tower for images and one for videos, whose frames keep the class token: 257 tokens each.
  **LLaVA-NeXT-Video** averages 2 x 2 patches of a frame before the projector, **LLaVA-OneVision** shrinks a frame's
  tokens after it, and ends a video with a newline. **VILA 1.5** sees frames as images, with a line break of the
  prompt after each. Its frames are sampled as its code does it, up to the one before the last,
  `int(i * (n - 2) / (N - 1))`, and a video of fewer than N frames begins with black ones of its size. Token ids and
  logits equal transformers' on the same pixels for one video, two, and an image with a video, and the plain statement
  of VTW at two K *(run on a CPU, random models of eight layers: `tests/runtime/session/test_videos.py`)*; VILA's
  equal those of its frames stated as images (`test_vila.py`).
- At K every frame of every video leaves, class tokens and the newline too. In a prompt's ids a video's tokens stand
  as image tokens.
- `fastv`, `cdpruner` and `dart` rank the tokens of all frames together. What looks at patches (`cls`, `mustdrop` with
  key tokens, merging, `cdpruner:text=tower`) is refused for videos when it is asked, and works for images of the same
  bundle.
- `vtx-serve` takes videos as data URLs ([serving](serving.md)), `vtx-bench` by `--video`, `vtx-batch` and `vtx-eval
  exact` where a line names one under `video` or `image`. What measures a checkpoint on items (`vtx-calibrate`,
  `vtx-train-gate`, `vtx-tune`, `--activation-aware`) refuses an item with a video by name, and golden vectors cover the
  images' graph.
- TensorRT has no engine for the frames of Video-LLaVA and LLaVA-NeXT-Video: refused by name, images are answered.

## Original LLaVA

`llava_llama` and `llava_mistral` are LLaVA as its authors publish it: LLaVA-1.5 and 1.6, and other models of that
layout, VILA 1.0 among them. Its files lack what Hugging Face's layout has, so an export finds it elsewhere:

- **The tower** is a checkpoint of its own, which `mm_vision_tower` only names. It is `--tower PATH`; else a folder of
  that name inside the checkpoint; else the Hugging Face id of that name. A path elsewhere on this machine is not
  followed. The export says which tower was taken. Where `unfreeze_mm_vision_tower` is set and the checkpoint holds
  the tower's weights, those count, and the tower's folder needs no more than `config.json` and
  `preprocessor_config.json`.
- **Pickled weights** (`pytorch_model*.bin`) are not opened unless you say `--allow-pickle`, which holds for the model,
  its tower and `--text-tower`. Even then nothing is unpickled, and PyTorch takes no part: vtx follows the pickle's
  opcodes itself and knows only those of a table of tensors. What they say must agree with the zip archive, which must
  account for every byte; files of a torch before 1.6 are read in the same way. The export reads tensors from where they
  lie, so memory stays bounded. Safetensors are preferred where a checkpoint has both.
- **The tokenizer** is a `tokenizer.model`. It becomes a tokenizer.json by transformers' converter, with
  sentencepiece's own treatment of spaces; the ids equal sentencepiece's on 200,000 characters of 13 scripts *(run:
  `tests/exporter/checkpoint/original/`)*, and each export compares some samples. The original has no image token:
  `<unk>`, which text never becomes, stands for one. As in the original, the text before and after each image is
  tokenised by itself.
- **Prompts.** `vicuna_v1` unless you name another: `--chat-template llava_v1`, `llava_llama_2` or `mistral_instruct`
  (the one of `llava_mistral`), or a file. Formats whose answers end in text, not in a token (`llava_v0`, `mpt`), are
  not there.
- **Images.** `image_aspect_ratio` `pad`, `anyres` (with `mm_patch_merge_type` `spatial_unpad`) or none. `anyres`
  takes the list of resolutions as (width, height) and rounds down without Hugging Face's rounding, so a few shapes
  give other numbers of tokens than the -hf checkpoint does. Projectors are `linear` and `mlpNx_gelu`.
- Prompts end where the original cuts them off, at `tokenizer_model_max_length`.

Token ids and logits equal transformers' model of the same weights, and the plain statement of VTW at two K *(run,
random models of eight layers: `tests/runtime/session/test_original.py`)*.

**InternVL-Chat 1.0**, which DyVTE calls InternVL-7B, is this layout with the tower InternViT-6B: RMS norms, and more of
them over queries and keys. Its positions were trained for 224 pixels and are resized in the graph, bicubic, to the 336
that the model sees (448 where the tower's name says so). Logits and ids equal transformers' tower and decoder *(run, a
random model of eight layers: `tests/runtime/session/test_internvl_chat_1.py`)*.

**LISA** is this layout with a tower of 224 pixels, one matrix as projector, images between `<im_start>` and
`<im_end>`, and the prompt `llava_v1`. For each `[SEG]` of an answer its `stats.seg_states`, and `seg_states` in the
JSON of `vtx-run`, hold one list of floats: the decoder's hidden state behind the last norm at the token whose logits
chose `[SEG]`, which is what the released code feeds to `text_hidden_fcs`. No step is computed for it. Those matrices
and the mask decoder (SAM) are not exported. Ids, logits and states equal transformers' decoder and tower, at K = none
and two K *(run, a random model of eight layers: `tests/runtime/session/test_lisa.py`)*. At K the 256 image tokens
leave and the tokens around them stay.

## InternVL-Chat in its authors' layout

`internvl_chat` is InternVL-Chat 1.5, InternVL2 and 2.5 as their authors publish them. Built are InternViT-300M and
6B, both orders of the pixel shuffle (`ps_version`), and decoders of InternLM2, Llama and Qwen2. The code in such a
checkpoint is never run. InternLM2's fused `wqkv` and the tower's `qkv` are taken apart while they are read, at any
precision. A `tokenizer.model` becomes a tokenizer.json as for original LLaVA; the ids of `<IMG_CONTEXT>` and of the
end of an answer are those that `tokenizer_config.json` or `added_tokens.json` says. Templates are `internlm2-chat`
(`Hermes-2` is the same) and `internvl2_5`; others need `--chat-template FILE`. Refused by name: Phi-3 and other
decoders, no thumbnail, `pad2square`, other ratios, and a `force_image_size` that is not the tower's. Dynamic NTK
scaling changes nothing below `max_position_embeddings`, where a bundle's context ends. Ids and logits equal
transformers' InternVL of the same weights at K = none, and the plain statement of VTW at two K *(run on a CPU, random
models of eight layers: `tests/runtime/session/test_internvl_chat.py`)*.

## VILA 1.5

`vila` is VILA 1.5 as its authors publish it: decoder, tower and projector in folders of their own (`llm`,
`vision_tower`, `mm_projector`), each a checkpoint. Built are SigLIP towers with the projector `mlp_downsample`: 27 x 27
patches, with a row and a column of zeros, become 14 x 14 tokens of four patches each, which stand column by column. An
image is stretched to the tower's square, or padded to one. Prompts, the tokenizer and pickled weights are as for
original LLaVA. A video is `num_video_frames` frames, 8 where `config.json` does not say, of 196 tokens each
([videos](#videos)). Several scales (`s2`), other projectors, InternViT and RADIO towers, and decoders without a
`tokenizer.model` are refused by name. Logits and ids equal transformers' decoder and tower around a plain statement of
the projector, at K = none and two K *(run, random models of eight layers: `tests/runtime/session/test_vila.py`)*.

## Images in tiles

**LLaVA-NeXT** sees an image twice: squeezed into one tile, and at its own aspect ratio in up to four more. What
stands for padding is cut off the tiles' tokens, and a learned newline ends each row of them. **LLaVA-OneVision** does
the same in up to 36 tiles of 384 pixels; where their grid has clearly more tokens than nine tiles (`anyres_max_9`),
it is shrunk to about as many, each token a mean of four. Of several images in one prompt it sees each in one tile
only, padded to a square. **InternVL** stretches an image to the grid of up to 12 tiles nearest to its shape, and sees
the whole of it once more, in a last tile. Pixels, token counts and the order of tokens follow transformers exactly
*(run: `tests/runtime/vision/layouts/`, twelve shapes each, pixels bit for bit)*; token ids and logits equal
transformers' for one image and two, and the plain statement of VTW at two K *(run, random models of eight layers:
`tests/runtime/session/test_tiles.py`)*.

- The tower takes one tile at a time in every engine, so graphs and engines need no shapes of their own. The runtime
  puts the tokens together.
- At K everything of an image leaves: its tiles, the squeezed image and the newlines. InternVL's tokens around an image,
  `<img>` and `</img>`, are text and stay.
- **Reductions** see one image of many tokens. `fastv`, `cdpruner` and `dart` rank all of them, newlines too. The
  class token looks at its own tile only, so `cls` keeps its share, and `mustdrop` its key tokens, of each tile;
  `cls` drops the newlines, `mustdrop` never counts one as key. Merging windows is refused: the tokens of tiles form
  one grid, which has no gaps. InternVL's tokens are of four patches each: what looks at single patches is refused.
  `cdpruner:text=tower` is refused for both: CLIP's text tower goes with images in one piece.
- A patch index counts on from tile to tile, in their order; a newline has -2. `--show-tokens` draws the first tile,
  which for LLaVA-NeXT is the squeezed image. A token that LLaVA-OneVision made of four has the index of the nearest.
- `--max-tiles N` (`max_tiles`) of vtx-run, vtx-chat, vtx-bench and vtx-serve allows at most N tiles, the squeezed image
  counted: 1 is that image alone. Where a prompt does not fit, the error names the N that does.
- `--fit` is refused: tiles show all of any shape, as in training.

## Images at their own resolution

**Qwen2-VL** and **Qwen2.5-VL** see an image as large as it is, to the nearest 28 pixels a side, between the least and
the most pixels of the checkpoint's image processor (`min_pixels`, `max_pixels`): four patches are one token, so an
image of 1920 x 1080 has 69 x 39 = 2,691. The tower knows patches by rotary positions; in Qwen2.5-VL all but four of
its blocks attend within windows of 112 pixels. In the decoder a position has three parts, time, row and column
(mrope): they are equal for text, an image's tokens stand at their row and column, and the text behind it goes on
after the longer side, so positions are fewer than tokens. Pixels and grids equal transformers' bit for bit *(run:
`tests/runtime/vision/layouts/test_native.py`, twelve shapes)*; token ids and logits equal transformers' for one
image, two, and two with text between them, and the plain statement of VTW at two K *(run on a CPU, random models of
eight layers with grouped queries, tied and untied: `tests/runtime/session/test_qwen.py`)*.

- Graphs of stages are those of every family: for a chunk with image tokens the runtime hands them the rows of cos and
  sin that belong to its tokens, and positions that count these rows. Text needs one number, as everywhere, so decoding
  costs nothing more.
- At K the image's tokens leave and the text keeps its positions. `<|vision_start|>` and `<|vision_end|>` are text.
- The largest image need not fit the bundle's context. One that does not is refused with its number of tokens, the
  limit, and the `--max-pixels N` (`max_pixels`) of vtx-run, vtx-chat, vtx-bench and vtx-serve that fits: images of more
  pixels are then shrunk as the image processor does it. `--fit` and `--max-tiles` are refused.
- **Reductions.** `fastv`, `cdpruner` and `dart` work, and what stays keeps its row and column; each equals the plain
  statement *(run: the same tests)*. What looks at single patches or the class token (`cls`, `lsm`, `mustdrop` with key
  tokens or merging) is refused, and so is `positions=renumber`.
- onnxruntime and OpenVINO answer alike *(run on a CPU)*. Graphs of the `trt` dialect compute the same *(run on
  onnxruntime)*, but `vtx-build` and TensorRT refuse these models, and libvtx refuses them, naming
  `sections`.
- Refused by name: videos, `vtx-tune`, rotary scaling of the text model (YaRN), other merges than 2 x 2, and
  `--show-tokens`.

## SmolVLM

`smolvlm` is SmolVLM2, `idefics3` are Idefics3 and SmolVLM's first models, which are of its classes. An image is
resized until its longer side has a whole number of tiles (four, where the image processor's file says no other),
stretched to whole tiles, and cut into them; the whole image follows in one more. Each tile stands in the prompt
behind text that says its row and column, and a line break ends each row. Pixels, counts and text follow transformers
exactly *(run: `tests/runtime/vision/layouts/test_marked.py`, twelve shapes, pixels bit for bit)*; token ids and
logits equal transformers' for one image and two, and the plain statement of VTW at two K *(run on a CPU, random
models of eight layers: `tests/runtime/session/test_tiles.py`)*.

- At K the image tokens of all tiles leave. The text among them stays.
- `--max-tiles N` makes images smaller, tile by tile along the longer side, until they have at most N tiles. A prompt's
  room is counted with the text among the tiles.
- What looks at single patches is refused, for a token is of several, and so is what leaves out tokens before the
  decoder (`cdpruner`, `dart:k=0`), for text stands among them. `fastv` and `dart` behind a layer see one image of many
  tokens.
- libvtx gives Python's pixels bit for bit, and its ids, text and slots *(run on a CPU:
  `tests/runtime/cpp/test_marked.py`)*.
- Videos, image processors that do not split, and towers whose patch positions transformers rounds (grids other than 26,
  27 and powers of two) are refused by name.

## What each family does not have

- InternVL in Hugging Face's layout: towers with norms on q and k or RMS norms (InternViT-6B), and other ratios than 0.5
  are refused by name, and so are video placeholders. The chat template must print `<IMG_CONTEXT>` for an image, as
  newer files do.
- ViP-LLaVA has no option of its own: the regions of its prompts are drawn into the picture.
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
