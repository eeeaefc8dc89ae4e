"""Traces on disk: `traces.json`, `images.safetensors`, and one safetensors file a case.

images.safetensors     pixels.N [3, height, width] f32: the vision graph's input for image N
image-N.png            the picture itself
case-NN.safetensors    of question Q of the case, T the tokens of its prompt:
Q.ids              [T] int64, image tokens expanded as they enter the decoder
Q.is_vision        [T] uint8
Q.kept.C           [image tokens] uint8: 1 for each image token left after cut C
Q.positions.L      [slots] int64: the position of the token in each filled slot of layer L after the prompt;
                   [slots, 3] if positions have three parts
Q.decoded.L        [steps] int64, or [steps, 3]: the positions of the decoded tokens in layer L
Q.tokens           [1 + steps] int64: the greedy answer
Q.logits           [1 + steps, vocab] f32: of each token of the answer
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from vtx.runtime.bundle.safetensors import parse_json, read_bits, read_header
from vtx.runtime.errors import RequestError
from vtx.runtime.strict import Strict, optional

FORMAT = 2
INDEX = "traces.json"
IMAGES = "images.safetensors"
MAX_BYTES = 16 << 20
Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class TracedCut:
    """Image tokens left before `layer`, by these reductions or withdrawal."""

    layer: int
    by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TracedQuestion:
    """One question and its decisions: `k` is the first layer without image tokens, `reused` tokens were not run."""

    name: str
    messages: tuple[dict[str, Any], ...]
    images: tuple[int, ...]
    continues: bool
    replaces: bool
    reused: int
    k: int | None
    cuts: tuple[TracedCut, ...]


@dataclass(frozen=True, slots=True)
class TracedCase:
    k: str
    reduce: str
    file: str
    questions: tuple[TracedQuestion, ...]
    rest: str | None = optional(None)

    @property
    def name(self) -> str:
        return f"K = {self.k}, {self.reduce}" + ("" if self.rest is None else f", rest {self.rest}")


@dataclass(frozen=True, slots=True)
class TracedImage:
    """A picture, and the SHA-256 of its pixels as little-endian float32."""

    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Traces:
    """The index of a directory of traces. `manifest` is the SHA-256 of the bundle's `vtx.json`."""

    format: int
    runtime: str
    manifest: str
    device: str
    compute: str
    steps: int
    layers: int
    images: tuple[TracedImage, ...]
    cases: tuple[TracedCase, ...]

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise RequestError(f"{INDEX} has format {self.format}, this vtx reads {FORMAT}; write the traces again")


def read_index(folder: Path) -> Traces:
    """The index of `folder`. Raises RequestError if it is missing or not an index."""
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as e:
        raise RequestError(f"{path} cannot be read ({e.strerror}); write traces with vtx-doctor --write-traces") from e
    if len(raw) > MAX_BYTES:
        raise RequestError(f"{path} is larger than {MAX_BYTES:,} bytes; write the traces again")
    data = parse_json(raw, str(path), error=RequestError)
    return Strict(RequestError, "write the traces again").read(Traces, data, INDEX)


def read_tensors(folder: Path, name: str) -> dict[str, NDArray[Any]]:
    """The tensors of one file of a directory of traces; the file must be in it."""
    if Path(name).name != name:
        raise RequestError(f"{INDEX}: the file {name!r:.80} is not in its directory; write the traces again")
    tensors = read_header(folder / name, error=RequestError).tensors
    return {key: read_bits(info, error=RequestError) for key, info in tensors.items()}
