"""Episodes of a server for whoever plays `ClarifyEnv`: the rollout loop, the evaluation, the scripted policies.

`RemoteEnvs(url)` takes the place of the class `ClarifyEnv`: called with a scenario, it gives an environment with the
same four members. The server is told the scenario's name and makes it itself; what is hidden comes back with the
episode's end, where it must be what this side expects.

All sessions live in one thread with one event loop, so pings are answered while a model computes. A session is used for
one episode after another. One that breaks is dropped with its episode, and the next episode opens another.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

import urllib3

from env.clarify import EpisodeRecord, StepResult, StopReason
from env.server import NAME, VERSION, tasks
from env.server.client import ClarifyClient
from env.server.models import ClarifyAction, ClarifyObservation
from scenarios.schema import Scenario

SECONDS = 20.0
"""Most seconds for an answer; less than what the rollout loop gives an environment."""

T = TypeVar("T")


class RemoteEnvs:
    """Environments on the server at `url` (http://HOST:PORT). Raises ValueError where that is no such address."""

    def __init__(self, url: str, seconds: float = SECONDS):
        try:
            parsed = urllib3.util.parse_url(url)
        except urllib3.exceptions.LocationParseError:
            parsed = None
        if parsed is None or parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError("must be an address like http://127.0.0.1:8000")
        self.url, self.seconds = url.rstrip("/"), seconds
        self._idle: list[ClarifyClient] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="env-sessions", daemon=True).start()
        weakref.finalize(self, _close, self._loop, self._idle)

    def __call__(self, scenario: Scenario) -> RemoteEnv:
        return RemoteEnv(self, scenario)

    def check(self, sessions: int = 1) -> RemoteEnvs:
        """That the server is there, is this environment in this version, and takes on so many sessions at once.

        Raises ValueError in one line.
        """
        try:
            reply = urllib3.request("GET", f"{self.url}/limits", timeout=self.seconds, retries=False, redirect=False)
            limits = json.loads(reply.data) if reply.status == 200 else {}
        except urllib3.exceptions.HTTPError as error:
            raise ValueError(f"no server answers there ({_reason(error)}); start one: python -m env.server") from None
        except ValueError:
            limits = {}
        if not isinstance(limits, dict) or limits.get("name") != NAME:
            raise ValueError("what answers there is not this environment; start it: python -m env.server")
        if limits.get("version") != VERSION:
            raise ValueError(f"the server there has version {limits.get('version')}, this side has {VERSION}")
        if limits["max_sessions"] < sessions:
            raise ValueError(
                f"the server there takes on {limits['max_sessions']} sessions, {sessions} are needed at once; "
                f"start it with --max-sessions {sessions}"
            )
        return self

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine of the sessions' thread."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            # A little more than the client's own limit: it is to report, and to drop the session.
            return future.result(self.seconds + 1)
        except BaseException:  # a time limit or Ctrl-C from outside, too
            future.cancel()
            raise

    def take(self) -> ClarifyClient:
        """A session that nobody plays on."""
        if self._idle:
            return self._idle.pop()
        return ClarifyClient(base_url=self.url, connect_timeout_s=self.seconds, message_timeout_s=self.seconds)

    def put(self, session: ClarifyClient) -> None:
        """For the next episode."""
        self._idle.append(session)

    def drop(self, session: ClarifyClient) -> None:
        """End a session, without waiting."""
        if self._loop.is_running():  # where the process ends, the loop is gone and all sessions with it
            asyncio.run_coroutine_threadsafe(_end(session), self._loop)


class RemoteEnv:
    """One scenario on the server, with the members of `ClarifyEnv`."""

    def __init__(self, envs: RemoteEnvs, scenario: Scenario):
        self.scenario = scenario
        self._envs = envs
        self._session: ClarifyClient | None = None
        self._record: EpisodeRecord | None = None

    @property
    def record(self) -> EpisodeRecord:
        """The episode. While it runs, what was asked and planned is known to the server alone: turns are counted only.

        Raises RuntimeError before the first reset.
        """
        if self._record is None:
            raise RuntimeError("the episode has not started: call reset() first")
        return self._record

    def reset(self) -> list[dict[str, str]]:
        """Starts a new episode. Returns the messages before the agent's first turn (system, user)."""
        if self._session is None:
            self._session = self._envs.take()
        self._record = EpisodeRecord(self.scenario)
        return self._ask("reset", **tasks.name_of(self.scenario)).messages

    def step(self, text: str, truncated: bool = False) -> StepResult:
        """Plays one turn of the agent. Raises RuntimeError before reset and after the end."""
        self._require_running()
        return self._turn(ClarifyAction(text=text, truncated=truncated))

    def finish(self, stop_reason: StopReason) -> EpisodeRecord:
        """Ends a running episode from outside. Raises RuntimeError where it does not run."""
        self._require_running()
        self._turn(ClarifyAction(type="finish", stop_reason=StopReason(stop_reason).value))
        return self.record

    def _turn(self, action: ClarifyAction) -> StepResult:
        observation = self._ask("step", action)
        if not observation.done:
            self._record = EpisodeRecord(self.scenario, num_turns=self.record.num_turns + 1)
            return StepResult(observation.result, False, None)
        assert observation.outcome and observation.stop_reason and self._session  # a finished episode has all of them
        self._record = observation.outcome.record(self.scenario, observation.stop_reason)
        self._envs.put(self._session)
        self._session = None
        return StepResult(None, True, observation.stop_reason)

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> ClarifyObservation:
        session = self._session
        assert session

        async def call() -> ClarifyObservation:
            return (await getattr(session, method)(*args, **kwargs)).observation

        try:
            return self._envs.run(call())
        except BaseException:
            # Whatever it was: an answer that comes late must not be taken for that to another question.
            self._session = None
            self._envs.drop(session)
            raise

    def _require_running(self) -> None:
        if self.record.stop_reason is not None:
            raise RuntimeError(f"the episode has ended ({self.record.stop_reason.value}): call reset() first")
        if self._session is None:
            raise RuntimeError("the episode's session is lost")

    def __del__(self) -> None:
        # An episode that was given up: its session ends.
        session: ClarifyClient | None = getattr(self, "_session", None)
        if session is not None:
            self._envs.drop(session)


async def _end(session: ClarifyClient) -> None:
    with contextlib.suppress(Exception):
        await session.close()


def _close(loop: asyncio.AbstractEventLoop, sessions: list[ClarifyClient]) -> None:
    async def end_all() -> None:
        await asyncio.gather(*map(_end, sessions))

    with contextlib.suppress(Exception):
        asyncio.run_coroutine_threadsafe(end_all(), loop).result(2)
    with contextlib.suppress(RuntimeError, concurrent.futures.CancelledError):
        loop.call_soon_threadsafe(loop.stop)


def _reason(error: Exception) -> str:
    """The last part of urllib3's message, which says what happened."""
    return " ".join(str(error).split()).rsplit(": ", 1)[-1][:120]
