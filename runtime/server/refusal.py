"""The errors of requests, in OpenAI's form."""

from __future__ import annotations

import math
from typing import Any

from vtx.runtime.errors import ContextError, ImageError, RequestError, TemplateError, VtxError
from vtx.runtime.scheduler.conversations import NoMemoryError
from vtx.runtime.scheduler.scheduler import ClosedError, TooLateError

BODY_SECONDS = 2  # until bodies that were read have made room for others
MEMORY_SECONDS = 5  # after which a request for which there was no memory may be sent again
# Errors of a request by their class: OpenAI's code, and the field that is wrong.
FAULTS = (
    (ContextError, "context_length_exceeded", "messages"),
    (ImageError, "invalid_image", "messages"),
    (TemplateError, None, "messages"),
    (RequestError, None, None),
)


def _kind(status: int) -> str:
    """OpenAI's type of an error with this status."""
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


class Refusal(VtxError):
    """A request that is not answered: HTTP `status`, OpenAI's `code` and `kind`, and the field `param` that is wrong.

    `retry_after`: whole seconds after which the same request may be answered. `final`: official clients, which send a
    request that took too long or was one too many again, must not. `counts`: a prompt's tokens and the context's, as
    llama-server has them.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        final: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.kind = _kind(status)
        self.retry_after = retry_after
        self.final = final
        self.counts: dict[str, int] = {}

    def body(self) -> dict[str, Any]:
        """The object that clients parse."""
        facts = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": {**facts, **self.counts}}

    @property
    def headers(self) -> dict[str, str]:
        extra = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        extra |= {"x-should-retry": "false"} if self.final else {}
        return extra if self.retry_after is None else extra | {"retry-after": str(self.retry_after)}


def shutting_down() -> Refusal:
    return Refusal(503, "the server is shutting down", retry_after=5)


def no_memory(message: str) -> Refusal:
    return Refusal(503, message, code="no_memory", retry_after=MEMORY_SECONDS)


def no_room(message: str) -> Refusal:
    return Refusal(
        429,
        f"{message}; try again in {BODY_SECONDS} s",
        code="uploads_full",
        retry_after=BODY_SECONDS,
    )


def refusal_of(error: Exception) -> Refusal:
    """The error that a client gets. It has no details if the request is not at fault."""
    if isinstance(error, Refusal):
        return error
    for fault, code, param in FAULTS:
        if isinstance(error, fault):
            refusal = Refusal(400, str(error), code=code, param=param)
            if isinstance(error, ContextError) and error.tokens is not None and error.most is not None:
                refusal.counts = {"n_prompt_tokens": error.tokens, "n_ctx": error.most}
            return refusal
    if isinstance(error, ClosedError):
        return shutting_down()
    if isinstance(error, TooLateError):
        retry = max(1, math.ceil(error.needed - error.left))
        return Refusal(429, str(error), code="deadline", retry_after=retry, final=True)
    if isinstance(error, NoMemoryError):
        return no_memory(str(error))
    if isinstance(error, MemoryError):
        return no_memory("no memory left for this request; try again")
    return Refusal(500, "the server failed on this request; its log says why")
