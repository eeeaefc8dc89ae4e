"""Caches and hidden states of one conversation: prefill, tokens leaving between stages, decode.

A prompt is cut after its last image token. The *prefix* before the cut (system text and images) does not depend on the
question: its hidden states and KV slots are computed once and stay. The *suffix* after it is the question, and later
the answer.

`caches.py` holds the stages' caches and the prefix; here the suffix runs through them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.backend import Backend, StageCache, Step
from vtx.runtime.bundle.spec.manifest import Manifest, StageSpec
from vtx.runtime.errors import BundleError, ContextError, RequestError
from vtx.runtime.policies.base import Policy
from vtx.runtime.session.caches import PrefixCaches
from vtx.runtime.session.prefix import Check, Key, PrefixSlots, Prompt, no_check
from vtx.runtime.session.sampling import NOT_FINITE
from vtx.runtime.vision.tokens import HiddenStates, Ids, Mask, Patches, TokenStates

__all__ = ["Cut", "PrefillResult", "Prompt", "Selection", "Session"]


@dataclass(frozen=True, slots=True)
class Selection:
    """A question that selected which image tokens stay: the prefix it followed, its policy, its ids.

    Equal ones select the same tokens, so caches of one are caches of the other.
    """

    key: Key
    policy: Policy
    ids: tuple[int, ...]

    def leads_to(self, key: Key, policy: Policy, suffix: Sequence[int]) -> bool:
        """True if a prompt continues after this question instead of being a question of its own."""
        return self.key == key and self.policy == policy and common_prefix(self.ids, suffix) > 0


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Image tokens left before `layer`; `kept` [those that entered] continued, `by` names what left out the others."""

    layer: int
    by: tuple[str, ...]
    kept: Mask


@dataclass(frozen=True, slots=True)
class Reuse:
    """The part of a prompt that need not run: its `prefix` is the last one's, the first `stages` hold its image tokens.

    `suffix` tokens are in the caches. `obstacle`: why the prefix is another, in one word.
    """

    prefix: bool = False
    stages: int = 0
    suffix: int = 0
    obstacle: str | None = None


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """The outcome of a prefill. Per-layer lists start with layer 1; `slots` count right after the prompt, 0 in layers
    without K and V.

    `k` is the first layer without image tokens, but for a `rest` of them that stayed there; None if none left by K.
    `images` are the image tokens that entered. `reused_layers`: in layers 1 to this one no image token was run, since
    the caches of an earlier question hold them. `reused_tokens`: tokens of the prompt that they served; the prefix
    counts if no image token was run, or the part of it that an earlier prefix has in common with it.
    `cuts`: the layers before which some left. A chat's next turn continues after `selection`. `not_reused`: why image
    tokens were run, in one word (see `Stats`).
    """

    logits: NDArray[np.float32]
    k: int | None
    reused_image: bool
    reused_layers: int
    reused_tokens: int
    vision_tokens: int
    slots: tuple[int, ...]
    vision_kept: tuple[int, ...]
    images: tuple[Patches, ...] = ()
    cuts: tuple[Cut, ...] = ()
    selection: Selection | None = None
    rest: int = 0
    not_reused: str | None = None


def common_prefix(cached: Sequence[int], wanted: Sequence[int]) -> int:
    """The number of leading ids that agree, less one if all do: at least one token must run for its logits."""
    agreed = 0
    while agreed < min(len(cached), len(wanted) - 1) and cached[agreed] == wanted[agreed]:
        agreed += 1
    return agreed


def _asks_nothing(policy: Policy) -> bool:
    """True if the policy needs nothing of a question to decide which image tokens continue."""
    return not policy.renumbers and all(part.fixed or not part.needs().cuts for part in policy.parts)


class Session:
    """One conversation over a shared backend. Not safe for two threads at once; its owner locks it.

    An exception at any point, from the backend or a check, costs a computation and leaves the session correct.
    """

    def __init__(self, backend: Backend, manifest: Manifest) -> None:
        if manifest.action is not None:
            raise RequestError(f"{manifest.model.name} outputs actions, not text; use act, or vtx-run --act")
        self._backend = backend
        self._manifest = manifest
        self._run_step: Callable[..., Step] | None = getattr(backend, "step", None)  # of a `SteppingBackend`
        self.caches = PrefixCaches(backend, manifest)
        self._suffix: list[int] = []  # ids after the prefix that the caches hold
        self.selection: Selection | None = None  # the question that selected the cached image tokens
        self._reuse = Reuse()  # of the last prompt
        self._layouts: list[PrefixSlots] = []  # of each stage, for the last question
        self._cuts: list[Cut] = []
        self.next_token: int | None = None  # the next argument of `decode`, if that is certain
        self.waiting: list[int] = []  # the end of a prompt that has begun, while nothing else of it is left to run
        self._embedded: TokenStates | None = None  # `waiting` before the decoder, if that is known
        # logits [vocab] after `next_token`, or after `waiting`, run together with other sessions
        self._ahead: NDArray[np.float32] | None = None
        # tokens that ran on trial, the logits after each, and its hidden state [1, hidden]
        self._drafts = deque[tuple[int, NDArray[np.float32], HiddenStates]]()
        self._state: HiddenStates = np.zeros((1, 0), np.float32)  # [1, hidden], where the backend keeps it
        self._states: HiddenStates | None = None  # [suffix, hidden], of a prompt that was to keep them

    @property
    def _stages(self) -> Sequence[StageSpec]:
        return self._manifest.stages

    @property
    def capacity(self) -> int:
        """The most tokens or positions of the conversation."""
        return self._manifest.max_context

    @property
    def state(self) -> NDArray[np.float32]:
        """The state [hidden] of the last layer whose logits were given last."""
        state: NDArray[np.float32] = np.asarray(self._state)[0]
        return state

    @property
    def length(self) -> int:
        """Tokens of the conversation so far, or positions if there are more: the context has room for this many."""
        prefix = self.caches.prefix
        return max(prefix.next_position, len(prefix)) + len(self._suffix)

    @property
    def kv_slots(self) -> int:
        """Slots of all layers that hold memory; of those that several conversations share its part."""
        return sum(cache.resident * layers for cache, layers in self._caches_held)

    @property
    def kv_slots_held(self) -> int:
        """As `kv_slots`, with those that it shares counted as if they were its own."""
        return sum(max(cache.resident, cache.length) * layers for cache, layers in self._caches_held)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of its layers that keep one."""
        return sum(cache.state_bytes for cache, _ in self._caches_held)

    @property
    def _caches_held(self) -> list[tuple[StageCache, int]]:
        """The caches, each with the number of its layers that keep K and V."""
        return [
            (segment.cache, len(self._stages[number].cached)) for (number, _), segment in self.caches.segments.items()
        ]

    def agreement(self, ids: Ids) -> tuple[int, int]:
        """The number of leading tokens of a prompt about these images that the conversation has, and of all it has.

        Image tokens count as in the prompt, even if some left before the decoder.
        """
        prefix = self.caches.prefix
        is_vision = ids == self._manifest.text.image_token_id
        before = np.frombuffer(prefix.key.ids, np.int64)[~prefix.is_vision]
        cached_ids = np.concatenate([before, np.array(self._suffix, np.int64)])
        text = np.flatnonzero(~is_vision)
        if not len(cached_ids):
            return 0, 0
        count = min(len(cached_ids), len(text))
        differing = np.flatnonzero(cached_ids[:count] != ids[text[:count]])
        first = int(differing[0]) if len(differing) else count
        return int(text[first]) if first < len(text) else len(ids), len(cached_ids) + int(is_vision.sum())

    def prefill(
        self, prompt: Prompt, policy: Policy, *, after: Selection | None = None, check: Check = no_check
    ) -> PrefillResult:
        """Run a prompt and return the logits [vocab] at its last token.

        The prefix's slots are reused if it is the same as before. The policy is asked anew, unless the prompt
        continues `after` a question, and K leaves no rest: then the image tokens that stay are those of that question,
        and the suffix's slots are reused as far as the ids agree. If another question has been answered since, `after`
        is run again first. `check` is called before every image and stage and may raise, to stop there.

        Raises ContextError: the prompt and one new token do not fit; RequestError: there is no text after the last
        image; BundleError: a gate or an attention gives what is not a number.
        """
        self.begin(prompt, policy, after=after, check=check)
        return self.finish(check=check)

    def begin(
        self,
        prompt: Prompt,
        policy: Policy,
        *,
        after: Selection | None = None,
        check: Check = no_check,
        scored: bool = False,
    ) -> None:
        """The first part of `prefill`: run the prompt, but for its end if that is text behind what the caches hold.

        That end is then `waiting`, and may run in one pass with tokens of other sessions before `finish` does. Of a
        prompt that is to be `scored`, `suffix_logits` gives the logits, and no part of its suffix is reused or waits.
        """
        self._check_room(len(prompt.ids) + prompt.skipped, int(prompt.is_vision.sum()))
        length = prompt.prefix_length
        key = prompt.prefix_key(prompt.ids[length:] if self.caches.embedding.two_way else None)
        suffix: list[int] = prompt.ids[length:].tolist()
        if not suffix:
            raise RequestError(
                "the prompt ends with an image and leaves no token to answer from; "
                "export with a --chat-template that prints the question, or ASSISTANT:, after the images"
            )
        self.next_token = None
        self._ahead = None
        self.waiting = []
        self._embedded = None
        self._states = None
        self._drafts.clear()  # every stage's cache is cut to what is known before it runs
        known = key == self.caches.prefix.key
        reuse = Reuse(prefix=known and length > 0 and self.caches.depth > 0)
        if not known:
            reuse = Reuse(obstacle=self.caches.enter(prompt, key, check))
            self._suffix = []
            self.selection = None
        if scored:
            self._reuse = reuse
            self._states = self._select(Selection(key, policy, tuple(suffix)), check)
        elif after is None or policy.rest_cut is not None or not after.leads_to(key, policy, suffix):
            self._reuse = reuse
            self._select(Selection(key, policy, tuple(suffix)), check, waits=self.caches.cuts)
        else:
            self._continue(suffix, after, reuse, check)

    def _continue(self, suffix: Sequence[int], after: Selection, reuse: Reuse, check: Check) -> None:
        """Begin a prompt that continues `after` a question: as far as the caches hold its suffix."""
        self._reuse = reuse
        cached = after == self.selection
        if not cached:
            self._select(after, check)
        agreed = self._held(common_prefix(self._suffix, suffix))
        if cached:
            self._reuse = replace(reuse, stages=len(self._stages), suffix=agreed)
        self._suffix = self._suffix[:agreed]
        for number, layout in enumerate(self._layouts):
            self.caches.cache(number).keep(layout.slots + agreed)
        self.waiting = [*suffix[agreed:]]
        if not self.caches.cuts:
            self._run_waiting(check)

    def suffix_logits(self, first: int, last: int) -> NDArray[np.float32]:
        """The logits [tokens, vocab] after tokens `first` to before `last` of the suffix of a prompt that is scored."""
        assert self._states is not None, "the prompt was not to be scored"
        return self._backend.head(self._states[first:last])

    def finish(self, *, check: Check = no_check) -> PrefillResult:
        """The result of the prompt that has begun; what is `waiting` of it runs now, unless it has run ahead."""
        logits_ahead = self._ahead
        self._ahead = None
        if self.waiting:
            self._run_waiting(check)
        for cache in self.decoding_caches:
            cache.mark(cache.length)
        return self._result(self._backend.head(self._state)[0] if logits_ahead is None else logits_ahead)

    def _run_waiting(self, check: Check) -> None:
        """Run the end of a prompt; of a stage that keeps nothing only its last token is read."""
        ids = self.waiting
        tokens = self._embedded
        self.waiting = []
        self._embedded = None
        if tokens is None:
            tokens = self.caches.embedding.text(np.array(ids, np.int64))
        for number in range(len(self._stages)):
            check()
            first = self.next_position(number)
            positions = np.arange(first, first + len(ids), dtype=np.int64)
            if not self.caches.keeping[number]:
                tokens = tokens.part(len(tokens) - 1, len(tokens))
                positions = positions[-1:]
            tokens = tokens.after(self.caches.cache(number).append(tokens, positions))
        self._suffix, self._state = [*self._suffix, *ids], tokens.hidden[-1:].copy()

    def decode(self, token: int, draft: Sequence[int] = ()) -> NDArray[np.float32]:
        """Run one more token, unless it has run ahead, and return the logits [vocab] after it.

        The tokens of a `draft` run behind it in the same pass, on trial: `accept` has the logits after them.
        """
        logits_ahead = self._ahead
        self._ahead = None
        if logits_ahead is not None:
            assert token == self._suffix[-1], "another token ran ahead"
            return logits_ahead
        assert not self._drafts, "a draft is neither accepted nor forgotten"
        if self._run_step is not None and not draft:
            stepped = self._step(self._run_step, token, logits=True).logits
            assert stepped is not None
            return stepped
        hidden = self._append([token, *draft])
        self._suffix.append(token)
        logits = self._backend.head(hidden)
        self._state = hidden[:1]
        states = (hidden[number : number + 1] for number in range(1, len(hidden)))
        self._drafts.extend(zip(draft, logits[1:], states, strict=True))
        first_logits: NDArray[np.float32] = logits[0]
        return first_logits

    def choose(self, token: int) -> int | None:
        """Run one more token as `decode`; the id of the largest logit after it, the first of equal ones.

        None, and nothing has run, if only `decode` can do that here. Raises BundleError: the logits are not finite.
        """
        if self._run_step is None or self._ahead is not None:
            return None
        best = self._step(self._run_step, token, logits=False).best
        if best < 0:
            raise BundleError(NOT_FINITE)
        return best

    def _step(self, run: Callable[..., Step], token: int, *, logits: bool) -> Step:
        assert not self._drafts, "a draft is neither accepted nor forgotten"
        self._check_room(self.length)
        positions = [self.next_position(number) for number in range(len(self._stages))]
        done = run(self.decoding_caches, token, positions, logits=logits)
        self._suffix.append(token)
        self._state = done.state[None]
        return done

    def try_tokens(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The logits [tokens, vocab] after each of these next tokens, which leave the caches again."""
        logits = self._backend.head(self._append(tokens))
        for cache in self.decoding_caches:
            cache.keep(cache.length - len(tokens))
        return logits

    def _held(self, agreed: int) -> int:
        """The most tokens of the suffix, up to `agreed`, that every stage's cache can go back to."""
        for number, layout in enumerate(self._layouts):
            nearest = self.caches.cache(number).nearest(layout.slots + agreed) - layout.slots
            if nearest < agreed:
                return self._held(nearest)
        return agreed

    def _append(self, ids: Sequence[int]) -> HiddenStates:
        """Run these next tokens in one pass; the states [tokens, hidden] of the last layer."""
        self._check_room(self.length + len(ids) - 1)
        tokens = self.caches.embedding.text(np.array(ids, np.int64))
        for number in range(len(self._stages)):
            first = self.next_position(number)
            positions = np.arange(first, first + len(tokens), dtype=np.int64)
            tokens = tokens.after(self.caches.cache(number).append(tokens, positions))
        return tokens.hidden

    def accept(self, token: int) -> NDArray[np.float32] | None:
        """The logits [vocab] after a token that is the next one of the draft; None if it is not.

        Then the draft leaves the caches, and the token has yet to be decoded.
        """
        if not self._drafts or self._drafts[0][0] != token:
            self.forget_draft()
            return None
        self._suffix.append(token)
        _, logits, self._state = self._drafts.popleft()
        return logits

    def forget_draft(self) -> None:
        """Remove the rest of a draft from the caches."""
        if self._drafts:
            count = len(self._drafts)
            self._drafts.clear()
            for cache in self.decoding_caches:
                cache.keep(cache.length - count)

    @property
    def draft_room(self) -> int:
        """The most tokens of a draft behind the next token."""
        tried = min(cache.tried for cache in self.decoding_caches)
        return max(0, min(tried - 1, self.capacity - 2 - self.length))

    @property
    def decoding_caches(self) -> list[StageCache]:
        """The cache in which each stage decodes."""
        return [self.caches.cache(number) for number in range(len(self._stages))]

    def next_position(self, number: int) -> int:
        """The next token's position in stage `number`."""
        return self._layouts[number].position + len(self._suffix)

    @property
    def to_run(self) -> list[int]:
        """The next tokens that are certain, for a pass with other sessions': what is `waiting`, or the next token."""
        return self.waiting or ([] if self.next_token is None else [self.next_token])

    def ran(self, logits: NDArray[np.float32], state: HiddenStates) -> None:
        """Take over the logits [vocab] after `to_run`, which is in the caches now, and the last state [hidden]."""
        self._suffix += self.to_run
        self.next_token = None
        self.waiting = []
        self._embedded = None
        self._ahead = logits
        self._state = state[None]

    def _check_room(self, tokens: int, vision: int = 0) -> None:
        if tokens + 1 > self.capacity:
            images = f" ({vision} of them for images)" if vision else ""
            raise ContextError(
                f"the prompt takes {tokens} tokens{images}, and {self.capacity - 1} fit into this bundle beside the "
                f"answer; shorten it by {tokens + 1 - self.capacity} tokens{self._manifest.or_more_context}",
                tokens,
                self.capacity,
            )

    def _select(self, selection: Selection, check: Check, *, waits: bool = False) -> HiddenStates:
        """Run a question through all stages, asking its policy at each boundary which image tokens continue.

        Returns its states [suffix, hidden] as far as it has come. If it `waits` and the policy asks for nothing of the
        question, and all of the prefix is in the caches already, it does not run, and is left `waiting`.
        """
        self.selection = None
        self._suffix = []
        policy = selection.policy
        ids = np.array(selection.ids, np.int64)
        caches = self.caches
        caches.prepare(policy)
        self._cuts = []
        self._layouts = []
        depth = caches.depth
        survivors: Mask | None = None
        tokens = caches.embedding.text(ids, of_prompt=True)
        waits = waits and _asks_nothing(policy)
        for number, stage in enumerate(self._stages):
            if number and self._image_count(number - 1):
                shrunk = self._cut(number, tokens, policy)
                survivors = survivors if shrunk is None else shrunk
            check()
            self._layouts.append(caches.layout(number))
            if waits and caches.follow(number):
                continue
            if waits:
                tokens = self._run_earlier(number, tokens, check)
                waits = False
            readers = policy.readers(stage.last, self._image_count(number))
            alone = not all(part.last_query for part in readers)
            tokens = tokens.after(caches.run(number, tokens, query=bool(readers), alone=alone))
        if survivors is not None and policy.needs.shrinks is not None:
            self._shrink(policy.needs.shrinks, survivors, len(ids))
        if policy.renumbers:  # as the released code decodes: each layer at its own cache's length
            self._layouts = [replace(layout, position=layout.slots) for layout in self._layouts]
        self.selection = selection
        self._reuse = replace(self._reuse, stages=min(depth, caches.first_pruned))
        if waits:
            self.waiting = [*selection.ids]
            self._embedded = tokens
        else:
            self._suffix, self._state = [*selection.ids], tokens.hidden[-1:].copy()
        return tokens.hidden

    def _run_earlier(self, number: int, tokens: TokenStates, check: Check) -> TokenStates:
        """Run the question through the stages before `number`, which the caches followed without it."""
        for earlier in range(number):
            check()
            tokens = tokens.after(self.caches.run(earlier, tokens))
        return tokens

    def _shrink(self, layer: int, survivors: Mask, count: int) -> None:
        """Keep in the caches of stages from `layer` on the tokens that survive, and the `count` of the question."""
        numbers = [number for number, stage in enumerate(self._stages) if stage.first >= layer]
        self._layouts = self.caches.shrink(numbers, survivors, self._layouts, count)

    def _cut(self, number: int, tokens: TokenStates, policy: Policy) -> Mask | None:
        """Remove what the policy removes before stage `number`; the tokens left, if all stages shrink to them later."""
        caches = self.caches
        removal = policy.ask(caches.boundary(number, tokens, policy))
        if removal is None:
            return None
        present = caches.remove(number, removal).present
        self._cuts.append(Cut(self._stages[number].first, removal.by, present[caches.prefix.is_vision]))
        return present if removal.shrinks else None

    def _rest_cut(self) -> Cut | None:
        """The cut at K behind which a rest of the image goes on, if there is one."""
        assert self.selection is not None
        layer = self.selection.policy.rest_cut
        return next((cut for cut in self._cuts if cut.layer == layer and cut.kept.any()), None)

    def _image_count(self, number: int) -> int:
        """The number of image tokens that the suffix sees in stage `number`."""
        return int(self.caches.remaining[number].is_vision.sum())

    def _not_reused(self) -> str | None:
        """The reason why image tokens were run, in one word; None: none were."""
        first = self._reuse.stages
        for number, stage in enumerate(self._stages[first:], first):
            if stage.keeps and self._image_count(number):
                chosen = self.caches.remaining[first].removals
                return self._reuse.obstacle or ("reduction" if chosen else "k")
        return None

    def _result(self, logits: NDArray[np.float32]) -> PrefillResult:
        prefix = self.caches.prefix
        stages = self._stages
        reuse = self._reuse
        counts = [self._image_count(number) for number in range(len(stages))]
        exit_stage = counts.index(0) if prefix.is_vision.any() and 0 in counts else None
        k = None if exit_stage is None else stages[exit_stage].first
        rest = self._rest_cut()
        if rest is not None:
            k = rest.layer
        not_reused = self._not_reused()
        reused_prefix = self.caches.common
        if reuse.prefix:
            reused_prefix = 0 if not_reused else len(prefix)
        slots = list[int]()
        vision_kept = list[int]()
        for number, stage in enumerate(stages):
            length = self.caches.cache(number).length
            slots += [length * (layer in stage.cached) for layer in range(stage.first, stage.last + 1)]
            vision_kept += [counts[number]] * stage.layers
        return PrefillResult(
            logits=logits,
            k=k,
            reused_image=reuse.prefix,
            reused_layers=stages[reuse.stages - 1].last if reuse.prefix and reuse.stages else 0,
            reused_tokens=reuse.suffix + reused_prefix,
            not_reused=not_reused,
            vision_tokens=int(prefix.is_vision.sum()),
            slots=tuple(slots),
            vision_kept=tuple(vision_kept),
            images=prefix.images,
            cuts=tuple(self._cuts),
            selection=self.selection,
            rest=0 if rest is None else int(rest.kept.sum()),
        )
