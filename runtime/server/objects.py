"""The objects of OpenAI's chat completions: whole, and as chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vtx.runtime.api.answer import Answer, Progress
from vtx.runtime.api.model import Model

FINISHED = {"end": "stop", "stop": "stop", "length": "length", "context": "length", "timeout": "length"}


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects of one answer of `model`, known to clients as `name`."""

    name: str
    model: Model
    logprobs: bool
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    notes: Mapping[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The whole answer, or several."""
        choices = [
            {
                "index": index, "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "finish_reason": FINISHED[answer.stopped],
                "logprobs": self._logprobs(
                    Progress(answer.token_ids, answer.logprobs or (), answer.top_logprobs or ())
                ),
            }
            for index, answer in enumerate(answers)
        ]  # fmt: skip
        return {**self.head("chat.completion"), "choices": choices, "usage": self.usage(answers)}

    def chunk(
        self, delta: dict[str, Any], progress: Progress | None = None, *, finish: str | None = None, index: int = 0
    ) -> dict[str, Any]:
        """The chunk of one token, or of the beginning or end."""
        shown = self._logprobs(progress) if progress is not None and progress.token_ids else None
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": shown}
        return {**self.head("chat.completion.chunk"), "choices": [choice]}

    def usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Token counts, and under `vtx` the object of `vtx-run --json` without its text; of several answers a list."""
        answer, completion = answers[0], sum(len(answer.token_ids) for answer in answers)
        prompt, several = answer.stats.prompt_tokens, [one.to_dict() for one in answers]
        for one in several:
            for name in ("text", "logprobs", "top_logprobs"):
                one.pop(name, None)
        facts: dict[str, Any] = several[0] if len(several) == 1 else {"answers": several}
        return {
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": answer.stats.reused_tokens},
            "vtx": {**facts, **self.notes, "kv_slot_bytes": self.model.backend.kv_slot_bytes},
        }  # fmt: skip

    def head(self, kind: str) -> dict[str, Any]:
        """The fields of every object."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.name}

    def _logprobs(self, progress: Progress) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        tops = progress.top_logprobs or ((),) * len(progress.token_ids)
        tokens = zip(progress.token_ids, progress.logprobs, tops, strict=True)
        content = [
            {**self._token(id, value), "top_logprobs": [self._token(*one) for one in likely]}
            for id, value, likely in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        text = self.model.loaded.text.decode([id])
        whole = None if "\ufffd" in text else list(text.encode())  # part of a character has no text of its own
        return {"token": text, "logprob": logprob, "bytes": whole}
