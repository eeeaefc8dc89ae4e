"""The caches of one conversation's stages, and the prompt prefix on its way through them.

Every stage may be needed with all image tokens (`full`) and after some or all have left (`pruned`), with different
caches. Slots are not positions: a token keeps its position when tokens before it leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vtx.runtime.backends.backend import Backend, StageCache
from vtx.runtime.backends.memory import QUESTION_ROWS
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import BundleError
from vtx.runtime.policies.base import Boundary, Policy, Removal
from vtx.runtime.session.prefix import Check, Key, Prefix, PrefixSlots, Prompt, SavedKV, assign_positions
from vtx.runtime.vision.tokens import HiddenStates, Ids, Mask, Scores, TokenStates


class PrefixCaches:
    """Each stage's `full` and `pruned` cache by number, made when first needed, and how far the prefix is in them.

    Stages from `first_pruned` on run in `pruned`. An exception at any point costs a computation and leaves all of it
    correct: what is known of the prefix is replaced as a whole at every step.
    """

    def __init__(self, backend: Backend, manifest: Manifest) -> None:
        self._backend = backend
        self._token_inputs = manifest.token_inputs
        self._model = manifest.model
        self.two_way = manifest.model.two_way == "prompt"  # all of its tokens see each other
        self._groups = manifest.model.two_way is not None  # tokens of a group do
        self.stateful = bool(manifest.model.conv_layers)
        self.stages = manifest.stages
        self.capacity = manifest.max_context
        self._width = manifest.model.hidden
        self.keeping = [stage.keeps for stage in self.stages]  # the others read the K and V of earlier stages
        # all can be cut back anywhere, and a suffix runs behind the prefix as any other tokens do
        self.cuts = all(self.keeping) and not self.two_way and not self.stateful
        self.full: dict[int, StageCache] = {}
        self.pruned: dict[int, StageCache] = {}
        self.first_pruned = len(self.stages)
        self.prefix = self._empty_prefix()
        self.continues = False  # the next prefix other than this one does not run again what both begin with
        self.pruned_prefix: Prefix | None = None  # what `pruned` holds of it
        self._former: Prefix | None = None  # what `pruned` holds of the prefix before, until another one runs there
        self.holding: set[int] = set()  # boundaries at which hidden states of all image tokens are kept
        self._exit = len(self.stages)  # the stage before which all image tokens leave for certain
        self._reading: tuple[dict[int, StageCache], StageCache] | None = None  # of the stage that keeps nothing
        self._text_only = True  # leave out the hidden states of image tokens that only another K would read

    def cache(self, number: int) -> StageCache:
        """The cache in which the suffix runs through stage `number`."""
        if self.keeping[number]:
            return (self.full if number < self.first_pruned else self.pruned)[number]
        stage = self.stages[number]
        sources = dict[int, StageCache]()
        for layer in self._model.sources(stage.first, stage.last):
            sources[layer] = self.cache(next(n for n, s in enumerate(self.stages) if s.first <= layer <= s.last))
        if self._reading is None or self._reading[0] != sources:
            self._reading = sources, self._backend.stage(number, 0, sources)
        return self._reading[1]

    @property
    def depth(self) -> int:
        """The number of stages that the prefix has run through, or need not, since they keep nothing of it."""
        depth = self.prefix.depth
        return depth + (0 < depth < len(self.stages) and not self.keeping[depth])

    def prefix_in(self, number: int) -> Prefix:
        """The tokens of the prefix that run through stage `number`."""
        prefix = self.prefix if number < self.first_pruned else self.pruned_prefix
        assert prefix is not None
        return prefix

    def enter(self, prompt: Prompt, key: Key, check: Check) -> None:
        """Begin with a prompt's prefix, as `key` names it. If it `continues`, what the caches hold of its tokens stays.

        Not where a token's K and V depend on those behind it, nor where layers keep a state, which cannot be cut back.
        Their K and V come from a run of another length, so they are equal up to rounding.
        """
        prefix = self._embed(prompt, key, check)
        if self.continues and not self.two_way and not self.stateful:
            prefix = prefix.after(self.prefix)
        self._former = self.pruned_prefix if prefix.common else None
        self.pruned_prefix = None
        self.prefix, self.continues, self.holding = prefix, False, set()

    def begin(self, prefix: Prefix, kv: Mapping[int, Any]) -> None:
        """Begin with another prefix, which the next one continues, and its K and V by layer in the first stages.

        Raises ValueError for other sizes or types.
        """
        self._check_fits(prefix, kv)
        slots = np.arange(prefix.size)
        caches = dict[int, StageCache]()
        for number, stage in enumerate(self.stages[: prefix.depth]):
            cache = caches[number] = self._backend.stage(number, self.capacity)
            none = cache.read(slots[:0])
            stored = [kv[layer] for layer in stage.cached]
            slides = isinstance(none, tuple)
            for layer, mine, theirs in zip(stage.cached, none[0] if slides else none, stored, strict=True):
                if theirs.dtype != mine.dtype or theirs.shape != tuple(size or len(slots) for size in mine.shape):
                    raise ValueError(f"K and V of layer {layer} are {theirs.dtype} {list(theirs.shape)}")
            cache.write(slots, (stored, prefix.positions) if slides else stored, length=len(slots))
        self.full = caches
        self.prefix = prefix
        self.continues = True

    def _check_fits(self, prefix: Prefix, kv: Mapping[int, Any]) -> None:
        """Raise ValueError unless a prefix and its K and V have the bundle's stages, widths and inputs."""
        stages = self.stages[: prefix.depth]
        same = len(stages) == prefix.depth and prefix.boundaries[0].shape[1] == self._width
        if prefix.size >= self.capacity or not same or not all(stage.keeps for stage in stages):
            raise ValueError("it has more tokens or stages than the bundle, or others")
        shapes = {declared.name: (prefix.size, declared.width) for declared in self._token_inputs}
        if self._groups:
            shapes[names.GROUP] = (prefix.size, 1)
        if {name: values.shape for name, values in prefix.inputs.items()} != shapes:
            raise ValueError("it has other inputs than the bundle")
        if kv.keys() != {layer for stage in stages for layer in stage.cached}:
            raise ValueError(f"it has K and V of layers {sorted(kv)}")

    def _embed(self, prompt: Prompt, key: Key, check: Check) -> Prefix:
        """A prompt's prefix before the decoder: its text embedded, its images encoded."""
        length = prompt.prefix_length
        if not length:
            return replace(self._empty_prefix(), key=key)
        is_vision = prompt.is_vision[:length]
        embedded = self.embed_text(prompt.ids[:length], of_prompt=True)
        images = []
        for _, encode in prompt.encoders:
            check()
            images.append(encode())
        hidden = embedded.hidden
        inputs = embedded.inputs
        hidden[is_vision] = np.concatenate([image.hidden for image in images])
        for declared in self._token_inputs:
            if declared.of_images:
                signals = [image.patches.signals[names.token_input(declared.name)] for image in images]
                inputs[declared.name][is_vision] = np.concatenate(signals)
        if self._groups and not self.two_way:  # image tokens that follow each other are one
            first = is_vision & ~np.concatenate([[False], is_vision[:-1]])
            inputs[names.GROUP][is_vision, 0] = np.cumsum(first)[is_vision]
        positions, following = assign_positions(is_vision, images)
        patches = tuple(image.patches for image in images)
        present = np.ones(length, bool)
        return Prefix(key, is_vision, patches, positions, following, (hidden,), present, inputs)

    def embed_text(self, ids: Ids, *, of_prompt: bool = False) -> TokenStates:
        """Text tokens [n] before the decoder, with zeros for the inputs that the embed graph does not give.

        `of_prompt`: they belong to a prompt, not to an answer.
        """
        tokens = self._backend.embed(ids)
        if not self._token_inputs and not self._groups:
            return tokens
        missing = [declared for declared in self._token_inputs if not declared.of_text]
        inputs = {declared.name: np.zeros((len(tokens), declared.width), np.float32) for declared in missing}
        if self._groups:
            inputs[names.GROUP] = np.full((len(tokens), 1), 0 if of_prompt and self.two_way else -1, np.float32)
        return TokenStates(tokens.hidden, {**tokens.inputs, **inputs})

    def copy_prefix(self, other: PrefixCaches) -> None:
        """Begin with the prefix of another conversation, as far as it has come there, and copies of its K and V."""
        prefix = other.prefix
        pruned = other.pruned_prefix
        if prefix.saved_kv:  # some of it is not in its caches
            return
        first = other.first_pruned
        if pruned is None or first == len(self.stages) or pruned.begun:
            pruned = None
            first = len(self.stages)
        copied = [(self.full, other.full, number, prefix.size) for number in range(prefix.depth)]
        if pruned is not None:
            copied += [(self.pruned, other.pruned, number, pruned.size) for number in range(first, pruned.depth)]
        for mine, theirs, number, size in copied:
            mine[number] = self._backend.stage(number, theirs[number].capacity)
            mine[number].copy(theirs[number], size)
        self.prefix = replace(prefix, begun=prefix.begun[: prefix.depth])
        self.pruned_prefix = pruned

    def _empty_prefix(self) -> Prefix:
        hidden = np.zeros((0, self._width), np.float32)
        none = np.zeros(0, bool)
        return Prefix((b"", ()), none, (), np.zeros(0, np.int64), 0, (hidden,), none)

    def prepare(self, policy: Policy) -> None:
        """Before a question: full caches whole again, and hidden states held wherever the policy may drop tokens."""
        prefix = self.prefix
        if prefix.saved_kv:  # put back what full stages have lost
            self.prefix = self._empty_prefix()
            for saved in prefix.saved_kv:
                cache = self.full[saved.stage]
                cache.write(saved.survivors, cache.read(np.arange(len(saved.survivors))), length=prefix.size)
                cache.write(saved.dropped, saved.kv, length=prefix.size)
            self.prefix = replace(prefix, saved_kv=())
        cuts = policy.partial_cuts
        numbers = {number for number, stage in enumerate(self.stages) if stage.first in cuts}
        self.holding |= numbers  # a caller that goes back to an earlier K finds them
        self._exit = next((n for n, stage in enumerate(self.stages) if stage.first == policy.exit), len(self.stages))
        if self.prefix.common and (numbers or len(self.prefix.begun) < self._exit):
            self.prefix = self.prefix.whole_from(int(np.argmax(self.prefix.is_vision)))
        missing = [number for number in numbers if not self.prefix.held(number)]
        if self.prefix.depth < self._exit and not self.prefix.held(self.prefix.depth):
            missing.append(self.prefix.depth)  # image tokens were to leave there, and now continue
            self._text_only = False  # a caller that changes K once may do so again
        if missing:  # back to the last boundary with all hidden states
            boundary = min(missing)
            while not self.prefix.held(boundary):
                boundary -= 1
            self.prefix = replace(self.prefix, boundaries=self.prefix.boundaries[: boundary + 1])
        self.first_pruned = len(self.stages)

    def layout(self, number: int) -> PrefixSlots:
        """The part of the prefix that stage `number` sees, and where a suffix follows it."""
        prefix = self.prefix_in(number)
        return PrefixSlots(prefix.present, prefix.size, prefix.next_position)

    def run(self, number: int, suffix: TokenStates, *, query: bool = False, alone: bool = False) -> HiddenStates:
        """Run a suffix [n] through stage `number`, and before it what continues of the prefix if it has yet to run.

        Of the prompt only its last token runs through a stage that keeps nothing: no other token reads the rest of it.

        Both go in one run, which reads the weights once; but not with a long suffix, nor with one that is to be `alone`
        in `StageCache.attention`, for which `query` keeps its queries; of image tokens that see each other it always
        is. They always do where the prefix sees the suffix. Returns the suffix's hidden states.
        """
        prefix = self.prefix_in(number)
        if not self.keeping[number]:  # only the last token's hidden state is read
            end = len(suffix)
            return self.cache(number).append(suffix.part(end - 1, end), np.array([prefix.next_position + end - 1]))
        following = prefix.next_position + np.arange(len(suffix))
        full = number < self.first_pruned
        if self.follow(number):
            return self.cache(number).append(suffix, following, query=query)
        cache = self._cache_for(number, prefix, whole=full)
        alone = query and (alone or self._groups)
        together = self.two_way or (not alone and len(suffix) <= QUESTION_ROWS)
        behind = suffix if together else suffix.part(0, 0)
        hidden, result = self._continue(number, prefix, behind, following[: len(behind)], query=query and together)
        deeper = prefix.deeper(hidden, hold=number in self.holding)
        if full:
            self.prefix = deeper
        else:
            self.pruned_prefix = deeper
        if len(result):
            return result
        cache.keep(prefix.size)
        return cache.append(suffix, following, query=query)

    def _cache_for(self, number: int, prefix: Prefix, *, whole: bool) -> StageCache:
        """The cache of stage `number`, made if it is missing or too small, with what it holds of the prefix."""
        if not whole:  # no slot for tokens that never enter it
            slots = self._room(prefix)
            pruned = self.pruned.get(number)
            withdrawn = not (prefix.present & prefix.is_vision).any()
            if pruned is None or pruned.capacity < slots or (withdrawn and pruned.capacity > slots):
                pruned = None
                self.pruned.pop(number, None)  # freed before the next one is made
                self.pruned[number] = self._backend.stage(number, slots)
        elif number not in self.full:
            self.full[number] = self._backend.stage(number, self.capacity)
        cache = self.cache(number)
        cache.keep(prefix.start)
        if self.stateful:
            cache.mark(prefix.size)
        return cache

    def _continue(
        self, number: int, prefix: Prefix, behind: TokenStates, places: Ids, *, query: bool
    ) -> tuple[HiddenStates, HiddenStates]:
        """Run what stage `number` lacks of the prefix, and `behind` after it, at `places`: the hidden states of both.

        Of the prefix only those that are needed afterwards, where the engine gains by it.
        """
        start = prefix.start
        states = prefix.boundaries[-1]
        inputs = {name: array[start:] for name, array in prefix.inputs.items()}
        tokens = TokenStates(states[len(states) - prefix.size + start :], inputs)
        if not len(tokens):  # all of it is in the cache
            return tokens.hidden, behind.hidden[:0]
        cache = self.cache(number)
        outputs: Ids | None = None  # the indices of those that are needed; None: all
        count = len(tokens)
        leaves = number < self.first_pruned and number + 1 == self._exit and number + 1 not in self.holding
        if cache.selects_outputs and self._text_only and leaves:
            text = np.flatnonzero(~prefix.is_vision[start:])
            count = len(text)
            outputs = np.concatenate([text, len(tokens) + np.arange(len(behind))])
        positions = prefix.positions[start:]
        if positions.ndim > 1:  # text has one time, row and column
            places = places[:, None].repeat(positions.shape[1], 1)
        pair = cache.append(tokens.then(behind), np.concatenate([positions, places]), query=query, outputs=outputs)
        return pair[:count].copy(), pair[count:]

    def follow(self, number: int) -> bool:
        """Cut the cache of stage `number` to the prefix, so that a suffix follows it; False if that has yet to run."""
        prefix = self.prefix_in(number)
        if prefix.depth <= number:
            if prefix.size or number >= self.first_pruned:
                return False
            if number not in self.full:  # nothing precedes the suffix
                self.full[number] = self._backend.stage(number, self.capacity)
            self.prefix = prefix.deeper(prefix.boundaries[-1], hold=False)
        self.cache(number).keep(prefix.size)
        return True

    def _room(self, pruned: Prefix) -> int:
        """Slots of the context without those of tokens that are gone."""
        return self.capacity - (len(pruned.present) - pruned.size)

    def remove(self, number: int, removal: Removal) -> Prefix:
        """Remove image tokens before stage `number`. The rest runs anew, unless the same ones left before."""
        before = self.pruned_prefix
        first = self.first_pruned == len(self.stages)
        pruned = (self.prefix if first or before is None else before).without(removal, number)
        again = first and before is not None and before.removals == pruned.removals and not removal.kept.any()
        if not again:
            former = self._former
            self._former = None
            caches = [self.pruned.get(n) for n in range(number, len(self.stages))]
            if former is not None and all(cache and cache.capacity == self._room(pruned) for cache in caches):
                pruned = pruned.after_removal(former, self.prefix.common, len(self.stages))
            self.pruned_prefix = pruned
        self.first_pruned = number if first else self.first_pruned
        return pruned

    def boundary(self, number: int, before: PrefixSlots, suffix: TokenStates, policy: Policy) -> Boundary:
        """The boundary before stage `number`, for the states `suffix` [n] of a question that has reached it.

        `before` is what the stage before holds of the prefix. Nothing is computed until the policy asks for it, and
        what is computed holds only while the caches stay as they are.
        """
        prefix = self.prefix_in(number - 1)
        hidden = suffix.hidden
        layer = self.stages[number].first
        slots = np.flatnonzero(prefix.is_vision[before.present])
        is_vision = prefix.is_vision[prefix.present]  # of the tokens that have come this far

        def scores(last_only: bool, stage: int = number - 1) -> Scores:
            total, most = self.cache(stage).attention(last_only=last_only)
            if not (np.isfinite(total).all() and np.isfinite(most).all()):
                raise BundleError(
                    f"the attention of layer {self.stages[stage].last} is not a number; use --reduce none and no "
                    "--rest, or export at fp32"
                )
            return total[slots], most[slots]

        def next_scores() -> Scores:
            pruned = self.pruned_prefix
            self.run(number, suffix, query=True)
            if number >= self.first_pruned:  # for its attention alone: the tokens that stay run anew
                self.pruned_prefix = pruned
            return scores(True, number)

        def image_hidden() -> HiddenStates:
            return np.asarray(prefix.boundaries[number - prefix.first][is_vision])

        def positions() -> tuple[Ids, Ids]:
            if prefix.positions.ndim > 1:  # of three parts, which have no order: the index in the prompt instead
                length = len(prefix.present)
                return np.flatnonzero(prefix.present & prefix.is_vision), np.arange(length, length + len(hidden))
            return prefix.positions[is_vision], np.arange(before.position, before.position + len(hidden))

        def keys() -> tuple[HiddenStates, HiddenStates]:
            flat = np.concatenate([*self.cache(number - 1).keys()], axis=-1)
            return flat[slots], flat[len(flat) - len(hidden) :]

        return Boundary(
            layer,
            hidden,
            prefix.images,
            before.present[prefix.is_vision],
            scores,
            image_hidden,
            keys,
            policy.final_norm,
            positions,
            next_scores,
        )

    def shrink(
        self, numbers: Iterable[int], survivors: Mask, layouts: Sequence[PrefixSlots], suffix: int
    ) -> list[PrefixSlots]:
        """Leave in these stages' caches only the survivors of the prefix, and `suffix` tokens (MustDrop section 3.5).

        `layouts` are the stages' slots of the prefix; the new ones are returned. K/V that a full stage loses are
        saved for the next question. Until all is done no prefix is known, so that an interrupt costs a computation.
        """
        prefix = self.prefix
        self.prefix = self._empty_prefix()
        self.pruned_prefix = None
        saved = []
        layouts = list(layouts)
        for number in numbers:
            layout = layouts[number]
            cache = self.cache(number)
            stays = survivors[layout.present]
            if stays.all():
                continue
            indices = np.flatnonzero(stays)
            dropped = np.flatnonzero(~stays)
            if number < self.first_pruned:
                saved.append(SavedKV(number, indices, dropped, cache.read(dropped)))
            moved = np.concatenate([indices, np.arange(layout.slots, layout.slots + suffix)])
            cache.write(np.arange(len(moved)), cache.read(moved), length=len(moved))
            layouts[number] = replace(layout, slots=len(indices))
        self.prefix = replace(prefix, saved_kv=tuple(saved))
        return layouts
