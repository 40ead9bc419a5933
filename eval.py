"""Evaluate a model or a scripted policy on held-out scenarios, or compare evaluations: `python eval.py --help`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from tyro.conf import FlagCreatePairsOff, arg

from env.policies import POLICIES
from env.prompts import first_messages
from grpo import run_folder
from grpo.config import RECIPES, Config, EvalConfig, UsageError, tyro_cli
from grpo.console import counted, episode_progress, print_comparison, print_report, run_entry, user_input
from grpo.environment import environment
from grpo.evaluate import EVAL_SEED, evaluate_model, evaluate_policy, file_hash, spread
from grpo.files import only_writer
from grpo.hints import did_you_mean
from grpo.sampling import SamplingConfig
from scenarios.generator import HELD_OUT_FILE, held_out
from scenarios.schema import Scenario, load_scenarios

if TYPE_CHECKING:  # scripted policies and comparisons need neither
    from grpo.chat import ChatTokens
    from grpo.engines import Engine
    from grpo.engines.server_engine import ServerEngine
    from grpo.evaluate_api import Kept

File = Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")]
Count = Annotated[int | None, arg(metavar="INT", help_behavior_hint="")]
Address = Annotated[str | None, arg(metavar="URL", help_behavior_hint="")]
Switch = FlagCreatePairsOff[bool]


@dataclass(frozen=True)
class Arguments:
    """Evaluate a model or a scripted policy on held-out scenarios, or compare evaluations."""

    model: str = "tiny"
    """`tiny` (bundled), a causal LM folder or hub id; or a scripted policy: `random`, `ask-all`, `guess`."""
    scenarios: File = None
    """Scenario file (JSON list; the published schema works too). Default: the bundled held-out file."""
    limit: Count = None
    """Play this many scenarios, spread over families and difficulties. Default: 50, or all of --scenarios."""
    full: Switch = False
    """All bundled held-out scenarios: 50 per family."""
    rubric: Annotated[Literal["card", "gated"] | None, arg(metavar="{card,gated}", help_behavior_hint="")] = None
    """The score to report; both are computed. Default: card; with --compare the one the files were made with."""
    temperature: float = EvalConfig.eval_temperature
    """Sampling temperature. 0: greedy."""
    top_p: float = 1.0
    """Nucleus sampling."""
    also_greedy: Switch = False
    """Play everything once more with greedy decoding and report it beside the sampled evaluation."""
    max_completion_len: Count = None
    """Tokens of an episode after its first prompt, replies included. Default: the training run's, or the recipe's."""
    seed: int = EVAL_SEED
    """Seed of the sampling, or of the scripted policy; the default is the one that training runs evaluate with."""
    output: File = None
    """Write the report as JSON, with every episode, to this file."""
    overwrite: Switch = False
    """Allow --output and --plot to replace a file."""
    engine: Literal["auto", "torch", "vllm"] = "auto"
    """Sampler. auto: vllm on a GPU where it is installed, else torch (in process)."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:1`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type. auto: float32 on a CPU, bfloat16 on a GPU."""
    vllm_url: Address = None
    """Ask a running `vllm serve` (or a server like it) at this address; --model names the model that it serves, whose
    tokenizer is read here. Training: train.py --vllm-url, docs/vllm_servers.md."""
    api_base: Address = None
    """Ask the OpenAI-compatible chat endpoint at this address; --model names the model there. The key is read from
    OPENAI_API_KEY. With --output, an evaluation that was stopped goes on where it was."""
    api_tools: Literal["native", "prompt"] = "native"
    """With --api-base: send the tools as such, or describe them in the system message."""
    api_extra: Annotated[str | None, arg(metavar="JSON", help_behavior_hint="")] = None
    """With --api-base: further fields of each request, such as '{"reasoning_effort": "low"}'."""
    concurrency: Count = None
    """With --api-base: episodes played at once. Default: 8."""
    env_url: Address = None
    """Play the episodes on the environment server at this address (`python -m env.server`), not in this process."""
    compare: Annotated[tuple[Path, ...] | None, arg(metavar="FILE FILE ...", help_behavior_hint="")] = None
    """Compare evaluation files, the base first; nothing is evaluated then."""
    plot: File = None
    """With --compare: the PNG of the changes against the base. Default: comparison.png beside the last file."""


def main() -> None:
    """Parse, check everything that can be wrong, then evaluate or compare."""
    args = tyro_cli(Arguments, sys.argv[1:], prog="eval.py")
    check(args)
    if args.compare is not None:
        compare_files(args)
    else:
        with output_held(args):
            evaluate(args)


def check(args: Arguments) -> None:
    """Raises UsageError before anything is loaded or written."""
    limits = {"limit": args.limit, "max-completion-len": args.max_completion_len, "concurrency": args.concurrency}
    for flag, value in limits.items():
        if value is not None and value < 1:
            raise UsageError(f"--{flag} {value}: must be at least 1")
    if not 0 <= args.temperature < float("inf"):
        raise UsageError(f"--temperature {args.temperature}: must be a finite number, 0 (greedy) or more")
    if not 0 < args.top_p <= 1:
        raise UsageError(f"--top-p {args.top_p}: must be in (0, 1]")
    if args.full and (args.scenarios or args.limit):
        raise UsageError("--full: plays the bundled held-out file as a whole; leave out --scenarios and --limit")
    if args.plot and args.compare is None:
        raise UsageError("--plot: needs --compare")
    if args.vllm_url is not None:
        check_served(args)
    check_endpoint(args)
    known = args.api_base or args.vllm_url or "/" in args.model or args.model in (*POLICIES, "tiny")
    if not known and not Path(args.model).exists() and (hint := did_you_mean(args.model, [*POLICIES, "tiny"])):
        raise UsageError(f"--model {args.model}: no such model or scripted policy{hint}")
    if args.env_url is not None and args.compare is not None:
        raise UsageError("--env-url: nothing is evaluated with --compare; leave it out")
    if args.compare is not None:
        if len(args.compare) < 2:
            raise UsageError("--compare: give at least two evaluation files, the base first")
        if args.output:
            raise UsageError("--output: nothing is evaluated with --compare; leave it out")
        if plot_of(args).suffix != ".png":
            raise UsageError(f"--plot {args.plot}: must end in .png")
        for path in args.compare:
            if not path.exists():
                raise UsageError(f"--compare {path}: No such file")
        check_writable("plot", plot_of(args), args.overwrite)


def check_served(args: Arguments, flag: str = "--vllm-url") -> None:
    """A server takes the place of a sampler here. Raises UsageError for flags that would have no effect."""
    for name, value in {"engine": args.engine, "device": args.device, "dtype": args.dtype}.items():
        if value != "auto":
            raise UsageError(f"--{name} {value}: is the server's choice with {flag}; leave it out")
    if args.compare is not None:
        raise UsageError(f"{flag}: nothing is evaluated with --compare; leave it out")
    if args.model in POLICIES:
        raise UsageError(f"{flag}: {args.model} is a scripted policy; give --model the model that is served")


def check_endpoint(args: Arguments) -> None:
    """--api-base, and what goes with it. Raises UsageError."""
    if args.api_base is None:
        given = {"api-tools": args.api_tools != "native", "api-extra": args.api_extra is not None,
                 "concurrency": args.concurrency is not None}  # fmt: skip
        for flag in (flag for flag, there in given.items() if there):
            raise UsageError(f"--{flag}: needs --api-base")
        return
    check_served(args, "--api-base")
    if args.vllm_url is not None:
        raise UsageError("--vllm-url: is another way to ask a server than --api-base; give one of them")
    if args.model == "tiny":
        raise UsageError("--api-base: give --model too, the name of the model there")
    extra_fields(args)


def extra_fields(args: Arguments) -> dict[str, Any]:
    """--api-extra, read. Raises UsageError."""
    try:
        fields = json.loads(args.api_extra or "{}")
        json.dumps(fields, allow_nan=False)  # which reading takes
    except ValueError as error:
        raise UsageError(f"--api-extra {args.api_extra}: not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise UsageError(f"--api-extra {args.api_extra}: must be a JSON object")
    return fields


def plot_of(args: Arguments) -> Path:
    """Where the plot of a comparison goes."""
    assert args.compare
    return args.plot or args.compare[-1].parent / "comparison.png"


def partial_of(output: Path) -> Path:
    """Where the finished episodes of a served model are kept until the report is written."""
    return output.with_name(output.name + ".partial")


@contextlib.contextmanager
def output_held(args: Arguments) -> Iterator[None]:
    """Within, --output can be written, and only by this process. Raises UsageError."""
    if args.output is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        with user_input(f"--output {args.output}"):
            check_free("output", args.output, args.overwrite)
            try:
                stack.enter_context(only_writer(args.output))
            except BlockingIOError as error:
                raise UsageError(f"--output {args.output}: another evaluation is writing to it") from error
        check_writable("output", args.output, args.overwrite)  # one may have ended just now
        if args.api_base is not None:
            check_writable("output", partial_of(args.output), overwrite=True)
        yield


def check_free(flag: str, path: Path, overwrite: bool) -> None:
    """Raises UsageError where the file must not be written, or has no folder."""
    if path.is_dir():
        raise UsageError(f"--{flag} {path}: is a folder; give a file")
    if path.exists() and not overwrite:
        raise UsageError(f"--{flag} {path}: exists; give another name, or --overwrite to replace it")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--{flag} {path}: its folder does not exist: mkdir -p {path.parent}")


def check_writable(flag: str, path: Path, overwrite: bool) -> None:
    """Raises UsageError where the file must not or cannot be written. No other process may be writing it."""
    with user_input(f"--{flag} {path}"):
        check_free(flag, path, overwrite)
        probe = path.with_name(f".{path.name}.tmp")  # the name that an atomic write needs
        probe.touch()
        probe.unlink()


def compare_files(args: Arguments) -> None:
    """Print the comparison table and draw the plot."""
    from grpo import plots
    from grpo.compare import compare, load_report, names_of

    assert args.compare
    reports = [load_report(path) for path in args.compare]
    names = names_of(reports, args.compare)
    comparison = compare(reports, rubric=args.rubric, names=names)
    plot = plot_of(args)
    with user_input(f"--plot {plot}"):
        plots.plot_deltas(comparison, plot)
    print_comparison(comparison)
    print(f"plot: {plot}")


def evaluate(args: Arguments) -> None:
    """Play the scenarios, print the report, write it to --output."""
    (scenarios, source), kept = choose_scenarios(args), None
    if args.model in POLICIES:
        if args.also_greedy:
            raise UsageError(f"--also-greedy: {args.model} is a scripted policy, nothing is sampled")
        report = evaluate_policy(
            args.model, scenarios, rubric=args.rubric or "card", seed=args.seed, env_factory=environment(args.env_url)
        )
    elif args.api_base is not None:
        report, kept = evaluate_served(args, scenarios)
    else:
        report = evaluate_sampled(args, scenarios)
    report["scenarios"] |= source
    if args.output:  # before it is printed: nobody may read that on (`| head`)
        with user_input(f"--output {args.output}"):
            run_folder.write_json(args.output, report)
    if kept is not None:
        finish(report, kept)
    print_report(report)
    if args.also_greedy:
        print_report(report["greedy"])
    if args.output:
        print(f"report: {args.output}")


def choose_scenarios(args: Arguments) -> tuple[list[Scenario], dict[str, str]]:
    """What to play, and the file it comes from (name and hash, for the report)."""
    path = args.scenarios or HELD_OUT_FILE
    with user_input("--scenarios" if args.scenarios else f"--limit {args.limit}"):
        if args.scenarios is None:
            limit = None if args.full else args.limit or EvalConfig.eval_limit
            scenarios = held_out(limit)
        else:
            scenarios = load_scenarios(path)
            if args.limit and args.limit > len(scenarios):
                raise UsageError(f"--limit {args.limit}: {path} holds {len(scenarios)} scenarios")
            scenarios = spread(scenarios, args.limit or len(scenarios))
        return scenarios, {"file": path.name, "file_sha256": file_hash(path)}


def evaluate_sampled(args: Arguments, scenarios: list[Scenario]) -> dict[str, Any]:
    """The report of a language model."""
    env_factory = environment(args.env_url, len(scenarios))
    length = args.max_completion_len or default_length(args.model)
    engine, chat = (own_engine if args.vllm_url is None else served_engine)(args, scenarios, length)
    with episode_progress(f"evaluating {args.model}", len(scenarios) * (1 + args.also_greedy)) as progress:
        report = evaluate_model(
            engine,
            chat,
            scenarios,
            model=args.model,
            rubric=args.rubric or "card",
            temperature=args.temperature,
            top_p=args.top_p,
            max_completion_len=length,
            seed=args.seed,
            also_greedy=args.also_greedy,
            progress=progress,
            env_factory=env_factory,
        )
    return report if args.vllm_url is None else report | {"server": cast("ServerEngine", engine).about}


def evaluate_served(args: Arguments, scenarios: list[Scenario]) -> tuple[dict[str, Any], Kept]:
    """The report of a model behind a chat endpoint, and what is kept of it until it is written."""
    from grpo.chat_api import ChatEndpoint
    from grpo.evaluate_api import Kept, evaluate_endpoint, settings_of

    assert args.api_base is not None
    concurrency = args.concurrency or 8
    endpoint = ChatEndpoint(args.api_base, args.model, args.api_tools, extra_fields(args), concurrency)
    length = args.max_completion_len or default_length(args.model)
    sampling = SamplingConfig(args.temperature, args.top_p, args.seed)
    path = None if args.output is None else partial_of(args.output)
    kept = Kept(path, settings_of(endpoint, scenarios, sampling, length))
    env_factory = environment(args.env_url, concurrency)
    total = len(scenarios) * (1 + args.also_greedy)
    there = kept.of([args.temperature] + [0.0] * args.also_greedy, len(scenarios))
    if there < total:
        endpoint.connect()
    if there:
        print(f"going on: {there} of {total} episodes were kept in {path}", flush=True)
    try:
        with episode_progress(f"evaluating {args.model}", total, there) as progress:
            report = evaluate_endpoint(
                endpoint,
                scenarios,
                kept,
                sampling,
                max_completion_len=length,
                rubric=args.rubric or "card",
                also_greedy=args.also_greedy,
                progress=progress,
                concurrency=concurrency,
                env_factory=env_factory,
            )
    except KeyboardInterrupt:
        print(kept.advice, file=sys.stderr)
        raise
    return report, kept


def finish(report: dict[str, Any], kept: Kept) -> None:
    """The report is written: what was kept may go, unless episodes were lost that can be asked for again."""
    from grpo.evaluate_api import lost_episodes

    lost, again = lost_episodes(report)
    if lost:
        reasons = ", ".join(f"{kind}: {number}" for kind, number in lost.items())
        print(f"warning: {counted(sum(lost.values()), 'episode')} lost, which counts as 0 ({reasons})", file=sys.stderr)
    if not again:
        kept.remove()
    elif kept.path is not None:
        print(f"{kept.advice}, with --overwrite", file=sys.stderr)


def own_engine(args: Arguments, scenarios: list[Scenario], length: int) -> tuple[Engine, ChatTokens]:
    """The model is loaded here."""
    from grpo.engines.choice import make_engine
    from grpo.model import load_policy
    from grpo.run import make_chat

    knobs = {"model": args.model, "device": args.device, "dtype": args.dtype, "engine": args.engine}
    settings = Config().with_values(knobs | {"max_completion_len": length})
    policy = load_policy(settings.model)
    chat = make_chat(policy)
    return make_engine(settings, policy, chat, scenarios, training=False), chat


def served_engine(args: Arguments, scenarios: list[Scenario], length: int) -> tuple[Engine, ChatTokens]:
    """A server has the model; only its tokenizer is loaded here."""
    from grpo.engines.server_engine import connect
    from grpo.model import load_tokenizer, source_of
    from grpo.run import chat_tokens

    chat = chat_tokens(args.model, *load_tokenizer(args.model))
    prompts = [chat.first_prompt(first_messages(scenario)) for scenario in scenarios]
    assert args.vllm_url is not None
    engine = connect(args.vllm_url, args.model, source_of(args.model), chat, prompts)
    print(engine.description, flush=True)
    return engine, chat


def default_length(model: str) -> int:
    """Episodes as long as in training, so that a run's own evaluation can be repeated here."""
    run = Path(model).parent
    if Path(model).name == "final" and (run / "config.json").is_file():
        return run_folder.stored_config(run).rollout.max_completion_len
    return RECIPES["tiny" if model == "tiny" else "clarify-run4"]["max_completion_len"]


if __name__ == "__main__":
    run_entry(main)
