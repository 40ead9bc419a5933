"""Can a server listen at an address? Asked before anything slow is imported."""

from __future__ import annotations

import socket


def check_address(host: str, port: int) -> None:
    """Raises ValueError, in one line that names --host and --port, where a server could not listen."""
    if not 1 <= port <= 65535:
        raise ValueError(f"--port {port}: must be from 1 to 65535")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: {error.strerror}") from error
