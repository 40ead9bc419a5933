"""A training run from flags to folder: header, evaluation, steps, checkpoints, final model, evaluation, plots."""

from __future__ import annotations

import contextlib
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch

from env.prompts import TOOLS, first_messages
from grpo import card, checkpoint, compare, config, console, distributed, evaluate, plots, resume, run_folder
from grpo.batching import Packing, common_prefix
from grpo.chat import ChatTokens
from grpo.config import Config, RunStopped, UsageError
from grpo.engines import Engine
from grpo.engines.choice import check_processes, make_engine
from grpo.engines.torch_engine import TorchEngine
from grpo.engines.vllm_tensors import named_weights
from grpo.environment import environment, sessions_needed
from grpo.files import ASIDE, commit_folder
from grpo.guard import Guard
from grpo.head import describe
from grpo.lora import adapter_weights, save_adapter, saved_buffers
from grpo.metrics import LogHistory, last_num_tokens, step_metrics
from grpo.model import Policy, enable_packing, fingerprint, load_policy, one_line
from grpo.reference import Reference
from grpo.rehearsal import rehearse
from grpo.saver import Saver
from grpo.shared_errors import shared
from grpo.signals import Signals
from grpo.trackers import Trackers, require_installed, tracking
from grpo.trainer import StepResult, Trainer
from scenarios.generator import held_out


def start(args: list[str]) -> None:
    """`train.py ARGS`: a new run, or with `--resume FOLDER` the rest of one.

    Raises:
        UsageError: bad flags or values, a folder that must not be touched, a model that cannot be loaded. Nothing has
            been written then.
        RunStopped: the run cannot go on; what it had saved stays.
    """
    resume_from = config.flag_value(args, "resume")
    with distributed.session(), config.naming_variables(args), contextlib.ExitStack() as stack:
        if resume_from is not None:
            if not resume_from:
                raise UsageError("--resume: must name the folder of a run")
            folder = Path(resume_from)
            stored = run_folder.stored_config(folder)
            settings = config.parse(args, defaults=stored)
            config.refuse_changes(stored, settings)
            require_installed(settings.run.report_to)
            distributed.first(stack.enter_context, run_folder.locked(folder, "--resume"))
            restart = distributed.first(resume.find_restart, folder, settings)
        else:
            settings = config.parse(args)
            require_installed(settings.run.report_to)
            folder = distributed.first(run_folder.choose, settings)
            restart = None
        train(settings, folder, restart)


def train(settings: Config, folder: Path, resumed: resume.Restart | None = None) -> None:
    """Run the training described by `settings` in `folder`, or the rest of it."""
    with Signals(tell=distributed.is_first()) as signals, contextlib.ExitStack() as stack:
        trainer, kernels = make_trainer(settings)
        policy, restart = trainer.policy, resumed or resume.Restart(None, 0, [])
        base, machine = fingerprint(policy), describe_machine(policy)
        if resumed:
            run_folder.check_base(folder, base)
        distributed.first(require_space, settings, folder, policy, restart.done)
        if not resumed:
            distributed.first(stack.enter_context, run_folder.locked(folder, "--output-dir"))
            distributed.first(run_folder.create, folder, settings, base, machine)
        rows = header(
            settings, policy, trainer.reference, kernels, trainer.packing, folder, restart.done,
            trainer.engine.description,
        )  # fmt: skip
        console.print_header(rows, title="GRPO: ask before you act")
        for line in config.cautions(settings):
            resume.say(f"warning: {line}")
        for line in run_folder.changed_machine(folder, machine):
            resume.say(f"warning: {line} since this run started: it goes on, but not bit for bit")
        trackers = stack.enter_context(tracking(settings, folder, restart.done)) if distributed.is_first() else None

        if policy.device.type == "cuda":
            resume.say(f"worst-case step: {rehearse(trainer, held_out(None))}")
        # Before the checkpoint is loaded: until then the policy is the base.
        before = evaluated(settings, trainer, folder / "eval_before.json", policy.name)
        if trackers:
            trackers.evaluation("before", before)
            trackers.catch_up()
        restart.apply(folder, trainer)
        history = run_steps(settings, trainer, folder, restart.done, signals, trackers)

        total = settings.optim.num_steps
        with run_folder.writing(folder, total), distributed.whole(policy.model):
            distributed.first(save_final, policy, folder / "final")
        after = evaluated(settings, trainer, folder / "eval_after.json", str(folder / "final"), restart.done < total)
        if not trackers or not history:
            return
        trackers.evaluation("after", after)
        comparison = compare.compare([before, after], names=["base", "trained"]) if before and after else None
        with run_folder.writing(folder, total):
            card.write(card.Run(folder))
            plots.plot_run(folder / "plots", history.rows, comparison)
        console.print_outcome(comparison, artefacts(folder))


def run_steps(
    settings: Config, trainer: Trainer, folder: Path, done: int, signals: Signals, trackers: Trackers | None
) -> LogHistory | None:
    """The steps from number `done`, each recorded, logged, and every `save_every`th one saved.

    Log and trackers are those of the first process; the others have None.

    Raises:
        SystemExit: after a signal, with a checkpoint.
        RunStopped: a full disk, or too many dropped steps.
    """
    total = settings.optim.num_steps
    with run_folder.writing(folder, done):
        history = LogHistory(folder / "log_history.json") if distributed.is_first() else None
        saver = Saver(folder, settings, trainer, history, done)
        distributed.first(saver.begin)
    guard = Guard(folder, settings, trainer.policy, trainer.engine)
    with console.StepProgress(total, done) as progress, signals.finish_first():

        def log(step: int, result: StepResult) -> RunStopped | None:
            """Write down a finished step. Why the run must end now, or None."""
            assert history and trackers  # the first process's
            row = step_metrics(
                result.groups,
                step=step,
                losses=result.losses,
                seconds=result.seconds,
                num_tokens_before=last_num_tokens(history.rows),
            )
            saver.log(row, result)
            trackers.step(history.rows[-1])
            progress.update(row)  # standard output may be a file on the same disk
            return guard.after(history.rows, result.groups)

        trainer.before = distributed.first(resume.recorded_before, saver.recorder, done)
        for index in range(done, total):
            step = index + 1
            groups = distributed.first(resume.recorded, saver.recorder, step)
            with guard.watching(step):
                result = trainer.step(index, groups, on_sampled=partial(saver.record, step))
            with run_folder.writing(folder, step):
                with distributed.whole(trainer.policy.model, when=result.losses["skipped_updates"] > 0):  # for a dump
                    stopped = distributed.first(log, step, result)
                interrupted = any_received(signals)
                if step == total or stopped or interrupted or saver.due(step):
                    saver.checkpoint(step)
            if stopped:
                raise shared(stopped)
            if interrupted:
                break
    if any_received(signals):
        print(f"\nto continue: python train.py --resume {folder}")
        raise shared(SystemExit(signals.exit_code))
    return history


def any_received(signals: Signals) -> bool:
    """Has any process got a signal? All of them count as having got it then, and stop at the same step."""
    signals.received = distributed.most(signals.received or 0) or None
    return signals.received is not None


def make_trainer(settings: Config, engine: Engine | None = None) -> tuple[Trainer, str]:
    """Policy, sampler (`engine`, or the one that is asked for), reference and optimiser of a run, and what to call the
    kernels. Raises UsageError."""
    check_processes(settings.rollout)
    env_factory = environment(settings.rollout.env_url, sessions_needed(settings))
    policy = load_policy(settings.model)
    kernels = describe(policy, settings.loss)  # now, as it refuses what cannot run here
    chat = make_chat(policy)
    engine = engine or make_engine(settings, policy, chat, held_out(None))
    packing = make_packing(settings, policy, chat, engine.max_context)
    reference = Reference(settings.model, packing, engine.max_context, policy) if settings.loss.beta > 0 else None
    for sharded in {id(each.model): each for each in (policy, reference and reference.policy) if each}.values():
        distributed.shard(sharded.model, sharded.device)
    return Trainer(settings, policy, engine, chat, reference, packing, env_factory), kernels


def describe_machine(policy: Policy) -> dict[str, Any]:
    """What the last bits of a number depend on besides settings and versions."""
    device = policy.device.type if distributed.size() > 1 else str(policy.device)
    about = {"device": device, "dtype": str(policy.dtype), "threads": torch.get_num_threads()}
    return about | {"processes": distributed.size()}


def require_space(settings: Config, folder: Path, policy: Policy, done: int) -> None:
    """Raises UsageError where the disk has no room for the checkpoints that the run will hold at once."""
    keep, every, left = settings.run.keep_checkpoints, settings.run.save_every, settings.optim.num_steps - done
    saves = -(-left // every) if every else min(left, 1)
    there = len(checkpoint.finished(folder))
    number = max(0, min(keep + 1, there + saves) - there)
    needed = number * checkpoint.size(policy.model) + checkpoint.size(policy.model) // 3
    what = f"{number} more checkpoints at a time and the final model; --keep-checkpoints is {keep}"
    run_folder.require_space(folder, needed, what, "--resume" if done else "--output-dir")


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


def make_packing(settings: Config, policy: Policy, chat: ChatTokens, max_context: int) -> Packing:
    """How this policy's tokens are laid out; switches its model to tree attention where that works."""
    if settings.optim.packing == "padded":
        return Packing(packed=False, reason="asked for")
    reason = enable_packing(policy, max_context)
    if reason:
        return Packing(packed=False, reason=reason)
    prompts = [chat.first_prompt(first_messages(scenario)) for scenario in held_out(None)]
    return Packing(prefix=common_prefix(prompts))


def evaluated(settings: Config, trainer: Trainer, path: Path, name: str, again: bool = False) -> dict[str, Any] | None:
    """Evaluate the policy as it is and write `path`; a resumed run reads what is there already, unless `again`."""
    if settings.eval.eval_limit == 0:
        return None
    if distributed.first(path.exists) and not again:
        return distributed.first(compare.load_report, path)
    scenarios = held_out(settings.eval.eval_limit)
    progress_bar = console.episode_progress(f"evaluating {name}, sampled and greedy", 2 * len(scenarios))
    with distributed.awake(trainer.engine, trainer.policy.model), progress_bar as progress:
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
            env_factory=trainer.env_factory,
        )
    with run_folder.writing(path.parent, 0 if path.name == "eval_before.json" else settings.optim.num_steps):
        distributed.first(run_folder.write_json, path, report)
    return report


def save_final(policy: Policy, folder: Path) -> None:
    """The trained model as a Hugging Face folder, with tokenizer, chat template and generation settings.

    Adapters are merged into it, and saved by themselves beside it, in `adapter`. A card that was written by hand stays.
    """
    aside = folder.with_name(folder.name + ASIDE)
    shutil.rmtree(aside, ignore_errors=True)
    adapters = adapter_weights(policy.model)
    # A model's own `state_dict` knows nothing of adapters, and of a sharded model would be this process's part.
    parts = adapters or distributed.size() > 1
    state = dict(named_weights(policy.model)) | saved_buffers(policy.model) if parts else None
    policy.model.save_pretrained(aside, state_dict=state)
    if adapters:
        save_adapter(policy.model, aside / "adapter", policy.name)
    policy.tokenizer.save_pretrained(aside)
    if card.edited(folder / card.README):
        shutil.copy(folder / card.README, aside)
    commit_folder(aside, folder)


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
    threads = console.counted(torch.get_num_threads(), "thread")
    rank = settings.model.lora_rank
    lora = f", {policy.num_trained / 1e6:.2f}M of them trained (LoRA, rank {rank})" if rank else ""
    rows = {
        "recipe": settings.run.recipe,
        "model": f"{policy.name}: {policy.num_parameters / 1e6:.2f}M parameters" + lora,
        "device": f"{policy.device}, {threads}, {str(policy.dtype).removeprefix('torch.')}",
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
    if distributed.size() > 1:
        rows["processes"] = f"{distributed.size()}: weights, gradients, moments and reference sharded, groups dealt"
    if "none" not in settings.run.report_to:
        rows["trackers"] = ", ".join(settings.run.report_to)
    if rollout.env_url:
        rows["environment"] = rollout.env_url
    return rows


def artefacts(folder: Path) -> dict[str, str]:
    """Where everything is, for the end of the run."""
    entries = {
        "trained model": "final",
        "model card": "final/README.md",
        "evaluations": "eval_before.json, eval_after.json",
        "log": "log_history.json",
        "episodes": "completions",
        "plots": "plots",
        "trackers": "wandb, tensorboard",
        "to continue": "checkpoints",
    }
    names = {label: [name for name in text.split(", ") if (folder / name).exists()] for label, text in entries.items()}
    return {label: ", ".join(str(folder / name) for name in found) for label, found in names.items() if found}
