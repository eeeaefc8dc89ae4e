"""Actions of a loaded bundle whose tokens are actions: one picture and an instruction, answered by a token a number."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.api.acting import ActionRequest, Deadline, check_instruction
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.loaded import LoadedBundle
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.spec.action_spec import ActionBins, ActionRange
from vtx.runtime.errors import BundleError, ContextError, RequestError
from vtx.runtime.session.acting import ActionSeconds

SHOWN = 40  # names of data sets in a message


class TokenActor:
    """Actions for one robot at a time. Safe for many threads.

    A picture that is that of the last call keeps its tokens, and its K and V up to the instruction. `seconds` are of
    the last action, `encoded` the pictures that ran through the tower for it, and `token_ids` what the model answered.
    """

    def __init__(self, loaded: LoadedBundle, bins: ActionBins) -> None:
        self._loaded = loaded
        self._bins = bins
        self._conversation: Conversation | None = None
        self._lock = threading.Lock()
        self.seconds = ActionSeconds(0, 0, 0)
        self.encoded = 0
        self.token_ids: tuple[int, ...] = ()

    def act(self, request: ActionRequest) -> NDArray[np.float32]:
        """See `Model.act`."""
        deadline = Deadline(request.deadline_ms, "a smaller K")
        loaded = self._loaded
        loaded.conversations.check_open()
        unread = [name for name in ("state", "noise", "seed", "steps", "after") if getattr(request, name) is not None]
        if unread:
            raise RequestError(
                f"{' and '.join(unread)}: this model makes actions of a picture and an instruction alone; leave it out"
            )
        images = request.images
        if isinstance(images, Mapping):
            raise RequestError("this bundle names no cameras; give the picture itself")
        pictures: Sequence[Any] = images if isinstance(images, list | tuple) else [images]
        if len(pictures) != 1:
            raise RequestError(f"{len(pictures)} pictures are given, and this model sees one")
        check_instruction(request.instruction)
        limits = self._range(request.unnorm_key)
        count = len(limits.low)
        prepared = loaded.images.prepare_all(pictures)
        with self._lock:
            if self._conversation is None:
                self._conversation = Conversation(loaded, prepared)
            elif self._conversation.images[0].key != prepared[0].key:
                self._conversation.replace_prepared(prepared)
            options = Options(max_new_tokens=count, timeout=deadline.left())
            answer = self._conversation.stream(
                request.instruction.lower(), request.k, options, reduce=request.reduce
            ).read()
            times = answer.stats.timings_ms
            decoding = times["first_token"] - times["vision"] - times["prefill"]
            decoding += (len(answer.token_ids) - 1) * times["decode_per_token"]
            self.seconds = ActionSeconds(times["vision"] / 1000, times["prefill"] / 1000, max(0.0, decoding / 1000))
            self.encoded = int(times["vision"] > 0)
            self.token_ids = answer.token_ids
        deadline.left()
        if len(answer.token_ids) < count:
            shortage = f"the answer has {len(answer.token_ids)} of the {count} tokens of an action"
            loaded.conversations.check_open()
            if answer.stopped == "context":
                raise ContextError(
                    f"{shortage}, then the context is full; shorten the instruction{loaded.manifest.or_more_context}"
                )
            raise BundleError(
                f"{shortage} and ends ({answer.stopped}), so no action is given; give another instruction"
            )
        edges = np.linspace(-1, 1, self._bins.edges)
        bins = np.clip(self._bins.vocab - 1 - np.array(answer.token_ids), 0, self._bins.edges - 2)
        numbers = ((edges[:-1] + edges[1:]) / 2)[bins]
        if not request.normalized:
            low = np.array(limits.low)
            high = np.array(limits.high)
            numbers = np.where(limits.mask, (numbers + 1) / 2 * (high - low) + low, numbers)
        action: NDArray[np.float32] = numbers.astype(np.float32)[None]
        return action

    def _range(self, name: str | None) -> ActionRange:
        """The range of actions in the data set `name`, or in the only one. Raises RequestError."""
        ranges = self._bins.ranges
        if name is None and len(ranges) == 1:
            return next(iter(ranges.values()))
        listed = ", ".join([*ranges][:SHOWN]) + ", ..." * (len(ranges) > SHOWN)
        if name is None:
            raise RequestError(
                f"this model has the statistics of {len(ranges)} data sets, whose units differ; name one as "
                f"unnorm_key: {listed}"
            )
        if not isinstance(name, str) or name not in ranges:
            raise RequestError(f"unnorm_key {name!r:.60} is not a data set of this model; its data sets are {listed}")
        return ranges[name]
