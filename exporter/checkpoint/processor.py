"""Image settings of a bundle, read from the image processor's configuration in a Hugging Face checkpoint."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vtx.exporter.checkpoint.family import ONE_PIECE, ImageProcessor
from vtx.exporter.checkpoint.hub import checkpoint_files
from vtx.exporter.checkpoint.settings import read_settings
from vtx.runtime.bundle.spec.image_settings import RESAMPLING, ImageSettings
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.vision.limits import MAX_SAMPLED_FRAMES

ALONE = "preprocessor_config.json"
_FILTERS = dict(enumerate(RESAMPLING))


def read_image_processor(folder: Path) -> Mapping[str, Any]:
    """`processor_config.json`'s `image_processor`, else `preprocessor_config.json`. Raises CheckpointError."""
    config: Any = read_settings(folder, "processor_config.json").get("image_processor")
    if config is None:
        config = read_settings(folder, ALONE)
        if not config and not checkpoint_files(folder).exists(ALONE):
            raise CheckpointError(f"{folder} has no {ALONE}, which holds the image settings; download it too")
    if not isinstance(config, Mapping):
        raise CheckpointError(f"the image processor's configuration is {_show(config)}, not a JSON object")
    return config


def read_video_processor(folder: Path) -> Mapping[str, Any]:
    """`processor_config.json`'s `video_processor`, else `video_preprocessor_config.json`; empty if there is neither."""
    config: Any = read_settings(folder, "processor_config.json").get("video_processor")
    if config is None:
        config = read_settings(folder, "video_preprocessor_config.json")
    if not isinstance(config, Mapping):
        raise CheckpointError(f"the video processor's configuration is {_show(config)}, not a JSON object")
    return config


def read_video_settings(
    folder: Path, kind: ImageProcessor, images: Sequence[ImageProcessor], *, by_rate: bool
) -> tuple[ImageSettings, int | None]:
    """Settings of a video's frames, and the number of sampled frames if the file has one.

    Without a file of the video processor, which is `kind`, they are those of the image processor, one of `images`.
    `by_rate`: the layout of videos reads how frames are sampled.
    Raises UnsupportedModelError, CheckpointError.
    """
    config = read_video_processor(folder) or read_image_processor(folder)
    named = config.get("video_processor_type") or config.get("image_processor_type")
    base = named.removesuffix("Fast").removesuffix("Pil") if isinstance(named, str) else named
    if base is not None and base not in (kind.name, *(image.name for image in images)):
        raise UnsupportedModelError(f"video processor {_show(named)} is not supported; supported: {kind.name}")
    frames = config.get("num_frames")
    if not by_rate and config.get("do_sample_frames") and (config.get("fps") is not None or frames is None):
        raise UnsupportedModelError(f"{kind.name} samples frames by fps; vtx needs a fixed number: set num_frames")
    if frames is not None and (not isinstance(frames, int) or not 1 <= frames <= MAX_SAMPLED_FRAMES):
        raise CheckpointError(
            f"{kind.name}: num_frames is {_show(frames)}; it must be a whole number from 1 to {MAX_SAMPLED_FRAMES}"
        )
    settings = {key: value for key, value in config.items() if key != "do_pad"}
    return image_settings({**settings, "image_processor_type": kind.name}, [kind]), frames


def image_settings(config: Mapping[str, Any], known: Sequence[ImageProcessor] = ONE_PIECE) -> ImageSettings:
    """Settings from an HF image processor's configuration, else its class's defaults; images always become RGB."""
    if not isinstance(config, Mapping):
        raise CheckpointError(f"the image processor's configuration is {_show(config)}, not a JSON object")
    kind = _kind_of(config, known)
    values = {**kind.defaults, **{key: value for key, value in config.items() if value is not None}}
    pads = _flag(values, "do_pad")
    normalize = _flag(values, "do_normalize")
    mean = _triple(values, "image_mean")
    std = _triple(values, "image_std")
    if kind.within:
        values |= {"size": _square_of(kind, values)}
    if kind.own_size:
        _check_resized_alone(kind, values)
        values |= {"do_resize": False}  # the image layout resizes
    resize, crop = _sides(kind, values)
    pad = _padding(kind, values, mean) if pads else None
    one_size = crop is not None or isinstance(resize, tuple) or (resize and pad)
    if not one_size and not kind.own_size:
        raise UnsupportedModelError(
            f"{kind.name} without do_center_crop and with size {_show(values[kind.size])} gives images of several "
            "sizes; vtx needs one: a size of height and width, or do_center_crop"
        )
    try:
        return ImageSettings(
            pad=pad,
            resize=resize,
            resample=_resampling(values["resample"]),
            crop=crop,
            rescale=values["rescale_factor"] if _flag(values, "do_rescale") else 1.0,
            mean=mean if normalize else (0.0, 0.0, 0.0),
            std=std if normalize else (1.0, 1.0, 1.0),
            within=kind.within,
            **kind.placed,
        )
    except BundleError as error:
        raise CheckpointError(f"{kind.name}: {error}") from error


def _padding(
    kind: ImageProcessor, values: Mapping[str, Any], mean: tuple[float, float, float]
) -> tuple[int, int, int] | None:
    """The colour that fills an image up to a square, or None if this processor fills none up."""
    if kind.pads:
        return int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255)
    if "pad_size" in values and not kind.within:  # without it, only images of a batch are padded
        raise UnsupportedModelError(
            f"{kind.name} with pad_size is not supported; vtx pads only as LlavaImageProcessor does"
        )
    return None


def _kind_of(config: Mapping[str, Any], known: Sequence[ImageProcessor]) -> ImageProcessor:
    """The one of `known` that the configuration names; without a name the last, as in transformers."""
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


def _square_of(kind: ImageProcessor, values: Mapping[str, Any]) -> dict[str, Any]:
    """The square that images are fitted into and padded to."""
    sides = {*dict(values["size"]).values(), *dict(values["pad_size"]).values()}
    fitted = values["do_pad"] and values["do_resize"] and {*values["size"]} == {"max_height", "max_width"}
    if len(sides) != 1 or not fitted:
        raise UnsupportedModelError(
            f"{kind.name} with size {_show(values['size'])} and pad_size {_show(values['pad_size'])} is not "
            "supported; vtx fits images into a square (max_height, max_width) and pads them to it"
        )
    return {"height": min(sides), "width": min(sides)}


def _check_resized_alone(kind: ImageProcessor, values: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError if images at native resolution are not resized, or more than that."""
    unseen = kind.defaults.get("do_pad")  # of patches, which the tower's mask hides
    pads = _flag(values, "do_pad") and not unseen
    if not _flag(values, "do_resize") or _flag(values, "do_center_crop") or pads:
        raise UnsupportedModelError(
            f"{kind.name} without do_resize, or with do_center_crop or do_pad, is not supported; vtx only resizes "
            "its images"
        )


def _sides(kind: ImageProcessor, values: Mapping[str, Any]) -> tuple[Any, Any]:
    """The sizes that images are resized and cropped to; of a tiled layout, whose whole image is squeezed, a tile's."""
    square = _flag(values, "default_to_square")
    resize = _size(values, kind.size, square=square) if _flag(values, "do_resize") else None
    crop = _size(values, "crop_size", square=True) if _flag(values, "do_center_crop") else None
    if not kind.tiled:
        return resize, crop
    tile = (resize, resize) if isinstance(resize, int) else resize
    if not isinstance(tile, tuple) or (crop is not None and crop != tile):
        raise UnsupportedModelError(
            f"{kind.name} with size {_show(resize)} and crop_size {_show(crop)} cuts or resizes its tiles; "
            "vtx needs both to be the tile's"
        )
    return tile, None


def _resampling(number: object) -> str:
    """The name of a filter by Pillow's number."""
    if not isinstance(number, int) or isinstance(number, bool) or number not in _FILTERS:
        filters = ", ".join(f"{number} ({name})" for number, name in sorted(_FILTERS.items()))
        raise CheckpointError(f"resample is {_show(number)}; it must be one of {filters}")
    return _FILTERS[number]


def _size(values: Mapping[str, Any], key: str, *, square: bool) -> Any:
    """The shortest edge as an int, or (height, width), before any check of their range."""
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
    fields = "height and width, or shortest_edge" if key == "size" else "height and width"
    raise UnsupportedModelError(
        f"{key} with the keys {_show(sorted(map(str, size)))} is not supported; vtx supports {fields}"
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


_show = reprlib.repr
