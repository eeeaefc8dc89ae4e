"""The declaration of a model family, and the reading that LLaVA's relatives in Hugging Face's layout share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtx.exporter.checkpoint.config import (
    VISION_FAMILIES,
    ModelConfig,
    VideoConfig,
    feature_layers_of,
    image_token_of,
    parse_parts,
    tower_of,
)
from vtx.exporter.checkpoint.fields import number
from vtx.exporter.checkpoint.text_config import TEXT_FAMILIES, text_config_of
from vtx.runtime.bundle.safetensors import TensorInfo
from vtx.runtime.bundle.spec.text_settings import BoxForm
from vtx.runtime.errors import UnsupportedModelError
from vtx.runtime.vision.layout import Layout
from vtx.tools.model.vision import VisionConfig

if TYPE_CHECKING:
    from vtx.runtime.prompt.text import Text
    from vtx.runtime.vision.layout import VideoLayout

Config = Mapping[str, Any]
NORM = "projector_layernorm_eps"
_COMMON = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "resample": 3}
CLIP_DEFAULTS: Config = {
    **_COMMON,
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
SIGLIP_DEFAULTS: Config = {
    **_COMMON,
    "size": {"height": 224, "width": 224},
    "do_center_crop": False,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """An image processor class of transformers, without its backend; `defaults` are for keys that its file lacks.

    `own_size`: images keep native resolution, which the image layout rounds. `tiled`: its size is the size of a
    tile, which neither resizing nor cropping may change. `pads`: `do_pad` makes each image square with the mean colour,
    instead of padding a batch to one size. `within`: images keep their shape in a square of its size, at the top left.
    `size` is the key of the size.
    """

    name: str
    defaults: Config
    tiled: bool = False
    pads: bool = False
    own_size: bool = False
    within: bool = False
    size: str = "size"


CLIP = ImageProcessor("CLIPImageProcessor", CLIP_DEFAULTS)
SIGLIP = ImageProcessor("SiglipImageProcessor", SIGLIP_DEFAULTS)
LLAVA = ImageProcessor("LlavaImageProcessor", CLIP_DEFAULTS, pads=True)
ONE_PIECE = (CLIP, SIGLIP, LLAVA)


@dataclass(frozen=True, slots=True)
class WholeLayout:
    """An original layout whose checkpoint holds all of its parts.

    `text` is the key of the decoder's configuration, None if it is `config.json` itself; `image_token` is the
    placeholder of an image and `end_token` ends an answer: the tokenizer gives their ids; None: the original has no
    such token, or another file names it. `tensors` splits tensors that hold several weights of a `config.json`, and
    `sizes` adds to that what the shapes of tensors alone tell.
    """

    text: str | None
    image_token: str | None
    end_token: str | None
    tensors: Callable[[Config, Mapping[str, TensorInfo]], Iterable[tuple[str, TensorInfo]]]
    sizes: Callable[[Config, Mapping[str, TensorInfo]], Config] = lambda *_: {}


@dataclass(frozen=True, slots=True)
class OriginalLayout:
    """Functions of the `config.json` of a family in its authors' layout.

    `processor` turns the tower's image processor, in Hugging Face's form, into the model's; if the checkpoint is
    `whole`, it gets what is in that one's own file. `template` is the chat
    template if the user gives none. `tower` names the checkpoint of a separate vision tower; `own_tower` is true if
    tower weights in the checkpoint itself are used. `folders` are the parts of a checkpoint in several folders, by the
    key of the part's configuration in `config.json`. `whole` is for a checkpoint with all of its parts.
    """

    processor: Callable[[Config, Config], Config]
    template: Callable[[Config], str]
    tower: Callable[[Config], str] | None = None
    own_tower: Callable[[Config], bool] = lambda _: False
    folders: Mapping[str, str] = field(default_factory=dict)
    whole: WholeLayout | None = None


@dataclass(frozen=True, slots=True)
class OriginalParts:
    """One checkpoint's image processor configuration, chat template, tokenizer folder, and ids that end an answer."""

    processor: Config
    template: str
    text_folder: Path
    end_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """One family, recognised by its `architecture` and `model_type`.

    `read` turns `config.json` into the configuration of the graphs. `processors` are the image processors it may have;
    `tensors` are pairs of a pattern and its replacement in canonical names, for names that other families do not have.
    `video_processor` prepares video frames, if the family has videos and treats their frames unlike images;
    `adjust_video` adds settings of its own file to the layout of videos; `video_template` is the chat template that
    transformers' processor takes in place of the checkpoint's if there is a video.
    `adjust` adds settings of the image processor's file, `template` the edits that transformers' processor makes to a
    prompt after the chat template. `prompt` is the chat template of checkpoints that have none, since it is the work of
    transformers' processor; it prints the whole prompt, and the tokenizer adds nothing. `statistics` adds those of
    `processor_config.json`. `seg_token` marks a segment of the image, whose state answers give out, `boxes`
    the form of boxes in answers, as the authors state it. `check` raises
    CheckpointError if tokenizer and template do not make prompts as in training. `reader`: it reads documents, whose
    image tokens leave only if the user accepts other answers. `spellings`: further pairs of model_type and architecture
    in published files. `fix_mistral_regex`: transformers' option, by which words are split as in training although a
    tokenizer.json of its release 4 states another pattern. `transposed` are canonical names of matrices that its
    checkpoints hold as [in, out]; `arrange` makes the weights of graphs of its tensors, of which some hold several, or
    rows in another order. `downsampling`: the values of `downsample_mode` in its files, among which an export may
    choose. A family with an `original` layout is recognised by its `architecture` alone.
    """

    model_type: str
    architecture: str
    read: Callable[[Config], ModelConfig]
    processors: tuple[ImageProcessor, ...]
    tensors: tuple[tuple[str, str], ...] = ()
    video_processor: ImageProcessor | None = None
    adjust_video: Callable[[Any, Config], VideoLayout] | None = None
    video_template: str | None = None
    adjust: Callable[[ModelConfig, Config], ModelConfig] | None = None
    template: Callable[[str, ModelConfig], str] | None = None
    prompt: str | None = None
    statistics: Callable[[ModelConfig, Config], ModelConfig] | None = None
    original: OriginalLayout | None = None
    seg_token: str | None = None
    boxes: BoxForm | None = None
    check: Callable[[Text], None] | None = None
    transposed: tuple[str, ...] = ()
    arrange: Callable[[ModelConfig, Mapping[str, TensorInfo]], Iterable[tuple[str, TensorInfo]]] | None = None
    downsampling: tuple[str, ...] = ()
    reader: bool = False
    spellings: tuple[tuple[str, str], ...] = ()
    fix_mistral_regex: bool = False


def read_llava_like(
    config: Config,
    kind: str,
    layout: Callable[[Any, VisionConfig, str], Layout],
    video: Callable[[Any, ModelConfig], VideoConfig] | None = None,
) -> ModelConfig:
    """Read `config.json` with transformers' class `kind` and its defaults.

    `layout` gets the parsed configuration, the tower and the selection strategy, `video` the parsed configuration and
    the model. Raises UnsupportedModelError, CheckpointError.
    """
    if "text_config" not in config and any(key.startswith("mm_") for key in config):
        raise UnsupportedModelError(
            "config.json names an architecture of Hugging Face's layout and holds LLaVA's own settings (mm_...); "
            "use a checkpoint in one of the layouts"
        )
    parsed = parse_parts(kind, config, TEXT_FAMILIES, tuple(VISION_FAMILIES))
    text_config = text_config_of(parsed)
    vision = parsed.vision_config
    vision_config = tower_of(vision, VISION_FAMILIES[vision.model_type])
    select = getattr(parsed, "vision_feature_select_strategy", "default")
    if select not in ("default", "full"):
        raise UnsupportedModelError(
            f"vision_feature_select_strategy {select!r} is not supported; vtx supports 'default' and 'full'"
        )
    # older releases of transformers, e.g. the newest for Python 3.10, use a plural name for ViP-LLaVA
    plural = getattr(parsed, "vision_feature_layers", None)
    feature_layer = parsed.vision_feature_layer if plural is None else plural
    model = ModelConfig(
        text=text_config,
        vision=vision_config,
        feature_layers=feature_layers_of(feature_layer, vision_config.layers),
        select=select,
        projector_activation=parsed.projector_hidden_act,
        projector_bias=bool(getattr(parsed, "multimodal_projector_bias", True)),
        image_token_id=image_token_of(parsed, text_config),
        layout=layout(parsed, vision_config, select),
        projector_norm_eps=number(vars(parsed), NORM) if hasattr(parsed, NORM) else None,
    )
    return model if video is None else replace(model, video=video(parsed, model))
