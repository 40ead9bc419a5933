"""How the tests start a small HTTP server in a thread."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Request:
    """What a client asked. Names of headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Response:
    """What it gets: `content` is raw bytes, or anything else as JSON; None hangs up without an answer."""

    content: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def listening(answer: Callable[[Request], Response], port: int = 0) -> Iterator[str]:
    """The address of a server that answers as `answer` does, each request in a thread of its own."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self):
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            response = answer(Request(self.command, self.path, headers, body))
            if response.content is None:
                self.close_connection = True
                return
            content = response.content
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            with contextlib.suppress(OSError):  # the client may have given up
                self.send_response(response.status)
                for name, value in {"content-length": str(len(data)), **response.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

        do_GET = do_POST = do_PUT = respond

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
