"""The CUDA row kernel compiles for sm_80 and sm_90 within its resources, and is built only where it can be used."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import torch
from cuda_row_checks import SM_80, SM_90, STATIC, build_module, compile_host

from grpo_kernels import cuda_rows

build = build_module()
NVCC = build.find_nvcc()
# (threads, blocks an SM must hold) by vectors in registers; csrc/row_tiles.h.
LAUNCH_BOUNDS = {4: (512, 2), 9: (512, 1), 17: (512, 1)}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The device library and what ptxas says."""
    if NVCC is None:
        pytest.skip("nvcc found neither on PATH nor in CUDA_HOME")
    output = tmp_path_factory.mktemp("device") / "librows.so"
    done = subprocess.run([*build.nvcc_command(NVCC, output), "-Xptxas", "-v"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output, done.stderr + done.stdout


def test_no_kernel_spills_or_exceeds_its_launch_bounds(compiled):
    found = re.findall(
        r"Compiling entry function '\S*?rows_kernelI\d+(\w+?)Li(\d+)ELi(\d+)E\S*' for '(sm_\d+)'"
        r".*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
        r".*?(\d+) bytes smem",
        compiled[1],
        re.DOTALL,
    )
    seen = {(dtype, int(vectors), arch) for dtype, _, vectors, arch, *_ in found}
    dtypes = ("Float32", "Bfloat16", "Float16")
    assert seen == {(d, v, a) for d in dtypes for v in LAUNCH_BOUNDS for a in ("sm_80", "sm_90")}
    for dtype, threads, vectors, arch, stack, stores, loads, registers, shared in found:
        what = f"{dtype}, {vectors} vectors, {arch}"
        bounds = LAUNCH_BOUNDS[int(vectors)]
        assert int(threads) == bounds[0], what
        assert (int(stack), int(stores), int(loads)) == (0, 0, 0), f"{what}: spills"
        assert int(registers) * bounds[0] * bounds[1] <= 65536, f"{what}: {registers} registers"
        assert int(shared) <= STATIC, f"{what}: {shared} bytes of static shared memory"


def test_cuda_errors_are_raised_with_their_text(compiled):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device: nothing fails")
    library = cuda_rows.load(compiled[0])
    code = library.grpo_rows(cuda_rows.Args())
    assert code > 0
    with pytest.raises(RuntimeError, match="CUDA row kernel: .*(driver|device)"):
        cuda_rows._raise_for(library, code)
    assert library.grpo_rows_needs_device() == 1


def test_the_device_library_refuses_cpu_tensors(compiled):
    library, ones = cuda_rows.load(compiled[0]), torch.ones(2)
    with pytest.raises(ValueError, match="needs cuda"):
        cuda_rows.launch(library, torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64),
                         dict(advantages=ones, token_weights=ones), None, 1.0, True)  # fmt: skip


# --- tiers ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The host's: it holds the same arithmetic."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ not found")
    return compile_host(compiler, tmp_path_factory.mktemp("host") / "librows.so")


@pytest.mark.parametrize("limit", [SM_80, SM_90, 101376])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiers_add_up_to_the_row_and_fit(library, dtype, limit):
    for vocab in (1, 7, 8, 1000, 1025, 16384, 32000, 57344, 57345, 128256, 151936, 151937, 262144):
        for variant in (-1, 0, 1, 2):
            tiers = cuda_rows.plan(library, vocab, dtype, limit, variant)
            parts = [tiers[name] for name in ("in_registers", "in_shared", "streamed", "scalar")]
            assert min(parts) >= 0 and sum(parts) == vocab * dtype.itemsize, (vocab, tiers)
            threads, blocks = LAUNCH_BOUNDS[{0: 4, 1: 9, 2: 17}[tiers["variant"]]]
            # An SM has 1 KB more than a block may take, and keeps 1 KB of each block.
            assert blocks * (tiers["in_shared"] + STATIC + 1024) <= limit + 1024, (vocab, tiers)
            assert tiers["in_registers"] <= threads * 16 * {0: 4, 1: 9, 2: 17}[tiers["variant"]]
            assert tiers["scalar"] < 16


@pytest.mark.parametrize(
    ("limit", "variant", "registers", "shared"), [(SM_80, 2, 139264, 164608), (SM_90, 1, 73728, 230144)]
)
def test_the_headline_row_is_resident(library, limit, variant, registers, shared):
    """151936 bfloat16 columns, the table of row_tiles.h."""
    tiers = cuda_rows.plan(library, 151936, torch.bfloat16, limit)
    assert (tiers["variant"], tiers["in_registers"], tiers["in_shared"], tiers["streamed"]) == (
        variant, registers, shared, 0,
    )  # fmt: skip


def test_a_library_of_other_sources_is_refused(library, monkeypatch):
    class Longer(cuda_rows.Args):
        _fields_ = [("more", cuda_rows.ctypes.c_int64)]

    monkeypatch.setattr(cuda_rows, "Args", Longer)
    with pytest.raises(RuntimeError, match="build it again"):
        cuda_rows.load(library._name)


# --- what setup.py decides --------------------------------------------------------------------------------------------


def no_torch():
    raise ImportError


@pytest.mark.parametrize(
    ("nvcc", "version", "reason"),
    [
        ("/cuda/bin/nvcc", lambda: "12.8", None),
        (None, lambda: "12.8", "nvcc was found neither"),
        ("/cuda/bin/nvcc", lambda: None, "CPU build"),
        ("/cuda/bin/nvcc", no_torch, "--no-build-isolation"),
    ],
)
def test_built_only_with_nvcc_and_a_cuda_torch(nvcc, version, reason):
    answer = build.why_not(nvcc, version)
    assert answer is None if reason is None else reason in answer


def test_nvcc_is_looked_for_on_path_and_in_cuda_home(tmp_path):
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    assert build.find_nvcc({"PATH": str(tmp_path)}) is None
    assert build.find_nvcc({"PATH": str(tmp_path / "bin")}) == str(nvcc)
    assert build.find_nvcc({"PATH": "", "CUDA_HOME": str(tmp_path)}) == str(nvcc)


def test_an_installation_says_in_one_line_what_happened():
    def fails(nvcc):
        raise subprocess.CalledProcessError(1, nvcc, stderr="row.cu(1): error: no\nmore")

    built = []
    assert build.build_if_possible("nvcc", lambda: "12.8", built.append).endswith("built by nvcc") and built == ["nvcc"]
    for line in (
        build.build_if_possible("nvcc", lambda: "12.8", fails),
        build.build_if_possible("nvcc", lambda: None, built.append),
    ):
        assert "not built: " in line and "\n" not in line
    assert built == ["nvcc"]


def test_why_not_built_names_the_command(tmp_path):
    assert "pip install --no-build-isolation -e ." in cuda_rows.why_not_built(tmp_path / "libgrpo_rows.so")
    (tmp_path / "libgrpo_rows.so").touch()
    assert cuda_rows.why_not_built(tmp_path / "libgrpo_rows.so") is None
