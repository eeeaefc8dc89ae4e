"""Spans of requests for OpenTelemetry, sent by OTLP over HTTP: the request, its queue, and of each answer its parts.

They are made once a request has ended, from the times that it has taken, so answers wait for none of this. Nothing of
what was asked or answered is in them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vtx.runtime.api.answer import Answer
from vtx.runtime.errors import DeviceError, RequestError
from vtx.runtime.host.machine import version
from vtx.runtime.installing import install

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

SCOPE = "vtx-edge"


@dataclass(frozen=True, slots=True)
class Answered:
    """A request and its `answers`; `begun` are the times at which these began, by the monotonic clock."""

    model: str
    answers: Sequence[Answer]
    begun: Sequence[float]
    deadline: float | None
    priority: int


def sent_to(url: str) -> SpanProcessor:
    """Sends spans to the collector at this address, in a thread of its own; those that it does not take are dropped.

    Raises RequestError for another address than of HTTP, DeviceError if OpenTelemetry is not installed.
    """
    if not re.fullmatch(r"https?://[^/\s]+/?", url):
        raise RequestError(f"--otlp {url!r:.80} is not the address of a collector, e.g. http://localhost:4318")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as e:
        raise DeviceError(f"--otlp needs {e.name}; {install('otel')}") from e
    return BatchSpanProcessor(OTLPSpanExporter(f"{url.rstrip('/')}/v1/traces", timeout=5))


class Tracing:
    """The spans of a server, for a processor. `close` sends those that are left."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        service = {"service.name": "vtx-serve", "service.version": version("vtx-edge")}
        self._provider = TracerProvider(resource=Resource.create(service), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SCOPE)

    def request(
        self, path: str, status: int, started: float, parent: Mapping[str, str], answered: Answered | None
    ) -> None:
        """A request to `path` that came at `started`, by the monotonic clock, has ended now with this HTTP status.

        `parent`: its headers traceparent and tracestate, by W3C's Trace Context; malformed ones count as none.
        """
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        epoch = time.time() - time.monotonic()

        def span(name: str, start: float, end: float, context: Any, facts: Mapping[str, Any], **more: Any) -> Any:
            attributes = {key: value for key, value in facts.items() if value is not None}
            at = int(1e9 * (epoch + start))
            made = self._tracer.start_span(name, context, attributes=attributes, start_time=at, **more)
            if status >= 500:
                made.set_status(StatusCode.ERROR)
            made.end(int(1e9 * (epoch + max(start, end))))
            return set_span_in_context(made)

        facts: dict[str, Any] = {"http.request.method": "POST", "url.path": path, "http.response.status_code": status}
        if answered is not None:
            deadline = None if answered.deadline is None else round(1000 * answered.deadline)
            facts |= {"gen_ai.request.model": answered.model, "vtx.deadline_ms": deadline}
            facts["vtx.priority"] = answered.priority
        context = TraceContextTextMapPropagator().extract(parent)
        root = span(f"POST {path}", started, time.monotonic(), context, facts, kind=SpanKind.SERVER)
        if answered is None:
            return
        span("queue", started, min(answered.begun), root, {})
        for answer, begun in zip(answered.answers, answered.begun, strict=True):
            stats = answer.stats
            seconds = {name: ms / 1000 for name, ms in answer.stats.timings_ms.items()}
            first = begun + seconds["first_token"]
            tokens = len(answer.token_ids)
            last = first + seconds["decode_per_token"] * max(0, tokens - 1)
            own = span(
                "answer",
                begun,
                last,
                root,
                {
                    "vtx.k": str(stats.k or "none"),
                    "vtx.reduce": stats.reduce,
                    "vtx.stopped": answer.stopped,
                    "gen_ai.usage.input_tokens": stats.prompt_tokens,
                    "gen_ai.usage.output_tokens": tokens,
                    "vtx.vision_tokens": stats.vision_tokens,
                    "vtx.reused_tokens": stats.reused_tokens,
                },
            )
            tower = begun + seconds["vision"]
            span("tower", begun, tower, own, {"vtx.vision_tokens": stats.vision_tokens})
            span("prompt", tower, first, own, {"gen_ai.usage.input_tokens": stats.prompt_tokens})
            span("decode", first, last, own, {"gen_ai.usage.output_tokens": tokens})

    def close(self) -> None:
        """Send what is left, and end."""
        self._provider.shutdown()
