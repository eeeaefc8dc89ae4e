"""Image settings of a bundle, read from the image processor's configuration in a Hugging Face checkpoint."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vtx.exporter.checkpoint.family.processors import ONE_PIECE, ImageProcessor
from vtx.exporter.checkpoint.loader import checkpoint_files, read_settings
from vtx.runtime.bundle.spec.image_settings import RESAMPLING, ImageSettings
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.vision.limits import MAX_SAMPLED_FRAMES

ALONE = "preprocessor_config.json"
_FILTERS = dict(enumerate(RESAMPLING))


def read_image_settings(folder: Path, known: Sequence[ImageProcessor] = ONE_PIECE) -> ImageSettings:
    """Settings from `processor_config.json`'s `image_processor`, else from `preprocessor_config.json`.

    `known` are the image processors that the model's family may have. Raises UnsupportedModelError for another one, or
    an option of it that vtx does not have, and CheckpointError where neither file holds one, or it is damaged.
    """
    return image_settings(read_image_processor(folder), known)


def read_image_processor(folder: Path) -> Mapping[str, Any]:
    """The image processor's configuration as its file has it. Raises CheckpointError."""
    config: Any = read_settings(folder, "processor_config.json").get("image_processor")
    if config is None:
        config = read_settings(folder, ALONE)
        if not config and not checkpoint_files(folder).exists(ALONE):
            raise CheckpointError(f"{folder} has no {ALONE} that says how images are prepared; download it too")
    if not isinstance(config, Mapping):
        raise CheckpointError(f"the image processor's configuration is {_show(config)}, not a JSON object")
    return config


def read_video_settings(
    folder: Path, kind: ImageProcessor, images: Sequence[ImageProcessor]
) -> tuple[ImageSettings, int | None]:
    """Settings of a video's frames, and how many are sampled where the file says it.

    From `processor_config.json`'s `video_processor`, `video_preprocessor_config.json`, else the file of the image
    processor, which is one of `images`; `kind` is the video processor. Raises as `read_image_settings` does.
    """
    config: Any = read_settings(folder, "processor_config.json").get("video_processor")
    if config is None:
        config = read_settings(folder, "video_preprocessor_config.json") or read_settings(folder, ALONE)
    if not isinstance(config, Mapping):
        raise CheckpointError(f"the video processor's configuration is {_show(config)}, not a JSON object")
    named = config.get("video_processor_type") or config.get("image_processor_type")
    if named is not None and named not in (kind.name, *(image.name for image in images)):
        raise UnsupportedModelError(f"video processor {_show(named)} is not supported; supported: {kind.name}")
    frames = config.get("num_frames")
    if config.get("do_sample_frames") and (config.get("fps") is not None or frames is None):
        raise UnsupportedModelError(f"{kind.name} samples frames by fps; vtx takes a number of them: set num_frames")
    if frames is not None and (not isinstance(frames, int) or not 1 <= frames <= MAX_SAMPLED_FRAMES):
        raise CheckpointError(
            f"{kind.name}: num_frames is {_show(frames)}; it must be a whole number from 1 to {MAX_SAMPLED_FRAMES}"
        )
    settings = {key: value for key, value in config.items() if key != "do_pad"}
    return image_settings({**settings, "image_processor_type": kind.name}, [kind]), frames


def image_settings(config: Mapping[str, Any], known: Sequence[ImageProcessor] = ONE_PIECE) -> ImageSettings:
    """Settings from an HF image processor's configuration; keys that it lacks take the defaults of its class.

    Pictures are always made RGB, `do_convert_rgb` or not. Raises as `read_image_settings` does.
    """
    if not isinstance(config, Mapping):
        raise CheckpointError(f"the image processor's configuration is {_show(config)}, not a JSON object")
    kind = _kind(config, known)
    values = {**kind.defaults, **{key: value for key, value in config.items() if value is not None}}
    square = _flag(values, "default_to_square")
    mean, std = _triple(values, "image_mean"), _triple(values, "image_std")
    if kind.own_size:
        values |= {"do_resize": _resizing(kind.name, values)}
    resize = _size(values, kind.size, square=square) if _flag(values, "do_resize") else None
    crop = _size(values, "crop_size", square=True) if _flag(values, "do_center_crop") else None
    normalize = _flag(values, "do_normalize")
    pad = _padding(kind, values, mean)
    if kind.tiled:
        resize, crop = _tile(kind.name, resize, crop), None
    if crop is None and not isinstance(resize, tuple) and not (resize and pad) and not kind.own_size:
        raise UnsupportedModelError(
            f"{kind.name} without do_center_crop and with size {_show(values[kind.size])} gives images of several "
            "sizes; vtx needs one: a size of height and width, or do_center_crop"
        )
    try:
        return ImageSettings(
            pad=pad,
            resize=resize,
            resample=_resample(values["resample"]),
            crop=crop,
            rescale=values["rescale_factor"] if _flag(values, "do_rescale") else 1.0,
            mean=mean if normalize else (0.0, 0.0, 0.0),
            std=std if normalize else (1.0, 1.0, 1.0),
        )
    except BundleError as error:
        raise CheckpointError(f"{kind.name}: {error}") from error


def _kind(config: Mapping[str, Any], known: Sequence[ImageProcessor]) -> ImageProcessor:
    """The one of `known` that is named; without a name the last, as transformers takes it."""
    name = config.get("image_processor_type") or config.get("feature_extractor_type") or known[-1].name
    if not isinstance(name, str):
        raise CheckpointError(f"image_processor_type is {_show(name)}; it must be a class name")
    base = name.removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    kind = next((kind for kind in known if kind.name == base), None)
    if kind is None:
        names = ", ".join(kind.name for kind in known)
        raise UnsupportedModelError(f"image processor {_show(name)} is not supported; supported: {names}")
    if config.get("use_square_size"):
        raise UnsupportedModelError(f"{kind.name} with use_square_size is not supported; give size as height and width")
    return kind


def _resizing(kind: str, values: Mapping[str, Any]) -> bool:
    """False: the image layout resizes. Raises UnsupportedModelError where pictures would not be resized alone."""
    if not _flag(values, "do_resize") or _flag(values, "do_center_crop") or _flag(values, "do_pad"):
        raise UnsupportedModelError(
            f"{kind} without do_resize, or with do_center_crop or do_pad, is not supported; vtx only resizes its images"
        )
    return False


def _tile(kind: str, resize: Any, crop: Any) -> tuple[int, int]:
    """The size of a tile, which resizing and cropping must leave as it is; the whole image is squeezed into one."""
    tile = (resize, resize) if isinstance(resize, int) else resize
    if not isinstance(tile, tuple) or (crop is not None and crop != tile):
        raise UnsupportedModelError(
            f"{kind} with size {_show(resize)} and crop_size {_show(crop)} cuts or resizes its tiles; "
            "vtx needs both to be the tile's"
        )
    return tile


def _padding(kind: ImageProcessor, values: Mapping[str, Any], mean: tuple[float, ...]) -> tuple[int, int, int] | None:
    if not _flag(values, "do_pad"):
        return None
    if kind.pads:
        red, green, blue = (int(value * 255) for value in mean)
        return red, green, blue
    if "pad_size" in values:
        raise UnsupportedModelError(
            f"{kind.name} with pad_size is not supported; vtx pads only as LlavaImageProcessor does"
        )
    return None  # pads pictures of a batch to one size, which they have


def _size(values: Mapping[str, Any], key: str, *, square: bool) -> Any:
    """The shortest edge as an int, or (height, width), not yet checked for range."""
    size = values.get(key)
    if isinstance(size, int):
        return (size, size) if square else size
    if isinstance(size, (list, tuple)):
        return tuple(size)
    if not isinstance(size, Mapping):
        raise CheckpointError(f"{key} is {_show(size)}; it must be a whole number, or height and width")
    size = {name: edge for name, edge in size.items() if edge is not None}
    if set(size) == {"height", "width"}:
        return size["height"], size["width"]
    if set(size) == {"shortest_edge"} and key == "size":
        return size["shortest_edge"]
    if set(size) == {"longest_edge"} and key != "size":
        return size["longest_edge"], size["longest_edge"]
    wanted = "height and width, or shortest_edge" if key == "size" else "height and width"
    raise UnsupportedModelError(
        f"{key} with the keys {_show(sorted(map(str, size)))} is not supported; vtx knows {wanted}"
    )


def _flag(values: Mapping[str, Any], key: str) -> bool:
    value = values.get(key, False)
    if not isinstance(value, bool):
        raise CheckpointError(f"{key} is {_show(value)}; it must be true or false")
    return value


def _triple(values: Mapping[str, Any], key: str) -> tuple[float, float, float]:
    value = values[key]
    numbers = tuple(value) if isinstance(value, (list, tuple)) else (value,) * 3
    if len(numbers) != 3 or not all(isinstance(n, (int, float)) and abs(n) <= 1e6 for n in numbers):
        raise CheckpointError(f"{key} is {_show(value)}; it must be 3 numbers from -1e6 to 1e6")
    return numbers


def _resample(value: Any) -> str:
    if not isinstance(value, int) or isinstance(value, bool) or value not in _FILTERS:
        known = ", ".join(f"{number} ({name})" for number, name in sorted(_FILTERS.items()))
        raise CheckpointError(f"resample is {_show(value)}; it must be one of {known}")
    return _FILTERS[value]


_show = reprlib.repr
