"""Train on a recorded rollout batch again, without an engine: `python -m grpo.replay RUN/rollouts/step-000012.json.gz`.

For debugging: what a step did, and which tensors were not finite in it. FILE is any rollout record: of a step
(`rollouts/`) or of one that was dropped (`dumps/`). Weights and optimiser are those that met the batch:

- a dump names a file of weights beside it;
- a run's own record is behind some checkpoint, or behind the base. Steps in between are trained first, on their own
  records, so that on the machine of the run the loss is the one in the log.

Nothing is written.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import tyro
from safetensors import SafetensorError

from grpo import checkpoint, hints, rollout_record, run_folder
from grpo.config import Config, UsageError, tyro_cli, validate
from grpo.console import run_entry
from grpo.engines import Engine
from grpo.invariants import BrokenInvariant
from grpo.lora import load_trained
from grpo.metrics import read_log
from grpo.rollout_record import DamagedRecord, Recorder, RolloutRecord
from grpo.run import describe_machine, make_trainer
from grpo.trainer import Trainer


@dataclass(frozen=True)
class Arguments:
    """Train on a recorded rollout batch again, without an engine, and show its loss and what was not finite."""

    file: Annotated[Path, tyro.conf.Positional]
    """A rollout record: RUN/rollouts/step-N.json.gz or RUN/dumps/step_N.json.gz."""
    device: str = "cpu"
    """Where to compute."""
    weights: str = ""
    """A checkpoint's folder, a .safetensors file, or `base`. Default: those that met the batch."""


@dataclass
class NoEngine:
    """Stands where a trainer has its sampler, when there is nothing to sample."""

    max_context: int
    description = "none"

    def wake(self) -> None:
        """Nothing to do."""

    weights_changed = sleep = wake


class Probe:
    """Names of tensors that were not finite: parameters before the step, module outputs and gradients in it."""

    def __init__(self, model: torch.nn.Module):
        self.parameters = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
        self.outputs: dict[str, None] = {}  # in the order of the forward pass
        self.gradients: dict[str, None] = {}
        for name, module in model.named_modules():
            module.register_forward_hook(self._see_output(name or type(model).__name__))
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            # Before clipping, which spreads one NaN to every gradient.
            parameter.register_post_accumulate_grad_hook(self._see_gradient(name))

    def _see_output(self, name: str) -> Any:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            values = output if isinstance(output, (tuple, list)) else [output]
            for value in values.values() if isinstance(values, Mapping) else values:
                value = getattr(value, "last_hidden_state", value)
                if isinstance(value, torch.Tensor) and value.is_floating_point() and not torch.isfinite(value).all():
                    self.outputs[name] = None

        return hook

    def _see_gradient(self, name: str) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                self.gradients[name] = None

        return hook


@dataclass(frozen=True)
class Replayed:
    """What a replay found. `losses` are the log's names and values, `logged` the log's line or None."""

    step: int
    weights: str
    losses: dict[str, float]
    logged: Mapping[str, Any] | None
    not_finite: dict[str, list[str]]
    broken: str | None


def replay(file: Path, device: str = "cpu", weights: str = "") -> Replayed:
    """Train on the batch in `file` once more.

    Raises:
        UsageError: no rollout record; settings of another version; weights that are not there or do not fit.
    """
    step, record, trainer, used = prepare(file, device, weights)
    probe = Probe(trainer.policy.model)
    losses, broken = {}, None
    try:
        losses = trainer.step(step - 1, record.groups).losses
    except BrokenInvariant as error:
        broken = str(error)
    episodes = [episode for group in record.groups for episode in group.episodes]
    not_finite = {
        "sampler log-probs of episodes": [
            str(i) for i, e in enumerate(episodes) if not torch.isfinite(torch.tensor(e.sampler_logprobs)).all()
        ],
        "weights before the step": probe.parameters,
        "outputs of modules, first one first": list(probe.outputs),
        "gradients": list(probe.gradients),
        "weights after the step": [
            name for name, p in trainer.policy.model.named_parameters() if not torch.isfinite(p).all()
        ],
    }
    rows = read_log(file.absolute().parent.parent / "log_history.json")
    logged = next((row for row in rows if row["step"] == step), None)
    return Replayed(step, used, losses, logged, {k: v for k, v in not_finite.items() if v}, broken)


def prepare(file: Path, device: str = "cpu", weights: str = "") -> tuple[int, RolloutRecord, Trainer, str]:
    """A trainer that is where it met the batch in `file`: (step, record, trainer, which weights it has).

    Raises UsageError as `replay` does.
    """
    step, record, settings = open_record(file, device)
    lengths = [len(e.prompt_ids) + len(e.completion_ids) for group in record.groups for e in group.episodes]
    trainer, _ = make_trainer(settings, cast(Engine, NoEngine(max(lengths, default=0))))
    return step, record, trainer, load_weights(trainer, file, record, weights)


def open_record(file: Path, device: str) -> tuple[int, RolloutRecord, Config]:
    """A record of a run's step, and the run's settings as they are on `device`.

    Raises:
        UsageError: not there, no rollout record, without a step or settings, or settings of another version.
    """
    try:
        record = rollout_record.load(file)
        return int(record.about["step"]), record, replay_settings(record.about["config"], device)
    except DamagedRecord as error:
        raise UsageError(str(error)) from error
    except UsageError as error:
        raise UsageError(f"{file}: of another version of this program ({error})") from error
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}{hints.record(file)}") from error
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"{file}: says nothing usable of its step and settings ({error})") from error


def replay_settings(values: Mapping[str, Any], device: str) -> Config:
    """The run's settings on `device`: kernels and type that it has not are left to `auto`. Raises UsageError."""
    settings = Config().with_values({k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    changes: dict[str, Any] = {"device": device, "engine": "torch", "output_dir": "", "resume": ""}
    changes |= {"env_url": "", "vllm_url": ()}
    if device == "cpu" and settings.model.impl in ("triton", "cuda"):
        changes["impl"] = "auto"
    settings = settings.with_values(changes)
    validate(settings)
    return settings


def load_weights(trainer: Trainer, file: Path, record: RolloutRecord, weights: str) -> str:
    """Bring the trainer to where it met the batch; what to tell the user about it. Raises UsageError."""
    if weights == "base":
        return "those of the base, as asked for"
    if weights:
        return _load_file(trainer, Path(weights))
    if record.about.get("weights"):
        return _load_file(trainer, file.parent / str(record.about["weights"]))
    run = file.absolute().parent.parent
    if (run / "config.json").is_file() and run_folder.stored(run).get("run_id") == record.about.get("run_id"):
        for line in run_folder.changed_machine(run, describe_machine(trainer.policy)):
            print(f"warning: {line} since the run: the last digits may differ", file=sys.stderr)
        return _repeat_steps(trainer, run, record)
    return "those of the base: the record does not lie in its run's folder (--weights names others)"


def _load_file(trainer: Trainer, path: Path) -> str:
    """Weights alone; a checkpoint's folder has the optimiser too."""
    model = trainer.policy.model
    if (path / checkpoint.MANIFEST).is_file():
        try:
            checkpoint.verify(path)
        except checkpoint.Damaged as error:
            raise UsageError(f"--weights: {error}") from error
        checkpoint.load(path, model, trainer.optimizer)
        return str(path)
    path = path / checkpoint.MODEL if path.is_dir() else path
    try:
        load_trained(model, path)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path}: not weights of {trainer.policy.name} ({reason}); --weights names others") from error
    trainer.moved = True  # without optimiser state the trainer would take them for the base's
    if trainer.config.optim.num_iterations == 1:
        return str(path)
    trainer.config = trainer.config.with_values({"num_iterations": 1})
    return f"{path}; one inner update, as the others depend on the optimiser's moments"


def _repeat_steps(trainer: Trainer, run: Path, record: RolloutRecord) -> str:
    """From the newest checkpoint before the step, or the base, over the recorded steps in between."""
    step, recorder = record.about["step"], Recorder(run, run_id=record.about["run_id"])
    done, origin = 0, "the base"
    for folder in reversed(checkpoint.finished(run)):
        if checkpoint.number(folder) >= step:
            continue
        try:
            checkpoint.verify(folder)
        except checkpoint.Damaged as error:
            print(f"warning: {error}", file=sys.stderr)
            continue
        checkpoint.load(folder, trainer.policy.model, trainer.optimizer)
        done, origin = checkpoint.number(folder) or 0, folder.name
        break
    for earlier in range(done + 1, step):
        try:
            groups = recorder.load(earlier)
        except DamagedRecord as error:
            raise UsageError(f"{error}; --weights names other weights than the step's own") from error
        if groups is None:
            trainer.moved = True
            return f"those of {origin}, not of step {step - 1}: {recorder.path(earlier)} is missing"
        print(f"step {earlier}: loss {trainer.step(earlier - 1, groups).losses['loss']:.9g}", flush=True)
    return f"those of {origin}{_and_steps(done + 1, step - 1)}"


def _and_steps(first: int, last: int) -> str:
    if last < first:
        return ""
    return f" and step {first}" if first == last else f" and steps {first} to {last}"


def show(replayed: Replayed) -> None:
    """Print it: a table of replayed and logged values, then what was not finite."""
    print(f"step {replayed.step}, weights: {replayed.weights}")
    if replayed.broken:
        print(f"broken invariant: {replayed.broken}")
    logged = replayed.logged or {}
    width = max(map(len, replayed.losses), default=0)  # names may be long; the table fits into 80 columns
    print(f"{'':{width}}  {'replayed':>16}  {'logged':>16}")
    for name, value in replayed.losses.items():
        there = logged.get(name)
        text = ("null" if name in logged else "") if there is None else f"{there:.9g}"
        print(f"{name:{width}}  {value:>16.9g}  {text:>16}")
    for what, names in replayed.not_finite.items():
        rest = f" and {len(names) - 8} more" if len(names) > 8 else ""
        print(f"not finite: {what}: {', '.join(names[:8])}{rest}")
    if not replayed.not_finite:
        print("every weight, module output and gradient was finite")


def main(args: list[str] | None = None) -> None:
    """The command line. Raises UsageError."""
    options = tyro_cli(Arguments, sys.argv[1:] if args is None else args, prog="python -m grpo.replay")
    show(replay(options.file, options.device, options.weights))


if __name__ == "__main__":
    run_entry(main)
