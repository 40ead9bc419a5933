"""Registers, spills, shared memory and tensor-core instructions of every GPU kernel, on a machine without a GPU.

    python kernels/bench/resources.py            # tables and, as the last line, one JSON document
    python kernels/bench/resources.py --write    # the same, and the table of kernels/README.md

Triton kernels are compiled ahead of time with the launch configurations of the kernel modules themselves, then read
with the cuobjdump that Triton brings along; the CUDA C++ kernels are compiled with nvcc where it is found. Exit status
1 where a kernel spills, needs more shared memory than the chip has, or multiplies 16-bit matrices without tensor cores.

Objectives are combined as far as they can change registers: all dtypes and block sizes with the largest objective, and
every other choice once, alone, in bfloat16 with the large block. Their full product would be 4000 kernels that differ
in a few scalar instructions.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels cannot be compiled
KERNELS = Path(__file__).resolve().parents[1]
sys.path[:0] = [path for path in (str(KERNELS), str(KERNELS.parent)) if path not in sys.path]

import torch  # noqa: E402
import triton  # noqa: E402
from report import say  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from grpo_kernels import triton_linear_logprob as op2  # noqa: E402
from grpo_kernels import triton_rows as rows  # noqa: E402
from grpo_kernels import triton_token_loss as op5  # noqa: E402

README = KERNELS / "README.md"
BEGIN, END = "<!-- resources:begin -->", "<!-- resources:end -->"
# What one block may have: A100, the other Ampere and Ada chips, H100.
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# The vocabularies of Llama 2, Llama 3 and Qwen3; what matters is how many tiles they have.
VOCABULARIES = (1024, 32000, 128256, 151936)

LARGEST = dict(
    SURROGATE="clip", KL="k3", MISMATCH="token_clip", ENTROPY_GRADIENT=True, BACKWARD=True
)  # and every optional input
CHANGES: dict[str, dict[str, Any]] = {
    "sapo": dict(SURROGATE="sapo"),
    "cispo": dict(SURROGATE="cispo"),
    "k1": dict(KL="k1"),
    "k2": dict(KL="k2"),
    "k3_ratio": dict(KL="k3_ratio"),
    "KL not in the loss": dict(KL="none"),
    "token_mask": dict(MISMATCH="token_mask"),
    "no sampler": dict(sampler_ptr=None, MISMATCH="none"),
    "no reference": dict(ref_ptr=None, KL="none"),
    "old is policy": dict(old_ptr=None),
    "no entropy bonus": dict(ENTROPY_GRADIENT=False),
    "no backward": dict(BACKWARD=False),
    "fewest inputs": dict(
        sampler_ptr=None, ref_ptr=None, old_ptr=None, MISMATCH="none", KL="none", ENTROPY_GRADIENT=False
    ),
}


@dataclass(frozen=True)
class Case:
    """One kernel as it is launched."""

    kernel: Any  # a triton.JITFunction
    sm: int
    variant: str
    dtype: str
    launch: dict[str, Any]  # constants in capitals, compiler options in lower case
    constants: dict[str, Any] = field(default_factory=dict)
    unaligned: tuple[str, ...] = ()  # integers that are not multiples of 16
    tensor_cores: bool = False

    @property
    def config(self) -> str:
        """The launch configuration in words."""
        blocks = " x ".join(str(value) for name, value in self.launch.items() if name.startswith("BLOCK"))
        stages = self.launch["num_stages"]
        return f"block {blocks}, warps {self.launch['num_warps']}" + (f", stages {stages}" if stages > 1 else "")


def cases(sm: int) -> Iterator[Case]:
    """Everything that is compiled for one chip."""
    yield from row_cases(sm)
    yield from tile_cases(sm)
    kinds = itertools.product(DTYPES.values(), (False, True))
    widths = {op2.tile_config(divmod(sm, 10), dtype, aligned).vocab for dtype, aligned in kinds}
    for blocks in sorted({op2.combine_config(-(-v // width))["BLOCK"] for v in VOCABULARIES for width in widths}):
        yield Case(op2.combine_kernel, sm, f"up to {blocks} tiles", "fp32", op2.combine_config(blocks))
    for name in ("largest objective", "sapo", "cispo", "fewest inputs"):
        constants = {**LARGEST, **CHANGES.get(name, {})}
        del constants["ENTROPY_GRADIENT"], constants["BACKWARD"]  # of the row kernel alone
        yield Case(op5.token_loss_kernel, sm, name, "fp32", op5.LAUNCH, constants)


def row_cases(sm: int) -> Iterator[Case]:
    one, strides = dict(column_stride=1), ("vocab", "row_stride")
    for config in (rows.SMALL, rows.LARGE):
        launch = config.launch()
        for dtype in DTYPES:
            yield Case(rows.row_stats_kernel, sm, dtype, dtype, launch, one)
            yield Case(rows.row_backward_kernel, sm, f"{dtype}, entropy", dtype, launch, one)
            yield Case(rows.row_backward_kernel, sm, dtype, dtype, launch, dict(one, grad_entropy_ptr=None))
            yield Case(rows.grpo_rows_kernel, sm, f"{dtype}, largest objective", dtype, launch, {**one, **LARGEST})
    # A vocabulary that is not a multiple of 16: one load for each logit instead of one for 16 bytes.
    launch = rows.LARGE.launch()
    for dtype in ("bf16", "fp32"):
        name = f"{dtype}, unaligned"
        yield Case(rows.row_stats_kernel, sm, name, dtype, launch, one, strides)
        yield Case(rows.row_backward_kernel, sm, name, dtype, launch, one, strides)
        yield Case(rows.grpo_rows_kernel, sm, name, dtype, launch, {**one, **LARGEST}, strides)
    for name, change in CHANGES.items():
        yield Case(rows.grpo_rows_kernel, sm, f"bf16, {name}", "bf16", launch, {**one, **LARGEST, **change})


def tile_cases(sm: int) -> Iterator[Case]:
    strides, one = ("width", "hidden_stride", "weight_stride"), dict(hidden_stride_d=1, weight_stride_d=1)
    large, small = (
        {name: op2.tile_config(divmod(sm, 10), dtype, aligned).launch(dtype) for name, dtype in DTYPES.items()}
        for aligned in (True, False)
    )
    for dtype in DTYPES:
        dot = dict(tensor_cores=dtype != "fp32")
        yield Case(op2.tile_kernel, sm, dtype, dtype, large[dtype], one, ("vocab",), **dot)
        yield Case(op2.tile_kernel, sm, f"{dtype}, unaligned", dtype, small[dtype], one, ("vocab", *strides), **dot)
    # hidden and weight stored the other way round, [D, N] and [D, V]
    transposed = dict(hidden_stride=1, weight_stride=1)
    yield Case(op2.tile_kernel, sm, "bf16, transposed", "bf16", small["bf16"], transposed, tensor_cores=True)


def argument_type(name: str, dtype: str) -> str:
    """The type of an argument, which the kernels' naming gives away."""
    if name in ("logits_ptr", "hidden_ptr", "weight_ptr"):
        return f"*{dtype}"
    if name.endswith("_ptr"):
        return {"targets_ptr": "*i64", "clipped_ptr": "*i32"}.get(name, "*fp32")
    integer = name.startswith("num_") or "stride" in name or name in ("vocab", "width", "vocab_tiles", "group")
    return "i32" if integer else "fp32"


def compile_case(case: Case) -> Any:
    """The compiled kernel, specialised the way a launch would specialise it."""
    constants = {k: v for k, v in case.launch.items() if k.isupper()} | case.constants
    options = {k: v for k, v in case.launch.items() if not k.isupper()}
    signature, attributes = {}, {}
    for i, parameter in enumerate(case.kernel.params):
        name = parameter.name
        signature[name] = "constexpr" if name in constants else argument_type(name, case.dtype)
        specialised = signature[name].startswith("*") or (signature[name] == "i32" and not parameter.do_not_specialize)
        if name not in constants and specialised and name not in case.unaligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", case.sm, 32), options=options)


def cuobjdump(cubin: str, *flags: str) -> str:
    return subprocess.run(
        [knobs.nvidia.cuobjdump.path, *flags, cubin], check=True, capture_output=True, text=True
    ).stdout


def measure(case: Case) -> dict[str, Any]:
    """What cuobjdump says about a kernel: bytes, and counts of instructions."""
    compiled = compile_case(case)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        text = cuobjdump(cubin.name, "-res-usage")
        usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
        stack = usage["STACK"] + usage["LOCAL"]
        # Disassembling takes longer than compiling: only for the tensor cores, and to count spills where there is a
        # stack. LDL and STL address the stack, so without one there are none.
        code = cuobjdump(cubin.name, "-sass") if case.tensor_cores or stack else ""
    return dict(
        kernel=case.kernel.__name__, sm=case.sm, config=case.config, variant=case.variant, registers=usage["REG"],
        spills=len(re.findall(r"\b(?:LDL|STL)\b", code)), stack=stack,
        shared=usage["SHARED"] + compiled.metadata.shared,
        tensor_core=len(re.findall(r"\bHG?MMA\b", code)), needs_tensor_core=case.tensor_cores,
    )  # fmt: skip


def found_in(pattern: str, text: str) -> re.Match[str]:
    """What ptxas is known to print."""
    match = re.search(pattern, text)
    assert match, f"{pattern!r} is not in {text[:300]!r}"
    return match


def load_build() -> Any:
    """kernels/csrc/build.py, which is no package."""
    specification = importlib.util.spec_from_file_location("grpo_build", KERNELS / "csrc" / "build.py")
    assert specification and specification.loader
    build = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(build)
    return build


def cuda_rows(sm: int, nvcc: str) -> list[dict[str, Any]]:
    """The CUDA C++ kernels, from ptxas; shared memory is the static part, the row itself comes at launch."""
    found = []
    for source in sorted((KERNELS / "csrc").glob("*.cu")):
        with tempfile.TemporaryDirectory() as folder:
            command = [nvcc, *load_build().NVCC_FLAGS, f"-arch=sm_{sm}", "-cubin", "-Xptxas", "-v"]
            command += ["-o", f"{folder}/out.cubin", str(source)]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        for name, body in re.findall(r"entry function '(\w+)'(.*?)(?=Compiling entry|\Z)", text, re.S):
            stack, stores, loads = map(int, found_in(r"(\d+) bytes stack.*?(\d+) .*?(\d+) ", body).groups())
            shared = re.search(r"(\d+) bytes smem", body)
            kernel, dtype, threads, registers, blocks = found_in(
                r"_Z\d+(\w+?)I\d(\w+?)Li(\d+)ELi(\d+)ELi(\d+)E", name
            ).groups()
            found.append(
                dict(
                    kernel=f"{kernel} ({source.name})", sm=sm, variant=dtype.lower(),
                    config=f"{threads} threads, {registers} vectors in registers, {blocks} a SM",
                    registers=int(found_in(r"Used (\d+) registers", body)[1]), spills=stores + loads, stack=stack,
                    shared=int(shared[1]) if shared else 0, tensor_core=0, needs_tensor_core=False,
                )
            )  # fmt: skip
    return found


def problems(row: dict[str, Any]) -> list[str]:
    """What must not be, in words; empty where a kernel is as it should be."""
    name = f"{row['kernel']} sm_{row['sm']} ({row['config']}; {row['variant']})"
    found = []
    if row["spills"] or row["stack"]:
        found.append(f"{name}: spills ({row['spills']} instructions, {row['stack']} bytes of stack)")
    if row["shared"] > SHARED_LIMIT[row["sm"]]:
        found.append(f"{name}: {row['shared']} bytes of shared memory, there are {SHARED_LIMIT[row['sm']]}")
    if row["needs_tensor_core"] and not row["tensor_core"]:
        found.append(f"{name}: no tensor-core instruction")
    return found


COLUMNS = ("kernel", "launch", "chip", "variants", "registers", "spills", "shared memory, KB", "tensor-core instr.")


def summary(measured: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A line for each kernel, launch configuration and chip; registers and the rest the largest of its variants."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in measured:
        groups.setdefault((row["kernel"], row["config"], f"sm_{row['sm']}"), []).append(row)
    lines = []
    for key, group in groups.items():
        registers, spills, shared, tensor_core = (
            max(row[name] for row in group) for name in ("registers", "spills", "shared", "tensor_core")
        )
        lines.append((*key, *map(str, (len(group), registers, spills, f"{shared / 1024:.1f}", tensor_core or "-"))))
    return lines


def markdown(lines: list[tuple[str, ...]]) -> str:
    head = [COLUMNS, ("---",) * 3 + ("---:",) * 5]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*head, *lines])


def write_readme(lines: list[tuple[str, ...]]) -> None:
    text = README.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    note = (
        f"Compiled with Triton {triton.__version__}; each number is the largest of the group's variants. The CUDA C++\n"
        "kernel also keeps a part of the row in shared memory, as much as the vocabulary needs and the chip has."
    )
    README.write_text(f"{before}{BEGIN}\n{markdown(lines)}\n\n{note}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="regenerate the table of kernels/README.md")
    options = parser.parse_args()
    nvcc = load_build().find_nvcc()
    if options.write and not nvcc:
        parser.error("--write needs nvcc: without it the table would lose the CUDA C++ kernel")
    # Of the chips with less shared memory only the large tile, whose pipeline is shorter there.
    work = [*cases(80), *cases(90), next(tile_cases(86))]
    measured = []
    for i, case in enumerate(work):
        say(f"{i + 1} of {len(work)}: {case.kernel.__name__} for sm_{case.sm}, {case.variant}")
        measured.append(measure(case))
    if nvcc:
        say("CUDA C++")
        measured += [row for sm in (80, 90) for row in cuda_rows(sm, nvcc)]
    else:
        print("nvcc not found: the CUDA C++ kernel is left out", file=sys.stderr)
    say("")
    lines = summary(measured)
    if Console().is_terminal:
        table = Table(*COLUMNS)
        for line in lines:
            table.add_row(*line)
        Console().print(table)
    else:
        print(markdown(lines))
    if options.write:
        write_readme(lines)
    failures = [text for row in measured for text in problems(row)]
    for text in failures:
        print(text, file=sys.stderr)
    print(json.dumps(dict(triton=triton.__version__, kernels=measured, problems=failures)))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
