"""Limits that no client can talk its way around, as ASGI middleware: size of a request body, time without a message.

The size of a WebSocket message and the number of sessions are limited by the servers underneath (`app.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Limits:
    """Refuses request bodies above `max_bytes` (413), and closes WebSockets that are silent for `idle_seconds`.

    Pings are answered below this and are no messages: a client that only answers them is gone as far as its episode
    is concerned.
    """

    def __init__(self, app: Callable, max_bytes: int, idle_seconds: float):
        self.app, self.max_bytes, self.idle_seconds = app, max_bytes, idle_seconds

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self.app(scope, self._impatient(receive, send), send)
        else:
            await self.app(scope, receive, send)

    async def _http(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        # Read before anything looks at it: a length header may be missing, or say too little.
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client is gone
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.max_bytes:
                await self._refuse(send)
                return
        first: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self.app(scope, replay, send)

    async def _refuse(self, send: Send) -> None:
        text = f'{{"detail": "the request is larger than {self.max_bytes} bytes"}}'.encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    def _impatient(self, receive: Receive, send: Send) -> Receive:
        async def receive_in_time() -> Message:
            try:
                return await asyncio.wait_for(receive(), self.idle_seconds)
            except asyncio.TimeoutError:
                await send({"type": "websocket.close", "code": 1001, "reason": f"idle for {self.idle_seconds:g} s"})
                return {"type": "websocket.disconnect", "code": 1001}

        return receive_in_time
