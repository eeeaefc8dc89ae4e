"""Actions of a loaded bundle: what the caller gives, checked, and actions in the robot's units."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vtx.runtime.api.chunks import ChunkGuide, Continuation
from vtx.runtime.api.images import Picture
from vtx.runtime.api.loaded import LoadedBundle
from vtx.runtime.api.options import DEFAULT, K
from vtx.runtime.api.prompts import opening_parts
from vtx.runtime.api.robot_units import as_text, normalised, restored, width_of
from vtx.runtime.bundle.spec.action_spec import MAX_STEPS
from vtx.runtime.checks import check_number, check_whole
from vtx.runtime.errors import DeadlineError, RequestError
from vtx.runtime.generator import SplitMix
from vtx.runtime.session.acting import Acting, ActionSeconds, Denoising, checked
from vtx.runtime.vision.tokens import Ids

Cameras: TypeAlias = "Picture | Sequence[Picture] | Mapping[str, Picture]"


def check_instruction(instruction: object) -> None:
    """Raise RequestError unless it is text that says something."""
    if not isinstance(instruction, str) or not instruction.strip():
        raise RequestError(f"the instruction is {instruction!r:.40}; say in words what to do")


@dataclass(frozen=True, slots=True)
class ActionRequest:
    """A request for actions; its fields are the arguments of `Model.act`."""

    images: Cameras
    instruction: str
    state: ArrayLike | None
    k: K
    noise: ArrayLike | None
    seed: int | None
    steps: int | None
    normalized: bool
    deadline_ms: float | None
    unnorm_key: str | None
    reduce: str | None
    after: Continuation | None


class Deadline:
    """A time from now on by which actions must be there, None: whenever. Raises RequestError."""

    def __init__(self, milliseconds: float | None, cure: str) -> None:
        self._begun = monotonic()
        self._ms = milliseconds
        self._cure = cure
        if milliseconds is not None:
            check_number("deadline_ms", milliseconds, "milliseconds above 0, at most 1e9", least=1e-6, most=1e9)

    def left(self) -> float | None:
        """Seconds up to it. Raises DeadlineError: there are none."""
        if self._ms is None:
            return None
        passed = 1000 * (monotonic() - self._begun)
        if passed >= self._ms:
            raise DeadlineError(
                f"no actions within {self._ms:g} ms, {passed:.0f} ms have passed, so none are given; raise "
                f"deadline_ms, or take {self._cure}"
            )
        return (self._ms - passed) / 1000


class Actor:
    """Actions for one robot at a time: pictures and prompts of the last answer are kept. Safe for many threads."""

    def __init__(self, loaded: LoadedBundle) -> None:
        if loaded.manifest.action is None:
            raise RequestError(f"{loaded.manifest.model.name} answers in words, not with actions; use ask")
        self._loaded = loaded
        self._spec = loaded.manifest.action
        self._acting = Acting(loaded.backend, loaded.bundle)
        self._lock = threading.Lock()

    @property
    def seconds(self) -> ActionSeconds:
        """Seconds of the parts of the last answer."""
        return self._acting.seconds

    @property
    def encoded(self) -> int:
        """The number of pictures that ran through the tower for the last answer; others were there before."""
        return self._acting.encoded

    def act(self, request: ActionRequest) -> NDArray[np.float32]:
        """See `Model.act`."""
        deadline = Deadline(request.deadline_ms, "fewer steps or a smaller K")
        loaded = self._loaded
        spec = self._spec
        loaded.conversations.check_open()
        if request.unnorm_key is not None:
            raise RequestError("unnorm_key: this model has the statistics of one robot; leave it out")
        if request.reduce not in (DEFAULT, None, "none"):
            raise RequestError(
                f"reduce={request.reduce!r:.40}: models with an action expert support K, but no reductions; leave it "
                "out"
            )
        if request.state is None:
            raise RequestError("no state is given, and this model reads the robot's state")
        pictures = self._ordered(request.images)
        state = self._state(request.state, normalized=request.normalized)
        noise = self._noise(request.noise, request.seed)
        guide = None
        if request.after is not None:
            guide = self._guide(request.after, normalized=request.normalized)
        instruction = request.instruction
        check_instruction(instruction)
        steps = spec.steps if request.steps is None else request.steps
        check_whole("steps", steps, 1, MAX_STEPS)
        depth = loaded.policy(request.k, reduce=None).exit
        width = width_of(spec, "actions")
        if not request.normalized and width is None:
            raise self._without_statistics("actions")
        prepared = loaded.images.prepare_all(pictures)
        if loaded.images.options.fit == "released":  # as openpi's tokenizer has it
            instruction = instruction.strip().replace("_", " ").replace("\n", " ")
        content = opening_parts(prepared, instruction)
        if spec.state_in == "text":
            content.append({"type": "text", "text": as_text(state)})
        ids = loaded.text.prompt([{"role": "user", "content": content}], [image.in_prompt for image in prepared])
        self._check_length(ids)
        with self._lock:
            views = [image.pixels for image in prepared]
            actions = self._acting.act(ids, views, state, Denoising(noise, steps, guide), depth, deadline.left)
        if request.normalized:
            return actions
        return checked(restored(spec, "actions", actions[:, :width]))

    def _check_length(self, ids: Ids) -> None:
        """Raise RequestError if the prompt's text is longer than what the model was trained with."""
        most = self._spec.instruction_tokens
        count = int((ids != self._loaded.manifest.text.image_token_id).sum())
        if most is not None and count > most:
            raise RequestError(
                f"the instruction takes {count} tokens, and the model was trained with {most} at most; shorten it"
            )

    def _ordered(self, images: Cameras) -> Sequence[Picture]:
        """The pictures in the order of the bundle's cameras."""
        names = self._spec.cameras
        if isinstance(images, Mapping):
            return self._of_names(images)
        pictures: Sequence[Any] = images if isinstance(images, list | tuple) else [images]
        if not pictures or (names and len(pictures) != len(names)):
            cameras = f"{len(names)} cameras: {', '.join(names)}" if names else "at least one camera"
            raise RequestError(f"{len(pictures)} pictures are given, and this bundle has {cameras}")
        return pictures

    def _of_names(self, images: Mapping[str, Picture]) -> list[Picture]:
        """The pictures by the names of their cameras, in the order of the bundle's."""
        names = self._spec.cameras
        if not names:
            raise RequestError(
                "this bundle names no cameras; give a list of pictures, or export with --cameras NAME,NAME"
            )
        missing = [name for name in names if name not in images]
        if self._spec.absent_cameras and len(missing) < len(names):
            missing = []
        unknown = [name for name in images if name not in names]
        if missing or unknown:
            wrong = f"lack {', '.join(missing)}" if missing else f"hold {', '.join(map(str, unknown))}"
            raise RequestError(f"the pictures {wrong}; this bundle's cameras are {', '.join(names)}")
        return [images[name] for name in names if name in images]

    def _state(self, state: ArrayLike, *, normalized: bool) -> NDArray[np.float32]:
        """The state [size] as the expert takes it."""
        spec = self._spec
        stated = width_of(spec, "state")
        width = spec.state if normalized or stated is None else stated
        numbers = self._numbers("state", state, (width,))
        if not normalized:
            if stated is None:
                raise self._without_statistics("states")
            numbers = normalised(spec, "state", numbers)
        return np.pad(numbers, (0, spec.state - width))

    def _guide(self, after: Continuation, *, normalized: bool) -> ChunkGuide:
        """The guidance towards actions that are left of the last chunk; numbers beyond the robot's are led to 0."""
        spec = self._spec
        width = spec.width if normalized else width_of(spec, "actions") or spec.width
        left = self._numbers("the left actions", after.left, (len(np.asarray(after.left)), width))
        if len(left) > spec.horizon:
            raise RequestError(f"{len(left)} actions are left, and a chunk has {spec.horizon}; give its last ones")
        weights = after.weights(len(left), spec.horizon)
        if not normalized:
            left = normalised(spec, "actions", left)
        padded = np.pad(left, ((0, spec.horizon - len(left)), (0, spec.width - width)))
        return ChunkGuide(padded, weights, after.strength)

    def _noise(self, noise: ArrayLike | None, seed: int | None) -> NDArray[np.float32]:
        shape = self._spec.horizon, self._spec.width
        if noise is None:
            if seed is not None:
                check_whole("seed", seed, 0, (1 << 63) - 1)
            return SplitMix(seed).normals(shape[0] * shape[1]).reshape(shape)
        if seed is not None:
            raise RequestError("noise and seed are both given; the noise is all that a seed decides, so leave one out")
        return self._numbers("noise", noise, shape)

    def _numbers(self, what: str, given: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.float32]:
        try:
            numbers = np.asarray(given, np.float32)
        except (TypeError, ValueError) as e:
            raise RequestError(f"{what} is not an array of numbers ({e}); give {list(shape)} of them") from e
        if numbers.shape != shape:
            raise RequestError(f"{what} has the shape {list(numbers.shape)}, this model's is {list(shape)}")
        if not np.isfinite(numbers).all():
            raise RequestError(f"{what} holds {int((~np.isfinite(numbers)).sum())} values that are not numbers")
        return numbers

    def _without_statistics(self, what: str) -> RequestError:
        return RequestError(
            f"this bundle has no means and deviations of {what}, as the checkpoint's processor_config.json has none "
            "(of LeRobot: its processor's files); add them there and export again, or give a normalised state and take "
            "normalised actions (normalized)"
        )
