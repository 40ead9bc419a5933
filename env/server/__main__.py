"""Serve the environment: `python -m env.server`. Clients find it at http://HOST:PORT, people at /web."""

from __future__ import annotations

import argparse
import importlib.util
import sys

from env.address import check_address
from env.server import INSTALL, VERSION

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def main(args: list[str] | None = None) -> int:
    """Serves until a signal comes. Returns the exit code: 0, or 2 for bad input."""
    options = _options(args)
    try:
        check(options)
    except ValueError as error:
        print(f"env.server: {error}", file=sys.stderr)
        return 2
    from env.server.app import ServerLimits, serve

    limits = ServerLimits(options.max_sessions, options.max_message_kib * 1024, options.idle_minutes * 60)
    address = f"http://{options.host}:{options.port}"
    page = "" if options.no_web else f", page at {address}/web"
    print(f"clarify {VERSION} at {address}{page}; at most {limits.max_sessions} sessions. Ctrl-C ends it.", flush=True)
    if options.host not in LOOPBACK:
        print("warning: anyone who reaches this address can play; there is no authentication", file=sys.stderr)
    serve(options.host, options.port, limits, web=not options.no_web)
    return 0


def check(options: argparse.Namespace) -> None:
    """Raises ValueError in one line: a missing package, a value that cannot be, an address that is taken."""
    if importlib.util.find_spec("openenv") is None:
        raise ValueError(f"the package openenv is missing: {INSTALL}")
    for name in ("max_sessions", "max_message_kib"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
    if not 0 < options.idle_minutes < float("inf"):
        raise ValueError(f"--idle-minutes {options.idle_minutes:g}: must be a number above 0")
    check_address(options.host, options.port)


def _options(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m env.server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only; 0.0.0.0 in a container")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000")
    parser.add_argument("--max-sessions", type=int, default=512, metavar="N", help="episodes at once; default: 512")
    parser.add_argument("--max-message-kib", type=int, default=1024, metavar="N", help="default: 1024")
    parser.add_argument("--idle-minutes", type=float, default=60, metavar="N", help="silent sessions; default: 60")
    parser.add_argument("--no-web", action="store_true", help="without the page at /web, which starts faster")
    return parser.parse_args(args)


if __name__ == "__main__":
    sys.exit(main())
