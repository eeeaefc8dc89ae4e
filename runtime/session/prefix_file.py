"""A file with the beginning of a prompt, text and images before the last one: what stages' caches hold of it.

It is safetensors, bound to the bundle, the engine and its arithmetic, and has a SHA-256 of its tensors. Where the
bundle must be signed, so must it, by the same key: NAME.sig is the Ed25519 signature of its bytes. A session takes its
K and V for the tokens that enter the decoder as the file's did, and for no others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.backend import Backend
from vtx.runtime.bundle.bundle import MANIFEST, Bundle, sha256
from vtx.runtime.bundle.files import read_named
from vtx.runtime.bundle.safetensors import read_bits, read_header, write_safetensors
from vtx.runtime.bundle.seal import SIGNATURE, SIGNATURE_BYTES
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.session.caches import PrefixCaches
from vtx.runtime.session.prefix import Key, Prefix

FORMAT = "vtx-prefix-2"
Tensors = Mapping[str, NDArray[Any]]


def beginning(prefix: Prefix) -> int:
    """The number of tokens before the last image; 0 without an image."""
    images = np.flatnonzero(prefix.is_vision)
    return int(images[-len(prefix.images[-1])]) if len(images) else 0


def save_prefix(path: Path, bundle: Bundle, backend: Backend, caches: PrefixCaches) -> None:
    """Write what the caches hold of the tokens before the last image.

    Raises RequestError: there is none, K and V are not in the computer's memory, or the file must be signed;
    ExportError: it cannot be written.
    """
    prefix = caches.prefix
    segments = caches.complete
    count = beginning(prefix)
    if not count or not segments or any(segment.saved for segment in segments):
        raise RequestError(
            "the caches do not hold what stands before the prompt's last image; leave the prefix file out with this "
            "reduction"
        )
    if bundle.key is not None:
        raise RequestError(
            f"{path.name} is not written, as it must be signed, and the key that signs is not here; write it where no "
            f"signature is required, and sign it: {_sign(path)}"
        )
    tensors: dict[str, NDArray[Any]] = {
        "ids": np.frombuffer(prefix.key.ids, np.int64)[:count],
        "is_vision": prefix.is_vision[:count],
        "positions": prefix.positions[:count],
        "hidden": prefix.hidden[:count],
    }
    tensors |= {f"input {name}": values[:count] for name, values in prefix.inputs.items()}
    text = np.flatnonzero(~prefix.is_vision[:count])
    for number, (stage, segment) in enumerate(zip(caches.stages, segments, strict=False)):
        tensors[f"text {number}"] = segment.states_of(text)
        kv = segment.cache.read(np.arange(count))
        layers = kv[0] if isinstance(kv, tuple) else kv  # with positions, which are the prefix's, where layers slide
        if not isinstance(layers, list | np.ndarray):
            raise RequestError(f"on {backend.device} K and V stay on the GPU and cannot be saved; leave the file out")
        tensors |= {f"kv {layer}": values for layer, values in zip(stage.cached, layers, strict=True)}
    write_safetensors(path, tensors, {**_binding(bundle, backend), "sha256": _checksum(tensors)})


def check_prefix(path: Path, bundle: Bundle, backend: Backend) -> None:
    """Raise BundleError for a file that is too large, or not signed by the key that must have signed the bundle."""
    model = bundle.manifest.model
    slots = bundle.manifest.max_context
    key = bundle.key
    rows = (
        len(bundle.manifest.stages)
        + 3
        + sum(declared.width for declared in bundle.manifest.token_inputs) // model.hidden
    )
    most = (1 << 20) + 2 * slots * model.layers * backend.kv_slot_bytes + 4 * slots * model.hidden * rows
    try:
        size = path.stat().st_size
    except OSError as e:
        raise BundleError(f"{path.name} cannot be read ({e.strerror})") from e
    if size > most:
        raise BundleError(f"{path.name} has {size:,} bytes, of this bundle at most {most:,}; remove it")
    if key is None:
        return
    signature = path.with_name(path.name + SIGNATURE)
    if not signature.exists():
        raise BundleError(
            f"{path.name} is not signed, and a signature by {key.name} is required; sign it: {_sign(path)}"
        )
    content = read_named(path, most, error=BundleError)
    if not key.signed(content, read_named(signature, SIGNATURE_BYTES, error=BundleError)):
        raise BundleError(
            f"the signature of {path.name} does not fit it and {key.name}: it was altered, or signed with another key; "
            "remove it"
        )


def _sign(path: Path) -> str:
    return f"openssl pkeyutl -sign -rawin -inkey KEY -in {path.name} -out {path.name}{SIGNATURE}"


def load_prefix(path: Path, bundle: Bundle, backend: Backend, caches: PrefixCaches) -> None:
    """Begin empty caches with the tokens of a file. Raises BundleError for another bundle's, or a damaged one."""
    check_prefix(path, bundle, backend)
    header = read_header(path, error=BundleError)
    for name, value in _binding(bundle, backend).items():
        if header.metadata.get(name) != value:
            raise BundleError(f"{path.name} was written for another {name}; remove it")
    tensors = {name: read_bits(info, error=BundleError) for name, info in header.tensors.items()}
    if header.metadata.get("sha256") != _checksum(tensors):
        raise BundleError(f"{path.name} is damaged (its SHA-256 differs); remove it")
    try:
        kv = {int(name[3:]): tensor for name, tensor in tensors.items() if name.startswith("kv ")}
        caches.begin(*_prefix(tensors), kv)
    except (KeyError, ValueError, IndexError, TypeError) as e:
        raise BundleError(f"{path.name} does not hold a prompt of this bundle ({e}); remove it") from e


def _prefix(tensors: Tensors) -> tuple[Prefix, list[NDArray[Any]]]:
    """The prefix of a file, which no prompt has by its key, and the hidden states of its text after each stage."""
    hidden = tensors["hidden"]
    is_vision = tensors["is_vision"].astype(bool)
    positions = tensors["positions"]
    count = len(hidden)
    inputs = {name[6:]: values for name, values in tensors.items() if name.startswith("input ")}
    text = [tensors[f"text {number}"] for number in range(sum(name.startswith("text ") for name in tensors))]
    sizes = [len(tensors["ids"]), len(is_vision), len(positions), *map(len, inputs.values())]
    widths = {values.shape[1:] for values in (hidden, *text)}
    same = set(sizes) == {count} and {len(values) for values in text} == {int((~is_vision).sum())} and len(widths) == 1
    typed = positions.dtype == np.int64 and all(
        values.dtype == np.float32 for values in (hidden, *text, *inputs.values())
    )
    if not count or not same or not typed or is_vision.ndim != 1 or hidden.ndim != 2:
        raise ValueError("its tensors have other sizes or types")
    key = Key(tensors["ids"].astype(np.int64).tobytes(), ("a file",))
    return Prefix(key, is_vision, (), positions, int(positions.max()) + 1, hidden, inputs), text


def _binding(bundle: Bundle, backend: Backend) -> dict[str, str]:
    """The bundle and the engine that a file is bound to, by the name of each part."""
    engine = f"{backend.device} {backend.compute} {backend.dialect}"
    return {"format": FORMAT, "bundle": sha256(bundle.path(MANIFEST)), "engine": engine}


def _checksum(tensors: Tensors) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        total.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        total.update(array.tobytes())
    return total.hexdigest()
