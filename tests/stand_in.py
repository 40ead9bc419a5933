"""A small local server that stands for `vllm serve`: what it answers is a function, and what it was asked is kept."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = dict[str, Any] | bytes | tuple[int, Any] | None


def completion(ids, finish="stop", prompt_ids=None, **changes) -> dict[str, Any]:
    """What vLLM answers, as far as it is read. `changes` replace or, as None, remove fields of the choice."""
    logprobs = {"token_logprobs": [-0.5 - i for i in range(len(ids))]}
    choice = {"index": 0, "text": "", "token_ids": list(ids), "logprobs": logprobs, "finish_reason": finish}
    return {"choices": [choice | {"prompt_token_ids": prompt_ids} | changes]}


class StandIn:
    """`complete(body)` answers a completion request: a JSON object, raw bytes, (status, answer), or None to hang up."""

    def __init__(self, complete: Callable[[dict[str, Any]], Answer], models: Answer = None):
        self.complete = complete
        self.models = {"data": [{"id": "toy", "root": "toy", "max_model_len": 2048}]} if models is None else models
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""


@contextlib.contextmanager
def serve(stand_in: StandIn) -> Iterator[StandIn]:
    """It listens at `stand_in.url` inside the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            stand_in.headers.append(dict(self.headers))
            self.answer(stand_in.models if self.path == "/v1/models" else (404, {"detail": "Not Found"}))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            stand_in.bodies.append(body)
            self.answer(stand_in.complete(body) if self.path == "/v1/completions" else (404, b""))

        def answer(self, answer: Answer) -> None:
            status, answer = answer if isinstance(answer, tuple) else (200, answer)
            if answer is None:
                self.close_connection = True
                return
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            with contextlib.suppress(OSError):  # the client may have given up
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                if status == 429:
                    self.send_header("retry-after", "0")
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    stand_in.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield stand_in
    finally:
        server.shutdown()
        server.server_close()
