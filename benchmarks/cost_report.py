"""The tables of docs/scaling.md, from the cost model; or one step by phase.

    python benchmarks/cost_report.py             # all tables
    python benchmarks/cost_report.py --write     # the same into docs/scaling.md
    python benchmarks/cost_report.py --model 8B --gpus 64 --machine h100 --groups 8

No figure for a GPU is measured: they are predictions from data sheets and assumptions (`cost_machines.py`). The last
line is JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from cost_check import calibrated, comparisons, measured_lengths
from cost_job import Job, Step, fitted, memory, overlapped, plan, spread, step
from cost_machines import GIB, MACHINES
from cost_model import SHAPES, Lengths, Shape
from table import finish, markdown, number, one_line_errors

from grpo.config import RECIPES, UsageError, tyro_cli

PAGE = Path(__file__).resolve().parents[1] / "docs/scaling.md"
GPUS = (1, 8, 64, 512)
MODELS = ("1.7B", "4B", "8B", "32B", "70B")
GROUPS_PER_GPU, GROUPS = 8, 512  # weak, strong scaling; groups of 8
LIMIT = 768
# What was published of two runs on one A100 with TRL and vLLM: 300 steps each (the recipes in grpo/config.py).
PUBLISHED_STEPS = 300
PUBLISHED_MINUTES = {"clarify-run4": 78.2, "clarify-run1": 50.0}


@dataclass(frozen=True)
class Arguments:
    """Where the time of a step goes on GPUs, predicted: all tables of docs/scaling.md, or one step (--model)."""

    model: str = ""
    """One step of this model instead of the tables: 0.6B, 1.7B, 4B, 8B, 14B, 32B, 70B, or a folder with config.json."""
    gpus: int = 8
    """With --model: GPUs, eight a node."""
    machine: Literal["a100", "h100", "h200"] = "h100"
    """With --model."""
    groups: int = GROUPS_PER_GPU
    """With --model: groups on each GPU."""
    members: int = 8
    """With --model: episodes of a group."""
    prompt: int = Job.prompt
    """With --model: tokens of a prompt."""
    shared: int = Job.shared
    """With --model: those of them that all prompts begin with."""
    limit: int = LIMIT
    """With --model: tokens of an episode behind its prompt, at most."""
    slots: int = Job.slots
    """With --model: episodes that a GPU samples at once (--max-concurrent)."""
    write: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also write the tables into docs/scaling.md."""
    json: Path | None = None
    """Also write the JSON document to this file."""


def make_job(model: str, gpus: int, machine: str = "h100", groups: int = GROUPS_PER_GPU, **changes: Any) -> Job:
    """`changes`: other fields of the job."""
    lengths, limit = measured_lengths()
    wanted = changes.get("limit", LIMIT)
    return Job(find_shape(model), MACHINES[machine], gpus, groups, lengths.scaled(wanted / limit), **changes)


def find_shape(model: str) -> Shape:
    """By name, or from a folder's config.json. Raises UsageError."""
    if model in SHAPES:
        return SHAPES[model]
    if not (Path(model) / "config.json").is_file():
        raise UsageError(f"--model {model}: neither one of {', '.join(SHAPES)} nor a folder with a config.json")
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    if config.model_type not in ("qwen3", "llama"):
        raise UsageError(f"--model {model}: of type {config.model_type}; counted are qwen3 and llama")
    return Shape.of(Path(model).name, config)


def weak(model: str, gpus: int) -> Job:
    """Lean where it does not fit otherwise; so is the next one."""
    job = make_job(model, gpus)
    return fitted(job) or job


def strong(model: str, gpus: int) -> Job:
    job = spread(make_job(model, gpus), GROUPS)
    return fitted(job) or job


def anchor(recipe: str, whole: bool = False) -> Step:
    """A published run's step on one A100. `whole`: every episode samples up to the limit."""
    settings = RECIPES[recipe]
    job = make_job(settings["model"].split("-")[-1], 1, "a100", settings["prompts_per_step"],
                   members=settings["num_generations"], limit=settings["max_completion_len"],
                   reference=settings["beta"] > 0)  # fmt: skip
    if whole:
        ones = 0 * job.lengths.sampled + job.limit
        job = replace(job, lengths=Lengths(ones, ones))
    found = step(job)
    assert found is not None
    return found


def table_check() -> str:
    """Measured and predicted; the rollouts of the small model were timed once each."""
    found = comparisons(calibrated())
    whole = [c for c in found if c.what.startswith(("head", "case"))]
    rows = []
    for c in whole:
        unit = "GB" if c.phase == "peak memory" else "s"
        values = [f"{number(value / 1e9 if unit == 'GB' else value)} {unit}" for value in (c.measured, c.predicted)]
        rows.append([c.what, c.phase, *values, f"{c.ratio:.2f}"])
    for phase in ("reference and update", "rollout"):
        ratios = [c.ratio for c in found if c not in whole and c.phase == phase]
        between = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append([f"scaling.py, {len(ratios)} points", phase, "", "", between])
    return markdown(["what", "phase", "measured", "predicted", "predicted / measured"], rows)


def table_anchor() -> str:
    rows = []
    for recipe, minutes in PUBLISHED_MINUTES.items():
        published = 60 * minutes / PUBLISHED_STEPS
        for lengths, whole in (("spread as measured here", False), ("all at the limit", True)):
            found = anchor(recipe, whole)
            rows.append([recipe, lengths, *phases(found), f"{found.seconds:.1f}", f"{published:.1f}",
                         f"{published / found.seconds:.1f}"])  # fmt: skip
    return markdown(["recipe", "episodes", *PHASES, "step", "published", "published / predicted"], rows)


PHASES = ("rollout", "sync", "reference", "update", "waiting")


def phases(found: Step) -> list[str]:
    return [f"{getattr(found, name):.2f}" for name in PHASES]


def table_memory() -> str:
    rows = []
    for model in MODELS:
        cells = []
        for gpus in GPUS:
            job = weak(model, gpus)
            chosen = plan(job)
            tp, again = chosen or (min(gpus, 8), True)  # what needs least
            need = memory(job if chosen else replace(job, lean=True), tp, again)
            text = f"{need.rollout / GIB:.0f} / {need.update / GIB:.0f}"
            notes = ["lean"] * job.lean + [f"tp {tp}"] * (tp > 1) + ["recompute"] * again
            cells.append((text + "".join(f", {note}" for note in notes)) if chosen else f"**no**: {text}")
        rows.append([model, f"{SHAPES[model].parameters / 1e9:.2f}", *cells])
    return markdown(["model", "10^9 parameters", *(f"{gpus} GPUs" if gpus > 1 else "1 GPU" for gpus in GPUS)], rows)


def table_steps(make: Callable[[str, int], Job]) -> str:
    rows = []
    for model in MODELS:
        for gpus in GPUS:
            job = make(model, gpus)
            found = step(job)
            if found is not None:
                rate = found.sampled / found.seconds / gpus
                row = [model, f"{gpus}{' lean' * job.lean}", str(found.tp), *phases(found)]
                rows.append([*row, f"**{found.seconds:.1f}**", f"{found.links:.2f}", f"{rate:.0f}"])
    return markdown(["model", "GPUs", "tp", *PHASES, "step", "links busy", "tokens/s a GPU"], rows)


def table_stragglers() -> str:
    lengths, limit = measured_lengths()
    mean = float(lengths.sampled.mean())
    rows = [[f"{episodes}", f"{lengths.longest(episodes):.0f}", f"{lengths.longest(episodes) / mean:.2f}",
             f"{max(0, 1 - mean / lengths.longest(episodes)):.0%}"] for episodes in (1, 8, 64, 512, 4096)]  # fmt: skip
    return markdown(["episodes together", "longest, sampled tokens", "longest / mean", "slots empty on average"], rows)


def table_assumptions() -> str:
    """One step, with one assumption changed at a time."""
    job = weak("8B", 64)
    machine = job.machine
    slow_links = replace(machine, nvlink=machine.nvlink / 2, nic=machine.nic / 2)
    ones = 0 * job.lengths.sampled + job.limit
    changed = {
        "as assumed": job,
        "GEMMs at half the rate": replace(job, machine=replace(machine, flops=machine.flops / 2)),
        "memory at half the rate": replace(job, machine=replace(machine, bandwidth=machine.bandwidth / 2)),
        "links at half the rate": replace(job, machine=slow_links),
        "a step of a ring 5 times slower": replace(job, machine=replace(machine, hop_seconds=5 * machine.hop_seconds)),
        "vLLM's own time a forward doubled": replace(job, machine=replace(
            machine, decode_seconds=2 * machine.decode_seconds, row_seconds=2 * machine.row_seconds)),
        "prompts of 1,200 tokens, 1,000 of them common": replace(job, prompt=1200, shared=1000),
        "every episode at the limit": replace(job, lengths=Lengths(ones, ones)),
    }  # fmt: skip
    rows = []
    for what, each in changed.items():
        found = step(each)
        rows.append([what, *(["-"] * 6 if found is None else [*phases(found), f"{found.seconds:.1f}"])])
    return markdown(["", *PHASES, "step"], rows)


def table_overlap() -> str:
    rows = []
    for model in MODELS:
        job = weak(model, 64)
        found, best = step(job), overlapped(replace(job, lean=False))
        if found is not None and best is not None:
            servers, beside = best
            model += " lean" * job.lean
            gain = f"{found.seconds / beside:.2f}"
            rows.append([model, f"{found.seconds:.1f}", str(servers), f"{beside:.1f}", gain])
    return markdown(["model", "one after the other, s", "GPUs that sample", "side by side, s", "gain"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "check": table_check,
    "anchor": table_anchor,
    "memory": table_memory,
    "weak": lambda: table_steps(weak),
    "strong": lambda: table_steps(strong),
    "stragglers": table_stragglers,
    "assumptions": table_assumptions,
    "overlap": table_overlap,
}


def fill(text: str, tables: dict[str, str]) -> str:
    """The page with each table between its two marks. Raises ValueError where a mark is missing."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        before, rest = text.split(begin)
        text = before + begin + table + "\n" + end + rest.split(end)[1]
    return text


def one_step(args: Arguments) -> dict[str, Any]:
    """Print one step; returns it. Raises UsageError."""
    for name in ("gpus", "groups", "members", "prompt", "limit", "slots"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)}: must be at least 1")
    if not 0 <= args.shared < min(args.prompt, Job.microbatch_tokens):
        raise UsageError(f"--shared {args.shared}: less than --prompt {args.prompt} and a microbatch's 8192")
    if args.gpus > 8 and args.gpus % 8:
        raise UsageError(f"--gpus {args.gpus}: whole nodes of 8, or at most 8")
    names = ("members", "prompt", "shared", "limit", "slots")
    job = make_job(args.model, args.gpus, args.machine, args.groups, **{name: getattr(args, name) for name in names})
    job = fitted(job) or job
    found = step(job)
    if found is None:
        need = memory(replace(job, lean=True), min(args.gpus, 8), True)
        raise UsageError(
            f"--model {args.model}: {args.gpus} x {args.machine} are too few: {need.rollout / GIB:.0f} GiB a GPU while "
            f"sampling ({need.kv_cache / GIB:.0f} for {job.slots} episodes at once), {need.update / GIB:.0f} in the "
            f"update; a card has {job.machine.memory / GIB:.0f}"
        )
    print(f"{args.model} on {args.gpus} x {args.machine}, predicted; tensor parallelism {found.tp}, activations "
          f"{'computed again' if found.checkpointing else 'kept'}{', lean: see cost_job.py' * job.lean}\n")  # fmt: skip
    print(markdown(["", *PHASES, "step"], [["seconds", *phases(found), f"{found.seconds:.2f}"]]))
    return asdict(found) | {"seconds": found.seconds}


def main(argv: list[str]) -> None:
    """Exit codes: 0; 2 for bad input, with one line on stderr."""
    with one_line_errors():
        args = tyro_cli(Arguments, argv, prog="cost_report.py", description=__doc__.splitlines()[0])
        if args.json is not None and not args.json.absolute().parent.is_dir():
            raise UsageError(f"--json {args.json}: its folder does not exist")
        if args.model and args.write:
            raise UsageError("--write: the page holds all tables; leave --model out")
        document: dict[str, Any] = {"benchmark": "cost_report", "measured": False}
        if args.model:
            document["step"] = one_step(args)
        else:
            tables = {name: make() for name, make in TABLES.items()}
            for name, table in tables.items():
                print(f"\n## {name}\n\n{table}")
            document["steps"] = [
                {"scaling": make.__name__, "model": model, "gpus": gpus, "step": found and asdict(found)}
                for make in (weak, strong) for model in MODELS for gpus in GPUS
                for found in [step(make(model, gpus))]
            ]  # fmt: skip
            if args.write:
                PAGE.write_text(fill(PAGE.read_text(), tables))
    finish(document, args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
