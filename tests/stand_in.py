"""A small local server that stands for `vllm serve`, or for another one with an OpenAI API: what it answers is a
function, and what it was asked is kept."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from tests.local_server import Request, Response, listening

Answer = Response | dict[str, Any] | bytes | tuple[int, Any] | None


def completion(ids, finish="stop", prompt_ids=None, **changes) -> dict[str, Any]:
    """What vLLM answers, as far as it is read. `changes` replace or, as None, remove fields of the choice."""
    logprobs = {"token_logprobs": [-0.5 - i for i in range(len(ids))]}
    choice = {"index": 0, "text": "", "token_ids": list(ids), "logprobs": logprobs, "finish_reason": finish}
    return {"choices": [choice | {"prompt_token_ids": prompt_ids} | changes]}


def chat_answer(content: str | None, finish: str = "stop", tokens: tuple[int, int] | None = (50, 10), **message):
    """What a chat endpoint answers. `tokens`: of the prompt and of the answer; `message`: further fields of that."""
    usage = tokens and {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
    message = {"role": "assistant", "content": content} | message
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage}


class StandIn:
    """`complete(body)` answers a request at `path`: a JSON object, raw bytes, (status, answer), or None to hang up."""

    def __init__(
        self,
        complete: Callable[[dict[str, Any]], Answer],
        models: Answer = None,
        path: str = "/v1/completions",
    ):
        self.complete, self.path = complete, path
        self.models = {"data": [{"id": "toy", "root": "toy", "max_model_len": 2048}]} if models is None else models
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    def answer(self, request: Request) -> Answer:
        """What it has for a request."""
        if request.method == "GET":
            self.headers.append(request.headers)
            there = request.path == self.path.replace("chat/", "").replace("completions", "models")
            return self.models if there else (404, {"detail": "Not Found"})
        self.bodies.append(json.loads(request.body))
        return self.complete(self.bodies[-1]) if request.path == self.path else (404, b"")


@contextlib.contextmanager
def serve(stand_in: StandIn) -> Iterator[StandIn]:
    """It listens at `stand_in.url` inside the block."""

    def answer(request: Request) -> Response:
        found = stand_in.answer(request)
        if isinstance(found, Response):
            return found
        status, content = found if isinstance(found, tuple) else (200, found)
        return Response(content, status, {"retry-after": "0"} if status == 429 else {})

    with listening(answer) as stand_in.url:
        yield stand_in
