"""Options that several commands take alike."""

from __future__ import annotations

import click
from click.core import ParameterSource

from vtx.runtime.backends.engines import COMPUTE, DEVICES
from vtx.runtime.precision import PRECISIONS

bundle_option = click.option(
    "--bundle", type=click.Path(), envvar="VTX_BUNDLE", help="[default: $VTX_BUNDLE, else the last one exported]"
)
device_option = click.option(
    "--device", type=click.Choice(DEVICES, case_sensitive=False), default="auto", show_default=True,
    help="Where to compute.",
)  # fmt: skip
compute_option = click.option(
    "--compute", type=click.Choice(COMPUTE, case_sensitive=False),
    help="Arithmetic: bf16 or int8 with openvino, f16 with tensorrt [default: the device's first].",
)  # fmt: skip
fit_option = click.option(
    "--fit", type=click.Choice(["crop", "pad", "squash"]),
    help="Pictures that are not square: cut off their sides, put bars around them, or stretch them [default: as the "
    "checkpoint's image processor says].",
)  # fmt: skip
max_tiles_option = click.option(
    "--max-tiles", type=int, metavar="N",
    help="For models that see images in tiles: at most N tiles of an image, the whole image in one tile counted.",
)  # fmt: skip
max_pixels_option = click.option(
    "--max-pixels", type=int, metavar="N",
    help="For models that see images at their own resolution: at most N pixels of an image; larger ones are shrunk.",
)  # fmt: skip
tower_option = click.option(
    "--tower", metavar="PATH",
    help="Directory or Hugging Face id of the vision tower, for a checkpoint that only names one.",
)  # fmt: skip
allow_pickle_option = click.option(
    "--allow-pickle", is_flag=True, help="Read pickled weights too: their tensors alone; nothing is unpickled."
)
threads_option = click.option("--threads", type=int, help="[default: all cores]")


def precision_type() -> click.Choice[str]:
    """fp32, fp16, bf16, int8 or int4, in any case."""
    return click.Choice(list(PRECISIONS), case_sensitive=False)


def given(name: str) -> bool:
    """Whether the command line gives an option, be it its default."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE
