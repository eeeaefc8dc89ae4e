"""Loading a bundle: choosing its device, and checking that it fits into memory."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vtx.runtime.api.model import Model
from vtx.runtime.backends.devices import NONE, DeviceChoice, choose_by_card, float_bytes, open_backend
from vtx.runtime.backends.engines import AUTO, ENGINES, EXPANDED
from vtx.runtime.backends.memory import needed_memory
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.seal import PublicKey
from vtx.runtime.checks import MOST_THREADS, check_whole
from vtx.runtime.errors import DeviceError
from vtx.runtime.host.machine import available_memory
from vtx.runtime.units import size
from vtx.runtime.vision.files.formats import check_formats
from vtx.runtime.vision.layout import limited_layout, settings_for
from vtx.runtime.vision.layouts import read_layout
from vtx.runtime.vision.limits import DEFAULT_FORMATS

log = logging.getLogger(__name__)


def load(
    bundle: str | os.PathLike[str],
    *,
    device: str = AUTO,
    compute: str | None = None,
    threads: int | None = None,
    force: bool = False,
    require_signature: str | os.PathLike[str] | None = None,
    fit: str | None = None,
    max_tiles: int | None = None,
    max_pixels: int | None = None,
    image_formats: Sequence[str] = DEFAULT_FORMATS,
) -> Model:
    """Load a bundle that `vtx-export` made.

    The settings of its card, if `vtx-fit` gave it one, are the defaults: device, arithmetic and the limits of images
    here, K and reductions of its questions. A card whose engine is not possible here, or not the one asked for, is
    ignored with a warning.

    Args:
        bundle: its directory.
        device: "cpu" (onnxruntime), "openvino", "cuda" (onnxruntime), "tensorrt" (engines of vtx-build), or "auto" for
            the best of those that are possible here. "cuda:1" and "tensorrt:1" are on the second GPU.
        compute: type of the arithmetic: "f32", on TensorRT also "f16", on OpenVINO also "bf16" and "int8", which
            multiplies integers (docs/how-to/openvino.md). When left out, the fastest on this processor that kept the
            bundle's answers when it was exported, else the device's first.
        threads: threads to compute with; all cores when left out.
        force: load even if the free memory looks too small for the weights.
        require_signature: a public key (Ed25519, PEM); only a bundle that the private half has signed is loaded. All
            its files are hashed before it is used, about a second for each 0.5 GB.
        fit: the treatment of images of another shape than the model's: "crop" cuts off the sides, "pad" puts bars
            around them, "squash" stretches them, "released" sees LLaVA-NeXT's tiles as CDPruner's code does; when left
            out, as the checkpoint's processor says.
        max_tiles: if the model sees images in tiles, the most of an image, the whole image in one tile counted.
        max_pixels: if the model sees images at their own resolution, the most of an image; larger ones are shrunk.
        image_formats: formats of image files that are read, of "JPEG", "PNG", "WEBP", "BMP", "GIF" and "PPM"; all but
            the last when left out.

    Raises:
        BundleError: no bundle, a damaged one, or one without the signature that is required.
        DeviceError: the device, its package, its graphs or its arithmetic are not there, or the memory is too small.
        ImageError: an unknown format in `image_formats`.
        RequestError: `threads` is not a whole number from 1 to 1024, or `fit`, `max_tiles` or `max_pixels` is
            nothing that this model knows.

    """
    start = time.perf_counter()
    if threads is not None:
        check_whole("threads", threads, 1, MOST_THREADS)
    formats = check_formats(image_formats)
    key = None if require_signature is None else PublicKey.load(Path(require_signature))
    opened = Bundle.open(bundle, key=key)
    failed, backend = dict[str, str](), None
    while backend is None:
        chosen = choose_for(opened, device, compute, fit=fit, max_tiles=max_tiles, max_pixels=max_pixels, failed=failed)
        if not force and not ENGINES[chosen.device].gpu:
            _check_memory(opened, chosen)
        try:
            backend = open_backend(opened, chosen, threads)
        except DeviceError as e:
            if device != AUTO or not ENGINES[chosen.device].gpu:
                raise
            failed[chosen.device] = str(e)
    load_ms = 1000 * (time.perf_counter() - start)
    model = Model(
        opened, backend, load_ms, chosen.why, card=chosen.card, fit=fit, max_tiles=max_tiles, max_pixels=max_pixels,
        image_formats=formats,
    )  # fmt: skip
    if chosen.ignored:
        log.warning("card.json of %s is ignored: %s", opened.folder, chosen.ignored)
    if chosen.card:
        log.info("%s", chosen.card.in_words)
    log.info("loaded %s on %s (%s) in %.0f ms", opened.folder, chosen.device, chosen.why, load_ms)
    return model


def choose_for(
    bundle: Bundle, device: str, compute: str | None, *, fit: str | None = None, max_tiles: int | None = None,
    max_pixels: int | None = None, failed: Mapping[str, str] = NONE,
) -> DeviceChoice:  # fmt: skip
    """The device on which `load` would answer a bundle. Raises as `load` does if the bundle or machine cannot do it."""
    layout = read_layout(bundle.manifest.layout, bundle.manifest.model.tower)
    settings_for(layout, bundle.manifest.image, fit)
    limited_layout(layout, max_tiles, max_pixels)
    return choose_by_card(bundle, device, compute, failed)


def _check_memory(bundle: Bundle, chosen: DeviceChoice) -> None:
    """Raise DeviceError if a bundle does not fit into this machine's memory."""
    floats = float_bytes(chosen)
    needed, free = needed_memory(bundle, floats), available_memory()
    if free is not None and needed > free:
        wider = ", which expands fp16 and bf16 to float32" if floats is EXPANDED else ""
        raise DeviceError(
            f"{bundle.manifest.model.name} needs about {size(needed)} of memory on "
            f"{ENGINES[chosen.device].title}{wider}; {size(free)} is free; use a machine with more, or export with "
            "--precision int4 (--force tries all the same)"
        )
