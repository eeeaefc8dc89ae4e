"""The caches of one conversation's stages, and the prompt prefix on its way through them.

Every stage may be needed with all image tokens (`full`) and after some or all have left (`pruned`), with different
caches. Slots are not positions: a token keeps its position when tokens before it leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from vtx.runtime.backends.backend import Backend, StageCache
from vtx.runtime.backends.memory import QUESTION_ROWS
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.policies.policy import Policy, Removal
from vtx.runtime.session.prefix import Prefix, PrefixSlots, Prompt, PrunedPrefix, SavedKV, assign_positions
from vtx.runtime.vision.tokens import HiddenStates, Ids, Mask, TokenStates

Check = Callable[[], None]


class PrefixCaches:
    """Each stage's `full` and `pruned` cache by number, made when first needed, and how far the prefix is in them.

    Stages from `first_pruned` on run in `pruned`. An exception at any point costs a computation and leaves all of it
    correct: what is known of the prefix is replaced as a whole at every step.
    """

    def __init__(self, backend: Backend, manifest: Manifest) -> None:
        self._backend, self._token_inputs = backend, manifest.token_inputs
        self.stages, self.capacity, self._width = manifest.stages, manifest.max_context, manifest.model.hidden
        self.full: dict[int, StageCache] = {}
        self.pruned: dict[int, StageCache] = {}
        self.first_pruned = len(self.stages)
        self.prefix = self._empty_prefix()
        self._pruned_prefix: PrunedPrefix | None = None  # what `pruned` holds of the prefix
        self._holding: set[int] = set()  # boundaries at which hidden states of all image tokens are kept
        self._exit = len(self.stages)  # the stage before which all image tokens leave for certain
        self._spares = True  # whether hidden states that only another K would read are left out

    def cache(self, number: int) -> StageCache:
        """The cache in which the suffix runs through stage `number`."""
        return (self.full if number < self.first_pruned else self.pruned)[number]

    def prefix_at(self, number: int) -> PrunedPrefix:
        """What is still there of the prefix before stage `number`, which it has reached."""
        pruned = self._pruned_prefix if self.first_pruned < len(self.stages) else self.prefix.whole(number)
        assert pruned is not None
        return pruned

    # ---- a new prefix ------------------------------------------------------------------------------------------------

    def embed(self, prompt: Prompt, check: Check) -> Prefix:
        """A prompt's prefix before the decoder: its text embedded, its images encoded."""
        is_vision = prompt.is_vision[: prompt.prefix_length]
        if not is_vision.size:
            return replace(self._empty_prefix(), key=prompt.prefix_key)
        embedded = self._backend.embed(prompt.ids[: prompt.prefix_length])
        images = []
        for _, encode in prompt.encoders:
            check()
            images.append(encode())
        hidden, inputs = embedded.hidden, self._with_zeros(embedded).inputs
        hidden[is_vision] = np.concatenate([image.hidden for image in images])
        for each in self._token_inputs:
            if each.of_images:
                said = [image.patches.signals[names.token_input(each.name)] for image in images]
                inputs[each.name][is_vision] = np.concatenate(said)
        positions, following = assign_positions(is_vision, images)
        patches = tuple(image.patches for image in images)
        return Prefix(prompt.prefix_key, is_vision, patches, positions, following, (hidden,), inputs)

    def embed_text(self, ids: Ids) -> TokenStates:
        """Text tokens [n] before the decoder."""
        return self._with_zeros(self._backend.embed(ids))

    def _with_zeros(self, tokens: TokenStates) -> TokenStates:
        """With zeros for the inputs that the embed graph does not give."""
        if not self._token_inputs:
            return tokens
        lacking = [each for each in self._token_inputs if not each.of_text]
        zeros = {each.name: np.zeros((len(tokens), each.width), np.float32) for each in lacking}
        return TokenStates(tokens.hidden, {**tokens.inputs, **zeros})

    def enter(self, prefix: Prefix) -> None:
        """Take another prefix; it runs through the decoder when a question needs it."""
        self._pruned_prefix = None
        self.prefix = prefix

    def _empty_prefix(self) -> Prefix:
        hidden = np.zeros((0, self._width), np.float32)
        return Prefix((b"", ()), np.zeros(0, bool), (), np.zeros(0, np.int64), 0, (hidden,))

    # ---- its way through the stages ----------------------------------------------------------------------------------

    def prepare(self, policy: Policy) -> None:
        """Before a question: full caches whole again, and hidden states held wherever the policy may drop tokens."""
        self._restore()
        cuts = policy.row_cuts
        self._holding = {number for number, stage in enumerate(self.stages) if stage.first in cuts}
        self._exit = next((n for n, stage in enumerate(self.stages) if stage.first == policy.exit), len(self.stages))
        lacking = [number for number in self._holding if not self.prefix.held(number)]
        if self.prefix.depth < self._exit and not self.prefix.held(self.prefix.depth):
            lacking.append(self.prefix.depth)  # image tokens were to leave there, and now go on
            self._spares = False  # who changes K once may do so again
        if lacking:
            self.prefix = self.prefix.rewound(min(lacking))
        self.first_pruned = len(self.stages)

    def layout(self, number: int) -> PrefixSlots:
        """What of the prefix stage `number` sees, and where a suffix follows it."""
        if number < self.first_pruned:
            return PrefixSlots(np.ones(self.prefix.size, bool), self.prefix.size, self.prefix.next_position)
        pruned = self._pruned_prefix
        assert pruned is not None
        return PrefixSlots(pruned.present, pruned.size, pruned.next_position)

    def run(self, number: int, suffix: TokenStates, *, query: bool = False) -> HiddenStates:
        """Run a suffix [n] through stage `number`, and what continues of the prefix if it has yet to.

        Both go in one run, which reads the weights once; but not with a long suffix, nor with one whose `query` is kept
        for `StageCache.attention`. Returns the suffix's hidden states.
        """
        slots, joins = self.layout(number), not query and len(suffix) <= QUESTION_ROWS
        through = self._run_whole if number < self.first_pruned else self._run_pruned
        ran = through(number, slots, suffix if joins else suffix.part(0, 0))
        if len(ran):
            return ran
        cache = self.cache(number)
        cache.keep(slots.slots)
        return cache.append(suffix, slots.position + np.arange(len(suffix)), query=query)

    def _run_whole(self, number: int, slots: PrefixSlots, suffix: TokenStates) -> HiddenStates:
        """Unless the prefix has run through stage `number` with all image tokens, run it, and a suffix behind it.

        Returns the suffix's hidden states, none where it has not run.
        """
        if number not in self.full:
            self.full[number] = self._backend.stage(number, self.capacity)
        prefix, cache = self.prefix, self.full[number]
        if prefix.depth > number:
            return suffix.hidden[:0]
        leaves = cache.selects_outputs and self._spares and number + 1 == self._exit and number + 1 not in self._holding
        rows = np.flatnonzero(~prefix.is_vision) if leaves else None
        hidden, behind = _run_both(cache, prefix.tokens(prefix.boundaries[-1]), prefix.positions, slots, suffix, rows)
        self.prefix = prefix.deeper(hidden, hold=number in self._holding)
        return behind

    def _run_pruned(self, number: int, slots: PrefixSlots, suffix: TokenStates) -> HiddenStates:
        """The same for what is left of the prefix."""
        pruned = self._pruned_prefix
        assert pruned is not None
        if pruned.depth > number:
            return suffix.hidden[:0]
        cache = self._pruned_cache(number, pruned)
        tokens = self.prefix.tokens(pruned.hidden, pruned.present)
        hidden, behind = _run_both(cache, tokens, pruned.positions, slots, suffix)
        self._pruned_prefix = pruned.deeper(hidden)
        return behind

    def remove(self, number: int, removal: Removal) -> PrunedPrefix:
        """Some image tokens leave before stage `number`. What is left runs anew, unless they left before as well."""
        before, first = self._pruned_prefix, self.first_pruned == len(self.stages)
        here = self.prefix.whole(number) if first or before is None else before
        pruned = here.without(removal, self.prefix.is_vision)
        again = first and before is not None and before.removals == pruned.removals and not removal.kept.any()
        if not again:
            self._pruned_prefix = pruned
        self.first_pruned = number if first else self.first_pruned
        return pruned

    def _pruned_cache(self, number: int, pruned: PrunedPrefix) -> StageCache:
        """The cache of a stage after tokens have left: no slot for those that never enter it."""
        wanted, cache = self.capacity - (self.prefix.size - pruned.size), self.pruned.get(number)
        withdrawn = pruned.size == self.prefix.text_size
        if cache is None or cache.capacity < wanted or (withdrawn and cache.capacity > wanted):
            self.pruned.pop(number, None)  # freed before the next one is made
            cache = self.pruned[number] = self._backend.stage(number, wanted)
        return cache

    # ---- caches that shrink after the prompt -------------------------------------------------------------------------

    def shrink(
        self, numbers: Iterable[int], survivors: Mask, layouts: Sequence[PrefixSlots], suffix: int
    ) -> list[PrefixSlots]:
        """Leave in these stages' caches only the survivors of the prefix, and `suffix` tokens (MustDrop section 3.5).

        `layouts` are what the stages held of the prefix; returned is what they hold now. What a full stage loses is
        saved for the next question. Until all is done no prefix is known, so that an interrupt costs a computation.
        """
        prefix, self.prefix, self._pruned_prefix = self.prefix, self._empty_prefix(), None
        saved, layouts = [], list(layouts)
        for number in numbers:
            layout, cache = layouts[number], self.cache(number)
            stays = survivors[layout.present]
            if stays.all():
                continue
            kept, dropped = np.flatnonzero(stays), np.flatnonzero(~stays)
            if number < self.first_pruned:
                saved.append(SavedKV(number, kept, dropped, cache.read(dropped)))
            moved = np.concatenate([kept, np.arange(layout.slots, layout.slots + suffix)])
            cache.write(np.arange(len(moved)), cache.read(moved), length=len(moved))
            layouts[number] = replace(layout, slots=len(kept))
        self.prefix = replace(prefix, saved_kv=tuple(saved))
        return layouts

    def _restore(self) -> None:
        """Put back what full stages have lost."""
        prefix = self.prefix
        if not prefix.saved_kv:
            return
        self.prefix = self._empty_prefix()
        for saved in prefix.saved_kv:
            cache = self.full[saved.stage]
            cache.write(saved.survivors, cache.read(np.arange(len(saved.survivors))), length=prefix.size)
            cache.write(saved.dropped, saved.kv, length=prefix.size)
        self.prefix = replace(prefix, saved_kv=())


def _run_both(
    cache: StageCache, prefix: TokenStates, positions: Ids, slots: PrefixSlots, suffix: TokenStates,
    rows: Ids | None = None,
) -> tuple[HiddenStates, HiddenStates]:  # fmt: skip
    """Run the tokens of a prefix from a cache's first slot on, and those of a suffix behind them.

    Returns the hidden states of both after the stage, of the prefix its `rows` alone where they are given. An empty
    prefix does not run, nor does a suffix without one.
    """
    cache.keep(0)
    if not len(prefix):
        return prefix.hidden, suffix.hidden[:0]
    following = slots.position + np.arange(len(suffix))
    if positions.ndim > 1:  # text stands at one time, row and column
        following = following[:, None].repeat(positions.shape[1], 1)
    own = len(prefix) if rows is None else len(rows)
    if rows is not None:
        rows = np.concatenate([rows, len(prefix) + np.arange(len(suffix))])
    hidden = cache.append(prefix.then(suffix), np.concatenate([positions, following]), outputs=rows)
    return hidden[:own].copy(), hidden[own:]
