"""A training run from flags to folder: header, evaluation, steps, checkpoints, final model, evaluation, plots."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from env.prompts import TOOLS, first_messages
from grpo import checkpoint, compare, config, console, evaluate, plots, run_folder
from grpo.batching import Packing, common_prefix
from grpo.chat import ChatTokens
from grpo.config import Config, UsageError
from grpo.engines import Engine
from grpo.engines.torch_engine import TorchEngine
from grpo.engines.vllm_memory import make_plan
from grpo.guard import Guard
from grpo.head import describe
from grpo.metrics import LogHistory, step_metrics, write_completions
from grpo.model import Policy, enable_packing, fingerprint, load_policy, one_line
from grpo.reference import Reference
from grpo.sampling import SamplingConfig
from grpo.trainer import Trainer
from scenarios.generator import held_out
from scenarios.schema import Scenario

PROMPT_MARGIN = 64  # tokens


def start(args: list[str]) -> None:
    """`train.py ARGS`: a new run, or with `--resume FOLDER` the rest of one.

    Raises:
        UsageError: bad flags or values, a folder that must not be touched, a model that cannot be loaded. Nothing has
            been written then.
    """
    resume = config.flag_value(args, "resume")
    with config.naming_variables(args):
        if resume is not None:
            if not resume:
                raise UsageError("--resume: must name the folder of a run")
            folder = Path(resume)
            stored = run_folder.stored_config(folder)
            settings = config.parse(args, defaults=stored)
            config.refuse_changes(stored, settings)
            checkpoint.newest(folder)
        else:
            settings = config.parse(args)
            folder = run_folder.choose(settings)
        train(settings, folder, resumed=resume is not None)


def train(settings: Config, folder: Path, resumed: bool = False) -> None:
    """Run (or finish) the training described by `settings` in `folder`."""
    policy = load_policy(settings.model)
    kernels = describe(policy, settings.loss)  # now, as it refuses what cannot run here
    chat = make_chat(policy)
    engine = make_engine(settings, policy, chat, held_out(None))
    packing = make_packing(settings, policy, chat, engine.max_context)
    reference = Reference(settings.model, packing, engine.max_context) if settings.loss.beta > 0 else None
    trainer = Trainer(settings, policy, engine, chat, reference, packing)
    base = fingerprint(policy)
    if resumed:
        run_folder.check_base(folder, base)
        done = checkpoint.load(checkpoint.newest(folder), policy.model, trainer.optimizer)
    else:
        done = 0
        run_folder.create(folder, settings, base)
    console.print_header(
        header(settings, policy, reference, kernels, packing, folder, done, engine.description),
        title="GRPO: ask before you act",
    )
    for line in config.cautions(settings):
        print(f"warning: {line}", file=sys.stderr, flush=True)

    before = evaluated(settings, trainer, folder / "eval_before.json", policy.name)
    history = LogHistory(folder / "log_history.json")
    history.truncate_to(done)
    total = settings.optim.num_steps
    guard = Guard(folder, settings, policy, engine)
    with console.StepProgress(total, done) as progress, interruptible() as interrupted:
        for index in range(done, total):
            with guard.watching(index + 1):
                result = trainer.step(index)
            row = step_metrics(
                result.groups,
                step=index + 1,
                losses=result.losses,
                seconds=result.seconds,
                num_tokens_before=history.rows[-1]["num_tokens"] if history.rows else 0,
            )
            write_completions(folder / "completions", index + 1, result.groups, result.advantages)
            history.append(row)
            progress.update(row)
            stopped = guard.after(history.rows, result.groups)
            last = index + 1 == total or bool(interrupted) or stopped is not None
            if last or (settings.run.save_every and (index + 1) % settings.run.save_every == 0):
                checkpoint.save(folder, index + 1, policy.model, trainer.optimizer, settings.run.keep_checkpoints)
            if stopped:
                raise stopped
            if interrupted:
                print(f"\nto continue: python train.py --resume {folder}")
                raise KeyboardInterrupt

    save_final(policy, folder / "final")
    after = evaluated(settings, trainer, folder / "eval_after.json", str(folder / "final"))
    comparison = compare.compare([before, after], names=["base", "trained"]) if before and after else None
    plots.plot_run(folder / "plots", history.rows, comparison)
    console.print_outcome(comparison, artefacts(folder))


@contextlib.contextmanager
def interruptible() -> Iterator[list[int]]:
    """Ctrl-C lets the step finish, so that a checkpoint can be written: the list is not empty then. A second one
    stops at once."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def on_signal(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        print("\nfinishing this step, then writing a checkpoint; Ctrl-C again stops at once", flush=True)

    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, previous)


def make_chat(policy: Policy) -> ChatTokens:
    """Messages to ids with the environment's tools; training and evaluation render the same prompts with it."""
    rows = policy.model.get_input_embeddings().num_embeddings
    return chat_tokens(policy.name, policy.tokenizer, policy.model.generation_config, rows)


def chat_tokens(name: str, tokenizer: Any, generation_config: Any, vocab_size: int | None = None) -> ChatTokens:
    """The same from its parts, for a model that is loaded elsewhere (its vocabulary then counts as large enough)."""
    try:
        return ChatTokens(tokenizer, TOOLS, generation_config, vocab_size)
    except UsageError:
        raise
    except Exception as error:  # whatever a broken tokenizer or template raises
        raise UsageError(f"--model {name}: its tokenizer or chat template fails ({one_line(error)})") from error


def make_engine(settings: Config, policy: Policy, chat: ChatTokens, scenarios: Sequence[Scenario]) -> Engine:
    """The sampler: `--engine`, or vLLM on a GPU where it is installed, else the one in process.

    An episode has room for the longest first prompt of `scenarios` (and a little more: training draws others of the
    same kind) plus its token budget, as far as the model's positions go.
    """
    rollout = settings.rollout
    prompts = [chat.first_prompt(first_messages(scenario)) for scenario in scenarios]
    longest = max(map(len, prompts))
    context = rollout.max_context or longest + PROMPT_MARGIN + rollout.max_completion_len
    positions = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions < longest + PROMPT_MARGIN:
        raise UsageError(
            f"--model {policy.name}: {positions} positions are too few for first prompts of {longest} tokens"
        )
    if rollout.max_context and not longest < context <= (positions or context):
        raise UsageError(
            f"--max-context {context}: must be above the longest first prompt, {longest} tokens"
            + (f", and at most the model's {positions} positions" if positions else "")
        )
    context = min(context, positions or context)
    options: dict[str, Any] = dict(
        slots=rollout.max_concurrent,
        seed=settings.run.seed,
        sampling=SamplingConfig(rollout.temperature, rollout.top_p),
    )
    on_gpu = policy.device.type == "cuda" and importlib.util.find_spec("vllm") is not None
    if rollout.engine == "vllm" or (rollout.engine == "auto" and on_gpu):
        from grpo.engines.vllm_engine import VllmEngine

        plan = make_plan(settings, policy, context, longest)
        return VllmEngine(policy, chat.eos_ids, plan, canary=prompts[0], **options)
    return TorchEngine(
        policy.model, chat.eos_ids, max_context=context, device=policy.device, dtype=policy.dtype, **options
    )


def make_packing(settings: Config, policy: Policy, chat: ChatTokens, max_context: int) -> Packing:
    """How this policy's tokens are laid out; switches its model to tree attention where that works."""
    if settings.optim.packing == "padded":
        return Packing(packed=False, reason="asked for")
    reason = enable_packing(policy, max_context)
    if reason:
        return Packing(packed=False, reason=reason)
    prompts = [chat.first_prompt(first_messages(scenario)) for scenario in held_out(None)]
    return Packing(prefix=common_prefix(prompts))


def evaluated(settings: Config, trainer: Trainer, path: Path, name: str) -> dict[str, Any] | None:
    """Evaluate the policy as it is and write `path`; a resumed run reads what is there already."""
    if settings.eval.eval_limit == 0:
        return None
    if path.exists():
        return compare.load_report(path)
    scenarios = held_out(settings.eval.eval_limit)
    with console.episode_progress(f"evaluating {name}", 2 * len(scenarios)) as progress:
        report = evaluate.evaluate_model(
            trainer.engine,
            trainer.chat,
            scenarios,
            model=name,
            rubric=settings.eval.rubric,
            temperature=settings.eval.eval_temperature,
            max_completion_len=settings.rollout.max_completion_len,
            also_greedy=True,
            progress=progress,
        )
    run_folder.write_json(path, report)
    return report


def save_final(policy: Policy, folder: Path) -> None:
    """The trained model as a Hugging Face folder, with tokenizer, chat template and generation settings."""
    aside = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    policy.model.save_pretrained(aside)
    policy.tokenizer.save_pretrained(aside)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)


def header(
    settings: Config,
    policy: Policy,
    reference: Reference | None,
    kernels: str,
    packing: Packing,
    folder: Path,
    done: int,
    engine: str = TorchEngine.description,
) -> dict[str, str]:
    """What is about to run, for the panel at the start."""
    rollout, optim = settings.rollout, settings.optim
    loss = settings.loss
    estimator = "k1" if loss.kl_in == "reward" else loss.kl_estimator
    anchor = f"beta {loss.beta:g}, {estimator} in the {loss.kl_in}, frozen {policy.name}"
    rows = {
        "recipe": settings.run.recipe,
        "model": f"{policy.name}: {policy.num_parameters / 1e6:.2f}M parameters",
        "device": f"{policy.device}, {torch.get_num_threads()} threads, {str(policy.dtype).removeprefix('torch.')}",
        "engine": engine,
        "loss": f"{loss.loss_type} by {kernels}",
        "reference": anchor if reference else "none (beta 0)",
        "tokens": f"packed: each unique token once, {len(packing.prefix)} of them in every prompt"
        if packing.packed
        else f"padded rows ({packing.reason})",
        "a step": f"{rollout.prompts_per_step} scenarios x {rollout.num_generations} episodes, "
        f"{optim.num_iterations} update(s), up to {rollout.max_completion_len} tokens an episode",
        "steps": f"{optim.num_steps}" + (f", {done} done" if done else ""),
        "folder": str(folder),
    }
    return rows


def artefacts(folder: Path) -> dict[str, str]:
    """Where everything is, for the end of the run."""
    entries = {
        "trained model": "final",
        "evaluations": "eval_before.json, eval_after.json",
        "log": "log_history.json",
        "episodes": "completions",
        "plots": "plots",
        "to continue": "checkpoints",
    }
    names = {label: [name for name in text.split(", ") if (folder / name).exists()] for label, text in entries.items()}
    return {label: ", ".join(str(folder / name) for name in found) for label, found in names.items() if found}
