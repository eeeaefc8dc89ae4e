"""The parity certificate: golden vectors recorded at export, computed again by the bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.api.model import Model
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.bundle.tensors import MAX_GOLDEN
from vtx.runtime.errors import BundleError
from vtx.runtime.policies.make import make_policy
from vtx.runtime.precision import ARITHMETIC, KV_DTYPES, PRECISIONS
from vtx.runtime.prompt.messages import Part
from vtx.runtime.session.acting import Acting, Denoising
from vtx.runtime.session.prefix import no_check
from vtx.runtime.session.session import Prompt, Session
from vtx.runtime.vision.frame_file import FrameFile
from vtx.runtime.vision.plan import Views
from vtx.runtime.vision.preprocess import without_notes
from vtx.runtime.vision.tokens import Ids, ImageTokens

QUESTION = "What is in the picture?"
FEATURE_TOKENS = 8  # whose vision features are kept
DECODED_TOKENS = 128  # the image's first ones, with which the decoder is checked: that bounds an export's cost
PIXEL_TOLERANCE = 1e-5
# Engines round the inputs of integer matrices differently: the choice among tokens of nearly equal scores may differ.
OTHER_CHOICES = 0.25
FIRST = slice(0, DECODED_TOKENS)
PART = "image_part"  # the first image token and the end of those that the decoder of a mixture is checked with
MARGIN = "router_margin"  # of the closest choice among experts
STATE = "state"  # of actions
NOISE = "noise"


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison: the largest difference, relative to the reference's largest magnitude, and its limit.

    `margin`: of logits of a model with experts, the distance of its router's closest choice, also relative.
    """

    name: str
    difference: float
    limit: float
    note: str = ""
    margin: float | None = None

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit

    @property
    def tied(self) -> bool:
        """True for a difference that other experts may make, as rounding within the limit can choose them."""
        return not self.passed and self.margin is not None and self.margin < self.limit


def golden_image() -> Image.Image:
    """A fixed picture, 200 x 150, of smooth colours and sharp edges."""
    y, x = np.mgrid[0:150, 0:200]
    red = x * 255 // 199
    green = y * 255 // 149
    blue = np.where((x // 25 + y // 25) % 2, 220, 30)
    return Image.fromarray(np.stack((red, green, blue), -1).astype(np.uint8))


def golden_pixels(views: Views | FrameFile) -> NDArray[np.float32]:
    """The views of the golden picture as they are kept: a single one [3, height, width], more [views, 3, ...].

    Of views of different sizes the first one.
    """
    first: NDArray[np.float32] = views[0]
    return views if isinstance(views, np.ndarray) and len(views) > 1 else first


def actions_key(k: int | None) -> str:
    return f"actions.{k or 'none'}"


def key_of(k: int | None) -> str:
    return f"logits.{k or 'none'}"


def decoded_ids(ids: NDArray[np.int64], image_token_id: int, part: slice = FIRST) -> NDArray[np.int64]:
    """The golden prompt's ids for the decoder: of the image's tokens only a part."""
    is_vision = ids == image_token_id
    number = is_vision.cumsum() - 1
    remaining: NDArray[np.int64] = ids[~is_vision | ((number >= part.start) & (number < part.stop))]
    return remaining


def bounded_prompt(
    ids: Ids, image_token_id: int, encode: Callable[[], ImageTokens] | None, part: slice = FIRST
) -> Prompt:
    """The prompt of `ids` about at most one image, `encode`d when it is needed, of which a part is used."""
    bounded = decoded_ids(ids, image_token_id, part)
    if encode is None:
        return Prompt(bounded, np.zeros(len(bounded), bool), ())

    def first() -> ImageTokens:
        tokens = encode()
        return tokens.take(np.arange(len(tokens))[part])

    return Prompt(bounded, bounded == image_token_id, (("golden", first),))


def read_golden(bundle: Bundle) -> dict[str, NDArray[Any]]:
    """The golden vectors by name: ids [tokens], pixels [.., 3, height, width], features [n, hidden], logits [vocab]."""
    m = bundle.manifest
    stored = bundle.arrays(m.golden, MAX_GOLDEN)
    ks = (None, *m.variants)
    sizes: dict[str, tuple[int | None, ...]] = {key_of(k): (m.model.vocab,) for k in ks}
    axes = {"ids": (1,), "pixels": (3, 4), "features": (2,)}
    if m.action is not None:
        table = m.action.horizon, m.action.width
        sizes = {STATE: (m.action.state,), NOISE: table, **{actions_key(k): table for k in ks}}
        axes |= dict.fromkeys((NOISE, *map(actions_key, ks)), (2,))
    if PART in stored:
        sizes |= {PART: (2,), MARGIN: (1,)}
    sizes |= {"ids": (), "pixels": (3, *m.image.sides), "features": (m.model.hidden,)}  # None: any
    for name, last in sorted(sizes.items()):
        if name not in stored:
            raise BundleError(f"{m.golden} lacks {name!r}; export the bundle again")
        array = stored[name]
        dtype = np.int64 if name in ("ids", PART) else np.float32
        fits = array.dtype == dtype and array.ndim in axes.get(name, (1,)) and array.size
        shape = array.shape[array.ndim - len(last) :]
        if not fits or any(want not in (None, got) for want, got in zip(last, shape, strict=True)):
            raise BundleError(
                f"{m.golden}: {name} is {array.dtype} {list(array.shape)}, which does not fit this model; "
                "export the bundle again"
            )
    return stored


def logits_limit(manifest: Manifest, compute: str) -> float:
    """The largest difference of logits allowed to arithmetic in `compute`, as a share of their largest magnitude."""
    parts = manifest.precision, manifest.vision_precision, manifest.head_precision
    stored = max(PRECISIONS[part].tolerance for part in parts)
    return max(ARITHMETIC[compute].tolerance, KV_DTYPES[manifest.kv_dtype].tolerance, stored)


def exact_limit(manifest: Manifest) -> float:
    """The same in float32 by an engine that does not round what quantised matrices read."""
    return max(PRECISIONS["fp32"].tolerance, KV_DTYPES[manifest.kv_dtype].tolerance)


def choice_limit(manifest: Manifest) -> float:
    """The largest share of image tokens that two different engines may choose differently at a cut."""
    parts = manifest.precision, manifest.vision_precision
    return OTHER_CHOICES if any(PRECISIONS[part].bits for part in parts) else 0.0


def check_golden(model: Model) -> Iterator[Check]:
    """Recompute every golden vector through the bundle. Raises BundleError."""
    manifest = model.manifest
    stored = read_golden(model.bundle)
    ids, pixels, features = (stored[name] for name in ("ids", "pixels", "features"))
    content: list[Part] = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    with without_notes():
        prepared = model.loaded.images.prepare(golden_image())
    own_ids = model.loaded.text.prompt([{"role": "user", "content": content}], [prepared.in_prompt])
    yield Check("token ids", float(not np.array_equal(ids, own_ids)), 0.0)
    yield Check("image preprocessing", _distance(golden_pixels(prepared.views), pixels), PIXEL_TOLERANCE)
    computed = ARITHMETIC[model.backend.compute].tolerance
    encoded = prepared.encode(model.backend)
    part = slice(*stored[PART].tolist()) if PART in stored else FIRST
    prompt = bounded_prompt(own_ids, manifest.text.image_token_id, lambda: encoded, part)
    limit = max(computed, PRECISIONS[manifest.vision_precision].tolerance)
    yield Check("vision features", _distance(encoded.hidden[:FEATURE_TOKENS], features), limit)
    limit = logits_limit(manifest, model.backend.compute)
    if manifest.action is not None:
        for k in (None, *manifest.variants):
            acting = Acting(model.backend, model.bundle)
            slots = acting.prompt(prompt.ids, encoded.hidden[:DECODED_TOKENS], k, "golden", no_check)
            slots = acting.with_state(slots, len(prompt.ids), stored[STATE])
            denoising = Denoising(stored[NOISE], manifest.action.steps)
            actions = acting.steps(slots, len(prompt.ids), stored[STATE], denoising)
            yield Check(f"actions at K = {k or 'none'}", _distance(actions, stored[actions_key(k)]), limit)
        return
    for k in (None, *manifest.variants):
        session = Session(model.backend, manifest)
        got = session.prefill(prompt, make_policy(k, manifest, model.backend.gate)).logits
        want = stored[key_of(k)]
        same = "same top token" if got.argmax() == want.argmax() else "another top token"
        margin = float(stored[MARGIN][0]) if MARGIN in stored else None
        yield Check(f"logits at K = {k or 'none'}", _distance(got, want), limit, same, margin)


def _distance(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    if got.shape != want.shape:
        return float("inf")
    return float(np.abs(got - want).max() / max(1e-9, float(np.abs(want).max())))
