"""The environment in TRL's `GRPOTrainer`, through its `environment_factory`: `python -m env.trl_environment`.

Needs `pip install -e ".[trl]"` (TRL 1.16), and with `--env-url` the extra `[server]` as well.

`ClarifyTools` is all that TRL wants: `reset` with a row of the data set, tools as methods, `get_reward`. TRL goes its
own way in two places. It parses the turn itself, so a turn without a call that it can read ends the episode there,
where `env.clarify` says what was wrong and goes on. And it does not know that an episode has ended: it samples one more
turn after the plan, which earns nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from env.clarify import ClarifyEnv, Env, EnvFactory
from env.prompts import first_messages
from env.rubrics import reward
from env.tools import format_call
from scenarios.generator import training_scenario

TINY = Path(__file__).parent.parent / "grpo" / "tiny"

# TRL knows the chat templates of published models. This one is for others that write calls as Qwen does, the bundled
# policy's among them: what lies between the tags is JSON, the rest up to the end of the turn is text.
QWEN_CALLS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


class ClarifyTools:
    """One episode after another, as TRL plays them. `make_env` may be `env.server.remote.RemoteEnvs(url)`."""

    def __init__(self, make_env: EnvFactory = ClarifyEnv, seed: int = 0):
        self._make_env, self._seed = make_env, seed
        self._env: Env | None = None

    def reset(self, index: int, **row: Any) -> None:
        """Start the episode of a row. Its prompt is in the row already."""
        self._env = self._make_env(training_scenario(self._seed, index))
        self._env.reset()

    def ask_question(self, question: str) -> str:
        """Ask the user one clarifying question.

        Args:
            question: The question.
        """
        return self._play("ask_question", {"question": question})

    def propose_plan(self, plan: dict) -> str:
        """Submit the plan, one JSON object of plan fields. Ends the task.

        Args:
            plan: The plan.
        """
        return self._play("propose_plan", {"plan": plan})

    def get_task_info(self) -> str:
        """Repeat the task and what is left of the budget."""
        return self._play("get_task_info", {})

    def get_reward(self) -> float:
        """The training reward of the episode, finished or not: without an accepted plan it is the penalty for that."""
        return reward(self._running().record)

    def _running(self) -> Env:
        if self._env is None:
            raise RuntimeError("the episode has not started: call reset() first")
        return self._env

    def _play(self, name: str, arguments: dict[str, Any]) -> str:
        env = self._running()
        if env.record.stop_reason is not None:
            return "The task is over."
        result = env.step(format_call(name, arguments))
        return result.reply or "The task is over."


def rows(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """The training scenarios of a seed as rows of a data set: the prompt, and the number that `reset` gets."""
    return [{"prompt": first_messages(training_scenario(seed, i)), "index": i} for i in range(number)]


def make_trainer(options: argparse.Namespace, folder: str) -> Any:
    """TRL's trainer with our environment."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import add_response_schema

    model = str(TINY) if options.model == "tiny" else options.model
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    try:
        tokenizer = add_response_schema(tokenizer)
    except ValueError:  # a chat template that TRL does not know
        tokenizer.response_template = QWEN_CALLS
    make_env: EnvFactory = ClarifyEnv
    if options.env_url:
        from env.server.remote import RemoteEnvs

        make_env = RemoteEnvs(options.env_url).check(options.episodes)
    settings = GRPOConfig(
        output_dir=folder,
        max_steps=options.steps,
        per_device_train_batch_size=options.episodes,
        num_generations=options.generations,
        max_completion_length=options.max_completion_len,
        max_tool_calling_iterations=12,  # no scenario allows more turns
        beta=0.2,
        use_bias_correction_kl=False,  # plain k3, as in the paper and here
        learning_rate=1e-4,
        shuffle_dataset=False,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list(rows(options.steps * options.episodes // options.generations)),
        processing_class=tokenizer,
        environment_factory=lambda: ClarifyTools(make_env),
    )


def main(args: Sequence[str] | None = None) -> int:
    """Trains a few steps and prints each one's reward. Returns the exit code: 0, or 2 for bad input."""
    options = _options(args)
    try:
        if options.episodes % options.generations or options.generations < 2 or options.steps < 1:
            raise ValueError("--episodes: must be a multiple of --generations, which is at least 2; --steps at least 1")
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(options, folder)
            trainer.train()
    except (ValueError, ModuleNotFoundError, OSError) as error:
        if isinstance(error, ModuleNotFoundError):
            package = (error.name or str(error)).split(".")[0]
            extra = "server" if package in ("openenv", "urllib3") else "trl"
            error = ValueError(f'the package {package} is missing: pip install -e ".[{extra}]"')
        print(f"env.trl_environment: {' '.join(str(error).split())[:300]}", file=sys.stderr)
        return 2
    for row in trainer.state.log_history:
        if "reward" in row:
            names = ("step", "reward", "reward_std", "kl", "tools/call_frequency", "completions/mean_length")
            print(json.dumps({name: row[name] for name in names if name in row}))
    return 0


def _options(args: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m env.trl_environment", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny", help="a folder or hub id; default: the bundled policy")
    parser.add_argument("--steps", type=int, default=3, help="default: 3")
    parser.add_argument("--episodes", type=int, default=12, help="a step's; default: 12")
    parser.add_argument("--generations", type=int, default=4, help="episodes of a scenario; default: 4")
    parser.add_argument("--max-completion-len", type=int, default=256, help="default: 256")
    parser.add_argument("--env-url", default="", help="play on this server (python -m env.server)")
    return parser.parse_args(args)


if __name__ == "__main__":
    sys.exit(main())
