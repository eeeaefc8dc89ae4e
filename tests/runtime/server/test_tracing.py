"""The spans of requests, as a collector gets them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import Served, asking, serving, user
from tests.support.tiny import random_image
from vtx.runtime.errors import DeviceError, RequestError
from vtx.runtime.server.tracing import Tracing, sent_to

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextmanager
def traced(bundle: Path) -> Iterator[tuple[Served, Any]]:
    """A server, and the exporter that holds its spans."""
    pytest.importorskip("opentelemetry.sdk", reason="the [otel] extra is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    with serving({"tiny": bundle}, tracing=Tracing(SimpleSpanProcessor(exporter))) as served:
        yield served, exporter


def named(exporter: Any) -> dict[str, list[Any]]:
    spans: dict[str, list[Any]] = {}
    for span in exporter.get_finished_spans():
        spans.setdefault(span.name, []).append(span)
    return spans


def test_a_request_has_spans_of_its_parts_under_the_client_s_span(tiny_bundle: Path) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    asked = asking(
        user("red?", random_image(1)), k=3, deadline_ms=60_000, priority=2, n=2, temperature=0.5, reduce="none"
    )
    with traced(tiny_bundle) as (served, exporter):
        usage = served.chat(asked, **headers).json["usage"]
    spans = named(exporter)
    (request,), (queue,) = spans["POST /v1/chat/completions"], spans["queue"]
    assert {f"{span.context.trace_id:032x}" for each in spans.values() for span in each} == {TRACE}
    assert f"{request.parent.span_id:016x}" == PARENT
    assert request.context.trace_state.get("vendor") == "1"
    facts = request.attributes
    assert (facts["http.response.status_code"], facts["gen_ai.request.model"]) == (200, "tiny")
    assert (facts["vtx.deadline_ms"], facts["vtx.priority"]) == (60_000, 2)
    assert queue.parent.span_id == request.context.span_id
    assert [len(spans[name]) for name in ("answer", "tower", "prompt", "decode")] == [2] * 4
    for answer, tower, prompt, decode in zip(*(spans[n] for n in ("answer", "tower", "prompt", "decode")), strict=True):
        assert {part.parent.span_id for part in (tower, prompt, decode)} == {answer.context.span_id}
        assert answer.parent.span_id == request.context.span_id
        assert answer.attributes["vtx.k"] == "3"
        assert (answer.attributes["vtx.reduce"], answer.attributes["gen_ai.usage.output_tokens"]) == ("none", 8)
        assert answer.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        times = [answer.start_time, tower.end_time, prompt.end_time, decode.end_time]
        assert times == sorted(times)
        assert (tower.start_time, prompt.start_time, decode.start_time) == tuple(times[:3])
        assert request.start_time <= answer.start_time
        assert decode.end_time <= request.end_time
    told = [str(value) for each in spans.values() for span in each for value in span.attributes.values()]
    assert not any("red?" in value for value in told), "nothing of what was asked"


@pytest.mark.sampled
@pytest.mark.parametrize("parent", ["", "00-0-0-01", "\u00ff" * 400, f"00-{'0' * 32}-{PARENT}-01"])
def test_a_malformed_parent_counts_as_none_and_a_refused_request_has_one_span(tiny_bundle: Path, parent: str) -> None:
    with traced(tiny_bundle) as (served, exporter):
        assert served.chat(asking(user("red?"), k=4), traceparent=parent).status == 400
        assert served.request("POST", "/tokenize", b"{", content_type="text/plain").status == 415
        assert served.request("GET", "/livez").status == 200
    spans = exporter.get_finished_spans()
    assert [span.attributes["http.response.status_code"] for span in spans] == [400, 415]
    assert [span.parent for span in spans] == [None, None]


@pytest.mark.slow
def test_spans_are_sent_to_a_collector_and_answers_come_without_one(tiny_bundle: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the [otel] extra is not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got = list[tuple[str, Any]]()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, args=(0.01,), daemon=True).start()
        tracing = Tracing(sent_to(f"http://127.0.0.1:{collector.server_port}/"))
        with serving({"tiny": tiny_bundle}, tracing=tracing) as served:
            assert served.chat(asking(user("red?"))).status == 200
        collector.shutdown()
        port = collector.server_port
    ((path, request),) = got
    assert path == "/v1/traces"
    (of_service,) = request.resource_spans
    assert "vtx-serve" in str(of_service.resource)
    assert {span.name for span in of_service.scope_spans[0].spans} >= {"queue", "tower", "prompt", "decode"}
    with serving({"tiny": tiny_bundle}, tracing=Tracing(sent_to(f"http://127.0.0.1:{port}"))) as served:
        assert served.chat(asking(user("red?"))).status == 200, "nobody listens there any more"


def test_without_opentelemetry_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(DeviceError, match=r'pip install "vtx-edge\[otel\]"'):
        sent_to("http://127.0.0.1:4318")


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "file:///tmp", "http://", "http://a b"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="is not the address of a collector"):
        sent_to(url)
