"""Builds the CUDA row kernel: `python kernels/csrc/build.py`. `setup.py` does the same where it can.

Only the standard library: an installation without torch and without nvcc runs this file too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
LIBRARY = SOURCES.parent / "grpo_kernels" / "libgrpo_rows.so"
# A100 and H100/H200 as machine code. Code for sm_80 also runs on 8.6 and 8.9; PTX serves everything after 9.0.
ARCHITECTURES = (
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_90,code=compute_90",
)
# Contraction into FMA is the default; it is spelled out because the numerics were argued with it.
NVCC_FLAGS = ("-O3", "-std=c++17", "--fmad=true")


def find_nvcc(environ: Mapping[str, str] = os.environ) -> str | None:
    """nvcc on PATH, or of CUDA_HOME or CUDA_PATH."""
    found = shutil.which("nvcc", path=environ.get("PATH", ""))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if found is None and environ.get(variable):
            found = shutil.which("nvcc", path=str(Path(environ[variable]) / "bin"))
    return found


def torch_cuda_version() -> str | None:
    """`torch.version.cuda`: None for a CPU build; ImportError where there is no torch."""
    import torch

    return torch.version.cuda


def why_not(nvcc: str | None, cuda_version: Callable[[], str | None] = torch_cuda_version) -> str | None:
    """Why the extension is not built, or None where it is: it needs nvcc and a torch that can use the result."""
    try:
        version = cuda_version()
    except ImportError:
        return "torch is not importable here (pip isolates builds: use pip install --no-build-isolation -e .)"
    if version is None:
        return "torch is a CPU build"
    return None if nvcc else "nvcc was found neither on PATH nor in CUDA_HOME"


def nvcc_command(nvcc: str, output: Path | str = LIBRARY) -> list[str]:
    """A shared library with C symbols: the CUDA runtime inside, neither torch nor Python needed to build it."""
    flags = [*NVCC_FLAGS, "-shared", "-Xcompiler", "-fPIC", *ARCHITECTURES]
    return [nvcc, *flags, "-o", str(output), str(SOURCES / "grpo_rows.cu")]


def host_command(compiler: str, output: Path | str, sources: Path = SOURCES) -> list[str]:
    """The same interface on the CPU, for tests."""
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-std=c++17", "-shared", "-fPIC"]
    return [compiler, *flags, "-o", str(output), str(sources / "grpo_rows_host.cpp")]


def build(nvcc: str, output: Path = LIBRARY) -> None:
    """Raises subprocess.CalledProcessError, the compiler's text in `stderr`."""
    # Under another name first: a running process may have the old library open.
    unfinished = output.with_suffix(".tmp")
    try:
        subprocess.run(nvcc_command(nvcc, unfinished), check=True, capture_output=True, text=True)
        os.replace(unfinished, output)
    finally:
        unfinished.unlink(missing_ok=True)


def build_if_possible(
    nvcc: str | None = None,
    cuda_version: Callable[[], str | None] = torch_cuda_version,
    builder: Callable[[str], None] = build,
) -> str:
    """One line that says what happened. An optional kernel must not make an installation fail."""
    nvcc = nvcc or find_nvcc()
    reason = why_not(nvcc, cuda_version)
    if nvcc is None or reason:
        return f"grpo_kernels: CUDA row kernel not built: {reason}"
    try:
        builder(nvcc)
    except (subprocess.CalledProcessError, OSError) as error:
        text = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return f"grpo_kernels: CUDA row kernel not built: {nvcc} failed: {text[0] if text else error}"
    return f"grpo_kernels: CUDA row kernel built by {nvcc}"


def main() -> int:
    """Builds whatever torch is: asked for by name."""
    nvcc = find_nvcc()
    if nvcc is None:
        print("nvcc was found neither on PATH nor in CUDA_HOME", file=sys.stderr)
        return 1
    try:
        build(nvcc)
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)
        return 1
    print(LIBRARY)
    return 0


if __name__ == "__main__":
    sys.exit(main())
