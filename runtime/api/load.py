"""Loading a bundle: choosing its device, and checking that it fits into memory."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vtx.runtime.api.images import ImageOptions
from vtx.runtime.api.model import Model
from vtx.runtime.backends.devices import NONE, DeviceChoice, choose_by_card, open_backend
from vtx.runtime.backends.engines import AUTO, ENGINES, EXPANDED
from vtx.runtime.backends.memory import needed_memory, prompt_memory
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.seal import PublicKey
from vtx.runtime.checks import MOST_THREADS, check_whole
from vtx.runtime.errors import DeviceError
from vtx.runtime.host.machine import available_memory
from vtx.runtime.precision import PRECISIONS
from vtx.runtime.vision.files.formats import check_formats
from vtx.runtime.vision.layout import Layout, limited_layout, settings_for
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
    """Load a bundle exported by `vtx-export`.

    If `vtx-fit` wrote a card, its settings are the defaults: device, arithmetic, image limits, K and reductions. A
    card for an engine that is not available here, or not the requested one, is ignored with a warning.

    Args:
        bundle: its directory.
        device: "cpu" (onnxruntime), "openvino", "cuda" (onnxruntime), "tensorrt" (engines of vtx-build), or "auto" for
            the best one available here. "cuda:1" and "tensorrt:1" select the second GPU.
        compute: arithmetic: "f32", on TensorRT also "f16", on OpenVINO also "bf16" and "int8" (integer products,
            docs/how-to/openvino.md). Default: the fastest on this processor that left the answers unchanged at export,
            else the device's first.
        threads: CPU threads; default: all cores.
        force: load even if free memory looks too small for the weights.
        require_signature: a public key (Ed25519, PEM); the bundle must be signed with its private half. All files are
            hashed before use, about one second per 0.5 GB.
        fit: handling of images with another aspect ratio than the model's: "crop" cuts off the sides, "pad" adds bars,
            "squash" stretches, "released" tiles LLaVA-NeXT images as CDPruner's code does, and prepares pi0's images
            and instruction as openpi does. Default: as the checkpoint's image processor.
        max_tiles: for tiling models, the maximum number of tiles per image, including the overview of the whole image.
        max_pixels: for models with native image resolution, the maximum per image; larger images are downscaled.
        image_formats: accepted image file formats, of "JPEG", "PNG", "WEBP", "BMP", "GIF" and "PPM"; default: all but
            the last.

    Raises:
        BundleError: the bundle is missing, damaged, or lacks the required signature.
        DeviceError: the device, its package, its graphs or its arithmetic is not available, or memory is too small.
        ImageError: an unknown format in `image_formats`.
        RequestError: `threads` is not a whole number from 1 to 1024, or this model does not support the given `fit`,
            `max_tiles` or `max_pixels`.

    """
    start = time.perf_counter()
    if threads is not None:
        check_whole("threads", threads, 1, MOST_THREADS)
    images = ImageOptions(fit, max_tiles, max_pixels, check_formats(image_formats))
    key = None if require_signature is None else PublicKey.load(Path(require_signature))
    opened = Bundle.open(bundle, key=key)
    failed = dict[str, str]()
    backend = None
    while backend is None:
        choice = choose_for(opened, device, compute, images, failed)
        if not force and not ENGINES[choice.device].gpu:
            _check_memory(opened, choice, images)
        try:
            backend = open_backend(opened, choice, threads)
        except DeviceError as e:
            if device != AUTO or not ENGINES[choice.device].gpu:
                raise
            failed[choice.device] = str(e)
    load_ms = 1000 * (time.perf_counter() - start)
    model = Model(opened, backend, load_ms, choice.why, card=choice.card, images=images)
    if choice.ignored:
        log.warning("card.json of %s is ignored: %s", opened.folder, choice.ignored)
    if choice.card:
        log.info("%s", choice.card.in_words)
    log.info("loaded %s on %s (%s) in %.0f ms", opened.folder, choice.device, choice.why, load_ms)
    return model


def choose_for(
    bundle: Bundle,
    device: str,
    compute: str | None,
    images: ImageOptions,
    failed: Mapping[str, str] = NONE,
) -> DeviceChoice:
    """The device on which `load` would answer a bundle. Raises as `load` does if the bundle or machine cannot do it."""
    layout = read_layout(bundle.manifest.layout, bundle.manifest.model.tower)
    settings_for(layout, bundle.manifest.image, images.fit)
    limited_layout(layout, images.max_tiles, images.max_pixels)
    return choose_by_card(bundle, device, compute, failed)


def memory_of(bundle: Bundle, chosen: DeviceChoice, images: ImageOptions) -> int:
    """Bytes that a bundle takes on a device while it answers about one image, of the largest that `images` allow."""
    return needed_memory(bundle, chosen.device, chosen.compute, _largest(bundle, images).max_tokens)


def _largest(bundle: Bundle, images: ImageOptions) -> Layout:
    """The layout of the largest images that a bundle takes with these options."""
    layout = read_layout(bundle.manifest.layout, bundle.manifest.model.tower)
    return limited_layout(layout, images.max_tiles, images.max_pixels)


def _check_memory(bundle: Bundle, chosen: DeviceChoice, images: ImageOptions) -> None:
    """Raise DeviceError if a bundle does not fit into this machine's memory."""
    memory = memory_of(bundle, chosen, images)
    free = available_memory()
    if free is not None and memory > free:
        from vtx.runtime.units import size

        engine = ENGINES[chosen.device]
        wider = ", which expands fp16 and bf16 to float32" if engine.compute[chosen.compute] is EXPANDED else ""
        ways = ["use a machine with more", *_smaller(bundle, chosen, images, free)]
        raise DeviceError(
            f"{bundle.manifest.model.name} needs about {size(memory)} of memory on {engine.title}{wider}; {size(free)} "
            f"is free; {', or '.join(ways)} (--force tries all the same)"
        )


def _smaller(bundle: Bundle, chosen: DeviceChoice, images: ImageOptions, free: int) -> Iterator[str]:
    """Ways to load a model in less memory than a bundle takes with images as large as `images` allow."""
    if PRECISIONS[bundle.manifest.precision].bits != 4:
        yield "export with --precision int4"
    room = free - needed_memory(bundle, chosen.device, chosen.compute, 0)
    if room < 0:
        return  # not even without an image
    text = prompt_memory(bundle, chosen.device, 0)
    layout = _largest(bundle, images)
    for pixels in (smaller.pixels for smaller in layout.choices(None)):
        if pixels and prompt_memory(bundle, chosen.device, layout.within(pixels).max_tokens) - text <= room:
            yield f"load it with --max-pixels {pixels} (max_pixels={pixels})"
            return
    yield "export with a smaller --max-context"
