"""The processors of small checkpoints: sizes and normalisation of images and of a video's frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny import MARKED, PINPOINTS, PROCESSORS, VIDEOS, Tiny, write_json


def write_processor(folder: Path, tiny: Tiny) -> None:
    """Write the files of the processor as the release of transformers does whose names the checkpoint has."""
    settings: dict[str, Any] = {
        "processor_class": PROCESSORS[tiny.family],
        "image_token": tiny.image_token,
        "patch_size": tiny.patch,
        "num_additional_image_tokens": int(tiny.vision == "clip"),
        "vision_feature_select_strategy": tiny.select,
    }
    if tiny.template_place == "processor_config":
        settings["chat_template"] = tiny.template
    elif tiny.template_place == "chat_template.json":
        write_json(folder / "chat_template.json", {"chat_template": tiny.template})
    elif tiny.template_place == "jinja" and tiny.family != "paligemma":  # which has no template
        (folder / "chat_template.jinja").write_text(tiny.template, encoding="utf-8")
    if tiny.family in VIDEOS and tiny.names != "hub":
        settings["video_processor"] = _video_settings(tiny)
    if tiny.family in VIDEOS and tiny.names == "hub":
        write_json(folder / "video_preprocessor_config.json", _video_settings(tiny))
    if tiny.names == "hub":
        write_json(
            folder / "preprocessor_config.json", _image_settings(tiny) | {"processor_class": PROCESSORS[tiny.family]}
        )
    else:
        settings["image_processor"] = _image_settings(tiny)
    write_json(folder / "processor_config.json", settings)


def _image_settings(tiny: Tiny) -> dict[str, Any]:
    square = {"height": tiny.image, "width": tiny.image}
    settings: dict[str, Any] = {
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
    }
    if tiny.family in MARKED:
        sizes = {"size": {"longest_edge": 2 * tiny.image}, "max_image_size": {"longest_edge": tiny.image}}
        half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_image_splitting": True, "do_pad": True}
        kind = PROCESSORS[tiny.family].replace("Processor", "ImageProcessor")
        videos = {"video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": tiny.image}}}
        sizes |= videos if tiny.family == "smolvlm" else {}
        return settings | half | sizes | {"resample": 1, "image_processor_type": kind}
    if tiny.vision == "siglip":
        half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        kinds = {"llava_onevision": "LlavaOnevisionImageProcessor", "llava_next": "LlavaNextImageProcessor"}
        if tiny.family in kinds:
            settings |= {"image_grid_pinpoints": tiny.pinpoints, "do_pad": True}
        if tiny.family == "llava_next":  # Granite Vision
            settings |= {"do_center_crop": True, "crop_size": square}
        kind = kinds.get(tiny.family, "SiglipImageProcessor")
        if tiny.family == "paligemma":
            settings["image_seq_length"] = tiny.vision_tokens
        return settings | half | {"image_processor_type": kind, "size": square}
    if tiny.family == "internvl":
        half = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
        tiles = {"crop_to_patches": False, "min_patches": 1, "max_patches": 6}
        return settings | half | tiles | {"image_processor_type": "GotOcr2ImageProcessor", "size": square}
    if tiny.family in PINPOINTS:
        settings |= {"image_grid_pinpoints": tiny.pinpoints, "do_pad": True}
    kinds = dict.fromkeys(PINPOINTS, "LlavaNextImageProcessor") | {"video_llava": "VideoLlavaImageProcessor"}
    return settings | {
        "image_processor_type": kinds.get(tiny.family, "CLIPImageProcessor"),
        "do_center_crop": True,
        "crop_size": square,
        "size": {"shortest_edge": tiny.image},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }


def _video_settings(tiny: Tiny) -> dict[str, Any]:
    """How frames are prepared: as images in one piece."""
    leave = ("image_processor_type", "image_grid_pinpoints", "do_pad")
    settings = {key: value for key, value in _image_settings(tiny).items() if key not in leave}
    return settings | {"video_processor_type": VIDEOS[tiny.family]}
