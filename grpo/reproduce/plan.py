"""The flags, the runs that they ask for, and what is left to do of them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from tyro.conf import FlagCreatePairsOff, arg

from grpo import config, run_folder
from grpo.compare import load_report
from grpo.config import HELD_OUT_SIZE, Config, UsageError, tyro_cli
from grpo.reproduce.processes import Chain, Stage, rows_in
from grpo.resume import check_evaluation

ROOT = Path(__file__).parents[2]  # of train.py and eval.py
OURS = {"model": "models", "beta": "betas", "seed": "seeds"}
"""Flags of train.py that this command sets itself, and its own flag for each."""


@dataclass(frozen=True)
class Arguments:
    """The KL-anchor ablation: train with every beta and seed, evaluate all and the base on the same scenarios, write a
    report with verdicts. All other flags go to train.py: --recipe clarify-run4, --num-steps 100, --learning-rate 2e-4.
    The same command once more goes on where it was stopped."""

    models: Annotated[tuple[str, ...], arg(metavar="MODEL ...", help_behavior_hint="")] = ()
    """Bases: `tiny`, causal LM folders or hub ids; several make a size ablation. Default: the recipe's."""
    betas: Annotated[tuple[float, ...], arg(metavar="FLOAT ...")] = (0.0, 0.2)
    """KL coefficients."""
    seeds: Annotated[tuple[int, ...], arg(metavar="INT ...")] = (0, 1, 2)
    """Training seeds. With fewer than two nothing can be told."""
    eval_limit: int = HELD_OUT_SIZE
    """Held-out scenarios that everything is evaluated on."""
    output_dir: Path = Path("results")
    """Where the report goes."""
    runs_dir: Path = Path("runs/reproduce")
    """Where the runs go."""
    jobs: int = 0
    """Processes side by side. 0: one per core for the bundled policy on a CPU, else one."""
    threads: int = 0
    """CPU threads of each process (results depend on it in the last bits, and so in what is sampled). 0: one for the
    bundled policy on a CPU, else PyTorch's choice."""
    overwrite: FlagCreatePairsOff[bool] = False
    """Allow a report of other settings, or of more runs, to be replaced."""


@dataclass(frozen=True)
class Run:
    """One training run of the ablation."""

    name: str
    folder: Path
    settings: Config
    flags: list[str] = field(repr=False)
    """What train.py gets."""
    eval_limit: int

    @property
    def trained(self) -> bool:
        """`final/` appears whole, after the last step."""
        return (self.folder / "final" / "config.json").exists()

    @property
    def evaluation(self) -> Path:
        """The report of eval.py on its final model."""
        return self.folder / f"evaluation-{self.eval_limit}.json"

    @property
    def divergence(self) -> Path:
        """What grpo.divergence measured on its final model."""
        return self.folder / f"divergence-{self.eval_limit}.json"

    @property
    def complete(self) -> bool:
        """Nothing is left to do."""
        return self.trained and self.evaluation.exists() and self.divergence.exists()


def parse(args: list[str]) -> tuple[Arguments, list[str]]:
    """The command's own flags, and those for train.py. Raises UsageError."""
    ours, extra = tyro_cli(Arguments, args, prog="python -m grpo.reproduce", return_unknown_args=True)
    given = {word.split("=")[0] for word in extra}
    for name, own in OURS.items():
        if f"--{name}" in given:
            raise UsageError(f"--{name}: this command runs several; give --{own}")
    if "--resume" in given:
        raise UsageError("--resume: not needed, the same command goes on where it was stopped")
    if os.environ.get("BETA"):
        raise UsageError(f"BETA={os.environ['BETA']}: this command runs several; unset it and give --betas")
    for name in ("models", "betas", "seeds"):
        values = getattr(ours, name)
        texts = {f"{value:g}" if name == "betas" else value for value in values}  # as in the folders' names
        if len(texts) < len(values) or (not values and name != "models"):
            raise UsageError(f"--{name} {' '.join(map(str, values))}: must be one or more, each once")
    if not 1 <= ours.eval_limit <= HELD_OUT_SIZE:
        raise UsageError(f"--eval-limit {ours.eval_limit}: must be from 1 to {HELD_OUT_SIZE}")
    for name in ("jobs", "threads"):
        if getattr(ours, name) < 0:
            raise UsageError(f"--{name} {getattr(ours, name)}: must be 0 or more")
    return ours, extra


def make_runs(args: Arguments, extra: list[str]) -> dict[str, list[Run]]:
    """Model -> its runs, seeds outermost: what is finished early on is of every beta.

    Raises:
        UsageError: settings that cannot be, or other ones than those of a run that is there; its name is said.
    """
    models = args.models or (config.parse(extra).model.model,)
    short = [Path(model).name for model in models]
    if len(set(short)) < len(short):
        raise UsageError(f"--models {' '.join(models)}: must end in different names, which the runs' folders bear")
    runs: dict[str, list[Run]] = {model: [] for model in models}
    for model in models:
        flags = {beta: [*extra, "--model", model, "--beta", str(beta), "--eval-limit", "0"] for beta in args.betas}
        parsed = {beta: config.parse(of_beta) for beta, of_beta in flags.items()}
        for seed in args.seeds:
            for beta in args.betas:
                name = f"{Path(model).name}-beta{beta:g}-seed{seed}"
                folder = args.runs_dir / name
                settings = parsed[beta].with_values({"seed": seed, "output_dir": str(folder)})
                config.validate(settings)
                run = Run(name, folder, settings, [*flags[beta], "--seed", str(seed)], args.eval_limit)
                refuse_changes(run)
                runs[model].append(run)
    return runs


def refuse_changes(run: Run) -> None:
    """Raises UsageError where the run's folder holds one of other settings."""
    if not (run.folder / "config.json").exists():
        return
    stored = run_folder.stored_config(run.folder)
    try:
        config.refuse_changes(stored, run.settings.with_values({"output_dir": stored.run.output_dir}))
    except UsageError as error:
        raise UsageError(f"{run.folder}: {error}; give another --runs-dir, or move it away") from None


def base_evaluation(args: Arguments, model: str) -> Path:
    """The file of the base's evaluation."""
    return args.runs_dir / f"{Path(model).name}-base-{args.eval_limit}.json"


def make_chains(args: Arguments, runs: dict[str, list[Run]]) -> list[Chain]:
    """What is left to do, with nothing in `stages` where all is done. Raises UsageError for an evaluation that is not
    one of these settings."""
    chains = []
    for model, of_model in runs.items():
        settings, path = of_model[0].settings, base_evaluation(args, model)
        chain = Chain(f"{Path(model).name} base", [], args.runs_dir / f"{Path(model).name}-base.log")
        if not kept(path, settings, args):
            chain.stages.append(evaluate_stage(args, settings, model, path))
        elif load_report(path)["model"] != model:
            raise UsageError(f"{path}: not of --models {model}; give another --runs-dir, or move it away")
        chains.append(chain)
        chains += [run_chain(args, model, run) for run in of_model]
    return chains


def run_chain(args: Arguments, model: str, run: Run) -> Chain:
    """Training, evaluation and divergence of a run, as far as they are not done."""
    chain = Chain(run.name, [], run.folder.with_name(f"{run.name}.log"))
    final = str(run.folder / "final")
    if not run.trained:
        started = (run.folder / "config.json").exists()
        where = ["--resume" if started else "--output-dir", str(run.folder)]
        history = run.folder / "log_history.json"
        done, label = rows_in(history), "training (goes on)" if started else "training"
        units = max(1, run.settings.optim.num_steps - done)
        chain.stages.append(Stage(label, [str(ROOT / "train.py"), *run.flags, *where], units, history, done))
    if not kept(run.evaluation, run.settings, args):
        chain.stages.append(evaluate_stage(args, run.settings, final, run.evaluation))
    if not run.divergence.exists():
        command = ["-m", "grpo.divergence", final, "--base", model, "--limit", str(args.eval_limit)]
        command += ["--max-completion-len", str(run.settings.rollout.max_completion_len)]
        command += ["--device", run.settings.model.device, "--output", str(run.divergence)]
        chain.stages.append(Stage("KL to the base", command, playing(args, run.settings, 1)))
    return chain


def kept(path: Path, settings: Config, args: Arguments) -> bool:
    """Is this evaluation there? Raises UsageError for one of other settings."""
    if path.exists():
        check_evaluation(path, settings.with_values({"eval_limit": args.eval_limit}))
    return path.exists()


def evaluate_stage(args: Arguments, settings: Config, model: str, path: Path) -> Stage:
    """eval.py on the scenarios that everything is evaluated on, sampled and greedy."""
    flags = {
        "model": model,
        "limit": args.eval_limit,
        "rubric": settings.eval.rubric,
        "temperature": settings.eval.eval_temperature,
        "max-completion-len": settings.rollout.max_completion_len,
        "engine": settings.rollout.engine,
        "device": settings.model.device,
        "dtype": settings.model.dtype,
        "output": path,
    }
    if settings.rollout.env_url:
        flags["env-url"] = settings.rollout.env_url
    command = [str(ROOT / "eval.py"), "--also-greedy"]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return Stage("evaluation", command, playing(args, settings, 2))


def playing(args: Arguments, settings: Config, times: int) -> int:
    """About how many training steps playing all scenarios `times` times takes: half of a step is its update."""
    return max(1, times * args.eval_limit // (2 * settings.rollout.prompts_per_step * settings.rollout.num_generations))


def side_by_side(args: Arguments, runs: dict[str, list[Run]]) -> tuple[int, int]:
    """(processes at a time, threads of each; 0: PyTorch's choice)."""
    device = next(iter(runs.values()))[0].settings.model.device
    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    small = on_cpu and set(runs) == {"tiny"}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return args.jobs or (cores if small else 1), args.threads or int(small)
