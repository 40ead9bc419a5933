"""The application: OpenEnv's routes around `ClarifyEnvironment`, with limits, and errors in one line."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.types import ConcurrencyConfig

from env.server import NAME, VERSION
from env.server.environment import DESCRIPTION, ClarifyEnvironment
from env.server.limits import Limits
from env.server.models import ClarifyAction, ClarifyObservation, ClarifyState

README = Path(__file__).with_name("README.md")

STATUS = {RuntimeError: 409, ValueError: 422, IndexError: 422}
"""What the environment raises about a request, by kind: too early or too late; cannot be."""


@dataclass(frozen=True)
class ServerLimits:
    """What one server takes on."""

    max_sessions: int = 512
    """Episodes at once; one more is refused. At least the episodes of a rollout batch, or of an evaluation."""
    max_message_bytes: int = 2**20
    """Of a WebSocket message or a request body."""
    idle_seconds: float = 3600.0
    """A session without a message for so long is closed. Longer than the slowest turn of a batch takes to sample."""


def make_app(limits: ServerLimits | None = None, web: bool = True) -> FastAPI:
    """The application. `web`: with the page at `/web`."""
    limits = limits or ServerLimits()
    # OpenEnv reads both from the process's environment, when the application is made.
    os.environ["ENABLE_WEB_INTERFACE"] = "true" if web else "false"
    os.environ.setdefault("ENV_README_PATH", str(README))
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    app = create_app(
        ClarifyEnvironment,
        ClarifyAction,
        ClarifyObservation,
        env_name=NAME,
        concurrency_config=ConcurrencyConfig(
            max_concurrent_envs=limits.max_sessions, session_timeout=limits.idle_seconds
        ),
        state_cls=ClarifyState,
        title_override="Ask before you act",
    )
    app.title, app.description = "Ask before you act", DESCRIPTION
    app.contact = app.license_info = None

    @app.get("/limits", tags=["Environment Info"], summary="What this server takes on")
    async def get_limits() -> dict[str, str | int | float]:
        return {"name": NAME, "version": VERSION} | vars(limits)

    for kind, status in STATUS.items():
        app.add_exception_handler(kind, _answer(status))
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(Limits, max_bytes=limits.max_message_bytes, idle_seconds=limits.idle_seconds)
    return app


def __getattr__(name: str) -> FastAPI:
    """`app`, for `uvicorn env.server.app:app`: made when it is asked for, as an import alone should start nothing."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return make_app(web=os.environ.get("ENABLE_WEB_INTERFACE", "true").lower() in ("true", "1", "yes"))


def serve(host: str, port: int, limits: ServerLimits, web: bool) -> None:
    """Serve until a signal comes."""
    uvicorn.run(
        make_app(limits, web),
        host=host,
        port=port,
        ws_max_size=limits.max_message_bytes,
        # A client that is busy with a forward pass may be late with its pong.
        ws_ping_interval=30.0,
        ws_ping_timeout=120.0,
        timeout_graceful_shutdown=5,
        log_level="warning",
    )


def _answer(status: int) -> Callable[[Request, Exception], Awaitable[JSONResponse]]:
    async def handler(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": " ".join(str(error).split())[:300]}, status_code=status)

    return handler


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    """The log of the server has the traceback, the client does not."""
    return JSONResponse({"detail": "internal error"}, status_code=500)


def main() -> int:
    """`python -m env.server`."""
    from env.server.__main__ import main

    return main()


if __name__ == "__main__":
    main()
