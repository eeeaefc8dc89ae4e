"""Small random MiniCPM-V 4.6 checkpoints in Hugging Face's layout."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.support.tiny import (
    ARCHITECTURES,
    Tiny,
    _text_fields,
    _weights,
    write_configuration,
    write_json,
    write_weights,
)
from vtx.runtime.vision.video import Video

MINICPM = Tiny(
    family="minicpmv4_6", text="qwen3_5", tokenizer="bytes", vision="siglip", head_dim=16, attending=(1, 4, 6), taps=4,
    context=512, vocab=330, image=48, patch=8, vision_layers=4, slices=4,
)  # fmt: skip
SIDE = 64  # of a slice: one token of 16 or four times 4 patches of 16 pixels
MARKS = ("image_start", "image_end", "slice_start", "slice_end", "image_id_start", "image_id_end", "video")


def settings(tiny: Tiny, image_token: int) -> dict[str, Any]:
    """The configuration; the table of positions has `image / patch` places a side."""
    from tests.support.families.qwen import of_delta

    rope = {"rope_type": "default", "rope_theta": tiny.theta, "partial_rotary_factor": tiny.partial}
    text = _text_fields(tiny) | of_delta(tiny) | {"model_type": "qwen3_5_text", "rope_parameters": rope}
    vision = {
        "model_type": "minicpmv4_6_vision", "hidden_size": tiny.vision_hidden, "intermediate_size": tiny.vision_ffn,
        "num_hidden_layers": tiny.vision_layers, "num_attention_heads": tiny.vision_heads, "image_size": tiny.image,
        "patch_size": tiny.patch, **({} if tiny.vision_act is None else {"hidden_act": tiny.vision_act}),
    }  # fmt: skip
    mode = {} if tiny.names == "hub" and tiny.downsample == "16x" else {"downsample_mode": tiny.downsample}
    return {
        "architectures": [ARCHITECTURES[tiny.family]], "model_type": tiny.family, "text_config": text,
        "vision_config": vision, "image_token_id": image_token, "video_token_id": image_token - 1,
        "insert_layer_id": tiny.insert, "tie_word_embeddings": tiny.tied, "torch_dtype": tiny.dtype, **mode,
    }  # fmt: skip


def image_settings(tiny: Tiny) -> dict[str, Any]:
    """The image processor's file."""
    return {
        "image_processor_type": "MiniCPMV4_6ImageProcessor", "max_slice_nums": tiny.slices, "scale_resolution": SIDE,
        "patch_size": tiny.patch, "slice_mode": True, "downsample_mode": tiny.downsample,
        "use_image_id": tiny.numbered, "do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3,
        "rescale_factor": 1 / 255, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip


def video_settings(tiny: Tiny) -> dict[str, Any]:
    """The video processor's file."""
    kind = {"video_processor_type": "MiniCPMV4_6VideoProcessor", "max_slice_nums": tiny.video_slices}
    return {name: value for name, value in image_settings(tiny).items() if name != "image_processor_type"} | kind


def make_minicpm(folder: Path, tiny: Tiny, seed: int, image_token: int) -> Path:
    config = write_configuration(folder, tiny, settings(tiny, image_token))
    write_json(folder / "preprocessor_config.json", image_settings(tiny))
    write_json(folder / "video_preprocessor_config.json", video_settings(tiny))
    (folder / "chat_template.jinja").write_text(tiny.template, encoding="utf-8")
    write_weights(folder, tiny, _weights(config, tiny, seed))
    return folder


def processor_of(folder: Path) -> Any:
    """Transformers' processor, whose images and frames Pillow resizes: its own code for these needs torchvision."""
    from transformers import AutoTokenizer, MiniCPMV4_6ImageProcessorPil, MiniCPMV4_6Processor
    from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor

    class OnPillow(MiniCPMV4_6VideoProcessor):
        def resize(self, image: torch.Tensor, size: Any, resample: Any = None, **_: Any) -> torch.Tensor:
            frames = [Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in image.flatten(0, -4)]
            resized = [np.array(frame.resize((size.width, size.height), resample)) for frame in frames]
            pixels = torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)
            return pixels.reshape(*image.shape[:-2], size.height, size.width)

        def normalize(self, image: torch.Tensor, mean: Any, std: Any, **_: Any) -> torch.Tensor:
            shift, scale = (torch.as_tensor(each)[:, None, None] for each in (mean, std))
            return (image - shift) / scale

    class WithVideos(MiniCPMV4_6Processor):
        def check_argument_for_proper_class(self, name: str, value: Any) -> Any:
            return None

    images = MiniCPMV4_6ImageProcessorPil.from_pretrained(folder, local_files_only=True)
    return WithVideos(
        images, OnPillow.from_pretrained(folder, local_files_only=True),
        AutoTokenizer.from_pretrained(folder, local_files_only=True),
        chat_template=(folder / "chat_template.jinja").read_text(encoding="utf-8"),
    )  # fmt: skip


def video_inputs(processor: Any, text: str, images: list[Image.Image], videos: Sequence[Video]) -> dict[str, Any]:
    """What transformers' processor makes of a prompt with images and videos, which it samples itself."""
    from transformers.video_utils import VideoMetadata

    about, most = list[Any](), {given.frames for given in videos}
    for given in videos:
        count, rate = len(given.source), float(given.fps or 24)  # type: ignore[arg-type]
        about.append(VideoMetadata(count, rate, duration=count / rate))
    (wanted,) = most
    further = {} if wanted is None else {"max_num_frames": wanted}
    with warnings.catch_warnings():  # it lets numpy sum up tensors of torch
        warnings.filterwarnings("ignore", "__array_wrap__", DeprecationWarning)
        found = processor(
            images=[images] if images else None, text=[text], videos=[given.source for given in videos],
            video_metadata=about, return_tensors="pt", **further,
        )  # fmt: skip
    return dict(found)
