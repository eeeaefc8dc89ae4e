"""The images of a prompt: encoded once for each set of extra inputs, shared between conversations, selected from."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, partial
from time import perf_counter
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.backend import Backend
from vtx.runtime.errors import BundleError
from vtx.runtime.policies.base import Entry, Policy, PromptText
from vtx.runtime.session.prefix import Check, Prompt, no_check
from vtx.runtime.session.session import Selection
from vtx.runtime.vision.limits import MAX_SAMPLED_FRAMES
from vtx.runtime.vision.plan import Views
from vtx.runtime.vision.tokens import NO_EXTRAS, Extras, HiddenStates, Ids, ImageTokens, PromptImage, concatenated

if TYPE_CHECKING:
    from vtx.runtime.policies.clip import Clip
    from vtx.runtime.vision.frame_file import FrameFile

T = TypeVar("T")
MAX_SETS = 4  # of extra inputs, of which the image tokens are kept; beyond these the oldest go
PROJECTED = "projected by"  # of an image's derived arrays, the merged tokens that its next question takes again


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One preprocessed image: its `views`, each [3, height, width] float32, a hash of them, and its form in a prompt.

    `size` is its width and height before that; `arrange` makes the image's tokens from those of its views, of a video
    also of some, from number `first` on. A video is
    one too, of the `kind` "video": each frame is a view, or several, or each pair of them one [2, 3, height, width], a
    long one's in a file, and `size` that of the first; `refitted` gives its form in a prompt with another number of
    frames, or other max_pixels or max_views. `region`: the part of an image that its first view shows, in its pixels:
    left, top, right, bottom. `counted`: tokens are counted between texts, so that some may leave before
    the decoder.
    """

    views: Views | FrameFile
    key: str
    in_prompt: PromptImage
    size: tuple[int, int]
    arrange: Callable[..., ImageTokens]
    kind: Literal["image", "video"] = "image"
    frames: int = 0  # of a video
    refitted: Callable[..., PromptImage] | None = None
    counted: bool = False
    region: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    @property
    def tokens(self) -> int:
        """Its number of tokens."""
        return self.in_prompt.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of its views, in memory or in a file."""
        return sum(view.nbytes for view in self.views) if isinstance(self.views, list) else self.views.nbytes

    @property
    def pixels(self) -> NDArray[np.float32]:
        """The first view, [3, height, width] float32, which shows the whole image."""
        first: NDArray[np.float32] = self.views[0]
        return first

    def encode(
        self,
        backend: Backend,
        extras: Extras = NO_EXTRAS,
        check: Check = no_check,
        tiles: ImageCache | None = None,
        tenant: str = "",
    ) -> ImageTokens:
        """The image's tokens, from one pass of the tower a view; `check` is called before each and may raise.

        Of several views those that `tiles` has of the `tenant`, by their pixels, are not run again.
        """
        assert not extras or self.kind == "image", "policies that need extra inputs are refused for videos"
        views = list[ImageTokens]()
        pieces = tiles if len(self.views) > 1 else None
        for view in self.views:
            check()
            key = (
                ()
                if pieces is None
                else (self.kind, view.shape, hashlib.sha256(view.tobytes()).digest(), *_values(extras))
            )
            tokens = None if pieces is None else pieces.get(key, tenant)
            if tokens is None:
                pixels = view if view.ndim == 4 else view[None]
                tokens = backend.video(pixels) if self.kind == "video" else backend.vision(pixels, extras)
                if pieces is not None:
                    pieces.put(key, tokens, tenant)
            views.append(tokens)
        return replace(self.arrange(views), key=self.key[:64])  # of the pixels alone

    def encode_chosen(self, backend: Backend, clip: Clip, check: Check = no_check) -> ImageTokens:
        """The tokens of a video that `clip` chooses; of the others those of one window are in memory at a time."""
        choose = clip.begin(len(self.views))
        frames = range(len(self.views))
        images = list[ImageTokens]()
        numbers = np.empty(0, np.int64)
        count = 0
        for first in frames[:: clip.at_once]:
            views = list[ImageTokens]()
            for place in frames[first : first + clip.at_once]:
                check()
                view = self.views[place]
                views.append(backend.video(view if view.ndim == 4 else view[None]))
            tokens = self.arrange(views, first=first)
            of_frames = tokens.patches.of_frames()
            patches = tokens.patches
            assert of_frames is not None
            assert patches.frames is not None
            indices = np.where(patches.indices >= 0, patches.indices + first * len(views[0]), patches.indices)
            frame_patches = replace(
                patches, indices=indices, frames=np.where(patches.frames >= 0, patches.frames + first, -1)
            )
            stays = choose(tokens.hidden[of_frames])
            entering = of_frames.ravel()[stays[stays >= count] - count]
            if frames[-1] < first + clip.at_once:  # a newline behind the frames
                entering = np.concatenate([entering, np.flatnonzero(patches.frames < 0)])
            before = [part.take(np.flatnonzero(np.isin(numbers, stays))) for part in images]
            images = [concatenated([*before, replace(tokens, patches=frame_patches).take(entering)])]
            numbers = stays
            count = count + of_frames.size
        return replace(images[0], key=self.key[:64])


def _values(extras: Extras) -> tuple[tuple[str, bytes], ...]:
    """Extra inputs as a part of a key."""
    return tuple((name, value.tobytes()) for name, value in sorted(extras.items()))


def vision_extras(entries: Sequence[Entry]) -> Extras:
    """The extra inputs of the vision graph that `entries` ask for, by name, [1] float32 each."""
    return {name: np.array([value], np.float32) for entry in entries for name, value in entry.vision_inputs().items()}


def enter(
    tokens: ImageTokens,
    entries: Sequence[Entry],
    question: PromptText | None,
    project: Callable[[HiddenStates], HiddenStates],
) -> ImageTokens:
    """The tokens of an image that enter the decoder; `project` is the projector, for entries that merge."""
    for entry in entries:
        if (merged := entry.merge(tokens)) is not None:
            assert tokens.tower is not None
            name = f"{PROJECTED} {entry!r}"
            if (hidden := tokens.derived.get(name)) is None:
                hidden = project(merged.states(tokens.tower))
                for other in [derived for derived in list(tokens.derived) if derived.startswith(PROJECTED)]:
                    tokens.derived.pop(other, None)
                tokens.derived[name] = hidden
            tokens = ImageTokens(hidden, merged.patches, key=tokens.key)
        if entry.of_uncut and tokens.uncut is not None:
            tokens = replace(tokens.uncut, key=tokens.key)
        selected = entry.select(tokens, question)
        if selected is not None:
            tokens = tokens.take(selected, keep_positions=entry.keeps_positions)
    return tokens


def next_dropped(entries: Iterable[tuple[T, str, int]]) -> T:
    """The entry of a full cache to drop: the oldest of the tenant that has the most bytes.

    `entries` come with their tenant and bytes, the oldest first. So no tenant loses any of its equal share to others.
    """
    entries = list(entries)
    totals = Counter[str]()
    for _, tenant, size in entries:
        totals[tenant] += size
    largest = max(totals, key=lambda tenant: totals[tenant])
    return next(entry for entry, tenant, _ in entries if tenant == largest)


class ImageCache:
    """Encoded images that a tenant's conversations share, by the hash of their pixels and the graph's extra inputs.

    A tenant finds only what itself has put there. Bounded in bytes of all tenants: of the one that has the most, the
    least recently used are dropped. Safe for many threads.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.hits = 0
        self.misses = 0
        self._tokens = OrderedDict[tuple[str, Hashable], ImageTokens]()
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """The size of all of them now: a policy may keep with an image what it derived from it."""
        with self._lock:
            return self._size()

    def get(self, key: Hashable, tenant: str = "") -> ImageTokens | None:
        """The tokens of a tenant's image; None if they are not kept."""
        with self._lock:
            tokens = self._tokens.get((tenant, key))
            if tokens is None:
                self.misses += 1
                return None
            self._tokens.move_to_end((tenant, key))
            self.hits += 1
            self._shrink()
            return tokens

    def put(self, key: Hashable, tokens: ImageTokens, tenant: str = "") -> None:
        """Keep an image's tokens for a tenant; one that alone exceeds the limit is not kept."""
        with self._lock:
            if (tenant, key) in self._tokens or nbytes(tokens) > self.limit_bytes:
                return
            self._tokens[tenant, key] = tokens
            self._shrink()

    def _size(self) -> int:
        return sum(map(nbytes, self._tokens.values()))

    def _shrink(self) -> None:
        while self._size() > self.limit_bytes:
            del self._tokens[next_dropped((key, key[0], nbytes(tokens)) for key, tokens in self._tokens.items())]


class PictureCache:
    """Prepared pictures by the files they came from, so that one that many requests send is decoded once.

    Tenants and bounds are as of `ImageCache`. Safe for many threads: while one prepares a picture, others that need it
    wait.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._kept = OrderedDict[tuple[str, Hashable], Future[PreparedImage]]()
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """The size of all of them."""
        with self._lock:
            return self._size()

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            future = self._kept.get(("", key))
            return future is not None and future.done()

    def prepared(self, key: Hashable, prepare: Callable[[], PreparedImage], tenant: str = "") -> PreparedImage:
        """The tenant's picture of this key, prepared now unless it is kept.

        Raises what `prepare` raises, and keeps nothing.
        """
        entry = tenant, key
        with self._lock:
            future = self._kept.get(entry)
            if preparing := future is None:
                future = self._kept[entry] = Future()
            self._kept.move_to_end(entry)
        if preparing:
            try:
                future.set_result(prepare())
            except BaseException as e:
                with self._lock:
                    del self._kept[entry]
                future.set_exception(e)
                raise
            with self._lock:
                self._shrink()
        return future.result()

    def _size(self) -> int:
        return sum(future.result().nbytes for future in self._kept.values() if future.done())

    def _shrink(self) -> None:
        while self._size() > self.limit_bytes:
            done = [(entry, future.result()) for entry, future in self._kept.items() if future.done()]
            del self._kept[next_dropped((entry, entry[0], image.nbytes) for entry, image in done)]


@dataclass(slots=True)
class ImageCaches:
    """The caches that conversations of a bundle share, where they are set.

    `images` and `tiles`: encoded images, and the encoded views that they have in common. `pictures`: prepared files.
    """

    images: ImageCache | None = None
    tiles: ImageCache | None = None
    pictures: PictureCache | None = None


def nbytes(tokens: ImageTokens) -> int:
    """Bytes of an image's tokens, of their patches' signals, and of what policies derived from them."""
    patches = tokens.patches
    arrays = [*patches.signals.values(), *list(tokens.derived.values())]  # a list at once: another thread may add to it
    tower = 0 if tokens.tower is None else tokens.tower.nbytes
    uncut = 0 if tokens.uncut is None else nbytes(tokens.uncut)
    return tokens.hidden.nbytes + patches.indices.nbytes + tower + uncut + sum(array.nbytes for array in arrays)


@dataclass(slots=True)
class EncodedImages:
    """The tokens of `images` by their key and the vision graph's extra inputs. Its owner locks it.

    `shared` holds images that several owners of the `tenant` encode, `tiles` views that images have in common.
    """

    backend: Backend
    images: tuple[PreparedImage, ...]
    shared: ImageCache | None = None
    tiles: ImageCache | None = None
    tenant: str = ""
    seconds: float = 0.0  # spent on encoding and selecting so far
    _encoded: dict[tuple[Hashable, ...], ImageTokens] = field(default_factory=dict)  # by image first; the newest last

    @property
    def bytes(self) -> int:
        """Bytes of pixels and encoded images. Shared ones count for each holder."""
        return sum(map(nbytes, self._encoded.values())) + sum(image.nbytes for image in self.images)

    def replaced(self, images: tuple[PreparedImage, ...]) -> EncodedImages:
        """Of these images instead; those that are among both stay encoded."""
        keys = {image.key for image in images}
        encoded = {key: tokens for key, tokens in self._encoded.items() if key[0] in keys}
        return replace(self, images=images, seconds=0.0, _encoded=encoded)

    def prompt(
        self,
        ids: Ids,
        image_token_id: int,
        policy: Policy,
        question: PromptText | None,
        expand: Callable[[Sequence[PromptImage]], Ids],
        check: Check = no_check,
    ) -> Prompt:
        """The prompt of `ids` [n], which hold all tokens of every image, or of the ones that entries leave.

        How many tokens an image has after entries, only its pixels say: `expand` gives the ids for these forms.
        `question` is the text by which entries select, if they use one. `check` is called before every image and view
        and may raise, to stop there.
        """
        settings = " ".join(["", *map(repr, policy.entries)])
        skipped = sum(max(0, image.in_prompt.span - image.tokens) for image in self.images if image.in_prompt.span)
        if question is not None and policy.uses_question:
            settings += f" {question.key}"
        encoders = tuple(
            (image.key + settings, cache(partial(self._entering, image, policy.entries, question, check)))
            for image in self.images
        )
        if policy.entries and encoders:
            images = list[ImageTokens]()
            for _, encode in encoders:
                check()
                images.append(encode())
            forms = zip(images, self.images, strict=True)
            ids = expand(
                [replace(image_form.in_prompt, spans=image.runs or (len(image),)) for image, image_form in forms]
            )
            skipped = max(0, sum(image.positions - len(image) for image in images))
        return Prompt(ids, ids == image_token_id, encoders, skipped)

    def _entering(
        self, image: PreparedImage, entries: Sequence[Entry], question: PromptText | None, check: Check
    ) -> ImageTokens:
        """The tokens of an image that enter the decoder."""
        start = perf_counter()
        tokens = self.encoded(image, entries, check)
        entering = enter(tokens, entries[image.frames > MAX_SAMPLED_FRAMES :], question, self.backend.project)
        self.seconds += perf_counter() - start
        return entering

    def encoded(self, image: PreparedImage, entries: Sequence[Entry], check: Check = no_check) -> ImageTokens:
        """The tokens of an image before `entries` choose from them; of a long video those that the first one chose."""
        clip: Clip | None = None
        if image.frames > MAX_SAMPLED_FRAMES:  # too many for memory
            from vtx.runtime.policies.clip import Clip

            assert isinstance(entries[0], Clip), "other policies are refused for long videos"
            clip = entries[0]
        extras = vision_extras(entries) if entries else NO_EXTRAS
        key: tuple[Hashable, ...] = (image.key,)
        if clip is not None:
            key += (repr(clip),)
        elif extras:
            key += _values(extras)
        tokens = self._encoded.get(key)
        if tokens is None:
            tokens = None if self.shared is None else self.shared.get(key, self.tenant)
            if tokens is None:
                if clip is None:
                    tokens = image.encode(self.backend, extras, check, self.tiles, self.tenant)
                else:
                    tokens = image.encode_chosen(self.backend, clip, check)
                tower = tokens.tower
                signals = [*tokens.patches.signals.values()]
                if tokens.uncut is not None:
                    signals += tokens.uncut.patches.signals.values()
                if tower is not None:
                    signals += [tower.states, tower.keys, tower.attention]
                if not all(np.isfinite(signal).all() for signal in signals):
                    raise BundleError(
                        "what the tower says of an image is not a number; use --reduce none, or export at fp32"
                    )
                if self.shared is not None:
                    self.shared.put(key, tokens, self.tenant)
            self._encoded = dict([*self._encoded.items(), (key, tokens)][-MAX_SETS * len(self.images) :])
        return tokens


def selecting_text(
    backend: Backend,
    ids: Ids,
    image_token_id: int,
    policy: Policy,
    after: Selection | None,
    embeddings: Callable[[], HiddenStates],
) -> PromptText | None:
    """The text by which a policy's entries select image tokens; None if none of them uses it.

    `ids` [n] are the prompt's. In a chat it is the text of the first turn, `after`. `embeddings` gives the question's
    by the bundle's text tower; it is called if the policy needs them.
    """
    is_vision = ids == image_token_id
    if not is_vision.any() or not policy.uses_question:
        return None
    end = int(np.flatnonzero(is_vision)[-1]) + 1
    before = ids[:end][~is_vision[:end]]
    question = ids[end:]
    if after is not None and after.policy == policy:
        question = np.array(after.ids, np.int64)
    text = np.concatenate([before, question])
    vectors = embeddings() if policy.needs.text_tower else None
    return PromptText(text, backend.embed(text).hidden, np.arange(len(text)) >= len(before), vectors)
