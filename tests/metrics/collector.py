# SPDX-License-Identifier: Apache-2.0
"""An OpenTelemetry collector for tests: receives spans over HTTP."""

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    process_id: str
    attributes: dict
    start: int
    end: int


class Collector:
    """Listens once constructed; `url` is the endpoint."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector._take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            process_id = _values(resource.resource.attributes)["vllm.process_id"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Span(
                            name=span.name,
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_id=span.parent_span_id.hex(),
                            process_id=process_id,
                            attributes=_values(span.attributes),
                            start=span.start_time_unix_nano,
                            end=span.end_time_unix_nano,
                        )
                    )


def _values(attributes) -> dict:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}
