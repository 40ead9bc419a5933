"""A client of servers that speak the OpenAI API, shared by `--vllm-url` (token ids) and `--api-base` (messages).

Requests are urllib3's, with its retries and time limits. Whatever goes wrong is a `ServerError`: one line that names
the flag and the address, and no key.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from queue import Empty, SimpleQueue
from typing import Any

import urllib3
from urllib3.util import Retry, Timeout, parse_url

from grpo.config import UsageError

LOOK_UP_SECONDS = 0.5
"""A wait for answers is that long at most: Ctrl-C must not find a process that only a lock can wake."""
READ_TIMEOUT = 600.0
"""Seconds until a request counts as lost: a long turn, behind other turns, on a slow machine, ends in this time."""


class Retries(Retry):
    """urllib3's, which respects Retry-After. An account without credit is not asked again, and what has not been
    answered in time only once: it costs all of that time."""

    def increment(
        self,
        method: str | None = None,
        url: str | None = None,
        response: Any = None,
        error: Exception | None = None,
        _pool: Any = None,
        _stacktrace: Any = None,
    ) -> Retries:
        """What is left of the tries after this one. Raises MaxRetryError where nothing is."""
        late = urllib3.exceptions.ReadTimeoutError
        late_before = any(isinstance(past.error, late) for past in self.history)
        no_credit = response is not None and b"insufficient_quota" in response.data  # it is returned then
        if no_credit or (isinstance(error, late) and late_before):
            raise urllib3.exceptions.MaxRetryError(_pool, url, error)
        return super().increment(method, url, response, error, _pool, _stacktrace)


RETRIES = Retries(
    total=5,
    allowed_methods=None,  # POST too: a repeated completion is the same work, with the same seed
    status_forcelist=(408, 429, 500, 502, 503, 504),
    backoff_factor=0.5,  # 0, 1, 2, 4, 8 seconds, or what Retry-After says
    backoff_jitter=0.5,
    retry_after_max=60,
    redirect=0,
    raise_on_status=False,
)

# It warns of every retry, in each thread; what remains after the last one is reported in one line.
logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)


class ServerError(UsageError):
    """What went wrong at a server: `kind` in a word or two; `status` of its answer, None where there was none; `detail`
    the answer as it came, which is not for showing."""

    def __init__(self, text: str, kind: str = "unreadable answer", status: int | None = None, detail: str = ""):
        super().__init__(text)
        self.kind, self.status, self.detail = kind, status, detail


class Server:
    """An address that speaks the OpenAI API.

    Args:
        url: `http://host:port`, with or without `/v1`.
        timeout: seconds for one answer.
        retries: of requests after the first contact, which is not repeated.
        connections: kept open, so at most so many requests at once are fast.
        flag: where the user gave the address.
        key_variable: the environment variable with the key, where the server wants one.
        advice: what to do where nobody answers.

    Raises:
        UsageError: no such address, or a key that cannot be sent.
    """

    def __init__(
        self,
        url: str,
        timeout: float = READ_TIMEOUT,
        retries: Retry = RETRIES,
        connections: int = 64,
        flag: str = "--vllm-url",
        key_variable: str = "VLLM_API_KEY",
        advice: str = "start it with `vllm serve MODEL`",
    ):
        try:
            parsed = parse_url(url.strip())
        except urllib3.exceptions.LocationParseError:
            parsed = None
        if not parsed or parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
            shown = url.split("?")[0].rsplit("@")[-1]  # names, passwords and keys belong into no message
            raise UsageError(f"{flag} {shown}: must be an address such as http://localhost:8000")
        # Without what may stand before the host, for the same reason.
        netloc = parsed.host if parsed.port is None else f"{parsed.host}:{parsed.port}"
        self.url = f"{parsed.scheme}://{netloc}{(parsed.path or '').rstrip('/').removesuffix('/v1')}"
        self.retries, self.timeout = retries, timeout
        self.flag, self.key_variable, self.advice = flag, key_variable, advice
        self._key = os.environ.get(key_variable, "").strip()
        if not self._key.isascii() or not (self._key + "x").isprintable():
            raise UsageError(f"{key_variable}: holds characters that cannot be sent")
        headers = urllib3.make_headers(basic_auth=parsed.auth)
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        self._pool = urllib3.PoolManager(maxsize=connections, headers=headers)

    def get(self, path: str, timeout: float | None = None) -> dict[str, Any]:
        """First contact: one try."""
        return self._call("GET", path, None, self.retries.new(total=0), timeout)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object that comes back for the JSON object `body`. Safe to call from several threads."""
        return self._call("POST", path, body, self.retries)

    def command(self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> dict[str, Any]:
        """A request that changes something there: one try, as a second one would do something else."""
        return self._call("POST", path, body, self.retries.new(total=0), timeout)

    def error(self, text: str, *args: Any) -> ServerError:
        """To be raised: one line that says whose fault it is."""
        return ServerError(self.clean(" ".join(f"{self.flag} {self.url}: {text}".split())), *args)

    def clean(self, text: str) -> str:
        """Without the key: some servers quote the one that they do not like. To be called before a text is cut."""
        return text.replace(self._key, "***") if self._key else text

    def _call(self, method: str, path: str, body: Any, retries: Retry, timeout: float | None = None) -> dict[str, Any]:
        seconds = timeout or self.timeout
        limits = Timeout(connect=10, read=seconds)
        try:
            response = self._pool.request(method, self.url + path, json=body, timeout=limits, retries=retries)
        except urllib3.exceptions.HTTPError as error:
            raise self._unreachable(error, seconds) from error
        if response.status != 200:
            text = f"{method} {path} was answered with {response.status}, {self._excerpt(response)}"
            detail = response.data[:4000].decode(errors="replace")
            raise self.error(text, f"status {response.status}", response.status, detail)
        try:
            document = response.json()
        except (ValueError, RecursionError) as error:
            raise self.error(f"{method} {path} was answered with no JSON: {self._excerpt(response)}") from error
        if not isinstance(document, dict):
            raise self.error(f"{method} {path} was answered with no JSON object: {self._excerpt(response)}")
        return document

    def _unreachable(self, error: Exception, seconds: float) -> ServerError:
        cause = getattr(error, "reason", None) or error
        if isinstance(cause, urllib3.exceptions.ReadTimeoutError):
            return self.error(f"no answer within {seconds:g} s", "no answer")
        if isinstance(cause, urllib3.exceptions.ResponseError):
            return self.error(f"sends requests elsewhere ({cause}); give the address that it sends them to")
        text = str(cause).split("Failed to establish a new connection: ")[-1]
        return self.error(f"cannot be reached ({text}); {self.advice}", "no answer")

    def _excerpt(self, response: urllib3.BaseHTTPResponse) -> str:
        """The beginning of an answer, or the message in it, in one line."""
        text = response.data.decode(errors="replace")
        try:
            document = response.json()
            error = document.get("error") or document.get("message") or document["detail"]
            text = error.get("message", error) if isinstance(error, dict) else error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        text = self.clean(" ".join(str(text).split()))[:300] or "an empty body"
        return text + (f" (a key is read from {self.key_variable})" if response.status in (401, 403) else "")


class InFlight:
    """Calls under way, each in a thread of its own, at most `limit` at once; more of them wait in line.

    The threads are daemons, because Ctrl-C must not wait for answers.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._waiting: deque[tuple[Hashable, Callable[[], Any]]] = deque()
        self._running = 0
        self._ended: SimpleQueue[tuple[Hashable, Any]] = SimpleQueue()

    def submit(self, key: Hashable, call: Callable[[], Any]) -> None:
        """Run `call`, now or when it is its turn."""
        self._waiting.append((key, call))
        self._start()

    def cancel(self, key: Hashable) -> None:
        """Forget the calls of that key that still wait."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0] != key)

    def ended(self) -> list[tuple[Hashable, Any]]:
        """Wait until a call has ended. All that have by then, as (key, what it returned or the exception it raised);
        empty where none is under way."""
        results: list[tuple[Hashable, Any]] = []
        while self._running and (not results or not self._ended.empty()):
            try:
                results.append(self._ended.get(timeout=LOOK_UP_SECONDS))
            except Empty:
                continue
            self._running -= 1
            self._start()
        return results

    def _start(self) -> None:
        while self._waiting and self._running < self.limit:
            threading.Thread(target=self._run, args=self._waiting.popleft(), daemon=True).start()
            self._running += 1

    def _run(self, key: Hashable, call: Callable[[], Any]) -> None:
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 (whoever waits for the call raises it)
            result = error
        self._ended.put((key, result))
