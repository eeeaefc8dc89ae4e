"""Caches and hidden states of one conversation: prefill in two chunks, tokens leaving between stages, decode.

A prompt is cut after its last image token. The *prefix* before the cut (system text and images) does not depend on the
question: its hidden states and KV slots are computed once and stay. The *suffix* after it is the question, and later
the answer.

Every stage may be needed with all image tokens (`_full`) and after some or all have left (`_pruned`), with different
caches. Slots are not positions: a token keeps its position when tokens before it leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.backend import Backend, StageCache
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import BundleError, ContextError, RequestError
from vtx.runtime.policies.base import Boundary
from vtx.runtime.policies.policy import Policy, Removal
from vtx.runtime.session.prefix import Prefix, PrefixSlots, Prompt, PrunedPrefix, SavedKV, place
from vtx.runtime.session.result import Cut, PrefillResult, Selection, common_prefix
from vtx.runtime.vision.tokens import Ids, Mask, Rows, Scores

__all__ = ["Cut", "PrefillResult", "Prompt", "Selection", "Session"]


def _never() -> None:
    """A check that lets everything pass."""


class Session:
    """One conversation over a shared backend. Not safe for two threads at once; its owner locks it.

    An exception at any point, from the backend or a check, costs a computation and leaves the session correct.
    """

    def __init__(self, backend: Backend, manifest: Manifest) -> None:
        self._backend, self._manifest = backend, manifest
        self._stages = manifest.stages
        self._full: dict[int, StageCache] = {}
        self._pruned: dict[int, StageCache] = {}
        self._prefix = self._empty_prefix()
        self._pruned_prefix: PrunedPrefix | None = None  # what `_pruned` holds of the prefix
        self._suffix: list[int] = []  # ids after the prefix that the caches hold
        self._selection: Selection | None = None  # the question that selected the cached image tokens
        self._first_pruned = len(self._stages)  # the stage from which on the suffix runs in `_pruned`
        self._holding: set[int] = set()  # boundaries at which hidden states of all image tokens are kept
        self._reused_stages = 0  # from the first on, in which the last prefill ran no image token
        self._layouts: list[PrefixSlots] = []
        self._cuts: list[Cut] = []
        self._check: Callable[[], None] = _never

    @property
    def capacity(self) -> int:
        return self._manifest.max_context

    @property
    def length(self) -> int:
        """Tokens of the conversation so far: the position of the next one."""
        return self._prefix.next_position + len(self._suffix)

    @property
    def selection(self) -> Selection | None:
        """The question that selected the cached image tokens; None where none was answered."""
        return self._selection

    def prefill(
        self,
        prompt: Prompt,
        policy: Policy,
        *,
        after: Selection | None = None,
        check: Callable[[], None] = _never,
    ) -> PrefillResult:
        """Run a prompt and return the logits [vocab] at its last token.

        The prefix's slots are reused where it is the same as before. The policy is asked anew, unless the prompt
        continues `after` a question: then the image tokens that stay are those of that question, and the suffix's
        slots are reused as far as the ids agree. Where another question has been answered since, `after` is run again
        first. `check` is called before every image and stage and may raise, to stop there.

        Raises:
            ContextError: the prompt and one new token do not fit.
            RequestError: no text stands after the last image.
            BundleError: a gate or an attention gives what is not a number.

        """
        self._check_room(len(prompt.ids) + prompt.skipped, int(prompt.is_vision.sum()))
        length = prompt.prefix_length
        if length == len(prompt.ids):
            raise RequestError(
                "the prompt ends with an image and leaves no token to answer from; "
                "export with a --chat-template that prints the question, or ASSISTANT:, after the images"
            )
        self._check = check
        try:
            known = prompt.prefix_key == self._prefix.key
            reused = known and length > 0 and self._prefix.depth > 0
            if not known:
                self._replace_prefix(prompt)
            hidden = self._run_suffix(prompt, policy, after)
            return self._result(self._backend.head(hidden[-1:])[0], reused)
        finally:
            self._check = _never

    def decode(self, token: int) -> NDArray[np.float32]:
        """Run one more token and return the logits [vocab] after it."""
        self._check_room(self.length)
        hidden = self._backend.embed(np.array([token], np.int64))
        for number in range(len(self._stages)):
            position = np.array([self._layouts[number].position + len(self._suffix)], np.int64)
            hidden = self._cache(number).append(hidden, position)
        self._suffix.append(token)
        logits: NDArray[np.float32] = self._backend.head(hidden)[0]
        return logits

    def _check_room(self, tokens: int, vision: int = 0) -> None:
        if tokens + 1 > self.capacity:
            images = f" ({vision} of them for images)" if vision else ""
            raise ContextError(
                f"the prompt takes {tokens} tokens{images}, and {self.capacity - 1} fit into this bundle beside the "
                f"answer; shorten it by {tokens + 1 - self.capacity} tokens, or export with a larger --max-context"
            )

    # ---- the suffix --------------------------------------------------------------------------------------------------

    def _run_suffix(self, prompt: Prompt, policy: Policy, after: Selection | None) -> Rows:
        """Run what the caches lack of the prompt's suffix; its hidden states after the last stage."""
        length = prompt.prefix_length
        suffix = prompt.ids[length:].tolist()
        if after is None or not after.leads_to(prompt.prefix_key, policy, suffix):
            return self._select(Selection(prompt.prefix_key, policy, tuple(suffix)))
        if after != self._selection:
            self._select(after)
        else:
            self._reused_stages = len(self._stages)
        agreed = common_prefix(self._suffix, suffix)
        self._suffix = self._suffix[:agreed]
        hidden = self._append(prompt.ids[length + agreed :])
        self._suffix = suffix
        return hidden

    def _select(self, selection: Selection) -> Rows:
        """Run a question through all stages, asking its policy at each boundary which image tokens continue."""
        self._selection, self._suffix = None, []
        policy, ids = selection.policy, np.array(selection.ids, np.int64)
        needs = policy.needs()
        self._prepare(policy)
        self._first_pruned, self._cuts, self._layouts = len(self._stages), [], []
        depth = self._prefix.depth
        survivors: Mask | None = None
        hidden = self._backend.embed(ids)
        for number, stage in enumerate(self._stages):
            removal = (
                policy.ask(self._boundary(number, hidden, policy)) if number and self._sees_image(number - 1) else None
            )
            if removal is not None:
                pruned = self._remove(number, removal)
                survivors = pruned.present if removal.shrinks else survivors
            self._layouts.append(self._run_prefix(number))
            query = stage.query and stage.last in needs.queries and self._sees_image(number)
            hidden = self._run_stage(number, hidden, query=query)
        if survivors is not None and needs.shrinks is not None:
            self._shrink([n for n, s in enumerate(self._stages) if s.first >= needs.shrinks], survivors, len(ids))
        if policy.renumbers:  # as the released code decodes: each layer at its own cache's length
            self._layouts = [replace(layout, position=layout.slots) for layout in self._layouts]
        self._selection, self._suffix = selection, [*selection.ids]
        self._reused_stages = min(depth, self._first_pruned)
        return hidden

    def _append(self, ids: Ids) -> Rows:
        """Run more tokens of the suffix in the caches as they stand."""
        hidden = self._backend.embed(ids)
        for number in range(len(self._stages)):
            hidden = self._run_stage(number, hidden)
        return hidden

    def _run_stage(self, number: int, hidden: Rows, *, query: bool = False) -> Rows:
        self._check()
        layout, cache, done = self._layouts[number], self._cache(number), len(self._suffix)
        cache.keep(layout.slots + done)
        first = layout.position + done
        return cache.append(hidden, np.arange(first, first + len(hidden), dtype=np.int64), query=query)

    def _cache(self, number: int) -> StageCache:
        return (self._full if number < self._first_pruned else self._pruned)[number]

    def _sees_image(self, number: int) -> bool:
        """Whether the suffix sees an image token in stage `number`."""
        return bool((self._layouts[number].present & self._prefix.is_vision).any())

    def _boundary(self, number: int, hidden: Rows, policy: Policy) -> Boundary:
        """What a policy may know before stage `number`."""
        prefix, before = self._prefix, self._layouts[number - 1].present
        slots, layer = np.flatnonzero(prefix.is_vision[before]), self._stages[number - 1].last

        def scores(last_only: bool) -> Scores:
            total, most = self._cache(number - 1).attention(last_only=last_only)
            if not (np.isfinite(total).all() and np.isfinite(most).all()):
                raise BundleError(
                    f"the attention of layer {layer} is not a number; use --reduce none, or export at fp32"
                )
            return total[slots], most[slots]

        def here() -> PrunedPrefix:
            pruned = self._pruned_prefix if self._first_pruned < len(self._stages) else prefix.whole(number)
            assert pruned is not None
            return pruned

        def image_hidden() -> Rows:
            return here().hidden[prefix.is_vision[here().present]]

        def positions() -> tuple[Ids, Ids]:
            first = self._layouts[number - 1].position
            return here().positions[prefix.is_vision[here().present]], np.arange(first, first + len(hidden))

        def keys() -> tuple[Rows, Rows]:
            flat = np.concatenate([*self._cache(number - 1).keys()], axis=-1)
            return flat[slots], flat[len(flat) - len(hidden) :]

        present = before[prefix.is_vision]
        return Boundary(
            layer + 1, hidden, prefix.images, present, scores, image_hidden, keys, policy.final_norm, positions
        )

    # ---- the prefix --------------------------------------------------------------------------------------------------

    def _replace_prefix(self, prompt: Prompt) -> None:
        """Take another prefix; it enters the decoder when a question needs it."""
        key, is_vision = prompt.prefix_key, prompt.is_vision[: prompt.prefix_length]
        prefix = self._empty_prefix()
        if is_vision.size:
            hidden = self._backend.embed(prompt.ids[: prompt.prefix_length])
            images = []
            for _, encode in prompt.encoders:
                self._check()
                images.append(encode())
            hidden[is_vision] = np.concatenate([image.rows for image in images])
            positions, following = place(is_vision, images)
            prefix = Prefix(key, is_vision, tuple(i.patches for i in images), positions, following, (hidden,))
        self._suffix, self._selection, self._pruned_prefix = [], None, None
        self._prefix = replace(prefix, key=key)

    def _empty_prefix(self) -> Prefix:
        hidden = np.zeros((0, self._manifest.model.hidden), np.float32)
        return Prefix((b"", ()), np.zeros(0, bool), (), np.zeros(0, np.int64), 0, (hidden,))

    def _prepare(self, policy: Policy) -> None:
        """Before a question: full caches whole again, and hidden states held wherever the policy may drop tokens."""
        self._restore()
        cuts = policy.row_cuts
        self._holding = {number for number, stage in enumerate(self._stages) if stage.first in cuts}
        lacking = [number for number in self._holding if not self._prefix.held(number)]
        if lacking:
            self._prefix = self._prefix.rewound(min(lacking))

    def _run_prefix(self, number: int) -> PrefixSlots:
        """Ensure that what continues of the prefix has run through stage `number`."""
        if number < self._first_pruned:
            self._run_whole_prefix(number)
            return PrefixSlots(np.ones(self._prefix.size, bool), self._prefix.size, self._prefix.next_position)
        pruned = self._pruned_prefix
        assert pruned is not None
        if pruned.depth <= number:
            self._check()
            cache = self._pruned_cache(number, pruned)
            cache.keep(0)
            hidden = cache.append(pruned.hidden, pruned.positions).copy() if pruned.size else pruned.hidden
            self._pruned_prefix = pruned.deeper(hidden)
        return PrefixSlots(pruned.present, pruned.size, pruned.next_position)

    def _run_whole_prefix(self, number: int) -> None:
        """Ensure that the prefix has run through stage `number`, with all image tokens."""
        if number not in self._full:
            self._full[number] = self._backend.stage(number, self.capacity)
        prefix = self._prefix
        if prefix.depth > number:
            return
        self._check()
        cache = self._full[number]
        cache.keep(0)
        last = prefix.boundaries[-1]
        hidden = cache.append(last, prefix.positions).copy() if prefix.size else last
        self._prefix = prefix.deeper(hidden, hold=number in self._holding)

    def _remove(self, number: int, removal: Removal) -> PrunedPrefix:
        """Some image tokens leave before stage `number`. What is left runs anew, unless they left before as well."""
        prefix, before = self._prefix, self._pruned_prefix
        first = self._first_pruned == len(self._stages)
        here = prefix.whole(number) if first or before is None else before
        pruned = here.without(removal, prefix.is_vision)
        again = first and before is not None and before.removals == pruned.removals and not removal.kept.any()
        if not again:
            self._pruned_prefix = pruned
        self._first_pruned = number if first else self._first_pruned
        self._cuts.append(Cut(self._stages[number].first, removal.by, pruned.present[prefix.is_vision]))
        return pruned

    def _pruned_cache(self, number: int, pruned: PrunedPrefix) -> StageCache:
        """The cache of a stage after tokens have left: no slot for those that never enter it."""
        wanted, cache = self.capacity - (self._prefix.size - pruned.size), self._pruned.get(number)
        withdrawn = pruned.size == self._prefix.text_size
        if cache is None or cache.capacity < wanted or (withdrawn and cache.capacity > wanted):
            self._pruned.pop(number, None)  # freed before the next one is made
            cache = self._pruned[number] = self._backend.stage(number, wanted)
        return cache

    # ---- caches that shrink after the prompt -------------------------------------------------------------------------

    def _shrink(self, numbers: Iterable[int], survivors: Mask, suffix: int) -> None:
        """Leave in these stages' caches only the survivors of the prefix, and the suffix (MustDrop section 3.5).

        What a full stage loses is saved for the next question. Until all is done the session knows no prefix, so that
        an interrupt costs a computation and leaves the session correct.
        """
        prefix, self._prefix, self._pruned_prefix = self._prefix, self._empty_prefix(), None
        saved, layouts = [], list(self._layouts)
        for number in numbers:
            layout, cache = layouts[number], self._cache(number)
            stays = survivors[layout.present]
            if stays.all():
                continue
            kept, dropped = np.flatnonzero(stays), np.flatnonzero(~stays)
            if number < self._first_pruned:
                saved.append(SavedKV(number, kept, dropped, cache.read(dropped)))
            moved = np.concatenate([kept, np.arange(layout.slots, layout.slots + suffix)])
            cache.write(np.arange(len(moved)), cache.read(moved), length=len(moved))
            layouts[number] = replace(layout, slots=len(kept))
        self._layouts, self._prefix = layouts, replace(prefix, saved_kv=tuple(saved))

    def _restore(self) -> None:
        """Put back what full stages have lost."""
        prefix = self._prefix
        if not prefix.saved_kv:
            return
        self._prefix = self._empty_prefix()
        for saved in prefix.saved_kv:
            cache = self._full[saved.stage]
            cache.write(saved.survivors, cache.read(np.arange(len(saved.survivors))), length=prefix.size)
            cache.write(saved.dropped, saved.kv, length=prefix.size)
        self._prefix = replace(prefix, saved_kv=())

    # ---- the result --------------------------------------------------------------------------------------------------

    def _result(self, logits: NDArray[np.float32], reused: bool) -> PrefillResult:
        is_vision = self._prefix.is_vision
        kept = [int((layout.present & is_vision).sum()) for layout in self._layouts]
        gone = kept.index(0) if is_vision.any() and 0 in kept else None
        return PrefillResult(
            logits=logits,
            k=None if gone is None else self._stages[gone].first,
            reused_image=reused,
            reused_layers=self._stages[self._reused_stages - 1].last if reused and self._reused_stages else 0,
            vision_tokens=int(is_vision.sum()),
            slots=self._per_layer([self._cache(number).length for number in range(len(self._stages))]),
            vision_kept=self._per_layer(kept),
            images=self._prefix.images,
            cuts=tuple(self._cuts),
            selection=self._selection,
        )

    def _per_layer(self, values: Sequence[int]) -> tuple[int, ...]:
        """One value a stage, repeated for each of its layers."""
        return tuple(v for v, stage in zip(values, self._stages, strict=True) for _ in range(stage.layers))
