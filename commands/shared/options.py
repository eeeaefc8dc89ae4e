"""Options of several commands, each declared once; those that load a bundle arrive as one `Loading`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from vtx.runtime.backends.engines import COMPUTE, DEVICES
from vtx.runtime.errors import DeviceError
from vtx.runtime.precision import PRECISIONS
from vtx.runtime.terminal.console import require_signature_option
from vtx.runtime.terminal.depth import DepthType, joined
from vtx.tools.common.loading import Loading

_LOADING = {  # by the field of `Loading` that each fills
    "device": click.option(
        "--device", type=click.Choice(DEVICES, case_sensitive=False), default="auto", show_default=True,
        help="Where to compute.",
    ),
    "compute": click.option(
        "--compute", type=click.Choice(COMPUTE, case_sensitive=False),
        help="Arithmetic: bf16 or int8 with openvino, f16 with tensorrt [default: the device's first].",
    ),
    "threads": click.option("--threads", type=int, help="[default: all cores]"),
    "fit": click.option(
        "--fit", type=click.Choice(["crop", "pad", "squash"]),
        help="Images that are not square: crop their sides, pad them with bars, or squash them [default: as the "
        "checkpoint's image processor does].",
    ),
    "max_tiles": click.option(
        "--max-tiles", type=int, metavar="N",
        help="For models that see images in tiles: at most N tiles per image, including the one of the whole image.",
    ),
    "max_pixels": click.option(
        "--max-pixels", type=int, metavar="N",
        help="For models that see images at their own resolution: shrink images of more than N pixels.",
    ),
    "image_formats": click.option(
        "--image-formats", default="jpeg,png,webp,bmp,gif", show_default=True, help="Formats that are read; also ppm.",
        callback=lambda _, __, value: tuple(name.strip() for name in value.split(",")),
    ),
    "force": click.option("--force", is_flag=True, help="Load even if the free memory looks too small."),
    "require_signature": require_signature_option,
}  # fmt: skip


def loading_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options of loading; their values are its argument `loading`."""

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def collected(**values: Any) -> None:
            function(loading=Loading(**{name: values.pop(name) for name in names}), **values)

        for name in reversed(names):
            collected = _LOADING[name](collected)
        return collected

    return declare


bundle_option = click.option(
    "--bundle", type=click.Path(), envvar="VTX_BUNDLE",
    help="Bundle directory [default: $VTX_BUNDLE, else the last one exported].",
)  # fmt: skip
k_option = click.option(
    "--k", type=DepthType(default=True), default="default", metavar="N|auto|none",
    help="A prebuilt K [default: the bundle's].",
)  # fmt: skip
ks_option = click.option(
    "--k", "ks", type=DepthType(several=True), multiple=True, callback=joined, metavar="K,K,...",
    help="Prebuilt K, none or auto [default: all in the bundle; with --reduce, none].",
)  # fmt: skip
reduce_option = click.option(
    "--reduce", default="default", metavar="SPEC|none",
    help="Leave out vision tokens: fastv, mustdrop:192, lsm:tau=0.9+fastv:ratio=0.75 [default: the bundle's first].",
)  # fmt: skip
max_new_tokens_option = click.option(
    "--max-new-tokens", type=int, default=256, show_default=True, help="Tokens of the answer, at most."
)
images_option = click.option(
    "--images", type=click.Path(path_type=Path), help="Directory of the images [default: the data file's]."
)
model_option = click.option(
    "--model", default="demo", show_default=True, help="Checkpoint directory or Hugging Face id; demo: built in."
)


def precision_type() -> click.Choice[str]:
    """fp32, fp16, bf16, int8 or int4, in any case."""
    return click.Choice(list(PRECISIONS), case_sensitive=False)


vision_precision_option = click.option(
    "--vision-precision", type=precision_type(),
    help="Precision of tower and projector [default: --precision; int8 for int8 and int4].",
)  # fmt: skip
head_precision_option = click.option(
    "--head-precision", type=precision_type(),
    help="Precision of the output matrix [default: --precision; int8 for int8 and int4].",
)  # fmt: skip
tower_option = click.option(
    "--tower", metavar="PATH",
    help="Directory or Hugging Face id of the vision tower, for a checkpoint that only names one.",
)  # fmt: skip
allow_pickle_option = click.option(
    "--allow-pickle", is_flag=True, help="Also read the tensors of pickled weights; nothing is unpickled."
)
chat_template_option = click.option(
    "--chat-template", type=click.Path(path_type=Path),
    help="A Jinja file, or a template of original LLaVA by name, e.g. llava_v1; for a checkpoint without one.",
)  # fmt: skip
items_option = click.option(
    "--items", type=int, default=1000, show_default=True, help="Items to train on, sampled from DATA."
)
report_option = click.option(
    "--json", "as_json", is_flag=True, help="The report as one JSON object on stdout, and nothing else."
)
plot_option = click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png", help="Also draw a plot."
)


def need_exporter() -> None:
    """Raise DeviceError, with the command that installs it, if a library of the exporter is missing."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # errors of a model are reported by vtx
    try:
        import vtx.exporter.bundling.export  # noqa: F401
    except ImportError as e:
        raise DeviceError(f'exporting needs {e.name}; pip install "vtx-edge[export]"') from e


def given(name: str) -> bool:
    """Return True if the command line gives an option, even with its default value."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE
