"""Actions: cameras and an instruction through the stages once, then the expert's steps over their K and V."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.backend import Backend, StageCache
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.tensors import read_state_projection
from vtx.runtime.errors import BundleError, ContextError
from vtx.runtime.session.prefix import Check, no_check
from vtx.runtime.vision.tokens import HiddenStates, Ids, TokenStates

Numbers = NDArray[np.float32]
Step = Callable[[Numbers, float], Numbers]  # actions so far and the time to their change


@runtime_checkable
class ActingBackend(Protocol):
    """A `Backend` that runs an expert."""

    def expert(self, prompt: Sequence[Any], state: Numbers, positions: Ids) -> Step:
        """The steps of the expert for a state [size] at `positions` [rows].

        `prompt` is what `StageCache.read` returned of each stage's slots.
        """


@dataclass(frozen=True, slots=True)
class Denoising:
    """The way from noise [horizon, width] to actions: `guide` turns the change of the actions at a time."""

    noise: Numbers
    steps: int
    guide: Callable[[Numbers, Numbers, float], Numbers] | None = None


@dataclass(frozen=True, slots=True)
class ActionSeconds:
    """Seconds of the parts of an answer: the tower, the prompt in the decoder, and the expert or the tokens."""

    tower: float
    prompt: float
    expert: float


class Acting:
    """The caches of a model that outputs actions. Not safe for two threads at once.

    A picture that was there last time, at whatever place, keeps its tokens; a prompt of the same pictures, words and K
    its K and V. `seconds` are of the last answer, and `encoded` the pictures that ran through the tower for it.
    """

    def __init__(self, backend: Backend, bundle: Bundle) -> None:
        manifest = bundle.manifest
        assert manifest.action is not None, "models that answer in words are refused before"
        self.backend = backend
        self.manifest = manifest
        self._spec = manifest.action
        self._state_token = read_state_projection(bundle) if self._spec.state_in == "prompt" else None
        self.seconds = ActionSeconds(0, 0, 0)
        self.encoded = 0
        self._pictures: Mapping[bytes, HiddenStates] = {}
        self._stages: dict[int, StageCache] = {}
        self._counts: dict[int, int] = {}  # of a stage's slots, of text and pictures
        self._prompt: tuple[Any, list[Any]] | None = None

    def features(self, views: Sequence[Numbers]) -> tuple[list[bytes], HiddenStates]:
        """The tokens of all pictures [3, height, width], and their keys; new ones run through the tower in one pass."""
        keys = [hashlib.sha256(view.tobytes()).digest() for view in views]
        new = {key: view for key, view in zip(keys, views, strict=True) if key not in self._pictures}
        tokens_of = dict(self._pictures)
        if new:
            tokens = self.backend.vision(np.stack([*new.values()])).hidden
            tokens_of |= zip(new, np.split(tokens, len(new)), strict=True)
        self.encoded = len(new)
        self._pictures = {key: tokens_of[key] for key in keys}
        return keys, np.concatenate([tokens_of[key] for key in keys])

    def prompt(self, ids: Ids, features: HiddenStates, k: int | None, key: object, check: Check) -> list[Any]:
        """K and V of a prompt's tokens in every stage; image tokens leave before layer `k`.

        Equal keys mean equal images.
        """
        room = self.manifest.max_context
        count = len(ids) + self._spec.horizon + (self._spec.state_in != "text")
        if count > room:
            raise ContextError(
                f"the prompt and the actions take {count} tokens, {len(features)} of them for images, and {room} fit "
                f"into this bundle; give fewer cameras or a shorter instruction{self.manifest.or_more_context}"
            )
        key = ids.tobytes(), k, key
        if self._prompt is not None and self._prompt[0] == key:
            return self._prompt[1]
        self._prompt = None
        is_image = ids == self.manifest.text.image_token_id
        hidden = np.empty((len(ids), self.manifest.model.hidden), np.float32)
        hidden[is_image], hidden[~is_image] = features, self.backend.embed(ids[~is_image]).hidden
        positions = np.arange(len(ids))
        slots = list[Any]()
        for number, stage in enumerate(self.manifest.stages):
            check()
            if stage.first == k:
                hidden = hidden[~is_image]
                positions = positions[~is_image]
            if number not in self._stages:
                self._stages[number] = self.backend.stage(number, room)
            cache = self._stages[number]
            group = np.zeros((len(hidden), 1), np.float32)
            cache.keep(0)
            hidden = cache.append(TokenStates(hidden, {names.GROUP: group}), positions)
            self._counts[number] = len(positions)
            slots.append(cache.read(np.arange(len(positions))))
        self._prompt = key, slots
        return slots

    def with_state(self, prompt: list[Any], length: int, state: Numbers) -> list[Any]:
        """K and V of a prompt of `length` positions, with the state as its last token if the model reads it there."""
        if self._state_token is None:
            return prompt
        weight, bias = self._state_token
        hidden = (weight @ state + bias)[None]
        slots = list[Any]()
        for number in range(len(prompt)):
            cache = self._stages[number]
            count = self._counts[number]
            cache.keep(count)
            inputs = {names.GROUP: np.zeros((1, 1), np.float32)}
            hidden = cache.append(TokenStates(hidden, inputs), np.array([length]))
            slots.append(cache.read(np.arange(count + 1)))
        return slots

    def act(
        self,
        ids: Ids,
        views: Sequence[Numbers],
        state: Numbers,
        denoising: Denoising,
        k: int | None,
        check: Check = no_check,
    ) -> Numbers:
        """The actions [horizon, width] for a normalised state [size].

        `check` is called before the tower, every stage and every step, and after the last one; it may raise, to stop
        there. Raises ContextError; BundleError: the actions are not numbers.
        """
        check()
        times = [perf_counter()]
        keys, features = self.features(views)
        times.append(perf_counter())
        prompt = self.prompt(ids, features, k, tuple(keys), check)
        prompt = self.with_state(prompt, len(ids), state)
        times.append(perf_counter())
        actions = self.steps(prompt, len(ids), state, denoising, check)
        self.seconds = ActionSeconds(*np.diff([*times, perf_counter()]).tolist())
        return actions

    def steps(
        self, prompt: Sequence[Any], length: int, state: Numbers, denoising: Denoising, check: Check = no_check
    ) -> Numbers:
        """The actions after Euler steps of time from 1 to 0, behind a prompt of `length` text and image tokens."""
        assert isinstance(self.backend, ActingBackend), "engines without an expert are refused when a bundle is loaded"
        first = length + (self._state_token is not None)
        step = self.backend.expert(prompt, state, np.arange(first, first + self._spec.rows))
        actions = denoising.noise
        change = np.float32(-1 / denoising.steps)
        for number in range(denoising.steps):
            check()
            time = 1 - number / denoising.steps
            velocity = step(actions, time)
            if denoising.guide is not None:
                velocity = denoising.guide(actions, velocity, time)
            actions = actions + change * velocity
        check()
        return checked(actions)


def checked(actions: Numbers) -> Numbers:
    """The actions. Raises BundleError if one is not finite."""
    if not np.isfinite(actions).all():
        raise BundleError(
            "the actions are not numbers, so they are withheld; export with --precision fp32, or leave out --compute"
        )
    return actions
