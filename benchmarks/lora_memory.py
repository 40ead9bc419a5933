"""What LoRA saves: the most memory of a training step, beside full fine-tuning with its frozen second copy.

    python benchmarks/lora_memory.py             # a random Qwen3 of 54M parameters; under 2 GB, a few minutes

The same episodes through sampler, reference (beta 0.2) and two optimiser steps, in a process of its own for each way to
train. What a process had before it loaded a model (Python and libraries) is given apart and taken off. Beside it what
weights, reference, gradients and moments take by count: all else is activations, the sampler's cache and what the
allocator keeps. Prints a markdown table and, as the last line, JSON. On a GPU memory is the allocator's.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from sides import peak_bytes
from synthetic import ModelShape, Shape, Side, sample, write_model
from table import finish, machine, markdown, one_line_errors, say

from grpo.batching import Packing
from grpo.config import UsageError, tyro_cli
from grpo.optimizer import MOMENT_BYTES

STEPS = 2  # the first makes the moments, the second has them all along


@dataclass(frozen=True)
class Arguments:
    """What LoRA saves: the most memory of a training step."""

    layers: int = 8
    """Of the random model."""
    width: int = 768
    """Its hidden size."""
    vocab: int = 8192
    """Its vocabulary."""
    rank: int = 16
    """Of the adapters."""
    threads: int = 1
    """CPU threads."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to measure."""
    smoke: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """A tiny model: does everything run?"""
    json: Path | None = None
    """Also write the JSON document to this file."""


def ways(rank: int) -> dict[str, dict[str, Any]]:
    """Name of a way to train -> its settings."""
    found: dict[str, dict[str, Any]] = {"all weights, a second copy as reference": {}}
    if importlib.util.find_spec("bitsandbytes"):
        found["the same, --optimizer adamw8bit"] = {"optimizer": "adamw8bit"}
    found[f"--lora-rank {rank}, the base inside as reference"] = {"lora_rank": rank}
    return found


def measure(
    folder: str, shape: Shape, vocab: int, threads: int, device: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """In a fresh process: sample, score, update, and how much memory that took."""
    torch.set_num_threads(threads)
    target = torch.device(device)
    for library in ("peft", "bitsandbytes"):  # all processes alike
        if importlib.util.find_spec(library):
            importlib.import_module(library)
    before = peak_bytes(target) or 0
    side = Side(Path(folder), device, Packing(), shape.prompt + shape.completion + 64, 16384, **settings)
    forget_peak(target)  # loading a model takes more than it leaves
    for step in range(STEPS):
        episodes = sample(side.engine, shape, vocab, step).episodes
        _, reference = side.reference_seconds(episodes)
        side.update_seconds(episodes, reference)
    policy = side.trainer.policy
    copies = 1 if side.reference.policy is policy else 2
    moments = MOMENT_BYTES[side.trainer.config.optim.optimizer]
    return {
        "libraries_bytes": before,
        "peak_bytes": peak_bytes(target) or 0,
        "parameters": policy.num_parameters,
        "trained": policy.num_trained,
        "counted_bytes": 4 * copies * policy.num_parameters + (4 + moments) * policy.num_trained,
    }


def forget_peak(device: torch.device) -> None:
    """The most memory is counted from here on; where the system cannot, from the start of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def run(args: Arguments) -> dict[str, Any]:
    """Measure each way. Returns the JSON document. Raises UsageError."""
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise UsageError(f"--json {args.json}: its folder does not exist")
    for name in ("layers", "rank", "threads"):
        if not 1 <= getattr(args, name) <= 1024:
            raise UsageError(f"--{name} {getattr(args, name)}: must be between 1 and 1024")
    if args.width < 8 or args.width % 8:
        raise UsageError(f"--width {args.width}: must be a multiple of 8")
    if args.vocab < 2048:
        raise UsageError(f"--vocab {args.vocab}: must be at least 2048, the tokenizer's ids are below that")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: not available")
    if not importlib.util.find_spec("peft"):
        raise UsageError('lora_memory.py needs peft: pip install -e ".[lora]"')
    model = ModelShape(1, 32, 2048) if args.smoke else ModelShape(args.layers, args.width, args.vocab)
    shape = Shape(members=2, prompt=24, shared=8, turn_tokens=4) if args.smoke else Shape(prompt=128, turn_tokens=32)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), model, shape.prompt + shape.completion + 64)
        for name, settings in ways(args.rank).items():
            say(f"{name} ...")
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                work = fresh.submit(measure, folder, shape, model.vocab, args.threads, args.device, settings)
                try:
                    rows.append({"way": name, "settings": settings, **work.result()})
                except BrokenProcessPool:
                    raise UsageError(f"{name}: the process was killed; too little memory for this model") from None
    return {"benchmark": "lora_memory", "machine": machine(args.device, args.threads), "ways": rows}


def main(argv: list[str]) -> None:
    """Exit codes: 0, or 2 for bad input, with one line on stderr."""
    with one_line_errors():
        args = tyro_cli(Arguments, argv, prog="lora_memory.py", description=__doc__.splitlines()[0])
        document = run(args)
    about, rows = document["machine"], document["ways"]
    print(f"\n## Memory of a step, {rows[0]['parameters'] / 1e6:.1f}M parameters\n")
    print(f"{about['name']}, {about['threads']} threads; commit {about['commit']}\n")
    own = [row["peak_bytes"] - row["libraries_bytes"] for row in rows]
    cells = [
        [row["way"], f"{row['trained'] / 1e6:.2f}M", f"{row['peak_bytes'] / 1e6:.0f}", f"{mine / 1e6:.0f}",
         f"{row['counted_bytes'] / 1e6:.0f}", f"{own[0] / mine:.1f}x"] for row, mine in zip(rows, own)
    ]  # fmt: skip
    print(markdown(["way", "trained", "peak MB", "less libraries", "by count", "first / this"], cells))
    finish(document, args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
