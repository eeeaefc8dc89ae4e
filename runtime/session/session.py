"""Caches and hidden states of one conversation: prefill, tokens leaving between stages, decode.

A prompt is cut after its last image token. The *prefix* before the cut (system text and images) does not depend on the
question: its hidden states and KV slots are computed once and stay. The *suffix* after it is the question, and later
the answer.

`caches.py` holds the stages' caches and the prefix; here the suffix runs through them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.backend import Backend, StageCache
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import ContextError, RequestError
from vtx.runtime.policies.policy import Policy, Removal
from vtx.runtime.session.boundary import boundary_before
from vtx.runtime.session.caches import PrefixCaches
from vtx.runtime.session.prefix import PrefixSlots, Prompt
from vtx.runtime.session.result import Cut, PrefillResult, Selection, common_prefix
from vtx.runtime.vision.tokens import HiddenStates, Ids, Mask

__all__ = ["Cut", "PrefillResult", "Prompt", "Selection", "Session"]


def _never() -> None:
    """A check that lets everything pass."""


def _check_ends_with_text(prompt: Prompt) -> int:
    """The length of the prompt's prefix. Raises RequestError where nothing follows it."""
    if prompt.prefix_length == len(prompt.ids):
        raise RequestError(
            "the prompt ends with an image and leaves no token to answer from; "
            "export with a --chat-template that prints the question, or ASSISTANT:, after the images"
        )
    return prompt.prefix_length


class Session:
    """One conversation over a shared backend. Not safe for two threads at once; its owner locks it.

    An exception at any point, from the backend or a check, costs a computation and leaves the session correct.
    """

    def __init__(self, backend: Backend, manifest: Manifest) -> None:
        self._backend, self._stages, self._image_token = backend, manifest.stages, manifest.text.image_token_id
        self._or_more_context = manifest.or_more_context
        self.caches = PrefixCaches(backend, manifest)
        self._suffix: list[int] = []  # ids after the prefix that the caches hold
        self._selection: Selection | None = None  # the question that selected the cached image tokens
        self._reused_stages = 0  # from the first on, in which the last prefill ran no image token
        self._reused_suffix = 0  # tokens of the last prefill's suffix that were cached
        self._layouts: list[PrefixSlots] = []
        self._cuts: list[Cut] = []
        self._check: Callable[[], None] = _never
        self.next_token: int | None = None  # what `decode` will be given next, where that is certain
        self._ahead: NDArray[np.float32] | None = None  # logits [vocab] after it, run together with other sessions
        # tokens that ran on trial, the logits after each, and its hidden state
        self._drafts = deque[tuple[int, NDArray[np.float32], HiddenStates]]()
        self.state: HiddenStates = np.zeros(0, np.float32)  # [hidden] of the last layer, whose logits were given last

    @property
    def capacity(self) -> int:
        return self.caches.capacity

    @property
    def length(self) -> int:
        """Tokens of the conversation so far, or positions where there are more: what the context has room for."""
        prefix = self.caches.prefix
        return max(prefix.next_position, prefix.size) + len(self._suffix)

    @property
    def selection(self) -> Selection | None:
        """The question that selected the cached image tokens; None where none was answered."""
        return self._selection

    @property
    def kv_slots(self) -> int:
        """Slots of all layers that its caches have room for, filled or not."""
        caches = [*self.caches.full.items(), *self.caches.pruned.items()]
        return sum(cache.capacity * self._stages[number].layers for number, cache in caches)

    def agreement(self, ids: Ids) -> tuple[int, int]:
        """How many leading tokens of a prompt about these images the conversation has, and how many it has in all.

        Image tokens count as in the prompt, also where some left before the decoder.
        """
        prefix, is_vision = self.caches.prefix, ids == self._image_token
        before = np.frombuffer(prefix.key[0], np.int64)[~prefix.is_vision]
        held, text = np.concatenate([before, np.array(self._suffix, np.int64)]), np.flatnonzero(~is_vision)
        if not len(held):
            return 0, 0
        count = min(len(held), len(text))
        differing = np.flatnonzero(held[:count] != ids[text[:count]])
        first = int(differing[0]) if len(differing) else count
        return int(text[first]) if first < len(text) else len(ids), len(held) + int(is_vision.sum())

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
        length = _check_ends_with_text(prompt)
        self._check, self.next_token, self._ahead = check, None, None
        self._drafts.clear()  # every stage's cache is cut to what is known before it runs
        try:
            prefix = self.caches.prefix
            known = prompt.prefix_key == prefix.key
            reused = known and length > 0 and prefix.depth > 0
            if not known:
                entering = self.caches.embed(prompt, check)
                self._suffix, self._selection = [], None
                self.caches.enter(entering)
            hidden = self._run_suffix(prompt, policy, after)
            self.state = hidden[-1]
            return self._result(self._backend.head(hidden[-1:])[0], reused)
        finally:
            self._check = _never

    def decode(self, token: int, draft: Sequence[int] = ()) -> NDArray[np.float32]:
        """Run one more token, where it has not run ahead, and return the logits [vocab] after it.

        The tokens of a `draft` run behind it in the same pass, on trial: `accept` has the logits after them.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            assert token == self._suffix[-1], "another token ran ahead"
            return ahead
        assert not self._drafts, "a draft is neither accepted nor forgotten"
        self._check_room(self.length + len(draft))
        tokens = self.caches.embed_text(np.array([token, *draft], np.int64))
        for number in range(len(self._stages)):
            first = self.next_position(number)
            positions = np.arange(first, first + len(tokens), dtype=np.int64)
            tokens = tokens.after(self.caches.cache(number).append(tokens, positions))
        self._suffix.append(token)
        hidden = tokens.hidden
        logits, self.state = self._backend.head(hidden), hidden[0]
        self._drafts.extend(zip(draft, logits[1:], hidden[1:], strict=True))
        first_logits: NDArray[np.float32] = logits[0]
        return first_logits

    def accept(self, token: int) -> NDArray[np.float32] | None:
        """The logits [vocab] after a token that is the next one of the draft; None where it is not.

        Then the draft leaves the caches, and the token has yet to be decoded.
        """
        if not self._drafts or self._drafts[0][0] != token:
            self.forget_draft()
            return None
        self._suffix.append(token)
        _, logits, self.state = self._drafts.popleft()
        return logits

    def forget_draft(self) -> None:
        """Have what is left of a draft leave the caches."""
        if self._drafts:
            count = len(self._drafts)
            self._drafts.clear()
            for cache in self.decoding_caches:
                cache.keep(cache.length - count)

    @property
    def draft_room(self) -> int:
        """The most tokens of a draft behind the next token."""
        return max(0, self.capacity - 2 - self.length)

    # ---- decoding together with other sessions -----------------------------------------------------------------------

    @property
    def decoding_caches(self) -> list[StageCache]:
        """Of each stage, the cache in which it decodes."""
        return [self.caches.cache(number) for number in range(len(self._stages))]

    def next_position(self, number: int) -> int:
        """In stage `number`, of the next token."""
        return self._layouts[number].position + len(self._suffix)

    def decoded(self, logits: NDArray[np.float32], state: HiddenStates) -> None:
        """Take over the logits [vocab] after `next_token`, which has run through the caches, and its state [hidden]."""
        assert self.next_token is not None
        self._suffix.append(self.next_token)
        self.next_token, self._ahead, self.state = None, logits, state

    def _check_room(self, tokens: int, vision: int = 0) -> None:
        if tokens + 1 > self.capacity:
            images = f" ({vision} of them for images)" if vision else ""
            raise ContextError(
                f"the prompt takes {tokens} tokens{images}, and {self.capacity - 1} fit into this bundle beside the "
                f"answer; shorten it by {tokens + 1 - self.capacity} tokens{self._or_more_context}"
            )

    # ---- the suffix --------------------------------------------------------------------------------------------------

    def _run_suffix(self, prompt: Prompt, policy: Policy, after: Selection | None) -> HiddenStates:
        """Run what the caches lack of the prompt's suffix; its hidden states after the last stage."""
        length = prompt.prefix_length
        suffix = prompt.ids[length:].tolist()
        self._reused_suffix = 0
        if after is None or not after.leads_to(prompt.prefix_key, policy, suffix):
            return self._select(Selection(prompt.prefix_key, policy, tuple(suffix)))
        cached = after == self._selection
        if cached:
            self._reused_stages = len(self._stages)
        else:
            self._select(after)
        agreed = common_prefix(self._suffix, suffix)
        self._reused_suffix = agreed if cached else 0
        self._suffix = self._suffix[:agreed]
        hidden = self._append(prompt.ids[length + agreed :])
        self._suffix = suffix
        return hidden

    def _select(self, selection: Selection) -> HiddenStates:
        """Run a question through all stages, asking its policy at each boundary which image tokens continue."""
        self._selection, self._suffix = None, []
        policy, ids, caches = selection.policy, np.array(selection.ids, np.int64), self.caches
        needs = policy.needs()
        caches.prepare(policy)
        self._cuts, self._layouts = [], []
        depth = caches.prefix.depth
        survivors: Mask | None = None
        tokens = caches.embed_text(ids)
        for number, stage in enumerate(self._stages):
            if number and self._sees_image(number - 1):
                removal = policy.ask(boundary_before(number, caches, self._layouts[-1], tokens.hidden, policy))
                survivors = self._leave(number, removal, survivors)
            self._check()
            self._layouts.append(caches.layout(number))
            query = stage.query and stage.last in needs.queries and self._sees_image(number)
            tokens = tokens.after(caches.run(number, tokens, query=query))
        if survivors is not None and needs.shrinks is not None:
            shrinking = [n for n, s in enumerate(self._stages) if s.first >= needs.shrinks]
            self._layouts = caches.shrink(shrinking, survivors, self._layouts, len(ids))
        if policy.renumbers:  # as the released code decodes: each layer at its own cache's length
            self._layouts = [replace(layout, position=layout.slots) for layout in self._layouts]
        self._selection, self._suffix = selection, [*selection.ids]
        self._reused_stages = min(depth, caches.first_pruned)
        return tokens.hidden

    def _leave(self, number: int, removal: Removal | None, survivors: Mask | None) -> Mask | None:
        """The prefix's tokens that caches shrink to, after what a policy decided before stage `number`."""
        if removal is None:
            return survivors
        pruned = self.caches.remove(number, removal)
        kept = pruned.present[self.caches.prefix.is_vision]
        self._cuts.append(Cut(self._stages[number].first, removal.by, kept))
        return pruned.present if removal.shrinks else survivors

    def _append(self, ids: Ids) -> HiddenStates:
        """Run more tokens of the suffix in the caches as they stand."""
        tokens, done = self.caches.embed_text(ids), len(self._suffix)
        for number, layout in enumerate(self._layouts):
            self._check()
            cache, first = self.caches.cache(number), layout.position + done
            cache.keep(layout.slots + done)
            tokens = tokens.after(cache.append(tokens, np.arange(first, first + len(tokens), dtype=np.int64)))
        return tokens.hidden

    def _sees_image(self, number: int) -> bool:
        """Whether the suffix sees an image token in stage `number`."""
        return bool((self._layouts[number].present & self.caches.prefix.is_vision).any())

    # ---- the result --------------------------------------------------------------------------------------------------

    def _result(self, logits: NDArray[np.float32], reused: bool) -> PrefillResult:
        prefix = self.caches.prefix
        is_vision = prefix.is_vision
        kept = [int((layout.present & is_vision).sum()) for layout in self._layouts]
        gone = kept.index(0) if is_vision.any() and 0 in kept else None
        return PrefillResult(
            logits=logits,
            k=None if gone is None else self._stages[gone].first,
            reused_image=reused,
            reused_layers=self._stages[self._reused_stages - 1].last if reused and self._reused_stages else 0,
            reused_tokens=self._reused_tokens(reused),
            vision_tokens=int(is_vision.sum()),
            slots=self._per_layer([self.caches.cache(number).length for number in range(len(self._stages))]),
            vision_kept=self._per_layer(kept),
            images=prefix.images,
            cuts=tuple(self._cuts),
            selection=self._selection,
        )

    def _reused_tokens(self, reused: bool) -> int:
        ran = any(self._sees_image(number) for number in range(self._reused_stages, len(self._stages)))
        return self._reused_suffix + (self.caches.prefix.size if reused and not ran else 0)

    def _per_layer(self, values: Sequence[int]) -> tuple[int, ...]:
        """One value a stage, repeated for each of its layers."""
        return tuple(v for v, stage in zip(values, self._stages, strict=True) for _ in range(stage.layers))
