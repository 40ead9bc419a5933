"""Finds the browser that the demo's page is tested in, for `make test-demo`; as root on Debian it is installed.

    python tests/find_browser.py

Exit codes: 0 it is there; 77 it is not and cannot be installed on this machine, with the reason as the last line.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CANNOT = 77


def find() -> str | None:
    """Its path, None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def install() -> str:
    """Install Debian's chromium. Returns why that was not possible, "" where it was."""
    if shutil.which("apt-get") is None:
        return "no chromium, and no apt-get to install it with"
    if os.geteuid() != 0:
        return "no chromium, and only root can install it: apt-get install chromium"
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
        print("apt-get", *command, flush=True)
        done = subprocess.run(
            ["apt-get", "-q", *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            return f"apt-get {command[0]} failed: {(done.stdout.strip().splitlines() or ['without a word'])[-1]}"
    return "" if find() else "apt-get installed chromium, but there is no such command"


def main() -> None:
    reason = "" if find() else install()
    if reason:
        print(f"SKIPPED: the demo's page is not tested: {reason}", flush=True)
        sys.exit(CANNOT)


if __name__ == "__main__":
    main()
