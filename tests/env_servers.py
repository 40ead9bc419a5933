"""Servers of the environment for tests: as `python -m env.server` in a process, or in a thread with small limits."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import urllib3

from scenarios.schema import Scenario

ROOT = Path(__file__).parent.parent
SECONDS = 120  # to start, on a machine that is busy
HTTP = urllib3.PoolManager(retries=False)


FOREIGN = Scenario(
    family="coding", task_id="easy", request="Build an API.", hidden_profile={"stack": "go+gin", "scale": "small"},
    critical_fields=["stack"], required_keys=["stack"], field_keys=["stack", "scale"], max_steps=3, max_questions=2,
    seed=10_000,
)  # fmt: skip
"""A scenario that is not one of ours, as a file of somebody else's may hold."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """`python -m env.server ARGS` on a free port; `url`, and what it wrote to `log`."""

    def __init__(self, log: Path, *args: str, port: int | None = None):
        self.log, self.port = log, port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._file = log.open("wb")
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "env.server", "--port", str(self.port), *args],
            stdout=self._file,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env=os.environ | {"PYTHONPATH": path},
        )

    def wait(self) -> Server:
        wait_until_healthy(self.url, lambda: self._process.poll() is None, self.log.read_text)
        return self

    def stop(self) -> int:
        self._process.terminate()
        try:
            return self._process.wait(20)
        finally:
            self._process.kill()
            self._file.close()


@contextlib.contextmanager
def in_thread(limits, web=False, port=None, **options):
    """A server in this process. Its address."""
    import uvicorn

    from env.server.app import make_app

    port = port or free_port()
    config = uvicorn.Config(
        make_app(limits, web), port=port, ws_max_size=limits.max_message_bytes, log_level="error",
        timeout_graceful_shutdown=1, **options,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{port}"
    wait_until_healthy(url, thread.is_alive, lambda: "the server's thread has ended")
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join(10)


def wait_until_healthy(url, alive, what):
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if not alive():
            raise RuntimeError(what())
        with contextlib.suppress(urllib3.exceptions.HTTPError):
            if HTTP.request("GET", f"{url}/health").status == 200:
                return
        time.sleep(0.1)
    raise TimeoutError(what())


def ask(connection, type, data=None):
    """The answer to one message, as text and as JSON."""
    connection.send(json.dumps({"type": type} | ({} if data is None else {"data": data})))
    text = connection.recv(timeout=20)
    return text, json.loads(text)
