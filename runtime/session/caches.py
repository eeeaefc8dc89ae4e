"""The caches of one conversation's stages, and the prompt prefix on its way through them.

Every stage may be needed with all image tokens and after some or all have left, with different caches: it has a
segment for each. A prompt takes of a segment the longest beginning that it has in common with it, and runs the rest.
Slots are not positions: a token keeps its position when tokens before it leave.
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
from vtx.runtime.session.embedding import Embedding
from vtx.runtime.session.prefix import Check, Key, Prefix, PrefixSlots, Prompt, Remaining, SavedKV, Segment
from vtx.runtime.vision.tokens import HiddenStates, Ids, Mask, Scores, TokenStates


class PrefixCaches:
    """The segments of stages by number and whether all image tokens are there, and the `remaining` tokens of each.

    A segment is made when first needed. An exception at any point costs a computation and leaves all of it correct: a
    segment is cut back before tokens run into it, and replaced as a whole behind.
    """

    def __init__(self, backend: Backend, manifest: Manifest) -> None:
        self._backend = backend
        self._model = manifest.model
        self.embedding = Embedding(backend, manifest)
        self.stages = manifest.stages
        self.capacity = manifest.max_context
        self.keeping = [stage.keeps for stage in self.stages]  # the others read the K and V of earlier stages
        self.segments: dict[tuple[int, bool], Segment] = {}
        empty = Prefix.empty(Key(), manifest.model.hidden)
        self.remaining = [Remaining.of(empty)] * len(self.stages)
        self.common = 0  # tokens of the prefix that the first stage held when its last question began
        self.holding: set[int] = set()  # boundaries at which hidden states of all image tokens are kept
        self._exit = len(self.stages)  # the stage before which all image tokens leave for certain
        self._reading: tuple[dict[int, StageCache], StageCache] | None = None  # of the stage that keeps nothing
        self._text_only = True  # leave out the hidden states of image tokens that only another K would read

    @property
    def cuts(self) -> bool:
        """True if all caches can be cut back anywhere, and a suffix runs behind the prefix as any other tokens do."""
        return all(self.keeping) and not self.embedding.two_way and not self._model.conv_layers

    @property
    def prefix(self) -> Prefix:
        """The prefix of the last prompt."""
        return self.remaining[0].prefix

    def cache(self, number: int) -> StageCache:
        """The cache in which the suffix runs through stage `number`."""
        if self.keeping[number]:
            return self.segments[self._key(number)].cache
        stage = self.stages[number]
        sources = dict[int, StageCache]()
        for layer in self._model.sources(stage.first, stage.last):
            sources[layer] = self.cache(next(n for n, s in enumerate(self.stages) if s.first <= layer <= s.last))
        if self._reading is None or self._reading[0] != sources:
            self._reading = sources, self._backend.stage(number, 0, sources)
        return self._reading[1]

    @property
    def complete(self) -> list[Segment]:
        """The segments of the first stages that hold the whole prefix."""
        segments = list[Segment]()
        while (segment := self.segments.get((len(segments), True))) and segment.holds(self.remaining[0]):
            segments.append(segment)
        return segments

    @property
    def depth(self) -> int:
        """The number of stages that hold the whole prefix, or need not, since they keep nothing of it."""
        depth = len(self.complete)
        return depth + (0 < depth < len(self.stages) and not self.keeping[depth])

    @property
    def first_pruned(self) -> int:
        """The first stage that not all image tokens enter, or the number of stages."""
        return sum(not tokens.removals for tokens in self.remaining)

    def enter(self, prompt: Prompt, key: Key, check: Check) -> str | None:
        """Begin with a prompt's prefix, as `key` names it. What the segments hold of its tokens stays.

        Their K and V come from a run of another length, so they are equal up to rounding. Returns why some are not
        there, in one word (`Stats`).
        """
        prefix = self.embedding.prefix(prompt, key, check)
        difference = prefix.difference(self.prefix)
        self.remaining = [Remaining.of(prefix)] * len(self.stages)
        self.holding = set()
        return difference

    def begin(self, prefix: Prefix, text_states: Sequence[HiddenStates], kv: Mapping[int, Any]) -> None:
        """Begin with a prefix, its K and V by layer in the first stages, and the hidden states of its text after each.

        Raises ValueError for other sizes or types.
        """
        stages = self.stages[: len(text_states)]
        self._check_fits(prefix, kv, len(text_states))
        slots = np.arange(len(prefix))
        segments = dict[tuple[int, bool], Segment]()
        tokens = Remaining.of(prefix)
        for number, stage in enumerate(stages):
            cache = self._backend.stage(number, self.capacity)
            none = cache.read(slots[:0])
            stored = [kv[layer] for layer in stage.cached]
            slides = isinstance(none, tuple)
            for layer, mine, theirs in zip(stage.cached, none[0] if slides else none, stored, strict=True):
                if theirs.dtype != mine.dtype or theirs.shape != tuple(size or len(slots) for size in mine.shape):
                    raise ValueError(f"K and V of layer {layer} are {theirs.dtype} {list(theirs.shape)}")
            cache.write(slots, (stored, prefix.positions) if slides else stored, length=len(slots))
            segments[number, True] = Segment(cache, tokens, ~prefix.is_vision, text_states[number])
        self.segments = segments
        self.remaining = [tokens] * len(self.stages)

    def _check_fits(self, prefix: Prefix, kv: Mapping[int, Any], depth: int) -> None:
        """Raise ValueError unless a prefix and its K and V have the bundle's stages, widths and inputs."""
        stages = self.stages[:depth]
        same = len(stages) == depth and prefix.hidden.shape[1] == self._model.hidden
        if len(prefix) >= self.capacity or not same or not all(stage.keeps for stage in stages):
            raise ValueError("it has more tokens or stages than the bundle, or others")
        token_inputs = self.embedding.manifest.token_inputs
        shapes = {declared.name: (len(prefix), declared.width) for declared in token_inputs}
        if self.embedding.grouped:
            shapes[names.GROUP] = (len(prefix), 1)
        if {name: values.shape for name, values in prefix.inputs.items()} != shapes:
            raise ValueError("it has other inputs than the bundle")
        if kv.keys() != {layer for stage in stages for layer in stage.cached}:
            raise ValueError(f"it has K and V of layers {sorted(kv)}")

    def copy_prefix(self, other: PrefixCaches) -> None:
        """Begin with the prefix of another conversation, as far as it has come there, and copies of its K and V."""
        segments = {key: segment for key, segment in other.segments.items() if segment.tokens.prefix is other.prefix}
        if any(segment.saved for segment in segments.values()):  # some of it is not in its caches
            return
        for key, segment in segments.items():
            if segment.holds(segment.tokens):
                cache = self._backend.stage(key[0], segment.cache.capacity)
                cache.copy(segment.cache, segment.length)
                self.segments[key] = replace(segment, cache=cache)
        self.remaining = [other.remaining[0]] * len(self.stages)

    def prepare(self, policy: Policy) -> None:
        """Before a question: segments whole again, and hidden states held wherever the policy may drop tokens."""
        for key, segment in list(self.segments.items()):
            if segment.saved is not None:
                self._restore(key, segment, segment.saved)
        cuts = policy.partial_cuts
        self.holding |= {number for number, stage in enumerate(self.stages) if stage.first in cuts}
        self.remaining = [self.remaining[0]] * len(self.stages)
        exits = [number for number, stage in enumerate(self.stages) if stage.first == policy.exit]
        self._exit = exits[0] if exits and len(self.prefix) else len(self.stages)
        self.common = self._cut_back(0, self._exit)

    def _restore(self, key: tuple[int, bool], segment: Segment, saved: SavedKV) -> None:
        """Put back what a segment has lost."""
        self.segments[key] = segment.beginning(segment.tokens, 0)
        cache = segment.cache
        cache.write(saved.survivors, cache.read(np.arange(len(saved.survivors))), length=segment.length)
        cache.write(saved.dropped, saved.kv, length=segment.length)
        self.segments[key] = replace(segment, saved=None)

    def _key(self, number: int) -> tuple[int, bool]:
        return number, not self.remaining[number].removals

    def _segment(self, number: int) -> Segment | None:
        """The segment of stage `number`, cut to what it has in common with the tokens that remain there."""
        tokens = self.remaining[number]
        key = self._key(number)
        segment = self.segments.get(key)
        if segment is None:
            return None
        capacity = segment.cache.capacity
        slots = self._slots(number)
        if capacity < slots or (capacity > slots and not tokens.is_vision.any() and tokens.removals):
            del self.segments[key]  # freed before the next one is made
            return None
        if segment.tokens is not tokens:
            agreed = min(segment.length, tokens.agreement(segment.tokens))
            segment = self.segments[key] = segment.beginning(tokens, segment.cache.nearest(agreed))
        return segment

    def _slots(self, number: int) -> int:
        """Slots of the context without those of tokens that never enter the stage."""
        tokens = self.remaining[number]
        return self.capacity - (len(tokens.prefix) - len(tokens))

    def _cut_back(self, first: int, end: int) -> int:
        """Cut segments of stages from `first` to before `end` so far that the rest of their tokens can run.

        A stage runs its tokens from their hidden states after the one before; where these are not known any more, it
        runs them again. Returns the number of tokens that stage `first` holds.
        """
        following = len(self.remaining[first])  # the first token whose states the next stage needs
        for number in reversed(range(first, end)):
            tokens = self.remaining[number]
            if not self.keeping[number]:
                continue
            if number + 1 in self.holding and number + 1 < end:
                following = 0
            segment = self._segment(number)
            length = 0
            if segment is not None:
                unknown = np.flatnonzero(~segment.known[following:])
                length = segment.length
                if len(unknown):
                    begin = 0 if segment.holds(tokens) else tokens.begin_of_group(following + int(unknown[0]))
                    length = segment.cache.nearest(begin)
                    self.segments[self._key(number)] = segment.beginning(tokens, length)
                    self._text_only = self._text_only and number + 1 in self.holding
            following = length
        return following

    def layout(self, number: int) -> PrefixSlots:
        """The slots that the prefix takes in stage `number`, and where a suffix follows it."""
        tokens = self.remaining[number]
        return PrefixSlots(len(tokens), tokens.next_position)

    def run(self, number: int, suffix: TokenStates, *, query: bool = False, alone: bool = False) -> HiddenStates:
        """Run a suffix [n] through stage `number`, and before it what continues of the prefix if it has yet to run.

        Of the prompt only its last token runs through a stage that keeps nothing: no other token reads the rest of it.

        Both go in one run, which reads the weights once; but not with a long suffix, nor with one that is to be `alone`
        in `StageCache.attention`, for which `query` keeps its queries; of image tokens that see each other it always
        is. They always do where the prefix sees the suffix. Returns the suffix's hidden states.
        """
        tokens = self.remaining[number]
        if not self.keeping[number]:  # only the last token's hidden state is read
            end = len(suffix)
            return self.cache(number).append(suffix.part(end - 1, end), np.array([tokens.next_position + end - 1]))
        following = tokens.next_position + np.arange(len(suffix))
        if self.follow(number):
            return self.cache(number).append(suffix, following, query=query)
        segment = self.segments[self._key(number)]
        cache = segment.cache
        cache.keep(segment.length)
        cache.mark(len(tokens))
        alone = query and (alone or self.embedding.grouped)
        together = self.embedding.two_way or (not alone and len(suffix) <= QUESTION_ROWS)
        behind = suffix if together else suffix.part(0, 0)
        result = self._continue(number, segment, behind, following[: len(behind)], query=query and together)
        if len(result):
            return result
        return cache.append(suffix, following, query=query)

    def _continue(
        self, number: int, segment: Segment, behind: TokenStates, places: Ids, *, query: bool
    ) -> HiddenStates:
        """Run what a segment lacks of the prefix, and `behind` after it, at `places`: the hidden states of these.

        Of the prefix only those that are needed afterwards, where the engine gains by it.
        """
        remaining = segment.tokens
        start = segment.length
        tokens = TokenStates(self._entering(number, start), remaining.inputs_from(start))
        is_vision = remaining.is_vision[start:]
        known = np.ones(len(tokens), bool)
        outputs: Ids | None = None  # the indices of those that are needed; None: all
        leaves = not remaining.removals and number + 1 == self._exit and number + 1 not in self.holding
        if segment.cache.selects_outputs and self._text_only and leaves:
            known = ~is_vision
            outputs = np.concatenate([np.flatnonzero(known), len(tokens) + np.arange(len(behind))])
        positions = remaining.positions[start:]
        if positions.ndim > 1:  # text has one time, row and column
            places = places[:, None].repeat(positions.shape[1], 1)
        pair = segment.cache.append(
            tokens.then(behind), np.concatenate([positions, places]), query=query, outputs=outputs
        )
        count = int(known.sum())
        self.segments[self._key(number)] = segment.then(pair[:count].copy(), known)
        if number and number not in self.holding and self.remaining[number - 1] is remaining:
            before = self._key(number - 1)
            self.segments[before] = self.segments[before].text_only()
        return pair[count:]

    def _entering(self, number: int, start: int) -> HiddenStates:
        """The hidden states before stage `number` of the tokens that run there, from number `start` on."""
        tokens = self.remaining[number]
        if not number:
            return tokens.prefix.hidden[start:]
        of_all = np.flatnonzero(tokens.present)[start:]
        places = np.cumsum(self.remaining[number - 1].present) - 1
        return self.segments[self._key(number - 1)].states_of(places[of_all])

    def follow(self, number: int) -> bool:
        """Cut the cache of stage `number` to the prefix, so that a suffix follows it; False if that has yet to run."""
        tokens = self.remaining[number]
        segment = self._segment(number)
        if segment is None:
            cache = self._backend.stage(number, self._slots(number))
            segment = Segment(cache, tokens, np.zeros(0, bool), tokens.prefix.hidden[:0])
            self.segments[self._key(number)] = segment
        if not segment.holds(tokens):
            return False
        segment.cache.keep(len(tokens))
        return True

    def remove(self, number: int, removal: Removal) -> Remaining:
        """Remove image tokens before stage `number`. The rest runs anew, but for what its segments hold of it."""
        tokens = self.remaining[number - 1].without(removal, number)
        self.remaining = [*self.remaining[:number], *[tokens] * (len(self.stages) - number)]
        self._cut_back(number, len(self.stages))
        return tokens

    def boundary(self, number: int, suffix: TokenStates, policy: Policy) -> Boundary:
        """The boundary before stage `number`, for the states `suffix` [n] of a question that has reached it.

        Nothing is computed until the policy asks for it, and what is computed holds only while the caches stay as they
        are.
        """
        prefix = self.prefix
        tokens = self.remaining[number - 1]
        hidden = suffix.hidden
        layer = self.stages[number].first
        is_vision = tokens.is_vision  # of the tokens that have come this far
        slots = np.flatnonzero(is_vision)

        def scores(last_only: bool, stage: int = number - 1) -> Scores:
            total, most = self.cache(stage).attention(last_only=last_only)
            if not (np.isfinite(total).all() and np.isfinite(most).all()):
                raise BundleError(
                    f"the attention of layer {self.stages[stage].last} is not a number; use --reduce none and no "
                    "--rest, or export at fp32"
                )
            return total[slots], most[slots]

        def next_scores() -> Scores:
            self.run(number, suffix, query=True)
            return scores(True, number)

        def image_hidden() -> HiddenStates:
            return np.asarray(self._entering(number, 0)[is_vision])

        def positions() -> tuple[Ids, Ids]:
            if tokens.positions.ndim > 1:  # of three parts, which have no order: the index in the prompt instead
                length = len(prefix)
                return np.flatnonzero(tokens.present & prefix.is_vision), np.arange(length, length + len(hidden))
            return tokens.positions[is_vision], tokens.next_position + np.arange(len(hidden))

        def keys() -> tuple[HiddenStates, HiddenStates]:
            flat = np.concatenate([*self.cache(number - 1).keys()], axis=-1)
            return flat[slots], flat[len(flat) - len(hidden) :]

        return Boundary(
            layer,
            hidden,
            prefix.images,
            tokens.present[prefix.is_vision],
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

        `layouts` are the stages' slots of the prefix; the new ones are returned. What a stage with all image tokens
        loses is saved for the next question. While slots move its segment holds nothing, so that an interrupt costs a
        computation.
        """
        layouts = list(layouts)
        for number in numbers:
            layout = layouts[number]
            stays = survivors[self.remaining[number].present]
            if stays.all():
                continue
            key = self._key(number)
            segment = self.segments[key]
            cache = segment.cache
            survivor_slots = np.flatnonzero(stays)
            dropped = np.flatnonzero(~stays)
            saved = SavedKV(survivor_slots, dropped, cache.read(dropped)) if key[1] else None
            self.segments[key] = segment.beginning(segment.tokens, 0)
            moved = np.concatenate([survivor_slots, np.arange(layout.slots, layout.slots + suffix)])
            cache.write(np.arange(len(moved)), cache.read(moved), length=len(moved))
            if saved is not None:
                self.segments[key] = replace(segment, saved=saved)
            layouts[number] = replace(layout, slots=len(survivor_slots))
        return layouts
